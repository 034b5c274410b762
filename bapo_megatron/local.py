"""Runs on one machine: start the engines and trainer ranks, and stop them at the end.

bapo train -> run() -> engine processes (if the run starts any), under a supervisor
                    -> one process for each trainer rank: worker.py

The first Ctrl-C, SIGTERM or SIGHUP asks the ranks to save and stop at the end of their step, the second ends them
without waiting. Nothing here listens on any address but loopback.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from bapo_megatron.assets import resolve_model_path
from bapo_megatron.config.load import read_config, split_arguments
from bapo_megatron.config.plan import divide_cores, num_ranks
from bapo_megatron.config.schema import Config
from bapo_megatron.engines.key import KEY_VARIABLE, new_key
from bapo_megatron.engines.processes import LOOPBACK, EngineShare, loopback_variables, reserved_ports
from bapo_megatron.engines.start import started_engines
from bapo_megatron.engines.supervisor import StartedEngines
from bapo_megatron.errors import UserError, escaped
from bapo_megatron.monitor.console import Screen, header, shown_path
from bapo_megatron.monitor.rundir import RunDir, with_pinned_models
from bapo_megatron.monitor.stall import hanging_ranks, last_words
from bapo_megatron.monitor.summary import duration
from bapo_megatron.runtime import num_cores
from bapo_megatron.worker import STOPPED

_POLL_S = 0.1
_END_TIMEOUT_S = 30.0  # from SIGTERM to SIGKILL


class _Stop:
    """Ctrl-C, SIGTERM and SIGHUP. A context manager around a run, with handlers only in the main thread.

    The first one during training touches the run's stop file, which the ranks look for at the end of each step. A
    second one, one at another time, and SIGQUIT raise KeyboardInterrupt; all later ones are ignored, because the
    processes are being ended. A signal that was ignored at the start stays so: SIGHUP under nohup, SIGINT behind "&".

    One wish to stop may send several signals: a terminal that closes SIGHUP from the shell and from the system,
    `timeout` SIGTERM to the process and to its group. So a second one counts after the first has been told, and SIGHUP
    never does.
    """

    def __init__(self) -> None:
        self.run_dir: RunDir | None = None  # once there is one
        self._number = signal.SIGINT  # of the signal that came first
        self._was_told = True
        self._before: dict[int, Any] = {}

    @property
    def code(self) -> int:
        """Exit code of the run once a signal, or somebody's stop file, has stopped it."""
        return 128 + self._number

    def tell(self, screen: Screen) -> None:
        """Tell about the first signal, once. Not for the handler: it may have interrupted another message."""
        if not self._was_told:
            self._was_told = True
            start = "\n" if screen.is_terminal and self._number == signal.SIGINT else ""  # "^C" stands there
            what = "" if self._number == signal.SIGINT else f"{signal.Signals(self._number).name}: "
            again = "Ctrl-C again" if self._number == signal.SIGINT else "a second one"
            screen.note(f"{start}{what}saving at the end of this step, then stopping; {again} ends at once", "bold")

    def __enter__(self) -> _Stop:
        if threading.current_thread() is threading.main_thread():  # Python has handlers only there
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        run_dir = self.run_dir
        is_stopping = run_dir is not None and run_dir.stop_file.exists()
        if is_stopping and number != signal.SIGQUIT and (number == signal.SIGHUP or not self._was_told):
            return
        if not is_stopping:
            self._number = signal.Signals(number)
        if number != signal.SIGQUIT and run_dir and run_dir.state == "training" and not is_stopping:
            with contextlib.suppress(OSError):  # a full disk: nothing could be saved either
                run_dir.stop_file.touch()
                self._was_told = False
                return
        for each in self._before:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt


def train(arguments: Sequence[str], began_s: float) -> int:
    """Load a configuration, show what will run, check it, and train, as `run` does.

    Args:
        arguments: configurations and settings of the command line.
        began_s: start of the command on the monotonic clock.
    """

    def load() -> Config:
        reading = read_config(*split_arguments(arguments))
        return checked(reading.config) if reading.violations else reading.config  # the former raises

    def checked(config: Config) -> Config:
        Screen(sys.stdout).note("checking the configuration", "dim")
        from bapo_megatron.preflight.check import load_checked

        return load_checked(arguments)

    return _run(load, checked, began_s)


def run(config: Config) -> int:
    """Train on this machine until the configured number of steps.

    Returns:
        0, 128 + the number of the signal that stopped the run, or the exit code of the trainer rank that failed first
        (2 for an error the user can fix).
    """
    return _run(lambda: config, lambda config: config, time.monotonic())


def _run(load: Callable[[], Config], check: Callable[[Config], Config], began_s: float) -> int:
    with _Stop() as stop:
        try:
            config = load()
            return _train_and_report(check(config), stop, began_s) if _announce(config) else 0
        except KeyboardInterrupt:  # before there is a run
            print("bapo: interrupted", file=sys.stderr)
            return stop.code


def _announce(config: Config) -> bool:
    """Show what will run, and return True; or say that the run is finished.

    Raises:
        ConfigError: see `RunDir.open`.
        OSError: nothing can be shown, because of a full disk for instance. Later, that ends no run.
    """
    coming = RunDir.preview(config)
    screen = Screen(sys.stdout, is_lasting=False)
    if not coming.is_finished:
        with contextlib.suppress(BrokenPipeError):  # `| head` may have seen enough already
            screen.facts(header(config, coming))
        return True
    num_steps = config.train.num_steps
    screen.facts(
        {
            "finished": f"{shown_path(coming.path)}: all {num_steps} steps are done",
            "report": shown_path(coming.path / "report.html"),
            "go on": f"{_resume_command(coming)} train.num_steps={2 * num_steps}",
        }
    )
    return False


