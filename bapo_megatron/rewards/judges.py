"""Judges by name or dotted path, and the fields of a response that they may ask for.

A judge is a function, plain or `async`, whose parameters name the fields it wants:

    def judge(answer, response): ...          async def judge(prompt, response, **other): ...

It returns a finite number, or a dict of numbers with the names in `reward.weights`, or a tuple of either and a reason
in words. Its module may define a function `sample_response`, whose parameters are out of FIELDS as well; `bapo check`
lets the judge score what it returns.

Judge processes import this file too, so it imports neither torch nor the configuration.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from bapo_megatron.config.dotted import REWARD
from bapo_megatron.errors import UserError
from bapo_megatron.rewards.stated import single

if TYPE_CHECKING:
    from bapo_megatron.config.schema import Config, SourceConfig
    from bapo_megatron.types import Prompt

_MAX_REASON_CHARS = 1000
_MAX_NAMED = 3  # parts that a message names
FIELDS = ("prompt", "answer", "response", "source", "in_thought")
"""Fields that a judge may ask for: the prompt's text, its answer, the response's text without special tokens, the name
of the prompt source, and whether the chat template has opened a thought that the response begins in."""


def fields_of(prompt: Prompt, response: str | None, in_thought: bool = False) -> dict[str, Any]:
    """Return a JSON value for each of FIELDS.

    Args:
        response: None means a sample response, from `sample_response` in the judge's module, or else the answer itself.
    """
    values = (prompt.text, prompt.answer, response, prompt.source, in_thought)
    return dict(zip(FIELDS, values, strict=True))


class Refused:
    """Outcome of judging a program that failed, with the system calls that the sandbox refused."""

    refused_calls: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of judging one response, from the worker to the metrics.

    Example: Verdict(0.0, "timeout", "no verdict in 10 s", waited_s=10.1)
    """

    reward: float
    problem: Literal["timeout", "error"] | None = None
    message: str = ""  # describes the problem; without one, the judge's reason
    waited_s: float = 0.0  # time since the call, including the queue
    traceback: str = ""  # from a judge that raised
    refused_calls: tuple[str, ...] = ()  # system calls that the sandbox refused to a program that failed
    parts: Mapping[str, float] = field(default_factory=dict)  # parts of the reward by name, before weighting
    is_misfit: bool = False  # the judge returned something that is not a reward


@dataclass(frozen=True, slots=True)
class JudgeSpec:
    """Description of a judge in JSON values, sent to judge processes."""

    role: ClassVar[str] = "judge"
    does: ClassVar[str] = "judges responses"
    gives: ClassVar[str] = "verdict"

    kind: str  # a name in config.dotted.REWARD (never "auto") or "package.module:function"; several joined with " + "
    datasets: dict[str, dict[str, Any]]  # for reasoning_gym: dataset, size and options, by name of the prompt source
    seed: int
    timeout_s: float
    process_memory_bytes: int
    allowed_calls: tuple[str, ...]  # system calls that programs may make in addition to the usual ones
    judges: dict[str, str] = field(default_factory=dict)  # kinds of several judges, by the part that each returns
    weights: dict[str, float] = field(default_factory=dict)  # weights of parts by name; empty if judges return a number

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of all judges."""
        return frozenset(self.judges.values() or {self.kind})

    @property
    def is_built_in(self) -> bool:
        """Whether this package provides all judges."""
        return self.kinds <= {*REWARD.names}

    @property
    def keeps_deadline(self) -> bool:
        """Whether the judge enforces the deadline itself."""
        return not OWN_DEADLINE.isdisjoint(self.kinds)

    @classmethod
    def of(cls, config: Config) -> JudgeSpec:
        """Resolve the kind "auto". Raises UserError if a kind cannot judge its source."""
        reward = config.reward
        judges = {part: _kind_for_all(config, kind, f"reward.judges.{part}") for part, kind in reward.judges.items()}
        kind = " + ".join(judges.values()) or _kind_for_all(config, reward.kind, "reward.kind")
        names = [one.name for one in config.data.sources] or [config.data.source]
        return cls(
            kind=kind,
            datasets={
                name: {"dataset": one.dataset, "size": one.size, "options": one.options}
                for name, one in zip(names, config.prompt_sources.values(), strict=True)
                if "reasoning_gym" in (kind, *judges.values())
            },
            seed=config.run.seed,
            timeout_s=reward.timeout_s,
            process_memory_bytes=reward.process_memory_mib << 20,
            allowed_calls=reward.allowed_calls,
            judges=judges,
            weights=dict.fromkeys(judges, 1.0) | reward.weights,
        )


def _kind_for_all(config: Config, kind: str, setting: str) -> str:
    """Return the kind of judge for the prompts of all sources. Raises UserError if they need different kinds."""
    kinds = {table: _kind_for(kind, one, setting) for table, one in config.prompt_sources.items()}
    if len(set(kinds.values())) > 1:
        found = ", ".join(f"{table} to {kind!r}" for table, kind in kinds.items())
        raise UserError(
            f"one judge scores the prompts of all data.sources, and {setting} = {kind!r} leads {found}; set {setting} "
            "to a function of yours, which may go by its parameter `source`"
        )
    return next(iter(kinds.values()))


def _kind_for(kind: str, prompts: SourceConfig, setting: str) -> str:
    """Return the kind of judge for one source's prompts. Raises UserError if `kind` cannot judge them."""
    source = prompts.source
    if kind == "auto" and prompts.has_rows:
        return "code" if prompts.format == "humaneval" else "math"
    if kind == "auto":
        return {"programs": "code"}.get(source, source)
    if kind == "reasoning_gym" and source != "reasoning_gym":
        raise UserError(f"{setting} = 'reasoning_gym' judges prompts of that source only, not of {source!r}")
    if kind in ("chains", "code", "text") and source == "reasoning_gym":
        raise UserError(f"{setting} = {kind!r} cannot judge prompts of data.source = 'reasoning_gym'")
    return kind


