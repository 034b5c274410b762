"""Annotators add values to the tokens of a sample that has ended, before its group can be trained.

driver --Ended--> every annotator's `rows` --> Segment.rows --> checkpoint, recording, batch, loss
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bapo_megatron.config.annotators import Annotator
from bapo_megatron.errors import EngineError, UserError, plural
from bapo_megatron.tokens import Array, Rows, TokenStream
from bapo_megatron.types import Sample, Sampled, Segment, Trajectory

log = logging.getLogger(__name__)

_NUM_FIRST = 32  # samples that show whether an annotator works at all
_MAX_REASON = 500  # characters of an error


@dataclass(slots=True)
class Annotators:
    """The annotators of a run. One that fails on a sample leaves its tokens without rows, and is counted."""

    made: Sequence[Annotator] = ()
    worked: set[int] = field(default_factory=set)  # places in `made`
    num_failed: int = 0  # since the attempt began
    _num_first_failed: Counter[int] = field(default_factory=Counter)  # by place, of one that has not worked yet

    @property
    def streams(self) -> tuple[TokenStream, ...]:
        """The streams that they add."""
        return tuple(stream for one in self.made for stream in one.streams)

    @property
    def deadline_s(self) -> float:
        """The longest that `annotated` may take."""
        return max((one.deadline_s for one in self.made), default=0.0)

    async def annotated(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples, with the rows of all annotators in those that have ended with a reward and tokens.

        Raises:
            UserError: an annotator blames the data or the settings, or has failed on every sample so far. An
                EngineError, of a server that it asks, fails the sample.
        """
        return list(await asyncio.gather(*map(self._annotated, samples))) if self.made else list(samples)

    async def _annotated(self, sample: Sample) -> Sample:
        if sample.reward is None or not sample.num_sampled_tokens:
            return sample
        found = await asyncio.gather(*(self._rows(place, sample) for place in range(len(self.made))))
        return with_rows(sample, {stream: values for rows in found for stream, values in rows.items()})

    async def _rows(self, place: int, sample: Sample) -> Rows:
        one = self.made[place]
        try:
            rows = await asyncio.wait_for(one.rows(sample), one.deadline_s)
            if {*rows} != {*one.streams}:
                raise ValueError(f"it returned {rows!r:.80}, not rows of {', '.join(s.name for s in one.streams)}")
            checked = {stream: _checked(stream, rows[stream], sample.num_sampled_tokens) for stream in rows}
        except Exception as error:  # the annotator is the user's
            is_of_server = isinstance(error, EngineError)
            if isinstance(error, (UserError, AssertionError)) and not is_of_server:
                raise
            self._fail(place, sample, error)
            return {}
        self.worked.add(place)
        return checked

    def _fail(self, place: int, sample: Sample, error: Exception) -> None:
        one = self.made[place]
        reason = f"no rows in {one.deadline_s:g} s" if isinstance(error, TimeoutError) else f"{error!r:.{_MAX_REASON}}"
        where = f"sample {sample.sample_id} of prompt {sample.prompt.prompt_id}"
        what = f"annotator {type(one).__name__}, {where}: {reason}"
        log.warning("%s", what, exc_info=None if self.num_failed else error)
        self.num_failed += 1
        self._num_first_failed[place] += 1
        if place not in self.worked and self._num_first_failed[place] >= _NUM_FIRST:
            num = plural(_NUM_FIRST, "sample")
            raise UserError(f"an annotator failed on all of the first {num}, so the loss lacks its values; {what}")


def _checked(stream: TokenStream, values: Any, num_rows: int) -> Array:
    """Return rows [num_rows, *shape], read-only. Raises ValueError."""
    return stream.checked(values.copy() if isinstance(values, Array) else values, num_rows, filled=True)


def with_rows(sample: Sample, rows: Rows) -> Sample:
    """Return the sample with more rows of its sampled tokens, which lie in the order of `Sample.sampled_ids`."""
    start = 0

    def of(segment: Segment) -> Segment:
        nonlocal start
        if not isinstance(segment.origin, Sampled):
            return segment
        end = start + segment.num_tokens
        more = {stream: values[start:end] for stream, values in rows.items()}
        start = end
        return replace(segment, rows={**segment.rows, **more})

    trajectories = tuple(Trajectory(tuple(map(of, trajectory.segments))) for trajectory in sample.trajectories)
    return replace(sample, trajectories=trajectories)
