"""The tokens of a step, and the choice to compute the prompt of several responses once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bapo_megatron.config.schema import MAX_KEYS_PER_TOKEN, Config, ParallelConfig, TrainConfig
from bapo_megatron.hf.shape import ModelShape

_WORTH_SHARING = 0.1  # share of a step's tokens


def can_share_prompts(parallel: ParallelConfig, shape: ModelShape) -> bool:
    """Return whether a model's layers, in this layout, can compute a prompt once for several responses."""
    return parallel.context == 1 and shape.linear is None


def saves_by_sharing(config: Config, response_tokens: int | None = None) -> bool:
    """Return whether more than a tenth of a step's tokens would be saved if prompts were shared."""
    copied, shared = (StepTokens.of(config, response_tokens, shares_prompts=on) for on in (False, True))
    return shared.total < (1 - _WORTH_SHARING) * copied.total


def shares_prompts(config: Config, shape: ModelShape) -> bool:
    """Return whether a model computes the prompt of several responses in a micro-batch once."""
    if not can_share_prompts(config.parallel, shape):
        return False
    chosen = config.train.share_prompts
    return saves_by_sharing(config) if chosen is None else chosen


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Tokens that one step trains on. Example: StepTokens(512, prompt=1024, response=8192).total == 4_718_592."""

    num_sequences: int
    prompt: int  # with all that an environment gives after it
    response: int
    num_copies_saved: int = 0  # prompts that are not computed again
    saved: int = 0  # tokens of each of these

    @classmethod
    def of(cls, config: Config, response_tokens: int | None = None, *, shares_prompts: bool = False) -> StepTokens:
        """Count a step's tokens.

        Args:
            response_tokens: average response length; None means the maximum.
            shares_prompts: whether a micro-batch holds a prompt once.
        """
        r = config.rollout
        response = min(response_tokens or r.max_response_tokens, r.max_response_tokens)
        given, num_sequences = config.longest_trained - r.max_response_tokens, r.prompts_per_step * r.samples_per_prompt
        if not shares_prompts:
            return cls(num_sequences, given, response)
        prompt = min(config.data.max_prompt_tokens, given)
        copies = _copies_of_a_prompt(config.train, r.samples_per_prompt, prompt, given + response)
        num_saved = num_sequences - r.prompts_per_step * copies
        return cls(num_sequences, given, response, max(0, int(num_saved)), prompt)

    @property
    def per_sequence(self) -> int:
        return self.prompt + self.response

    @property
    def total(self) -> int:
        return self.num_sequences * self.per_sequence - self.num_copies_saved * self.saved


def _copies_of_a_prompt(train: TrainConfig, num_responses: int, prompt: int, sequence: int) -> float:
    """Return how often a step computes a group's prompt of this many tokens, on average.

    Its G = `num_responses` are dealt to M updates at random: M (1 - (1 - 1 / M)^G) of these get one. There, a
    micro-batch has room for some, and so has the bound of `buffer.packing.make_units`.
    """
    num_updates = train.minibatches_per_step
    num_parts = 1.0 if train.deal == "groups" else num_updates * (1 - (1 - 1 / num_updates) ** num_responses)
    room, together = train.max_tokens_per_microbatch, 1
    for number in range(2, num_responses + 1):
        length = prompt + number * (sequence - prompt)
        if length > room or number * sequence > MAX_KEYS_PER_TOKEN * length:
            break
        together = number
    return num_parts * math.ceil(num_responses / num_parts / together)
