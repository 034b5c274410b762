"""Annotators: the user's objects that add values to the tokens of samples that have ended.

# my_teacher.py, for rollout.annotators = ["my_teacher:make"]
def make(config: Config) -> Annotator: ...
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from bapo_megatron.config.dotted import ANNOTATOR
from bapo_megatron.errors import UserError, in_one_line

if TYPE_CHECKING:
    from bapo_megatron.config.schema import Config
    from bapo_megatron.tokens import TokenStream
    from bapo_megatron.types import Sample


class Annotator(Protocol):
    """Source of values for the tokens of samples that have ended, such as a teacher's log-probs from a server."""

    @property
    def streams(self) -> Sequence[TokenStream]:
        """The streams that it adds to sampled tokens. Each has a `missing` value for tokens without rows."""
        ...

    @property
    def deadline_s(self) -> float:
        """The longest that `rows` may take, in seconds."""
        ...

    async def rows(self, sample: Sample) -> Mapping[TokenStream, Any]:
        """Return the rows of each stream, [number of sampled tokens, *shape], in the order of `Sample.sampled_ids`.

        They are an array of the stream's type, or a list if a row is one number.

        Runs on trainer rank 0, for many samples at the same time, while others still sample, and must not block. May be
        called again with the same sample: after a crash, or when the call was cancelled.
        """
        ...


def own_annotators(config: Config, taken: Collection[str]) -> tuple[Annotator, ...]:
    """Make the annotators of a run.

    Args:
        taken: names of the model's streams.

    Raises:
        UserError: one cannot be loaded or made, or its streams do not fit; names the path and what is expected there.
    """
    made: list[Annotator] = []
    names = list(taken)
    for path in config.rollout.annotators:
        make = ANNOTATOR.load(path)
        try:
            one = make(config)
            streams, deadline_s = tuple(one.streams), float(one.deadline_s)
            for stream in streams:
                stream.check_annotated(names)
                names.append(stream.name)
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # a user's function may fail in any way
            raise ANNOTATOR.error(path, f"making it failed: {in_one_line(error)}") from error
        if not inspect.iscoroutinefunction(getattr(one, "rows", None)):
            raise ANNOTATOR.error(path, "it has no method `async def rows(self, sample)`")
        if not (streams and deadline_s > 0):
            raise ANNOTATOR.error(path, f"it has {len(streams)} streams and a deadline_s of {deadline_s:g}")
        made.append(one)
    return tuple(made)
