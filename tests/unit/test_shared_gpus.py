"""Ranks and servers that share GPUs: NCCL's version and variable, who gets which GPU, and what is refused in time."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bapo_megatron.config.load import load_config
from bapo_megatron.engines import sglang
from bapo_megatron.learner import parallel
from bapo_megatron.preflight.checks.all import check_settings
from bapo_megatron.preflight.doctor import _gpus_needed
from bapo_megatron.resolved import resolve
from bapo_megatron.resolved.placement import Placement
from bapo_megatron.runtime import nccl
from benchmarks import one_gpu_ranks
from tests.distributed import HANG_S
from tests.integration.nursery import state_of

NEW, OLD = (2, 30, 7), (2, 28, 9)
Version = tuple[int, int, int]


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop(nccl.SHARING_VARIABLE, None)


def have(monkeypatch: pytest.MonkeyPatch, version: Version | None, variable: str | None = "1") -> None:
    monkeypatch.setattr(nccl, "loaded_version", lambda: version)
    if variable is not None:
        os.environ[nccl.SHARING_VARIABLE] = variable


@given(
    st.none() | st.tuples(st.integers(2, 3), st.integers(0, 99), st.integers(0, 99)) | st.sampled_from([NEW, OLD]),
    st.none() | st.sampled_from(["", "0", "1", "true"]),
)
def test_ranks_share_a_gpu_from_2_30_7_on_if_the_user_says_so(version: Version | None, variable: str | None) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(os, "environ", dict(os.environ))
        have(monkeypatch, version, variable)
        problem = nccl.sharing_problem()
    assert (problem == "") == (version is not None and version >= NEW and variable == "1")
    if problem:
        assert f"{nccl.SHARING_VARIABLE} is {variable or 'unset'}" in problem
        assert (".".join(map(str, version)) if version else "no NCCL") in problem


@given(
    st.none() | st.tuples(st.integers(2, 9), st.integers(0, 99), st.integers(0, 99)),
    st.none() | st.tuples(st.integers(2, 9), st.integers(0, 99), st.integers(0, 99)),
    st.booleans(),
)
def test_the_version_is_that_of_the_library_that_torch_calls(
    preloaded: Version | None, of_torch: Version | None, fails: bool
) -> None:
    """A preloaded library comes before torch's own, and one that does not answer is passed over."""

    def library(name: str | None) -> SimpleNamespace:
        version = preloaded if name is None else of_torch
        if version is None:
            if name is None:
                return SimpleNamespace()
            raise OSError("libtorch_cuda.so: no such file")

        def get(code: ctypes.c_int) -> int:
            major, minor, patch = version
            code._obj.value = major * 10_000 + minor * 100 + patch  # type: ignore[attr-defined]
            return 5 if fails and name is None else 0

        return SimpleNamespace(ncclGetVersion=get)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(nccl.ctypes, "CDLL", library)
        assert nccl.loaded_version() == ((None if fails else preloaded) or of_torch)


def test_this_torch_has_no_nccl_without_cuda() -> None:
    if torch.version.cuda is None:
        assert nccl.loaded_version() is None


CROWDED = [
    ("parallel.tensor=2",),
    ("parallel.data=4", "model.dtype=bfloat16"),
    ("rollout.engine=sglang", "model.dtype=bfloat16"),
    ("rollout.engine=sglang", "model.dtype=bfloat16", "rollout.num_servers=2", "parallel.pipeline=2"),
]


@pytest.mark.parametrize("settings", CROWDED)
def test_shared_gpus_are_accepted_or_refused_before_the_start(
    monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...]
) -> None:
    def found(*, starts_here: bool = True) -> list[str]:
        config = load_config([], list(settings))
        return [v.message for v in check_settings(resolve(config), num_gpus=1, starts_here=starts_here)]

    (unset,) = found()
    assert "GPUs, and 1 is visible" in unset
    have(monkeypatch, NEW)
    assert found() == []
    assert found(starts_here=False) == [unset], "the variable is of this machine"
    have(monkeypatch, OLD)
    (old,) = found()
    for part in ("cannot share 1 GPU", "NCCL 2.28.9 is loaded", "load NCCL 2.30.7 or newer", "LD_PRELOAD"):
        assert part in old
    assert "\n" not in old


def test_a_server_of_two_ranks_needs_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, NEW)
    settings = ["rollout.engine=sglang", "model.dtype=bfloat16", "rollout.server_tensor_parallel=2"]
    (refused,) = check_settings(resolve(load_config([], settings)), num_gpus=1, starts_here=True)
    assert "need 3 GPUs" in refused.message
    assert check_settings(resolve(load_config([], settings)), num_gpus=2, starts_here=True) == []


