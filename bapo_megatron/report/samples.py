"""The sampled responses of a run, in the form in which the report shows them."""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from bapo_megatron.runs.history import History
from bapo_megatron.runtime.files import read_jsonl, step_of

log = logging.getLogger(__name__)

_MAX_NUMBER = 1e15
_MAX_SAMPLES = 200
_MAX_TOTAL_CHARS = 250_000
_MAX_TEXT_CHARS = 4000


class ShownSegment(NamedTuple):
    """Some text of a response, with one origin."""

    version: int | None  # version of the weights that sampled it
    text: str
    is_given: bool  # by an environment, not sampled


@dataclass(frozen=True, slots=True)
class ShownSample:
    """A sampled response, with None for facts that were not recorded."""

    key: str  # unique in the report
    step: int | None
    reward: float | None
    num_tokens: int | None
    age: int | None  # updates between the weights that sampled its first token and those it trained
    version: int | None  # version of the weights that sampled its last token
    is_truncated: bool
    prompt: str
    answer: str
    reason: str  # parts of the reward, and the judge's reason
    segments: list[ShownSegment]

    @property
    def num_chars(self) -> int:
        return len(self.prompt) + len(self.answer) + len(self.reason) + sum(len(s.text) for s in self.segments)

    @property
    def num_turns(self) -> int:
        """Turns of the policy."""
        before = [True, *(s.is_given for s in self.segments)]
        return sum(last and not s.is_given for last, s in zip(before, self.segments, strict=False))

    @property
    def num_resumed(self) -> int:
        """How often a turn was set aside and continued later."""
        return sum(not s.is_given for s in self.segments) - self.num_turns


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
    segments = record.get("segments") or [{"text": record.get("response", "")}]
    versions = [version for segment in segments if (version := _version(segment)) is not None]
    step, num_tokens = step_of(record), _number(record.get("num_tokens"))
    trained = version_before.get(step) if step is not None else None
    return ShownSample(
        key=key,
        step=step,
        reward=_number(record.get("reward")),
        num_tokens=None if num_tokens is None else int(num_tokens),
        age=trained - versions[0] if trained is not None and versions else None,
        version=versions[-1] if versions else None,
        is_truncated=record.get("finish_reason") == "length",
        prompt=_shortened(str(record.get("prompt", ""))),
        answer="" if record.get("answer") is None else _shortened(_plain(record["answer"])),
        reason=_reason(record),
        segments=[ShownSegment(_version(s), _shortened(str(s.get("text", ""))), is_given="by" in s) for s in segments],
    )


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
