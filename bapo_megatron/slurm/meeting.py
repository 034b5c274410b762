"""Where the processes of one attempt find each other: small files in a folder that all nodes see.

    run.json         trainer rank 0: the run directory, and where the ranks meet
    engines-<i>.json engine node i: the URLs of its engines, once they are healthy
    end.json         trainer rank 0: the run has ended, or was stopped
    stop             whoever asks the run to stop at the end of its step (runtime/ranks.py)
    stopped          trainer rank 0: it has, and was saved

Each file is there as a whole or not at all. One with `error` in it tells that its writer has failed, and why.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from bapo_megatron.errors import UserError
from bapo_megatron.runtime.files import write_atomically

RUN, END = "run", "end"
_POLL_S = 0.2


class Meeting:
    """The folder of one attempt, on a shared file system."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise UserError(f"no folder {folder} on this node; run.dir must be on a file system that all nodes share")
        self.folder = folder

    @property
    def stop_file(self) -> Path:
        return self.folder / "stop"

    @property
    def stopped_file(self) -> Path:
        return self.folder / "stopped"

    def tell(self, name: str, facts: dict[str, Any]) -> None:
        write_atomically(self._path(name), json.dumps(facts) + "\n")

    def has(self, name: str) -> bool:
        return self._path(name).exists()

    def wait(self, name: str, who: str, timeout_s: float, setting: str) -> dict[str, Any]:
        """What somebody tells under this name.

        Args:
            who: is named where nothing comes; `setting`: what to raise then.

        Raises:
            UserError: nothing came in time, or an error.
        """
        deadline = time.monotonic() + timeout_s
        while not self.has(name):
            if time.monotonic() > deadline:
                raise UserError(
                    f"waited {timeout_s:g} s for {who}: no {self._path(name)}; see the job's log for what it said, "
                    f"or raise {setting}"
                )
            time.sleep(_POLL_S)
        facts = json.loads(self._path(name).read_text(encoding="utf-8"))
        if "error" in facts:
            raise UserError(f"{who}: {facts['error']}")
        return facts

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.json"
