"""A launcher whose trainer ranks train nothing: `python -m tests.unit.launched FOLDER KIND`.

A rank says on standard output where it is, so that a test can send a signal at that moment. KIND:

    obedient    trains until it is asked to stop, then saves
    stuck       trains, is asked, and never ends its step
    starting    never begins to train
    loading     there is no rank yet: the configuration is being loaded
    done        trains to its end once its standard output has no reader
    failing     raises an error of the user's function
"""

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from bapo_megatron import local
from bapo_megatron.config.load import load_config
from bapo_megatron.monitor.console import Console
from bapo_megatron.monitor.rundir import RunDir
from bapo_megatron.worker import STOPPED, redirect_output

_POLL_S = 0.01
SETTINGS = (
    "run.name=run",
    "rollout.engine=attach",
    'rollout.urls=["http://127.0.0.1:9"]',
    "parallel.tensor=1",
    "parallel.data=1",
    "train.num_steps=4",
    "monitor.report=false",
)


def launch(folder: Path, kind: str) -> int:
    start = subprocess.Popen

    def start_rank(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        run_path = command[command.index("--run-dir") + 1]
        return start([sys.executable, "-m", "tests.unit.launched", run_path, kind, "rank"], **options)

    names = {"DEVNULL": subprocess.DEVNULL, "TimeoutExpired": subprocess.TimeoutExpired}
    local.subprocess = SimpleNamespace(Popen=start_rank, **names)  # type: ignore[assignment]
    config = load_config(["demo"], [f"run.dir={folder}", *SETTINGS])
    return local._run(wait_to_be_killed, lambda _: config, 0.0) if kind == "loading" else local.run(config)


def be_rank(run_dir: RunDir, kind: str) -> int:
    terminal = redirect_output(run_dir.log_path("trainer", 0))
    console = Console("auto", 4, stream=terminal)
    if kind == "starting":
        console.note("not training yet")
        wait_to_be_killed()
    if kind == "failing":
        raise RuntimeError("no such\tthing")
    run_dir.mark("training")
    console.note("training")
    if kind == "done":
        while not terminal.problem:  # type: ignore[attr-defined]
            console.step({"step": 1.0})
            time.sleep(_POLL_S)
        save(run_dir, 4)
        run_dir.mark("finished")
        return 0
    while not run_dir.stop_file.exists():
        time.sleep(_POLL_S)
    if kind == "stuck":
        wait_to_be_killed()
    console.step({"step": 3.0})
    save(run_dir, 3)
    run_dir.mark("interrupted")
    return STOPPED


def save(run_dir: RunDir, step: int) -> None:
    name = f"step-{step:06d}"
    (run_dir.checkpoints_dir / name).mkdir()
    (run_dir.checkpoints_dir / name / "state.json").write_text("{}")
    (run_dir.checkpoints_dir / "latest").write_text(name)


def wait_to_be_killed() -> NoReturn:
    print("waiting", flush=True)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    path, kind = Path(sys.argv[1]), sys.argv[2]
    sys.exit(be_rank(RunDir.attach(path), kind) if len(sys.argv) > 3 else launch(path, kind))
