"""One checkpoint on its way to the disk: this rank's part of the writing, in a thread, and what came of it."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bapo_megatron.checkpoint.folder import INDEX, STATE, Manifest, digest_of, seal
from bapo_megatron.checkpoint.shards import Snapshot
from bapo_megatron.hf.writer import write_durably
from bapo_megatron.runtime.ranks import gather_json

_ROUND_S = 5.0  # ranks that wait for each other's disks meet so often, well within the deadline of a collective


class Saving:
    """What one rank writes of a checkpoint. `has_ended` and `wait` are collective.

    Args:
        partial: the folder that is written into; `final`: what it will be called.
        snapshots: by the name of their folder.
        state: the body of state.json, on rank 0.
        timeout_s: from now on.
    """

    def __init__(
        self, partial: Path, final: Path, snapshots: dict[str, Snapshot], state: dict[str, Any], timeout_s: float
    ) -> None:
        self.partial = partial
        self.final = final
        self.manifests: dict[str, Manifest] = {}
        self._snapshots = snapshots
        self._state = state
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s

    def start(self) -> None:
        """Begin to write this rank's files, in a thread that does not keep the process alive."""
        self._thread.start()

    def _write(self) -> None:
        try:
            for name, snapshot in self._snapshots.items():
                self.manifests[name] = snapshot.write(self.partial / name)
        except Exception as error:  # whatever it is: all ranks are to hear of it at the next step boundary
            self._error = error

    def has_ended(self) -> bool:
        """No rank is writing any more; or those that are have had their time."""
        return not any(gather_json(self._thread.is_alive() and time.monotonic() < self._deadline))

    def wait(self) -> None:
        """Until `has_ended`."""
        while True:
            self._thread.join(min(_ROUND_S, max(self._deadline - time.monotonic(), 0.0)))
            if self.has_ended():
                return

    def complaint(self) -> str | None:
        """Why this rank has not written its part."""
        if self._error is not None:
            return str(self._error) or repr(self._error)
        if self._thread.is_alive():
            return f"the disk has not taken {self.partial} within checkpoint.timeout_s={self._timeout_s:g}"
        return None

    def complete(self, manifests: Sequence[dict[str, Manifest]]) -> None:
        """Write the indices and state.json, on rank 0 once all have written, and wait until the disk has everything.

        state.json names the step and each part's version and index, so that no part of another checkpoint is taken.

        Raises:
            CheckpointError, OSError: the disk is full or not writable.
        """
        parts = {}
        for name, snapshot in self._snapshots.items():
            snapshot.complete(self.partial / name, [of_rank[name] for of_rank in manifests])
            parts[name] = {"version": snapshot.facts["version"], "index": digest_of(self.partial / name / INDEX)}
        write_durably(self.partial / STATE, seal({**self._state, "parts": parts}))
        for path in (*self.partial.rglob("*"), self.partial):
            flush(path)


def flush(path: Path) -> None:
    """Bring a file or a folder to the disk: a name must not get there before what it stands for."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_durably(path: Path, text: str) -> None:
    """Replace a small file: its name stands for the old text, or for the new one, both whole.

    Raises:
        CheckpointError, OSError: the disk is full or not writable.
    """
    temporary = path.with_name(f".{path.name}.new")
    write_durably(temporary, text)
    os.replace(temporary, path)
    flush(path.parent)


def remove(folder: Path) -> None:
    """Delete, as far as it can be: what stays is taken for torn, or removed by the next save."""
    shutil.rmtree(folder, ignore_errors=True)
