"""`rollout.placement = "split"`: who gets which GPU, what servers are told, and what is refused in time."""

import re
import subprocess
import types
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_megatron.assets import demo_model_path
from bapo_megatron.cli import main
from bapo_megatron.config.load import load_config
from bapo_megatron.config.schema import Config
from bapo_megatron.engines import sglang
from bapo_megatron.machine.parameters import model_parameters
from bapo_megatron.preflight import check
from bapo_megatron.preflight import machine_checks as machine
from bapo_megatron.preflight.checks.all import check_settings
from bapo_megatron.preflight.checks.layout import check_gpu_count
from bapo_megatron.preflight.checks.slurm import check_placement
from bapo_megatron.resolved import resolve
from bapo_megatron.resolved.placement import Device, NodeShare, ServerPart
from bapo_megatron.runtime import nccl
from bapo_megatron.sync import folder as weights
from tests.hang import HANG_S

SPLIT = ("rollout.engine=sglang", "rollout.placement=split", "model.dtype=bfloat16")
ONE = (*SPLIT, "cluster.gpu=h100", "cluster.gpus_per_node=1", "parallel.tensor=1")
EIGHT = (*SPLIT, "cluster.gpu=h100", "parallel.tensor=1", "parallel.data=8", "rollout.num_servers=4",
         "rollout.server_tensor_parallel=2")  # fmt: skip
TWO_NODES = (
    *ONE, "parallel.data=2", "rollout.num_servers=2", "cluster.nodes=2", 'slurm.options=["--exclusive","--mem=0"]',
)  # fmt: skip
PART = ServerPart(mem_fraction=0.9, kv_tokens=5000, max_batch=64, prefill_tokens=2048)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "num_visible_gpus", lambda: 0)


def configured(*settings: str) -> Config:
    return load_config(["demo"], list(settings))


def errors(settings: Sequence[str], capsys: pytest.CaptureFixture[str], verb: str = "check") -> list[str]:
    """Return the lines of the errors that a verb ends with, without a traceback."""
    code = main([verb, "demo", *settings])
    lines = capsys.readouterr().err.splitlines()
    assert code == (2 if lines else 0)
    return [line.removeprefix("bapo: ") for line in lines]


def test_servers_begin_at_the_first_gpu() -> None:
    placed = resolve(configured(*EIGHT)).placement
    assert (placed.num_gpus, placed.gpus_per_node, placed.num_server_gpus) == (8, 8, 8)
    assert [placed.rank(number) for number in range(8)] == [Device(0, gpu) for gpu in range(8)]
    assert placed.on().gpus == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert placed.on().num_ranks == 8
    fewer = resolve(configured(*EIGHT, "rollout.num_servers=3")).placement
    assert (fewer.num_gpus, fewer.num_server_gpus, fewer.on().gpus) == (8, 6, ((0, 1), (2, 3), (4, 5)))
    more = resolve(configured(*EIGHT, "parallel.data=2")).placement
    assert (more.num_gpus, more.num_ranks) == (8, 2)


def test_every_node_of_several_has_both() -> None:
    """Also where the servers would fill a node of their own."""
    placed = resolve(configured(*TWO_NODES)).placement
    assert (placed.trainer_nodes, placed.server_nodes, placed.engine_nodes) == (2, 2, 0)
    assert (placed.num_gpus, placed.gpus_per_node) == (2, 1)
    assert [placed.rank(1), *placed.server(1)] == [Device(1, 0), Device(1, 0)]
    alone = resolve(configured(*TWO_NODES, "rollout.placement=separate")).placement
    assert (alone.engine_nodes, alone.rank(1), alone.server(1)) == (0, Device(1, 0), (Device(1, 1),))


def test_an_evaluation_shares_nothing() -> None:
    placed = resolve(configured(*EIGHT)).placement.without_trainer()
    assert not placed.shares_gpus
    assert (placed.num_ranks, placed.num_gpus, placed.gpus_per_node) == (0, 8, 8)
    assert placed.on().part is None
    assert placed.on().gpus == ((0, 1), (2, 3), (4, 5), (6, 7))


