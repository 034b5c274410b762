"""Limits of containers, read from made-up trees of control groups."""

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_megatron import runtime
from bapo_megatron.runtime.cgroups import CgroupLimits, cgroup_limits

GIB = 1 << 30
V2 = "30 25 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"


def tree(root: Path, groups: str, mounts: str, files: Mapping[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts, **files}.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return root


def test_a_system_without_control_groups_has_no_limit(tmp_path: Path) -> None:
    assert cgroup_limits(tmp_path) == CgroupLimits(math.inf, math.inf)


@pytest.mark.parametrize(
    ("groups", "mounts", "files", "limits"),
    [
        (
            "0::/a/b",
            V2,
            {
                "sys/fs/cgroup/a/memory.max": str(4 * GIB),
                "sys/fs/cgroup/a/cpu.max": "max 100000",
                "sys/fs/cgroup/a/b/memory.max": "max",
                "sys/fs/cgroup/a/b/cpu.max": "250000 100000",
            },
            CgroupLimits(4 * GIB, 2.5),
        ),
        (
            "0::/",
            V2,
            {"sys/fs/cgroup/memory.max": str(GIB), "sys/fs/cgroup/cpu.max": "50000 100000"},
            CgroupLimits(GIB, 0.5),
        ),
        (  # version 1, in a container that sees the host's names of its groups
            "4:memory:/docker/x\n3:cpu,cpuacct:/docker/x/y\n1:name=systemd:/z\n0::/",
            "31 1 0:2 /docker/x /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
            "32 1 0:3 /docker/x /sys/fs/cgroup/cpu\\040time rw - cgroup cgroup rw,cpu,cpuacct",
            {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB),
                "sys/fs/cgroup/cpu time/cpu.cfs_quota_us": "300000",
                "sys/fs/cgroup/cpu time/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/cpu time/y/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu time/y/cpu.cfs_period_us": "100000",
            },
            CgroupLimits(2 * GIB, 3.0),
        ),
        ("0::/../other", V2, {"sys/fs/cgroup/memory.max": str(GIB)}, CgroupLimits(GIB, math.inf)),
        ("nonsense", "nonsense\n - \n1 2 - cgroup2", {}, CgroupLimits()),
        ("0::/a", V2, {"sys/fs/cgroup/a/memory.max": "", "sys/fs/cgroup/a/cpu.max": "100000 0"}, CgroupLimits()),
    ],
)
def test_limits(tmp_path: Path, groups: str, mounts: str, files: dict[str, str], limits: CgroupLimits) -> None:
    assert cgroup_limits(tree(tmp_path, groups, mounts, files)) == limits


@settings(max_examples=50, deadline=None)
@given(
    limits=st.lists(st.tuples(st.none() | st.integers(1, 64), st.none() | st.integers(1, 64)), min_size=1, max_size=5),
    is_old=st.booleans(),
)
def test_the_smallest_limit_on_the_way_counts(
    tmp_path_factory: pytest.TempPathFactory, limits: list[tuple[int | None, int | None]], is_old: bool
) -> None:
    files, folder = {}, "sys/fs/cgroup"
    for memory, tenths in limits:
        folder += "/g"
        if is_old:
            files[f"{folder}/memory.limit_in_bytes"] = str(memory * GIB if memory else 2**63 - 4096)
            files[f"{folder}/cpu.cfs_quota_us"] = str(tenths * 10_000 if tenths else -1)
            files[f"{folder}/cpu.cfs_period_us"] = "100000"
        else:
            files[f"{folder}/memory.max"] = str(memory * GIB) if memory else "max"
            files[f"{folder}/cpu.max"] = f"{tenths * 10_000 if tenths else 'max'} 100000"
    path = "/g" * len(limits)
    groups = f"2:cpu,memory:{path}\n0::/" if is_old else f"0::{path}"
    mounts = "30 25 0:26 / /sys/fs/cgroup rw - cgroup cgroup rw,cpu,memory" if is_old else V2
    found = cgroup_limits(tree(tmp_path_factory.mktemp("root"), groups, mounts, files))
    assert min(found.memory_bytes, 2**62) == min((m * GIB for m, _ in limits if m), default=2**62)
    assert found.cores == pytest.approx(min((t / 10 for _, t in limits if t), default=math.inf))


def test_what_a_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    cores, memory = runtime.num_cores(), runtime.memory_bytes()
    for limits, num_cores, num_bytes in [
        (CgroupLimits(), cores, memory),
        (CgroupLimits(1000.0, 1.9), 1, 1000),
        (CgroupLimits(math.inf, 0.2), 1, memory),
    ]:
        monkeypatch.setattr(runtime, "cgroup_limits", lambda limits=limits: limits)
        assert (runtime.num_cores(), runtime.memory_bytes()) == (min(cores, num_cores), min(memory, num_bytes))
