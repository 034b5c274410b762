"""Wrong configurations: each gets an answer, and no traceback.

python -m tests.unit.test_check_fuzz [NUMBER [SEED]]      the whole campaign, of which the test repeats the beginning

2026-11-26, 2,000 mutations of seed 0: 91 answers with exit code 0, 1,909 with 2, no traceback, at most
2.27 s of a core.
"""

import collections
import contextlib
import io
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from bapo_megatron import cli
from bapo_megatron.config.load import shipped_configs
from bapo_megatron.config.paths import schema
from tests.outcomes import deadline

NUM_MUTATIONS = 200  # the beginning of the campaign's 2,000
MAX_ANSWER_S = 10.0  # CPU time: sixty times the slowest
BASES = (
    ("demo",),
    ("demo", "algorithms/grpo"),
    ("demo", "algorithms/bapo", "algorithms/partial-rollout"),
    ("recipes/octothinker-3b-8k", "algorithms/grpo", "clusters/4x8-h100"),
    ("recipes/octothinker-3b-8k", "algorithms/bapo", "clusters/4x8-h100", "precision/fp8"),
    ("recipes/qwen3-32b-64k", "algorithms/bapo", "clusters/16x8-h200"),
    ("recipes/r1-distill-qwen-7b-8k", "algorithms/bapo", "clusters/1x8-h100"),
)
# fmt: off
NUMBERS = ("0", "1", "2", "3", "7", "8", "64", "-1", "0.5", "1.5", "1000000000", "99999999999999999999", "1e300",
           "1e308", "1e-300", "5e-324", "inf", "nan", "1e400", "9" * 5000, "0x10", "1_000")
TEXTS = ("", "x", "x" * 300, "a/" * 3000, "~nobody-here/x", "a\nb", "a\0b", "\x1b[31mred", "\u202e", "\ud800", "😀",
         "none", "None", "true", "demo", "bapo", "grpo", "sft", "gae", "jsonl", "sglang", "attach", "recorded", "no:pe",
         "json:dumps", "/dev/null", "/", ".", "bapo_megatron", "h100", "2024-01-01", "cosine", "hybrid")
SHAPES = ("[]", "[1, 2]", "[0.5, 0.6, 1e-300]", "{}", "{a = 1}", "{start = 0.6, stop = 0.9, step = 1e-10}", "[" * 3000,
          '["--partition=x"]', '["optimizer.lr=1e-6 bapo.rho0=7"]', '"', "{", '["http://[::1"]', "[[[1]]]")
# fmt: on


@dataclass
class Figures:
    """The answers to the mutations."""

    codes: collections.Counter[int] = field(default_factory=collections.Counter)
    tracebacks: list[str] = field(default_factory=list)
    control_characters: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    slowest: tuple[str, ...] = ()

    def __str__(self) -> str:
        codes = ", ".join(f"{number} x {code}" for code, number in sorted(self.codes.items()))
        return (
            f"{self.codes.total()} answers (exit code: {codes}), {len(self.tracebacks)} tracebacks, slowest "
            f"{self.slowest_s:.2f} s of a core: {' '.join(self.slowest)[:200]!r}"
        )


def mutation(rng: random.Random) -> tuple[str, ...]:
    """Return the arguments of `bapo check` or `bapo plan`: a shipped combination with one to four wrong settings."""
    settings = [".".join(path) for path in schema()]
    overrides = []
    for _ in range(rng.choice((1, 1, 2, 4))):
        name = rng.choice(settings)
        if rng.random() < 0.1:
            at = rng.randrange(len(name))
            name = name[:at] + rng.choice(("", "x", ".", "\n", "é")) + name[at + 1 :]
        kind = rng.choices((NUMBERS, TEXTS, SHAPES), (5, 4, 2))[0]
        overrides.append(f"{name}={rng.choice(kind)}")
    if rng.random() < 0.05:
        overrides.append(rng.choice(("no-equals", "=", "a" * 400, "demo\n", "\0", "/", "../x")))
    return (rng.choice(("check", "check", "plan")), *rng.choice(BASES), *overrides)


def fuzz(number: int, seed: int) -> Figures:
    """Answer mutations in this process."""
    rng, figures = random.Random(f"check/{seed}"), Figures()
    for _ in range(number):
        arguments = mutation(rng)
        began_s = time.process_time()  # CPU time, on which a busy machine has no influence
        code, text = answer(arguments)
        took_s = time.process_time() - began_s
        figures.codes[code] += 1
        if took_s > figures.slowest_s:
            figures.slowest_s, figures.slowest = took_s, arguments
        if code not in (0, 2):
            figures.tracebacks.append(f"{arguments!r}\n{text}")
        if any(not c.isprintable() and c != "\n" for c in text):
            figures.control_characters.append(f"{arguments!r}\n{text!r}")
    return figures


def answer(arguments: Sequence[str]) -> tuple[int, str]:
    """Return the exit code and the output; -1 and the traceback of anything that escapes or takes too long."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), deadline(MAX_ANSWER_S, signal.ITIMER_PROF):
        try:
            return cli.main(list(arguments)), out.getvalue()
        except BaseException:
            return -1, traceback.format_exc()


@pytest.mark.slow
def test_every_mutation_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    figures = fuzz(NUM_MUTATIONS, seed=0)
    print(f"\n{figures}")
    assert figures.tracebacks == []
    assert figures.control_characters == []
    assert set(figures.codes) == {0, 2}


def test_the_bases_are_shipped() -> None:
    assert {name for base in BASES for name in base} <= set(shipped_configs())


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    figures = fuzz(int(sys.argv[1]) if len(sys.argv) > 1 else 2000, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    print(figures, *figures.tracebacks[:10], *figures.control_characters[:5], sep="\n")
