"""From a group (all responses to one prompt) to advantages, one per response or one per turn.

A group whose rewards are all equal (such as a group of one), or differ by rounding alone, teaches nothing: its built-in
advantages are exactly 0, except in REINFORCE++. `whiten` brings the advantages of a whole batch to one scale, if the
run or the method asks for it.

The configuration reads this file, so it does not import torch: the built-in advantages use the methods of tensors.

Shape legend: G responses in the group, S responses in the batch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from bapo_megatron.types import FinishReason, Prompt

_EPSILON = 1e-6  # added to the standard deviation, as GRPO implementations do
_ROUNDING = 1e-9  # relative to the largest value: sums of rewards in another order differ by less
_SMALLEST = 1e-12  # differences below it are what is left of larger numbers, as in 0.1 + 0.2 - 0.3


def has_spread(lowest: float, highest: float) -> bool:
    """Return whether the extremes of some values differ by more than rounding: only then may a spread divide them.

    Example: has_spread(0.3, 0.1 + 0.2) == False
    """
    return not math.isclose(lowest, highest, rel_tol=_ROUNDING, abs_tol=_SMALLEST)


@dataclass(frozen=True, slots=True)
class SampleView:
    """A response, as an advantage sees it.

    Example: SampleView(reward=1.0, turn_lengths=(120,), finish_reason="stop")
    """

    reward: float  # shaped and scaled
    turn_lengths: tuple[int, ...]  # sampled tokens of each turn
    finish_reason: FinishReason | None
    parts: Mapping[str, float] = field(default_factory=dict)  # by name, if the judge's verdict has parts
    earlier_rewards: tuple[float, ...] = ()  # scaled; of the first turns, without the last

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """One per turn. The last turn has the rest of `reward`, which is their sum."""
        others = (0.0,) * (len(self.turn_lengths) - 1 - len(self.earlier_rewards))
        return (*self.earlier_rewards, *others, self.reward - math.fsum(self.earlier_rewards))

    @property
    def num_tokens(self) -> int:
        return sum(self.turn_lengths)


@dataclass(frozen=True, slots=True)
class GroupView:
    """All responses to one prompt, as an advantage sees them; no tokens."""

    prompt: Prompt
    samples: tuple[SampleView, ...]
    gamma: float = 1.0  # advantage.gamma
    weights: Mapping[str, float] = field(default_factory=dict)  # reward.weights, of parts by name

    @property
    def rewards_G(self) -> Tensor:
        """The shaped and scaled rewards, float64."""
        import torch  # takes seconds to import

        return torch.tensor([sample.reward for sample in self.samples], dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class Advantage:
    """A built-in advantage."""

    function: Callable[[GroupView], Tensor | list[list[float]]]
    divides_by_group: bool = False  # by a statistic of the group's rewards, so that scaling them has no effect
    needs_binary: bool = False  # the judge's verdicts must be 0 or 1
    needs_group: bool = True  # compares the responses to one prompt: theirs sum to 0
    reads_parts: bool = False  # compares each part of the verdicts, and not their sum
    discounts: Literal["", "turns", "tokens"] = ""  # what advantage.gamma counts; `BatchBuilder` does it for tokens
    whitens: Literal["", "responses", "tokens"] = ""  # what the method whitens over, in the whole batch


def grpo(group: GroupView) -> Tensor:
    """Compute (r - mean) / (std + 1e-6), std with divisor G - 1: GRPO, arXiv 2402.03300, Eq. 3."""
    return _standardised(group.rewards_G)


def dr_grpo(group: GroupView) -> Tensor:
    """Compute r - mean: Dr. GRPO, arXiv 2503.20783, which leaves out the standard deviation."""
    return _centred(group.rewards_G)


def rloo(group: GroupView) -> Tensor:
    """Compute r - mean of the other responses: leave-one-out, arXiv 2402.14740."""
    num = len(group.samples)
    return dr_grpo(group) * num / max(num - 1, 1)


def max_rl(group: GroupView) -> Tensor:
    """Compute (r - mean) / mean: MaxRL, arXiv 2602.02710, which counts a success the more the rarer it is."""
    rewards_G, advantages_G = group.rewards_G, dr_grpo(group)
    return advantages_G / rewards_G.mean() if bool(advantages_G.any()) else advantages_G


def gdpo(group: GroupView) -> Tensor:
    """Compute sum_k w_k grpo(part k), to be whitened over responses: GDPO, arXiv 2601.05242.

    So no part's spread hides another's. w_k is reward.weights, and a response without the part counts as 0. TRL whitens
    over responses too (`normalize_then_sum` in grpo_trainer.py, which adds 1e-4 to each std), and verl over tokens
    (`compute_gdpo_outcome_advantage` in core_algos.py).
    """
    total_G = group.rewards_G.new_zeros(len(group.samples))
    for name in dict.fromkeys(name for sample in group.samples for name in sample.parts):
        parts_G = total_G.new_tensor([sample.parts.get(name, 0.0) for sample in group.samples])
        total_G = total_G + group.weights.get(name, 1.0) * _standardised(parts_G)
    return total_G


def reinforce_plus_plus(group: GroupView) -> Tensor:
    """Return r, to be discounted and whitened over the batch's trained tokens: REINFORCE++, arXiv 2501.03262.

    `compute_reinforce_plus_plus_outcome_advantage` in verl's core_algos.py, where the reward comes with the last token.
    """
    return group.rewards_G


def grpo_turns(group: GroupView) -> list[list[float]]:
    """Compute (R - mean) / (std + 1e-6) for each turn: its return R is its reward + gamma x the next turn's return.

    Mean and std count each response once, in equal parts for its turns. So without discount, with rewards only at the
    end, each turn has the advantage that `grpo` gives its response.
    """
    returns = [_returns(sample.turn_rewards, group.gamma) for sample in group.samples]
    values = [value for turns in returns for value in turns]
    if len(returns) < 2 or not has_spread(min(values), max(values)):
        return [[0.0] * len(turns) for turns in returns]
    means_G = group.rewards_G.new_tensor([statistics.fmean(turns) for turns in returns])
    within = math.fsum(statistics.pvariance(turns) for turns in returns) / (len(returns) - 1)
    mean, std = float(means_G.mean()), math.hypot(float(means_G.std()), math.sqrt(within))
    return [[(value - mean) / (std + _EPSILON) for value in turns] for turns in returns]


def _standardised(values_G: Tensor) -> Tensor:
    centred_G = _centred(values_G)
    return centred_G / (values_G.std() + _EPSILON) if bool(centred_G.any()) else centred_G


def _centred(values_G: Tensor) -> Tensor:
    return values_G - values_G.mean() if _differ(values_G) else values_G.new_zeros(values_G.shape)


def _returns(rewards: Sequence[float], gamma: float) -> list[float]:
    return list(accumulate(reversed(rewards), lambda later, reward: reward + gamma * later))[::-1]


ESTIMATORS = {
    "grpo": Advantage(grpo, divides_by_group=True),
    "grpo_turns": Advantage(grpo_turns, divides_by_group=True, discounts="turns"),
    "dr_grpo": Advantage(dr_grpo),
    "rloo": Advantage(rloo),
    "max_rl": Advantage(max_rl, divides_by_group=True, needs_binary=True),
    "gdpo": Advantage(gdpo, divides_by_group=True, reads_parts=True, whitens="responses"),
    "reinforce_plus_plus": Advantage(reinforce_plus_plus, needs_group=False, discounts="tokens", whitens="tokens"),
    "reinforce_plus_plus_baseline": Advantage(dr_grpo, whitens="tokens"),
}
"""Built-in advantages by `advantage.kind`."""


def whiten(advantages_S: Tensor, *, is_centred: bool = False) -> Tensor:
    """Compute (A - mean) / (std + 1e-6), with the sample standard deviation over the batch; 0 if all A are equal.

    Statistics are over responses, so one response's length does not change the advantages of the others; REINFORCE++
    has `whitened` of gae.py in its place, over tokens. Unlike with `grpo`, a group of nearly equal rewards is not
    scaled up to the size of the others. A response of several turns counts once per turn.

    Args:
        is_centred: A sums to 0 in every group, if each response counts once. Then no mean is subtracted, and a response
            that teaches nothing keeps its exact 0. Nor is it if it is a rounding error.
    """
    if not _differ(advantages_S):
        return advantages_S.new_zeros(advantages_S.shape)
    mean, largest = advantages_S.mean(), float(advantages_S.abs().max())
    if not (is_centred or abs(float(mean)) <= _ROUNDING * largest):
        advantages_S = advantages_S - mean
    return advantages_S / (advantages_S.std() + _EPSILON)


def _differ(values: Tensor) -> bool:
    return values.numel() > 1 and has_spread(float(values.min()), float(values.max()))
