"""The critic of value-based advantages: a model like the policy, split like it, with one number for each token.

    MiniBatch -> its micro-batches through Megatron's schedule -> V of the state that each response token is sampled in
              -> value loss summed over tokens / tokens of ALL ranks -> gradients -> its own Adam

The head starts at zero: a new critic's values are 0 in any layout, and the first update moves only the head.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.nn import Module

from bapo_megatron.algorithms.gae import value_loss
from bapo_megatron.checkpoint.folder import Facts
from bapo_megatron.config.schema import Config
from bapo_megatron.hf.facts import ModelFacts
from bapo_megatron.hf.reader import HFReader
from bapo_megatron.hf.shape import ModelShape
from bapo_megatron.learner.gradient_guard import SkipLimit
from bapo_megatron.learner.parallel import ParallelLayout, device
from bapo_megatron.learner.policy import PolicyModel
from bapo_megatron.learner.split_model import TrainedModel
from bapo_megatron.runtime.straggler import LocalTime
from bapo_megatron.types import MicroBatch, MiniBatch

CriticOutcome = Tensor  # float64 [3], a micro-batch's value loss, clipped tokens and trained tokens


class ValueHead(Module):
    """A linear map to one number, the same on all tensor ranks; returns float32, whatever the weight's type."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        # under sequence parallelism each rank sees its own tokens: `finalize_model_grads` sums such gradients
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 (Parameter has no such field)
        set_defaults_if_not_set_tensor_model_parallel_attributes(self.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.linear(hidden.float(), self.weight.float())


class CriticModel(PolicyModel):
    """A part of the critic; the last returns values_R, float32: row t is V of the prompt and the response before t."""

    def __init__(self, config: TransformerConfig, shape: ModelShape, layout: ParallelLayout, chunk: int = 0) -> None:
        super().__init__(config, shape, layout, chunk)
        if self.post_process:
            del self.output_layer  # GPTModel always makes one
            self.score = ValueHead(config)

    def forward(self, batch: MicroBatch, **scoring: Any) -> Tensor:
        """Compute the values, or the hidden states of this part; `scoring`, for a policy's log-probs, is ignored."""
        hidden_T1H = self.hidden_states(batch)
        if not self.post_process:
            return hidden_T1H
        values_T11 = self.score(hidden_T1H)
        if self.config.sequence_parallel:  # gather values, not hidden states; every rank has the whole gradient
            values_T11 = gather_from_sequence_parallel_region(
                values_T11, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return values_T11[:, 0, 0].index_select(0, batch.rows_R)


class Critic(TrainedModel):
    """Values of states, learned from returns. Construct it on every rank, after the policy; methods are collective.

    Args:
        config: the run's settings; `[critic]` sets how it learns, and `[optimizer]` the rest of Adam's settings.
        start: where the weights come from: a language model, whose head is dropped, or a model with a score.weight
            [1, hidden].
        local_time: the policy's clock, which counts these passes too.

    Raises:
        CheckpointError: the start weights cannot be read, or their architecture is not supported.
    """

    def __init__(self, config: Config, start: ModelFacts, local_time: LocalTime) -> None:
        assert start.folder is not None, "its weights are there"
        shape = start.shape.with_value_head()
        with HFReader(start.folder) as read:
            stored = shape if "score.weight" in read else start.shape
        super().__init__(config, shape, CriticModel, start.folder, local_time, stored=stored)
        self._skips = SkipLimit("critic")

    def values(self, minibatch: MiniBatch) -> list[Tensor]:
        """Compute V of each response token's state: float32 [R] per micro-batch; empty off the last stage."""
        return self.schedule.without_gradient(minibatch, lambda values_R: values_R)

    def fit(self, minibatch: MiniBatch, old_values_T: Tensor, returns_T: Tensor) -> dict[str, float]:
        """Make one Adam update towards the returns, and return its metrics, the same on every rank.

        A gradient that is not finite is counted, and leaves the weights unchanged.

        Args:
            old_values_T, returns_T: on the CPU, one for each token of the Batch that the mini-batch was cut from;
                entries on prompts are not read.

        Raises:
            DivergedError: the last `MAX_SKIPPED_IN_A_ROW` updates had no finite gradient.
        """
        old_values_T, returns_T = old_values_T.float().to(device()), returns_T.float().to(device())

        def loss_of(batch: MicroBatch) -> Callable[[Tensor], tuple[Tensor, Tensor, CriticOutcome]]:
            old_R, returns_R = old_values_T[batch.batch_rows_R], returns_T[batch.batch_rows_R]
            return lambda values_R: self._micro_batch_loss(
                batch, values_R, old_R, returns_R, minibatch.num_trained_tokens
            )

        rate = self.config.critic.lr
        outputs, grad_norm = self.update(partial(self.schedule.forward_backward, minibatch, loss_of), rate)
        self._skips.observe(grad_norm)
        sums = torch.stack(outputs).sum(0) if outputs else torch.zeros(3, dtype=torch.float64)
        loss, num_clipped, num_tokens = self.layout.reduce_over_data(sums).tolist()
        assert num_tokens == minibatch.num_trained_tokens, "the ranks trained another number of tokens than planned"
        return {
            "critic/loss": loss / num_tokens,
            "critic/clip_share": num_clipped / num_tokens,
            "critic/grad_norm": grad_norm,
            "critic/lr": rate,
            "critic/skipped": float(self.num_skipped_updates),
        }

    def facts(self) -> dict[str, Any]:
        """Return the counters that a snapshot holds."""
        return {**super().facts(), "skipped_in_a_row": self._skips.num_in_a_row}

    def restore(self, facts: Facts) -> None:
        """Set the counters to the `facts` of a snapshot."""
        super().restore(facts)
        self._skips.num_in_a_row = facts.get("skipped_in_a_row", 0)

    def _micro_batch_loss(
        self, batch: MicroBatch, values_R: Tensor, old_R: Tensor, returns_R: Tensor, num_trained_tokens: int
    ) -> tuple[Tensor, Tensor, CriticOutcome]:
        """Return this micro-batch's share of the update's loss, and its sums, in the form of Megatron's schedules."""
        loss_R, clipped_R = value_loss(values_R, old_R, returns_R, self.config.critic.clip)
        loss_R = torch.where(batch.mask_R, loss_R, 0.0)
        num_tokens = batch.mask_R.sum(dtype=torch.int32)
        sums = [loss_R.detach().double().sum(), (clipped_R & batch.mask_R).sum().double(), num_tokens.double()]
        return loss_R.sum() / num_trained_tokens, num_tokens, torch.stack(sums)
