"""Weight updates over a torch.distributed group or from a folder, as in SGLang's scheduler."""

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterable, Set
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bapo_megatron.engines.base import Memory
from bapo_megatron.engines.embedded.engine import BatchingEngine
from bapo_megatron.engines.embedded.protocol import InitGroupBody, UpdateFromDiskBody, UpdateWeightsBody
from bapo_megatron.engines.update_group import UpdateGroup, reach_store
from bapo_megatron.engines.wire import DIGEST, TensorSpec, digest, unpack_bucket
from bapo_megatron.errors import CheckpointError, plural
from bapo_megatron.hf.reader import weight_files
from bapo_megatron.runtime.bodies import BadRequestError, NotNowError

_MAX_WEIGHT = 1e15  # products of two such values can be summed within float32


class WeightUpdater:
    """One engine's side of weight updates. Its methods block: call them outside the event loop."""

    def __init__(self, engine: BatchingEngine, *, timeout_s: float) -> None:
        """`timeout_s` bounds joining a group, and each broadcast."""
        self._engine = engine
        self._timeout_s = timeout_s
        self.groups: dict[str, UpdateGroup] = {}
        self._lock = threading.Lock()  # one command at a time
        self._in_session = False
        self._has_failed = False  # a bucket of this session was refused or lost
        self._digests: dict[str, str] = {}  # digests of the current weights; missing ones are computed on request

    def init_group(self, body: InitGroupBody) -> None:
        """Join the trainer's group. Raises BadRequestError if the name is taken or another rank does not join."""
        with self._lock:
            if body.group_name in self.groups:
                raise BadRequestError(f"group_name: {body.group_name!r} has already been created")
            if body.rank_offset >= body.world_size:
                raise BadRequestError(f"rank_offset: {body.rank_offset} is not below world_size={body.world_size}")
            try:
                store = reach_store(body.master_address, body.master_port, body.world_size, self._timeout_s)
                self.groups[body.group_name] = UpdateGroup(
                    body.group_name,
                    store=store,
                    rank=body.rank_offset,
                    world_size=body.world_size,
                    backend=body.backend,
                    timeout_s=self._timeout_s,
                )
            except RuntimeError as problem:
                raise BadRequestError(f"Failed to initialize custom process group: {problem}") from problem

    def destroy_group(self, name: str) -> None:
        """Leave a group. Raises BadRequestError if there is none of this name."""
        with self._lock:
            if name not in self.groups:
                raise BadRequestError(f"group_name: {name!r} does not exist")
            self.groups.pop(name).close()

    def begin(self) -> None:
        """Open an update session. Raises BadRequestError if one is open."""
        with self._lock:
            if self._in_session:
                raise BadRequestError("a weight update session is open; call end_weight_update first")
            self._in_session = True
            self._has_failed = False

    def end(self) -> None:
        """Close the session. The received weights are now the model's, with or without a version.

        Raises:
            BadRequestError: no session is open, or a failed update left the weights torn; nothing is sampled until
                a later update is whole.
        """
        with self._lock:
            if not self._in_session:
                raise BadRequestError("no weight update session is open; call begin_weight_update first")
            self._in_session = False
            if self._has_failed and self._engine.is_torn:
                raise BadRequestError("the weight update is incomplete: push all weights again")
            self._engine.call(lambda: self._engine.publish(None)).result(self._timeout_s)

    def update(self, body: UpdateWeightsBody) -> dict[str, str]:
        """Receive the announced weights into place, and return each one's digest by name.

        It refuses before it receives anything.

        Raises:
            BadRequestError: no session, no group, or tensors of another model. The group is then closed, so that the
                sender's broadcast fails immediately instead of at its deadline.
        """
        with self._lock:
            group = self.groups.get(body.group_name)
            try:
                specs = self._checked(body)
                if group is None:
                    raise BadRequestError(
                        f"group_name: {body.group_name!r} does not exist; call init_weights_update_group"
                    )
                if body.abort_all_requests:
                    self._abort_all()
                self._check_memory()
                self._run_when_still(lambda: self._engine.set_weights([]))  # torn: stop sampling
                self._receive(group, specs, flat=body.load_format == "flattened_bucket")
                if body.flush_cache or body.weight_version is not None:
                    self._run_when_still(lambda: self._finish(body))
            except Exception:
                self._has_failed = True
                if group is not None:
                    del self.groups[body.group_name]
                    group.close()
                raise
            return {spec.name: self._digests[spec.name] for spec in specs}

    def update_from_disk(self, body: UpdateFromDiskBody) -> None:
        """Load a checkpoint folder. All of it is checked before any of it is put into place.

        Raises:
            BadRequestError: the folder cannot be read, or does not hold exactly this model's names, types and shapes.
        """
        with self._lock, contextlib.ExitStack() as files:
            self._check_memory()
            try:
                opened = [
                    files.enter_context(safe_open(f, framework="pt")) for f in weight_files(Path(body.model_path))
                ]
                self._engine.call(lambda: self._check_files(opened)).result(self._timeout_s)  # it has the CPU threads
            except (CheckpointError, OSError, SafetensorError) as problem:
                raise BadRequestError(f"model_path: {problem}") from None
            if body.abort_all_requests:
                self._abort_all()
            tensors = ((name, file.get_tensor(name)) for file in opened for name in file.keys())  # noqa: SIM118
            self._digests.clear()
            self._run_when_still(lambda: self._install_all(tensors, body))

    def checksum(self) -> dict[str, Any]:
        """Return the digest of each weight by Hugging Face name, and one digest of them all."""
        weights = self._engine.model.named_weights
        with self._lock:
            self._check_memory()
            checksums = {name: self._digests.get(name) or digest(tensor) for name, tensor in weights.items()}
            self._digests = checksums
        whole = hashlib.sha256("".join(f"{n}{checksums[n]}" for n in sorted(checksums)).encode()).hexdigest()
        return {
            "algorithm": DIGEST,
            "ranks": [{"checksums": checksums, "per_gpu_checksum": whole}],
            "per_engine_checksum": hashlib.sha256(whole.encode()).hexdigest(),
        }

    def release(self, memory: Set[Memory]) -> None:
        """See `BatchingEngine.release`."""
        with self._lock:
            if "weights" in memory:
                self._digests.clear()
            self._run_when_still(lambda: self._engine.release(memory))

    def restore(self, memory: Set[Memory]) -> None:
        """See `BatchingEngine.restore`. Nothing is sampled until all lost weights have been received."""
        with self._lock:
            self._engine.call(lambda: self._engine.restore(memory)).result(self._timeout_s)

    def manifest(self) -> dict[str, Any]:
        """Return the name, type and shape of each weight."""
        specs = [TensorSpec.of(name, tensor) for name, tensor in self._engine.model.named_weights.items()]
        return {"weights": [(spec.name, spec.dtype, spec.shape) for spec in specs]}

    def _check_memory(self) -> None:
        if "weights" in self._engine.released:
            raise NotNowError("the memory of the weights is released: call resume_memory_occupation first")

    def _abort_all(self) -> None:
        self._engine.call(lambda: self._engine.abort(None)).result(self._timeout_s)

    def _run_when_still(self, command: Callable[[], None]) -> None:
        """Run a command on the engine thread once nothing is being decoded, or the engine is paused."""
        done = self._engine.call(command, when_still=True)
        try:
            done.result(self._timeout_s)
        except TimeoutError:
            if done.cancel():
                raise BadRequestError(
                    f"requests were still running after {self._timeout_s:g} s; pause generation before an update"
                ) from None
            done.result(self._timeout_s)

    def _check_files(self, files: list[safe_open]) -> None:
        """Check that the files hold exactly the model's weights, with sane values. Raises CheckpointError."""
        missing = set(self._engine.model.named_weights)
        for file in files:
            for name in file.keys():  # noqa: SIM118 - safe_open is not a mapping
                tensor = file.get_tensor(name)
                self._engine.model.check_weight(TensorSpec.of(name, tensor))
                if not bool((tensor.abs() <= _MAX_WEIGHT).all()):  # false for nan
                    raise CheckpointError(f"{name} holds nan, or a value beyond {_MAX_WEIGHT:g}: it is broken")
                missing.discard(name)
        if missing:
            raise CheckpointError(f"{plural(len(missing), 'weight')} missing, such as {min(missing)!r}")

    def _checked(self, body: UpdateWeightsBody) -> list[TensorSpec]:
        if not self._in_session:
            raise BadRequestError(
                "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
            )
        if self._has_failed:
            raise BadRequestError("an earlier part of this weight update failed: end it and push all weights again")
        if not len(body.names) == len(body.dtypes) == len(body.shapes):
            raise BadRequestError(
                f"names, dtypes, shapes: {len(body.names)}, {len(body.dtypes)} and {len(body.shapes)} entries"
            )
        specs = [TensorSpec(n, d, tuple(s)) for n, d, s in zip(body.names, body.dtypes, body.shapes, strict=True)]
        try:
            for spec in specs:
                self._engine.model.check_weight(spec)
        except CheckpointError as problem:
            raise BadRequestError(f"names, dtypes, shapes: {problem}") from None
        return specs

    def _receive(self, group: UpdateGroup, specs: list[TensorSpec], *, flat: bool) -> None:
        """Receive a flat bucket or one broadcast per weight straight into place; digest each while the next arrives.

        Raises:
            BadRequestError: the weights do not arrive.
        """
        places = {spec.name: self._engine.model.named_weights[spec.name] for spec in specs}
        for name in places:
            self._digests.pop(name, None)
        try:
            if flat:
                data = torch.empty(sum(spec.num_bytes for spec in specs), dtype=torch.uint8)
                group.broadcast(data).wait()
                for name, tensor in unpack_bucket(data, specs):
                    places[name].copy_(tensor)
                    self._digests[name] = digest(places[name])
                self._engine.lost -= places.keys()
                return
            works = {name: group.broadcast(place) for name, place in places.items()}
            try:
                for name, work in works.items():
                    work.wait()
                    self._digests[name] = digest(places[name])
            finally:
                _wait_for_all(works.values())  # none may write into its place once this update is over
            self._engine.lost -= places.keys()
        except (RuntimeError, ValueError) as problem:
            raise BadRequestError(f"Failed to receive weights: {problem}") from problem

    def _finish(self, body: UpdateWeightsBody) -> None:
        """Flush and publish as the request asks; runs on the engine thread."""
        if body.flush_cache:
            self._engine.flush_cache()
        if body.weight_version is not None:
            self._engine.publish(body.weight_version)

    def _install_all(self, tensors: Iterable[tuple[str, Tensor]], body: UpdateFromDiskBody) -> None:
        """Install weights from files, on the engine thread; if one fails midway, nothing is sampled."""
        if body.flush_cache:
            self._engine.flush_cache()
        self._engine.set_weights(tensors)
        self._engine.publish(body.weight_version)


def _wait_for_all(works: Iterable[dist.Work]) -> None:
    """Wait until each has ended. After a failure the others fail immediately, or at the group's deadline."""
    for work in works:
        with contextlib.suppress(RuntimeError):
            work.wait()
