"""An update on 1, 2 and 4 data ranks, and an update with the same number of tokens in longer sequences.

    python -m benchmarks.scaling [--quick]

Ranks: the same BAPO update of a model of 256 x 4 layers, shared by ranks with one thread each on this machine. Each
number of ranks has its own group of processes, and all must have the same loss. More ranks than cores gain nothing.
Times are seconds.

Length: a supervised update in longer sequences, with as many tokens as in sequences of 128; the cost of attention grows
with the length. Each token follows different ones, so losses differ. Times are CPU seconds.
"""

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.resolved import resolve
from benchmarks.ranks import Ranks
from benchmarks.side_by_side import Rows, main, same, take_turns
from benchmarks.train_step import Case, make_config, ours, save_larger_model, update_of


def on_ranks(folder: Path, case: Case, num_ranks: int) -> Callable[[], float]:
    return ours(make_config("bapo", case, num_ranks=num_ranks), folder, case)


def rank_rows(folder: Path, num_sequences: int, num_turns: int) -> Rows:
    case = Case("", "larger", num_sequences, 24, (40, 200), 4096)
    with ExitStack() as stack:
        ways = {
            title: stack.enter_context(Ranks(num_ranks, on_ranks, folder, case, num_ranks))
            for title, num_ranks in (("2 ranks", 2), ("4 ranks", 4), ("1 rank", 1))
        }
        turns = take_turns(ways, num_turns, agree=same(1e-4), clock=time.perf_counter)
    for title in ("2 ranks", "4 ranks"):
        yield turns.row(f"BAPO update of {num_sequences} sequences, {title}", "1 rank", ours=title, unit="s")


def length_rows(folder: Path, num_tokens: int, num_turns: int) -> Rows:
    titles = {length: f"sequences of {length}" for length in (128, 512, 2048)}
    cases = {
        title: Case("", "larger", num_tokens // length, 16, (length - 16, length - 16), num_tokens)
        for length, title in titles.items()
    }
    learner = MegatronLearner(resolve(make_config("sft", cases[titles[128]]), folder))
    ways = {title: update_of(learner, case.batch(learner.shape.vocab_size)) for title, case in cases.items()}
    turns = take_turns(ways, num_turns)
    for length in (512, 2048):
        yield turns.row(f"supervised update of {num_tokens} tokens, {titles[length]}", titles[128], ours=titles[length])


def rows(quick: bool) -> Rows:
    """Compare numbers of ranks, then lengths."""
    with tempfile.TemporaryDirectory(prefix="scaling-") as name:
        folder = Path(name)
        save_larger_model(folder)
        yield from rank_rows(folder, num_sequences=8 if quick else 32, num_turns=3 if quick else 9)
        yield from length_rows(folder, num_tokens=2048 if quick else 8192, num_turns=3 if quick else 9)


if __name__ == "__main__":
    main(__doc__, rows)
