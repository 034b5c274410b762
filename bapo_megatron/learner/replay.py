"""Replay of routes: in every pass of the policy, its routers take the experts that the engine chose.

    MicroBatch.extra -> PackRoutes, in the description of the pack -> layer -> its router

A layer gets the description again when it is recomputed, so there is no queue and no state between packs. The weights
of the experts are the live router's, so it gets a gradient. Each layer counts its rows, and a wrong count ends the run:
a layer that missed its routes would train on wrong gradients without an error.

Shape legend: T tokens of this rank, L layers, K experts that a token chooses, C experts
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from bapo_megatron.errors import UserError
from bapo_megatron.hf.shape import ModelShape
from bapo_megatron.hf.streams import ROUTES
from bapo_megatron.learner.packs import KINDS, PackedSequences, PackRoutes, is_recorded
from bapo_megatron.learner.parallel import ParallelLayout, device
from bapo_megatron.learner.policy import PolicyModel
from bapo_megatron.tokens import TokenStream
from bapo_megatron.types import MicroBatch, MiniBatch


class LayerRoutes:
    """What a layer tells its router, in the place of Megatron's `RouterReplay`, which keeps one list per process."""

    def __init__(self, index: int, column: int) -> None:
        self._place = index, column
        self._pack: PackRoutes | None = None

    def receive(self, layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the pack's routes until the router asks: a hook before the layer."""
        self._pack = kwargs["packed_seq_params"].routes

    def get_replay_topk(
        self,
        scores_TC: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return scores and experts, [T, K]; TopKRouter calls it."""
        pack, self._pack = self._pack, None
        assert pack is not None, "a router ran without its layer"
        assert default_compute_topk is not None
        _, own_TK = default_compute_topk(scores_TC, topk, num_groups, group_topk)
        chosen_TK = pack.experts(*self._place, own_TK)
        return scores_TC.gather(1, chosen_TK), chosen_TK


class ReplayingPolicy(PolicyModel):
    """A part of the policy whose layers take the experts in their micro-batch, where it has any."""

    def __init__(self, config: TransformerConfig, shape: ModelShape, layout: ParallelLayout, chunk: int = 0) -> None:
        super().__init__(config, shape, layout, chunk)
        assert shape.experts is not None, "learner/fit.py checks this"
        self.layout = layout
        self.layers = [layer.layer_number - 1 for layer in self.decoder.layers]
        self.stage_layers = layout.layers_of_stage(layout.pipeline_rank, shape.num_layers)
        width = 2 * KINDS + 1 + shape.experts.num_experts
        self.counts_LX = torch.zeros(len(self.layers), width, dtype=torch.int64, device=device())
        for index, layer in enumerate(self.decoder.layers):
            layer.mlp.router.router_replay = routes = LayerRoutes(index, self.stage_layers.index(self.layers[index]))
            layer.register_forward_pre_hook(routes.receive, with_kwargs=True)

    def describe(self, batch: MicroBatch) -> PackedSequences:
        pack = super().describe(batch)
        stream, rows_TLK = routes_of(batch)
        assert rows_TLK.shape[1] == len(self.stage_layers), "routes of another stage's layers"
        is_token_T = _is_token(batch)
        if self.config.sequence_parallel:
            size, rank = self.layout.tensor_size, self.layout.tensor_rank
            rows_TLK, is_token_T = rows_TLK.chunk(size)[rank], is_token_T.chunk(size)[rank]
        pack.routes = PackRoutes(rows_TLK, is_token_T, stream, self.counts_LX)
        return pack

    def is_recomputed(self, index: int) -> bool:
        """Return whether a layer's router runs again before its backward pass; `index` is its place in this chunk."""
        c = self.config
        return c.recompute_granularity == "full" and (c.recompute_method == "uniform" or index < c.recompute_num_layers)


def routes_of(batch: MicroBatch) -> tuple[TokenStream, Tensor]:
    """Return the stream of routes and its rows, [T, layers of the stage, K]."""
    return next((stream, rows_TLK) for stream, rows_TLK in batch.extra.items() if stream.name == ROUTES)


def _is_token(batch: MicroBatch) -> Tensor:
    ids_T = batch.token_ids_T
    return ids_T.new_ones(ids_T.shape, dtype=torch.bool) if batch.is_token_T is None else batch.is_token_T


def settle(
    chunks: Sequence[ReplayingPolicy], minibatch: MiniBatch, num_layers: int, *, forward: bool, backward: bool
) -> dict[str, float]:
    """Compare what the layers counted with the plan, and start to count again. Collective, with one all-reduce.

    Example: a layer saw 8 rows, of which 1 was a token without recorded experts, and 3 were padding. So 4, 1, 3 are
    planned for its forward passes, and again 4, 1, 3 for its backward passes if it is recomputed there (0, 0, 0 if
    not).

    Args:
        minibatch: what has passed through the model since the last call.
        forward, backward: its passes since then. A layer that is recomputed routes in the backward pass.

    Returns the metrics of forward passes.

    Raises:
        UserError: on every rank, if any layer of any rank missed a row, or took one too often.
    """
    num_kinds = 2 * KINDS
    table_LX = torch.zeros(num_layers, num_kinds + chunks[0].counts_LX.shape[1], dtype=torch.int64)
    for batch in minibatch.micro_batches if chunks[0].layout.tensor_rank == 0 else ():  # the others have the same
        stream, rows_TLK = routes_of(batch)
        is_recorded_TL, is_token_T1 = is_recorded(rows_TLK, stream), _is_token(batch)[:, None]
        kinds = [is_token_T1 & is_recorded_TL, is_token_T1 & ~is_recorded_TL, ~is_token_T1.expand_as(is_recorded_TL)]
        kinds_LX = torch.stack([is_kind_TL.sum(0) for is_kind_TL in kinds], 1)
        for chunk in chunks:
            for index, layer in enumerate(chunk.layers):
                planned_X = kinds_LX[chunk.stage_layers.index(layer)]
                table_LX[layer, :KINDS] += planned_X * forward
                table_LX[layer, KINDS:num_kinds] += planned_X * (backward and chunk.is_recomputed(index))
    table_LX = table_LX.to(device())
    for chunk in chunks:
        table_LX[chunk.layers, num_kinds:] = chunk.counts_LX
        chunk.counts_LX.zero_()
    dist.all_reduce(table_LX)
    planned_LX, counted_LX, others_L, loads_LC = table_LX.cpu().split(
        [num_kinds, num_kinds, 1, table_LX.shape[1] - 2 * num_kinds - 1], 1
    )
    num_tokens_L = planned_LX[:, :2].sum(1)
    is_wrong_L = (planned_LX != counted_LX).any(1) | (num_tokens_L != minibatch.counts.tokens * forward)
    if is_wrong_L.any():
        layer = int(is_wrong_L.nonzero()[0])
        raise UserError(
            f"replay of routes, layer {layer}: rows replayed, without recorded experts, of padding, and the same when "
            f"recomputed: {counted_LX[layer].tolist()}, but planned were {planned_LX[layer].tolist()} for "
            f"{minibatch.counts.tokens * forward} tokens. Gradients would be wrong: report this fault, and set "
            "model.replay_routes=false until it is mended"
        )
    if not forward:
        return {}
    num_replayed, num_missing = int(planned_LX[:, 0].sum()), int(planned_LX[:, 1].sum())
    load_L = loads_LC.amax(1) / loads_LC.double().mean(1)
    return {
        "routes/other_share": int(others_L.sum()) / num_replayed if num_replayed else float("nan"),
        "routes/missing_share": num_missing / (num_replayed + num_missing),
        "routes/load_max": float(load_L.max()),
    }
