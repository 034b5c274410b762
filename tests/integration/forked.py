"""Runs whose ranks and engine are forked from a process that has done the imports, for tests of what a run computes.

What starts them for a user (`bapo train`, the supervisor) takes most of a short run's time. It has its own tests:
test_train.py, test_supervisor.py.
"""

from pathlib import Path

from bapo_megatron.config.load import load_config
from bapo_megatron.config.schema import Config
from bapo_megatron.runs.steps import read_metrics
from tests.distributed import HANG_S
from tests.hang import PATIENT
from tests.integration.killable import Attempt, Engine

SMALL = (
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "rollout.groups_in_flight=6",
    "train.minibatches_per_step=2",
    "monitor.progress=lines",
    *PATIENT,
)


def train(engine: Engine, folder: Path, name: str, *settings: str) -> list[dict[str, float]]:
    """Return the metrics of a run of the demo, from its start or its last checkpoint to its end."""
    with Attempt(_config(folder, name, settings), engine) as attempt:
        attempt.finish()
        return read_metrics(attempt.run_dir / "metrics.jsonl")


def refusal(engine: Engine, folder: Path, name: str, *settings: str) -> str:
    """Return what a run that cannot continue tells the user."""
    with Attempt(_config(folder, name, settings), engine) as attempt:
        attempt.ranks[0].join(HANG_S)
        assert attempt.ranks[0].exitcode == 2, attempt.complaints()
        return attempt.errors()


def _config(folder: Path, name: str, settings: tuple[str, ...]) -> Config:
    return load_config(["demo"], [f"run.dir={folder}", f"run.name={name}", *SMALL, *settings])