def command(*settings: str, part: ServerPart | None = PART, has_gpu: bool = True) -> list[str]:
    run = resolve(configured(*ONE, *settings), demo_model_path())
    return sglang.command(run, replace(run.placement.on(), part=part), 0, 1234, has_gpu=has_gpu)


def added(*settings: str, part: ServerPart = PART) -> str:
    """Return what a part adds to a command line without it and without extras."""
    alone, told = command(part=None), command(*settings, part=part)
    assert told[: len(alone)] == alone
    return " ".join(told[len(alone) :])


PLANNED = "--mem-fraction-static 0.9 --max-total-tokens 5000 --cuda-graph-max-bs-decode 64 --chunked-prefill-size 2048"


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ((), PLANNED),
        (("mem_fraction_static=false",), PLANNED),
        (("mem_fraction_static=false", "max_total_tokens=false"), PLANNED),
        (("chunked_prefill_size=512",), PLANNED.replace("2048", "512")),
        (("cuda_graph_max_bs_decode=8",), PLANNED.replace("64", "8")),
        (("attention_backend=triton",), f"{PLANNED} --attention-backend triton"),
        (("log_requests=true",), f"{PLANNED} --log-requests"),
        (("log_requests=false",), PLANNED),
    ],
)
def test_a_server_is_told_its_part_and_the_users_extras(extra: tuple[str, ...], told: str) -> None:
    assert added(*(f"sglang.extra.{setting}" for setting in extra)) == told


def test_only_a_model_with_states_has_their_number() -> None:
    assert added(part=replace(PART, num_states=321)) == f"{PLANNED} --max-mamba-cache-size 321"


def test_a_server_without_a_gpu_or_a_part_is_told_nothing() -> None:
    assert command(has_gpu=False) == command(part=None, has_gpu=False)
    assert not {"--mem-fraction-static", "--chunked-prefill-size"} & {*command(part=None)}
    assert "--mem-fraction-static" not in command("sglang.extra.mem_fraction_static=false", part=None)


def test_ranks_on_the_gpus_of_a_server_may_hold_unequal_memory() -> None:
    run = resolve(configured(*EIGHT))
    here, name = run.placement.on(), "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"
    visible = ["7", "3", "GPU-5", "1", "0", "2", "4", "6"]

    def variables(here: NodeShare, visible: list[str]) -> dict[str, str]:
        return sglang.environment(run.config, here, 1, visible)

    told = variables(replace(here, part=PART), visible)
    assert told == variables(here, visible) | {name: "false"}
    assert told["CUDA_VISIBLE_DEVICES"] == "GPU-5,1"
    assert name not in variables(here, visible)
    assert variables(replace(here, part=PART), []) == variables(here, []), "on CPUs it is off in any case"


