"""One trainer rank: `python -m bapo_megatron.trainer` (started by local.py), or `run_rank` (called by slurm/node.py).

With --standby, it first imports everything and waits for its `Orders` (runtime/standby.py).
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from bapo_megatron.engines.key import KEY_VARIABLE
from bapo_megatron.errors import UserError, escaped
from bapo_megatron.runs.folder import RunDir
from bapo_megatron.runtime import raise_open_files, starting
from bapo_megatron.runtime.environment import bind_to_gpu, has_gpu_driver, trainer_variables
from bapo_megatron.runtime.heartbeat import HEARTBEAT, TRAINER
from bapo_megatron.runtime.output import ESCAPING, lasting, show_traceback
from bapo_megatron.runtime.standby import Orders, silent

if TYPE_CHECKING:
    from bapo_megatron.config.schema import Config

STOPPED = 75  # exit code of a run that stopped early and can resume (EX_TEMPFAIL)

LAUNCHER_VARIABLE = "BAPO_LAUNCHER"  # the launcher's process id
_PARENT_POLL_S = 0.5


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the training loop on this rank, as `run_rank` does."""
    parser = argparse.ArgumentParser(prog="bapo_megatron.trainer")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--engine-url", action="append", default=[])
    parser.add_argument("--standby", action="store_true")
    options = parser.parse_args(arguments)
    urls = options.engine_url
    if options.standby:
        orders = _stand_by(RunDir.attach(options.run_dir))
        if orders is None:
            return 0
        os.environ |= orders.environment
        urls = orders.urls
        if orders.key is not None:
            os.environ[KEY_VARIABLE] = orders.key  # /proc shows the environment that a process began with, not this
    run_dir = RunDir.attach(options.run_dir)  # an attempt may have begun meanwhile
    return run_rank(run_dir, urls, run_dir.stop_file)


def _stand_by(run_dir: RunDir) -> Orders | None:
    """Import what a rank needs, and wait for its orders; return None if no orders will come."""
    with silent():
        from bapo_megatron.config.load import load_config

        _set_variables(load_config([run_dir.config_path], []))
        with starting():
            import bapo_megatron.train  # noqa: F401
    return Orders.wait()


def run_rank(run_dir: RunDir, urls: list[str], stop_file: Path | None = None) -> int:
    """Run the training loop as the rank in the environment (RANK).

    Output goes to the rank's own log file; rank 0 keeps the terminal for the step lines. An error the user can fix
    goes to `error-<rank>.txt`, which the launcher shows.

    Returns:
        0 on success, 2 for such an error, or STOPPED if `stop_file` ended the run early.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # end immediately, also inside a collective; checkpoints are atomic
    _exit_with_parent()
    raise_open_files()
    rank = int(os.environ.get("RANK", "0"))
    terminal = redirect_output(run_dir.log_path("trainer", rank))
    try:
        return train_on_rank(run_dir, urls, rank, terminal if rank == 0 else None, stop_file)
    except UserError as error:
        logging.exception("stopped")
        run_dir.mark("failed", rank)
        try:
            (run_dir.log_dir / f"error-{rank}.txt").write_text(str(error))
        except OSError:  # the disk may be full
            print(f"bapo: {error}", file=terminal)
            _discard_output()
        return 2


def train_on_rank(run_dir: RunDir, urls: list[str], rank: int, terminal: TextIO | None, stop_file: Path | None) -> int:
    """Import the heavy modules (their output belongs in the log), and train."""
    from bapo_megatron.config.load import load_config
    from bapo_megatron.monitor.console import Console

    config = load_config([run_dir.config_path], [])
    _set_variables(config)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if config.parallel.bind_cpus and has_gpu_driver():
        print(f"runs on {bind_to_gpu(local_rank)}", flush=True)
    with contextlib.ExitStack() as stack:
        HEARTBEAT.beat(TRAINER, "importing torch and Megatron-Core")
        console = None
        if terminal is not None:
            console = stack.enter_context(
                Console(config.monitor.progress, config.train.num_steps, stream=terminal, heartbeat=HEARTBEAT)
            )

        with starting():
            from bapo_megatron.learner.parallel import stop_processes, sum_in_fixed_order
            from bapo_megatron.machine.shared_gpu import limit_rank
            from bapo_megatron.monitor.record import Recorder, SilentRecorder
            from bapo_megatron.monitor.stall import StallWatchdog
            from bapo_megatron.preflight.oom import explaining_out_of_memory
            from bapo_megatron.resolved import resolve_here
            from bapo_megatron.runtime.ranks import StopFile
            from bapo_megatron.train import train

        if config.run.deterministic:
            sum_in_fixed_order()
        recorder = Recorder(config, run_dir, console) if console else SilentRecorder()
        stop = StopFile(stop_file)
        run = resolve_here(config)
        limit_rank(run, local_rank)
        watchdog = StallWatchdog.of(config, rank, run_dir.log_dir, HEARTBEAT, recorder.warn if console else None)
        with watchdog, explaining_out_of_memory(run, rank, HEARTBEAT):
            try:
                train(run, urls, run_dir, recorder, stop)
            except UserError as error:
                recorder.fail(error)
                raise
        if rank == 0:
            run_dir.mark("interrupted" if stop.has_ended_early else "finished")
        recorder.end()
        stop_processes()
    return STOPPED if stop.has_ended_early else 0


def _set_variables(config: Config) -> None:
    """Set the environment of a rank, before it imports torch."""
    os.environ |= trainer_variables(
        config.sglang.extra, deterministic=config.run.deterministic, run_dir=Path(config.run.dir)
    )


def _exit_with_parent() -> None:
    """Kill this rank and its judge processes once the launcher is gone, even by SIGKILL."""
    launcher = int(os.environ.pop(LAUNCHER_VARIABLE, os.getppid()))  # it may be gone already

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(_PARENT_POLL_S)
        if os.getpgrp() == os.getpid():  # local.py gives every rank its own session
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="exit-with-parent", daemon=True).start()


def redirect_output(log: Path) -> TextIO:
    """Redirect this process's standard output and error to `log`; return the old standard output."""
    terminal = lasting(os.fdopen(os.dup(1), "w", buffering=1, errors=ESCAPING))
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for target in (1, 2):
        os.dup2(descriptor, target)
    os.close(descriptor)
    handler = logging.StreamHandler()
    handler.setFormatter(EscapingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    sys.excepthook = show_traceback
    return terminal


class EscapingFormatter(logging.Formatter):
    """A formatter that escapes control characters: messages may quote an engine or a judged program."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = escaped(record.message)
        return super().formatMessage(record)

    def formatException(self, info: Any) -> str:
        return "\n".join(map(escaped, super().formatException(info).split("\n")))


def _discard_output() -> None:
    """Discard output that the log cannot take: a failing flush at exit would change the exit code."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for target in (1, 2):
        os.dup2(nowhere, target)


def leave(code: int) -> NoReturn:
    """End the process without Python's shutdown, which a daemon thread inside torch can crash."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a full disk is not this rank's failure
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
