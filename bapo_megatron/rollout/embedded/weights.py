"""Weight updates over a torch.distributed group, as SGLang's scheduler does them: begin, buckets, end."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bapo_megatron.errors import CheckpointError
from bapo_megatron.rollout.embedded.engine import BatchingEngine
from bapo_megatron.rollout.embedded.protocol import BadRequestError, InitGroupBody, UpdateWeightsBody
from bapo_megatron.sync.buckets import TensorSpec, digest, unpack
from bapo_megatron.sync.group import UpdateGroup, connect_store

Receive = Callable[[], list[tuple[str, Tensor]]]


class WeightUpdater:
    """One engine's side of weight updates. Its methods block: call them off the event loop."""

    def __init__(self, engine: BatchingEngine, *, timeout_s: float) -> None:
        """`timeout_s` bounds joining a group, and each broadcast."""
        self._engine = engine
        self._timeout_s = timeout_s
        self._groups: dict[str, UpdateGroup] = {}
        self._lock = threading.Lock()  # one command at a time
        self._in_session = False
        self._has_failed = False  # a bucket of this session was refused or lost

    def init_group(self, body: InitGroupBody) -> None:
        """Join the trainer's group. Raises BadRequestError when the name is taken or the others do not come."""
        with self._lock:
            if body.group_name in self._groups:
                raise BadRequestError(f"group_name: {body.group_name!r} has already been created")
            if body.rank_offset >= body.world_size:
                raise BadRequestError(f"rank_offset: {body.rank_offset} is not below world_size={body.world_size}")
            try:
                store = connect_store(body.master_address, body.master_port, body.world_size, self._timeout_s)
                self._groups[body.group_name] = UpdateGroup(
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
        """Raises BadRequestError when there is no such group."""
        with self._lock:
            if name not in self._groups:
                raise BadRequestError(f"group_name: {name!r} does not exist")
            self._groups.pop(name).close()

    def begin(self) -> None:
        """Open an update session. Raises BadRequestError when one is open."""
        with self._lock:
            if self._in_session:
                raise BadRequestError("a weight update session is open; call end_weight_update first")
            self._in_session = True
            self._has_failed = False

    def end(self) -> None:
        """Close the session; what was received is now the model, whether or not a version was given.

        Raises:
            BadRequestError: no session is open, or a failed update left the weights torn; nothing is sampled from them
                until a later update is whole.
        """
        with self._lock:
            if not self._in_session:
                raise BadRequestError("no weight update session is open; call begin_weight_update first")
            self._in_session = False
            if self._has_failed and self._engine.is_torn:
                raise BadRequestError("the weight update is incomplete: push all weights again")
            self._engine.call(lambda: self._engine.publish(None)).result(self._timeout_s)

    def update(self, body: UpdateWeightsBody) -> None:
        """Receive one announced broadcast and put it in place. A refusal comes before anything is received.

        Raises:
            BadRequestError: no session, no group, or tensors that are not this model's; the group is then closed, so
                that the sender's broadcast fails at once and does not wait for its deadline.
        """
        with self._lock:
            group = self._groups.get(body.group_name)
            try:
                specs = self._checked(body)
                if group is None:
                    raise BadRequestError(
                        f"group_name: {body.group_name!r} does not exist; call init_weights_update_group"
                    )
                if body.abort_all_requests:
                    self._engine.call(lambda: self._engine.abort(None)).result(self._timeout_s)
                receive = self._receiver(group, specs, flat=body.load_format == "flattened_bucket")
                self._wait_until_installed(receive, body)
            except Exception:
                self._has_failed = True
                if group is not None:
                    del self._groups[body.group_name]
                    group.close()
                raise

    def _wait_until_installed(self, receive: Receive, body: UpdateWeightsBody) -> None:
        """Once the engine is still; the broadcast itself has the group's deadline."""
        installed = self._engine.call_when_still(lambda: self._install(receive, body))
        try:
            installed.result(self._timeout_s)
        except TimeoutError:
            if installed.cancel():
                raise BadRequestError(
                    f"requests were still running after {self._timeout_s:g} s; pause generation before an update"
                ) from None
            installed.result(2 * self._timeout_s)

    def checksum(self) -> dict[str, Any]:
        """SHA-256 of each weight under its Hugging Face name, and of all together."""
        weights = self._engine.model.named_weights
        checksums = self._engine.call(lambda: {name: digest(t) for name, t in weights.items()}).result(self._timeout_s)
        whole = hashlib.sha256("".join(f"{n}{checksums[n]}" for n in sorted(checksums)).encode()).hexdigest()
        return {
            "algorithm": "sha256",
            "ranks": [{"checksums": checksums, "per_gpu_checksum": whole}],
            "per_engine_checksum": hashlib.sha256(whole.encode()).hexdigest(),
        }

    def _checked(self, body: UpdateWeightsBody) -> list[TensorSpec]:
        if not self._in_session:
            raise BadRequestError(
                "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
            )
        if not len(body.names) == len(body.dtypes) == len(body.shapes):
            raise BadRequestError(
                f"names, dtypes, shapes: {len(body.names)}, {len(body.dtypes)} and {len(body.shapes)} entries"
            )
        specs = []
        for name, dtype, shape in zip(body.names, body.dtypes, body.shapes, strict=True):
            try:
                self._engine.model.check_weight(name, dtype, shape)
            except CheckpointError as problem:
                raise BadRequestError(f"names, dtypes, shapes: {problem}") from None
            specs.append(TensorSpec(name, dtype, tuple(shape)))
        return specs

    def _receiver(self, group: UpdateGroup, specs: list[TensorSpec], *, flat: bool) -> Receive:
        """A function that receives one flat bucket, or one broadcast per tensor."""

        def receive_flat() -> list[tuple[str, Tensor]]:
            data = torch.empty(sum(spec.num_bytes for spec in specs), dtype=torch.uint8)
            group.broadcast(data).wait()
            return unpack(data, specs)

        def receive_each() -> list[tuple[str, Tensor]]:
            tensors = [(spec.name, torch.empty(spec.shape, dtype=spec.torch_dtype)) for spec in specs]
            for work in [group.broadcast(tensor) for _, tensor in tensors]:
                work.wait()
            return tensors

        return receive_flat if flat else receive_each

    def _install(self, receive: Receive, body: UpdateWeightsBody) -> None:
        """Runs on the engine thread: nothing is sampled meanwhile."""
        if body.flush_cache:
            self._engine.flush_cache()
        try:
            tensors = receive()
        except (RuntimeError, ValueError) as problem:
            raise BadRequestError(f"Failed to receive weights: {problem}") from problem
        self._engine.set_weights(tensors, version=body.weight_version)
