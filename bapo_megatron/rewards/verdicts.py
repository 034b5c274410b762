"""What a judge is asked and what it says: the fields of a response, the description of a judge, and its verdict.

Judge processes import this file, and the judges of programs do, so it imports neither torch nor any judge.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from bapo_megatron.config.dotted import REWARD
from bapo_megatron.errors import UserError

if TYPE_CHECKING:
    from bapo_megatron.config.schema import Config, SourceConfig
    from bapo_megatron.types import Ended, Prompt

_MAX_REASON_CHARS = 1000
_MAX_NAMED = 3  # parts that a message names
EXACT = frozenset({"chains", "text", "none"})
"""Judges that return immediately and never raise: they need no process of their own."""
OWN_DEADLINE = frozenset({"code"})
"""Judges that enforce the deadline themselves, as asynchronous ones do."""
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
    """The end that a judge gives a sample, and how judging it went.

    Example: Verdict(Ended(reward=0.0, problem="timeout", message="no verdict in 10 s"), waited_s=10.1)
    """

    end: Ended  # without the reason, which its driver knows
    waited_s: float = 0.0  # time since the call, including the queue
    traceback: str = ""  # from a judge that raised
    refused_calls: tuple[str, ...] = ()  # system calls that the sandbox refused to a program that failed
    is_misfit: bool = False  # the judge returned something that is not a reward

    @classmethod
    def of(cls, reply: Mapping[str, Any], waited_s: float = 0.0) -> Verdict:
        """Return the verdict that a judge's reply states (rewards/worker.py)."""
        from bapo_megatron.types import Ended  # judge processes import this file, but not torch

        refused = tuple(reply.get("refused_calls", ()))
        said = [reply.get("message", ""), f"the sandbox refused the program {', '.join(refused)}" if refused else ""]
        end = Ended(
            reward=reply.get("reward", 0.0),
            problem=reply.get("problem"),
            message="; ".join(filter(None, said)),
            parts=reply.get("parts", {}),
        )
        return cls(
            end,
            waited_s=waited_s,
            traceback=reply.get("traceback", ""),
            refused_calls=refused,
            is_misfit=reply.get("is_misfit", False),
        )


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


def as_reply(value: Any, weights: Mapping[str, float]) -> dict[str, Any]:
    """Return what a judge returned as its reply: the reward, its parts and the reason in words.

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
        return {"reward": _finite(value), "parts": {}, "message": reason}
    if missing := [f"{name!s:.40}" for name in value if name not in weights][:_MAX_NAMED]:
        example = ", ".join(f"{name} = 1.0" for name in [*weights, *missing])
        raise TypeError(
            f"a judge returned {value!r:.80}, with parts that reward.weights does not name: {_listed(missing)}; set "
            f"reward.weights = {{{example}}}, where 0 only records a part"
        )
    if absent := [name for name in weights if name not in value]:
        raise TypeError(f"a judge returns all parts of reward.weights; {_listed(absent)} is missing in {value!r:.80}")
    parts = {str(name): _finite(part) for name, part in value.items()}
    reward = _finite(math.fsum(weights[name] * part for name, part in parts.items()))
    return {"reward": reward, "parts": parts, "message": reason}


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _finite(value: Any) -> float:
    if not hasattr(value, "__float__"):
        raise TypeError(f"a judge returns a number, not {type(value).__name__}: {value!r:.80}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"a judge returns a finite number, not {number}")
    return number