@dataclass(frozen=True, slots=True)
class Judge:
    """A judge's function, the names of the fields that it takes, and the weights of the parts that it returns."""

    kind: str  # for messages
    function: Callable[..., Any]
    names: tuple[str, ...]
    is_async: bool
    weights: Mapping[str, float] = field(default_factory=dict)
    sample_response: Judge | None = None

    @classmethod
    def of(cls, function: Any, kind: str, weights: Mapping[str, float] | None = None) -> Judge:
        """Read the function's signature. Raises UserError if it cannot be called with fields as keywords."""
        names, unknown = _asked_for(function, kind)
        if unknown or "response" not in names:
            asked = f"it asks for {', '.join(unknown)}" if unknown else "it does not ask for the response"
            raise REWARD.error(kind, asked)
        is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
        offered = getattr(sys.modules.get(kind.partition(":")[0]), "sample_response", None)
        sample = cls(kind, offered, _asked_for(offered, kind)[0], False) if offered is not None else None
        return cls(kind, function, names, is_async, weights or {}, sample)

    def __call__(self, fields: dict[str, Any]) -> Any:
        if fields["response"] is None:
            sample = self.sample_response
            answer = single(fields["answer"]) if self.kind in ("math", "text") else fields["answer"]
            fields = {**fields, "response": as_response(answer) if sample is None else sample._of(fields)}
        return self._of(fields)

    def _of(self, fields: dict[str, Any]) -> Any:
        return self.function(**{name: fields[name] for name in self.names})

    @property
    def place(self) -> tuple[str, int, str] | None:
        return place_of(self.function)

    def verdict(self, value: Any) -> Verdict:
        """Return the verdict that the function's result states. Raises like `as_verdict`."""
        return as_verdict(value, self.weights)

    def reply(self, value: Any) -> dict[str, Any]:
        """Return the reply that carries the function's result. Raises like `as_verdict`."""
        verdict = self.verdict(value)
        return {"reward": verdict.reward, "parts": verdict.parts, "message": verdict.message}


def _asked_for(function: Any, kind: str) -> tuple[tuple[str, ...], list[str]]:
    """Return the fields that a function asks for, and the other parameters that it requires."""
    parameters = REWARD.signature(kind, function).parameters.values()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    names = FIELDS if takes_all else tuple(p.name for p in parameters if p.kind in by_name and p.name in FIELDS)
    unknown = [
        p.name
        for p in parameters
        if p.default is p.empty and (p.kind is p.POSITIONAL_ONLY or (p.kind in by_name and p.name not in FIELDS))
    ]
    return names, unknown


def as_response(answer: Any) -> str:
    """Return a response that consists of the answer alone."""
    return answer if isinstance(answer, str) else json.dumps(answer)


