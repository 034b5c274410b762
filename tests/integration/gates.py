"""Gates in the processes of a run: a rank waits at a moment of the run until the test lets it continue, or ends it.

Python imports a module named `sitecustomize` when it starts; the one that `Gates` writes installs the gates.
"""

import contextlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from tests.hang import HANG_S

ROOT = Path(__file__).parents[2]
_step = 0  # this rank's step, from 1


class Gates:
    """Gates before some steps, counted from 1 as on the screen, or at one of these moments.

    "import": before a rank imports torch; "end": after its last step; "save-7", "push-7": before a process's seventh
    action to write checkpoints, or to push weights; "sample-7", "answer-7", "update-7": before its seventh request for
    samples, question to an environment, or optimizer update; "sample-in-7": before any request in step 7; "load-7":
    before its seventh call that lets an engine load weights from a folder; "engine-restore-7", "engine-publish-7":
    before an embedded engine restores memory, or uses new weights, for the seventh time. Nobody waits at "back-7": it
    is reached when an engine is healthy again for the seventh time.

    The first process that comes to a place in `fatal` is killed there. The first rank that passes gate `hasty` waits at
    most one second in any later collective.

    Example:
        gates = Gates(folder, 2)
        run = Popen(command, env=os.environ | gates.environment)
        gates.wait(2, is_alive)  # one step is done, saved, and recorded; the second one waits
        gates.open(2)
    """

    def __init__(self, folder: Path, *places: int | str, hasty: int | None = None, fatal: Sequence[str] = ()) -> None:
        self._folder = folder
        folder.mkdir(parents=True)
        for place in places:
            (folder / f"closed-{place}").touch()
        for place in fatal:
            (folder / f"fatal-{place}").touch()
        if hasty is not None:
            (folder / f"hasty-{hasty}").touch()
        (folder / "sitecustomize.py").write_text("import tests.integration.gates as g\ng.build_in_ranks()\n")
        path = [str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environment = {"PYTHONPATH": os.pathsep.join(path), "BAPO_TEST_GATES": str(folder)}

    def wait(self, place: int | str, is_alive: Callable[[], bool], complaint: Callable[[], str] = str) -> None:
        """Return once a rank has reached the gate."""
        deadline = time.monotonic() + HANG_S
        while not self.is_reached(place):
            assert is_alive(), f"the run ended before gate {place}\n{complaint()}"
            assert time.monotonic() < deadline, f"no rank came to gate {place}\n{complaint()}"
            time.sleep(0.05)

    def is_reached(self, place: int | str) -> bool:
        """Return whether a rank has reached the gate."""
        return (self._folder / f"reached-{place}").exists()

    def is_standing_by(self, pid: int) -> bool:
        """Return whether this process on standby has imported everything."""
        return (self._folder / f"standing-by-{pid}").exists()

    def open(self, place: int | str) -> None:
        (self._folder / f"closed-{place}").unlink()


def build_in_ranks() -> None:
    """Install the gates in any rank, node or embedded engine of the run, as it starts."""
    command = " ".join(sys.orig_argv)
    if "bapo_megatron.engines.embedded" in command and "engine" in _kinds():
        _count_in_engine()
    if "bapo_megatron.trainer" in command or "bapo_megatron.slurm.node" in command:
        build()


def build() -> None:
    """Install the gates in this process, a rank."""
    from bapo_megatron import runtime
    from bapo_megatron.runtime.standby import Orders
    from bapo_megatron.runtime.stopwatch import Stopwatch

    kinds = _kinds()
    if "save" in kinds:
        _count_saving()
    if kinds & {"push", "sample", "load", "back"}:
        _count_calls()
    if "answer" in kinds:
        _count_answers()
    begin, starting, wait = Stopwatch.begin, runtime.starting, Orders.wait

    def begin_behind_gate(self: Stopwatch, step: int) -> None:
        global _step
        begin(self, step)
        _step = step + 1
        _pass(step + 1)
        _end_behind_gate()  # torch is imported by now
        if "update" in kinds:
            _count_updates()
        with contextlib.suppress(FileNotFoundError):
            (Path(os.environ["BAPO_TEST_GATES"]) / f"hasty-{step + 1}").unlink()
            _hurry()

    def starting_through_gate() -> object:
        _pass("import")
        return starting()

    def wait_and_tell() -> Orders | None:
        (Path(os.environ["BAPO_TEST_GATES"]) / f"standing-by-{os.getpid()}").touch()
        return wait()

    Orders.wait = wait_and_tell  # type: ignore[method-assign]
    Stopwatch.begin = begin_behind_gate  # type: ignore[method-assign]
    runtime.starting = starting_through_gate  # type: ignore[assignment]


@cache
def _end_behind_gate() -> None:
    """Put a gate before what follows the last step."""
    from bapo_megatron.checkpoint.store import CheckpointStore

    save, close = CheckpointStore.save, CheckpointStore.close
    is_saving = False  # a save also closes the store

    def save_without_gate(self: CheckpointStore, *arguments: Any) -> Path:
        nonlocal is_saving
        is_saving = True
        try:
            return save(self, *arguments)
        finally:
            is_saving = False

    def close_behind_gate(self: CheckpointStore) -> None:
        if not is_saving:
            _pass("end")
        close(self)

    CheckpointStore.save = save_without_gate  # type: ignore[method-assign]
    CheckpointStore.close = close_behind_gate  # type: ignore[method-assign]


def _hurry() -> None:
    """Make this rank give up on the others after a second."""
    from torch.distributed import distributed_c10d

    for group in distributed_c10d._world.pg_map:
        distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)


