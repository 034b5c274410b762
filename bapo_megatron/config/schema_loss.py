"""The settings that losses share, [loss], and the settings of the search for clip bounds, [bapo].

Each loss is a section with its own settings, its function and its traits: `algorithms/objectives` has the built-in
ones, `config/losses.py` finds them.
"""

import math
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from bapo_megatron.config.base import (
    LARGEST,
    ContradictionError,
    Count,
    NonNegative,
    PathText,
    Positive,
    Section,
    Violation,
)

MAX_STEPS = 1000  # in the search for one bound: the learner sums over tokens for each step
_DIGITS = 10  # grid points are rounded to this many decimals, so that 0.6 + 15 * 0.02 is the 0.9 that the user wrote


RuleReads = Literal["nothing", "update", "micro-batch", "earlier updates"]
"""Tokens that an update rule reads before it decides: none; all of the update, before its first backward pass; the
micro-batch's, for the loss of that micro-batch (such a rule decides on `ClipBounds`); or the tokens of earlier updates,
from their own forward passes (the first update reads all of its own)."""


MeanOver = Literal["tokens", "responses", "budget"]
Divergence = Literal["forward", "reverse"]


class BoundRange(Section):
    """Start, stop and step of a bound; also accepted as a list [start, stop, step]."""

    start: Positive
    """Bound before the search."""
    stop: Positive
    """Largest value; a last step that would pass it is not taken."""
    step: Annotated[float, Field(ge=1e-9, le=LARGEST)]
    """Distance between two candidates, at least 1e-9: they are rounded to ten decimals."""

    @model_validator(mode="before")
    @classmethod
    def _from_list(cls, value: Any) -> Any:
        if isinstance(value, list | tuple) and len(value) == 3:
            return dict(zip(("start", "stop", "step"), value, strict=True))
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.start > self.stop:
            text = f"must not be above stop ({self.stop:g}), got {self.start:g}"
            raise ContradictionError(Violation(("start", "stop"), text))
        if (self.stop - self.start) / self.step > MAX_STEPS:
            text = f"must cut the range into at most {MAX_STEPS} steps, got {self.step:g}"
            raise ContradictionError(Violation(("step", "start", "stop"), text))
        return self

    @property
    def points(self) -> list[float]:
        """Every value the bound can take, ascending. Steps are counted: adding up 0.02 15 times ends one step short."""
        num_steps = math.floor((self.stop - self.start) / self.step + 1e-9)
        return [round(self.start + k * self.step, _DIGITS) for k in range(num_steps + 1)]


_DEFAULT: dict[str, Any] = {
    "rho0": 0.5,
    "low": {"start": 0.6, "stop": 0.9, "step": 0.02},
    "high": {"start": 1.2, "stop": 3.0, "step": 0.05},
    "contribution": "gradient",
    "token_weight": "uniform",
    "order": "high_first",
}
PRESETS = {
    "default": _DEFAULT,
    "paper": _DEFAULT | {"rho0": 0.4, "contribution": "surrogate", "token_weight": "rollout_prob"},
    "official": {
        "rho0": 1.0,
        "low": {"start": 0.6, "stop": 0.8, "step": 0.05},
        "high": {"start": 1.2, "stop": 2.0, "step": 0.05},
        "contribution": "official",
        "token_weight": "uniform",
        "order": "low_first",
    },
    "wide": _DEFAULT
    | {
        "low": {"start": 0.9, "stop": 0.9, "step": 0.02},
        "high": {"start": 3.0, "stop": 3.0, "step": 0.05},
        "scope": "fixed",
    },
}
"""Base values of [bapo], which explicitly set keys override. docs/bapo.md has the reasons for each."""


