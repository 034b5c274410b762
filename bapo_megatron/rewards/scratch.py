"""Folders that hostile code may fill: measured while it runs, and always deleted, however deep, even after a kill.

Uses the standard library only, and no recursion, because the code that fills a folder chooses its depth.
"""

import contextlib
import fcntl
import itertools
import math
import os
import secrets
import signal
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_LOCK = "lock"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MOVED_NS = 20_000_000  # two ticks of the slowest kernel clock, which dates changes of folders
_STOP_POLL_S = 0.001
_EXITING = 4  # PF_EXITING of Linux's include/linux/sched.h, among the flags of a thread


@contextlib.contextmanager
def scratch_folder(prefix: str) -> Iterator[str]:
    """Make a temporary folder, and delete it with its contents at the end.

    The folder is called `files`, and its parent also holds a locked file. If this process is killed, its lock is
    released, which tells `delete_abandoned` to delete the parent.
    """
    holder = tempfile.mkdtemp(prefix=prefix)
    try:
        with _locked(os.path.join(holder, "unlocked"), os.O_CREAT | os.O_EXCL):
            os.rename(os.path.join(holder, "unlocked"), os.path.join(holder, _LOCK))  # never exists unlocked
            files = os.path.join(holder, "files")
            os.mkdir(files, 0o700)
            yield files
    finally:
        delete_folder(holder)


def delete_abandoned(folder: str, *prefixes: str) -> None:
    """Delete what `scratch_folder` made in `folder` and a killed process left there. Never raises.

    Leaves alone folders of other users, links, and folders without a lock file, whatever their names.
    """
    for name in _listed(folder):
        holder = os.path.join(folder, name)
        if not name.startswith(prefixes):
            continue
        with contextlib.suppress(OSError):
            status = os.lstat(holder)
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                with _locked(os.path.join(holder, _LOCK), 0):
                    delete_folder(holder)


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


@contextlib.contextmanager
def _locked(path: str, flags: int) -> Iterator[None]:
    """Open and lock a file. Raises BlockingIOError if another process holds the lock, OSError if there is no file."""
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flags, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def delete_folder(folder: str) -> None:
    """Delete a folder and its contents. Never raises; what the system refuses to delete stays.

    Folders that are not empty move to the top before their contents are deleted, so paths stay short and two
    descriptors suffice.
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
    """Delete a file or an empty folder; return False for a folder that is not empty."""
    is_folder = stat.S_ISDIR(os.stat(entry, dir_fd=fd, follow_symlinks=False).st_mode)
    if not is_folder:
        os.unlink(entry, dir_fd=fd)
        return True
    try:
        os.rmdir(entry, dir_fd=fd)
    except OSError:
        return False
    return True


def exceeds(
    folder: str, pid: int, deadline_s: float, *, max_entries: int, max_bytes: int, max_file_bytes: int, max_threads: int
) -> bool:
    """Return whether a child process and its folder hold more entries, disk blocks or threads than allowed.

    Deleted files that the process still holds open or mapped count too. Only root can ask for the size of a mapped
    one, so each counts as `max_file_bytes`. What cannot be seen counts as too much: a path too long to list, a folder
    that can be filled but not listed, a thread whose descriptors or memory cannot be read.

    If something moves during the look, the process is stopped for a second one.

    Args:
        folder: where the process may make files.
        pid: the process.
        deadline_s: on the clock of time.monotonic; nothing waits longer for the process to stop.
        max_entries: number of files and folders.
        max_bytes: the bytes of all files together.
        max_file_bytes: the largest file that the process can make.
        max_threads: number of threads.
    """

    def look() -> tuple[bool, bool]:
        num_entries, folder_bytes, is_folder_sure = _folder_use(folder, max_entries)
        held_bytes, are_threads_sure = _held_bytes(pid, max_file_bytes)
        is_over = num_entries > max_entries or folder_bytes + held_bytes > max_bytes or len(_threads(pid)) > max_threads
        return is_over, is_folder_sure and are_threads_sure

    is_over, is_sure = look()
    if not is_over and not is_sure:
        with _stopped(pid, deadline_s):
            is_over, _ = look()
    return is_over


def _folder_use(folder: str, max_entries: int) -> tuple[float, int, bool]:
    """Return the entries and the bytes on disk below a folder, and whether nothing moved meanwhile.

    Infinitely many entries stand for more than `max_entries`, or for some that cannot be listed.
    """
    recent_ns = time.time_ns() - _MOVED_NS
    num_entries, num_bytes, is_sure, pending = 0, 0, True, [folder]
    while pending:
        path = pending.pop()
        try:
            is_sure &= os.lstat(path).st_ctime_ns < recent_ns  # the last time that an entry came, went or was renamed
            with os.scandir(path) as entries:
                for entry in entries:
                    num_entries += 1
                    if num_entries > max_entries:
                        return math.inf, num_bytes, True
                    num_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
        except (FileNotFoundError, NotADirectoryError):  # deleted in the meantime, or elsewhere
            is_sure = False
        except PermissionError:
            if _can_be_filled(path):
                return math.inf, num_bytes, True
        except OSError:
            return math.inf, num_bytes, True
    return num_entries, num_bytes, is_sure


def _can_be_filled(folder: str) -> bool:
    """Return whether a folder's owner may make entries in it; a program cannot change permissions later."""
    try:
        return os.lstat(folder).st_mode & 0o300 == 0o300
    except OSError:  # deleted in the meantime
        return False


