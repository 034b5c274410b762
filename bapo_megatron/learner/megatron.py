"""The policy on Megatron-Core: scoring, one optimizer update, weights under Hugging Face names, checkpoints.

    MiniBatch -> its micro-batches through a schedule (schedule.py) -> per-token log-probs (last stage)
              -> loss summed over tokens / tokens of ALL ranks -> gradients summed over data and context ranks -> Adam

Loss and gradient are divided once, by the update's global count of tokens or responses (`loss.mean_over`), so they do
not depend on how the batch is split over data or context ranks, stages or micro-batches.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from bapo_megatron_patches.megatron_core import apply_cpu_compat, apply_engine_compat
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor

from bapo_megatron.algorithms.centering import centering
from bapo_megatron.algorithms.kl import KLCoefficient, reference_kl
from bapo_megatron.algorithms.likely import divergence
from bapo_megatron.algorithms.losses import LossInputs, RatioTokenLoss, ScoredTokens, TokenLoss
from bapo_megatron.algorithms.mismatch import logprob_mismatch
from bapo_megatron.algorithms.update_rules import update_rule
from bapo_megatron.config.base import refuse
from bapo_megatron.config.lr_schedule import learning_rate, planned_updates
from bapo_megatron.config.schema_loss import CenteredLoss
from bapo_megatron.errors import UserError
from bapo_megatron.learner.base import Scored, StepResult
from bapo_megatron.learner.bounds import found_on_all_stages
from bapo_megatron.learner.fit import (
    check_adapters,
    check_extra,
    check_init_from,
    check_replay,
    check_split,
    check_top_k,
)
from bapo_megatron.learner.gradient_guard import GradientGuard
from bapo_megatron.learner.parallel import start_processes
from bapo_megatron.learner.policy import PolicyModel
from bapo_megatron.learner.precision import check_machine, this_machine
from bapo_megatron.learner.reference import FrozenPolicy, OwnReference
from bapo_megatron.learner.replay import ReplayingPolicy, settle
from bapo_megatron.learner.schedule import ForwardPasses, Scores
from bapo_megatron.learner.split_model import TrainedModel
from bapo_megatron.learner.token_metrics import TokenMetrics, TokenSums
from bapo_megatron.resolved import Resolved
from bapo_megatron.runtime.straggler import LocalTime
from bapo_megatron.runtime.together import failing_together
from bapo_megatron.tokens import SAMPLER_TOP_LOGPROBS
from bapo_megatron.types import MicroBatch, MiniBatch

PolicyOutcome = tuple[Tensor, Any, TokenSums]  # a micro-batch's log_probs_R, decision and sums


class MegatronLearner(TrainedModel):
    """The policy; implements `learner.base.Learner`. Construct it on every rank; all methods are collective.

    Args:
        run: its model's folder has the weights to start from.

    Raises:
        ConfigError: the layout does not fit the model or the number of processes; see `check_split`.
        CheckpointError: the checkpoint cannot be read, or its architecture is not supported.
    """

    def __init__(self, run: Resolved) -> None:
        config, model = run.config, run.model
        assert model is not None, "a learner begins with a model"
        fits = (check_split(config, model, "model.path"), check_replay(config, model), check_adapters(config, model))
        refuse([*check_extra(config), *chain(*fits), *check_init_from(config.lora)])
        refuse(check_top_k(config.teacher.top_k, config.parallel.tensor, run.shape))
        check_machine(config, run.shape, this_machine())
        apply_cpu_compat()
        apply_engine_compat()
        start_processes(config.parallel)
        model_parallel_cuda_manual_seed(config.run.seed)
        self.local_time = LocalTime()
        fp8 = config.precision.fp8_params
        chunk_type = ReplayingPolicy if config.model.replay_routes else PolicyModel
        super().__init__(config, run.shape, chunk_type, run.folder, self.local_time, fp8_params=fp8)
        self._passes_of_update = self.shape.passes_of_update
        self._scored: ForwardPasses | None = None  # forward passes of the mini-batch whose step comes next
        frozen = partial(FrozenPolicy, config, policy=model, local_time=self.local_time)
        self.reference: FrozenPolicy | OwnReference | None = None
        if config.loss.kl_coef:
            path = config.loss.reference_path
            self.reference = OwnReference(self) if run.uses_own_reference else frozen("loss.reference_path", path)
        self.teachers = [frozen(setting, path) for setting, path in config.teacher.paths.items()]
        self.kl_coefficient = KLCoefficient(config.loss)
        self.guard = GradientGuard(config)
        self._rule = update_rule(config.loss, config.bapo)
        self._token_metrics = TokenMetrics(config.loss.metrics)
        self._route_metrics: dict[str, float] = {}  # from the latest forward passes

    # scoring

    def log_probs(self, minibatch: MiniBatch) -> list[Tensor]:
        """Compute log-probs at the current weights and the rollout's temperature: see `Learner.log_probs`."""
        log_probs = self.schedule.log_probs(minibatch)
        self._settle_routes(minibatch)
        return log_probs

    def score(self, minibatch: MiniBatch, *, with_entropy: bool = False) -> list[Scored]:
        """Compute log-probs, and entropies on request, before the mini-batch's `step`: see `Learner.score`.

        This is free if they are already known, or if the step's forward passes can run now.
        """
        if minibatch.proximal_version == self.version and not with_entropy:
            known = [batch.proximal_logprobs_R for batch in minibatch.micro_batches if self.layout.is_last_stage]
            return [(log_probs_R, None) for log_probs_R in known if log_probs_R is not None]
        if self.schedule.runs_forwards_first(minibatch):
            self._scored = self.schedule.forward(minibatch)
            scores = [scores for _, scores in self._scored.batches]
        else:
            scores = self.schedule.without_gradient(minibatch, lambda scores: scores, with_entropy=with_entropy)
        self._settle_routes(minibatch)
        return [(one.log_probs_R.detach(), one.entropy_R.detach() if with_entropy else None) for one in scores]

    def sum_over_last_stage(self, table: Tensor) -> Tensor:
        """Sum over the ranks of the last stage alone: see `Learner.sum_over_last_stage`."""
        return self.layout.sum_over_last_stage(table)

    def sum_over_context(self, table: Tensor) -> Tensor:
        """Sum over the context ranks: see `Learner.sum_over_context`."""
        return self.layout.sum_over_context(table)

    # learning

    def step(self, minibatch: MiniBatch, found: Any) -> StepResult:
        """Make one Adam update; a gradient that is not finite is counted, and leaves weights and moments unchanged.

        Raises:
            DivergedError: the last `MAX_SKIPPED_IN_A_ROW` updates had no finite gradient.
        """
        is_of_each, masks = callable(found), self._rule.masks
        divisor = self._divisor(minibatch, found)

        def loss_of(batch: MicroBatch) -> Callable[[Scores], tuple[Tensor, Tensor, PolicyOutcome]]:
            return lambda scores: self._micro_batch_loss(batch, scores, found, divisor)

        scored, self._scored = self._scored, None
        if scored is not None and scored.minibatch is minibatch:
            passes, forward = partial(self.schedule.backward, scored, loss_of), False
        else:
            passes, forward = partial(self.schedule.forward_backward, minibatch, loss_of), True

        def run() -> list[PolicyOutcome]:
            outcomes = passes()
            self._settle_routes(minibatch, forward=forward, backward=True)
            return outcomes

        rate = learning_rate(self.version, self.config.optimizer, planned_updates(self.config))
        outputs, grad_norm = self.update(run, rate)
        *counts, saved = dataclasses.astuple(minibatch.counts)
        num_expected = None if masks else minibatch.num_trained_tokens
        metrics, mismatch = self._token_metrics.reduce([sums for *_, sums in outputs], num_expected, self.layout)
        metrics |= {
            "perf/tflop": self._passes_of_update * sum(self.shape.forward_flops(*counts)) / 1e12,
            "optimizer/lr": rate,
            "optimizer/grad_norm": grad_norm,
            "optimizer/skipped": float(self.num_skipped_updates),
        }
        if self.share.shares_prompts:
            metrics["perf/saved_token_share"] = saved / max(counts[0] + saved, 1)
        metrics |= self._route_metrics | self.guard.observe(grad_norm)
        metrics |= self._adapter_metrics(grad_norm, metrics)
        if self.reference is not None:
            metrics["loss/kl_coef"] = self.kl_coefficient.value
            self.kl_coefficient.observe(metrics["loss/kl_reference"])
        log_probs, of_each = [o[0] for o in outputs], [o[1] for o in outputs]
        used = found_on_all_stages(of_each, minibatch, self.layout) if is_of_each else (found,)
        return StepResult(metrics, log_probs, mismatch, used)

    def _adapter_metrics(self, grad_norm: float, metrics: dict[str, float]) -> dict[str, float]:
        """Return how much of the weights the adapters changed in the last push. Collective with adapters.

        Raises:
            UserError: tokens push, and their gradient reaches no adapter.
        """
        if self.shape.adapters is None:
            return {}
        pushing = metrics.get("loss/positive_token_share", 0.0) + metrics.get("loss/negative_token_share", 0.0)
        clipped = sum(metrics.get(f"loss/{name}_share", 0.0) for name in ("clip_high", "clip_low", "dual_clip"))
        with failing_together(UserError):
            if grad_norm == 0 and clipped < pushing:
                raise UserError(
                    "the gradient of every adapter is exactly 0, although tokens with an advantage were trained: "
                    "nothing would be learned; leave out [megatron.extra], and report this"
                )
        return {} if self.merged is None else {"optimizer/merged_share": self.merged.changed_share()}

    def _divisor(self, minibatch: MiniBatch, found: Any) -> int:
        """Return what the update's loss is divided by, at least 1: see `loss.mean_over`."""
        mean_over, masks = self.config.loss.mean_over, self._rule.masks
        if mean_over == "tokens":
            return max(self._rule.num_trained_tokens(found) if masks else minibatch.num_trained_tokens, 1)
        number = self._rule.num_trained_responses(found) if masks else minibatch.num_trained_responses
        return max(number, 1) * (self.config.rollout.max_response_tokens if mean_over == "budget" else 1)

    def _micro_batch_loss(
        self, batch: MicroBatch, scores: Scores, found: Any, divisor: int
    ) -> tuple[Tensor, Tensor, PolicyOutcome]:
        """Return this micro-batch's share of the update's loss, and its outcome, in the form of Megatron's schedules.

        Args:
            found: a decision, or a `FoundOf`.
        """
        log_probs_R, entropy_R, class_RX, _ = scores
        ages_R = self.version - batch.versions_R
        mean_over, over_context = self.config.loss.mean_over, self.layout.sum_over_context
        tokens = ScoredTokens(batch, log_probs_R.detach(), ages_R, over_context, entropy_R.detach(), mean_over)
        if callable(found):
            found = found(tokens)
        if self._rule.masks:
            batch = dataclasses.replace(batch, mask_R=self._rule.mask(tokens, found))
        inputs = LossInputs(
            batch, log_probs_R, ages_R, over_context, entropy_R=entropy_R.detach(), mean_over=mean_over, found=found
        )
        record: TokenLoss = self.config.loss.tokens(inputs)
        loss_R = record.loss_R
        if batch.reference_logprobs_R is not None:
            kl_R = reference_kl(log_probs_R, batch.reference_logprobs_R, batch.mask_R, self.config.loss.kl_estimator)
            loss_R = loss_R + self.kl_coefficient.value * kl_R
            record = dataclasses.replace(record, kl_reference_R=kl_R)
        if class_RX is not None and batch.likely_logprobs_RX is not None:
            teacher = self.config.teacher
            divergence_R = divergence(class_RX, batch.likely_logprobs_RX, batch.mask_R, teacher.divergence)
            loss_R = loss_R + teacher.coef * divergence_R
            prefers_other_R = batch.mask_R & (class_RX[:, :-1].argmax(1) > 0)  # the teacher's likeliest is the first
            record = dataclasses.replace(record, divergence_R=divergence_R, prefers_other_R=prefers_other_R)
        elif class_RX is not None and isinstance(self.config.loss, CenteredLoss):
            assert isinstance(record, RatioTokenLoss)
            factor = partial(self.config.loss.factor, bounds=found)
            centred = centering(class_RX, batch.named(SAMPLER_TOP_LOGPROBS), batch.mask_R, factor)
            loss_R = loss_R + record.weight_R * record.advantages_R * centred.centre_R
            record = dataclasses.replace(record, sampler_kl_R=centred.kl_R, sampler_mass_R=centred.mass_R)
        weight_R = inputs.loss_weights()

        def total(values_R: Tensor) -> Tensor:
            return (values_R if weight_R is None else values_R * weight_R.to(values_R.dtype)).sum()

        loss = total(loss_R)
        if self.config.train.entropy_coef:
            loss = loss - self.config.train.entropy_coef * total(torch.where(batch.mask_R, entropy_R, 0.0))
        mismatch = logprob_mismatch(log_probs_R, batch.behaviour_logprobs_R, batch.mask_R & (ages_R == 0))
        sums = self._token_metrics.summarize(record, mismatch, with_profile=self.config.monitor.token_profile)
        num_tokens = batch.mask_R.sum(dtype=torch.int32)
        return loss / divisor, num_tokens, (log_probs_R.detach(), found, sums)

    def _settle_routes(self, minibatch: MiniBatch, *, forward: bool = True, backward: bool = False) -> None:
        """Check that all layers took the recorded experts in the passes just made."""
        if chunks := [chunk for chunk in self.model if isinstance(chunk, ReplayingPolicy)]:
            counted = settle(chunks, minibatch, self.shape.num_layers, forward=forward, backward=backward)
            self._route_metrics = counted or self._route_metrics

    # state

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the KL controller and the gradient guard: a JSON value, the same on every rank."""
        return {"kl": self.kl_coefficient.state_dict(), "gradients": self.guard.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kl_coefficient.load_state_dict(state["kl"])
        self.guard.load_state_dict(state["gradients"])

    def load(self, folder: Path) -> None:
        """Load a written snapshot: see `Learner.load`."""
        self._scored = None
        super().load(folder)
