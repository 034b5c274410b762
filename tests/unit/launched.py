"""A launcher whose trainer ranks train nothing: `python -m tests.unit.launched FOLDER KIND [KEY=VALUE ...]`.

A rank prints its progress to standard output, so that a test can send a signal at that moment. KIND:

    obedient    trains until it is asked to stop, then saves
    stuck       trains, is asked, and never ends its step
    starting    never begins to train
    loading     there is no rank yet: the configuration is being loaded
    done        trains to its end once its standard output has no reader
    dying       is killed before it trains, at every start
    faltering   saves one step and is killed, at every start, until all steps are done
    lost        is killed after the last step is saved
    refusing    leaves an error for the user
    halting     is killed as it trains, and never begins to when restarted
    doomed      trains until it is asked to stop, and is killed
    torn        is killed as it trains, and cannot read its checkpoint when restarted
    forsaken    is killed as it trains, when no engine is left
    crowded     is killed as it trains, when the launcher's disk is full
    aborting    leaves an error for the user, while another rank that lost its connection to it aborts
    failing     raises an error of the user's function
"""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from bapo_megatron import local
from bapo_megatron.config.load import load_config
from bapo_megatron.engines.supervisor import StartedEngines
from bapo_megatron.errors import UserError
from bapo_megatron.monitor.console import Console
from bapo_megatron.runs.folder import RunDir
from bapo_megatron.runtime.files import write_atomically
from bapo_megatron.trainer import STOPPED, redirect_output

_POLL_S = 0.01
SETTINGS = (
    "run.name=run",
    "rollout.engine=attach",
    'rollout.urls=["http://127.0.0.1:9"]',
    "parallel.tensor=1",
    "parallel.data=1",
    "train.num_steps=4",
)


class Forsaken(StartedEngines):
    """Engines that are all given up, although they have answered."""

    def urls_left(self) -> list[str]:
        return []


def launch(folder: Path, kind: str, settings: list[str]) -> int:
    start = subprocess.Popen
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def start_rank(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        if kind == "crowded":
            options["preexec_fn"] = partial(resource.setrlimit, resource.RLIMIT_FSIZE, limits)
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # no file of the launcher may grow any more
        run_path = command[command.index("--run-dir") + 1]
        return start([sys.executable, "-m", "tests.unit.launched", run_path, kind, "rank"], **options)

    names = {"DEVNULL": subprocess.DEVNULL, "TimeoutExpired": subprocess.TimeoutExpired}
    local.subprocess = SimpleNamespace(Popen=start_rank, **names)  # type: ignore[assignment]
    if kind == "loading":
        local.read_config = lambda *_: wait_to_be_killed()  # type: ignore[assignment]
    if kind == "forsaken":
        forsaken = Forsaken(["http://127.0.0.1:9"])
        local.started_engines = lambda *_: contextlib.nullcontext(forsaken)  # type: ignore[assignment]
    config = load_config(["demo"], [f"run.dir={folder}", *SETTINGS, *settings])
    try:
        return local.train_command([], 0.0) if kind == "loading" else local.train_locally(config)
    except UserError as error:  # as the command line does
        for line in str(error).split("\n"):
            print(f"bapo: {line}", file=sys.stderr)
        return 2


def be_rank(run_dir: RunDir, kind: str) -> int:
    rank = int(os.environ["RANK"])
    terminal = redirect_output(run_dir.log_path("trainer", rank))
    console = Console("auto", 4, stream=terminal)
    if kind == "starting" or (kind == "halting" and run_dir.attempt > 1):
        console.note("not training yet")
        wait_to_be_killed()
    if kind == "dying":
        be_killed()
    if kind == "aborting" and rank == 1:
        while not (run_dir.log_dir / "error-0.txt").exists():
            time.sleep(_POLL_S)
        os.abort()
    if kind in ("refusing", "aborting"):
        write_atomically(run_dir.log_dir / "error-0.txt", "no such judge")  # the launcher may end this rank immediately
        return 2
    if kind == "torn" and run_dir.attempt > 1:
        (run_dir.log_dir / "error-0.txt").write_text("checkpoint step-000001 is torn")
        return 2
    if kind == "failing":
        raise RuntimeError("no such\tthing")
    run_dir.mark_training(num_saved := run_dir.num_steps_saved())
    console.note("training")
    if kind in ("faltering", "lost"):
        step = 4 if kind == "lost" else num_saved + 1
        save(run_dir, step)
        if kind == "lost" or step < 4:
            be_killed()
        run_dir.mark("finished")
        return 0
    if kind == "done":
        while not terminal.problem:  # type: ignore[attr-defined]
            console.step({"step": 1.0})
            time.sleep(_POLL_S)
        save(run_dir, 4)
        run_dir.mark("finished")
        return 0
    if kind in ("torn", "forsaken", "crowded", "halting"):
        be_killed()
    while not run_dir.stop_file.exists():
        time.sleep(_POLL_S)
    if kind == "stuck":
        wait_to_be_killed()
    if kind == "doomed":
        be_killed()
    console.step({"step": 3.0})
    save(run_dir, 3)
    run_dir.mark("interrupted")
    return STOPPED


def save(run_dir: RunDir, step: int) -> None:
    with run_dir.metrics_path.open("a") as metrics:
        metrics.write(json.dumps({"step": step}) + "\n")
    name = f"step-{step:06d}"
    (run_dir.checkpoints_dir / name).mkdir()
    (run_dir.checkpoints_dir / name / "state.json").write_text("{}")
    (run_dir.checkpoints_dir / "latest").write_text(name)


def be_killed() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("this should have killed the process")


def wait_to_be_killed() -> NoReturn:
    print("waiting", flush=True)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    path, kind = Path(sys.argv[1]), sys.argv[2]
    rest = sys.argv[3:]
    sys.exit(be_rank(RunDir.attach(path), kind) if rest == ["rank"] else launch(path, kind, rest))
