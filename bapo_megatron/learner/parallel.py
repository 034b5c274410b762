"""Process groups of the trainer, and the few collectives that this package makes itself.

No other file reads Megatron's `parallel_state`. Ranks are ordered tensor, context, data, pipeline (fastest first), as
in `initialize_model_parallel`. A *replica* is one whole copy of the model: tensor x pipeline ranks. There are data x
context replicas; replicas that differ only in the context rank work on the same sequences.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from bapo_megatron.buffer.packing import Share
from bapo_megatron.config.schema import ParallelConfig
from bapo_megatron.engines.update_group import connect_store, host_store
from bapo_megatron.errors import ConfigError, plural
from bapo_megatron.hf.splits import Axis
from bapo_megatron.kernels import kernels_of
from bapo_megatron.learner import lean_import
from bapo_megatron.runtime.nccl import may_share_gpus

with lean_import():
    from megatron.core import parallel_state


def device() -> torch.device:
    """Return this rank's device."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def start_processes(config: ParallelConfig) -> None:
    """Join the process group that the environment describes (or stand alone) and form Megatron's groups.

    Environment: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; LOCAL_RANK with GPUs, which ranks may share
    (runtime/nccl.py).

    Raises:
        ConfigError: the number of processes is not tensor x pipeline x context x data.
    """
    cuda = torch.cuda.is_available()
    if cuda:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        torch.cuda.set_device(local_rank % torch.cuda.device_count() if may_share_gpus() else local_rank)
    if not dist.is_initialized():
        # Batches are shared as CPU tensors (rollout/shared.py), even if gradients travel over NCCL.
        backend, timeout = "cpu:gloo,cuda:nccl" if cuda else "gloo", timedelta(seconds=config.timeout_s)
        rank, size = 0, 1
        store: dist.Store = dist.HashStore()
        if "RANK" in os.environ:
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            if rank == 0:
                store = host_store(host, size, config.timeout_s, port)
            else:
                store = connect_store(host, port, size, config.timeout_s)
        dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size)
    needed = config.tensor * config.pipeline * config.context * config.data
    if dist.get_world_size() != needed:
        raise ConfigError(
            f"{plural(dist.get_world_size(), 'trainer process')} started, but parallel.tensor={config.tensor} x "
            f"pipeline={config.pipeline} x context={config.context} x data={config.data} needs {needed}"
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor,
        pipeline_model_parallel_size=config.pipeline,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline if config.virtual_pipeline > 1 else None,
        context_parallel_size=config.context,
        expert_model_parallel_size=config.expert,
        expert_tensor_parallel_size=config.expert_tensor,
        distributed_timeout_minutes=math.ceil(config.timeout_s / 60),
        create_gloo_process_groups=cuda,
    )


def sum_in_fixed_order() -> None:
    """Let torch add in the same order in every run (`run.deterministic`); an operation that cannot raises RuntimeError.

    torch's attention keeps its order only if others may not just warn (aten/src/ATen/native/transformers).
    """
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing reads it