@pytest.mark.parametrize(
    ("settings", "num_gpus", "message"),
    [
        (EIGHT, 8, None),
        ((*EIGHT, "rollout.num_servers=8", "rollout.server_tensor_parallel=1"), 8, None),
        ((*EIGHT, "rollout.num_servers=1"), 8, None),
        ((*EIGHT, "parallel.data=4"), 8, None),
        (EIGHT, 7, "8 trainer ranks need 8 GPUs, and 7 are visible; lower parallel.*, or set CUDA_VISIBLE_DEVICES="),
        ((*EIGHT, "parallel.data=16"), 8, "16 trainer ranks need 16 GPUs, and 8 are visible; lower parallel.*, or set"),
        ((*EIGHT, "rollout.num_servers=5"), 8, "8 trainer ranks and 5 SGLang servers x 2 GPUs need 10 GPUs, and 8 are"),
        ((*ONE, "parallel.data=2"), 1, "2 trainer ranks need 2 GPUs, and 1 is visible; lower parallel.*, or set CUDA"),
        ((*ONE, "rollout.num_servers=2"), 1, "1 trainer rank and 2 SGLang servers x 1 GPU need 2 GPUs, and 1 is"),
    ],
)
@pytest.mark.parametrize("nccl_shares", [False, True])
def test_each_gpu_has_a_rank_and_a_server_at_most(
    settings: tuple[str, ...], num_gpus: int, message: str | None, nccl_shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if NCCL lets several ranks share a GPU: the plan knows one."""
    monkeypatch.setenv(nccl.SHARING_VARIABLE, "1" if nccl_shares else "0")
    monkeypatch.setattr(nccl, "loaded_version", lambda: (2, 30, 7))
    run = resolve(configured(*settings, "cluster.gpu=none"))
    found = [one.message for one in check_settings(run, num_gpus=num_gpus, starts_here=True) if one.severity == "error"]
    assert [text[: len(message or "")] for text in found] == ([message] if message else [])


CONTRADICTS = 'contradicts rollout.placement="split", whose plan decides what a server takes of a GPU; leave it out, or'
REFUSED: list[tuple[tuple[str, ...], str]] = [
    (
        (*ONE, "cluster.gpu_memory_gib=5"),
        r'rollout\.placement="split": a trainer rank and a server need \d\.\d GiB of each GPU, and 95% of its 5\.0 '
        r"is 4\.8: the trainer 3\.\d \(weights and their state 0\.0, context 3\.4, a step 0\.\d\), the server 2\.9 "
        r"\(weights 0\.0, one response 0\.0, graphs, work and context 2\.9\); use a much smaller model with this lay",
    ),
    (
        (*ONE, "sync.channel=broadcast"),
        re.escape(
            'sync.channel="broadcast" with rollout.placement="split": NCCL refuses two processes on one GPU; leave '
            "sync.channel out: weights then go through files in memory"
        ),
    ),
    (
        (*ONE, "rollout.engine=attach", 'rollout.urls=["http://127.0.0.1:1"]'),
        re.escape(
            'rollout.placement="split" plans the memory of servers that the run starts, and rollout.engine="attach" '
            "names others; set"
        ),
    ),
    (
        (*TWO_NODES, "slurm.rollout_nodes=1", "sync.folder=/scratch"),
        re.escape(
            'slurm.rollout_nodes=1, and with rollout.placement="split" every node trains; set slurm.rollout_nodes=0'
        ),
    ),
    (
        (*TWO_NODES, "slurm.rollout_nodes=2", "sync.folder=/scratch"),
        r"slurm\.rollout_nodes=2, and with",
    ),
    ((*ONE, "slurm.rollout_nodes=1"), r"slurm\.rollout_nodes=1, and with"),
    (
        TWO_NODES,
        re.escape(
            "cluster.nodes=2: servers on other nodes cannot read weights from /dev/shm, the memory of the first one; "
            "set sync.folder to a folder that all nodes share, or cluster.nodes=1"
        ),
    ),
    *(
        ((*ONE, f"sglang.extra.{setting}"), re.escape(f"sglang.extra.{setting} {CONTRADICTS} set sglang.extra."))
        for setting in ("mem_fraction_static=0.5", "mem_fraction_static=0", "mem_fraction_static=7",
                        "mem_fraction_static=high", "max_total_tokens=500")
    ),
    (
        (*ONE, "parallel.data=2"),
        re.escape("2 trainer ranks need 2 GPUs, and cluster.nodes x gpus_per_node = 1 x 1 = 1; change parallel.*"),
    ),
    (
        (*ONE, "rollout.num_servers=2"),
        re.escape(
            "1 trainer rank and 2 SGLang servers x 1 GPU need 2 GPUs, and cluster.nodes x gpus_per_node = 1 x 1 = 1; "
            "set rollout.num_servers=1, or change"
        ),
    ),
    (
        (*TWO_NODES, "sync.folder=/scratch", "rollout.num_servers=4"),
        r"each trainer node has 1 trainer rank and 2 SGLang servers x 1 GPU, 2 GPUs in all, and cluster\.gpus_per_node",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_what_cannot_be_is_one_error(
    settings: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = errors(settings, capsys)
    assert re.match(message, line), line


@pytest.mark.parametrize(
    "settings",
    [
        ONE,
        EIGHT,
        (*ONE, "sync.channel=disk"),
        (*ONE, "sync.folder=/scratch"),
        (*ONE, "slurm.rollout_nodes=0"),
        (*ONE, "sglang.extra.mem_fraction_static=false", "sglang.extra.max_total_tokens=false"),
        (*TWO_NODES, "sync.folder=/scratch"),
        ("rollout.placement=split",),  # the demo's engine, on CPUs
    ],
)
def test_what_can_be_is_accepted(settings: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert errors(settings, capsys) == []


def test_recorded_batches_need_no_placement(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "demo", *ONE, "rollout.engine=recorded", "rollout.recorded_from=x"]) == 0
    assert [line for line in capsys.readouterr().err.splitlines() if "placement" in line] == [
        'bapo: warning: rollout.placement="split" has no effect without an engine that the run starts, such as '
        'rollout.engine="sglang"; set that, or leave it out'
    ]


def test_a_run_on_this_machine_must_fit_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without cluster.gpu, its memory decides."""

    def found(gpu_gib: float) -> list[str]:
        monkeypatch.setattr("bapo_megatron.machine.gpus._this_gpu_gib", lambda: gpu_gib)
        run = resolve(configured(*SPLIT, "parallel.tensor=1"), demo_model_path())
        return [one.message for one in check.check_memory(run)]

    assert found(8.0) == []
    (message,) = found(5.0)
    assert 'rollout.placement="split": a trainer rank and a server need' in message


CPU_SPLIT = ("rollout.placement=split", "checkpoint.interval_steps=none")
TWO_VERSIONS = 2 * 4 * model_parameters(resolve(configured(), demo_model_path()).shape)


def room(monkeypatch: pytest.MonkeyPatch, **free: int) -> None:
    """Let each folder have room, as many bytes as `free` says of its name."""

    def usage(path: Path) -> Any:
        return types.SimpleNamespace(free=free.get(Path(path).name, 10**15))

    monkeypatch.setattr(weights.shutil, "disk_usage", usage)


def trained(settings: Sequence[str], tmp_path: Path) -> list[str]:
    """Return the messages with which a run on this machine is refused."""
    arguments = ["demo", *settings, f"run.dir={tmp_path / 'runs'}"]
    found = check.read_and_check(arguments)[1]
    return [one.message for one in found if one.severity == "error"]


def test_two_versions_of_the_weights_need_room_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "free_bytes", lambda parent: {weights.MEMORY: TWO_VERSIONS}[parent])
    assert trained(CPU_SPLIT, tmp_path) == []
    monkeypatch.setattr(machine, "free_bytes", lambda parent: {weights.MEMORY: TWO_VERSIONS - 1}[parent])
    assert trained(CPU_SPLIT, tmp_path) == [
        "0.01 GiB is free in /dev/shm, and two versions of the weights take 0.01; make room, or set sync.folder to "
        "another disk; a container has 64 MiB there unless it starts with --shm-size or --ipc=host"
    ]
    (line,) = errors([*CPU_SPLIT, f"run.dir={tmp_path / 'runs'}"], capsys, verb="train")
    assert line.startswith("0.01 GiB is free in /dev/shm")
    assert not [*tmp_path.iterdir()], "nothing has started"
    assert trained([*CPU_SPLIT, "rollout.placement=separate"], tmp_path) == []


