"""From finished groups to one padding-free batch, and the same batch on every trainer rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from bapo_megatron.errors import UserError
from bapo_megatron.types import Batch, Group

_TENSORS = tuple(f.name for f in fields(Batch) if f.name != "metrics")


def build_batch(
    groups: Sequence[Group], advantages: Callable[[Tensor], Tensor], metrics: dict[str, float] | None = None
) -> Batch:
    """Pack all responses of all groups, with one advantage per response spread over its tokens.

    `advantages` maps the rewards of one group, float64 [G], to advantages [G] (see algorithms.advantages).
    A response without a single token carries nothing to learn from and is left out.
    """
    per_sequence: list[float] = []
    trajectories = []
    for group in groups:
        values = advantages(torch.tensor(group.rewards, dtype=torch.float64)).tolist()
        for trajectory, value in zip(group.trajectories, values, strict=True):
            if trajectory.num_response_tokens:
                trajectories.append(trajectory)
                per_sequence.append(value)
    prompt_lens = torch.tensor([len(t.prompt.token_ids) for t in trajectories], dtype=torch.int64)
    response_lens = torch.tensor([t.num_response_tokens for t in trajectories], dtype=torch.int64)
    is_response_T = torch.repeat_interleave(
        torch.tensor([False, True]).repeat(len(trajectories)), torch.stack([prompt_lens, response_lens], 1).flatten()
    )
    num_tokens = is_response_T.numel()

    def on_responses(values: Sequence[float] | Sequence[int] | Tensor, dtype: torch.dtype, prompt: float) -> Tensor:
        out_T = torch.full((num_tokens,), prompt, dtype=dtype)
        out_T[is_response_T] = torch.as_tensor(values, dtype=dtype)
        return out_T

    advantages_S = torch.tensor(per_sequence, dtype=torch.float32)
    return Batch(
        token_ids_T=torch.tensor(
            [i for t in trajectories for i in (*t.prompt.token_ids, *t.response_ids)], dtype=torch.int64
        ),
        seq_lens_S=prompt_lens + response_lens,
        prompt_lens_S=prompt_lens,
        advantages_T=on_responses(advantages_S.repeat_interleave(response_lens), torch.float32, 0.0),
        behaviour_logprobs_T=on_responses(
            list(chain.from_iterable(t.behaviour_logprobs for t in trajectories)), torch.float32, 0.0
        ),
        versions_T=on_responses(list(chain.from_iterable(t.versions for t in trajectories)), torch.int64, -1),
        mask_T=is_response_T,
        metrics=metrics or {},
    )


def broadcast_batch(batch: Batch | None, error: UserError | None = None) -> Batch:
    """Hand rank 0's batch, or its failure, to every rank of the default process group. No pickle.

    A header of JSON says what follows; rank 0 passes `batch` or `error`, the others pass None.

    Raises:
        UserError: on every rank, with the message of rank 0's error.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        if error is not None:
            raise error
        assert batch is not None
        return batch
    header: dict = {}
    if dist.get_rank() == 0:
        if error is not None:
            header = {"error": str(error)}
        else:
            assert batch is not None
            header = {"metrics": batch.metrics, "tensors": {}}
            for name in _TENSORS:
                tensor: Tensor = getattr(batch, name)
                header["tensors"][name] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
    header = _broadcast_json(header)
    if "error" in header:
        raise error if error is not None else UserError(header["error"])
    tensors = {}
    for name, (dtype, shape) in header["tensors"].items():
        tensor = getattr(batch, name) if batch is not None else torch.empty(shape, dtype=getattr(torch, dtype))
        wire = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor.contiguous()
        dist.broadcast(wire, src=0)
        tensors[name] = wire.to(tensor.dtype)
    return Batch(**tensors, metrics=header["metrics"])


def _broadcast_json(value: dict) -> dict:
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    size = torch.tensor([data.numel()])
    dist.broadcast(size, src=0)
    if dist.get_rank() != 0:
        data = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, src=0)
    return json.loads(bytes(data.tolist()))
