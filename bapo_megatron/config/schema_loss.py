"""The settings of the policy loss, [loss], and of the search for its clip bounds, [bapo]."""

import inspect
import math
import sys
from collections.abc import Callable
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

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
from bapo_megatron.config.dotted import LOSS
from bapo_megatron.errors import UserError

MAX_STEPS = 1000  # of the search for one bound: the learner sums over tokens for each of them
_DIGITS = 10  # grid points are rounded to this many decimals, so that 0.6 + 15 * 0.02 is the 0.9 that the user wrote


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
        """Every value the bound can take, ascending. Integer steps: adding 0.02 up 15 times ends one step short."""
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
}
"""Base values of [bapo], which explicitly set keys override. docs/bapo.md says what speaks for each."""


class ClipBoundConfig(Section):
    """The search for BAPO's clip bounds. `preset` chooses the base values; keys set beside it win."""

    preset: Literal["default", "paper", "official"] = "default"
    """default: gradient share, target 0.5; paper: the paper's values; official: the authors' recipe on verl."""
    rho0: Positive = _DEFAULT["rho0"]
    """Target of rho. A share in (0, 1) for gradient and surrogate; net and official are ratios that may exceed 1
    (a share s is the ratio s / (1 - s) of official)."""
    low: BoundRange = BoundRange(**_DEFAULT["low"])
    """Lower ratio bound, at most 1."""
    high: BoundRange = BoundRange(**_DEFAULT["high"])
    """Upper ratio bound, at least 1."""
    contribution: Literal["gradient", "surrogate", "net", "official"] = _DEFAULT["contribution"]
    """Measure of contribution. gradient: P/(P+N) of tokens that still carry gradient; surrogate: P/(P+N) of the
    clipped objective's terms; net: P/|P-N| (Eq. 8 to the letter); official: P/N."""
    token_weight: Literal["uniform", "rollout_prob"] = _DEFAULT["token_weight"]
    """Weight of a token in P and N: 1, or its probability under the policy that sampled it."""
    order: Literal["high_first", "low_first"] = _DEFAULT["order"]
    """The bound that moves to its end first."""
    scope: Literal["exact", "lagged", "smoothed", "microbatch", "fixed"] = "exact"
    """exact: search with the optimizer step's own tokens; lagged: with the previous step's (saves a forward pass);
    smoothed: with an average over several previous steps; microbatch: each micro-batch with its own (the authors' way;
    the result depends on how the step is split); fixed: no search, bounds stay at their start."""
    smoothing_updates: Count = 8
    """scope = "smoothed": length of the average in optimizer steps. A step's share of it shrinks by
    1 / smoothing_updates with every further step; 1 is lagged."""

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
        """Whether the bounds of an update come from the tokens of earlier ones."""
        return self.scope in ("lagged", "smoothed")


class LossConfig(Section):
    """The policy loss, chosen by `name`; each loss has settings of its own."""

    name: str = "bapo"
    """bapo: bounds found by the search of [bapo]; grpo: fixed bounds; gspo, gmpo, cispo, sapo, m2po: docs/rivals.md;
    sft: maximum likelihood of all trained tokens, without advantages, such as a warm start; or a function of your own,
    "my_package.my_module:my_loss"."""
    kl_coef: NonNegative = 0.0
    """Weight of KL(policy || reference) per trained token in the loss; with kl_target, its initial value. Above 0, the
    learner also holds the reference's weights, and scores each rollout batch with them once. 0: no reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """With d = log policy - log reference. k1: d (its gradient is 0 on average); k2: d^2 / 2; k3: e^-d - 1 + d, as in
    GRPO."""
    kl_target: Positive | None = None
    """Steer kl_coef so that the KL per token stays near this, in nats (Ziegler et al.). Unset: kl_coef is constant."""
    kl_horizon: float = Field(10.0, ge=1, le=LARGEST)
    """kl_target: an update changes the coefficient by at most a share of 0.2 / kl_horizon."""
    reference_path: PathText | None = None
    """Hugging Face folder of the reference policy, with the policy's vocabulary. Unset: model.path."""

    @property
    def bounds(self) -> Literal["bapo", "second_moment", "fixed", "none"]:
        """Source of the clip bounds: the search of [bapo], the limit of M2PO, this section, or none."""
        return "none"

    @property
    def scores_proximal(self) -> bool:
        """Whether the learner scores each batch at the start of a step, for the denominator of the clipped ratio."""
        return False


