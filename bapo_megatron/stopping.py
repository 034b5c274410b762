"""Stopping a run before its end so that it can go on later: the step under way is finished and saved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bapo_megatron.buffer.share import share_flag
from bapo_megatron.learner.together import rank_and_size


class StopFile:
    """A file that asks the run to stop once it exists; None: nobody asks. All ranks make the same calls."""

    def __init__(self, path: Path | None = None) -> None:
        self.has_ended_early = False
        self._path = path
        self._was_asked = False

    def steps(self, steps: range) -> Iterator[int]:
        """The steps to do, up to the one at the end of which `is_asked` was true."""
        for step in steps:
            yield step
            if self._was_asked and step != steps[-1]:
                self.has_ended_early = True
                return

    def is_asked(self) -> bool:
        """At the end of a step: whether it is to be the last one. Collective, where there is a file: rank 0 looks."""
        if self._path is not None:
            self._was_asked = share_flag(self._path.exists() if rank_and_size()[0] == 0 else None)
        return self._was_asked
