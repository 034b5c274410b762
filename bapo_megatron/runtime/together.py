"""What one rank meets, all ranks hear: if one fails, all fail with the same error, and none waits for one that left.

    failing_together    any rank's error in a block
    first_complaint     any rank's problem, as text
    share_json          rank 0's value or error, however long it takes

All are collective over the default process group.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from bapo_megatron import errors
from bapo_megatron.errors import UserError
from bapo_megatron.runtime.heartbeat import HEARTBEAT, TRAINER
from bapo_megatron.runtime.ranks import gather_json, rank_and_size

_T = TypeVar("_T")


@contextmanager
def failing_together(kind: type[Exception] = Exception) -> Iterator[None]:
    """If the block fails on any rank, raise the first such rank's error on all, so that none waits for one that left.

    Collective over all ranks at the end of the block.

    Args:
        kind: the errors to share; this rank alone raises any other, immediately.

    Raises:
        UserError: on every rank, with the same class and text. If the error is not a UserError, the text names the rank
            that failed, where the error is the UserError's cause.
    """
    error: Exception | None = None
    complaint = None
    try:
        yield
    except kind as caught:
        error, name = caught, type(caught).__name__
        text = f"trainer rank {rank_and_size()[0]} failed: {name}: {caught}"
        complaint = [name, str(caught)] if isinstance(caught, UserError) else ["UserError", text]
    complaints = [found for found in gather_json(complaint) if found is not None]
    if not complaints:
        return
    if isinstance(error, UserError) and complaint == complaints[0]:
        raise error
    name, text = complaints[0]
    raise getattr(errors, name, UserError)(text) from error


def first_complaint(complaint: str | None) -> str | None:
    """Return the complaint of the lowest rank that has one, on every rank. Collective over all ranks."""
    found = [(rank, text) for rank, text in enumerate(gather_json(complaint)) if text is not None]
    if not found:
        return None
    rank, text = found[0]
    return text if rank_and_size()[1] == 1 else f"trainer rank {rank}: {text}"


def share_json(make: Callable[[], _T] | None, *, sign_of_life_s: float) -> _T:
    """Return rank 0's JSON value on every rank of the default process group.

    Args:
        make: on rank 0, makes the value in a thread, however long it takes; None elsewhere.
        sign_of_life_s: how often rank 0 tells the waiting ranks that it is alive, so that sampling may outlast the
            deadline of a collective.

    Raises:
        UserError: `make` raised one; all ranks raise it with the same message.
    """
    if make is None:
        wait_together(None)
        reply = _broadcast_json({})
        if "error" in reply:
            raise UserError(reply["error"])
        return reply["value"]
    if dist.get_world_size() == 1:
        return make()
    with ThreadPoolExecutor(1, "first-rank") as pool:
        making = pool.submit(make)
        wait_together(making, sign_of_life_s)
    try:
        value = making.result()
    except UserError as error:
        _broadcast_json({"error": str(error)})
        raise
    _broadcast_json({"value": value})
    return value


def wait_together(making: Future[Any] | None, sign_of_life_s: float = 0.0) -> None:
    """Return on all ranks once rank 0's future is done; broadcast a sign of life every `sign_of_life_s`."""
    is_done = torch.zeros((), dtype=torch.uint8)
    while not is_done:
        if making is not None:
            is_done.fill_(bool(wait([making], timeout=sign_of_life_s).done))
        dist.broadcast(is_done, src=0)
        if making is None:  # rank 0 beats with the engines' answers
            HEARTBEAT.beat(TRAINER, "sign of life of rank 0")


def _broadcast_json(value: dict[str, Any]) -> dict[str, Any]:
    """Return rank 0's value on every rank."""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    size = torch.tensor([data.numel()])
    dist.broadcast(size, src=0)
    if dist.get_rank() != 0:
        data = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, src=0)
    return json.loads(bytes(data.tolist()))