def stop_processes() -> None:
    """Leave all process groups together; safe to call if nothing was started."""
    if not dist.is_initialized():
        return
    dist.barrier()  # a rank that leaves early makes the others' last collective fail
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class AxisRanks:
    """A rank's place among the ranks that share the parameters of one axis."""

    rank: int
    group: dist.ProcessGroup  # ranks that split a parameter, in the order of their parts
    copies: dist.ProcessGroup  # ranks that hold the same part; the distributed optimizer splits its moments over them

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def is_first_copy(self) -> bool:
        return self.copies.rank() == 0

    @property
    def is_first(self) -> bool:
        """Whether it is the first of all ranks that hold a part."""
        return self.is_first_copy and self.rank == 0


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """A rank's place in the layout, and its groups."""

    rank: int
    tensor_rank: int
    tensor_size: int
    tensor_group: dist.ProcessGroup
    pipeline_rank: int
    pipeline_size: int
    pipeline_group: dist.ProcessGroup
    num_chunks: int  # parts of the model on this rank, more than one with a virtual pipeline
    context_rank: int
    context_size: int
    context_group: dist.ProcessGroup
    data_rank: int
    data_size: int
    data_context_group: dist.ProcessGroup
    replica_group: dist.ProcessGroup  # all tensor and pipeline ranks of this data and context rank
    axes: Mapping[Axis, AxisRanks]  # the ranks that hold a parameter; "expert" only if ranks share out experts
    config: ParallelConfig

    @classmethod
    def current(cls, config: ParallelConfig) -> ParallelLayout:
        """Read the layout from Megatron, after `start_processes` with the same settings."""
        axes: dict[Axis, AxisRanks] = {
            "dense": AxisRanks(
                parallel_state.get_tensor_model_parallel_rank(),
                parallel_state.get_tensor_model_parallel_group(),
                parallel_state.get_data_parallel_group(with_context_parallel=True),
            )
        }
        if config.expert > 1:
            axes["expert"] = AxisRanks(
                parallel_state.get_expert_model_parallel_rank(),
                parallel_state.get_expert_model_parallel_group(),
                parallel_state.get_expert_data_parallel_group(),
            )
        return cls(
            rank=dist.get_rank(),
            tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
            tensor_size=parallel_state.get_tensor_model_parallel_world_size(),
            tensor_group=parallel_state.get_tensor_model_parallel_group(),
            pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
            pipeline_size=parallel_state.get_pipeline_model_parallel_world_size(),
            pipeline_group=parallel_state.get_pipeline_model_parallel_group(),
            num_chunks=parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
            context_rank=parallel_state.get_context_parallel_rank(),
            context_size=parallel_state.get_context_parallel_world_size(),
            context_group=parallel_state.get_context_parallel_group(),
            data_rank=parallel_state.get_data_parallel_rank(),
            data_size=parallel_state.get_data_parallel_world_size(),
            data_context_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
            replica_group=parallel_state.get_model_parallel_group(),
            axes=axes,
            config=config,
        )

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the end of the model (its last chunk does)."""
        return self.pipeline_rank == self.pipeline_size - 1

    def starts_model(self, chunk: int) -> bool:
        """Return whether this rank's chunk holds the embedding."""
        return self.pipeline_rank == 0 and chunk == 0

    def ends_model(self, chunk: int) -> bool:
        """Return whether this rank's chunk holds the output layer."""
        return self.is_last_stage and chunk == self.num_chunks - 1

    def stage_of_layer(self, layer: int, num_layers: int) -> int:
        """Return the pipeline rank that holds a layer; chunks are dealt to the stages in turn."""
        chunk_sizes = [size // self.num_chunks for size in self.config.stage_sizes(num_layers)] * self.num_chunks
        return bisect_right(list(accumulate(chunk_sizes)), layer) % self.pipeline_size

    def layers_of_stage(self, stage: int, num_layers: int) -> list[int]:
        """Return the layers that a pipeline stage holds, ascending."""
        return [layer for layer in range(num_layers) if self.stage_of_layer(layer, num_layers) == stage]

    def share(
        self,
        *,
        sequence_parallel: bool,
        tokens_multiple: int = 1,
        pair_cost: float = 0.0,
        shares_prompts: bool = False,
    ) -> Share:
        """Return this rank's part of a mini-batch, and how it must be packed.

        Args:
            tokens_multiple: FP8 needs a multiple of this many tokens in a matrix product, or in a gathered part of one.
            pair_cost: see `ModelShape.pair_cost`.
            shares_prompts: whether the model computes a prompt once for several sequences of a pack.
        """
        return Share(
            data_rank=self.data_rank,
            data_size=self.data_size,
            context_rank=self.context_rank,
            context_size=self.context_size,
            tokens_multiple=tokens_multiple * (self.tensor_size if sequence_parallel else 1),
            packs_multiple=self.pipeline_size if self.num_chunks > 1 else 1,
            equal_lengths=self.pipeline_size > 1,
            pair_cost=pair_cost,
            shares_prompts=shares_prompts,
        )

    def from_last_stage(self, tensor: Tensor) -> None:
        """Overwrite `tensor` on every rank of the replica with the values of the last stage's first tensor rank.

        All ranks use this one source: a value that steers the loss must not differ between tensor ranks, not even by a
        rounding error.
        """
        if self.replica_group.size() == 1:
            return
        leader_of_last_stage = self.pipeline_group_rank(self.pipeline_size - 1) - self.tensor_rank
        dist.broadcast(tensor, src=leader_of_last_stage, group=self.replica_group)

    def pipeline_group_rank(self, stage: int) -> int:
        """Return the global rank of the process that holds `stage` in this rank's pipeline."""
        return dist.get_global_rank(self.pipeline_group, stage)

    def reduce_over_data(self, table: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduce a table over data x context ranks of the last stage, with one collective; every rank gets the result.

        Args:
            table: float64, this replica's part; off the last stage, any values of the same shape.
        """
        table = self._combine(table, op) if self.is_last_stage else table.to(device(), copy=True)
        self.from_last_stage(table)
        return table

    def sum_over_last_stage(self, table: Tensor) -> Tensor:
        """Return the sum of `reduce_over_data` on the ranks of the last stage alone, which call it together."""
        table = self._combine(table, dist.ReduceOp.SUM)
        if self.tensor_size > 1:  # one source for all ranks, as in `from_last_stage`
            dist.broadcast(table, src=dist.get_global_rank(self.tensor_group, 0), group=self.tensor_group)
        return table

    def sum_over_context(self, table: Tensor) -> Tensor:
        """Return the sum of a float64 table over the context ranks, which call it together."""
        return kernels_of(table).combine(table, self.context_group) if self.context_size > 1 else table

    def _combine(self, table: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        assert table.dtype == torch.float64
        table = table.detach().to(device())
        return kernels_of(table).combine(table, self.data_context_group, op)


def sum_of_digests(digest: int) -> int:
    """Sum the digests of all ranks, modulo 2**128. Collective."""
    limbs = torch.tensor([digest >> shift & 0xFFFFFFFF for shift in range(0, 128, 32)], device=device())
    dist.all_reduce(limbs)
    return sum(limb << shift for limb, shift in zip(limbs.tolist(), range(0, 128, 32), strict=True)) % 2**128
