"""Parallel runs of `bapo train`, one core each, without its start-up, which would take longer than a small run.

A fork server imports torch, Megatron and bapo_megatron once. Each run consists of two forks, an engine and a trainer
with one rank, with the loop, HTTP API and weight sync of `bapo train`.
"""

import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from threading import Event

from bapo_megatron.assets import resolve_model_path
from bapo_megatron.config.schema import Config
from bapo_megatron.engines import processes
from bapo_megatron.engines.key import new_key
from bapo_megatron.errors import UserError
from bapo_megatron.runs.folder import RunDir
from bapo_megatron.runs.steps import read_metrics
from bapo_megatron.runtime import LOOPBACK
from studies.code import code_here
from studies.results import figures_of, value
from studies.rows import Row
from studies.study import Run

# What rollout.engine may be, and the module whose `main` serves.
ENGINES = {"embedded": "bapo_megatron.engines.embedded.server", "studies.bfloat16:KIND": "studies.bfloat16"}

_WORKERS = "studies.workers"
_ROOT = Path(__file__).parents[1]
_POLL_S = 0.05
_ENDED_ITSELF = 2  # exit code of `run_rank` for an error that is not a fault of the code
_LOST = {"skipped updates", "no group kept"}  # alarms of a run that cannot learn any more
_END_TIMEOUT_S = 15.0


def run_path(config: Config) -> Path:
    return Path(config.run.dir) / config.run.name


def environment_path(config: Config) -> Path:
    """Return the path of the JSON file with the time, machine and packages of the training."""
    return run_path(config) / "environment.json"


def is_finished(config: Config) -> bool:
    """Return whether the run has reached its last step and recorded its environment."""
    metrics = read_metrics(run_path(config) / "metrics.jsonl")
    is_at_end = bool(metrics) and metrics[-1]["step"] == config.train.num_steps
    return is_at_end and environment_path(config).is_file()


def row_of(run: Run, wanted: Sequence[str], seconds: float = 0.0, failure: str | None = None) -> Row:
    """Return what a run leaves that has finished, or failed.

    Args:
        wanted: `Plot.metric` of the study's plots.
        seconds: how long the run took, if it was not interrupted; otherwise its steps count.
        failure: why it failed.
    """
    steps = read_metrics(run_path(run.config) / "metrics.jsonl")
    environment = json.loads(environment_path(run.config).read_text(encoding="utf-8"))
    finals, curves = figures_of(steps, wanted)
    in_steps = math.fsum(took for step in steps if math.isfinite(took := value(step, "time/step_s")))
    return Row(
        run=run.config.run.name,
        code=code_here(),
        variant=run.variant,
        seed=run.seed,
        time=environment["time"],
        machine=f"{environment['num_cores']} cores of {environment['processor']}",
        packages=environment["packages"],
        seconds=round(max(seconds, in_steps), 1),
        finals={} if failure else finals,
        curves=curves,
        failure=failure,
    )


