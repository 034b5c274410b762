"""The weight channel: from the trainer's first process to every engine, verified before a token is sampled.

    pause(retract) -> begin -> [announce by HTTP + broadcast] per bucket -> end -> verify version, checksum -> continue

Every wait watches the engines' HTTP replies and the broadcast together, so that a refusal ends the update at once, and
has a deadline and names whom it waits for. After a failure the engines stay paused: their weights may be torn.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from bapo_megatron.config.schema import SyncConfig
from bapo_megatron.errors import EngineError
from bapo_megatron.rollout.base import Engine
from bapo_megatron.sync.buckets import Bucket, digest, pack, unpack
from bapo_megatron.sync.group import GroupBackend, UpdateGroup, host_store

Submit = Callable[[Coroutine[Any, Any, Any]], "Future[Any]"]
"""Runs a coroutine on the engines' event loop: `lambda c: asyncio.run_coroutine_threadsafe(c, loop)`."""

_POLL_S = 0.0005  # of the broadcast, which has no event to wait for
_REPLY_POLL_S = 0.05  # of the deadline, while replies are awaited
_STACKED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"} | {
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
_OWN_DIGEST = "sha256"  # digests of this algorithm, under Hugging Face names, can be compared with the trainer's own


@dataclass(slots=True)
class SyncStats:
    """What one push did."""

    num_bytes: int = 0
    num_tensors: int = 0
    num_buckets: int = 0
    seconds: dict[str, float] = field(default_factory=dict)  # per stage: pause, gather, broadcast, verify, resume


class Channel(Protocol):
    """Collective over the trainer's processes: all ranks call `push`, since producing the weights is collective."""

    def connect(self) -> None: ...
    def push(self, named_weights: Iterator[tuple[str, Tensor]], version: int) -> SyncStats: ...
    def close(self) -> None: ...


class FollowerChannel:
    """The channel of every rank but the first: takes part in gathering the weights, and sends nothing."""

    def connect(self) -> None:
        pass

    def push(self, named_weights: Iterator[tuple[str, Tensor]], version: int) -> SyncStats:
        for _ in named_weights:
            pass
        return SyncStats()

    def close(self) -> None:
        pass