def test_a_folder_of_ones_own_needs_room_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scratch").mkdir()
    settings = [*CPU_SPLIT, f"sync.folder={tmp_path / 'scratch'}"]
    room(monkeypatch, scratch=TWO_VERSIONS, shm=0)
    assert trained(settings, tmp_path) == []
    room(monkeypatch, scratch=TWO_VERSIONS - 1, shm=0)
    assert trained(settings, tmp_path) == [
        f"0.01 GiB is free in {tmp_path / 'scratch'}, and two versions of the weights take 0.01; make room, or set "
        "sync.folder to another disk"
    ]


def test_weights_in_memory_count_as_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room(monkeypatch)
    monkeypatch.setattr(machine, "memory_bytes", lambda: TWO_VERSIONS)
    assert trained(CPU_SPLIT, tmp_path) == []
    monkeypatch.setattr(machine, "memory_bytes", lambda: TWO_VERSIONS - 1)
    assert trained(CPU_SPLIT, tmp_path) == [
        "two versions of the weights take 0.01 GiB in /dev/shm, and this machine has 0.01 GiB; set sync.folder to a "
        "disk"
    ]
    assert trained([*CPU_SPLIT, f"sync.folder={tmp_path}"], tmp_path) == []
    copied = [*CPU_SPLIT, "checkpoint.interval_steps=5", "checkpoint.asynchronous=true"]
    (message,) = trained(copied, tmp_path)
    assert message.startswith("checkpoint.asynchronous=true copies 0.01 GiB to the memory of each node that trains, ")
    assert ", and two versions of the weights take 0.01 GiB in /dev/shm, and this machine has 0.01 GiB; " in message


