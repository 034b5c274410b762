"""Rendezvous of one attempt's processes: small files in a folder that all nodes share.

    run.json         by trainer rank 0: the run directory and the ranks' rendezvous
    engines-<i>.json by engine node i: the URLs of its healthy engines
    end.json         by trainer rank 0: the run has ended or stopped
    stop             by the batch script or the user: stop at the end of the current step (runtime/ranks.py)
    stopped          by trainer rank 0: the run was saved and stopped

Each file appears whole or not at all. A key `error` in it says why its writer failed.
"""

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
        """Wait for the file `name` and return its contents.

        Args:
            who: the writer, named in errors.
            setting: the setting to raise after a timeout.

        Raises:
            UserError: nothing came in time, or the writer reported an error.
        """
        deadline = time.monotonic() + timeout_s
        while not self.has(name):
            if time.monotonic() > deadline:
                raise UserError(
                    f"waited {timeout_s:g} s for {who}: no {self._path(name)}; read its output in the job's log, or "
                    f"raise {setting}"
                )
            time.sleep(_POLL_S)
        facts = json.loads(self._path(name).read_text(encoding="utf-8"))
        if "error" in facts:
            raise UserError(f"{who}: {facts['error']}")
        return facts

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.json"
