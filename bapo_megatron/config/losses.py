"""The losses that `loss.name` may name: the built-in ones, each with its own section, and the user's own.

# my_loss.py, for loss.name = "my_loss:my_loss", or "my_loss:MY_LOSS"
def my_loss(inputs: LossInputs, options: MyOptions) -> MyTokenLoss: ...

CUT = Metric("loss/cut_share", "share", "Tokens that were cut.", tokens="mean", of="cut_R")
MY_LOSS = Loss(my_loss, metrics=(CUT,))
"""

import dataclasses
import importlib
import inspect
import pkgutil
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import AfterValidator, BaseModel, Discriminator, Field, Tag, ValidationError

from bapo_megatron.config.dotted import Seam, imported
from bapo_megatron.config.schema_loss import ClipBoundConfig, LossConfig, RatioOptions, RuleReads
from bapo_megatron.config.wording import expected, shown
from bapo_megatron.errors import UserError, closest, did_you_mean
from bapo_megatron.metrics import MAX_METRIC_CHARS, METRIC_NAME, METRICS, Metric

if TYPE_CHECKING:
    from bapo_megatron.tokens import TokenStream

DEFAULT = "bapo"
CUSTOM = "custom"  # tag of a user's own loss


@dataclass(frozen=True, slots=True)
class StepStream:
    """A stream that the learner computes once in each step, before its first update, such as a teacher's log-probs."""

    stream: "TokenStream"
    """A stream on sampled tokens, with kept=False. The loss reads `inputs.batch.extra[stream]`, [R, *shape]."""
    make: Callable[[Any, Any], Callable[[Any], Sequence[Any]]]
    """Takes `Config` and `Learner`, and returns a function that computes rows; all ranks call both together. That
    function takes a `MiniBatch`, and returns one tensor [R, *shape] for each micro-batch on the last pipeline stage,
    and none on the others."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A user's own loss: a function, and what else belongs to it."""

    function: Callable[..., Any]
    """Takes the `LossInputs` of a micro-batch, and options if it has any, and returns a `TokenLoss`."""
    metrics: tuple[Metric, ...] = ()
    """Means or maxima over tokens of fields in the record that the function returns; without `tokens` and `of`, numbers
    that `rule` reports."""
    rule: Callable[[Any, ClipBoundConfig], Any] | None = None
    """An `UpdateRule`, called with the options and [bapo]; its decision becomes `LossInputs.found`."""
    reads: RuleReads = "update"
    """The tokens that `rule` reads."""
    reads_entropy: bool = False
    """Whether `rule` reads `tokens.entropy_R`, which is otherwise None."""
    streams: tuple[StepStream, ...] = ()
    """Values that the learner computes for each token in a step."""

    def __call__(self, inputs: Any, options: Any) -> Any:
        """Call the function."""
        return self.function(inputs, options)


def _built_in() -> dict[str, type[LossConfig]]:
    """Find the built-in losses by name: classes at dotted paths, as the user's own functions are.

    The files are imported in the order of their names, and their classes follow in the order in which they stand there:
    the classes of clipped.py come first, so help and messages begin with "bapo".
    """
    folder = importlib.import_module("bapo_megatron.algorithms.objectives")
    files = [
        importlib.import_module(f"{folder.__name__}.{file.name}") for file in pkgutil.iter_modules(folder.__path__)
    ]
    sections = [value for file in files for value in vars(file).values() if _is_loss(value)]
    found = {section.model_fields["name"].default: section for section in sections}
    assert len(found) == len(set(sections)), f"two built-in losses have one name: {sections}"
    return found


def _is_loss(value: Any) -> bool:
    is_section = isinstance(value, type) and issubclass(value, LossConfig)
    return is_section and typing.get_origin(value.model_fields["name"].annotation) is Literal


LOSSES = _built_in()
"""The sections of the built-in losses by `loss.name`."""

LOSS = Seam(
    "loss.name",
    tuple(LOSSES),
    "def loss(inputs: LossInputs, options) -> TokenLoss, or Loss(loss, metrics=...)",
    ("inputs", "options"),
    num_needed=1,
    other_names={other: name for name, section in LOSSES.items() for other in section.other_names},
)