def _held_bytes(pid: int, max_file_bytes: int) -> tuple[float, bool]:
    """Return the bytes on disk of deleted files that a process holds open or mapped, and whether none can be missing.

    All threads share one table of descriptors; the sandbox refuses any other. So one thread tells, but a thread that
    leaves tells nothing, and the first one may leave before the others.
    """
    for task in _threads(pid):
        blocks, open_files, is_sure = _deleted_open_files(task)
        mappings = _deleted_mappings(task)  # last: a thread gives up its memory before its descriptors
        if mappings is not None:
            return sum(blocks.values()) * 512 + len(mappings - open_files) * max_file_bytes, is_sure
        if not _rests(task, "ZX"):
            return math.inf, True
    return 0, False


def _deleted_open_files(task: str) -> tuple[dict[tuple[int, int], int], set[tuple[int, str]], bool]:
    """Return blocks by device and inode, inodes with paths, and whether no descriptor was closed meanwhile."""
    blocks, paths, is_sure = {}, set(), True
    with contextlib.suppress(OSError):  # the thread has left
        for name in os.listdir(f"{task}/fd"):
            try:
                status = os.stat(f"{task}/fd/{name}")
                if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                    blocks[status.st_dev, status.st_ino] = status.st_blocks
                    paths.add((status.st_ino, os.readlink(f"{task}/fd/{name}")))
            except OSError:
                is_sure = False
    return blocks, paths, is_sure


def _deleted_mappings(task: str) -> set[tuple[int, str]] | None:
    """Return inode and path of mapped files that nobody can open: deleted files and shared memory.

    Returns None if the thread's memory cannot be read.
    """
    try:
        lines = Path(task, "maps").read_bytes().split(b"\n")
    except OSError:
        return None
    found = set()
    for line in lines:
        if line.endswith(b" (deleted)"):
            _, _, _, _, inode, path = line.decode(errors="surrogateescape").split(maxsplit=5)
            found.add((int(inode), path))
    return found if len(lines) > 1 else None


def _threads(pid: int) -> list[str]:
    return [f"/proc/{pid}/task/{thread}" for thread in _listed(f"/proc/{pid}/task")]


def _rests(task: str, states: str) -> bool:
    """Return whether a thread has left, is about to, or is in one of `states`, so that it runs no code."""
    try:
        state = Path(task, "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return True
    return state[0] in states or bool(int(state[6]) & _EXITING)


@contextlib.contextmanager
def _stopped(pid: int, deadline_s: float) -> Iterator[None]:
    """Stop all threads of a child process while the block runs; wait for them until the deadline."""
    os.kill(pid, signal.SIGSTOP)
    try:
        while time.monotonic() < deadline_s and not all(_rests(task, "TtZX") for task in _threads(pid)):
            time.sleep(_STOP_POLL_S)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