def test_weights_that_fit_nowhere_are_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room(monkeypatch, shm=10)
    monkeypatch.setattr(machine, "memory_bytes", lambda: 20)
    (message,) = trained(CPU_SPLIT, tmp_path)
    assert message.startswith("0.00 GiB is free in /dev/shm")


def test_a_job_on_one_node_asks_for_its_gpus_once(capsys: pytest.CaptureFixture[str]) -> None:
    whole = 'slurm.options=["--exclusive","--mem=0"]'
    assert main(["slurm", "demo", *EIGHT, whole, "--dry-run"]) == 0
    script, told = capsys.readouterr()
    assert told == ""
    assert re.findall(r"^#SBATCH --(?:gres|gpus|nodes|ntasks).*$", script, re.MULTILINE) == [
        "#SBATCH --nodes=1",
        "#SBATCH --ntasks-per-node=8",
        "#SBATCH --gres=gpu:8",
    ]
    assert re.findall(r"^ *step (\w+) .*--nodes=(\d) .*--ntasks=(\d)", script, re.MULTILINE) == [
        ("engines", "1", "1"),
        ("trainer", "1", "8"),
    ]
    done = subprocess.run(["bash", "-n"], input=script, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0
    assert main(["slurm", "demo", *EIGHT, whole, "rollout.placement=separate", "--dry-run"]) == 2


@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 8), st.integers(1, 16), st.integers(1, 4))
def test_what_is_accepted_has_a_gpu_for_each_rank_and_each_server(
    width: int, servers: int, ranks: int, nodes: int
) -> None:
    settings = [f"parallel.data={ranks}", f"rollout.num_servers={servers}", f"rollout.server_tensor_parallel={width}"]
    run = resolve(configured(*EIGHT, *settings, f"cluster.nodes={nodes}", "sync.folder=/scratch"))
    found = [*check_gpu_count(run, 8)] if nodes == 1 else check_placement(run)
    fits = not (ranks % nodes or servers % nodes) and max(ranks, servers * width) <= 8 * nodes
    assert [one.severity for one in found if one.severity == "error"] == ([] if fits else ["error"])
    if fits:
        devices = [device for number in range(servers) for device in run.placement.server(number)]
        assert len({*devices}) == len(devices)
        assert max(device.gpu for device in (*devices, *map(run.placement.rank, range(ranks)))) < 8