class ClipBoundConfig(Section):
    """The search for BAPO's clip bounds. `preset` chooses the base values; explicitly set keys override them."""

    preset: Literal["default", "paper", "official", "wide"] = "default"
    """default: gradient share, target 0.5; paper: the paper's values; official: the authors' recipe on verl; wide: no
    search, but fixed bounds, 0.9 and 3.0 (docs/losses.md)."""
    rho0: Positive = _DEFAULT["rho0"]
    """Target of rho. A share in (0, 1) for gradient and surrogate; net and official are ratios that may exceed 1
    (a share s is the ratio s / (1 - s) of official)."""
    low: BoundRange = BoundRange(**_DEFAULT["low"])
    """Lower ratio bound, at most 1."""
    high: BoundRange = BoundRange(**_DEFAULT["high"])
    """Upper ratio bound, at least 1."""
    contribution: Literal["gradient", "surrogate", "net", "official"] = _DEFAULT["contribution"]
    """Measure of contribution. gradient: P/(P+N) over tokens that still carry gradient; surrogate: P/(P+N) over the
    clipped objective's terms; net: P/|P-N| (Eq. 8 as written); official: P/N."""
    token_weight: Literal["uniform", "rollout_prob"] = _DEFAULT["token_weight"]
    """Weight of a token in P and N: 1, or its probability under the policy that sampled it."""
    order: Literal["high_first", "low_first"] = _DEFAULT["order"]
    """The bound that moves first, until it reaches its end."""
    scope: Literal["exact", "lagged", "smoothed", "microbatch", "fixed"] = "exact"
    """exact: search with the optimizer step's own tokens; lagged: with the previous step's (saves a forward pass);
    smoothed: with an average over several previous steps; microbatch: separately for each micro-batch (as the authors
    do; the result depends on how the step is split); fixed: no search, bounds stay at their start."""
    smoothing_updates: Count = 8
    """scope = "smoothed": length of the average in optimizer steps. A step's share shrinks by 1 / smoothing_updates
    with every further step; 1 is the same as lagged."""

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        base = PRESETS.get(str(value.get("preset")), _DEFAULT)
        merged = {**base, **value}
        for name in ("low", "high"):  # a range may be overridden key by key
            if isinstance(merged[name], dict):
                merged[name] = {**base[name], **merged[name]}
        return merged

    @model_validator(mode="after")
    def _check(self) -> Self:
        found: list[Violation] = []
        if self.low.stop > 1:
            text = f"must be at most 1, as it bounds the ratio from below, got {self.low.stop:g}"
            found.append(Violation(("low.stop",), text))
        if self.high.start < 1:
            text = f"must be at least 1, as it bounds the ratio from above, got {self.high.start:g}"
            found.append(Violation(("high.start",), text))
        if self.contribution in ("gradient", "surrogate") and self.rho0 >= 1:
            text = f'must be below 1, as contribution="{self.contribution}" compares it with a share, got {self.rho0:g}'
            found.append(Violation(("rho0", "contribution", "preset"), text))
        if found:
            raise ContradictionError(*found)
        return self

    @property
    def looks_back(self) -> bool:
        """Whether the bounds of an update come from the tokens of earlier updates."""
        return self.scope in ("lagged", "smoothed")

    @property
    def reads(self) -> RuleReads:
        """Tokens that the search reads, depending on its scope."""
        if self.looks_back:
            return "earlier updates"
        return {"exact": "update", "microbatch": "micro-batch", "fixed": "nothing"}[self.scope]  # type: ignore[return-value]