class RatioLoss(LossConfig):
    """A loss of the ratio between the policy and an older one."""

    proximal: Literal["behaviour", "learner"] = "behaviour"
    """Denominator of the clipped ratio. behaviour: the policy that sampled the token (the paper's r_t); learner: the
    learner at the start of the step (one more scoring pass), with importance weights pi_prox / pi_behaviour."""
    importance_level: Literal["token", "sequence"] = "token"
    """proximal = "learner": weight of a token's term. token: that of the token; sequence: the product of the weights of
    its response's trained tokens."""
    importance_kind: Literal["truncate", "mask"] = "truncate"
    """proximal = "learner": treatment of a weight outside importance_floor and importance_cap. truncate: it becomes the
    nearer of them; mask: it becomes 0, so that the token, or the response, has no gradient."""
    importance_floor: float = Field(0.0, ge=0, le=1)
    """proximal = "learner": lower bound of the weights; 0 sets none."""
    importance_cap: float = Field(2.0, ge=1, le=LARGEST)
    """proximal = "learner": upper bound of the weights; 1e9 sets none."""
    max_drift: Positive | None = None
    """Mask tokens with A < 0 of a response whose mean of log(pi_behaviour / pi) is above this, in nats (off-policy
    sequence masking of DeepSeek-V3.2, arXiv 2512.02556). Unset: none."""

    @model_validator(mode="after")
    def _check_importance(self) -> Self:
        if self.importance_kind == "mask" and self.importance_floor == self.importance_cap:
            names = ("importance_floor", "importance_cap", "importance_kind")
            problem = "must be below loss.importance_cap, as masks would leave no weight but exactly 1, got 1"
            raise ContradictionError(Violation(names, problem))
        return self

    @property
    def scores_proximal(self) -> bool:
        """Whether the ratio's denominator is the learner at the start of the step."""
        return self.proximal == "learner"


class ClippedLoss(RatioLoss):
    """A ratio loss between two clip bounds."""

    dual_clip: float | None = Field(None, gt=1, le=LARGEST)
    """Bound the loss of a negative token at this multiple of its advantage. Unset: no dual clip."""


class BapoLoss(ClippedLoss):
    """Clip bounds found by the search of [bapo]."""

    name: Literal["bapo"] = "bapo"

    @property
    def bounds(self) -> Literal["bapo"]:
        """Always the search."""
        return "bapo"


class BoundedLoss(RatioLoss):
    """A loss between two fixed bounds of a ratio."""

    clip_low: float = Field(0.8, gt=0, le=1)
    """Lower ratio bound (0.8 is 1 - epsilon for epsilon = 0.2)."""
    clip_high: float = Field(1.2, ge=1, le=LARGEST)
    """Upper ratio bound; above 2 - clip_low it is DAPO's clip-higher, such as 1.28."""

    @property
    def bounds(self) -> Literal["fixed"]:
        """Always `clip_low` and `clip_high`."""
        return "fixed"


class GrpoLoss(ClippedLoss, BoundedLoss):
    """Fixed clip bounds."""

    name: Literal["grpo"] = "grpo"


class GspoLoss(BoundedLoss):
    """Fixed clip bounds of a response's ratio, the geometric mean of its tokens' (GSPO, arXiv 2507.18071)."""

    name: Literal["gspo"] = "gspo"
    clip_low: float = Field(1 - 3e-4, gt=0, le=1)
    """Lower bound of a response's ratio: a mean over its tokens, so that it stays near 1; default as in the paper."""
    clip_high: float = Field(1 + 4e-4, ge=1, le=LARGEST)
    """Upper bound of a response's ratio; default as in the paper."""


class GmpoLoss(BoundedLoss):
    """Geometric mean of a response's ratios, each between the bounds (GMPO, arXiv 2507.20673)."""

    name: Literal["gmpo"] = "gmpo"
    clip_low: float = Field(math.exp(-0.4), gt=0, le=1)
    """Lower bound of a token's ratio; default e^-0.4, as in the paper."""
    clip_high: float = Field(math.exp(0.4), ge=1, le=LARGEST)
    """Upper bound of a token's ratio; default e^0.4, as in the paper."""


class CispoLoss(BoundedLoss):
    """REINFORCE weighted with the ratio between the bounds, a constant (CISPO, arXiv 2506.13585)."""

    name: Literal["cispo"] = "cispo"
    clip_low: float = Field(0.0, ge=0, le=1)
    """Smallest weight of a token; 0 sets no bound, as in the paper."""
    clip_high: float = Field(5.0, ge=1, le=LARGEST)
    """Largest weight of a token; the paper gives no number."""


