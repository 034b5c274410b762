"""Folders that hostile code may fill: measured while it runs, deleted however deep they are.

Standard library only, and no recursion: the code that fills a folder chooses its depth.
"""

import contextlib
import itertools
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def scratch_folder(prefix: str) -> Iterator[str]:
    """Make a temporary folder, and delete it with all contents at the end."""
    folder = tempfile.mkdtemp(prefix=prefix)
    try:
        yield folder
    finally:
        delete_folder(folder)


def delete_folder(folder: str) -> None:
    """Delete a folder and its contents. Never raises; what the system refuses to delete stays.

    Folders that are not empty move to the top before their contents go, so no path gets long and two descriptors do.
    """
    with contextlib.suppress(OSError):
        top = os.open(folder, _FOLDER)
        try:
            _empty(top)
        finally:
            os.close(top)
        os.rmdir(folder)


def _empty(top: int) -> None:
    names = (f"{secrets.token_hex(8)}-{number}" for number in itertools.count())
    pending = ["."]
    while pending:
        name = pending.pop()
        with contextlib.suppress(OSError):
            fd = os.open(name, _FOLDER, dir_fd=top)
            try:
                for entry in os.listdir(fd):
                    if not _is_deleted(entry, fd):
                        moved = next(names)
                        os.chmod(entry, 0o700, dir_fd=fd)
                        os.rename(entry, moved, src_dir_fd=fd, dst_dir_fd=top)
                        pending.append(moved)
            finally:
                os.close(fd)
            if name != ".":
                os.rmdir(name, dir_fd=top)


def _is_deleted(entry: str, fd: int) -> bool:
    """Delete a file or an empty folder; False for a folder that holds something."""
    is_folder = stat.S_ISDIR(os.stat(entry, dir_fd=fd, follow_symlinks=False).st_mode)
    if not is_folder:
        os.unlink(entry, dir_fd=fd)
        return True
    try:
        os.rmdir(entry, dir_fd=fd)
    except OSError:
        return False
    return True


def exceeds(folder: str, pid: int, *, max_entries: int, max_bytes: int, max_threads: int) -> bool:
    """Return whether a process and its folder hold more entries, disk blocks or threads than allowed.

    Counts deleted files that the process still holds open. A path too long to list counts as too many entries.
    """
    num_entries, num_bytes, pending = 0, _held_bytes(pid), [folder]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    num_entries += 1
                    if num_entries > max_entries:
                        return True
                    with contextlib.suppress(FileNotFoundError):
                        num_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            pending.append(entry.path)
        except (FileNotFoundError, PermissionError):  # gone meanwhile; or made without rights, and so empty
            continue
        except OSError:
            return True
    return num_bytes > max_bytes or _num_threads(pid) > max_threads


def _held_bytes(pid: int) -> int:
    """Return the disk blocks of deleted files that a process holds open, and of its output."""
    total = 0
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                status = os.stat(f"/proc/{pid}/fd/{name}")
                if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                    total += status.st_blocks * 512
    return total


def _num_threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0
