"""One step's batch from trainer rank 0 to all: each data rank gets the sequences that its passes need, once.

rank 0 --lengths, and what every rank needs--> all ranks, which compute the same plan
rank 0 --the sequences of a data rank--> its first rank --> its other ranks; a stage gets its part of staged streams
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bapo_megatron.runtime.ranks import gather_json
from bapo_megatron.tokens import CORE_STREAMS, TOKEN_IDS, VERSIONS, TokenStream
from bapo_megatron.types import Batch

_SENT_AS = {TOKEN_IDS: "int32", VERSIONS: "int32"}  # every id and every version fits in half of its bytes
_OF_SEQUENCES = {
    "rewards_S": torch.float32,
    "prompt_S": torch.int64,
    "shared_lens_S": torch.int64,
    "teacher_S": torch.int64,
}
"""Values that a batch may have for each sequence; all ranks get them."""

SharePlan = Callable[[Batch], Sequence[Tensor]]
"""The sequences that each data rank needs, int64, ascending: the same on every rank, from lengths and masks alone."""


def header_of(batch: Batch) -> dict[str, Any]:
    """Return what a rank must know about a batch before it gets one, as JSON."""
    return {
        "metrics": batch.metrics,
        "num_sequences": batch.num_sequences,
        "num_tokens": batch.sampled_T.numel(),
        "of_sequences": [name for name in _OF_SEQUENCES if getattr(batch, name) is not None],
        "streams": [asdict(stream) for stream in batch.values],
    }


class BatchShares:
    """The ranks that share batches. Construct it on every rank, and call `deal` on every rank.

    Args:
        data_rank: this rank's place among the ranks that hold copies of the model.
        stage: this rank's pipeline stage.
        layers_of: given a pipeline stage and a number of layers, returns the layers that the stage holds.
        timeout_s: deadline of one message.
    """

    def __init__(
        self, data_rank: int, stage: int, layers_of: Callable[[int, int], list[int]], timeout_s: float
    ) -> None:
        self._layers_of = layers_of
        places = gather_json([data_rank, stage])
        self._stages = [stage for _, stage in places]
        self._ranks = {of: [r for r, (d, _) in enumerate(places) if d == of] for of, _ in sorted(places)}
        groups = {
            of: dist.new_group(ranks, timeout=timedelta(seconds=timeout_s), backend="gloo")
            for of, ranks in (self._ranks.items() if len(places) > 1 else ())
        }
        self._group = groups.get(data_rank)

    def deal(self, batch: Batch | None, header: dict[str, Any], plan: SharePlan) -> Batch:
        """Return this rank's share of rank 0's batch.

        Args:
            batch: the batch on rank 0, None elsewhere.
            header: the batch's description, on every rank.
        """
        if len(self._stages) == 1:
            assert batch is not None
            return batch
        streams = [TokenStream(**{**stream, "shape": tuple(stream["shape"])}) for stream in header["streams"]]
        num_sequences, num_tokens = header["num_sequences"], header["num_tokens"]
        seq_lens_S = batch.seq_lens_S if batch else torch.empty(num_sequences, dtype=torch.int64)
        of_all: dict[str, Any] = {
            name: getattr(batch, name) if batch else torch.empty(num_sequences, dtype=_OF_SEQUENCES[name])
            for name in header["of_sequences"]
        }
        everywhere = {
            stream: batch.values[stream] if batch else stream.new_tensor(num_tokens)
            for stream in streams
            if stream.to == "every rank"
        }
        for tensor in (seq_lens_S, *of_all.values(), *everywhere.values()):
            _broadcast(tensor)
        of_owners = [stream for stream in streams if stream.to != "every rank"]
        lengths = _batch(everywhere | {stream: stream.new_tensor(0) for stream in of_owners}, seq_lens_S)
        lengths = replace(lengths, **of_all, metrics=header["metrics"])
        rank = dist.get_rank()
        for needed, ranks in zip(plan(lengths), self._ranks.values(), strict=True):
            if rank not in (0, *ranks):
                continue
            share = lengths.holding(needed)
            values = {}
            for stream in of_owners:
                rows, sent = None, replace(stream, dtype=_SENT_AS.get(stream, stream.dtype))
                if batch:
                    rows = _cast(share.here(batch.values[stream]), sent)
                    if ranks[0] != 0:
                        _send(rows, ranks[0])
                elif rank == ranks[0]:
                    rows = _receive(sent.new_tensor(share.num_tokens_here), 0)
                if rank in ranks:
                    values[stream] = _cast(self._passed_on(sent, rows, ranks, share.num_tokens_here), stream)
            if rank in ranks:
                mine = _batch(everywhere | values, seq_lens_S)
                mine = replace(mine, here_S=share.here_S, **of_all, metrics=header["metrics"])
        return mine

    def _passed_on(self, stream: TokenStream, rows: Tensor | None, ranks: list[int], num_rows: int) -> Tensor:
        """Return the rows that this rank of a data rank needs; the first rank has them all."""
        if stream.to == "owner":
            rows = stream.new_tensor(num_rows) if rows is None else rows
            if len(ranks) > 1:
                _broadcast(rows, ranks[0], self._group)
            return rows
        own = self._layers_of(self._stages[dist.get_rank()], stream.shape[0])
        if rows is None:
            return _receive(replace(stream, shape=(len(own), *stream.shape[1:])).new_tensor(num_rows), ranks[0])
        for other in ranks[1:]:
            _send(rows[:, self._layers_of(self._stages[other], stream.shape[0])], other)
        return rows[:, own]


def _batch(values: dict[TokenStream, Tensor], seq_lens_S: Tensor) -> Batch:
    core: dict[str, Any] = {f"{stream.name}_T": rows for stream, rows in values.items() if stream in CORE_STREAMS}
    extra = {stream: rows for stream, rows in values.items() if stream not in CORE_STREAMS}
    return Batch(seq_lens_S=seq_lens_S, extra=extra, **core)


def _cast(rows: Tensor, stream: TokenStream) -> Tensor:
    return rows.to(getattr(torch, stream.dtype))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _broadcast(tensor: Tensor, src: int = 0, group: dist.ProcessGroup | None = None) -> None:
    assert tensor.is_contiguous(), "it is received in place"
    if tensor.numel():
        dist.broadcast(_bytes(tensor), src=src, group=group)


def _send(tensor: Tensor, to: int) -> None:
    if tensor.numel():
        dist.send(_bytes(tensor), dst=to)


def _receive(tensor: Tensor, source: int) -> Tensor:
    if tensor.numel():
        dist.recv(_bytes(tensor), src=source)
    return tensor
