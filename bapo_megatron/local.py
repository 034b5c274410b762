"""Runs on one machine: start the engines and trainer ranks, and stop them at the end.

bapo train -> run() -> engine processes (if the run starts any), under a supervisor
                    -> one process for each trainer rank: trainer.py; all of them again after a failure (restarts.py)

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

from bapo_megatron.config.load import read_config, split_arguments
from bapo_megatron.config.schema import Config
from bapo_megatron.engines.key import handed_over, new_key
from bapo_megatron.engines.processes import loopback_variables, reserved_ports
from bapo_megatron.engines.start import started_engines
from bapo_megatron.engines.supervisor import StartedEngines
from bapo_megatron.errors import EngineError, UserError, escaped, plural
from bapo_megatron.machine.shared_gpu import node_share
from bapo_megatron.monitor.console import Screen, header, outputs, shown_path
from bapo_megatron.monitor.stall import hanging_ranks, last_words
from bapo_megatron.resolved import Resolved, resolve, resolve_here
from bapo_megatron.runs.folder import RunDir
from bapo_megatron.runs.numbers import duration
from bapo_megatron.runs.restarts import Restart, how_often, next_restart, start_again
from bapo_megatron.runs.resuming import with_pins
from bapo_megatron.runtime import LOOPBACK, num_cores, program, python_module
from bapo_megatron.runtime.standby import Orders, StandbyRanks
from bapo_megatron.sync.folder import kept_weights_folder
from bapo_megatron.trainer import LAUNCHER_VARIABLE, STOPPED

_POLL_S = 0.1
_HINTS = {  # by the exit code of a killed process
    -signal.SIGKILL: "SIGKILL often comes from Linux's memory killer: `dmesg | grep -i 'killed process'` says so",
    -signal.SIGBUS: "SIGBUS often means that /dev/shm or the disk is full",
}
_END_TIMEOUT_S = 30.0  # from SIGTERM to SIGKILL


class Stop:
    """Ctrl-C, SIGTERM and SIGHUP: a context manager around a run, with handlers only in the main thread.

    The first signal during training touches the run's stop file, which the ranks look for at the end of each step. A
    second signal, a signal at any other time, and SIGQUIT raise KeyboardInterrupt; later ones are ignored, because the
    processes are already being ended. A signal that was ignored at the start stays ignored: SIGHUP under nohup, SIGINT
    after "&".

    One request to stop may send several signals: a closing terminal sends SIGHUP through both the shell and the system,
    `timeout` sends SIGTERM to the process and to its group. So a second signal counts only once the first has been
    reported, and a second SIGHUP never counts.
    """

    def __init__(self) -> None:
        self.run_dir: RunDir | None = None  # set once the run has a folder
        self._number = signal.SIGINT  # the first signal
        self._was_told = True
        self._before: dict[int, Any] = {}

    @property
    def code(self) -> int:
        """Exit code of the run after a signal, or a stop file that somebody made, has stopped it."""
        return 128 + self._number

    def tell(self, screen: Screen) -> None:
        """Report the first signal, once. The handler must not call it: it may have interrupted another message."""
        if not self._was_told:
            self._was_told = True
            start = "\n" if screen.is_terminal and self._number == signal.SIGINT else ""  # the terminal has shown "^C"
            what = "" if self._number == signal.SIGINT else f"{signal.Signals(self._number).name}: "
            again = "Ctrl-C again" if self._number == signal.SIGINT else "a second one"
            screen.note(f"{start}{what}saving at the end of this step, then stopping; {again} ends immediately", "bold")

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():  # the only one that may set handlers
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


def train_command(arguments: Sequence[str], began_s: float) -> int:
    """Load a configuration, show what will run, check it, and train, as `train_locally` does.

    Args:
        arguments: configurations and settings from the command line.
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


def train_locally(config: Config) -> int:
    """Train on this machine until the configured number of steps.

    Returns:
        0, 128 + the number of the signal that stopped the run, or the exit code of the trainer rank that failed first
        (2 for an error the user can fix).
    """
    return _run(lambda: config, lambda config: config, time.monotonic())