def _train_and_report(config: Config, stop: _Stop, began_s: float) -> int:
    config = with_pinned_models(config)
    model_path = resolve_model_path(config.model.path)
    screen = Screen(sys.stdout, config.monitor.progress)
    with RunDir.open(config) as run_dir:
        stop.run_dir = run_dir
        is_complete = False  # nothing was cut off by a second signal
        try:
            count = num_ranks(config)
            share = EngineShare(config.rollout.num_servers, first_gpu=count, num_ranks=count)
            with started_engines(config, model_path, run_dir.log_dir, share, key := new_key()) as engines:
                code = _train(config, run_dir, engines, key, stop, screen)
            if code in (0, STOPPED) and config.monitor.report:
                from bapo_megatron.report.page import write_report  # with matplotlib

                screen.facts({"report": shown_path(write_report(run_dir.path))})
            is_complete = True
        except KeyboardInterrupt:
            code = STOPPED
        except BaseException:
            run_dir.mark("failed")
            raise
        if code == STOPPED:
            if run_dir.state != "finished":
                run_dir.mark("interrupted")
            num_saved, num_steps = run_dir.num_steps_saved(), config.train.num_steps
            saved = f"saved: step {num_saved} of {num_steps}" if num_saved else "no step is saved: it starts over"
            how = "at the end of the step" if is_complete else "at once"
            screen.facts({"stopped": f"{how}; {saved}", "resume": _resume_command(run_dir)})
            code = stop.code
        screen.facts({"total": f"{duration(time.monotonic() - began_s)} from start to end"})
        return code


def _resume_command(run_dir: RunDir) -> str:
    return shlex.join(["bapo", "train", shown_path(run_dir.config_path)])


def _train(config: Config, run_dir: RunDir, engines: StartedEngines, key: str, stop: _Stop, screen: Screen) -> int:
    """Run worker.py on every rank until all have ended or one has failed, for which the others would wait forever.

    The ranks import their modules while the engines start. Raises EngineError if an engine does not.
    """
    codes: list[int | None] = []
    are_engines_healthy = False
    try:
        with _ranks(config, run_dir, engines.urls, key) as ranks:
            while True:
                stop.tell(screen)
                are_engines_healthy = are_engines_healthy or engines.are_healthy()
                codes = [rank.poll() for rank in ranks]
                failed = {rank: code for rank, code in enumerate(codes) if code not in (None, 0, STOPPED)}
                if failed or None not in codes:
                    break
                time.sleep(_POLL_S)
    finally:
        if codes[:1] not in ([0], [STOPPED]):
            screen.restore()
    if not failed:
        return STOPPED if STOPPED in codes else 0
    run_dir.mark("failed")
    messages = [text for path in sorted(run_dir.log_dir.glob("error-*.txt")) if (text := path.read_text())]
    if messages:  # the cause of the lost connections that follow
        raise UserError("\n".join(dict.fromkeys(messages)))
    if 2 in failed.values():
        return 2  # that rank could not write its error file and has printed the error
    rank, code = min(failed.items(), key=lambda item: item[1] > 0)  # a signal is a cause, an exit often its effect
    log = run_dir.log_path("trainer", rank)
    print(f"bapo: trainer rank {rank} ended with exit code {code}; its log: {log}", file=sys.stderr)
    if words := last_words(log):
        print(f"bapo: it ends with: {escaped(words)}", file=sys.stderr)
    if hanging := hanging_ranks(run_dir.log_dir, len(codes), config.parallel.timeout_s):
        print(f"bapo: it had waited for {hanging}; see {run_dir.log_dir}/stall-<rank>.txt", file=sys.stderr)
    return max(code, 1)


@contextlib.contextmanager
def _ranks(config: Config, run_dir: RunDir, urls: Sequence[str], key: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the trainer ranks; stop those still running when the block ends, also after a signal to this process.

    The first one talks to the engines, with this key.

    Each rank has its own session: Ctrl-C reaches this process only, and a rank's judge processes die with it.
    """
    count = num_ranks(config)
    num_engine_processes = config.rollout.num_started * config.rollout.server_tensor_parallel
    threads, _ = divide_cores(config, num_cores(), count, num_engine_processes)
    command = [sys.executable, "-m", "bapo_megatron.worker", "--run-dir", str(run_dir.path)]
    for url in urls:
        command += ["--engine-url", url]
    ranks: list[subprocess.Popen[bytes]] = []
    with reserved_ports(1) as ports:  # rank 0's store can still listen on it
        common = loopback_variables(urls) | {
            "OMP_NUM_THREADS": str(threads),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(ports[0]),
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
        }
        try:
            for rank in range(count):
                environment = os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                if rank == 0:
                    environment[KEY_VARIABLE] = key
                ranks.append(
                    subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, start_new_session=True)
                )
            yield ranks
        finally:
            _end(ranks)


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask the running ranks and their child processes to end; kill them after a timeout."""
    deadline = time.monotonic() + _END_TIMEOUT_S
    running = [rank for rank in ranks if rank.poll() is None]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for rank in running:
            if rank.poll() is None:  # not reaped yet, so the pid is still its own
                os.killpg(rank.pid, number)
        for rank in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.wait(None if number == signal.SIGKILL else max(0.0, deadline - time.monotonic()))
