"""Limits of a container, or of any other control group, on the memory and the CPU time of this process.

    /proc/self/cgroup      0::/box/job                             version 2; or 4:memory:/box/job, version 1
    /proc/self/mountinfo   ... /box /sys/fs/cgroup ... - cgroup2 cgroup2 rw
    read                   /sys/fs/cgroup/job/memory.max, /sys/fs/cgroup/memory.max

Groups are nested, and the smallest limit on the way to the root counts. A container may see only a part of the way.
Source: the kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ESCAPED = re.compile(r"\\([0-7]{3})")  # a blank in a path of mountinfo is \040


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    """What the control groups of a process allow; infinity where they set no limit."""

    memory_bytes: float = math.inf
    cores: float = math.inf


def cgroup_limits(root: Path = Path("/")) -> CgroupLimits:
    """Return the limits of this process; none on a system without control groups.

    Args:
        root: the root of the file system.
    """
    memory, cores = math.inf, math.inf
    for folder in _folders(root):
        memory = min(memory, _number(folder / "memory.max"), _number(folder / "memory.limit_in_bytes"))
        quota, period = [*_words(folder / "cpu.max"), "100000"][:2] if _words(folder / "cpu.max") else ("max", "1")
        cores = min(cores, _share(quota, period))
        old = [_words(folder / f"cpu.cfs_{name}_us")[:1] for name in ("quota", "period")]
        if all(old):
            cores = min(cores, _share(old[0][0], old[1][0]))
    return CgroupLimits(memory, cores)


def _folders(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's groups, each followed by its parents up to the mount."""
    groups: dict[str, str] = {}  # controller -> path; "" is version 2
    for line in _lines(root / "proc/self/cgroup"):
        _, names, path = [*line.split(":", 2), "", ""][:3]
        groups |= dict.fromkeys(names.split(","), path)
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, rest = line.partition(" - ")
        fields, (kind, *options) = mount.split(), (rest.split() or [""])
        if kind not in ("cgroup", "cgroup2") or len(fields) < 5:
            continue
        controllers = {""} if kind == "cgroup2" else {"memory", "cpu"} & set(",".join(options[1:]).split(","))
        top, base = (_ESCAPED.sub(lambda found: chr(int(found[1], 8)), field) for field in fields[3:5])
        for path in {groups[name] for name in controllers if name in groups}:
            inside = Path(path).relative_to(top) if Path(path).is_relative_to(top) else Path()
            if ".." in inside.parts:  # a group outside the container's namespace
                inside = Path()
            folder = root / base.lstrip("/")
            yield from (folder / one for one in (inside, *inside.parents))


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(errors="surrogateescape").splitlines()
    except OSError:  # not Linux, no such controller, or no right to read it
        return []


def _words(file: Path) -> list[str]:
    return " ".join(_lines(file)).split()


def _number(file: Path) -> float:
    """Return a limit; infinity if there is none."""
    words = _words(file)
    return float(words[0]) if words and words[0].isdecimal() else math.inf


def _share(quota: str, period: str) -> float:
    """Return the cores that a quota of CPU time in each period stands for."""
    is_limit = quota.isdecimal() and period.isdecimal() and int(period) > 0
    return int(quota) / int(period) if is_limit else math.inf
