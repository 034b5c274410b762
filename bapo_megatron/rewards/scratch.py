"""Folders that hostile code may fill: measured while it runs, and always deleted, however deep, even after a kill.

Uses the standard library only, and no recursion, because the code that fills a folder chooses its depth.
"""

import contextlib
import fcntl
import itertools
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator

_LOCK = "lock"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


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


def exceeds(folder: str, pid: int, *, max_entries: int, max_bytes: int, max_file_bytes: int, max_threads: int) -> bool:
    """Return whether a process and its folder hold more entries, disk blocks or threads than allowed.

    Deleted files that the process still holds open or mapped count too. Only root can ask for the size of a mapped
    one, so each counts as `max_file_bytes`. A path too long to list counts as too many entries, and so does a folder
    that can be filled but not listed.
    """
    num_entries, num_bytes, pending = 0, _held_bytes(pid, max_file_bytes), [folder]
    while pending:
        path = pending.pop()
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    num_entries += 1
                    if num_entries > max_entries:
                        return True
                    with contextlib.suppress(FileNotFoundError):
                        num_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            pending.append(entry.path)
        except FileNotFoundError:  # deleted in the meantime
            continue
        except PermissionError:
            if _can_be_filled(path):
                return True
        except OSError:
            return True
    return num_bytes > max_bytes or _num_threads(pid) > max_threads


def _can_be_filled(folder: str) -> bool:
    """Return whether a folder's owner may make entries in it; a program cannot change permissions later."""
    try:
        return os.lstat(folder).st_mode & 0o300 == 0o300
    except OSError:  # deleted in the meantime
        return False


def _held_bytes(pid: int, max_file_bytes: int) -> int:
    """Return the bytes on disk of a process's output and of deleted files that it holds open or mapped.

    All threads share one table of descriptors; the sandbox refuses any other.
    """
    blocks: dict[tuple[int, int], int] = {}  # by device and inode
    open_files = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                status = os.stat(f"/proc/{pid}/fd/{name}")
                if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                    blocks[status.st_dev, status.st_ino] = status.st_blocks
                    open_files.add((status.st_ino, os.readlink(f"/proc/{pid}/fd/{name}")))
    return sum(blocks.values()) * 512 + len(_deleted_mappings(pid) - open_files) * max_file_bytes


def _deleted_mappings(pid: int) -> set[tuple[int, str]]:
    """Return inode and path of mapped files that nobody can open: deleted files and shared memory."""
    found = set()
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as maps:
        for line in maps:
            if line.endswith(b" (deleted)\n"):
                _, _, _, _, inode, path = line.decode(errors="surrogateescape").rstrip("\n").split(maxsplit=5)
                found.add((int(inode), path))
    return found


def _num_threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0
