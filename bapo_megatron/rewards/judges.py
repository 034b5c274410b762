"""Judges by name or dotted path, and the fields of a response that they may ask for.

A judge is a function, plain or `async`, whose parameters name the fields it wants; it returns a finite number:

    def judge(answer, response): ...          async def judge(prompt, response, **other): ...

Judge processes import this file too, so it imports neither torch nor the configuration.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from bapo_megatron.config.dotted import REWARD
from bapo_megatron.errors import UserError

if TYPE_CHECKING:
    from bapo_megatron.config.schema import Config, SourceConfig
    from bapo_megatron.types import Prompt

FIELDS = ("prompt", "answer", "response", "source")
"""Fields that a judge may ask for: the prompt's text, its answer, the response's text without special tokens, and the
name of the prompt source."""


def fields_of(prompt: Prompt, response: str) -> dict[str, Any]:
    """Return a JSON value for each of FIELDS."""
    return {"prompt": prompt.text, "answer": prompt.answer, "response": response, "source": prompt.source}


@dataclass(frozen=True, slots=True)
class JudgeSpec:
    """Description of a judge in JSON values, sent to judge processes."""

    role: ClassVar[str] = "judge"
    does: ClassVar[str] = "judges responses"
    gives: ClassVar[str] = "verdict"

    kind: str  # a name in config.dotted.REWARD, but not "auto", or "package.module:function"
    datasets: dict[str, dict[str, Any]]  # reasoning_gym: dataset, size and options, by the name of the prompt source
    seed: int
    timeout_s: float
    process_memory_bytes: int
    code_memory_bytes: int
    allowed_calls: tuple[str, ...]  # system calls that programs may make beside the usual ones

    @property
    def keeps_deadline(self) -> bool:
        """Whether the judge keeps the deadline itself."""
        return self.kind in OWN_DEADLINE

    @classmethod
    def of(cls, config: Config) -> JudgeSpec:
        """Resolve reward.kind = "auto". Raises UserError if kind and sources do not go together."""
        kinds = {table: _kind_for(config, one) for table, one in config.prompt_sources.items()}
        if len(set(kinds.values())) > 1:
            found = ", ".join(f"{table} to {kind!r}" for table, kind in kinds.items())
            raise UserError(
                f"one judge scores the prompts of all data.sources, and reward.kind = {config.reward.kind!r} leads "
                f"{found}; set reward.kind to a function of yours, which may go by its parameter `source`"
            )
        kind, reward = next(iter(kinds.values())), config.reward
        names = [one.name for one in config.data.sources] or [config.data.source]
        return cls(
            kind=kind,
            datasets={
                name: {"dataset": one.dataset, "size": one.size, "options": one.options}
                for name, one in zip(names, config.prompt_sources.values(), strict=True)
                if kind == "reasoning_gym"
            },
            seed=config.run.seed,
            timeout_s=reward.timeout_s,
            process_memory_bytes=reward.process_memory_mib << 20,
            code_memory_bytes=reward.code_memory_mib << 20,
            allowed_calls=reward.allowed_calls,
        )


def _kind_for(config: Config, prompts: SourceConfig) -> str:
    """Return the kind of judge for one source's prompts. Raises UserError if reward.kind cannot judge them."""
    source, kind = prompts.source, config.reward.kind
    if kind == "auto":
        of_file = "code" if prompts.format == "humaneval" else "math"
        return {"jsonl": of_file, "programs": "code"}.get(source, source)
    if kind == "reasoning_gym" and source != "reasoning_gym":
        raise UserError(f"reward.kind = 'reasoning_gym' judges prompts of that source only, not of {source!r}")
    if kind in ("chains", "code") and source == "reasoning_gym":
        raise UserError(f"reward.kind = {kind!r} cannot judge prompts of data.source = 'reasoning_gym'")
    return kind


@dataclass(frozen=True, slots=True)
class Judge:
    """A function and the names of the fields that it takes."""

    function: Callable[..., Any]
    names: tuple[str, ...]
    is_async: bool

    @classmethod
    def of(cls, function: Any, kind: str) -> Judge:
        """Read the function's signature. Raises UserError if it cannot be called with fields by name."""
        parameters = REWARD.signature(kind, function).parameters.values()
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        names = FIELDS if takes_all else tuple(p.name for p in parameters if p.kind in by_name and p.name in FIELDS)
        unknown = [
            p.name
            for p in parameters
            if p.default is p.empty and (p.kind is p.POSITIONAL_ONLY or (p.kind in by_name and p.name not in FIELDS))
        ]
        if unknown or "response" not in names:
            asked = f"it asks for {', '.join(unknown)}" if unknown else "it does not ask for the response"
            raise REWARD.error(kind, asked)
        is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
        return cls(function, names, is_async)

    def __call__(self, fields: dict[str, Any]) -> Any:
        return self.function(**{name: fields[name] for name in self.names})

    @property
    def place(self) -> tuple[str, int, str] | None:
        return place_of(self.function)

    def reply(self, value: Any) -> dict[str, Any]:
        """Return the reply to what it returned. Raises TypeError or ValueError."""
        return {"reward": as_reward(value)}


def place_of(function: Any) -> tuple[str, int, str] | None:
    """Return file, first line and name of a function; None for one that is not written in Python."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return None if code is None else (code.co_filename, code.co_firstlineno, code.co_name)


def build_judge(spec: JudgeSpec) -> Judge:
    """Build the judge. Raises UserError if it cannot be built or has the wrong signature."""
    return Judge.of(_built_in(spec) or REWARD.load(spec.kind), spec.kind)


def as_reward(value: Any) -> float:
    """Convert a judge's result to a finite float. Raises TypeError or ValueError."""
    if not hasattr(value, "__float__"):
        raise TypeError(f"a judge returns a number, not {type(value).__name__}: {value!r:.80}")
    reward = float(value)
    if not math.isfinite(reward):
        raise ValueError(f"a judge returns a finite number, not {reward}")
    return reward


def _built_in(spec: JudgeSpec) -> Callable[..., float] | None:
    """Return the function of a judge of this package, importing what this judge needs only; None for another kind."""
    match spec.kind:
        case "chains":
            from bapo_megatron.rewards.answers import judge_chain

            return judge_chain
        case "math":
            from bapo_megatron.rewards.math import judge_math

            return judge_math
        case "reasoning_gym":
            from bapo_megatron.rewards.reasoning_gym import build_judge_of_all

            return build_judge_of_all(spec.datasets, spec.seed)
        case "code":
            from bapo_megatron.rewards.code import CodeJudge

            return CodeJudge(spec.timeout_s, spec.code_memory_bytes, spec.allowed_calls).judge
    return None


EXACT = frozenset({"chains"})
"""Judges that end at once and never raise: they need no process of their own."""
OWN_DEADLINE = frozenset({"code"})
"""Judges that keep the deadline themselves, as asynchronous ones do."""