@dataclass(frozen=True, slots=True)
class _WithoutOptions:
    """A loss function without options, made callable like the others."""

    function: Callable[[Any], Any]

    @property
    def __wrapped__(self) -> Callable[[Any], Any]:
        return self.function

    def __call__(self, inputs: Any, options: Any) -> Any:
        return self.function(inputs)


class CustomLoss(LossConfig):
    """Your own function, `loss(inputs: LossInputs, options: MyOptions) -> TokenLoss`, or a `Loss` with one. If
    `MyOptions` is a Section or another pydantic model, it checks [loss.options]; otherwise the function gets a dict. A
    function without options has one parameter."""

    clips = True  # it may: the function may return any record

    name: Annotated[str, AfterValidator(LOSS.known)]
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of the function."""
    search_bounds: bool = False
    """Give the function the bounds of [bapo], as inputs.bounds; otherwise these are nan."""

    @property
    def searches_bounds(self) -> bool:  # type: ignore[override]
        """Whether `search_bounds` asks for it."""
        return self.search_bounds

    @property
    def metrics(self) -> tuple[Metric, ...]:  # type: ignore[override]
        """The metrics that its `Loss` declares. Raises UserError: see `own`."""
        return self.own.metrics

    @property
    def streams(self) -> tuple[StepStream, ...]:  # type: ignore[override]
        """The streams that its `Loss` declares. Raises UserError: see `own`."""
        return self.own.streams

    @property
    def reads_entropy(self) -> bool:  # type: ignore[override]
        """Whether its `Loss` says so. Raises UserError: see `own`."""
        return self.own.reads_entropy

    @property
    def rule(self) -> Any:
        """The rule of its `Loss`, the search of [bapo], or None. Raises UserError: see `own`."""
        if self.search_bounds:
            return "bapo_megatron.algorithms.bound_search:ContributionRule"
        return LossConfig.rule if self.own.rule is None else self.own.rule

    @property
    def ratio_options(self) -> RatioOptions | None:
        """The options, if they are `RatioOptions`."""
        return self.function_options if isinstance(self.function_options, RatioOptions) else None

    def rule_reads(self, bapo: ClipBoundConfig) -> RuleReads:
        """Return which tokens the rule reads."""
        if self.search_bounds:
            return bapo.reads
        return "nothing" if self.own.rule is None else self.own.reads

    def tokens(self, inputs: Any) -> Any:
        """Call the function."""
        return self.own(inputs, self.function_options)

    @cached_property
    def own(self) -> Loss:
        """The loss at the dotted path.

        Raises:
            UserError: it cannot be loaded, or does not fit; names the setting, the path and what is expected there.
        """
        found = LOSS.load(self.name)
        own = self._with_options(found if isinstance(found, Loss) else Loss(found))
        if own.rule is not None and self.search_bounds:
            raise LOSS.error(self.name, "it has its own update rule: leave loss.search_bounds out")
        if getattr(own.rule, "masks", False) and own.reads != "update":
            raise LOSS.error(self.name, f'its rule masks tokens, which needs reads="update", not "{own.reads}"')
        if getattr(own.rule, "masks", False) and self.mean_over != "tokens":
            base = imported("bapo_megatron.algorithms.update_rules:UpdateRule")
            if own.rule.num_trained_responses is base.num_trained_responses:  # type: ignore[union-attr]
                needed = f'loss.mean_over="{self.mean_over}" divides by a number of responses'
                raise LOSS.error(self.name, f"its rule masks tokens, and {needed}: define its num_trained_responses")
        if own.reads_entropy and own.reads == "earlier updates":
            raise LOSS.error(self.name, 'entropies of "earlier updates" are not kept: its rule needs reads="update"')
        for metric in own.metrics:
            if problem := _problem(metric, has_rule=own.rule is not None):
                raise LOSS.error(self.name, f"its metric {metric.key:.100} {problem} (docs/extending.md)")
        try:
            for number, one in enumerate(own.streams):
                one.stream.check_computed([other.stream.name for other in own.streams[:number]])
        except ValueError as problem:
            raise LOSS.error(self.name, str(problem)) from problem
        return own

    def _with_options(self, own: Loss) -> Loss:
        """Return the loss with a function of inputs and options. Raises UserError: see `own`."""
        LOSS.check(self.name, own.function)
        if LOSS.takes(self.name, own.function, 2):
            return own
        if self.options:
            raise LOSS.error(self.name, "it has no parameter for loss.options: add one, or leave the options out")
        return dataclasses.replace(own, function=_WithoutOptions(own.function))

    @cached_property
    def function_options(self) -> Any:
        """The options as the type that the function's last parameter names.

        Raises:
            UserError: the loss does not fit (see `own`), or the options do not fit their type.
        """
        function = self.own.function
        try:
            hints = typing.get_type_hints(function if inspect.isroutine(function) else type(function).__call__)
            hint = hints.get(list(inspect.signature(function).parameters)[-1])
        except Exception as error:  # the annotations are the user's
            raise LOSS.error(self.name, f"the annotations of its function cannot be read: {error!r}") from error
        if not (isinstance(hint, type) and issubclass(hint, BaseModel)):
            return self.options
        try:
            return hint.model_validate(self.options)
        except ValidationError as error:
            problems = "; ".join(_option_problem(dict(details), hint) for details in error.errors())
            raise UserError(f'{problems} (options of loss.name="{self.name}")') from error


def _problem(metric: Metric, *, has_rule: bool) -> str:
    """Return what is wrong with a user's own metric; empty if nothing is."""
    if metric.key in METRICS:
        return "is one of the package's: give it another key"
    if not METRIC_NAME.fullmatch(metric.key) or len(metric.key) > MAX_METRIC_CHARS:
        return f'needs a key like "loss/cut_share", of at most {MAX_METRIC_CHARS} letters, digits, "_", "-", ".", "/"'
    of_rule = has_rule and not metric.tokens and not metric.of
    if not of_rule and not (metric.tokens and metric.of):
        return 'needs tokens="mean" or "max", and as `of` a field of the record; or neither, for its update rule'
    form = 'must be "SECTION / FIGURE", of the report or new ones, such as "The update / Clip fraction"'
    return "" if not metric.panel or " / " in metric.panel else f'has panel="{metric.panel}", which {form}'


