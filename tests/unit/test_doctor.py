"""`bapo doctor`: what it says about a healthy machine, and about machines that lack something."""

import contextlib
import functools
import io
import itertools
import os
import resource
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from safetensors.torch import load_file

from bapo_megatron import cli
from bapo_megatron.assets import demo_model_path, shipped_model_path
from bapo_megatron.config.load import load_config
from bapo_megatron.config.schema import CheckpointConfig, Config
from bapo_megatron.engines.processes import reserved_ports
from bapo_megatron.errors import UserError
from bapo_megatron.hf.shape import load_hf_config
from bapo_megatron.machine.gpus import GIB
from bapo_megatron.preflight import check, packages
from bapo_megatron.preflight import doctor as doctor_room
from bapo_megatron.preflight import machine_checks as machine
from bapo_megatron.preflight import software_checks as software
from bapo_megatron.preflight.doctor import parse_rendezvous, verdict
from bapo_megatron.preflight.group import Probes, Rendezvous, started_probes
from bapo_megatron.preflight.machine_checks import Finding
from bapo_megatron.preflight.software_checks import NvidiaDriver, visible_indexes
from bapo_megatron.resolved import resolve
from tests.distributed import HANG_S, in_new_process

DRIVER = NvidiaDriver("570.1", (12, 8), (("NVIDIA H100", 80 * GIB, 0), ("NVIDIA H100", 80 * GIB, 3 * GIB)), (0, 1))
FACTS: dict[str, Any] = {
    "torch": "2.9.0+cu128",
    "cuda": "12.8",
    "num_gpus": 2,
    "nccl": "2.27.5",
    "capability": [9, 0],
}
MAX_CPU_S = 100  # per process: it uses 4
# `bapo doctor`, with deadlines that only a hang misses.
PATIENT = f"""
import sys
from bapo_megatron import cli
from bapo_megatron.preflight import doctor
doctor.PROBE_TIMEOUT_S = doctor.NODES_TIMEOUT_S = {HANG_S}
sys.exit(cli.main())
"""


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the doctor in a process of its own."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))

    command = [sys.executable, "-c", PATIENT, "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, preexec_fn=limit, check=False)


def with_replaced(replaced: dict[str, Any], function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a module-level function in a new process, with attributes of `preflight` replaced.

    The doctor forks its probes: they would hang if an earlier test made torch start threads or a process group.
    """
    return in_new_process(_replace_and_call, replaced, function, *arguments)


def _replace_and_call(replaced: dict[str, Any], function: Callable[..., Any], *arguments: Any) -> Any:
    for name, value in ({"doctor.PROBE_TIMEOUT_S": HANG_S} | replaced).items():
        pytest.MonkeyPatch().setattr(f"bapo_megatron.preflight.{name}", value)
    return function(*arguments)


def outputs(*commands: list[str]) -> list[tuple[int, str]]:
    """Return exit code and output of each command."""
    done = []
    for command in commands:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            code = cli.main(command)
        done.append((code, output.getvalue()))
    return done


def findings() -> list[Finding]:
    return list(doctor_room.examine(None, None))


def waited_for(num_gpus: int, timeout_s: float) -> Probes:
    with started_probes(num_gpus, None, timeout_s) as probes:
        probes.wait()
    probes.processes.clear()  # handles of this process's children
    probes.pipes.clear()
    return probes


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")
def test_a_machine_without_gpus_is_fit_for_cpu_use() -> None:
    done = doctor()
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("ready for CPU runs")
    for part in ("driver", "GPUs", "NCCL", "Transformer Engine"):
        assert part in last
    assert "ok   group (gloo)        2 processes: all-reduce" in done.stdout


@pytest.mark.slow
def test_a_taken_port_is_named_with_what_shows_its_owner(taken_port: int) -> None:
    done = doctor("--rendezvous", f"127.0.0.1:{taken_port}")
    assert done.returncode == 1, done.stdout + done.stderr
    (failed,) = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert f"port {taken_port}" in failed
    assert "Address already in use" in failed
    assert done.stdout.splitlines()[-1] == f"not fit: port {taken_port}"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    core = [*packages.requirements("train"), Requirement("no-such-package>=1,<2")]
    monkeypatch.setattr(packages, "requirements", lambda extra: core)
    ((code, text),) = outputs(["doctor"])
    assert code == 1
    assert text == ("FAIL packages            no-such-package is not installed; pip install 'no-such-package>=1,<2'\n")


def fail(error: BaseException) -> dict[str, Any]:
    raise error


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (RuntimeError("CUDA error: all CUDA-capable devices are busy\nmore"), "CUDA error: all CUDA-capable devices"),
        (RuntimeError(), "RuntimeError"),
        (SystemExit(3), "ended with exit code 3"),  # stands for a process that a signal ends
    ],
)
def test_a_torch_that_cannot_answer_fails_without_a_traceback(error: BaseException, problem: str) -> None:
    replaced = {"group.torch_facts": functools.partial(fail, error)}
    ((code, text),) = with_replaced(replaced, outputs, ["doctor"])
    assert code == 1
    lines = text.splitlines()
    assert any(line.startswith("FAIL torch ") and problem in line for line in lines), lines
    assert any(line.startswith("FAIL group (gloo) ") and problem in line for line in lines), lines
    assert lines[-1] == "not fit: torch, group (gloo)"


def test_a_probe_that_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe is killed at its deadline, before it has written anything."""
    probes = with_replaced({"group.torch_facts": signal.pause}, waited_for, 0, 0.2)
    (torch_finding,) = software.check_torch(probes.facts, NvidiaDriver(problem="none"))
    assert (torch_finding.verdict, torch_finding.what) == ("error", "not done after 0 s")
    monkeypatch.setattr(software, "installed_version", lambda name: "2.9.0")
    assert "torch did not answer" in software.check_transformer_engine(probes.facts, needed=False).what


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a torch that sees no GPU")
def test_a_torch_without_cuda_on_a_machine_with_gpus() -> None:
    probes = with_replaced({}, waited_for, 1, HANG_S)
    found = [*software.check_torch(probes.facts, DRIVER), *probes.findings(is_across_nodes=False)]
    assert [f.verdict for f in found] == ["error"] * 3
    assert "torch sees no GPU" in found[-1].what


def two_over_gloo(num_gpus: int, *rest: Any) -> contextlib.AbstractContextManager[Probes]:
    assert num_gpus == 2
    return started_probes(0, *rest)


def test_one_process_for_each_visible_gpu() -> None:
    """Two of eight GPUs are visible, so NCCL's ranks 2 to 7 would have no device."""
    eight = functools.partial(NvidiaDriver, "570.1", (12, 8), 8 * DRIVER.gpus[:1], (0, 1))
    replaced = {"software_checks.read_driver": eight, "doctor.started_probes": two_over_gloo}
    found = {f.name: f for f in with_replaced(replaced, findings)}
    assert (found["GPUs"].verdict, found["GPUs"].what) == (
        "ok",
        "8 x NVIDIA H100 (80 GiB), 2 visible (CUDA_VISIBLE_DEVICES)",
    )


def test_hidden_gpus_are_for_cpu_use() -> None:
    replaced = {"software_checks.read_driver": functools.partial(NvidiaDriver, "570.1", (12, 8), DRIVER.gpus)}
    found = with_replaced(replaced, findings)
    by_name = {f.name: f for f in found}
    assert (by_name["torch"].verdict, by_name["NCCL"].verdict) == ("ok", "absent")
    assert by_name["GPUs"].what == "2 x NVIDIA H100 (80 GiB), none visible (CUDA_VISIBLE_DEVICES): CPU use only"
    text, code = verdict(found)
    assert code == 0
    assert text.startswith("ready for CPU runs")


UUIDS = ["GPU-8932f937-d72c", "GPU-8f00a1b2-0000", "GPU-1c2d3e4f-1111"]


@pytest.mark.parametrize(
    ("setting", "indexes"),
    [
        (None, (0, 1, 2)),
        ("", ()),
        ("0,1", (0, 1)),
        ("2, 0", (2, 0)),
        ("1,-1,0", (1,)),
        ("1,7,0", (1,)),
        ("1,1", ()),
        ("NoDevFiles", ()),
        ("GPU-1c,GPU-8932f937-d72c", (2, 0)),
        ("GPU-8", ()),  # a prefix of two
        ("MIG-GPU-8932f937-d72c/1/0", ()),
    ],
)
def test_visible_gpus(setting: str | None, indexes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    assert visible_indexes(setting, UUIDS) == indexes
    if setting is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    entries = torch.cuda._parse_visible_devices()  # how torch reads it, before it looks at the GPUs
    if entries and isinstance(entries[0], int):
        assert tuple(itertools.takewhile(lambda i: i < len(UUIDS), entries)) == indexes
    elif not entries:
        assert indexes == ()


def test_the_driver_is_asked_what_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML counts all GPUs, whatever CUDA_VISIBLE_DEVICES says."""
    nvml = types.SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetCudaDriverVersion=lambda: 12080,
        nvmlSystemGetDriverVersion=lambda: b"570.1",
        nvmlDeviceGetCount=lambda: len(UUIDS),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda handle: types.SimpleNamespace(total=80 * GIB, used=handle * GIB),
        nvmlDeviceGetName=lambda handle: "NVIDIA H100",
        nvmlDeviceGetUUID=lambda handle: UUIDS[handle],
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    driver = software.read_driver()
    assert (driver.version, driver.cuda, len(driver.gpus), driver.visible) == ("570.1", (12, 8), 3, (2, 0))
    (_, gpus) = software.check_gpus(driver, 0)
    assert gpus.what == "3 x NVIDIA H100 (80 GiB), 2 visible (CUDA_VISIBLE_DEVICES); in use: GPU 2: 2.0 GiB"
    (_, gpus) = software.check_gpus(driver, 3)
    assert (gpus.verdict, gpus.advice) == ("error", "name more in CUDA_VISIBLE_DEVICES")


@pytest.mark.slow
def test_two_nodes_meet() -> None:
    def node(rank: int, port: int) -> subprocess.CompletedProcess[str]:
        return doctor("--rendezvous", f"127.0.0.1:{port}", "--num-nodes", "2", "--node-rank", str(rank))

    with reserved_ports(1) as (port,), ThreadPoolExecutor() as pool:
        results = [pool.submit(node, rank, port) for rank in range(2)]
        for done in [result.result() for result in results]:
            assert done.returncode == 0, done.stdout + done.stderr
            assert "4 processes: all-reduce" in done.stdout


@pytest.mark.parametrize(("below", "is_file"), [("", True), ("more/runs", True), ("runs", False)])
def test_a_folder_that_a_run_cannot_make(tmp_path: Path, monkeypatch, below: str, is_file: bool) -> None:
    place = tmp_path / "place"
    place.touch() if is_file else place.mkdir()
    monkeypatch.setattr(machine.os, "access", lambda path, mode: is_file)
    config = Config.model_validate({"run": {"dir": str(place / below)}})
    (found,) = machine.check_room(resolve(config, load_hf_config(demo_model_path())))
    what = "is a file" if is_file else "cannot be written to"
    assert found.problem == f"run.dir={place / below}: {place} {what}"


@pytest.mark.parametrize(
    ("free_share", "severities"), [(0.99, ["error"]), (1.01, ["warning"]), (2.99, ["warning"]), (3.01, [])]
)
def test_room_for_checkpoints(tmp_path: Path, monkeypatch, free_share: float, severities: list[str]) -> None:
    """The demo's checkpoints, at 12 bytes per parameter: two are kept, and one is being written."""
    folder = demo_model_path()
    config = Config.model_validate({"run": {"dir": str(tmp_path / "runs")}})
    needed = 12 * sum(t.numel() for t in load_file(folder / "model.safetensors").values())
    free = int(free_share * needed)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=free))
    found = list(machine.check_room(resolve(config, load_hf_config(folder))))
    assert [v.severity for v in found] == severities
    assert all("of which there are up to 3" in v.problem for v in found if v.severity == "warning")
    (tmp_path / "runs/run/checkpoints/step-000001").mkdir(parents=True)
    later = list(machine.check_room(resolve(config, load_hf_config(folder))))
    assert [v.severity for v in later] == [s for s in severities if s == "error"], "their room is already taken"
    only_if_stopped = config.model_copy(update={"checkpoint": CheckpointConfig(interval_steps=None)})
    assert not list(machine.check_room(resolve(only_if_stopped, load_hf_config(folder))))


@pytest.mark.parametrize(
    ("options", "starts_here", "problem"),
    [
        (["--mem=200"], False, "--mem=200 of slurm.options is 0.20 GiB"),  # MiB
        (["--exclusive", "--mem 1G"], False, ""),
        (["--mem=0"], False, ""),  # all that a node has
        ([], False, ""),
        (["--mem=1G"], True, "this machine has 0.25 GiB"),
    ],
)
def test_copies_of_checkpoints_fit_the_memory(monkeypatch, options: list[str], starts_here: bool, problem: str) -> None:
    """A 7B model's are 91 GB on one node; this one's, of 31 million parameters, are 0.35 GiB."""
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 65536, "SC_PAGE_SIZE": 4096}.__getitem__)
    monkeypatch.setattr("bapo_megatron.machine.memory.model_parameters", lambda shape, which: 31_000_000)
    config = Config.model_validate({"checkpoint": {"asynchronous": True}, "slurm": {"options": options}})
    found = list(machine.check_host_memory(resolve(config, load_hf_config(demo_model_path())), starts_here=starts_here))
    assert [problem in v.problem for v in found] == [True] * bool(problem)
    off = Config.model_validate({"slurm": {"options": options}})
    assert not list(machine.check_host_memory(resolve(off, load_hf_config(demo_model_path())), starts_here=starts_here))


