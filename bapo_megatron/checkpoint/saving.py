"""Writing one checkpoint to disk: this rank's part, written in a thread, and the outcome."""

import os
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bapo_megatron.checkpoint.arrays import write_arrays
from bapo_megatron.checkpoint.folder import INDEX, STATE, Manifest, digest_of, seal
from bapo_megatron.checkpoint.shards import Snapshot
from bapo_megatron.hf.writer import write_durably
from bapo_megatron.runtime.ranks import gather_json
from bapo_megatron.tokens import Array

_ROUND_S = 5.0  # interval at which waiting ranks meet, far shorter than the deadline of a collective


class Saving:
    """One rank's part of a checkpoint. `has_ended` and `wait` are collective.

    Args:
        partial: folder to write into.
        final: the folder's name once it is complete.
        snapshots: models by folder name.
        state: the body of state.json, on rank 0.
        arrays: the state's arrays, by path; see arrays.py.
        timeout_s: how long writing may take, counted from construction.
    """

    def __init__(
        self,
        partial: Path,
        final: Path,
        snapshots: dict[str, Snapshot],
        state: dict[str, Any],
        arrays: dict[str, Array],
        timeout_s: float,
    ) -> None:
        self.partial = partial
        self.final = final
        self.manifests: dict[str, Manifest] = {}
        self._snapshots = snapshots
        self._state = state
        self._arrays = arrays
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s

    def start(self) -> None:
        """Start writing this rank's files in a daemon thread."""
        self._thread.start()

    def _write(self) -> None:
        try:
            for name, snapshot in self._snapshots.items():
                self.manifests[name] = snapshot.write(self.partial / name)
            if self._arrays:
                self._state["arrays"] = write_arrays(self._arrays, self.partial)
        except Exception as error:  # whatever it is, all ranks learn of it at the next step boundary
            self._error = error

    def has_ended(self) -> bool:
        """Return whether every rank has finished writing or run out of time."""
        return not any(gather_json(self._thread.is_alive() and time.monotonic() < self._deadline))

    def wait(self) -> None:
        """Block until `has_ended`."""
        while True:
            self._thread.join(min(_ROUND_S, max(self._deadline - time.monotonic(), 0.0)))
            if self.has_ended():
                return

    def complaint(self) -> str | None:
        """Return why this rank could not write its part, or None."""
        if self._error is not None:
            return str(self._error) or repr(self._error)
        if self._thread.is_alive():
            return f"writing {self.partial} took longer than {self._timeout_s:g} s"
        return None

    def complete(self, manifests: Sequence[dict[str, Manifest]]) -> None:
        """Write the indices and state.json, and flush everything to disk; on rank 0, once all ranks have written.

        state.json names the step and each part's version and index, so that parts of two checkpoints never mix.

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
    """Flush a file or folder to disk: a name must not reach the disk before its content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_durably(path: Path, text: str) -> None:
    """Replace a small file atomically and durably.

    Raises:
        CheckpointError, OSError: the disk is full or not writable.
    """
    temporary = path.with_name(f".{path.name}.new")
    write_durably(temporary, text)
    os.replace(temporary, path)
    flush(path.parent)


def remove(folder: Path) -> None:
    """Delete a folder as far as possible; leftovers count as torn, or the next save removes them."""
    shutil.rmtree(folder, ignore_errors=True)
