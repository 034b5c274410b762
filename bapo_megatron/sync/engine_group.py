"""Forming and leaving the group of trainer and engines, so that one bad engine does not hold up the others."""

from __future__ import annotations

import secrets
import threading
import time
from concurrent.futures import Future

import torch.distributed as dist

from bapo_megatron.engines.base import Engine
from bapo_megatron.engines.group import GroupBackend, UpdateGroup, connect_store, host_store
from bapo_megatron.errors import EngineError
from bapo_megatron.sync.members import Members

_POLL_S = 0.002
_RELEASE_S = 5.0  # how long those who wait in a rendezvous that is called off may take to say so


class EngineGroup:
    """The trainer's first process and the engines it sends to, in one process group."""

    def __init__(
        self, group: UpdateGroup, store: dist.TCPStore, num_ranks: dict[str, int], backend: GroupBackend
    ) -> None:
        self.name = group.name
        self.urls = frozenset(num_ranks)
        self.backend = backend
        self.broadcast = group.broadcast
        self._group = group
        self._store = store  # serves the rendezvous; the ranks' connections to it must not break

    @classmethod
    def form(cls, members: Members, num_ranks: dict[str, int], *, host: str, backend: GroupBackend) -> EngineGroup:
        """With all members that can, under a fresh name: one left by a dead trainer could not be used again.

        Engines that refuse or are late are fenced, and the others try again without them.

        Args:
            num_ranks: by url, how many ranks an engine is.
            host: where the engines reach this process.

        Raises:
            EngineError: see `Members.drop`; or the trainer itself could not join.
        """
        while True:
            ranks = {engine.url: num_ranks[engine.url] for engine in members.engines}
            attempt = _Attempt(members, ranks, host, backend)
            failures = attempt.failures()
            if not failures:
                return cls(attempt.group(), attempt.store(), ranks, backend)
            members.drop(failures)

    def leave(self, members: Members) -> None:
        """Dissolve it: the members that are in it are told, and what they answer does not matter."""
        self.abandon()
        _, _ = members.start("leave the weight group", self._destroy, only=self.urls).collect()

    def abandon(self) -> None:
        """Leave it, whatever is under way in it."""
        self._group.abandon()

    async def _destroy(self, engine: Engine) -> None:
        await engine.destroy_update_group(self.name)


class _Attempt:
    """One rendezvous. Joining blocks until everybody is there, so it has a thread of its own."""

    def __init__(self, members: Members, num_ranks: dict[str, int], host: str, backend: GroupBackend) -> None:
        self._timeout_s = members.timeout_s
        self._world_size = 1 + sum(num_ranks.values())
        self._name = f"weights-{secrets.token_hex(8)}"
        self._store: dist.TCPStore | None = host_store(host, self._world_size, self._timeout_s)
        port = self._store.port
        offsets, offset = {}, 1
        for url, size in num_ranks.items():
            offsets[url], offset = offset, offset + size

        async def join(engine: Engine) -> None:
            await engine.init_update_group(host, port, offsets[engine.url], self._world_size, self._name, backend)

        self._replies = members.start("join the weight group", join)
        self._joined: Future[UpdateGroup] = Future()
        arguments = (host, port, backend)
        threading.Thread(target=self._join, args=arguments, name="join-weight-group", daemon=True).start()

    def failures(self) -> dict[str, EngineError]:
        """Wait for everybody; returns those who are to blame where somebody does not come."""
        replies = self._replies
        while not (replies.is_done and self._joined.done()):
            if replies.has_failed or time.monotonic() > replies.deadline:
                break
            time.sleep(_POLL_S)
        if not replies.has_failed and replies.is_done:
            return {}
        refused = replies.failed()
        self._store = None  # closes the rendezvous: whoever waits in it is let go, and is not to blame
        self._joined.add_done_callback(_close)
        answers_until = time.monotonic() + _RELEASE_S
        while not replies.is_done and time.monotonic() < answers_until:
            time.sleep(_POLL_S)
        late = replies.unanswered()
        replies.deadline = time.monotonic()
        _, failures = replies.collect()
        return {url: error for url, error in failures.items() if url in refused | late}

    def group(self) -> UpdateGroup:
        """Raises EngineError where this process could not join."""
        try:
            return self._joined.result(self._timeout_s)
        except Exception as problem:
            raise EngineError(f"the weight group did not form: {problem}") from problem

    def store(self) -> dist.TCPStore:
        assert self._store is not None
        return self._store

    def _join(self, host: str, port: int, backend: GroupBackend) -> None:
        try:
            # A connection of its own: the server's handle must be free to be dropped.
            store = connect_store(host, port, self._world_size, self._timeout_s)
            self._joined.set_result(
                UpdateGroup(
                    self._name,
                    store=store,
                    rank=0,
                    world_size=self._world_size,
                    backend=backend,
                    timeout_s=self._timeout_s,
                )
            )
        except Exception as problem:
            self._joined.set_exception(problem)


def _close(joined: Future[UpdateGroup]) -> None:
    if joined.exception() is None:
        joined.result().close()
