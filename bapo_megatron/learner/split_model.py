"""A model split over processes, and one that is also trained: the bases of the policy, the critic and the reference."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch import Tensor
from torch.nn import Module, ModuleList, Parameter

from bapo_megatron.checkpoint.folder import MOMENTS, WEIGHT, Facts, Origin, read_index
from bapo_megatron.checkpoint.shard_reader import ShardReader
from bapo_megatron.checkpoint.shards import Piece, Snapshot
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.peft import PeftReader, adapter_tensors
from bapo_megatron.hf.reader import HFReader, digest_of
from bapo_megatron.hf.shape import ModelShape, base_tensors, entries
from bapo_megatron.hf.splits import Entry, is_kept, is_trained
from bapo_megatron.learner.adam import ChainedAdam
from bapo_megatron.learner.exchange import (
    fill_parameters,
    gather_weights,
    load_weights,
    parameters_by_global_name,
    placed_entries,
    take_held,
)
from bapo_megatron.learner.host_copies import HostCopies
from bapo_megatron.learner.lora import InitialAdapters, MergedWeights, adapters_of
from bapo_megatron.learner.parallel import AxisRanks, ParallelLayout, device, sum_of_digests
from bapo_megatron.learner.policy import PolicyModel, transformer_config
from bapo_megatron.learner.precision import tokens_multiple
from bapo_megatron.learner.schedule import Schedule
from bapo_megatron.learner.slicing import place_shard
from bapo_megatron.learner.weight_source import ModelWeights, Unquantised, Wrapped
from bapo_megatron.resolved.step_tokens import shares_prompts
from bapo_megatron.runtime.straggler import LocalTime
from bapo_megatron.runtime.together import failing_together, first_complaint
from bapo_megatron.sync.base import WeightSource

PARTS = (WEIGHT, *MOMENTS)


class SplitModel:
    """A model in the layout of `start_processes`. Construct it on every rank; all methods are collective.

    Args:
        chunk_type: the class of the model's parts.
        fp8_params: see `transformer_config`.
    """

    def __init__(
        self, config: Config, shape: ModelShape, chunk_type: type[PolicyModel], *, fp8_params: bool = False
    ) -> None:
        self.config = config
        self.shape = shape
        self.layout = ParallelLayout.current(config.parallel)
        self.settings = transformer_config(shape, config, fp8_params=fp8_params)
        self.share = self.layout.share(
            sequence_parallel=self.settings.sequence_parallel,
            tokens_multiple=tokens_multiple(config),
            pair_cost=shape.pair_cost,
            shares_prompts=shares_prompts(config, shape),
        )
        chunks = range(self.layout.num_chunks)
        parts = [chunk_type(self.settings, shape, self.layout, i).to(device()) for i in chunks]
        self.model = ModuleList(parts)
        self.sharing_problem: str | None = None
        if self.share.shares_prompts and (problem := first_complaint(parts[0].sharing_problem())):
            self.sharing_problem = (
                f"each response computes its prompt again, because attention cannot share one: {problem}; "
                "train.share_prompts=false leaves out this warning"
            )
            self.share = replace(self.share, shares_prompts=False)

    def sum_over_data_ranks(self, table: Tensor) -> Tensor:
        """Sum a small fp64 table over data and context ranks: see `Learner.sum_over_data_ranks`."""
        return self.layout.reduce_over_data(table)


class TrainedModel(SplitModel):
    """A split model with Megatron's gradient buffers and Adam, and its checkpoints.

    All ranks write their own parts at the same time. If several ranks hold a tensor, one of them writes it: the first
    rank of a tensor group that holds copies, data replicas in turn, the largest owner among the distributed optimizer's
    ranges. Every rank reads only the slices that it needs. `checkpoint/folder.py` describes the files.

    Args:
        hf_path: folder of the Hugging Face checkpoint to start from.
        local_time: the clock of all of this rank's models.
        stored: shape of the model in that folder; None means `shape`.
    """

    def __init__(
        self,
        config: Config,
        shape: ModelShape,
        chunk_type: type[PolicyModel],
        hf_path: Path,
        local_time: LocalTime,
        *,
        stored: ModelShape | None = None,
        fp8_params: bool = False,
    ) -> None:
        super().__init__(config, shape, chunk_type, fp8_params=fp8_params)
        self.hf_path = hf_path
        self.version = 0
        self.num_skipped_updates = 0
        self._initial: Origin | None = None  # the adapters of lora.init_from
        self.merged: MergedWeights | None = None  # with adapters: the latest push
        load = partial(load_weights, self.model, stored or shape, self.layout, hf_path)
        load()
        self._make_adapters()
        of_rank = parameters_by_global_name(self.model)
        for entry in entries(shape):
            for parameter in take_held(of_rank, entry, shape):
                parameter.requires_grad_(entry.trained)  # before Megatron makes room for gradients and moments
        # the chunks, wrapped with Megatron's gradient buffers
        self.wrapped = [self._wrap(chunk, number) for number, chunk in enumerate(self.model)]
        if config.parallel.overlap_communication:
            overlap_communication(self.settings, self.wrapped)
        self.optimizer = get_megatron_optimizer(
            self._optimizer_config(), self.wrapped, use_gloo_process_groups=torch.cuda.is_available()
        )
        self.copies = HostCopies()
        self.adam = ChainedAdam(self.optimizer, self.layout, self.copies)
        if any(map(is_float8tensor, self.model.parameters())):
            # Megatron made its float32 weights from what the parameters held before they were read
            load(fill=partial(self._fill, WEIGHT))
        self.schedule = Schedule(self.wrapped, self.settings, self.layout, config, local_time)
        self._optimizer_time = LocalTime()

    def _make_adapters(self) -> None:
        """Fill adapters, if there are any, as the run begins."""
        if self.shape.adapters is None:
            return
        fill = partial(
            fill_parameters,
            self.model,
            self.shape,
            self.layout,
            fill=Parameter.copy_,
            are_read=lambda one: not one.stored,
        )
        if (folder := self.config.lora.init_from) is None:
            fill(InitialAdapters(adapter_tensors(self.shape), self.config.run.seed))
            return
        with failing_together(CheckpointError), PeftReader(Path(folder).expanduser()) as read:
            read.check(self.shape)
            fill(read)
            mine = digest_of(read, list(adapter_tensors(self.shape))[dist.get_rank() :: dist.get_world_size()])
        self._initial = {"path": folder, "digest": f"{sum_of_digests(mine):032x}"}
        for adapter in adapters_of(self.model):
            adapter.keep_initial()

    def update(self, run: Callable[[], list[Any]], learning_rate: float) -> tuple[list[Any], float]:
        """Make one Adam update with the gradients that `run` leaves, clipped by their global norm.

        A gradient that is not finite is counted, and leaves weights and moments unchanged.

        Returns the outcomes of `run`, and the norm before clipping, the same on every rank.
        """
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        outcomes = run()
        with self._optimizer_time.running():
            grad_norm = self.optimizer_step(learning_rate)
        self.num_skipped_updates += not math.isfinite(grad_norm)
        self.version += 1
        return outcomes, grad_norm

    def take_times(self) -> dict[str, float]:
        """Return the seconds in each part of the updates since the last call: see `Learner.take_times`."""
        return {
            "time/forward_s": self.schedule.forward_time.take(),
            "time/optimizer_s": self._optimizer_time.take(),
        }

    def optimizer_step(self, learning_rate: float) -> float:
        """Step Adam with the gradients in the buffers, if they are finite; return their norm before clipping."""
        adam = self.config.optimizer
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
            # Megatron marks norms and biases (wd_mult), but its caller must apply the mark, or every parameter decays
            group["weight_decay"] = adam.weight_decay * group["wd_mult"]
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        if math.isfinite(grad_norm):
            if exceeds(grad_norm, adam.clip_grad):
                norm = torch.tensor(grad_norm, device=device())
                for one in self.optimizer.chained_optimizers:  # the chain's own `get_parameters` allows one optimizer
                    torch.nn.utils.clip_grads_with_norm_(one.get_parameters(), adam.clip_grad, norm)
            self.optimizer.step_with_ready_grads()
        return grad_norm

    def _finish_gathering(self) -> None:
        """Wait until this rank has all of the last update's weights; otherwise the next forward pass gathers them."""
        for chunk in self.wrapped:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    def weights(self) -> WeightSource:
        """Return the current weights: see `Learner.weights`."""
        self._finish_gathering()
        weights = ModelWeights(self.model, self.shape, self.layout, self.version)
        if self.shape.adapters is not None:
            self.merged = MergedWeights(self.model)
            return Wrapped(weights, self.merged)
        if any(map(is_float8tensor, self.model.parameters())):
            return Wrapped(weights, Unquantised(partial(self.adam.gather, name=WEIGHT)))
        return weights

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the last update's clipped gradient, like `WeightSource.whole`; for tests and diagnostics."""
        return gather_weights(self.model, self.shape, self.layout, self.adam.gather_gradient, is_trained)

    def facts(self) -> dict[str, Any]:
        """Return the counters that a snapshot holds: JSON, the same on every rank."""
        return {"version": self.version, "skipped_updates": self.num_skipped_updates}

    def restore(self, facts: Facts) -> None:
        """Set the counters to the `facts` of a snapshot."""
        self.version, self.num_skipped_updates = facts["version"], facts["skipped_updates"]

    def snapshot(self) -> Snapshot:
        """Return the pieces that this rank writes: see `Learner.snapshot`.

        They are views of the live tensors, or of their copies while these are away, except for parameters across a
        border of the distributed optimizer, which are copied to the CPU. `Snapshot.detach` copies the live ones.
        """
        if not self.copies:  # the push before they left has gathered them
            self._finish_gathering()
        facts = self.facts() | {"model": self.shape.to_json()}
        if self._base_digest is not None:
            facts["base"] = {"path": str(self.hf_path.absolute()), "digest": self._base_digest}
        if self._initial is not None:
            facts["initial"] = self._initial
        pieces, is_detached = list(self._pieces()), bool(self.copies)
        return Snapshot(pieces, facts, rank=self.layout.rank, hf_path=self.hf_path, is_detached=is_detached)

    @cached_property
    def _base_digest(self) -> str | None:
        """The digest of the weights that stay in the model's folder; None if there are none. Collective."""
        names = base_tensors(self.shape)
        if not names:
            return None
        with failing_together(CheckpointError), HFReader(self.hf_path) as read:
            mine = digest_of(read, names[dist.get_rank() :: dist.get_world_size()])
        return f"{sum_of_digests(mine):032x}"

    @torch.no_grad()
    def _pieces(self) -> Iterator[Piece]:
        parameters = parameters_by_global_name(self.model)
        mine: list[tuple[Entry, AxisRanks, Parameter]] = []
        for number, (entry, axis) in enumerate(placed_entries(self.shape, self.layout)):
            is_mine = entry.megatron_name in parameters
            held = take_held(parameters, entry, self.shape)
            if is_mine and entry.trained:
                mine.append((entry, axis, held[0]))
            elif is_mine and is_kept(entry) and number % axis.copies.size() == axis.copies.rank():  # it has no moments
                yield from place_shard(
                    entry, WEIGHT, self.copies.at(held[0].detach()).cpu().float(), axis.rank, axis.size
                )
        assert not parameters, f"the name map does not know {sorted(parameters)}"
        writers = self.adam.writers([parameter for *_, parameter in mine])
        for (entry, axis, parameter), (is_writer, is_cut) in zip(mine, writers, strict=True):
            for part in PARTS:
                whole = self.adam.gather(parameter, part).cpu() if is_cut else None
                if is_writer and entry.owned(axis.rank, axis.size):
                    tensor = self.adam.local(parameter, part) if whole is None else whole
                    yield from place_shard(entry, part, tensor, axis.rank, axis.size)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Load a snapshot of any layout: see `Learner.load`."""
        self._finish_gathering()
        digest = self._base_digest  # collective, so it comes before errors of this rank alone
        with failing_together(CheckpointError):
            index = read_index(folder)
            index.check_model(self.shape)
            facts = index.facts
            if (base := facts.get("base")) is not None and base["digest"] != digest:
                raise CheckpointError(
                    f"{folder} holds adapters of the weights that were in {base['path']}, and those in {self.hf_path} "
                    "differ: set model.path to the folder with the same weights"
                )
            initial = facts.get("initial")
            if initial is not None and self._initial is not None and initial["digest"] != self._initial["digest"]:
                raise CheckpointError(
                    f"{folder} began with the adapters that were in {initial['path']}, and lora.init_from has others: "
                    "put the former ones back, because the reference policy has them"
                )
            for part in PARTS:
                if part in index.tensors or part == WEIGHT or facts["version"] > 0:
                    with ShardReader(index, part) as read:
                        read.check(self.shape)
                        are_read = is_trained if part in MOMENTS else is_kept
                        fill = partial(self._fill, part)
                        fill_parameters(self.model, self.shape, self.layout, read, fill, are_read)
                else:
                    for parameter in (p for p in self.model.parameters() if p.requires_grad):
                        self.adam.fill(part, parameter, torch.zeros(parameter.shape, device=parameter.device))
            if unknown := sorted(index.tensors.keys() - set(PARTS)):
                raise CheckpointError(f"{folder} holds {', '.join(unknown)}, which this model does not have")
        self.adam.set_steps(facts["version"] - facts["skipped_updates"])
        self.restore(facts)

    def _fill(self, part: str, parameter: Parameter, tensor: Tensor) -> None:
        """Overwrite a weight or moment; what is not trained has only a weight."""
        if parameter.requires_grad:
            self.adam.fill(part, parameter, tensor)
        else:
            parameter.copy_(tensor.to(parameter.dtype))

    def _wrap(self, chunk: Module, number: int) -> DistributedDataParallel:
        """Wrap a part of the model for Megatron's schedules; `Schedule` sums its gradients."""
        overlap, distributed = self.config.parallel.overlap_communication, self.config.optimizer.distributed
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            check_for_nan_in_grad=False,
            use_distributed_optimizer=distributed,
            overlap_grad_reduce=overlap,
            overlap_param_gather=overlap and distributed,
            align_param_gather=self.layout.num_chunks > 1,
            fp8_param_gather=self.settings.fp8_param,
        )
        wrapped = Float16Module(self.settings, chunk) if self.settings.bf16 else chunk
        return DistributedDataParallel(self.settings, ddp, wrapped, disable_bucketing=number > 0)

    def _optimizer_config(self) -> OptimizerConfig:
        adam, settings = self.config.optimizer, self.settings
        return OptimizerConfig(
            optimizer="adam",
            lr=adam.lr,
            weight_decay=adam.weight_decay,
            adam_beta1=adam.beta1,
            adam_beta2=adam.beta2,
            adam_eps=adam.eps,
            clip_grad=adam.clip_grad,
            bf16=settings.bf16,
            params_dtype=settings.params_dtype,
            use_distributed_optimizer=adam.distributed,
            fp8_recipe=settings.fp8_recipe if settings.fp8 else None,
        )


def exceeds(grad_norm: float, limit: float) -> bool:
    """Return whether `clip_grads_with_norm_` would change gradients of this norm, instead of multiplying all by 1.

    Every rank has the same norm, already on the CPU: all decide the same, and none waits for its GPU.
    """
    return bool(limit / (torch.tensor(grad_norm) + 1e-6) < 1)  # torch's factor, in its float32


def overlap_communication(settings: TransformerConfig, chunks: Sequence[DistributedDataParallel]) -> None:
    """Let Megatron's schedules start summing gradients in the last backward pass, and start gathering weights."""
    is_virtual = len(chunks) > 1
    no_syncs, grad_syncs = [chunk.no_sync for chunk in chunks], [chunk.start_grad_sync for chunk in chunks]
    settings.no_sync_func = no_syncs if is_virtual else no_syncs[0]
    settings.grad_sync_func = grad_syncs if is_virtual else grad_syncs[0]
    if is_virtual and chunks[0].ddp_config.overlap_param_gather:
        settings.param_sync_func = [chunk.start_param_sync for chunk in chunks]
