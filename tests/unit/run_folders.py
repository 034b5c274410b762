"""Folders of runs that never ran, with every metric that the report draws."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from bapo_megatron.metrics import METRICS
from bapo_megatron.runtime.files import JsonlWriter

CONFIG = """
[run]
seed = 0
[model]
path = "demo"
[data]
source = "chains"
[loss]
name = "bapo"
kl_target = 0.05
[train]
num_steps = 50
[bapo]
rho0 = 0.45
[bapo.low]
start = 0.6
stop = 0.9
[bapo.high]
start = 1.2
stop = 3.0
"""


def step(number: int) -> dict[str, float]:
    """Return all metrics there are; values have arbitrary sizes but plausible units."""
    by_unit = {"share": 0.1, "tokens/s": 123_456.0, "tokens": 1000.0, "nats": 1e-3 * math.sin(number), "s": 0.2}
    row = {name: by_unit.get(metric.unit, 1.0) for name, metric in METRICS.items()}
    row |= {
        "reward/mean": number / 40,
        "loss/entropy": 0.5,
        "bapo/low": 0.6,
        "bapo/high": 1.2 + number / 1000,
        "bapo/positive_share": 0.44,
        "bapo/inert_share": 0.3,
        "bapo/saturated_share": 0.5,
        "loss/ratio_max": 20_000.0 + number,
        "loss/kl_reference": 0.04,
        "optimizer/grad_norm": 0.3,
        "optimizer/grad_norm_max": 300.0 * number,
        "staleness/mean": 1.5,
        "staleness/max": 4,
        "rollout/resumed_token_share": 0.2,
        "train/tokens": 1000,
        "mismatch/logprob_mean": 2e-7,
        "mismatch/logprob_p99": 1e-6,
        "mismatch/logprob_max": 4e-6 * number,
        "time/step_s": 2,
        "time/rollout_s": 1.2,
        "ledger/partial": 12_345.0,
    }
    if number % 5:
        row = {name: value for name, value in row.items() if not name.startswith("eval/")}
    return row | {"step": number}


def plain(number: int) -> dict[str, float]:
    """Return the metrics of the key facts, so that a test of the rest of the page does not draw all figures."""
    names = ("step", "reward/mean", "staleness/mean", "rollout/resumed_token_share", "train/tokens", "time/step_s")
    return {name: value for name, value in step(number).items() if name in names}


def steps(num_steps: int) -> list[dict[str, float]]:
    return [step(i) for i in range(1, num_steps + 1)]


def make_run(folder: Path, rows: Sequence[Mapping[str, float]], config: str = CONFIG) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(config)
    with contextlib.closing(JsonlWriter(folder / "metrics.jsonl")) as writer:
        for row in rows:
            writer.write(row)
    return folder