def test_routes_fit_the_memory(monkeypatch) -> None:
    """The mixture that ships has 2 layers x 2 experts: 4 bytes for each of 40 x 8 x (16 + 48) tokens, twice."""
    mixture = load_hf_config(shipped_model_path("moe"))
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 40, "SC_PAGE_SIZE": 4096}.__getitem__)
    config = load_config(["demo"], ["model.path=moe", "model.replay_routes=true"])
    assert not list(machine.check_host_memory(resolve(config, mixture), starts_here=True)), "163,840 bytes are there"
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 39, "SC_PAGE_SIZE": 4096}.__getitem__)
    (found,) = machine.check_host_memory(resolve(config, mixture), starts_here=True)
    assert "model.replay_routes=true keeps 0.00 GiB in the memory of trainer rank 0's node, and this" in found.problem
    centered = load_config(
        ["demo"], ["model.path=moe", "model.replay_routes=true", "loss.name=cispo", "loss.center_top_k=4"]
    )
    (more,) = machine.check_host_memory(resolve(centered, mixture), starts_here=True)
    assert "model.replay_routes=true and loss.center_top_k=4 keep 0.00 GiB" in more.problem
    both = config.model_copy(update={"checkpoint": CheckpointConfig(asynchronous=True)})
    (found,) = machine.check_host_memory(resolve(both, mixture), starts_here=True)
    assert found.problem.startswith("checkpoint.asynchronous=true copies 0.00 GiB to the memory of each node that")
    assert ", and model.replay_routes=true keeps 0.00 GiB" in found.problem
    assert found.remedy == "set checkpoint.asynchronous=false"


