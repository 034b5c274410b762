"""The sampled responses of a run, in the form in which the report shows them."""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from bapo_megatron.runs.history import History
from bapo_megatron.runtime.files import read_jsonl, step_of

log = logging.getLogger(__name__)

_MAX_NUMBER = 1e15
_MAX_SAMPLES = 200
_MAX_TOTAL_CHARS = 250_000
_MAX_TEXT_CHARS = 4000
_ENDS = {
    "length": "cut off at the length limit",
    "turns": "ended at the limit of turns",
    "failed": "the environment failed",
}
_TITLES = {  # author -> title
    "policy": "policy",
    "prompt": "prompt of this branch",
    "environment": "environment",
    "template": "chat template",
    "trajectory": "policy, in another branch",
}


class ShownWords(NamedTuple):
    """What one author wrote before the next one continued."""

    author: str  # a key of _TITLES, or "other"
    title: str
    parts: list[tuple[int | None, str]]  # weight version that sampled it, if any, and text


@dataclass(frozen=True, slots=True)
class ShownSample:
    """A sampled response, with None for facts that were not recorded."""

    key: str  # unique in the report
    step: int | None
    reward: float | None
    advantage: str  # one, or one for each turn; "" if it was not recorded
    num_tokens: int | None
    age: int | None  # updates between the weights that sampled its first token and those it trained
    version: int | None  # version of the weights that sampled its last token
    end: str  # why it ended, unless the policy or its environment ended it
    prompt: str
    answer: str
    reason: str  # parts of the reward, and the judge's reason
    branches: list[list[ShownWords]]

    @property
    def num_chars(self) -> int:
        texts = [text for words in self._words for _, text in words.parts]
        return sum(map(len, [self.prompt, self.answer, self.reason, *texts]))

    @property
    def num_turns(self) -> int:
        """Turns of the policy."""
        return sum(words.author == "policy" for words in self._words)

    @property
    def num_resumed(self) -> int:
        """How often a turn was set aside and continued later."""
        return sum(len(words.parts) - 1 for words in self._words if words.author == "policy")

    @property
    def _words(self) -> list[ShownWords]:
        return [words for branch in self.branches for words in branch]


def read_samples(run: History) -> list[ShownSample]:
    """Read samples.jsonl. Tolerates missing fields, because other tools may write it; skips lines with odd segments."""
    versions = {int(row["step"]): row["version"] for row in run.rows if math.isfinite(row.get("version", math.nan))}
    before = {step + 1: int(version) for step, version in versions.items()} | {1: 0}
    path, samples = run.path / "samples.jsonl", []
    for i, record in enumerate(read_jsonl(path)):
        try:
            samples.append(_sample(f"{step_of(record)}-{i}", record, before))
        except (TypeError, AttributeError) as error:
            log.warning("%s: skipped a line, not a sample: %s", path, error)
    return samples


def _sample(key: str, record: Mapping[str, Any], version_before: Mapping[int, int]) -> ShownSample:
    """Read a line; `version_before` holds the weight version that each step trained."""
    branches = [*(record.get("branches") or []), record.get("segments") or [{"text": record.get("response", "")}]]
    versions = [version for segments in branches for s in segments if (version := _version(s)) is not None]
    step, num_tokens = step_of(record), _number(record.get("num_tokens"))
    trained = version_before.get(step) if step is not None else None
    turn_rewards = record.get("turn_rewards") if len(branches) == 1 else None  # otherwise: of which branch?
    return ShownSample(
        key=key,
        step=step,
        reward=_number(record.get("reward")),
        advantage=_advantage(record.get("advantage")),
        num_tokens=None if num_tokens is None else int(num_tokens),
        age=trained - versions[0] if trained is not None and versions else None,
        version=versions[-1] if versions else None,
        end=_ENDS.get(str(record.get("finish_reason")), ""),
        prompt=_shortened(str(record.get("prompt", ""))),
        answer="" if record.get("answer") is None else _shortened(_plain(record["answer"])),
        reason=_reason(record),
        branches=[_words(segments, turn_rewards) for segments in branches],
    )


def _advantage(value: Any) -> str:
    numbers = map(_number, value if isinstance(value, list) else [value])
    return ", ".join(f"{number:+.2f}" for number in numbers if number is not None)


def _words(segments: Sequence[Mapping[str, Any]], turn_rewards: Any = None) -> list[ShownWords]:
    """Join the segments of each author; number the policy's turns, with their rewards, if someone else writes too."""
    found, num_turns = [], 0
    rewards = turn_rewards if isinstance(turn_rewards, list) else []
    for author, group in groupby(segments, key=lambda segment: str(segment.get("by", "policy"))):
        parts = [(_version(segment), _shortened(str(segment.get("text", "")))) for segment in group]
        title = _shortened(_TITLES.get(author, author))
        if author == "policy" and len(parts) < len(segments):
            num_turns += 1
            title += f", turn {num_turns}"
            if (reward := next(map(_number, rewards[num_turns - 1 :]), None)) is not None:
                title += f", reward {reward:.3g}"
        found.append(ShownWords(author if author in _TITLES else "other", title, parts))
    return found


def _reason(record: Mapping[str, Any]) -> str:
    parts = record.get("parts")
    numbers = {str(name): _number(part) for name, part in parts.items()} if isinstance(parts, dict) else {}
    listed = ", ".join(f"{name} {part:.3g}" for name, part in numbers.items() if part is not None)
    return _shortened("; ".join(filter(None, [listed, str(record.get("reason") or "")])))


def choose_samples(samples: Sequence[ShownSample]) -> list[ShownSample]:
    """Choose samples spread evenly over the run, including the first and the last, and as many as fit on a page."""
    num = min(len(samples), _MAX_SAMPLES)
    while True:
        chosen = [samples[i] for i in np.linspace(0, len(samples) - 1, num).round().astype(int)]
        if num <= 2 or sum(sample.num_chars for sample in chosen) <= _MAX_TOTAL_CHARS:
            return chosen
        num = num * 3 // 4


def _version(segment: Mapping[str, Any]) -> int | None:
    version = _number(segment.get("version"))
    return None if version is None else int(version)


def _number(value: Any) -> float | None:
    """Return a finite number small enough to show, or None for anything else."""
    return float(value) if isinstance(value, int | float) and abs(value) < _MAX_NUMBER else None


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _shortened(text: str) -> str:
    rest = len(text) - _MAX_TEXT_CHARS
    return text if rest <= 0 else f"{text[:_MAX_TEXT_CHARS]}… [{rest} more characters in samples.jsonl]"
