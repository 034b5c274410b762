"""Short real runs that are made sick on purpose, one per alarm, with healthy runs for comparison.

    python -m tests.integration.sick_runs FOLDER        # a table in Markdown; exit code 1 if an alarm is wrong

Each run is a `bapo train` of the small model of the committed studies, on one core. Its status.json says which alarms
it raised, and at which step first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.hang import HANG_S, PATIENT

ROOT = Path(__file__).parents[2]
STUDY = ROOT / "studies" / "base.toml"
SMALL = (
    "rollout.prompts_per_step=8",
    "train.num_steps=5",
    "train.minibatches_per_step=2",
    "optimizer.warmup_updates=0",
    "eval.interval_steps=none",
)
COIN = "reward.kind=tests.integration.sick_runs:coin"
NUM_AT_A_TIME = 2


def coin(response: str) -> float:
    """Judge by chance: nothing can be learned, and groups have both rewards."""
    return float(zlib.crc32(response.encode()) & 1)


def rarely(response: str) -> float:
    """Judge one response in ten right, by chance."""
    return float(zlib.crc32(response.encode()) % 10 == 0)


def by_prompt(answer: object, response: str) -> float:
    """Judge the prompt, not the response: all responses of a group have one reward."""
    return float(zlib.crc32(str(answer).encode()) & 1)


def nothing(response: str) -> float:
    """Judge every response wrong."""
    return 0.0


def broken_loss(inputs: Any) -> Any:
    """Compute a loss whose gradient is not finite."""
    return inputs.plain(inputs.log_probs_R * float("nan"))


@dataclass(frozen=True)
class Case:
    """A run, and the alarm that it must raise; "" means a healthy run, which must raise none."""

    name: str
    alarm: str
    settings: tuple[str, ...]
    exit_code: int = 0


SICK = (
    Case("a judge that gives 0 to everything", "one reward", ("reward.kind=tests.integration.sick_runs:nothing",)),
    Case("a judge of the prompt", "equal rewards", ("reward.kind=tests.integration.sick_runs:by_prompt",)),
    Case(
        "filtered, and one reward",
        "no group kept",
        (
            "reward.kind=tests.integration.sick_runs:nothing",
            "rollout.keep_group=informative",
            "rollout.prompts_per_step=2",
        ),
        exit_code=2,
    ),
    Case("two tokens are too few", "all responses cut", (COIN, "rollout.max_response_tokens=2")),
    Case("a low limit", "most responses cut", (COIN, "rollout.max_response_tokens=14")),
    Case(
        "rewards by chance, a low rate",
        "flat pass rate",
        (
            "reward.kind=tests.integration.sick_runs:rarely",
            "eval.interval_steps=1",
            "eval.num_prompts=640",
            "optimizer.lr=1e-5",
            "train.num_steps=6",
            "rollout.max_response_tokens=6",
        ),
    ),
    Case("a temperature near 0", "no entropy", ("rollout.temperature=0.01",)),
    Case(
        "bounds without room, and many passes",
        "all tokens clipped",
        (
            COIN,
            "loss.name=gspo",
            "loss.clip_low=1",
            "loss.clip_high=1",
            "rollout.prompts_per_step=4",
            "train.minibatches_per_step=1",
            "train.epochs_per_step=8",
        ),
    ),
    Case("a learning rate of 1e-12", "policy stands still", ("optimizer.lr=1e-12",)),
    Case(
        "the same, on-policy",
        "policy stands still",
        ("optimizer.lr=1e-12", "train.minibatches_per_step=1", "loss.name=grpo", "loss.kl_coef=0.01"),
    ),
    Case("a limit under the rounding", "mismatch", ("monitor.mismatch_alarm=1e-9",)),
    Case("a limit under the usual norm", "gradient spikes", ("monitor.grad_norm_alarm=0.01",)),
    Case("a low target", "inert bounds", ("bapo.rho0=0.01",)),
    Case("a target out of reach", "saturated search", ("bapo.rho0=0.99",)),
    Case("a loss that is not finite", "skipped updates", ("loss.name=tests.integration.sick_runs:broken_loss",)),
)
HEALTHY = (
    Case("BAPO", "", ("train.num_steps=8",)),
    Case("GRPO, on-policy", "", ("train.num_steps=8", "loss.name=grpo", "train.minibatches_per_step=1")),
    Case("BAPO, partial rollouts", "", ("train.num_steps=8", "rollout.tokens_per_round=12")),
    Case(
        "GRPO, filtered, with a reference, evaluated",
        "",
        (
            "train.num_steps=8",
            "loss.name=grpo",
            "loss.kl_coef=0.01",
            "rollout.keep_group=informative",
            "eval.interval_steps=1",
            "eval.num_prompts=64",
        ),
    ),
)


@dataclass(frozen=True)
class Outcome:
    """What a run left behind."""

    case: Case
    exit_code: int
    status: dict[str, Any]
    seconds: float
    output: str

    @property
    def fault(self) -> str:
        """Return what is wrong; "" if the run raised its alarm, or is healthy and raised none."""
        raised = [alarm["name"] for alarm in self.status.get("alarms", ())]
        if self.exit_code != self.case.exit_code:
            return f"exit code {self.exit_code}: {self.output[-2000:]}"
        if self.case.alarm not in raised if self.case.alarm else raised:
            return f"raised {raised}, expected {self.case.alarm or 'no alarm'}"
        return ""

    def cells(self) -> tuple[str, ...]:
        """Return the run's row of the table."""
        alarms = [f"{alarm['name']} ({alarm['first_step']})" for alarm in self.status.get("alarms", ())]
        settings = ", ".join(
            f"`{setting.removeprefix('reward.kind=tests.integration.')}`" for setting in self.case.settings
        )
        return (
            self.case.name,
            settings,
            "; ".join(alarms) or "none",
            f"{self.status.get('step')}",
            self.fault or "as expected",
        )


def run(case: Case, folder: Path, name: str) -> Outcome:
    """Train, and read status.json."""
    settings = [f"run.dir={folder}", f"run.name={name}", "monitor.progress=lines", *PATIENT, *SMALL, *case.settings]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "bapo_megatron", "train", str(STUDY), *settings],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        timeout=HANG_S,
        check=False,
    )
    (folder / f"{name}.txt").write_text(done.stdout)
    path_of_status = folder / name / "status.json"
    status = json.loads(path_of_status.read_text()) if path_of_status.exists() else {}
    return Outcome(case, done.returncode, status, time.monotonic() - began_s, done.stdout)


def run_all(cases: Iterable[Case], folder: Path) -> list[Outcome]:
    """Run all cases, two at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(NUM_AT_A_TIME) as pool:
        running = [pool.submit(run, case, folder.absolute(), f"run-{i:02d}") for i, case in enumerate(cases)]
        return [one.result() for one in running]


def table(outcomes: Iterable[Outcome]) -> str:
    """Return the outcomes in Markdown."""
    heading = ("run", "settings", "alarms (first step)", "steps", "verdict")
    rows = [heading, ("---",) * len(heading), *(outcome.cells() for outcome in outcomes)]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    outcomes = run_all((*SICK, *HEALTHY), Path(sys.argv[1]))
    print(table(outcomes))
    print(f"\n{sum(outcome.seconds for outcome in outcomes):.0f} s of runs, {NUM_AT_A_TIME} at a time")
    return int(any(outcome.fault for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
