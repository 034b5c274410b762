"""Turns on GPUs that trainer and servers share: implements `Phases` for `rollout.placement = "turns"`.

                 trainer holds       servers hold
    training     everything          nothing
    pushing      weights             weights
    sampling     nothing             everything

Each change goes the same way, so that nobody takes memory before the other has given it: the trainer's models leave,
servers release and restore, the rest of the trainer's models come. A push ends with the sampling phase; only then may
`Channel.resume` let the servers continue.

A server that fails is fenced, as in a push. Each process of a server knows what it has released, so a restarted one,
which holds everything, is told to release like any other. It starts in a sampling phase (runtime/turn.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterator, Set
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import torch.distributed as dist

from bapo_megatron.engines.base import ALL_MEMORY, Engine, Memory
from bapo_megatron.engines.pool import EnginePool
from bapo_megatron.errors import EngineError, UserError
from bapo_megatron.runtime.heartbeat import HEARTBEAT, TRAINER
from bapo_megatron.runtime.together import failing_together, share_json
from bapo_megatron.runtime.turn import Turn
from bapo_megatron.sync.base import Submit
from bapo_megatron.sync.session import Replies

Phase = Literal["training", "pushing", "sampling"]
Part = Literal["weights", "rest"]

_OF_TRAINER: dict[Phase, frozenset[Part]] = {
    "training": frozenset({"weights", "rest"}),
    "pushing": frozenset({"weights"}),
    "sampling": frozenset(),
}
_OF_SERVERS: dict[Phase, frozenset[Memory]] = {
    "training": frozenset(),
    "pushing": frozenset({"weights"}),
    "sampling": ALL_MEMORY,
}

_NUM_TRIES = 2  # a lost call must not leave a server on the trainer's GPU; each says first what it has released


class TrainerMemory(Protocol):
    """The models of one rank."""

    def keep(self, parts: Set[Part]) -> None:
        """Free the device's memory of all other parts."""
        ...

    def take(self, parts: Set[Part]) -> None:
        """Bring parts back to the device."""
        ...


class ServerTurns:
    """The servers' side, on trainer rank 0."""

    def __init__(
        self, pool: EnginePool, submit: Submit, turn: Turn, *, timeout_s: float, startup_limit_s: float
    ) -> None:
        """Require that each server can release its memory.

        Args:
            turn: held except in the sampling phase.
            timeout_s: the deadline of each call.
            startup_limit_s: how long a server may take to start.

        Raises:
            UserError: names the first server that cannot.
        """
        self._pool, self._submit, self._turn = pool, submit, turn
        self._timeout_s, self._startup_limit_s = timeout_s, startup_limit_s
        infos, _ = self._ask("say what it can do", {engine: engine.capabilities() for engine in pool.live()})
        for url, found in infos.items():
            if "release" not in found.extras:
                raise UserError(
                    f'{url} cannot release its memory, which rollout.placement="turns" needs; set '
                    'rollout.placement="split" or "separate"'
                )

    def enter(self, phase: Phase) -> None:
        """Let each server that answers hold what the phase gives it; fence those that fail.

        Raises:
            EngineError: a server takes too long to start.
        """
        if phase == "sampling":
            asked = [*self._pool.live(), *self._pool.back()]
        else:
            self._await_starting()
            asked = list(self._pool.engines)

        async def hold(engine: Engine) -> None:
            if phase != "sampling":
                await engine.pause("retract")
            await engine.hold(_OF_SERVERS[phase])

        failures: dict[str, EngineError] = {}
        for _ in range(_NUM_TRIES):
            doubtful = [engine for engine in asked if engine.url in failures or not self._pool.is_live(engine)]
            _, silent = self._ask("answer", {engine: engine.check_health() for engine in doubtful})
            answering = [engine for engine in asked if engine.url not in silent]
            _, failed = self._ask(f"make room for {phase}", {engine: hold(engine) for engine in answering})
            failures |= failed
            asked = [engine for engine in asked if engine.url in silent or engine.url in failed]
        for engine in asked:
            if engine.url in failures:
                self._pool.fence(engine, str(failures[engine.url]))
        if phase == "sampling":
            self._turn.give()

    def _await_starting(self) -> None:
        """Take the turn, once no server is starting."""
        timeout_s = self._startup_limit_s + self._timeout_s
        deadline = time.monotonic() + timeout_s

        def is_late() -> bool:
            HEARTBEAT.beat(TRAINER, "waiting for a server that is starting")
            return time.monotonic() > deadline

        if not self._turn.take(shared=False, is_over=is_late):
            raise EngineError(f"waited {timeout_s:g} s for a server that is starting; its log says how far it is")

    def _ask(
        self, what: str, calls: dict[Engine, Coroutine[Any, Any, Any]]
    ) -> tuple[dict[str, Any], dict[str, EngineError]]:
        """Return results and failures by URL."""
        futures = {engine.url: self._submit(call) for engine, call in calls.items()}
        return Replies(what, futures, self._timeout_s).collect()


class Turns:
    """Implements `Phases`. Collective; before there is a process group, each rank enters its first phase alone.

    Args:
        servers: on rank 0, see `ServerTurns`.
        until_saved: waits until checkpoints no longer read the copies that models leave.
        until_free: waits until the device has room for what a phase brings to it.
        sign_of_life_s: how often rank 0 tells waiting ranks that it is alive.
    """

    def __init__(
        self,
        servers: ServerTurns | None,
        *,
        until_saved: Callable[[], None],
        until_free: Callable[[Phase], None],
        sign_of_life_s: float,
    ) -> None:
        self.trainer: TrainerMemory | None = None  # set once its models are built, in the first training phase
        self._servers = servers
        self._until_saved, self._until_free = until_saved, until_free
        self._sign_of_life_s = sign_of_life_s
        self._phase: Phase | None = None
        self._seconds = dict.fromkeys(("to_host", "servers", "to_device"), 0.0)

    @contextmanager
    def training(self) -> Iterator[None]:
        """See `Phases.training`."""
        self._enter("training")
        yield

    @contextmanager
    def pushing(self) -> Iterator[None]:
        """See `Phases.pushing`. It ends with the sampling phase."""
        self._enter("pushing")
        yield
        self._enter("sampling")

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """See `Phases.sampling`."""
        assert self._phase == "sampling", "a push comes first: the servers have lost their weights"
        yield

    @contextmanager
    def saving(self) -> Iterator[None]:
        """See `Phases.saving`. A snapshot reads models where they are."""
        yield

    def take_times(self) -> dict[str, float]:
        """See `Phases.take_times`."""
        times, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return {f"turns/{name}_s": seconds for name, seconds in times.items()}

    def _enter(self, phase: Phase) -> None:
        if phase == self._phase:
            return
        if self.trainer is not None:
            with self._timed("to_host"):
                self._until_saved()
                with failing_together():
                    self.trainer.keep(_OF_TRAINER[phase])
        with self._timed("servers"):
            self._ask_servers(phase)
        with self._timed("to_device"), failing_together():
            self._until_free(phase)
            if self.trainer is not None:
                self.trainer.take(_OF_TRAINER[phase])
        self._phase = phase

    def _ask_servers(self, phase: Phase) -> None:
        servers = self._servers
        if not dist.is_initialized():
            if servers is not None:
                servers.enter(phase)
            return
        make = None if servers is None else lambda: servers.enter(phase)
        share_json(make, sign_of_life_s=self._sign_of_life_s)

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began_s = time.monotonic()
        yield
        self._seconds[what] += time.monotonic() - began_s