class LossConfig(Section):
    """The policy loss, chosen by `name`; each loss has its own settings."""

    name: str = "bapo"
    """A built-in loss (docs/losses.md), or your own function, "my_package.my_module:my_loss"."""
    mean_over: MeanOver = "tokens"
    """What an update's loss is a mean over. tokens: its trained tokens; responses: the trained tokens of each response,
    then the responses; budget: the sum over tokens, divided by the number of responses times
    rollout.max_response_tokens. It applies to all terms: the policy's loss, KL term, entropy bonus, and the
    contributions in BAPO's search. Metrics and the critic's loss stay means over tokens."""
    kl_coef: NonNegative = 0.0
    """Weight of KL(policy || reference) per trained token in the loss; with kl_target, its initial value. Above 0, the
    learner also holds the reference's weights, and scores each rollout batch with them once. 0: no reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """With d = log policy - log reference. k1: d (its gradient is 0 on average); k2: d^2 / 2; k3: e^-d - 1 + d, as in
    GRPO."""
    kl_target: Positive | None = None
    """Steer kl_coef so that the KL per token stays near this, in nats (Ziegler et al.), by at most 2 % an update.
    Unset: kl_coef is constant."""
    reference_path: PathText | None = None
    """Hugging Face folder of the reference policy, with the policy's vocabulary. Unset: model.path."""

    other_names: ClassVar[tuple[str, ...]] = ()
    """Names of methods, in lower case, that have this loss: an answer to such a `loss.name` suggests it."""
    metrics: ClassVar[tuple[Any, ...]] = ()
    """The loss's own `Metric`s, from fields of its record or its rule, in addition to those in metrics.toml."""
    streams: ClassVar[tuple[Any, ...]] = ()
    """`StepStream`s that the learner computes for it in each step."""
    rule: ClassVar[Any] = "bapo_megatron.algorithms.update_rules:NoBounds"
    """The `UpdateRule` that decides `LossInputs.found`, or its dotted path, because this file does not import torch."""
    searches_bounds: ClassVar[bool] = False
    """Whether the rule is the search of [bapo]."""
    reads_entropy: ClassVar[bool] = False
    """Whether the rule reads the tokens' entropies."""
    clips: ClassVar[bool] = False
    """Whether tokens beyond a bound lose their gradient: the record is a `ClippedTokenLoss`."""
    reads_responses: ClassVar[bool] = False
    """Whether what a token learns depends on all tokens of its response."""

    @property
    def function_options(self) -> Any:
        """The settings that its function and its rule read; by default this section."""
        return self

    @property
    def ratio_options(self) -> "RatioOptions | None":
        """The settings of the loss's ratios; None for a loss without ratios."""
        return None

    @property
    def scores_proximal(self) -> bool:
        """Whether the learner scores each batch at the start of a step, for the denominator of the clipped ratio."""
        return self.ratio_options is not None and self.ratio_options.proximal == "learner"

    @property
    def sampler_top_k(self) -> int:
        """The number of the sampler's likeliest tokens at each place that the loss reads: see `CenteredLoss`."""
        return 0

    def rule_reads(self, bapo: "ClipBoundConfig") -> RuleReads:
        """Return which tokens the rule reads."""
        return bapo.reads if self.searches_bounds else "nothing"

    def tokens(self, inputs: Any) -> Any:
        """Compute the loss of each token of a micro-batch, from `LossInputs`: a `TokenLoss`."""
        raise NotImplementedError


class RatioOptions(Section):
    """Settings of a ratio between the policy and an older policy, and of its importance weights."""

    proximal: Literal["behaviour", "learner"] = "behaviour"
    """Denominator of the clipped ratio. behaviour: the policy that sampled the token (the paper's r_t); learner: the
    learner at the start of the step (one more scoring pass), with importance weights pi_prox / pi_behaviour."""
    importance_level: Literal["token", "sequence"] = "token"
    """proximal = "learner": weight of a token's term. token: the token's own weight; sequence: the product of the
    weights of its response's trained tokens."""
    importance_kind: Literal["truncate", "mask"] = "truncate"
    """proximal = "learner": what happens to a weight outside importance_floor and importance_cap. truncate: it becomes
    the nearer limit; mask: it becomes 0, so that the token, or the response, has no gradient."""
    importance_floor: float = Field(0.0, ge=0, le=1)
    """proximal = "learner": lower bound of the weights; 0 means none."""
    importance_cap: float = Field(2.0, ge=1, le=LARGEST)
    """proximal = "learner": upper bound of the weights; 1e9 means none."""
    filter_level: Literal["token", "sequence", "geometric"] | None = None
    """proximal = "learner": do not learn from tokens whose ratio pi_prox / pi_behaviour is outside filter_floor and
    filter_cap. token: the token's ratio; sequence: the product over its response's trained tokens; geometric: their
    geometric mean. Unset: no filter."""
    filter_kind: Literal["mask", "reject"] = "mask"
    """mask: filtered tokens have a weight of 0, and count in the mean of the loss; reject: they leave the step, and
    count nowhere. The critic learns from them either way."""
    filter_floor: float = Field(0.0, ge=0, le=1)
    """Lower bound of the filter's ratio; 0 means none."""
    filter_cap: float = Field(LARGEST, ge=1, le=LARGEST)
    """Upper bound of the filter's ratio; 1e9 means none."""
    max_drift: Positive | None = None
    """Mask tokens with A < 0 in a response whose mean of log(pi_behaviour / pi) is above this, in nats (off-policy
    sequence masking of DeepSeek-V3.2, arXiv 2512.02556). Unset: no masking."""

    @model_validator(mode="after")
    def _check_importance(self) -> Self:
        if self.importance_kind == "mask" and self.importance_floor == self.importance_cap:
            names = ("importance_floor", "importance_cap", "importance_kind")
            problem = "must be below loss.importance_cap, as masks would leave no weight but exactly 1, got 1"
            raise ContradictionError(Violation(names, problem))
        return self

    @model_validator(mode="after")
    def _check_filter(self) -> Self:
        names = ("filter_level", "filter_floor", "filter_cap")
        if self.filter_level is not None and (self.filter_floor, self.filter_cap) == (0, LARGEST):
            usual = "0.99 and 1.01" if self.filter_level == "geometric" else "0.5 and 2"
            problem = f"needs loss.filter_floor and loss.filter_cap, such as {usual}, as it would filter nothing"
            raise ContradictionError(Violation(names, problem))
        if self.filter_floor == self.filter_cap:
            problem = "must be below loss.filter_cap, as the filter would keep no ratio but exactly 1, got 1"
            raise ContradictionError(Violation(("filter_floor", "filter_cap"), problem))
        return self