@pytest.mark.parametrize(
    ("urls", "channel", "num_gpus", "is_told"),
    [
        ('["http://127.0.0.1:1"]', "broadcast", 1, True),
        ('["http://localhost:1", "http://10.0.0.1:1"]', "broadcast", 1, True),
        ('["http://[::1]:1"]', "broadcast", 1, True),
        ('["http://127.0.0.1:1"]', "disk", 1, False),
        ('["http://127.0.0.1:1"]', "broadcast", 2, False),
        ('["http://10.0.0.1:1"]', "broadcast", 1, False),
        ('["http://127.0.0.1:1"]', "broadcast", 0, False),
    ],
)
def test_a_server_that_may_be_on_the_trainers_gpu_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, urls: str, channel: str, num_gpus: int, is_told: bool
) -> None:
    settings = ["rollout.engine=attach", f"rollout.urls={urls}", f"sync.channel={channel}"]
    have(monkeypatch, OLD, variable=None)
    found = check_settings(resolve(load_config([], settings)), num_gpus=num_gpus, starts_here=True)
    assert [v.severity for v in found] == ["warning"] * is_told
    assert all('set sync.channel="disk", or set NCCL_MULTI_RANK_GPU_ENABLE=1' in v.message for v in found)
    have(monkeypatch, NEW)
    assert check_settings(resolve(load_config([], settings)), num_gpus=num_gpus, starts_here=True) == []


@given(st.data(), st.integers(1, 8), st.integers(0, 9), st.integers(0, 5))
def test_each_server_has_different_gpus_and_goes_round(
    data: st.DataObject, num_gpus: int, first: int, server: int
) -> None:
    tensor_parallel = data.draw(st.integers(1, num_gpus))
    visible = [f"GPU-{i}" for i in range(num_gpus)]
    placed = Placement(num_ranks=first, num_servers=server + 1, gpus_per_server=tensor_parallel)
    gpus = placed.on().gpus[server]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(os, "environ", dict(os.environ))
        os.environ[nccl.SHARING_VARIABLE] = "1"
        mine = sglang.named_gpus(gpus, visible)
    assert len(set(mine)) == tensor_parallel, "CUDA shows no GPU at all if one is named twice"
    end = first + (server + 1) * tensor_parallel
    if end <= num_gpus:
        assert mine == tuple(visible[end - tensor_parallel : end])
        assert mine == sglang.named_gpus(gpus, visible)
    else:
        with pytest.raises(AssertionError, match="counts them"):
            sglang.named_gpus(gpus, visible)


@pytest.mark.parametrize(("variable", "devices"), [(None, [0, 1, 2, 3]), ("0", [0, 1, 2, 3]), ("1", [0, 1, 0, 1])])
def test_ranks_go_round_the_gpus(monkeypatch: pytest.MonkeyPatch, variable: str | None, devices: list[int]) -> None:
    class SetError(Exception):
        pass

    def set_device(index: int) -> None:
        raise SetError(index)

    have(monkeypatch, NEW, variable)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    found = []
    for rank in range(4):
        os.environ["LOCAL_RANK"] = str(rank)
        with pytest.raises(SetError) as caught:
            parallel.start_processes(load_config([], []).parallel)
        found += caught.value.args
    assert found == devices


def test_the_doctor_needs_one_gpu_if_they_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config([], ["model.dtype=bfloat16", "parallel.tensor=2", "rollout.engine=sglang"])
    assert _gpus_needed(config) == 3
    have(monkeypatch, NEW)
    assert _gpus_needed(config) == 1


# benchmarks/one_gpu_ranks.py


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    before = signal.getsignal(signal.SIGTERM)
    yield monkeypatch
    signal.signal(signal.SIGTERM, before)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["one_gpu_ranks.py", *arguments])
    return one_gpu_ranks.main()


@pytest.mark.parametrize(
    ("version", "variable", "arguments", "parts"),
    [
        (OLD, "1", (), ["NCCL 2.28.9 is loaded", "load NCCL 2.30.7 or newer"]),
        (NEW, None, (), ["NCCL_MULTI_RANK_GPU_ENABLE is unset", "set NCCL_MULTI_RANK_GPU_ENABLE=1"]),
        (NEW, "1", ("--nccl", "/nowhere/libnccl.so.2"), ["--nccl /nowhere/libnccl.so.2: there is no such file"]),
    ],
)
def test_nothing_starts_where_ranks_cannot_share(
    script: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    version: Version,
    variable: str | None,
    arguments: tuple[str, ...],
    parts: list[str],
) -> None:
    have(script, version, variable)
    script.setattr(torch.cuda, "is_available", lambda: True)
    script.setattr(subprocess, "Popen", None)
    output = tmp_path / "lines.json"
    assert run(script, "--part", "c1", "--backend", "nccl", "--output", str(output), *arguments) == 2
    said = capsys.readouterr()
    assert (said.out, len(said.err.splitlines())) == ("", 1)
    assert all(part in said.err for part in parts), said.err
    assert not output.exists()


