"""Other frameworks' names for our settings (coming_from.toml), for suggestions and docs/coming-from.md."""

import re
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import NamedTuple

from bapo_megatron.errors import did_you_mean

_SETTING = re.compile(r"([a-z_]+(?:\.[a-z_0-9]+)+(?:=\S+)?)(?:: (.+))?")
# fmt: off
AROUND = frozenset({
    "actor", "actor_rollout_ref", "algo", "algorithm", "args", "checkpointing", "cluster", "config", "data",
    "generation", "grpo", "loss", "loss_fn", "megatron", "model", "optim", "optimizer", "orchestrator", "policy",
    "ppo", "rollout", "run", "sampling", "train", "trainer", "training",
})
# fmt: on
"""Sections about the policy and its run: a name means the same in them as alone, unlike in `critic` or `val_kwargs`."""


class Hint(NamedTuple):
    """An answer to an unknown setting."""

    setting: str
    """Our setting, or setting=value; empty if there is none."""
    remark: str = ""
    """What to know about it, such as its unit; without a setting, the whole answer."""

    @property
    def advice(self) -> str:
        """What to do, for an error: "did you mean loss.clip_low (a bound of the ratio, 0.8 for 0.2)?"."""
        remark = self.remark.replace("`", "")
        return did_you_mean(f"{self.setting} ({remark})" if remark else self.setting) if self.setting else remark


@cache
def frameworks() -> dict[str, dict[str, Hint]]:
    """Return framework -> their name -> what to write here."""
    texts = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return {framework: {name: _hint(text) for name, text in names.items()} for framework, names in texts.items()}


def _hint(text: str) -> Hint:
    found = _SETTING.fullmatch(text)
    return Hint(found[1], found[2] or "") if found else Hint("", text)


@cache
def _hints() -> dict[str, Hint]:
    """Return hints by dotted name; if two frameworks share a name, the first one's is used."""
    every = [(_dotted(name), hint) for names in frameworks().values() for name, hint in names.items()]
    return dict(reversed(every))


@cache
def _patterns() -> list[tuple[str, Hint]]:
    """Return the names with a "*", last ones first."""
    return [(name, hint) for name, hint in _hints().items() if "*" in name]


def _dotted(name: str) -> str:
    return name.lstrip("-").lower().replace("-", "_")


def meant_by(name: str) -> Hint | None:
    """Return what another framework's name means here, by its whole name or without the sections around it.

    Example: meant_by("actor_rollout_ref.rollout.n") == meant_by("--n-samples-per-prompt")
    """
    return next((_hints()[tail] for tail in tails(name) if tail in _hints()), None)


def covered_by(name: str) -> Hint | None:
    """Return the answer to all names of a kind, such as "*lora*"."""
    return next((hint for like, hint in _patterns() for tail in tails(name) if fnmatchcase(tail, like)), None)


def tails(name: str) -> Iterator[str]:
    """Yield a name in our spelling, then without the sections around it, as far as it keeps its meaning.

    A single word does not: `optim.lr`, `rollout.n` and `custom_cls.path` may mean anything.

    Example: "--actor.optim.clip-grad": "actor.optim.clip_grad", "optim.clip_grad", "clip_grad"
    """
    rest = _dotted(name)
    yield rest
    section, _, rest = rest.partition(".")
    while section in AROUND and ("." in rest or "_" in rest):
        yield rest
        section, _, rest = rest.partition(".")