def test_gpus() -> None:
    def verdicts(driver: NvidiaDriver, needed: int) -> list[tuple[str, str]]:
        return [(f.name, f.verdict) for f in software.check_gpus(driver, needed)]

    assert verdicts(DRIVER, 2) == [("driver", "ok"), ("GPUs", "warning")], "one of them is in use"
    assert verdicts(DRIVER, 8) == [("driver", "ok"), ("GPUs", "error")]
    assert verdicts(NvidiaDriver(problem="no driver"), 0) == [("driver", "absent"), ("GPUs", "absent")]
    assert verdicts(NvidiaDriver(problem="no driver"), 1) == [("driver", "error"), ("GPUs", "error")]


@pytest.mark.parametrize(
    ("facts", "driver", "verdicts"),
    [
        (FACTS, DRIVER, ["ok", "ok"]),
        (FACTS | {"cuda": None}, DRIVER, ["error", "ok"]),
        (FACTS | {"cuda": "13.0"}, DRIVER, ["error", "ok"]),  # newer than the driver supports
        ({"torch": "2.9.0", "cuda": "12.8", "num_gpus": 0}, DRIVER, ["error", "error"]),
        ({"torch": "2.9.0+cpu", "cuda": None, "num_gpus": 0}, NvidiaDriver(problem="none"), ["ok", "absent"]),
    ],
)
def test_torch_against_the_driver(facts: dict[str, Any], driver: NvidiaDriver, verdicts: list[str]) -> None:
    assert [f.verdict for f in software.check_torch(facts, driver)] == verdicts


