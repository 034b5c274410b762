"""Run a program, and end its children with it: `python -I -S subreaper.py PARENT REWARD_FD COMMAND...`.

There is one such process for each agent program and each worker of a judge or an environment. Linux hands it every
process that the program leaves behind (it is their subreaper), so none can leave by a session of its own. It ends them
once the program has ended, on SIGTERM, and if PARENT ends; then it ends as the program did. SIGKILL ends it and the
program, but not the program's children.

REWARD_FD, unless it is "-", becomes the program's descriptor 3. This program uses the standard library only and imports
nothing from the package.
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time

REWARD_FD = 3  # in the program; the highest that every shell can name
_END_S = 60.0  # how long killed children may take to end; rollout/agents.py waits less, and then kills this process
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LIBC = ctypes.CDLL(None)


def below_subreaper(reward_fd: int | None = None) -> list[str]:
    """Return the words that start this program below this process, to be followed by a command."""
    fd = "-" if reward_fd is None else str(reward_fd)
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), fd]


def main() -> None:
    parent, reward_fd, *command = sys.argv[1:]
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # it may be inherited as ignored; then no child could be waited for
    asked = {signal.SIGTERM, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, asked)
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):
        return  # it had already ended
    program = os.fork()
    if program == 0:
        _start(command, None if reward_fd == "-" else int(reward_fd), before)
    if reward_fd != "-":
        os.close(int(reward_fd))
    status = None
    while status is None and signal.sigwait(asked) == signal.SIGCHLD:
        _, status = _reaped(program, status)
    deadline_s = time.monotonic() + _END_S
    is_one_left, status = _reaped(program, status)
    while is_one_left and time.monotonic() < deadline_s:
        for child in _children():
            with contextlib.suppress(OSError):  # it runs as another user
                os.kill(child, signal.SIGKILL)
        signal.sigtimedwait({signal.SIGCHLD}, 0.05)
        is_one_left, status = _reaped(program, status)
    _end_as(1 if status is None else os.waitstatus_to_exitcode(status))


def _start(command: list[str], reward_fd: int | None, mask: set[int]) -> None:
    """Become the program, in a session of its own: signals to its group do not reach this process's."""
    os.setsid()
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if reward_fd not in (None, REWARD_FD):
        os.dup2(reward_fd, REWARD_FD)
        os.close(reward_fd)
    for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored_by_python, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(127)


def _reaped(program: int, status: int | None) -> tuple[bool, int | None]:
    """Wait for children that have ended; return whether others are left, and the program's status, None until it has
    ended."""
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            status = ended[1] if ended[0] == program else status
    except ChildProcessError:
        return False, status
    return True, status


def _children() -> list[int]:
    """Return the ids of this process's children, with the program's orphans. Each stays theirs until `_reaped`."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{name}/stat", "rb") as file:
            _, parent = file.read().rpartition(b")")[2].split()[:2]
            if int(parent) == os.getpid():
                found.append(int(name))
    return found


def _end_as(code: int) -> None:
    """End with an exit code, or by a signal if it is negative."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
    os._exit(code & 0xFF)


if __name__ == "__main__":
    main()
