"""A model split over processes, and one that is trained: the base of the policy, the critic and the reference."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from torch import Tensor
from torch.nn import Module, ModuleList, Parameter

from bapo_megatron.checkpoint.folder import WEIGHT
from bapo_megatron.checkpoint.shards import Snapshot
from bapo_megatron.config.precision import tokens_multiple
from bapo_megatron.config.schema import Config
from bapo_megatron.hf.shape import ModelShape
from bapo_megatron.learner import snapshots
from bapo_megatron.learner.adam import AdamState
from bapo_megatron.learner.hf.convert import gather_weights, load_weights
from bapo_megatron.learner.model import PolicyModel, transformer_config
from bapo_megatron.learner.parallel import ParallelLayout, device
from bapo_megatron.learner.precision import logprob_backend
from bapo_megatron.learner.schedule import Schedule


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
        self.layout = ParallelLayout.current()
        self.settings = transformer_config(shape, config, fp8_params=fp8_params)
        self.share = self.layout.share(
            sequence_parallel=self.settings.sequence_parallel, tokens_multiple=tokens_multiple(config)
        )
        chunks, backend = range(self.layout.num_chunks), logprob_backend(config)
        self.model = ModuleList(chunk_type(self.settings, shape, self.layout, i, backend) for i in chunks).to(device())

    def sum_over_data_ranks(self, table: Tensor) -> Tensor:
        """Sum a small fp64 table over data and context ranks: see `Learner.sum_over_data_ranks`."""
        return self.layout.reduce_over_data(table)


class TrainedModel(SplitModel):
    """A split model with Megatron's gradient buffers and Adam.

    Args:
        hf_path: folder of the Hugging Face checkpoint to start from.
        stored: shape of the model in that folder; None: `shape`.
    """

    def __init__(
        self,
        config: Config,
        shape: ModelShape,
        chunk_type: type[PolicyModel],
        hf_path: Path,
        *,
        stored: ModelShape | None = None,
        fp8_params: bool = False,
    ) -> None:
        super().__init__(config, shape, chunk_type, fp8_params=fp8_params)
        self.hf_path = hf_path
        self.version = 0
        self.num_skipped_updates = 0
        load = partial(load_weights, self.model, stored or shape, self.layout, hf_path)
        load()
        self._wrapped = [self._wrap(chunk) for chunk in self.model]
        self.optimizer = get_megatron_optimizer(
            self._optimizer_config(), self._wrapped, use_gloo_process_groups=torch.cuda.is_available()
        )
        self.adam = AdamState(self.optimizer, self.layout)
        if any(map(is_float8tensor, self.model.parameters())):
            # Megatron made float32 weights of what the parameters held before they were read
            load(fill=partial(self.adam.fill, WEIGHT))
        self._schedule = Schedule(self._wrapped, self.settings, self.layout, config)

    def update(self, run: Callable[[], list[Any]], learning_rate: float) -> tuple[list[Any], float]:
        """Make one Adam update with the gradients that `run` leaves, clipped by their global norm.

        A gradient that is not finite is counted, and leaves weights and moments as they are.

        Returns the outcomes of `run`, and the norm before clipping, the same on every rank.
        """
        for chunk in self._wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        outcomes = run()
        adam = self.config.optimizer
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
            # Megatron marks norms and biases (wd_mult), but leaves the mark to its caller: else every parameter decays
            group["weight_decay"] = adam.weight_decay * group["wd_mult"]
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        if math.isfinite(grad_norm):
            norm = torch.tensor(grad_norm, device=device())
            torch.nn.utils.clip_grads_with_norm_(self.optimizer.get_parameters(), adam.clip_grad, norm)
            self.optimizer.step_with_ready_grads()
        self.num_skipped_updates += not math.isfinite(grad_norm)
        self.version += 1
        return outcomes, grad_norm

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield weights under Hugging Face names: see `Learner.named_weights` and `hf.convert.gather_weights`."""
        return gather_weights(self.model, self.shape, self.layout, self._unquantised)

    def _unquantised(self, parameter: Parameter) -> Tensor:
        """Return a parameter as engines and checkpoints hold it: with FP8, Adam's float32 weight, rounded."""
        if is_float8tensor(parameter):  # its `dtype` reads bfloat16
            return self.adam.gather(parameter, WEIGHT).to(parameter.dtype)
        return parameter.detach()

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the last update's clipped gradient, like `named_weights`: for tests and diagnostics."""
        return gather_weights(self.model, self.shape, self.layout, self.adam.gather_gradient)

    def facts(self) -> dict[str, Any]:
        """Return the counters that a snapshot holds: JSON, the same on every rank."""
        return {"version": self.version, "skipped_updates": self.num_skipped_updates}

    def snapshot(self) -> Snapshot:
        """Snapshot weights, optimizer state and version: see `Learner.snapshot`."""
        return snapshots.take_snapshot(self.model, self.shape, self.layout, self.adam, self.facts(), self.hf_path)

    def load(self, folder: Path) -> None:
        """Load a written snapshot: see `Learner.load`."""
        self.restore(snapshots.load(self.model, self.shape, self.layout, self.adam, folder))

    def restore(self, facts: dict[str, Any]) -> None:
        """Set the counters to the `facts` of a snapshot."""
        self.version, self.num_skipped_updates = facts["version"], facts["skipped_updates"]

    def _wrap(self, chunk: Module) -> DistributedDataParallel:
        """Wrap a part of the model for Megatron's schedules; `Schedule` sums gradients after the last backward pass."""
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            check_for_nan_in_grad=False,
            use_distributed_optimizer=self.config.optimizer.distributed,
            fp8_param_gather=self.settings.fp8_param,
        )
        return DistributedDataParallel(
            self.settings, ddp, Float16Module(self.settings, chunk) if self.settings.bf16 else chunk
        )

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
