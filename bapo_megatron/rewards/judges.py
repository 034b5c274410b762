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
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bapo_megatron.config.dotted import REWARD
from bapo_megatron.rewards.stated import single
from bapo_megatron.rewards.verdicts import FIELDS, JudgeSpec, Refused, as_reply


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

    def reply(self, value: Any) -> dict[str, Any]:
        """Return the reply that carries the function's result. Raises like `as_reply`."""
        return as_reply(value, self.weights)


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
        replies = {part: as_reply(value, {}) for part, value in values.items()}
        reasons = (f"{part}: {reply['message']}" for part, reply in replies.items() if reply["message"])
        found = _Joined(({part: reply["reward"] for part, reply in replies.items()}, "; ".join(reasons)))
        programs = (value for value in values.values() if isinstance(value, Refused))
        found.refused_calls = tuple(name for value in programs for name in value.refused_calls)
        return found

    def judge(**fields: Any) -> Any:
        return joined({part: one(fields) for part, one in judges.items()})

    async def judge_async(**fields: Any) -> Any:
        return joined({part: await one(fields) if one.is_async else one(fields) for part, one in judges.items()})

    return judge_async if any(one.is_async for one in judges.values()) else judge


def no_reward(response: str) -> float:
    """Return 0 for every response (`reward.kind = "none"`)."""
    return 0.0


def _built_in(kind: str, spec: JudgeSpec) -> Callable[..., float] | None:
    """Return the function of a built-in judge, or None for another kind. Imports only what this judge needs."""
    match kind:
        case "none":
            return no_reward
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