class SapoLoss(RatioLoss):
    """A soft gate of the ratio in place of bounds (SAPO, arXiv 2511.20347)."""

    name: Literal["sapo"] = "sapo"
    temperature_positive: float = Field(1.0, gt=0, le=LARGEST)
    """Steepness of the gate for tokens with a positive advantage; the default is the paper's."""
    temperature_negative: float = Field(1.05, gt=0, le=LARGEST)
    """Steepness of the gate for all other tokens. Above `temperature_positive`, their gradient fades sooner."""


class M2poLoss(RatioLoss):
    """No clip bounds, but a limit on the second moment of the log-ratios (M2PO, arXiv 2510.01161)."""

    name: Literal["m2po"] = "m2po"
    max_second_moment: float = Field(0.04, gt=0, le=LARGEST)
    """Largest mean of (log r)^2, in nats squared, over those tokens of an update that it moves further away (A > 0 and
    r > 1, or A < 0 and r < 1). The tokens with the largest are masked until it is met. The default is the paper's."""

    @property
    def bounds(self) -> Literal["second_moment"]:
        """Always those that meet `max_second_moment`."""
        return "second_moment"


class SftLoss(LossConfig):
    """Maximum likelihood."""

    name: Literal["sft"] = "sft"


class CustomLoss(RatioLoss):
    """A function of your own, `loss(inputs: LossInputs, options: MyOptions) -> TokenLoss`. Where `MyOptions` is a
    Section or another pydantic model, it checks [loss.options]; else the function gets them as a dict."""

    name: Annotated[str, AfterValidator(LOSS.known)]
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of the function itself."""
    search_bounds: bool = False
    """Give the function the bounds of [bapo], as inputs.bounds; else those are nan."""

    @property
    def bounds(self) -> Literal["bapo", "none"]:
        """The search where `search_bounds` asks for it."""
        return "bapo" if self.search_bounds else "none"

    @cached_property
    def function(self) -> Callable[[Any], Any]:
        """The function with its options, from inputs to a result.

        Raises:
            UserError: it cannot be loaded, or the options do not fit their type.
        """
        function = LOSS.load(self.name)
        hint = list(inspect.signature(function).parameters.values())[-1].annotation
        options: Any = self.options
        try:
            if isinstance(hint, str):
                hint = eval(hint, vars(inspect.getmodule(function) or sys.modules[self.name.partition(":")[0]]))
            if isinstance(hint, type) and issubclass(hint, BaseModel):
                options = hint.model_validate(options)
        except ValidationError as error:
            problems = [(".".join(map(str, ("loss.options", *e["loc"]))), e["msg"], e["input"]) for e in error.errors()]
            wrong = "; ".join(f"{name}: {problem}, got {value!r}" for name, problem, value in problems)
            raise UserError(f'{wrong} (options of loss.name="{self.name}")') from error
        except Exception as error:  # the annotation is the user's
            raise LOSS.error(self.name, f"the annotation {hint} of its options cannot be read: {error!r}") from error
        return lambda inputs: function(inputs, options)


LOSS_SECTIONS: dict[str, type[LossConfig]] = {
    "bapo": BapoLoss,
    "grpo": GrpoLoss,
    "gspo": GspoLoss,
    "gmpo": GmpoLoss,
    "cispo": CispoLoss,
    "sapo": SapoLoss,
    "m2po": M2poLoss,
    "sft": SftLoss,
    "custom": CustomLoss,
}
"""Sections by the tag of their loss."""


def _section_of(value: Any) -> str:
    """Return the tag of the section that reads a [loss] table, or a section itself."""
    name = value.get("name", "bapo") if isinstance(value, dict) else getattr(value, "name", "bapo")
    return name if name in LOSS.names else "custom"


AnyLoss = Annotated[
    Annotated[BapoLoss, Tag("bapo")]
    | Annotated[GrpoLoss, Tag("grpo")]
    | Annotated[GspoLoss, Tag("gspo")]
    | Annotated[GmpoLoss, Tag("gmpo")]
    | Annotated[CispoLoss, Tag("cispo")]
    | Annotated[SapoLoss, Tag("sapo")]
    | Annotated[M2poLoss, Tag("m2po")]
    | Annotated[SftLoss, Tag("sft")]
    | Annotated[CustomLoss, Tag("custom")],
    Discriminator(_section_of),
]
"""The type of [loss]."""
