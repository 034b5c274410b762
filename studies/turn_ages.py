"""How old the tokens of each turn are when they are trained.

    python -m studies.turn_ages RUN ...

Reads samples.jsonl and metrics.jsonl of runs with monitor.samples_per_step = all samples. The age is the number of
updates between the weights that sampled a token and those at the beginning of the step that trains it.
"""

import argparse
from collections import defaultdict
from pathlib import Path

from bapo_megatron.runs.steps import read_metrics
from bapo_megatron.runtime.files import read_jsonl


def ages_by_turn(run: Path) -> dict[int, tuple[float, int]]:
    """Return the mean age of the policy's tokens and their number, by turn from 1."""
    versions = [0, *(int(row["version"]) for row in read_metrics(run / "metrics.jsonl"))]
    sums: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for record in read_jsonl(run / "samples.jsonl"):
        turn, was_given = 0, True
        for segment in record["segments"]:
            is_given = "by" in segment
            if not is_given:
                turn += was_given
                sums[turn][0] += (versions[record["step"] - 1] - segment["version"]) * segment["num_tokens"]
                sums[turn][1] += segment["num_tokens"]
            was_given = is_given
    return {turn: (total / num, num) for turn, (total, num) in sorted(sums.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    for run in parser.parse_args().runs:
        parts = (f"turn {turn}: {age:.2f} ({num} tokens)" for turn, (age, num) in ages_by_turn(run).items())
        print(f"{run}: {', '.join(parts)}")


if __name__ == "__main__":
    main()