def _option_problem(error: dict[str, Any], options: type[BaseModel]) -> str:
    """Describe one pydantic error as errors of other settings are described."""
    *tables, last = (str(part) for part in error["loc"]) if error["loc"] else ("",)
    name = ".".join(("loss.options", *tables, last)).rstrip(".")
    if error["type"] == "extra_forbidden":
        meant = [] if tables else closest(last, options.model_fields, 0.65)
        return "; ".join((f"no such setting: {name}", *(did_you_mean(f"loss.options.{one}") for one in meant)))
    if error["type"] == "missing":
        return f"{name} is missing"
    if error["type"] == "value_error":
        return f"{name}: {error['ctx']['error']}"
    return f"{name}{expected(error)}, got {shown(error['input'])}"


def stand_in(loss: LossConfig) -> LossConfig:
    """Return a stand-in for a loss that cannot be loaded: the default loss, with the settings that all losses share."""
    shared = {name: getattr(loss, name) for name in LossConfig.model_fields if name != "name"}
    return LOSSES[DEFAULT].model_construct(**shared)


LOSS_SECTIONS: dict[str, type[LossConfig]] = {**LOSSES, CUSTOM: CustomLoss}
"""Sections by the tag of their loss."""


def losses_with(trait: Callable[[type[LossConfig]], bool]) -> Sequence[str]:
    """Return the names of the built-in losses with a trait."""
    return [name for name, section in LOSSES.items() if trait(section)]


def _section_of(value: Any) -> str:
    """Return the tag of the section that reads a [loss] table, or a section itself."""
    name = value.get("name", DEFAULT) if isinstance(value, dict) else getattr(value, "name", DEFAULT)
    return name if name in LOSSES else CUSTOM


if TYPE_CHECKING:
    AnyLoss = LossConfig
else:
    _TAGGED = tuple(Annotated[section, Tag(tag)] for tag, section in LOSS_SECTIONS.items())
    AnyLoss = Annotated[Union[_TAGGED], Discriminator(_section_of)]  # noqa: UP007
"""The type of [loss]."""
