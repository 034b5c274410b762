"""Runs on one machine: start the engines and trainer ranks, and stop them at the end.

bapo train -> run() -> engine processes (if the run starts any), under a supervisor
                    -> one process for each trainer rank: worker.py

The first Ctrl-C asks the ranks to save and stop at the end of their step, the second ends them at once. Nothing here
listens on any address but loopback.
"""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import NoReturn

from bapo_megatron.assets import resolve_model_path
from bapo_megatron.config.load import load_config, split_arguments
from bapo_megatron.config.plan import divide_cores, num_ranks
from bapo_megatron.config.schema import Config
from bapo_megatron.engines.processes import LOOPBACK, EngineShare, loopback_variables, reserved_ports
from bapo_megatron.engines.start import started_engines
from bapo_megatron.engines.supervisor import StartedEngines
from bapo_megatron.errors import UserError
from bapo_megatron.monitor.console import Screen, header, shown_path
from bapo_megatron.monitor.rundir import RunDir, with_pinned_models
from bapo_megatron.monitor.stall import hanging_ranks
from bapo_megatron.monitor.summary import duration
from bapo_megatron.runtime import num_cores
from bapo_megatron.worker import STOPPED

INTERRUPTED = 130  # exit code after Ctrl-C

_POLL_S = 0.1
_END_TIMEOUT_S = 30.0  # from SIGTERM to SIGKILL


def train(arguments: Sequence[str], began_s: float) -> int:
    """Load a configuration, show what will run, check it, and train, as `run` does.

    Args:
        arguments: configurations and settings of the command line.
        began_s: start of the command on the monotonic clock.
    """
    if not _announce(load_config(*split_arguments(arguments))):
        return 0
    Screen(sys.stdout).note("checking the configuration", "dim")
    from bapo_megatron.preflight.check import load_checked

    return _run(load_checked(arguments), began_s)


def run(config: Config) -> int:
    """Train on this machine until the configured number of steps.

    Returns:
        0, INTERRUPTED, or the exit code of the trainer rank that failed first (2 for an error the user can fix).
    """
    began_s = time.monotonic()
    return _run(config, began_s) if _announce(config) else 0


def _announce(config: Config) -> bool:
    """Show what will run, and return True; or say that the run is finished. Raises ConfigError: see `RunDir.open`."""
    coming = RunDir.preview(config)
    if not coming.is_finished:
        Screen(sys.stdout).facts(header(config, coming))
        return True
    num_steps = config.train.num_steps
    Screen(sys.stdout).facts(
        {
            "finished": f"{shown_path(coming.path)}: all {num_steps} steps are done",
            "report": shown_path(coming.path / "report.html"),
            "go on": f"{_resume_command(coming)} train.num_steps={2 * num_steps}",
        }
    )
    return False


def _run(config: Config, began_s: float) -> int:
    config = with_pinned_models(config)
    model_path = resolve_model_path(config.model.path)
    screen = Screen(sys.stdout, config.monitor.progress)
    with RunDir.open(config) as run_dir:
        try:
            with _stopping_after_the_step(run_dir, screen):
                count = num_ranks(config)
                share = EngineShare(config.rollout.num_servers, first_gpu=count, num_ranks=count)
                with started_engines(config, model_path, run_dir.log_dir, share) as engines:
                    code = _train(config, run_dir, engines, screen)
                if code in (0, STOPPED) and config.monitor.report:
                    from bapo_megatron.report.page import write_report  # with matplotlib

                    screen.facts({"report": shown_path(write_report(run_dir.path))})
        except KeyboardInterrupt:
            code = INTERRUPTED
        except BaseException as error:
            run_dir.mark("interrupted" if isinstance(error, SystemExit) else "failed")
            raise
        if code in (STOPPED, INTERRUPTED):
            if run_dir.state != "finished":
                run_dir.mark("interrupted")
            num_saved, num_steps = run_dir.num_steps_saved(), config.train.num_steps
            saved = f"saved: step {num_saved} of {num_steps}" if num_saved else "no step is saved: it starts over"
            how = "at the end of the step" if code == STOPPED else "at once"
            screen.facts({"stopped": f"{how}; {saved}", "resume": _resume_command(run_dir)})
            code = INTERRUPTED
        screen.facts({"total": f"{duration(time.monotonic() - began_s)} from start to end"})
        return code


def _resume_command(run_dir: RunDir) -> str:
    return shlex.join(["bapo", "train", shown_path(run_dir.config_path)])


@contextlib.contextmanager
def _stopping_after_the_step(run_dir: RunDir, screen: Screen) -> Iterator[None]:
    """On Ctrl-C, ask the ranks to stop; raise KeyboardInterrupt if they have been asked, or do not train (yet)."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        if run_dir.state == "training" and not run_dir.stop_file.exists():
            run_dir.stop_file.touch()
            start = "\n" if screen.is_terminal else ""  # "^C" stands there
            screen.note(f"{start}saving at the end of this step, then stopping; Ctrl-C again ends at once", "bold")
            return
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the processes are being ended
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    is_in_background = before == signal.SIG_IGN  # as a script's command with "&" is
    if is_in_background or threading.current_thread() is not threading.main_thread():  # Python has no handlers there
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _train(config: Config, run_dir: RunDir, engines: StartedEngines, screen: Screen) -> int:
    """Run worker.py on every rank until all have ended or one has failed, for which the others would wait forever.

    The ranks import their modules while the engines start. Raises EngineError if an engine does not.
    """
    codes: list[int | None] = []
    are_engines_healthy = False
    try:
        with _ranks(config, run_dir, engines.urls) as ranks:
            while True:
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
    print(
        f"bapo: trainer rank {rank} ended with exit code {code}; its log: {run_dir.log_path('trainer', rank)}",
        file=sys.stderr,
    )
    if hanging := hanging_ranks(run_dir.log_dir, len(codes), config.parallel.timeout_s):
        print(f"bapo: it had waited for {hanging}; see {run_dir.log_dir}/stall-<rank>.txt", file=sys.stderr)
    return max(code, 1)


@contextlib.contextmanager
def _ranks(config: Config, run_dir: RunDir, urls: Sequence[str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the trainer ranks; stop those still running when the block ends, also after a signal to this process.

    Each rank has its own session: Ctrl-C reaches this process only, and a rank's judge processes die with it.
    """
    count = num_ranks(config)
    num_engine_processes = config.rollout.num_started * config.rollout.server_tensor_parallel
    threads, _ = divide_cores(config, num_cores(), count, num_engine_processes)
    command = [sys.executable, "-m", "bapo_megatron.worker", "--run-dir", str(run_dir.path)]
    for url in urls:
        command += ["--engine-url", url]
    ranks: list[subprocess.Popen[bytes]] = []
    with _exiting_on_signals(), reserved_ports(1) as ports:  # rank 0's store can still listen on it
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


@contextlib.contextmanager
def _exiting_on_signals() -> Iterator[None]:
    """Turn signals that would kill this process into SystemExit, so that its ranks are stopped first."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # where Python handles no signals
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # as under nohup
            signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
