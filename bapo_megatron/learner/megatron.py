"""The policy on Megatron-Core: scoring, one optimizer update, weights under Hugging Face names, checkpoints.

    MiniBatch -> its micro-batches through a schedule (schedule.py) -> per-token log-probs (last stage)
              -> loss summed over tokens / tokens of ALL ranks -> gradients summed over data and context ranks -> Adam

Loss and gradient are divided once, by the global token count of the update, so they do not depend on how the batch is
split over data or context ranks, stages or micro-batches.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from bapo_megatron_patches.megatron_core import apply_cpu_compat
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor
from torch.nn import ModuleList, Parameter

from bapo_megatron.algorithms.kl import KLCoefficient, reference_kl
from bapo_megatron.algorithms.losses import LossInputs, policy_loss
from bapo_megatron.algorithms.mismatch import logprob_mismatch
from bapo_megatron.checkpoint.shards import Snapshot
from bapo_megatron.config.lr_schedule import learning_rate, planned_updates
from bapo_megatron.config.precision import this_machine, tokens_multiple
from bapo_megatron.config.schema import Config, ParallelConfig
from bapo_megatron.engines.wire import TensorSpec
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.shape import entries, load_hf_config, model_shape, validate_layout
from bapo_megatron.learner import snapshots as checkpoint
from bapo_megatron.learner.adam import WEIGHT, AdamState, clip_and_step, set_rates
from bapo_megatron.learner.base import BoundsOf, StepResult
from bapo_megatron.learner.bounds import bounds_on_all_stages
from bapo_megatron.learner.build import for_training
from bapo_megatron.learner.gradient_guard import GradientGuard
from bapo_megatron.learner.hf.convert import gather_weights, load_weights
from bapo_megatron.learner.metrics import TokenSums, reduce_tokens, summarize
from bapo_megatron.learner.model import PolicyModel, transformer_config
from bapo_megatron.learner.parallel import ParallelLayout, device, start_processes
from bapo_megatron.learner.precision import check_machine, has_quantised, is_quantised, logprob_backend
from bapo_megatron.learner.reference import ReferencePolicy
from bapo_megatron.learner.schedule import ForwardPasses, Schedule, Scores
from bapo_megatron.learner.whole_batch import known_log_probs
from bapo_megatron.types import ClipBounds, MicroBatch, MiniBatch

Outcome = tuple[Tensor, ClipBounds, TokenSums]  # of a micro-batch; first its log_probs_R


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
        self.shape = model_shape(hf_config)
        check_machine(config, self.shape, this_machine())
        apply_cpu_compat()
        start_processes(config.parallel)
        model_parallel_cuda_manual_seed(config.run.seed)

        self.config = config
        self.hf_path = Path(hf_path)
        self.layout = ParallelLayout.current()
        self.version = 0
        self.num_skipped_updates = 0
        self.settings = transformer_config(self.shape, config, fp8_params=config.precision.fp8_params)
        self.share = self.layout.share(
            sequence_parallel=self.settings.sequence_parallel, tokens_multiple=tokens_multiple(config)
        )
        chunks, backend = range(self.layout.num_chunks), logprob_backend(config)
        self.model = ModuleList(PolicyModel(self.settings, self.shape, self.layout, i, backend) for i in chunks)
        self.model.to(device())
        load_weights(self.model, self.shape, self.layout, hf_path)
        self._wrapped, self.optimizer = for_training(self.model, self.settings, config.optimizer)
        self.adam = AdamState(self.optimizer, self.layout)
        if has_quantised(self.model):  # Megatron made float32 weights of what the parameters held before they were read
            load_weights(self.model, self.shape, self.layout, hf_path, fill=self._fill_weight)
        self._schedule = Schedule(self._wrapped, self.settings, self.layout, config)
        self._scored: ForwardPasses | None = None  # of the mini-batch whose step comes next
        self.reference = ReferencePolicy(config, self.hf_path, self.layout) if config.loss.kl_coef else None
        self.kl_coefficient = KLCoefficient(config.loss)
        self.guard = GradientGuard(config)

    # scoring

    def log_probs(self, minibatch: MiniBatch) -> list[Tensor] | None:
        """Compute log-probs at the current weights and the rollout's temperature: see `Learner.log_probs`."""
        log_probs = self._schedule.log_probs(minibatch)
        return log_probs if self.layout.is_last_stage else None

    def score(self, minibatch: MiniBatch) -> list[Tensor] | None:
        """Compute log-probs before the mini-batch's `step`; free if they are known already, or if the step's forward
        passes can run now: see `Learner.score`."""
        if minibatch.proximal_version == self.version:
            return known_log_probs(minibatch) if self.layout.is_last_stage else None
        if not self._schedule.runs_forwards_first(minibatch):
            return self.log_probs(minibatch)
        self._scored = self._schedule.forward(minibatch)
        return self._scored.log_probs

    def sum_over_data_ranks(self, table: Tensor | None) -> Tensor:
        """Sum a small fp64 table over data and context ranks, on every rank: see `Learner.sum_over_data_ranks`."""
        return self.layout.reduce_over_data(table)

    def sum_over_last_stage(self, table: Tensor) -> Tensor:
        """Sum over the ranks of the last stage alone: see `Learner.sum_over_last_stage`."""
        return self.layout.sum_over_last_stage(table)

    # learning

    def step(self, minibatch: MiniBatch, bounds: ClipBounds | BoundsOf) -> StepResult:
        """Make one Adam update; a gradient that is not finite is counted and leaves weights and moments as they are.

        Raises:
            DivergedError: `optimizer.max_skipped_in_a_row` updates had no finite gradient.
        """

        bounds_of: BoundsOf = (lambda *_: bounds) if isinstance(bounds, ClipBounds) else bounds

        def loss_of(batch: MicroBatch) -> Callable[[Scores], tuple[Tensor, Tensor, Outcome]]:
            return lambda scores: self._micro_batch_loss(
                batch, scores, bounds_of(batch, scores[0].detach()), minibatch.num_trained_tokens
            )

        for chunk in self._wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        scored, self._scored = self._scored, None
        if scored is not None and scored.minibatch is minibatch:
            outputs = self._schedule.backward(scored, loss_of)
        else:
            outputs = self._schedule.forward_backward(minibatch, loss_of)
        rate = self._set_learning_rate()
        grad_norm = clip_and_step(self.optimizer, self.config.optimizer.clip_grad)
        self.num_skipped_updates += not math.isfinite(grad_norm)
        self.version += 1
        metrics, mismatch = reduce_tokens([sums for *_, sums in outputs], minibatch.num_trained_tokens, self.layout)
        metrics |= {
            "train/tokens": float(minibatch.num_trained_tokens),
            "optimizer/lr": rate,
            "optimizer/grad_norm": grad_norm,
            "optimizer/skipped": float(self.num_skipped_updates),
        }
        metrics |= self.guard.observe(grad_norm)
        if self.reference is not None:
            metrics["loss/kl_coef"] = self.kl_coefficient.value
            self.kl_coefficient.observe(metrics["loss/kl_reference"])
        log_probs = [o[0] for o in outputs] if self.layout.is_last_stage else None
        found = [o[1] for o in outputs]
        used = (bounds,) if isinstance(bounds, ClipBounds) else bounds_on_all_stages(found, minibatch, self.layout)
        return StepResult(metrics, log_probs, mismatch, used)

    def _micro_batch_loss(
        self, batch: MicroBatch, scores: Scores, bounds: ClipBounds, num_trained_tokens: int
    ) -> tuple[Tensor, Tensor, Outcome]:
        """Return this micro-batch's share of the update's loss, and its outcome, as Megatron's schedules expect."""
        log_probs_R, entropy_R = scores
        ages_R = self.version - batch.versions_R
        inputs = LossInputs(batch, log_probs_R, entropy_R.detach(), ages_R, bounds)
        tokens = policy_loss(inputs, self.config.loss)
        loss_R = tokens.loss_R
        if batch.reference_logprobs_R is not None:
            kl_R = reference_kl(log_probs_R, batch.reference_logprobs_R, batch.mask_R, self.config.loss.kl_estimator)
            loss_R = loss_R + self.kl_coefficient.value * kl_R
            tokens = dataclasses.replace(tokens, kl_reference_R=kl_R)
        loss = loss_R.sum()
        if self.config.train.entropy_coef:
            loss = loss - self.config.train.entropy_coef * torch.where(batch.mask_R, entropy_R, 0.0).sum()
        mismatch = logprob_mismatch(log_probs_R, batch.behaviour_logprobs_R, batch.mask_R & (ages_R == 0))
        sums = summarize(tokens, mismatch, with_profile=self.config.monitor.token_profile)
        num_tokens = batch.mask_R.sum(dtype=torch.int32)
        return loss / num_trained_tokens, num_tokens, (log_probs_R.detach(), bounds, sums)

    def _set_learning_rate(self) -> float:
        """Set learning rate and weight decay for the next update."""
        settings = self.config.optimizer
        rate = learning_rate(self.version, settings, planned_updates(self.config))
        set_rates(self.optimizer, rate, settings.weight_decay)
        return rate

    # weights

    def weight_specs(self) -> list[TensorSpec]:
        """List names, types and shapes of `named_weights`: see `Learner.weight_specs`."""
        dtype = str(next(self.model.parameters()).dtype).removeprefix("torch.")
        return [
            TensorSpec(name, dtype, size)
            for entry in entries(self.shape)
            for name, size in zip(entry.hf_names, entry.hf_shapes, strict=True)
        ]

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield weights under Hugging Face names: see `Learner.named_weights` and `hf.convert.gather_weights`."""
        return gather_weights(self.model, self.shape, self.layout, self._unquantised)

    def _unquantised(self, parameter: Parameter) -> Tensor:
        """Return a parameter as engines and checkpoints hold it: with FP8, Adam's float32 weight, rounded."""
        if is_quantised(parameter):
            return self.adam.gather(parameter, WEIGHT).to(parameter.dtype)
        return parameter.detach()

    def _fill_weight(self, parameter: Parameter, tensor: Tensor) -> None:
        self.adam.fill(parameter, WEIGHT, tensor)

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the last update's clipped gradient, like `named_weights`: for tests and diagnostics."""
        return gather_weights(self.model, self.shape, self.layout, self.adam.gather_gradient)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of KL controller and gradient guard: a JSON value, the same on every rank."""
        return {"kl": self.kl_coefficient.state_dict(), "gradients": self.guard.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kl_coefficient.load_state_dict(state["kl"])
        self.guard.load_state_dict(state["gradients"])

    def snapshot(self) -> Snapshot:
        """Snapshot weights, optimizer state and version: see `Learner.snapshot`."""
        facts = {"version": self.version, "skipped_updates": self.num_skipped_updates}
        return checkpoint.take_snapshot(self.model, self.shape, self.layout, self.adam, facts, self.hf_path)

    def load(self, folder: Path) -> None:
        """Load a written snapshot: see `Learner.load`."""
        self._scored = None
        facts = checkpoint.load(self.model, self.shape, self.layout, self.adam, folder)
        self.version, self.num_skipped_updates = facts["version"], facts["skipped_updates"]


def _layout_problems(hf_config: dict[str, Any], parallel: ParallelConfig) -> list[str]:
    return validate_layout(hf_config, parallel.tensor, parallel.pipeline, parallel.virtual_pipeline)
