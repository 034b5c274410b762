"""Small files that survive a crash: JSON Lines, and text files that are replaced atomically."""

import contextlib
import errno
import json
import logging
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bapo_megatron.errors import UserError, closest

_MAX_COMPARED = 10_000  # names in a folder
_ADVICE = "make room there, or choose another folder (run.dir)"

log = logging.getLogger(__name__)


@contextlib.contextmanager
def explaining_os_errors(path: Path, advice: str = _ADVICE) -> Iterator[None]:
    """Turn an OSError, such as a full disk, into a UserError that names `path`."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise UserError(f"cannot write {path}: {why}; {advice}") from error


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an OSError, such as missing permission, into a UserError that names `path`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; make it readable, or read a copy") from error


CHECKOUT = Path(__file__).parents[2]
"""The folder that contains the package and, in a checkout, also docs/, scripts/ and studies/."""

_OF_CHECKOUT = re.compile(r"(?<![\w/.-])(?:docs|scripts)/[\w/.-]+\.(?:md|sh|py)\b")


def located(text: str, checkout: Path = CHECKOUT) -> str:
    """Name pages and scripts of the checkout so that the reader finds them from any working folder.

    Example: "see docs/data.md" becomes "see /home/me/bapo/docs/data.md" in another folder, and "see docs/data.md of the
    source" if the package was installed from a wheel, which does not have the page.
    """

    def place(found: re.Match[str]) -> str:
        name, file = found[0], checkout / found[0]
        return name if os.path.exists(name) else str(file) if file.exists() else f"{name} of the source"

    return _OF_CHECKOUT.sub(place, text)


def similar_paths(path: Path) -> list[str]:
    """Return what stands next to a missing path under the most similar name, alone; empty if nothing does."""
    try:
        names = [] if os.path.lexists(path) else os.listdir(path.parent)
    except OSError:  # also ENAMETOOLONG
        names = []
    return [str(path.with_name(name)) for name in closest(path.name, names[:_MAX_COMPARED])]


def regular_file(path: Path) -> Path:
    """Return the path of a regular file, or of a link to one.

    Raises:
        OSError: it is missing or not a regular file: reading a pipe or a device may never end.
    """
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path


class JsonlWriter:
    """A JSON Lines file written without buffering. Opening cuts off a line that a crash left unfinished.

    Raises:
        UserError: the file cannot be written; later writes fail too.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with explaining_os_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            _drop_torn_tail(path)
            self._file = path.open("ab", buffering=0)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one object; NaN and infinities, which JSON lacks, become null."""
        line = (json.dumps(_finite(record), ensure_ascii=False, allow_nan=False) + "\n").encode()
        with explaining_os_errors(self._path):
            while line:  # a nearly full disk takes only part of it
                line = line[self._file.write(line) :]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read all objects in order; skip and log a line that is damaged. A missing file is empty.

    Raises:
        UserError: the file cannot be read, for instance because it belongs to somebody else.
    """
    with reading(path):
        if not path.exists():
            return []
        with path.open(encoding="utf-8", errors="replace") as file:
            lines = list(file)
    records = []
    for line_number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if "\\ud" in line.lower():  # half a surrogate pair is not text
                json.dumps(record, ensure_ascii=False).encode()
        except (ValueError, RecursionError):  # also raised for a number with thousands of digits
            record = None
        if isinstance(record, dict):
            records.append(record)
        elif line.strip():
            torn = "" if line.endswith("\n") else ": the last line is unfinished, its step was being written"
            log.warning("%s, line %d: skipped, not a JSON object%s", path, line_number, torn)
    return records


def truncate_after(path: Path, step: int) -> int:
    """Drop the objects whose "step" exceeds `step`, atomically, and return how many there were."""
    records = read_jsonl(path)
    kept = [record for record in records if (step_of(record) or 0) <= step]
    if len(kept) < len(records):
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept)
        write_atomically(path, text)
    return len(records) - len(kept)


def step_of(record: Mapping[str, Any]) -> int | None:
    """Return the step of a line of metrics or samples; None if it has no valid one."""
    step = record.get("step")
    if not isinstance(step, int | float) or not 0 <= step < 2**53:
        return None
    return int(step) if step == int(step) else None


def write_atomically(path: Path, text: str, advice: str = _ADVICE) -> None:
    """Replace a file so that after a crash, and for any reader, it has either the old text or the new one.

    Raises:
        UserError: the disk is full or not writable.
    """
    temporary = path.with_name(path.name + ".tmp")
    with explaining_os_errors(path, advice):
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _drop_torn_tail(path: Path) -> None:
    if not path.exists():
        return
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        log.warning("%s: dropped an unfinished last line", path)
        os.truncate(path, end)