def _run(load: Callable[[], Config], check: Callable[[Config], Config], began_s: float) -> int:
    with Stop() as stop:
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
        OSError: nothing can be shown, for instance because of a full disk. Once a run has begun, that does not end it.
    """
    coming = RunDir.preview(config)
    screen = Screen(sys.stdout, is_lasting=False)
    if not coming.is_finished:
        with contextlib.suppress(BrokenPipeError):  # `| head` may have seen enough already
            screen.facts(header(resolve(config), coming))
        return True
    num_steps = config.train.num_steps
    screen.facts(
        {
            "finished": f"{shown_path(coming.path)}: {num_steps} of {plural(num_steps, 'step')} done",
            "report": shown_path(coming.path / "report.html"),
            "continue": f"{_resume_command(coming)} train.num_steps={2 * num_steps}",
        }
    )
    return False


def _train_and_report(config: Config, stop: Stop, began_s: float) -> int:
    config = with_pins(config)
    if config.cluster.gpu is not None or config.shares_gpus:
        from bapo_megatron.preflight.plan import decided

        config = decided(config)
    run = resolve_here(config)
    screen = Screen(sys.stdout, config.monitor.progress)
    with RunDir.open(config) as run_dir:
        stop.run_dir = run_dir
        with contextlib.suppress(BrokenPipeError):
            screen.facts(outputs(config, run_dir))
        is_complete = False  # nothing was cut off by a second signal
        try:
            num_standby = run.placement.num_ranks if config.run.standby and config.run.max_restarts else 0
            with (
                kept_weights_folder(config, run_dir),
                started_engines(run, run_dir.log_dir, node_share(run), key := new_key(), run_dir.turn_file) as engines,
                StandbyRanks(run_dir.path, num_standby, _threads_of_a_rank(run)) as standby,
            ):
                attempt = partial(_train, run, run_dir, engines, key, stop, screen, standby)
                code = _train_through_failures(config, run_dir, engines, screen, attempt)
            if code in (0, STOPPED):
                from bapo_megatron.report.page import write_report  # with NumPy

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
            how = "at the end of the step" if is_complete else "immediately"
            saved = run_dir.what_is_saved(config.train.num_steps)
            screen.facts({"stopped": f"{how}; {saved}", "resume": _resume_command(run_dir)})
            code = stop.code
        screen.facts({"total": f"{duration(time.monotonic() - began_s)} from start to end"})
        return code


def _resume_command(run_dir: RunDir) -> str:
    return shlex.join([*program(), "train", shown_path(run_dir.config_path)])


@dataclass(frozen=True, slots=True)
class _Failure:
    """An attempt that failed in a way that restarting the ranks may fix."""

    lines: list[str]  # for the user
    hint: str  # usual cause, or ""
    errors: list[str]  # left by failed ranks
    code: int
    at_s: float  # Unix time at which it was noticed


def _train_through_failures(
    config: Config, run_dir: RunDir, engines: StartedEngines, screen: Screen, attempt: Callable[[], int | _Failure]
) -> int:
    """Start the ranks, restart them after each failure that `next_restart` allows, and return the last exit code.

    Engines keep running.

    Args:
        attempt: starts the ranks and waits for their end, see `_train`.

    Raises:
        EngineError: an engine does not start, or none is left for a restart.
        UserError: a rank has left an error, or the disk has no room for the next attempt.
    """
    while isinstance(outcome := attempt(), _Failure):
        facts = [*filter(None, [outcome.hint]), run_dir.what_is_saved(config.train.num_steps)]
        if config.run.max_restarts and run_dir.num_steps_saved() >= config.train.num_steps:
            screen.note("\n".join([*outcome.lines, "all steps are done and saved"]), "yellow")
            run_dir.mark("finished")
            return 0
        reason: Restart | str = "the run was asked to stop"
        if not run_dir.stop_file.exists():
            reason = next_restart(run_dir, "; ".join(outcome.lines), outcome.at_s, config.run.max_restarts)
        if isinstance(reason, str):
            no_restart = "run.max_restarts is 0; run.max_restarts=3 starts the ranks again after such a failure"
            how = f"to continue: {_resume_command(run_dir)}"
            return _give_up(run_dir, outcome, [reason if config.run.max_restarts else no_restart, *facts, how])
        if engines.urls and not engines.urls_left():
            none_left = "no rollout engine is left for a restart: their logs say why; the same command starts new ones"
            raise EngineError("\n".join([*outcome.lines, none_left, *how_often(run_dir)]))
        try:
            start_again(run_dir, reason)
        except UserError as error:
            lines = [*outcome.lines, f"no restart is possible: {error}", *how_often(run_dir)]
            raise UserError("\n".join(lines)) from error
        what = f"restart {reason.number} of {config.run.max_restarts} in {reason.delay_s:g} s"
        screen.note("\n".join([*outcome.lines, *facts, f"{what}, logs: {shown_path(run_dir.log_dir)}"]), "yellow")
        time.sleep(reason.delay_s)
    return outcome


def _give_up(run_dir: RunDir, failure: _Failure, reasons: list[str]) -> int:
    """Print why the run ends, and return its exit code. Raises UserError if a rank has left an error."""
    lines = [*(failure.errors or failure.lines), *reasons, *how_often(run_dir)]
    if failure.errors:
        raise UserError("\n".join(lines))
    for line in lines:
        print(f"bapo: {line}", file=sys.stderr)
    return failure.code


def _train(
    run: Resolved,
    run_dir: RunDir,
    engines: StartedEngines,
    key: str,
    stop: Stop,
    screen: Screen,
    standby: StandbyRanks,
) -> int | _Failure:
    """Run trainer.py on every rank until all have ended, or one has failed and the others would wait for it forever.

    The ranks import their modules while the engines start. Ranks that share their GPUs wait: SGLang sizes its caches by
    what is free. Raises EngineError if an engine does not start, and UserError for an error that a rank leaves.
    """
    codes: list[int | None] = []
    are_engines_healthy = is_standby_filled = False
    try:
        while run.placement.shares_gpus and not (engines.are_healthy() and engines.all_answer()):
            stop.tell(screen)
            if run_dir.stop_file.exists():
                return STOPPED
            time.sleep(_POLL_S)
        urls = engines.urls_left() or engines.urls  # if none answers, rank 0 reports it
        with _ranks(run, run_dir, urls, key, standby) as ranks:
            while True:
                stop.tell(screen)
                if not is_standby_filled and run_dir.state == "training":  # before, the ranks need the cores
                    standby.fill()
                    is_standby_filled = True
                are_engines_healthy = are_engines_healthy or engines.are_healthy()
                codes = [rank.poll() for rank in ranks]
                failed = {rank: code for rank, code in enumerate(codes) if code not in (None, 0, STOPPED)}
                if failed or None not in codes:
                    break
                time.sleep(_POLL_S)
            at_s = time.time()
    finally:
        if codes[:1] not in ([0], [STOPPED]):
            screen.restore()
    if not failed:
        return STOPPED if STOPPED in codes else 0
    run_dir.mark("failed")  # from now on a signal ends the run immediately
    errors = [text for path in sorted(run_dir.log_dir.glob("error-*.txt")) if (text := path.read_text())]
    errors = list(dict.fromkeys(errors))  # the cause of the lost connections that follow
    # A signal is a cause, an exit often its effect. SIGABRT may be either: torch aborts if a connection is lost.
    rank, code = min(failed.items(), key=lambda item: (item[1] > 0, item[1] == -signal.SIGABRT))
    if (errors or 2 in failed.values()) and (code > 0 or code == -signal.SIGABRT):
        if errors:
            raise UserError("\n".join([*errors, *how_often(run_dir)]))
        return 2  # that rank could not write its error file and has printed the error
    log = run_dir.log_path("trainer", rank)
    lines = [f"trainer rank {rank} ended with exit code {code}; its log: {log}"]
    if words := last_words(log):
        lines.append(f"it ends with: {escaped(words)}")
    if hanging := hanging_ranks(run_dir.log_dir, len(codes), run.config.parallel.timeout_s):
        lines.append(f"it had been waiting for {hanging}; see {run_dir.log_dir}/stall-<rank>.txt")
    return _Failure(lines, _HINTS.get(code, ""), errors, 2 if 2 in failed.values() else max(code, 1), at_s)


@contextlib.contextmanager
def _ranks(
    run: Resolved, run_dir: RunDir, urls: list[str], key: str, standby: StandbyRanks
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the trainer ranks; stop any that still run when the block ends, also after a signal to this process.

    The first rank talks to the engines, with this key.

    Each rank has its own session: Ctrl-C reaches this process only, and a rank's judge processes die with it.
    """
    count = run.placement.num_ranks
    command = [*python_module("bapo_megatron.trainer"), "--run-dir", str(run_dir.path)]
    for url in urls:
        command += ["--engine-url", url]
    ranks: list[subprocess.Popen[bytes]] = []
    with reserved_ports(1) as ports:  # rank 0's store can still listen on it
        common = loopback_variables(urls) | {
            **_threads_of_a_rank(run),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(ports[0]),
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            LAUNCHER_VARIABLE: str(os.getpid()),
        }
        try:
            for rank in range(count):
                own = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                secret = key if rank == 0 else None
                ranks.append(standby.take(Orders(own, urls, secret)) or _start_rank(command, own, secret))
            yield ranks
        finally:
            _end(ranks)


def _start_rank(command: Sequence[str], variables: Mapping[str, str], key: str | None) -> subprocess.Popen[bytes]:
    with handed_over(key) as (secret, descriptors):
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env=os.environ | variables | secret,
            pass_fds=descriptors,
            start_new_session=True,
        )


def _threads_of_a_rank(run: Resolved) -> dict[str, str]:
    """Return the environment variable that must be set before a rank imports torch."""
    placement = run.placement
    num_engine_processes = placement.num_servers * placement.gpus_per_server
    threads, _ = run.config.divide_cores(num_cores(), placement.num_ranks, num_engine_processes)
    return {"OMP_NUM_THREADS": str(threads)}


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask the running ranks and their child processes to end; kill them after a timeout."""
    deadline = time.monotonic() + _END_TIMEOUT_S
    running = [rank for rank in ranks if rank.poll() is None]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for rank in running:
            if rank.poll() is None:  # not reaped yet, so the pid is still its own
                os.killpg(rank.pid, number)
                os.killpg(rank.pid, signal.SIGCONT)  # a stopped process would not handle SIGTERM
        for rank in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.wait(None if number == signal.SIGKILL else max(0.0, deadline - time.monotonic()))