def test_a_result_that_fails_is_a_line_and_the_next_ones_follow(
    script: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail(*_: object) -> one_gpu_ranks.Row:
        raise RuntimeError("process 1 ended with exit code 1: no")

    def ok(*_: object) -> one_gpu_ranks.Row:
        return {"ok": True, "found": 1}

    script.setattr(one_gpu_ranks, "RESULTS", {"imports": ok, "PP2": fail, "CP2": ok, "EP2": fail, "TP2 x PP2": ok})
    output = tmp_path / "lines.json"
    assert run(script, "--part", "c2", "--backend", "gloo", "--output", str(output)) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["result"], line["ok"]) for line in lines] == [
        *(("imports", True), ("PP2", False), ("CP2", True)),
        *(("EP2", False), ("TP2 x PP2", True)),
    ]
    assert "exit code 1: no" in lines[1]["failed"]
    assert [json.loads(line) for line in output.read_text().splitlines()] == lines


def test_a_failing_process_ends_the_others_and_their_children(tmp_path: Path) -> None:
    ready = tmp_path / "pid"
    parent = f"sleep {HANG_S:g} & echo $! > {ready}.new; mv {ready}.new {ready}; wait"
    failing = f"while [ ! -e {ready} ]; do sleep 0.05; done; echo the cause; exit 3"
    with pytest.raises(RuntimeError, match="process 1 ended with exit code 3: the cause"):
        one_gpu_ranks.together([["sh", "-c", parent], ["sh", "-c", failing]], [{}, {}], HANG_S)
    deadline = time.monotonic() + HANG_S
    while state_of(Path("/proc") / ready.read_text().strip()) not in ("", "Z", "X"):  # killed, but not ended yet
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_that_does_not_end_is_killed_at_its_deadline() -> None:
    with pytest.raises(TimeoutError, match=r"processes \[0\] were still running after 0.2 s"):
        one_gpu_ranks.together([["sleep", f"{HANG_S:g}"]], [{}], 0.2)


@pytest.mark.parametrize(
    ("change", "ok"),
    [
        ({}, True),
        ({"mean": 2e-4}, False),
        ({"an_update_moves": 1e-4}, False),
        ({"sampled_with": [0]}, False),
        ({"sampled_with": [0, 1]}, False),
        ({"servers": 1}, False),
        ({"checksums": ["b", "c"]}, False),
        ({"checksums": ["a", "a"]}, False),
    ],
)
def test_a_push_is_judged_by_versions_checksums_and_log_probs(change: dict[str, object], ok: bool) -> None:
    first: one_gpu_ranks.Row = {"pushed": 0, "servers": 2, "sampled_with": [0], "checksums": ["a", "a"]}
    first |= {"mean": 1e-6, "an_update_moves": 0.5}
    second = first | {"pushed": 1, "sampled_with": [1], "checksums": ["b", "b"]} | change
    assert one_gpu_ranks.judged([first, second], 2, "float32")["ok"] is ok
    of_embedded = [row | {"checksums": ["the trainer's"] * 2} for row in (first, second)]
    if not change:
        assert one_gpu_ranks.judged(of_embedded, 2, "float32")["ok"]
        of_embedded[1]["checksums"] = ["the trainer's", "other"]
        assert not one_gpu_ranks.judged(of_embedded, 2, "float32")["ok"]


@pytest.mark.slow
def test_part_c1_over_gloo(tmp_path: Path) -> None:
    output = tmp_path / "c1.json"
    patience = f"{HANG_S:g}"
    done = subprocess.run(
        [
            *(sys.executable, one_gpu_ranks.__file__, "--part", "c1", "--backend", "gloo", "--engine", "embedded"),
            *("--output", str(output), "--deadline-s", patience, "--sync-timeout-s", patience),
        ],
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == output.read_text()
    imports, tp2, dp2, push = [json.loads(line) for line in done.stdout.splitlines()]
    assert imports["torch"] == torch.__version__
    for row, title in ((tp2, "TP2"), (dp2, "DP2, distributed optimizer")):
        assert (row["result"], row["ok"], row["ranks"], row["same_bounds"]) == (title, True, 2, True)
        assert 0 < row["gradient"] < row["tolerance"]["gradient"], "0 would compare one process with itself"
        assert row["num_gradients"] > 40
    assert [one["sampled_with"] for one in push["pushes"]] == [[0], [1], [2]]
    assert all(one["mean"] < push["tolerance"]["mean"] for one in push["pushes"])
    assert {checksum for one in push["pushes"] for checksum in one["checksums"]} == {"the trainer's"}