def test_a_driver_that_is_too_old_is_one_error_with_its_remedy(monkeypatch, capsys) -> None:
    facts = {"torch": "2.14.1", "cuda": "13.0", "num_gpus": 0}
    found = next(iter(software.check_torch(facts, DRIVER)))
    told = "the NVIDIA driver 570.1 runs CUDA up to 12.8"
    remedy = "update the driver to 580 or newer (as root: apt-get install nvidia-driver-580), and restart"
    assert (found.what, found.advice) == (f"2.14.1, built for CUDA 13.0; {told}", remedy)
    monkeypatch.setattr(check, "has_gpu_driver", lambda: True)
    monkeypatch.setattr(check, "read_driver", lambda: DRIVER)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for dtype, code, end in (("float32", 0, ": the run takes place on CPUs"), ("bfloat16", 2, "")):
        assert cli.main(["check", "demo", f"model.dtype={dtype}"]) == code
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{told}, and torch {torch.__version__} is built for CUDA 13.0{end}; {remedy}" in line
    monkeypatch.setattr(check, "read_driver", lambda: NvidiaDriver("580.1", (13, 0)))
    assert cli.main(["check", "demo"]) == 0


def test_an_empty_transformer_engine_is_one_error_before_anything_starts(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "transformer_engine").mkdir()
    empty = "Found empty `transformer-engine` meta package"
    (tmp_path / "transformer_engine" / "__init__.py").write_text(f"raise RuntimeError('{empty}')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    assert cli.main(["check", "demo"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    told = (
        f"bapo: Transformer Engine cannot be imported: RuntimeError: {empty}; scripts/install_gpu.sh compiled builds it"
    )
    assert line.startswith(told)


