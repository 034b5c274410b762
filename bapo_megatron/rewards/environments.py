"""Environments: a user's function, run in worker processes, that answers the turns of the policy.

    def step(turn, state, **options): ...          async def step(turn, state, **options): ...

The function gets the new turn (a `TurnJson`), the state that its last answer returned (None at first), both as JSON,
and environment.options by name. It must keep nothing else: after a lost process or a killed run, it is asked again with
the same turn and state. It returns one of

    {"text": "1702;", "state": {...}}     the sample continues after this; or "token_ids": [...], or
                                          "messages": [{"role": "tool", "content": "1702"}] in the chat template
    {"reward": 1.0}                       the sample ends; a reward next to a text counts for this turn
    {"failed": "the browser crashed"}     no reward: the sample is dropped, so the policy must not have caused that

A reward is a number, or a dict of numbers, which are summed. Tools (tools.py) return {"judge": True} instead of one:
the judge of [reward] scores the words of the turn. Worker processes import this file too, so it imports neither torch
nor the configuration.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from typing_extensions import TypedDict

from bapo_megatron.config.dotted import ENVIRONMENT
from bapo_megatron.errors import in_one_line
from bapo_megatron.prompts.json_values import json_problem
from bapo_megatron.prompts.tools import ToolOptions
from bapo_megatron.rewards.judges import place_of
from bapo_megatron.rewards.replay import Replay, misfit_of, opened
from bapo_megatron.rewards.steps import calculator, guess

if TYPE_CHECKING:
    from bapo_megatron.config.schema import Config

BUILT_IN: dict[str, Callable[..., Any]] = {"calculator": calculator, "guess": guess}
MAX_ANSWER_BYTES = 1_000_000  # of JSON
_WORDS = {
    "text": "a string",
    "token_ids": "a list of integers",
    "messages": 'a list of messages, each with "role", a name, and "content", a string',
}
_KEYS = (*_WORDS, "state", "reward", "failed")


class TurnJson(TypedDict):
    """A turn of the policy, as its environment gets it."""

    prompt: str
    answer: Any  # the prompt's answer
    source: str  # the prompt's source
    number: int  # counted from 1
    text: str  # the policy's words in this turn, without special tokens
    token_ids: list[int]
    end: Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Continue:
    """Words after which the policy continues: text, tokens or messages."""

    state: Any
    text: str | None = None
    token_ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None  # each with "role" and "content", both strings
    reward: float | Mapping[str, float] | None = None  # this turn's reward


@dataclass(frozen=True, slots=True)
class End:
    """The end of a sample."""

    reward: float | Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Failed:
    """A failure, which costs its sample the rest of its rewards; `Answers.failed` says when it drops the sample."""

    reason: str
    problem: Literal["timeout", "error"] = "error"
    is_said: bool = False  # by the environment itself; otherwise the policy's words may be the cause


@dataclass(frozen=True, slots=True)
class ForJudge:
    """The end of a sample: the judge of [reward] scores the words of its last turn."""


StepAnswer = Continue | End | Failed | ForJudge


class Environment(Protocol):
    """Source of answers to the turns of all samples."""

    @property
    def deadline_s(self) -> float:
        """The longest that a step may take, in seconds."""
        ...

    async def step(self, turn: TurnJson, state: Any) -> StepAnswer:
        """Answer a turn. May be called again with the same turn and state."""
        ...

    def close(self) -> None:
        """End its processes, if any. Safe to call twice."""
        ...


def as_answer(value: Any) -> StepAnswer:
    """Check and read what a step function, or an agent program, returned. Raises TypeError or ValueError."""
    _check_json(value)
    return read_answer(value)


def _check_json(value: Any) -> None:
    """Raise TypeError or ValueError if the value is not JSON with the keys of an answer, or too long."""
    keys = set(value) if isinstance(value, Mapping) else {None}
    if keys == {"judge"} and value["judge"] is True:
        return
    words = [name for name in _WORDS if name in keys]
    if not keys <= {*_KEYS} or len(words) + ("failed" in keys) > 1 or not (words or keys & {"reward", "failed"}):
        raise TypeError(
            "a step returns a dict with text, token_ids or messages, or with a reward at the end, or with failed, not "
            f"{type(value).__name__}: {value!r:.200}"
        )
    if problem := json_problem(value):
        raise TypeError(f"a step returns JSON; it {problem}: {value!r:.200}")
    if (size := len(json.dumps(value, ensure_ascii=False).encode())) > MAX_ANSWER_BYTES:
        raise ValueError(f"a step returns at most {MAX_ANSWER_BYTES} bytes of JSON, not {size}")


def read_answer(value: Mapping[str, Any]) -> StepAnswer:
    """Return the answer that JSON states, whose keys and size are right: a worker has checked them.

    Values are read here, on both sides: text of a model may run in a worker. Raises TypeError for a wrong one.
    """
    if "judge" in value:
        return ForJudge()
    reward = _reward(value["reward"]) if value.get("reward") is not None else None
    if "failed" in value:
        return Failed(str(value["failed"]), is_said=True)
    for name, expected in _WORDS.items():
        if name in value:
            if not _is_word(name, value[name]):
                raise TypeError(f"a step returns {name} as {expected}, not {value[name]!r:.200}")
            return Continue(value.get("state"), reward=reward, **{name: value[name]})
    if reward is None:
        raise TypeError(f"a step ends a sample with a reward, not {value!r:.200}")
    return End(reward)


def _is_word(name: str, given: Any) -> bool:
    if name == "text":
        return isinstance(given, str)
    if not isinstance(given, list | tuple):
        return False
    if name == "token_ids":
        return all(type(one) is int for one in given)
    return bool(given) and all(map(_is_message, given))


def _is_message(given: Any) -> bool:
    if not isinstance(given, Mapping):
        return False
    role, content = given.get("role"), given.get("content")
    return isinstance(role, str) and role.isidentifier() and isinstance(content, str)


def _reward(value: Any) -> float | dict[str, float]:
    if isinstance(value, Mapping) and value:
        parts = {str(name): _number(part) for name, part in value.items()}
        _number(sum(parts.values()))  # finite parts may have an infinite sum
        return parts
    return _number(value)


def _number(value: Any) -> float:
    if not isinstance(value, bool | str) and hasattr(value, "__float__"):
        with contextlib.suppress(OverflowError):  # an integer beyond the range of float64
            if math.isfinite(number := float(value)):
                return number
    raise TypeError(f"a reward is a finite number, or finite numbers by name, not {value!r:.80}")


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """Description of an environment in JSON values, sent to worker processes."""

    role: ClassVar[str] = "environment"
    does: ClassVar[str] = "answers turns"
    gives: ClassVar[str] = "answer"
    keeps_deadline: ClassVar[bool] = False

    kind: str  # a key of BUILT_IN, "tools", "package.module:function", or "replay:package.module:function"
    timeout_s: float
    process_memory_bytes: int
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Config) -> EnvironmentSpec:
        one, memory = config.environment, config.reward.process_memory_mib << 20
        return cls(one.kind, one.timeout_s, memory, one.options)


@dataclass(frozen=True, slots=True)
class StepFunction:
    """A step function, as a worker process calls it."""

    function: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    @property
    def place(self) -> tuple[str, int, str] | None:
        return place_of(self.function)

    def __call__(self, fields: dict[str, Any]) -> Any:
        return self.function(fields["turn"], fields["state"], **self.options)

    def reply(self, value: Any) -> dict[str, Any]:
        """Return the reply that carries what the function returned. Raises TypeError or ValueError."""
        as_answer(value)
        return {"answer": value}


def build_environment(spec: EnvironmentSpec) -> StepFunction:
    """Build the environment. Raises UserError if it cannot be built, or does not take what it is given."""
    if spec.kind == "tools":
        from bapo_megatron.rewards.tools import Toolbox

        return StepFunction(Toolbox(ToolOptions.of(spec.options), spec.timeout_s).step)
    function = BUILT_IN.get(spec.kind) or ENVIRONMENT.load(spec.kind)
    signature, is_replayed = ENVIRONMENT.signature(spec.kind, function), ENVIRONMENT.is_prefixed(spec.kind)
    try:
        signature.bind(*(() if is_replayed else ("turn", "state")), **spec.options)
    except TypeError as error:
        asked = "environment.options" if is_replayed else "turn, state and environment.options"
        problem = f"its signature is {signature}, which does not fit {asked}: {error}"
        raise ENVIRONMENT.error(spec.kind, problem) from None
    return StepFunction(_replayed(function, spec) if is_replayed else function, spec.options)


def _replayed(make: Callable[..., Any], spec: EnvironmentSpec) -> Replay:
    try:
        with opened(make(**spec.options)) as game:
            problem = misfit_of(game)
    except (Exception, SystemExit) as error:  # a user's function may fail in any way
        raise ENVIRONMENT.error(spec.kind, f"making an object failed: {in_one_line(error)}") from error
    if problem is not None:
        raise ENVIRONMENT.error(spec.kind, problem)
    return Replay(make)