def _count_saving() -> None:
    """Put a gate before every file operation on a checkpoint being written."""
    numbers = itertools.count(1)

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.mkdir", "os.rename") and any(
            n in str(arguments[0]) for n in ("/.writing-", "/.latest")
        ):
            _pass(f"save-{next(numbers)}")

    sys.addaudithook(watch)


@cache
def _count_updates() -> None:
    """Put a gate before every optimizer update."""
    from bapo_megatron.learner.megatron import MegatronLearner

    numbers = itertools.count(1)
    step = MegatronLearner.step

    def step_behind_gate(self: MegatronLearner, *arguments: Any) -> Any:
        _pass(f"update-{next(numbers)}")
        return step(self, *arguments)

    MegatronLearner.step = step_behind_gate  # type: ignore[method-assign]


def _count_calls() -> None:
    """Put a gate before every request for samples, and every call to an engine and every broadcast in a push."""
    from bapo_megatron.engines.http import HttpEngine
    from bapo_megatron.engines.pool import EnginePool
    from bapo_megatron.engines.update_group import UpdateGroup

    numbers, requests, loads, returns = (itertools.count(1) for _ in range(4))
    send, broadcast, probe = HttpEngine.send_request, UpdateGroup.broadcast, EnginePool.probe

    async def send_through_gate(engine: HttpEngine, method: str, path: str, *arguments: Any, **options: Any) -> bytes:
        if method == "POST" and path not in ("/generate", "/abort_request"):
            _pass(f"push-{next(numbers)}")
        if path == "/update_weights_from_disk":
            _pass(f"load-{next(loads)}")
        if path == "/generate":
            _pass(f"sample-{next(requests)}")
            _pass(f"sample-in-{_step}")
        return await send(engine, method, path, *arguments, **options)

    def broadcast_through_gate(group: UpdateGroup, *arguments: Any, **options: Any) -> Any:
        _pass(f"push-{next(numbers)}")
        return broadcast(group, *arguments, **options)

    async def probe_and_tell(pool: EnginePool) -> None:
        before = len(pool.back())
        await probe(pool)
        for _ in range(len(pool.back()) - before):
            (Path(os.environ["BAPO_TEST_GATES"]) / f"reached-back-{next(returns)}").touch()

    EnginePool.probe = probe_and_tell  # type: ignore[method-assign]
    HttpEngine.send_request = send_through_gate  # type: ignore[method-assign, assignment]
    UpdateGroup.broadcast = broadcast_through_gate  # type: ignore[method-assign]


def _count_in_engine() -> None:
    """Put a gate before every time that an engine restores memory, or uses new weights."""
    from bapo_megatron.engines.embedded.engine import BatchingEngine

    restores, publishes = itertools.count(1), itertools.count(1)
    restore, publish = BatchingEngine.restore, BatchingEngine.publish

    def restore_behind_gate(engine: BatchingEngine, *arguments: Any) -> None:
        _pass(f"engine-restore-{next(restores)}")
        restore(engine, *arguments)

    def publish_behind_gate(engine: BatchingEngine, *arguments: Any) -> None:
        _pass(f"engine-publish-{next(publishes)}")
        publish(engine, *arguments)

    BatchingEngine.restore, BatchingEngine.publish = restore_behind_gate, publish_behind_gate  # type: ignore[method-assign]


def _count_answers() -> None:
    """Put a gate before every question to an environment in worker processes."""
    from bapo_megatron.rewards.worker_pool import EnvironmentProcesses

    numbers, step = itertools.count(1), EnvironmentProcesses.step

    async def step_behind_gate(environment: EnvironmentProcesses, *arguments: Any) -> Any:
        _pass(f"answer-{next(numbers)}")
        return await step(environment, *arguments)

    EnvironmentProcesses.step = step_behind_gate  # type: ignore[method-assign]


def _kinds() -> set[str]:
    """Return the kinds of places that have gates or are fatal, such as "save"."""
    return {path.name.split("-")[1] for path in Path(os.environ["BAPO_TEST_GATES"]).glob("*-*")}


def _pass(place: int | str) -> None:
    """Wait until the gate opens, or be killed there; a rank ends with its launcher."""
    folder = Path(os.environ["BAPO_TEST_GATES"])
    with contextlib.suppress(FileNotFoundError):
        (folder / f"fatal-{place}").rename(folder / f"reached-{place}")
        os.kill(os.getpid(), signal.SIGKILL)
    while (folder / f"closed-{place}").exists():
        (folder / f"reached-{place}").touch()
        time.sleep(0.02)