def test_attached_servers_need_the_same_nccl() -> None:
    *_, nccl = software.check_torch(FACTS, DRIVER, attaches=True)
    assert f"attached servers need the same: install torch {FACTS['torch']} there" in nccl.advice


def test_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "installed_version", lambda name: None)
    assert software.check_transformer_engine(FACTS, needed=True).verdict == "error"
    assert software.check_transformer_engine(FACTS, needed=False).verdict == "absent"
    monkeypatch.setattr(software, "installed_version", lambda name: "2.9.0")
    broken = software.check_transformer_engine(FACTS, needed=False)  # it cannot be imported
    assert broken.verdict == "error"
    assert "No module named" in broken.what
    assert broken.advice == "scripts/install_gpu.sh compiled builds it against this torch"
    monkeypatch.setattr(software, "run_python", lambda code: ("", ""))
    possible = software.check_transformer_engine(FACTS, needed=True)
    assert "FP8 is possible" in possible.what
    ampere = software.check_transformer_engine(FACTS | {"capability": [8, 0]}, needed=True)
    assert (ampere.verdict, "has no FP8" in ampere.what) == ("error", True)


def test_an_old_chip_is_named() -> None:
    assert software.check_chip([9, 0]).verdict == "ok"
    turing = software.check_chip([7, 5])
    assert (turing.verdict, turing.what) == ("error", "compute capability 7.5 is too old: bfloat16 needs 8.0 (Ampere)")


ASKED = """
import dataclasses, os, sys

@dataclasses.dataclass
class AttentionParams:  # the fields of Transformer Engine 2.11 that are given
    qkv_dtype: object
    qkv_layout: str
    batch_size: int
    num_heads: int
    num_gqa_groups: int
    max_seqlen_q: int
    max_seqlen_kv: int
    head_dim_qk: int
    head_dim_v: int
    attn_mask_type: str
    window_size: tuple
    core_attention_bias_shape: object
    context_parallel: bool

def get_attention_backend(params):
    unfused = os.environ["NVTE_UNFUSED_ATTN"] == "1"
    fused = params.head_dim_qk <= 256
    return False, None, fused, 1 if fused else None, not fused and unfused, [False, fused, unfused]
"""


def test_transformer_engine_is_asked_for_its_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "transformer_engine" / "pytorch" / "attention" / "dot_product_attention" / "utils.py"
    module.parent.mkdir(parents=True)
    module.write_text(ASKED)
    (tmp_path / "torch.py").write_text("bfloat16 = 'bfloat16'")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("NVTE_UNFUSED_ATTN", raising=False)
    fused = software.check_attention({}, 16, 4, 128, 65536, True)
    assert (fused.verdict, fused.what) == ("ok", "packs of 65536 tokens, 16 heads of 128: cuDNN 1")
    refused = software.check_attention({}, 16, 4, 512, 2048, False)
    assert (refused.verdict, "no fused kernel" in refused.what) == ("error", True)
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "1")
    assert software.check_attention({}, 16, 4, 512, 2048, False).verdict == "warning"
    module.write_text("")
    silent = software.check_attention({}, 16, 4, 128, 2048, False)
    assert (silent.verdict, "has no attribute" in silent.what) == ("warning", True)


def test_rendezvous() -> None:
    assert parse_rendezvous(None, 1, 0) is None
    assert parse_rendezvous("node0:29500", 4, 3) == Rendezvous("node0", 29500, 4, 3)
    for address, nodes, rank in ((None, 2, 0), ("node0", 2, 0), ("node0:0", 2, 0), ("node0:1", 2, 2), (":1", 2, 0)):
        with pytest.raises(UserError):
            parse_rendezvous(address, nodes, rank)


def test_the_verdict_and_the_exit_code() -> None:
    fine, gone, broken = Finding("a", "ok", ""), Finding("GPUs", "absent", ""), Finding("disk", "error", "")
    assert verdict([fine]) == ("ready for GPU runs", 0)
    assert verdict([fine, gone])[1] == 0
    assert verdict([fine, gone, broken]) == ("not fit: disk", 1)
