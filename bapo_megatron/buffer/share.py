"""One batch for all trainer ranks: rank 0 makes it, the others get a copy (a header of JSON, then tensors)."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import fields
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from bapo_megatron.errors import UserError
from bapo_megatron.runtime.heartbeat import HEARTBEAT, TRAINER
from bapo_megatron.types import Batch

T = TypeVar("T")
_LATER = ("proximal_logprobs_T", "proximal_version", "reference_logprobs_T")  # each rank adds them
_TENSORS = tuple(f.name for f in fields(Batch) if f.name not in ("metrics", *_LATER))


def share_batch(make_batch: Callable[[], Batch | None] | None, *, sign_of_life_s: float) -> Batch | None:
    """The batch that rank 0 makes, or the None that it returns, on every rank of the default process group.

    Args:
        make_batch: on rank 0, what makes it (in a thread, however long it takes); None elsewhere.
        sign_of_life_s: how often rank 0 tells the waiting ranks that it goes on, so that sampling may outlast the
            deadline of a collective.

    Raises:
        UserError: `make_batch` raised one; on every rank, with the same message.
    """
    if dist.get_world_size() == 1:
        assert make_batch is not None
        return make_batch()
    if make_batch is None:
        wait_together(None)
        return _receive(_receive_header())
    batch = _make(make_batch, sign_of_life_s)
    if batch is None:
        _broadcast_json({"none": True})
    else:
        _send(batch)
    return batch


def share_metrics(
    make: Callable[[], dict[str, float] | None] | None, *, sign_of_life_s: float
) -> dict[str, float] | None:
    """Like `share_batch`, for what rank 0 measures."""
    if dist.get_world_size() == 1:
        assert make is not None
        return make()
    if make is None:
        wait_together(None)
        return _receive_header()["metrics"]
    metrics = _make(make, sign_of_life_s)
    _broadcast_json({"metrics": metrics})
    return metrics


def _make(make: Callable[[], T], sign_of_life_s: float) -> T:
    """What rank 0 makes while the others wait; a UserError goes to all."""
    with ThreadPoolExecutor(1, "first-rank") as pool:
        making = pool.submit(make)
        wait_together(making, sign_of_life_s)
    try:
        return making.result()
    except UserError as error:
        _broadcast_json({"error": str(error)})
        raise


def _receive_header() -> dict[str, Any]:
    header = _broadcast_json({})
    if "error" in header:
        raise UserError(header["error"])
    return header


def wait_together(making: Future[Any] | None, sign_of_life_s: float = 0.0) -> None:
    """Return on all ranks once rank 0's future is done; a broadcast every `sign_of_life_s` keeps the others patient."""
    is_done = torch.zeros((), dtype=torch.uint8)
    while not is_done:
        if making is not None:
            is_done.fill_(bool(wait([making], timeout=sign_of_life_s).done))
        dist.broadcast(is_done, src=0)
        if making is None:  # rank 0 itself goes by what the engines answer
            HEARTBEAT.beat(TRAINER, "sign of life of rank 0")


def _send(batch: Batch) -> None:
    tensors = {name: tensor for name in _TENSORS if (tensor := getattr(batch, name)) is not None}
    described = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()}
    _broadcast_json({"metrics": batch.metrics, "tensors": described})
    for tensor in tensors.values():
        _broadcast(tensor)


def _receive(header: dict[str, Any]) -> Batch | None:
    if "none" in header:
        return None
    tensors: dict[str, Any] = {
        name: _broadcast(torch.empty(shape, dtype=getattr(torch, dtype)))
        for name, (dtype, shape) in header["tensors"].items()
    }
    return Batch(**tensors, metrics=header["metrics"])


def _broadcast(tensor: Tensor) -> Tensor:
    wire = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor.contiguous()
    dist.broadcast(wire, src=0)
    return wire.to(tensor.dtype)


def _broadcast_json(value: dict[str, Any]) -> dict[str, Any]:
    """Rank 0's value, on every rank."""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    size = torch.tensor([data.numel()])
    dist.broadcast(size, src=0)
    if dist.get_rank() != 0:
        data = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, src=0)
    return json.loads(bytes(data.tolist()))
