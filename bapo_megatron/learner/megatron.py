"""The policy on Megatron-Core: scoring, one optimizer update, weights under Hugging Face names, checkpoints.

    MiniBatch -> its micro-batches through Megatron's schedule -> per-token log-probs (last stage)
              -> loss summed over tokens / tokens of ALL ranks -> gradients summed over data and context ranks -> Adam

Loss and gradient are divided once, by the global token count of the update, so they do not depend on how the batch is
split over data or context ranks, stages or micro-batches.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from bapo_megatron_patches.megatron_core import apply_cpu_compat
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from torch import Tensor
from torch.nn import Module, ModuleList, Parameter

from bapo_megatron.algorithms.losses import LOSSES, LossInputs, LossResult
from bapo_megatron.algorithms.mismatch import Mismatch, logprob_mismatch
from bapo_megatron.config.precision import tokens_multiple
from bapo_megatron.config.schema import Config, ParallelConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.shape import load_hf_config, model_shape
from bapo_megatron.learner import checkpoint
from bapo_megatron.learner.adam import WEIGHT, AdamState
from bapo_megatron.learner.base import StepResult
from bapo_megatron.learner.batches import check_packed_for, to_device
from bapo_megatron.learner.hf.convert import gather_weights, load_weights
from bapo_megatron.learner.hf.names import entries
from bapo_megatron.learner.hf.shapes import validate_layout
from bapo_megatron.learner.machine import this_machine
from bapo_megatron.learner.metrics import TokenMetrics
from bapo_megatron.learner.model import PolicyModel, transformer_config
from bapo_megatron.learner.parallel import ParallelLayout, device, start_processes
from bapo_megatron.learner.precision import check_machine, has_quantised, is_quantised, logprob_backend
from bapo_megatron.sync.buckets import TensorSpec
from bapo_megatron.types import ClipBounds, MicroBatch, MiniBatch

Scores = tuple[Tensor, Tensor]  # log_probs_R, entropy_R
Outcome = tuple[Tensor, LossResult, Mismatch]  # of a micro-batch; first its log_probs_R


class MegatronLearner:
    """Implements `learner.base.Learner`. Construct it on every rank; all methods are collective.

    Args:
        config: the run; `model.path` is not read.
        hf_path: folder of the Hugging Face checkpoint to start from.

    Raises:
        ConfigError: the layout does not fit the model or the number of processes; see `validate_layout`.
        CheckpointError: the checkpoint cannot be read or is of an unsupported architecture.
    """

    def __init__(self, config: Config, hf_path: str | Path) -> None:
        hf_config = load_hf_config(hf_path)
        if problems := _layout_problems(hf_config, config.parallel):
            raise ConfigError("; ".join(problems))
        if config.model.dtype == "bfloat16" and not torch.cuda.is_available():
            raise ConfigError('model.dtype="bfloat16" needs a GPU: set it to "float32" on this machine')
        check_machine(config, model_shape(hf_config), this_machine())
        apply_cpu_compat()
        start_processes(config.parallel)
        model_parallel_cuda_manual_seed(config.run.seed)

        self.config = config
        self.hf_path = Path(hf_path)
        self.shape = model_shape(hf_config)
        self.layout = ParallelLayout.current()
        self.version = 0
        self.num_skipped_updates = 0
        self.settings = transformer_config(self.shape, config)
        self.share = self.layout.share(
            sequence_parallel=self.settings.sequence_parallel, tokens_multiple=tokens_multiple(config)
        )
        chunks, backend = range(self.layout.num_chunks), logprob_backend(config)
        self.model = ModuleList(PolicyModel(self.settings, self.shape, self.layout, i, backend) for i in chunks)
        self.model.to(device())
        load_weights(self.model, self.shape, self.layout, hf_path)
        self._wrapped = [self._wrap(chunk) for chunk in self.model]
        self.optimizer = get_megatron_optimizer(
            self._optimizer_config(), self._wrapped, use_gloo_process_groups=torch.cuda.is_available()
        )
        self.adam = AdamState(self.optimizer, self.layout)
        if has_quantised(self.model):  # Megatron made float32 weights of what the parameters held before they were read
            load_weights(self.model, self.shape, self.layout, hf_path, fill=self._fill_weight)
        self._forward_backward = get_forward_backward_func()
        self._loss = LOSSES[config.loss.name]
        self._metrics = TokenMetrics(self.layout, self._loss(_nothing(), config.loss))

    def _wrap(self, chunk: Module) -> DistributedDataParallel:
        self.settings.finalize_model_grads_func = _finalize_sums
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            check_for_nan_in_grad=False,
            use_distributed_optimizer=self.config.optimizer.distributed,
            fp8_param_gather=self.settings.fp8_param,
        )
        module = Float16Module(self.settings, chunk) if self.settings.bf16 else chunk
        return DistributedDataParallel(self.settings, ddp, module)

    def _optimizer_config(self) -> OptimizerConfig:
        adam = self.config.optimizer
        return OptimizerConfig(
            optimizer="adam",
            lr=adam.lr,
            weight_decay=adam.weight_decay,
            adam_beta1=adam.beta1,
            adam_beta2=adam.beta2,
            adam_eps=adam.eps,
            clip_grad=adam.clip_grad,
            bf16=self.settings.bf16,
            params_dtype=self.settings.params_dtype,
            use_distributed_optimizer=adam.distributed,
            fp8_recipe=self.settings.fp8_recipe if self.settings.fp8 else None,
        )

    # scoring

    def log_probs(self, minibatch: MiniBatch) -> list[Tensor] | None:
        """Log-probs at the current weights and the rollout's temperature: see `Learner.log_probs`."""

        def collect(scores: Scores, non_loss_data: bool) -> Tensor:
            return scores[0]

        with torch.no_grad():
            outputs = self._run(minibatch, lambda batch: collect, with_entropy=False, forward_only=True)
        return outputs if self.layout.is_last_stage else None

    def sum_over_data_ranks(self, table: Tensor | None) -> Tensor:
        """Sum of a small fp64 table over data and context ranks, on every rank: see `Learner.sum_over_data_ranks`."""
        return self.layout.reduce_over_data(table)

    # learning

    def step(self, minibatch: MiniBatch, bounds: ClipBounds) -> StepResult:
        """One Adam update; a gradient that is not finite is counted and leaves the weights as they are."""

        def loss_of(batch: MicroBatch) -> Callable[[Scores], tuple[Tensor, Tensor, Outcome]]:
            return lambda scores: self._micro_batch_loss(batch, scores, bounds, minibatch.num_trained_tokens)

        for chunk in self._wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        outputs = self._run(minibatch, loss_of, with_entropy=True, forward_only=False)
        learning_rate = self._set_learning_rate()
        grad_norm = self._update()
        self.version += 1
        metrics, mismatch = self._metrics.reduce([o[1:] for o in outputs], minibatch.num_trained_tokens)
        metrics |= {
            "optimizer/grad_norm": grad_norm,
            "optimizer/lr": learning_rate,
            "optimizer/skipped": float(self.num_skipped_updates),
        }
        log_probs = [o[0] for o in outputs] if self.layout.is_last_stage else None
        return StepResult(metrics, log_probs, mismatch)

    def _run(
        self, minibatch: MiniBatch, consume: Callable[[MicroBatch], Callable], *, with_entropy: bool, forward_only: bool
    ) -> list[Any]:
        """All micro-batches through Megatron's schedule; on the last stage what `consume(batch)` returned of each."""
        check_packed_for(self.layout, minibatch)
        batches = [to_device(batch, device()) for batch in minibatch.micro_batches]

        def forward_step(iterator: Iterator[MicroBatch], model: Module) -> tuple[Any, Callable]:
            batch = next(iterator)
            output = model(
                batch,
                temperature=self.config.rollout.temperature,
                chunk_tokens=self.config.train.logprob_chunk_tokens,
                with_entropy=with_entropy,
            )
            return output, consume(batch)

        return self._forward_backward(
            forward_step_func=forward_step,
            data_iterator=[iter(batches) for _ in self._wrapped],
            model=self._wrapped,
            num_microbatches=len(batches),
            seq_length=batches[0].num_tokens * self.layout.context_size,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _micro_batch_loss(
        self, batch: MicroBatch, scores: Scores, bounds: ClipBounds, num_trained_tokens: int
    ) -> tuple[Tensor, Tensor, Outcome]:
        """This micro-batch's share of the update's loss, and what to remember, as Megatron's schedules expect it."""
        log_probs_R, entropy_R = scores
        ages_R = self.version - batch.versions_R
        inputs = LossInputs(
            log_probs_R=log_probs_R,
            behaviour_logprobs_R=batch.behaviour_logprobs_R,
            advantages_R=batch.advantages_R,
            mask_R=batch.mask_R,
            ages_R=ages_R,
            bounds=bounds,
            entropy_R=entropy_R.detach(),
            proximal_logprobs_R=batch.proximal_logprobs_R,
        )
        result = self._loss(inputs, self.config.loss)
        loss = result.loss_R.sum()
        if self.config.train.entropy_coef:
            loss = loss - self.config.train.entropy_coef * torch.where(batch.mask_R, entropy_R, 0.0).sum()
        mismatch = logprob_mismatch(log_probs_R, batch.behaviour_logprobs_R, batch.mask_R & (ages_R == 0))
        outcome = log_probs_R.detach(), dataclasses.replace(result, loss_R=result.loss_R.detach()), mismatch
        return loss / num_trained_tokens, batch.mask_R.sum(dtype=torch.int32), outcome

    def _set_learning_rate(self) -> float:
        """Linear warm-up from lr / warmup_updates, then constant."""
        settings = self.config.optimizer
        share = min(1.0, (self.version + 1) / settings.warmup_updates) if settings.warmup_updates else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = settings.lr * share
        return settings.lr * share

    def _update(self) -> float:
        """Clip by the global norm and step; returns the norm before clipping (the same on every rank)."""
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        if not math.isfinite(grad_norm):
            self.num_skipped_updates += 1
            return grad_norm
        torch.nn.utils.clip_grads_with_norm_(
            self.optimizer.get_parameters(), self.config.optimizer.clip_grad, torch.tensor(grad_norm, device=device())
        )
        self.optimizer.step_with_ready_grads()
        return grad_norm

    # weights

    def weight_specs(self) -> list[TensorSpec]:
        """Names, types and shapes of `named_weights`: see `Learner.weight_specs`."""
        dtype = str(next(self.model.parameters()).dtype).removeprefix("torch.")
        return [
            TensorSpec(name, dtype, size)
            for entry in entries(self.shape)
            for name, size in zip(entry.hf_names, entry.hf_shapes, strict=True)
        ]

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Weights under Hugging Face names: see `Learner.named_weights` and `hf.convert.gather_weights`."""
        return gather_weights(self.model, self.shape, self.layout, self._unquantised)

    def _unquantised(self, parameter: Parameter) -> Tensor:
        """What engines and checkpoints hold of a parameter: with FP8, the rounded float32 weight that Adam updates."""
        if is_quantised(parameter):
            return self.adam.gather(parameter, WEIGHT).to(parameter.dtype)
        return parameter.detach()

    def _fill_weight(self, parameter: Parameter, tensor: Tensor) -> None:
        self.adam.fill(parameter, WEIGHT, tensor)

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The last update's gradient, clipped, like `named_weights`: for tests and diagnostics."""
        return gather_weights(self.model, self.shape, self.layout, self.adam.gather_gradient)

    def save(self, folder: Path) -> None:
        """Write weights, optimizer state and version into an existing folder."""
        checkpoint.save(self, folder)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote.

        Raises:
            CheckpointError: the folder is incomplete, or of another model.
        """
        checkpoint.load(self, folder)


def _layout_problems(hf_config: dict[str, Any], parallel: ParallelConfig) -> list[str]:
    return validate_layout(hf_config, parallel.tensor, parallel.pipeline, parallel.virtual_pipeline)


def _finalize_sums(model: list[Module], num_tokens: Tensor | None, **kwargs: Any) -> None:
    """Sum gradients over data and context ranks and tied or replicated weights; the loss is divided already."""
    finalize_model_grads(model, None, **kwargs)


def _nothing() -> LossInputs:
    """A micro-batch without tokens."""
    none = torch.zeros(0)
    return LossInputs(none, none, none, none.bool(), none.long(), ClipBounds(1.0, 1.0, math.nan, False, 0), none)
