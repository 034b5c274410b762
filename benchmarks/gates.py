"""Regression gates: counts and the histories of seeded runs against the committed baseline (benchmarks/baseline.json).

    python -m benchmarks.gates [counts|history]             exit code 1 and a line for each regression
    python -m benchmarks.gates ratios                       a report of speed next to the baseline, without a verdict
    python -m benchmarks.gates [WHAT] --renew               measure again and write a new baseline

A count of FLOPs or bytes depends only on the code; it passes if it reaches 0.99 times the baseline. A ratio of CPU
seconds is measured as in the benchmarks: ways take turns, and the median over the turns counts. It depends on the
machine and on what else runs there, so it cannot fail.

The histories come from the demos below, with one thread. Other CPUs add in another order, which changes the values by
at most 4e-6 (measured with AVX-512, AVX2, SSE and MKL's compatible kernels).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bapo_megatron.errors import plural

BASELINE = Path(__file__).with_name("baseline.json")
RENEW = "python -m benchmarks.gates --renew"
LEAST = 0.99  # share of the baseline's count
NUM_TURNS = 3
NUM_MEASUREMENTS = 5  # for each renewal
HISTORIES = {"demo": 10, "tool_demo": 5, "moe_demo": 5, "hybrid_demo": 3}  # configuration -> steps
TOLERANCE = 1e-4
METRICS = ("reward/mean", "loss/policy", "loss/entropy", "bapo/low", "bapo/high", "optimizer/grad_norm")

History = list[dict[str, float]]


# Each function returns "other / ours". It imports its script late, because that imports Megatron-Core.


def replies() -> float:
    from functools import partial

    from benchmarks import replies as script
    from benchmarks.side_by_side import same, take_turns

    requests, raw = script.call(16, 8192)
    ways = {"ours": partial(script.ours, raw, requests), script.PLAIN: partial(script.plain, raw, requests)}
    return take_turns(ways, NUM_TURNS, agree=same()).row("", script.PLAIN).ratio


def clip_bounds() -> float:
    from benchmarks.clip_bounds import LITERAL, SATURATES, search_turns

    return search_turns(LITERAL, SATURATES, 100_000, NUM_TURNS).row("", LITERAL).ratio


def logprobs_time() -> float:
    from benchmarks.logprobs import HUGGING_FACE, OURS, time_turns

    return time_turns([OURS, HUGGING_FACE], 512, 32_000, NUM_TURNS).row("", HUGGING_FACE).ratio


def logprobs_memory() -> float:
    from benchmarks.logprobs import HUGGING_FACE, OURS, WAYS, inputs, run
    from benchmarks.side_by_side import peak_allocated

    tensors = inputs(1024, 64_000)

    def peak(way: str) -> int:
        tensors[0].grad = tensors[1].grad = None
        return peak_allocated(lambda: run(WAYS[way], *tensors))

    return peak(HUGGING_FACE) / peak(OURS)


def packing() -> float:
    from benchmarks.packing import PADDED, padding_turns
    from benchmarks.train_step import Case

    return padding_turns(Case("", "demo", 64, 12, (2, 116), 8192), NUM_TURNS).row("", PADDED).ratio


def balance() -> float:
    from benchmarks.packing import BY_TOKENS, MODEL, balanced

    return balanced(MODEL, 20).row("", BY_TOKENS).ratio


RATIOS: dict[str, Callable[[], float]] = {  # ratios of CPU seconds
    "replies, against json and loops over tokens": replies,
    "search for bounds, against the literal loop": clip_bounds,
    "log-probs, time against whole logits": logprobs_time,
    "packing, time against padding": packing,
}
COUNTS: dict[str, Callable[[], float]] = {
    "log-probs, allocated bytes against whole logits": logprobs_memory,
    "balance of data ranks, against fewest tokens": balance,
}


def check_count(name: str, found: float, baseline: float) -> str | None:
    """Return a complaint if a count does not reach the baseline."""
    if found >= LEAST * baseline:
        return None
    return f"{name}: {found:.3f}, but the baseline is {baseline:.3f}; if that is intended: {RENEW}"


def run_history(name: str) -> History:
    """Run a demo with its seed; return, by step, the metrics to compare."""
    from tests.hang import HANG_S, PATIENT

    with tempfile.TemporaryDirectory(prefix="history-") as folder:
        command = [sys.executable, "-m", "bapo_megatron", "train", name, "run.name=history", f"run.dir={folder}"]
        judge = "environment." if name == "tool_demo" else "reward."
        command += [f"train.num_steps={HISTORIES[name]}", *(text.replace("reward.", judge) for text in PATIENT)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=HANG_S)
        lines = (Path(folder) / "history" / "metrics.jsonl").read_text().splitlines()
    return [{metric: json.loads(line)[metric] for metric in METRICS} for line in lines]


def check_history(name: str, history: History, baseline: History) -> list[str]:
    """Return a complaint for the first step that differs."""
    if len(history) != len(baseline):
        return [f"history of {name}: {plural(len(history), 'step')} instead of {len(baseline)}"]
    for step, (found, expected) in enumerate(zip(history, baseline, strict=True), 1):
        differences = [
            f"{metric} is {found[metric]:.8g} instead of {value:.8g}"
            for metric, value in expected.items()
            if not abs(found[metric] - value) <= TOLERANCE * abs(value)
        ]
        if differences:
            return [f"history of {name}: step {step}: {', '.join(differences)}; if that is intended: {RENEW}"]
    return []


def measure_ratios() -> dict[str, float]:
    """Measure each ratio several times; return the median."""
    return {
        name: round(statistics.median(measure() for _ in range(NUM_MEASUREMENTS)), 3)
        for name, measure in RATIOS.items()
    }


def renew(what: str) -> None:
    """Measure all parts, or one, and write the baseline."""
    from benchmarks.__main__ import machine, versions

    baseline = json.loads(BASELINE.read_text())
    if what in ("all", "ratios"):
        baseline |= {"machine": machine(), "versions": versions(), "ratios": measure_ratios()}
    if what in ("all", "counts"):
        baseline["counts"] = {name: round(count(), 3) for name, count in COUNTS.items()}
    if what in ("all", "history"):
        baseline["history"] = {name: run_history(name) for name in HISTORIES}
    BASELINE.write_text(json.dumps(baseline, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the gates and return the exit code, which is 1 after a regression."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("all", "ratios", "counts", "history"), default="all")
    parser.add_argument("--renew", action="store_true", help="write the baseline")
    args = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
    if args.renew:
        renew(args.what)
        return 0
    baseline: dict[str, Any] = json.loads(BASELINE.read_text())
    complaints: list[str] = []
    if args.what in ("all", "ratios"):
        for name, measure in RATIOS.items():
            print(f"{name}: {measure():.2f}, baseline {baseline['ratios'][name]:.2f}", flush=True)
    if args.what in ("all", "counts"):
        checked = [check_count(name, count(), baseline["counts"][name]) for name, count in COUNTS.items()]
        complaints += [complaint for complaint in checked if complaint]
    if args.what in ("all", "history"):
        for name in HISTORIES:
            complaints += check_history(name, run_history(name), baseline["history"][name])
    print(*complaints, sep="\n", file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