def place_of(function: Any) -> tuple[str, int, str] | None:
    """Return file, first line and name of a function, or None if it is not written in Python."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return None if code is None else (code.co_filename, code.co_firstlineno, code.co_name)


def build_judge(spec: JudgeSpec) -> Judge:
    """Build one judge out of all that the spec names. Raises UserError if one cannot be built or called."""
    if not spec.judges:
        return Judge.of(_built_in(spec.kind, spec) or REWARD.load(spec.kind), spec.kind, spec.weights)
    judges = {part: Judge.of(_built_in(kind, spec) or REWARD.load(kind), kind) for part, kind in spec.judges.items()}
    sample = next((one.sample_response for one in judges.values() if one.sample_response is not None), None)
    return replace(Judge.of(_all_of(judges), spec.kind, spec.weights), sample_response=sample)


class _Joined(Refused, tuple[dict[str, float], str]):
    """Numbers of several judges by part, their reasons, and the system calls that the sandbox refused."""


def _all_of(judges: Mapping[str, Judge]) -> Callable[..., Any]:
    """Return a function that calls all judges and returns their numbers as parts, with their reasons."""

    def joined(values: Mapping[str, Any]) -> Any:
        verdicts = {part: as_verdict(value, {}) for part, value in values.items()}
        reasons = (f"{part}: {verdict.message}" for part, verdict in verdicts.items() if verdict.message)
        found = _Joined(({part: verdict.reward for part, verdict in verdicts.items()}, "; ".join(reasons)))
        programs = (value for value in values.values() if isinstance(value, Refused))
        found.refused_calls = tuple(name for value in programs for name in value.refused_calls)
        return found

    def judge(**fields: Any) -> Any:
        return joined({part: one(fields) for part, one in judges.items()})

    async def judge_async(**fields: Any) -> Any:
        return joined({part: await one(fields) if one.is_async else one(fields) for part, one in judges.items()})

    return judge_async if any(one.is_async for one in judges.values()) else judge


def as_verdict(value: Any, weights: Mapping[str, float]) -> Verdict:
    """Read what a judge returned.

    Raises:
        TypeError: a judge may not return this type, or not these parts, whose names the response may have chosen.
        ValueError: a number is not finite.
    """
    reason = ""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], str | None):
        value, reason = value[0], value[1] or ""
    reason = reason[:_MAX_REASON_CHARS]
    if not isinstance(value, Mapping):
        if weights:
            raise TypeError(f"a judge returns the parts {_listed(weights)} by name, not {value!r:.80}")
        return Verdict(_finite(value), message=reason)
    if missing := [f"{name!s:.40}" for name in value if name not in weights][:_MAX_NAMED]:
        example = ", ".join(f"{name} = 1.0" for name in [*weights, *missing])
        raise TypeError(
            f"a judge returned {value!r:.80}, with parts that reward.weights does not name: {_listed(missing)}; set "
            f"reward.weights = {{{example}}}, where 0 only records a part"
        )
    if absent := [name for name in weights if name not in value]:
        raise TypeError(f"a judge returns all parts of reward.weights; {_listed(absent)} is missing in {value!r:.80}")
    parts = {str(name): _finite(part) for name, part in value.items()}
    return Verdict(
        _finite(math.fsum(weights[name] * part for name, part in parts.items())), message=reason, parts=parts
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _finite(value: Any) -> float:
    if not hasattr(value, "__float__"):
        raise TypeError(f"a judge returns a number, not {type(value).__name__}: {value!r:.80}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"a judge returns a finite number, not {number}")
    return number


def _built_in(kind: str, spec: JudgeSpec) -> Callable[..., float] | None:
    """Return the function of a built-in judge, or None for another kind. Imports only what this judge needs."""
    match kind:
        case "chains":
            from bapo_megatron.rewards.answers import judge_chain

            return judge_chain
        case "text":
            from bapo_megatron.rewards.answers import judge_text

            return judge_text
        case "math":
            from bapo_megatron.rewards.math import judge_math

            return judge_math
        case "reasoning_gym":
            from bapo_megatron.rewards.reasoning_gym import build_judge_of_all

            return build_judge_of_all(spec.datasets, spec.seed)
        case "code":
            from bapo_megatron.rewards.code import CodeJudge

            return CodeJudge(spec.timeout_s, allowed_calls=spec.allowed_calls).judge
    return None


EXACT = frozenset({"chains", "text"})
"""Judges that return immediately and never raise: they need no process of their own."""
OWN_DEADLINE = frozenset({"code"})
"""Judges that enforce the deadline themselves, as asynchronous ones do."""