class RatioLoss(RatioOptions, LossConfig):
    """A loss of the ratio between the policy and an older policy."""

    @property
    def ratio_options(self) -> RatioOptions:
        """This section."""
        return self


class CenteredLoss(RatioLoss):
    """A policy gradient whose factor only the token's ratio decides, so that its score can be centered."""

    center_top_k: int = Field(0, ge=0, le=1024)
    """Score centering (arXiv 2609.20807): take off the mean update of the sampler's tokens, from its center_top_k
    likeliest tokens at each place, which servers return with each token. 0: no centering."""

    @property
    def sampler_top_k(self) -> int:
        """The setting."""
        return self.center_top_k

    def factor(self, ratio: Any, bounds: Any) -> Any:
        """Return the factor of the policy gradient for ratios, a tensor of any shape, between the update's bounds."""
        raise NotImplementedError


class ClippedLoss(RatioLoss):
    """A ratio loss between two clip bounds."""

    clips = True

    dual_clip: float | None = Field(None, gt=1, le=LARGEST)
    """Bound the loss of a negative token at this multiple of its advantage. Unset: no dual clip."""


class BoundedLoss(RatioLoss):
    """A loss between two fixed bounds of a ratio."""

    rule = "bapo_megatron.algorithms.update_rules:FixedBounds"

    clip_low: float = Field(0.8, gt=0, le=1)
    """Lower ratio bound (0.8 is 1 - epsilon for epsilon = 0.2)."""
    clip_high: float = Field(1.2, ge=1, le=LARGEST)
    """Upper ratio bound; above 2 - clip_low it is DAPO's clip-higher, such as 1.28."""


class SelectingLoss(RatioLoss):
    """A loss that selects a share of an update's tokens: those with the largest scores."""

    rule = "bapo_megatron.algorithms.top_share:TopShare"

    share: float
    """Share of the update's trained tokens that is selected, rounded down."""

    def rule_reads(self, bapo: ClipBoundConfig) -> RuleReads:
        """Return "update": the share is of all tokens of the update."""
        return "update"

    def scores(self, tokens: Any, means: Any) -> Any:
        """Return a score for each of the `ScoredTokens`, [R]; -inf or nan keeps a token from being selected.

        Args:
            means: the `UpdateMeans`.
        """
        raise NotImplementedError

    def selected(self, inputs: Any) -> Any:
        """Return the selected tokens of a micro-batch: bool [R], within its mask."""
        return inputs.found.selected(self.scores(inputs, inputs.found.means), inputs.batch)
