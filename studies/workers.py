"""Work of a study's forked processes: serving an engine, or training with one rank.

The fork server (pool.py) imports this once, with everything that both need, so that a run starts without imports.
"""

import importlib
import os
import signal
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import bapo_megatron.engines.embedded.server
import bapo_megatron.monitor.record
import bapo_megatron.runtime.ranks
import bapo_megatron.train  # noqa: F401  `serve` and run_rank import these late
from bapo_megatron.engines.key import KEY_VARIABLE
from bapo_megatron.runs.folder import RunDir
from bapo_megatron.trainer import redirect_output, run_rank


def serve(lifeline: Connection, module: str, arguments: list[str], log: Path, key: str) -> None:
    """Run the engine whose `main` is in this module until SIGTERM."""
    _end_with(lifeline)
    os.environ[KEY_VARIABLE] = key
    redirect_output(log)
    importlib.import_module(module).main(arguments)


def train(lifeline: Connection, run_path: Path, url: str, key: str) -> None:
    """Run the training loop of `bapo train` as its only rank, in a run directory that the parent opened.

    The process ends with the exit code of `run_rank`.
    """
    _end_with(lifeline)
    os.environ[KEY_VARIABLE] = key
    run_dir = RunDir.attach(run_path)
    redirect_output(run_dir.log_path("trainer", 0))
    os._exit(run_rank(run_dir, [url]))


def _end_with(lifeline: Connection) -> None:
    """End this process and its children once the study's process, which holds the other end of the pipe, is gone.

    The parent of this process is the fork server, which lives as long as any of its children.
    """
    os.setpgid(0, 0)

    def watch() -> None:
        lifeline.poll(None)  # nothing is ever sent
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="end-with-study", daemon=True).start()
