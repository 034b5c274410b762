"""The settings of the policy loss, [loss], and of the search for its clip bounds, [bapo]."""

from __future__ import annotations

import math
from typing import Any, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from bapo_megatron.config.base import Section

_DIGITS = 10  # grid points are rounded to this many decimals, so that 0.6 + 15 * 0.02 is the 0.9 that the user wrote


class BoundRange(Section):
    """Where a bound starts, how far it may go, and its step; also accepted as a list [start, stop, step]."""

    start: PositiveFloat
    """Ratio bound before the search."""
    stop: PositiveFloat
    """Largest value; a last step that would pass it is not taken."""
    step: PositiveFloat
    """Distance between two candidates."""

    @model_validator(mode="before")
    @classmethod
    def _from_list(cls, value: Any) -> Any:
        if isinstance(value, list | tuple) and len(value) == 3:
            return dict(zip(("start", "stop", "step"), value, strict=True))
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.start > self.stop:
            raise ValueError(f"start ({self.start:g}) must not be above stop ({self.stop:g})")
        return self

    @property
    def points(self) -> list[float]:
        """Every value the bound can take, ascending. Integer steps: adding 0.02 up 15 times ends one step short."""
        num_steps = math.floor((self.stop - self.start) / self.step + 1e-9)
        return [round(self.start + k * self.step, _DIGITS) for k in range(num_steps + 1)]


PRESETS: dict[str, dict[str, Any]] = {
    "default": {
        "rho0": 0.5,
        "low": {"start": 0.6, "stop": 0.9, "step": 0.02},
        "high": {"start": 1.2, "stop": 3.0, "step": 0.05},
        "contribution": "gradient",
        "token_weight": "uniform",
        "order": "high_first",
    },
    "paper": {
        "rho0": 0.4,
        "low": {"start": 0.6, "stop": 0.9, "step": 0.02},
        "high": {"start": 1.2, "stop": 3.0, "step": 0.05},
        "contribution": "surrogate",
        "token_weight": "rollout_prob",
        "order": "high_first",
    },
    "official": {
        "rho0": 1.0,
        "low": {"start": 0.6, "stop": 0.8, "step": 0.05},
        "high": {"start": 1.2, "stop": 2.0, "step": 0.05},
        "contribution": "official",
        "token_weight": "uniform",
        "order": "low_first",
    },
}
"""Base values of [bapo], which explicitly set keys override. docs/bapo.md says what speaks for each."""

_DEFAULT = PRESETS["default"]


class ClipBoundConfig(Section):
    """The search for BAPO's clip bounds. `preset` chooses the base values; keys set beside it win."""

    preset: Literal["default", "paper", "official"] = "default"
    """default: gradient share, target 0.5; paper: the paper's values; official: the authors' recipe on verl."""
    rho0: PositiveFloat = _DEFAULT["rho0"]
    """Target of rho. A share in (0, 1) for gradient and surrogate; net and official are ratios that may exceed 1
    (a share s is the ratio s / (1 - s) of official)."""
    low: BoundRange = BoundRange(**_DEFAULT["low"])
    """Lower ratio bound, at most 1."""
    high: BoundRange = BoundRange(**_DEFAULT["high"])
    """Upper ratio bound, at least 1."""
    contribution: Literal["gradient", "surrogate", "net", "official"] = _DEFAULT["contribution"]
    """What counts as contribution: gradient: P/(P+N) of tokens that still carry gradient; surrogate: P/(P+N) of the
    clipped objective's terms; net: P/|P-N| (Eq. 8 to the letter); official: P/N."""
    token_weight: Literal["uniform", "rollout_prob"] = _DEFAULT["token_weight"]
    """Weight of a token in P and N: 1, or its probability under the policy that sampled it."""
    order: Literal["high_first", "low_first"] = _DEFAULT["order"]
    """Which bound goes to its end before the other one moves."""
    scope: Literal["exact", "lagged", "microbatch", "fixed"] = "exact"
    """exact: search with the optimizer step's own tokens; lagged: with the previous step's (saves a forward pass);
    microbatch: each micro-batch with its own (the authors' way; the result depends on how the step is split); fixed: no
    search, bounds stay at their start."""

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        base = PRESETS.get(str(value.get("preset", "default")), PRESETS["default"])
        merged = {**base, **value}
        for name in ("low", "high"):  # a range may be overridden key by key
            if isinstance(merged[name], dict):
                merged[name] = {**base[name], **merged[name]}
        return merged

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = []
        if self.low.stop > 1:
            problems.append(f"low.stop ({self.low.stop:g}) must be at most 1: it bounds the ratio from below")
        if self.high.start < 1:
            problems.append(f"high.start ({self.high.start:g}) must be at least 1: it bounds the ratio from above")
        if self.contribution in ("gradient", "surrogate") and self.rho0 >= 1:
            problems.append(
                f"rho0 ({self.rho0:g}) must be below 1: contribution = {self.contribution!r} compares it with a share"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self


class LossConfig(Section):
    """The policy loss."""

    name: Literal["bapo", "grpo", "clip_higher", "sft"] = "bapo"
    """bapo: bounds found by the search of [bapo]; grpo: fixed bounds; clip_higher: fixed with a wider upper bound;
    sft: maximum likelihood of all trained tokens, without advantages, such as a warm start from recorded responses."""
    clip_low: float = Field(0.8, gt=0, le=1)
    """grpo, clip_higher: lower ratio bound (0.8 is 1 - epsilon for epsilon = 0.2)."""
    clip_high: float = Field(1.2, ge=1)
    """grpo: upper ratio bound."""
    clip_higher: float = Field(1.28, ge=1)
    """clip_higher: upper ratio bound."""
    dual_clip: float | None = Field(None, gt=1)
    """Bounds the loss of a negative token at this multiple of its advantage; unset: no dual clip."""
    proximal: Literal["behaviour", "learner"] = "behaviour"
    """Denominator of the ratio that is clipped. behaviour: the policy that sampled the token (the paper's r_t);
    learner: the learner at the start of the step (one more scoring pass), with truncated importance weights."""
    importance_cap: float = Field(2.0, ge=1)
    """proximal = "learner": largest weight pi_prox / pi_behaviour of a token's term; 1e9 is no bound."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of KL(policy || reference) per trained token in the loss; with kl_target, where it starts. Above 0, the
    learner holds the reference's weights too, and scores each rollout batch with them once. 0: no reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """With d = log policy - log reference. k1: d (its gradient is 0 on average); k2: d^2 / 2; k3: e^-d - 1 + d, as in
    GRPO."""
    kl_target: PositiveFloat | None = None
    """Steer kl_coef so that the KL per token stays near this, in nats (Ziegler et al.). Unset: kl_coef is constant."""
    kl_horizon: float = Field(10.0, ge=1)
    """kl_target: an update changes the coefficient by at most a share of 0.2 / kl_horizon."""
    reference_path: str | None = None
    """Hugging Face folder of the reference policy, with the policy's vocabulary. Unset: model.path."""