def train_all(
    configs: Sequence[Config], *, num_jobs: int, timeout_s: float, tell: Callable[[Config, float, str | None], None]
) -> None:
    """Train every configuration to its last step; call `tell` with each one that is done.

    A run that ends because nothing is left to learn from, such as one whose gradients are no longer finite, is done
    too: that is a result.

    Args:
        configs: checked configurations (checks.py), with one engine and one trainer rank.
        num_jobs: how many runs may train at the same time.
        timeout_s: how long one run may take.
        tell: called with the run's configuration, its seconds, and the error that ended it, or None.

    Raises:
        UserError: a run failed in another way or took too long, or its folder cannot be used. The message names the
            run and its log; all other runs are ended.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_WORKERS])
    lifeline, ours = context.Pipe(duplex=False)  # closes when this process ends, in whatever way
    stop = Event()

    def train(config: Config) -> None:
        if stop.is_set():
            return
        started = time.monotonic()
        try:
            failure = _train(config, _Forks(context, lifeline), stop, started + timeout_s)
        except _StoppedError:
            return
        except BaseException:
            stop.set()
            raise
        tell(config, time.monotonic() - started, failure)

    with _environment_of_forks(), lifeline, ours, ThreadPoolExecutor(num_jobs) as pool:
        futures = [pool.submit(train, config) for config in configs]
        try:
            for future in futures:
                future.result()
        finally:
            stop.set()


class _StoppedError(Exception):
    """The end of a run because another one failed or the user interrupted."""


@dataclass(frozen=True, slots=True)
class _Forks:
    """Starter of the processes in workers.py."""

    context: ForkServerContext
    lifeline: Connection

    @contextmanager
    def running(self, work: str, *arguments: object) -> Iterator[ForkServerProcess]:
        """Start a process that ends with the block."""
        process = self.context.Process(target=_in_worker, args=(work, self.lifeline, *arguments), name=f"bapo-{work}")
        process.start()
        try:
            yield process
        finally:
            process.terminate()
            process.join(_END_TIMEOUT_S)
            if process.exitcode is None:
                process.kill()
                process.join(_END_TIMEOUT_S)


def _train(config: Config, forks: _Forks, stop: Event, deadline: float) -> str | None:
    """Train one run. Returns the error that ended it because nothing was left to learn from, or None."""

    def is_ready(url: str, engine: ForkServerProcess) -> bool:
        if engine.exitcode is not None:
            raise UserError(f"the engine of {run.path} ended with exit code {engine.exitcode}; its log: {engine_log}")
        return processes.answers(f"{url}/health", timeout_s=1.0, key=key)

    def wait(is_done: Callable[[], bool]) -> None:
        while not is_done():
            if stop.is_set():
                raise _StoppedError
            if time.monotonic() > deadline:
                raise UserError(f"the run {run.path} did not finish in time; see its log: {run.log_path('trainer', 0)}")
            time.sleep(_POLL_S)

    key = new_key()
    with RunDir.open(config) as run, processes.reserved_ports(1) as ports:
        engine_log = run.log_path("engine", 0)
        url, arguments = f"http://{LOOPBACK}:{ports[0]}", _engine_arguments(config, ports[0])
        with forks.running("serve", ENGINES[config.rollout.engine], arguments, engine_log, key) as engine:
            wait(lambda: is_ready(url, engine))
            with forks.running("train", run.path, url, key) as trainer:
                wait(lambda: trainer.exitcode is not None)
                said = _error(run)
                if trainer.exitcode == _ENDED_ITSELF and said and _LOST & _alarms(run):
                    return said
                if trainer.exitcode != 0:
                    log = run.log_path("trainer", 0)
                    raise UserError(
                        f"the run {run.path} ended with exit code {trainer.exitcode}: {said or 'see its log'} ({log})"
                    )
    return None


def _engine_arguments(config: Config, port: int) -> list[str]:
    return [
        *("--model-path", str(resolve_model_path(config.model.path))),
        *("--port", str(port)),
        *("--max-context", str(config.longest_sequence)),
        *("--max-running", str(config.rollout.max_concurrent_requests)),
        *("--update-timeout-s", str(config.sync.timeout_s)),
    ]


def _in_worker(work: str, *arguments: object) -> None:
    """Run the named function of workers.py in the child, so that the parent need not import it."""
    from studies import workers

    getattr(workers, work)(*arguments)


@contextmanager
def _environment_of_forks() -> Iterator[None]:
    """Set what the fork server reads when it starts: one thread for torch, and the place of this package."""
    before = dict(os.environ)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_ROOT), before.get("PYTHONPATH"))))
    try:
        yield
    finally:
        for name in ("OMP_NUM_THREADS", "PYTHONPATH"):
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]


def _error(run: RunDir) -> str:
    """Return the error that the trainer left; "" without one."""
    return "".join(path.read_text() for path in sorted(run.log_dir.glob("error-*.txt"))[:1])


def _alarms(run: RunDir) -> set[str]:
    """Return the names of the alarms that a run has raised."""
    return {alarm["name"] for alarm in json.loads((run.path / "status.json").read_text(encoding="utf-8"))["alarms"]}