class BroadcastChannel:
    """Sends weights over one torch.distributed group in which every engine is a rank.

    Synchronous, for the trainer's main thread; the engines' coroutines run on a loop elsewhere, through `submit`.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        config: SyncConfig,
        submit: Submit,
        *,
        backend: GroupBackend = "gloo",
        host: str = "127.0.0.1",
    ) -> None:
        """`host` is where the engines reach this process. One rank per engine, more where it reports `tp_size`."""
        self._engines = list(engines)
        self._config = config
        self._submit = submit
        self._backend = backend
        self._host = host
        self._group: UpdateGroup | None = None
        self._has_pushed = False

    def connect(self) -> None:
        """Form the group with all engines, under a fresh name: a name left by a dead trainer could not be used again.

        Raises:
            EngineError: an engine is not healthy, refuses, or is late.
        """
        timeout_s = self._config.timeout_s
        infos = self._all("answer server_info", lambda e: e.server_info())
        sizes = [int(info.get("tp_size") or 1) for info in infos]
        world_size = 1 + sum(sizes)
        name = f"weights-{secrets.token_hex(8)}"
        store = host_store(self._host, world_size, timeout_s)
        joins = [
            self._submit(
                engine.init_update_group(
                    self._host, store.port, 1 + sum(sizes[:index]), world_size, name, self._backend
                )
            )
            for index, engine in enumerate(self._engines)
        ]
        # Joining blocks until everybody is there, so it has a thread of its own while the replies are watched.
        joined: Future[UpdateGroup] = Future()

        def join() -> None:
            try:
                group = UpdateGroup(
                    name, store=store, rank=0, world_size=world_size, backend=self._backend, timeout_s=timeout_s
                )
            except Exception as problem:
                joined.set_exception(problem)
            else:
                joined.set_result(group)

        threading.Thread(target=join, name="join-weight-group", daemon=True).start()
        self._settle("join the weight group", joins, joined.done)
        try:
            self._group = joined.result()
        except Exception as problem:
            raise EngineError(f"the weight group did not form: {problem}") from problem

    def push(self, named_weights: Iterator[tuple[str, Tensor]], version: int) -> SyncStats:
        """Send the whole policy and let the engines go on with it.

        Args:
            named_weights: Hugging Face names and whole tensors; read lazily, about two buckets are held at once.
            version: the weight version that the engines report from now on.

        Raises:
            EngineError: an engine refused, is late, or holds other weights than were sent. The engines stay paused.
        """
        assert self._group is not None, "connect() comes before push()"
        stats = SyncStats()
        clock = _Clock(stats.seconds)
        self._all("pause", lambda e: e.pause("retract"))
        self._all("begin the weight update", self._begin)
        clock.lap("pause")
        sent: dict[str, str] = {}
        buckets = pack(named_weights, int(self._config.bucket_mib * 2**20))
        bucket = next(buckets, None)
        if bucket is None:
            raise ValueError("there are no weights to push")
        while bucket is not None:
            upcoming = next(buckets, None)  # only the last bucket carries the version
            clock.lap("gather")
            sent |= self._broadcast(bucket, None if upcoming is not None else version)
            stats.num_bytes += bucket.data.nbytes
            stats.num_tensors += len(bucket.specs)
            stats.num_buckets += 1
            clock.lap("broadcast")
            bucket = upcoming
        self._all("end the weight update", lambda e: e.end_weight_update())
        self._verify(sent, version)
        clock.lap("verify")
        self._has_pushed = True
        self._all("continue", lambda e: e.resume())
        clock.lap("resume")
        return stats

    def close(self) -> None:
        """Dissolve the group."""
        if self._group is not None:
            group, self._group = self._group, None
            self._all("leave the weight group", lambda e: e.destroy_update_group(group.name))
            group.close()

    async def _begin(self, engine: Engine) -> None:
        """Open an update session; one that a dead trainer left open is closed first, its weights are all replaced."""
        try:
            await engine.begin_weight_update()
        except EngineError:
            if self._has_pushed:
                raise
            with contextlib.suppress(EngineError):  # it may say that what it holds is torn
                await engine.end_weight_update()
            await engine.begin_weight_update()

    def _broadcast(self, bucket: Bucket, version: int | None) -> dict[str, str]:
        """Announce and send one bucket. Returns the digest of each tensor in it."""
        assert self._group is not None
        group = self._group
        names = [spec.name for spec in bucket.specs]
        announcements = [
            self._submit(
                engine.update_weights(
                    names, [s.dtype for s in bucket.specs], [s.shape for s in bucket.specs], group.name, version=version
                )
            )
            for engine in self._engines
        ]
        data = bucket.data.cuda() if self._backend == "nccl" else bucket.data.cpu()
        work = group.broadcast(data)
        # While the bytes are on their way:
        digests = {name: digest(tensor) for name, tensor in unpack(bucket.data, bucket.specs)}
        try:
            self._settle(f"take the bucket with {names[0]}", announcements, work.is_completed)
            work.wait()
        except RuntimeError as problem:
            raise EngineError(f"broadcasting the bucket with {names[0]} failed: {problem}") from problem
        return digests

    def _verify(self, sent: dict[str, str], version: int) -> None:
        """Every engine reports the version and the checksum of what was sent."""
        infos = self._all("report its version", lambda e: e.server_info())
        checksums = self._all("report its checksum", lambda e: e.weights_checksum())
        for engine, info, checksum in zip(self._engines, infos, checksums, strict=True):
            if str(info.get("weight_version")) != str(version):
                raise EngineError(
                    f"{engine.url} reports weight version {info.get('weight_version')!r} after {version} was sent"
                )
            if checksum.get("algorithm") == _OWN_DIGEST:
                _compare(engine.url, sent, checksum)
            else:
                _compare_names(engine.url, sent, checksum)
        whole = {c.get("per_engine_checksum") for c in checksums if c.get("algorithm") != _OWN_DIGEST}
        if len(whole) > 1:
            urls = ", ".join(engine.url for engine in self._engines)
            raise EngineError(f"the engines hold different weights after one push: {urls}")

    def _all(self, what: str, call: Callable[[Engine], Coroutine[Any, Any, Any]]) -> list[Any]:
        """The same call to every engine at once; results in their order."""
        futures = [self._submit(call(engine)) for engine in self._engines]
        self._settle(what, futures, lambda: True)
        return [future.result() for future in futures]

    def _settle(self, what: str, futures: Sequence[Future[Any]], also: Callable[[], bool]) -> None:
        """Wait until all replies are in and `also` holds; the first failure or the deadline ends it.

        Raises:
            EngineError: what an engine answered, or who is late.
        """
        deadline = time.monotonic() + self._config.timeout_s
        while True:
            finished, late = wait(futures, timeout=_REPLY_POLL_S, return_when=FIRST_EXCEPTION)
            failure = next((f.exception() for f in finished if f.exception() is not None), None)
            if failure is not None:
                for future in late:
                    future.cancel()
                raise failure
            if not late and also():
                return
            if time.monotonic() > deadline:
                slow = [e.url for e, f in zip(self._engines, futures, strict=True) if f in late]
                for future in late:
                    future.cancel()
                raise EngineError(
                    f"waited {self._config.timeout_s:g} s for {', '.join(slow) or 'the broadcast'} to {what}"
                )
            if not late:
                time.sleep(_POLL_S)


class _Clock:
    """Adds the time since the last lap to a stage."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds
        self._last = time.monotonic()

    def lap(self, stage: str) -> None:
        now = time.monotonic()
        self._seconds[stage] = self._seconds.get(stage, 0.0) + now - self._last
        self._last = now


def _compare(url: str, sent: dict[str, str], checksum: dict[str, Any]) -> None:
    """One engine's digests against the trainer's own. Raises EngineError naming what differs."""
    held = checksum["ranks"][0]["checksums"]
    wrong = sorted(name for name in sent.keys() | held.keys() if sent.get(name) != held.get(name))
    if wrong:
        raise EngineError(f"{url} holds other weights than were sent: {len(wrong)} differ, such as {wrong[0]!r}")


def _compare_names(url: str, sent: dict[str, str], checksum: dict[str, Any]) -> None:
    """The names that were sent against those of an SGLang server, which skips weights that its model does not have.

    Raises:
        EngineError: a weight was sent that the server does not have, or one that it has was not sent.
    """
    fused = {_fused(name): name for name in sent}
    held = {
        name for rank in checksum.get("ranks", ()) for name in rank["checksums"] if name.endswith((".weight", ".bias"))
    }
    if "lm_head.weight" not in fused:
        held.discard("lm_head.weight")  # tied to the embedding
    unknown = sorted(fused[name] for name in fused.keys() - held)
    missing = sorted(held - fused.keys())
    if unknown:
        raise EngineError(f"{url} has no place for {len(unknown)} of the weights sent, such as {unknown[0]!r}")
    if missing:
        raise EngineError(f"{url} holds {len(missing)} weights that were not sent, such as {missing[0]!r}")


def _fused(name: str) -> str:
    """SGLang's name of a weight: it stacks q, k, v and gate, up (srt/models/qwen3.py, stacked_params_mapping)."""
    for part, whole in _STACKED.items():
        name = name.replace(f".{part}.", f".{whole}.")
    return name
