"""`rollout.placement = "turns"`: what servers are told, what is refused in time, and the host's memory."""

import importlib.util
import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bapo_megatron.assets import demo_model_path
from bapo_megatron.cli import main
from bapo_megatron.config.load import load_config
from bapo_megatron.config.schema import Config
from bapo_megatron.engines import sglang
from bapo_megatron.machine.memory import host_bytes, trainer_memory
from bapo_megatron.preflight import check, oom, software_checks
from bapo_megatron.preflight.checks.all import check_settings
from bapo_megatron.preflight.checks.placement import check_sharing
from bapo_megatron.preflight.inputs import server_arguments
from bapo_megatron.preflight.machine_checks import check_host_memory, copied_bytes
from bapo_megatron.preflight.plan import make_plan, planned, with_turns
from bapo_megatron.resolved import Resolved, resolve
from bapo_megatron.resolved.placement import ServerPart

EMBEDDED = ("rollout.placement=turns",)
TURNS = (*EMBEDDED, "rollout.engine=sglang", "model.dtype=bfloat16")
ONE = (*TURNS, "cluster.gpu=h100", "cluster.gpus_per_node=1", "parallel.tensor=1")
PART = ServerPart(mem_fraction=0.9, kv_tokens=5000, max_batch=64, prefill_tokens=2048)
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "num_visible_gpus", lambda: 0)


def configured(*settings: str) -> Config:
    return load_config(["demo"], list(settings))


def demo(*settings: str) -> Resolved:
    return resolve(configured(*settings), demo_model_path())


def command(*settings: str, has_gpu: bool = True) -> list[str]:
    run = demo(*settings)
    return sglang.command(run, replace(run.placement.on(), part=PART), 0, 1234, has_gpu=has_gpu)


def test_a_server_on_a_gpu_can_release_its_memory() -> None:
    flag = "--enable-memory-saver"
    assert command(*ONE).count(flag) == 1
    assert command(*ONE, "sglang.extra.enable_memory_saver=true").count(flag) == 1
    assert [word for word in command(*ONE) if word != flag] == command(*ONE, "rollout.placement=split")
    assert flag not in command(*ONE, has_gpu=False)
    alone = demo(*ONE)
    assert flag not in sglang.command(alone, alone.placement.on(), 0, 1234, has_gpu=True), "an evaluation"


@pytest.mark.skipif(not server_arguments(), reason="SGLang is not installed")
def test_sglang_knows_the_argument_and_the_variable() -> None:
    assert "enable_memory_saver" in server_arguments()
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    assert "SGLANG_MEMORY_SAVER_CUDA_GRAPH" in Path(spec.origin).with_name("srt").joinpath("environ.py").read_text()


@given(st.lists(st.sampled_from(["expandable_segments:True", "expandable_segments:False", "max_split_size_mb:64"])))
def test_a_server_gets_no_expandable_segments(options: list[str]) -> None:
    """torch_memory_saver does not start with them; the trainer's ranks have them."""
    kept = ",".join(options).replace("True", "False")

    def told(*settings: str, part: ServerPart | None = PART, gpus: Sequence[str] = ("0",)) -> dict[str, str]:
        run = demo(*ONE, *settings)
        return sglang.environment(run.config, replace(run.placement.on(), part=part), 0, gpus)

    with pytest.MonkeyPatch.context() as patch:
        for name in ALLOCATOR:
            patch.setenv(name, ",".join(options))
        assert [told()[name] for name in ALLOCATOR] == [kept, kept]
        split = told("rollout.placement=split")
        assert not {*ALLOCATOR} & split.keys()
        for name in ALLOCATOR:
            patch.delenv(name)
        assert told() == split | {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1", "NCCL_GRAPH_REGISTER": "0"}
        for alone in (told(part=None), told(gpus=[])):  # an evaluation, and a machine without GPUs
            assert not {"SGLANG_MEMORY_SAVER_CUDA_GRAPH", *ALLOCATOR} & alone.keys()


@pytest.mark.parametrize(
    ("placement", "told"),
    [
        ("split", r"gives this rank 72\.2\d GiB, and 2\.9\d GiB to the server on the same GPU"),
        (
            "turns",
            r"gives this rank 73\.2\d GiB while it trains, and at most 2\.9\d GiB to the server on the same GPU while "
            "that samples",
        ),
    ],
)
def test_a_rank_that_runs_out_of_memory_is_told_its_part(
    placement: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (line,) = oom._part(demo(*ONE, f"rollout.placement={placement}"))
    assert re.fullmatch(f'rollout\\.placement="{placement}" {told}', line), line


REFUSED: dict[tuple[str, ...], str] = {
    ("rollout.overlap=true", "rollout.max_staleness=4"): (
        'rollout.overlap=true with rollout.placement="turns": trainer and servers would need the memory of a GPU at '
        'the same time; set rollout.overlap=false, or rollout.placement="split"'
    ),
    ("rollout.engine=attach", 'rollout.urls=["http://127.0.0.1:1"]'): (
        'rollout.placement="turns" plans the memory of servers that the run starts, and rollout.engine="attach" names '
        "others; set"
    ),
    ("sync.channel=broadcast",): (
        'sync.channel="broadcast" with rollout.placement="turns": NCCL refuses two processes on one GPU; leave'
    ),
    ("slurm.rollout_nodes=1",): (
        'slurm.rollout_nodes=1, and with rollout.placement="turns" every node trains; set slurm.rollout_nodes=0'
    ),
    ("sglang.extra.enable_memory_saver=false",): (
        'sglang.extra.enable_memory_saver=false contradicts rollout.placement="turns": without it a server answers as '
        "if it had released its memory, and keeps it; leave it out"
    ),
    **{
        (f"sglang.extra.{setting}",): f'sglang.extra.{setting} contradicts rollout.placement="turns", whose plan'
        for setting in ("mem_fraction_static=0.5", "max_total_tokens=500")
    },
    ("cluster.gpu_memory_gib=5",): 'rollout.placement="turns": sampling needs 6.3 GiB of each GPU, and 95% of its 5.0',
    ("parallel.data=2",): "2 trainer ranks need 2 GPUs, and cluster.nodes x gpus_per_node = 1 x 1 = 1; change parallel",
}


def errors(settings: Sequence[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    code = main(["check", "demo", *settings])
    lines = capsys.readouterr().err.splitlines()
    assert code == (2 if lines else 0)
    return [line.removeprefix("bapo: ") for line in lines]


@pytest.mark.parametrize(("settings", "message"), REFUSED.items(), ids=lambda value: "-".join(value)[:40])
def test_what_cannot_take_turns_is_one_error(
    settings: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = errors([*ONE, *settings], capsys)
    assert line.startswith(message), line


ALONE: dict[str, str] = {
    "rollout.overlap=true": "rollout.overlap",
    "precision.fp8_params=true": "precision.fp8_params",
    "sync.channel=broadcast": "sync.channel",
    "slurm.rollout_nodes=1": "slurm.rollout_nodes",
    "sglang.extra.enable_memory_saver=false": "sglang.extra.enable_memory_saver",
    "sglang.extra.max_total_tokens=500": "sglang.extra.max_total_tokens",
}
HARMLESS = (
    "rollout.abort_tail=true",
    "run.standby=true",
    "checkpoint.asynchronous=true",
    "sglang.extra.enable_memory_saver=true",
    "sglang.extra.mem_fraction_static=false",
    "lora.rank=4",
    "sync.channel=disk",
)


@given(st.sets(st.sampled_from([*ALONE])), st.sets(st.sampled_from(HARMLESS)))
def test_each_reason_is_told_once_and_by_its_setting(wrong: set[str], harmless: set[str]) -> None:
    settings = [one for one in harmless if one.split("=")[0] not in {w.split("=")[0] for w in wrong}]
    run = demo(*ONE, *settings, *wrong)
    found = [*check_sharing(run)]
    assert sorted(v.settings[0] for v in found) == sorted(ALONE[one] for one in wrong)
    assert all(v.remedy and "rollout.placement" in v.settings for v in found)
    split = run.changed(
        run.config.model_copy(update={"rollout": run.config.rollout.model_copy(update={"placement": "split"})})
    )
    assert (with_turns(split) is None) == bool(wrong), "what would be refused is not proposed"
    assert with_turns(run) is None, "it takes turns already"


@pytest.mark.parametrize("engine", ["embedded", "sglang"])
@pytest.mark.parametrize("num_gpus", [0, 1])
@pytest.mark.parametrize("starts_here", [True, False])
def test_sglang_releases_no_memory_on_a_cpu(engine: str, num_gpus: int, starts_here: bool) -> None:
    run = demo(*EMBEDDED, f"rollout.engine={engine}")
    found = check_settings(run, num_gpus=num_gpus, starts_here=starts_here)
    told = [v.message for v in found if v.severity == "error" and "releas" in v.problem]
    assert told == [
        'rollout.placement="turns": SGLang cannot release memory on a CPU, and no GPU is visible; set '
        'rollout.engine="embedded"'
    ] * (engine == "sglang" and not num_gpus and starts_here)


def test_servers_of_several_ranks_are_a_warning() -> None:
    wide = (*ONE, "cluster.gpus_per_node=2", "rollout.server_tensor_parallel=2", "parallel.tensor=2")
    (found,) = check_sharing(demo(*wide))
    assert (found.severity, found.settings[0]) == ("warning", "rollout.server_tensor_parallel")
    assert not [*check_sharing(demo(*wide, "rollout.placement=split"))]


@pytest.mark.parametrize(("installed", "num_messages"), [(None, 1), ("0.0.10", 0)])
def test_the_library_that_releases_memory_must_be_there(
    installed: str | None, num_messages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(software_checks, "installed_version", lambda name: installed)
    found = [*check._check_memory_saver(demo(*ONE))]
    assert [v.severity for v in found] == ["error"] * num_messages
    assert all("torch_memory_saver" in v.problem for v in found)
    assert not [*check._check_memory_saver(demo(*ONE, "rollout.placement=split"))]
    assert not [*check._check_memory_saver(demo(*EMBEDDED))]


def test_the_demo_takes_turns_on_cpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert errors(EMBEDDED, capsys) == []
    assert errors(ONE, capsys) == []


LAYOUTS = ("parallel.tensor=1", "parallel.data=2", "parallel.pipeline=2", "parallel.tensor=2 parallel.data=2")


@given(
    st.sampled_from(LAYOUTS),
    st.booleans(),
    st.sampled_from(
        ["", "lora.rank=4", "lora.rank=4 loss.kl_coef=0.1", "loss.kl_coef=0.1", "teacher.path=x", "advantage.kind=gae"]
    ),
    st.sampled_from(["bfloat16", "float32"]),
)
def test_the_host_holds_weights_and_state_of_every_rank(layout: str, distributed: bool, extra: str, dtype: str) -> None:
    settings = [*layout.split(), f"optimizer.distributed={distributed}".lower(), *extra.split(), f"model.dtype={dtype}"]
    run = demo("rollout.placement=turns", *settings)
    p = run.config.parallel
    stages = [trainer_memory(run, stage=stage) for stage in range(p.pipeline)]
    in_all = sum(one.moved for one in stages) * p.tensor * p.data
    assert host_bytes(run) == in_all
    asynchronous = run.config.checkpoint.model_copy(update={"asynchronous": True})
    assert host_bytes(run.changed(run.config.model_copy(update={"checkpoint": asynchronous}))) == in_all
    for one in stages:
        frozen = one.reference + one.teachers
        kept = one.weights + one.optimizer + frozen
        assert kept <= one.moved <= kept + one.critic, "a critic's gradients are dropped, too"
        assert (one.moved == kept) == (one.critic == 0)
        assert 0 <= one.frozen < one.moved
        assert (one.frozen > 0) == (one.trained != one.held or frozen > 0)
        item = 2 if dtype == "bfloat16" else 4
        assert one.frozen == frozen + (one.held.total - one.trained.total) * item


def test_each_node_holds_its_own_ranks() -> None:
    """The first stage has the embedding, and the last one the output layer and the norm."""
    run = demo(*ONE, "cluster.nodes=2", "parallel.pipeline=2", "cluster.gpus_per_node=1",
               "rollout.num_servers=2", "sync.folder=/scratch")  # fmt: skip
    assert host_bytes(run) == max(trainer_memory(run, stage=stage).moved for stage in (0, 1))


def test_too_little_memory_of_the_machine_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    run = demo(*EMBEDDED, "sync.folder=/scratch")
    needed = host_bytes(run)
    pages = -(-needed // 4096)
    for num_pages, num_errors in ((pages, 0), (pages - 1, 1)):
        monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": num_pages, "SC_PAGE_SIZE": 4096}.__getitem__)
        found = [*check_host_memory(run, starts_here=True)]
        assert len(found) == num_errors
    assert re.match(
        r'rollout\.placement="turns" moves 0\.0\d GiB to the memory of each node that trains, and this machine has '
        r"0\.0\d GiB; set lora\.rank to train adapters alone, or rollout\.placement=\"split\"$",
        found[0].message,
    )
    assert found[0].settings[0] == "rollout.placement"
    assert sum(copied_bytes(demo(*EMBEDDED))) > needed, "in memory there are also two versions of the weights"


def test_a_job_asks_for_enough_memory() -> None:
    run = planned(load_config(["recipes/qwen2.5-3b-gsm8k", "algorithms/bapo", "clusters/1x1-h100-turns"]))
    assert not [*check_host_memory(run, starts_here=False)]
    less = run.config.slurm.model_copy(update={"options": ("--mem=48G",)})
    (found,) = check_host_memory(run.changed(run.config.model_copy(update={"slurm": less})), starts_here=False)
    assert 'rollout.placement="turns" moves 40.24 GiB' in found.problem
    assert found.remedy.endswith(", or ask for more")


@pytest.mark.parametrize("files", itertools.product([(), ("algorithms/lora",)], [(), ("loss.kl_coef=0.1",)]))
def test_frozen_weights_only_come_up(files: tuple[tuple[str, ...], tuple[str, ...]]) -> None:
    merged, settings = files
    run = planned(load_config(["recipes/qwen2.5-3b-gsm8k", "algorithms/bapo", *merged, "clusters/1x1-h100-turns"],
                              list(settings)))  # fmt: skip
    plan = make_plan(run)
    assert plan.up_bytes == plan.host_bytes
    assert plan.up_bytes - plan.down_bytes == plan.trainer.frozen
    assert (plan.trainer.frozen > 0) == bool(merged or settings)
    assert plan.moves_s == pytest.approx((plan.up_bytes + plan.down_bytes) / 20e9)
    alone = make_plan(planned(load_config(["recipes/qwen2.5-1.5b-gsm8k", "algorithms/bapo", "clusters/1x1-h100"])))
    assert alone.up_bytes == alone.down_bytes == alone.moves_s == 0


def test_the_plan_shows_phases_moves_and_the_hosts_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "recipes/qwen2.5-3b-gsm8k", "algorithms/bapo", "clusters/1x1-h100-turns"]) == 0
    text = capsys.readouterr().out
    rows = {name: re.search(rf"^ +{name} +(.*)$", text, re.MULTILINE) for name in ("trainer", "server", "sum")}
    trainer, server, sums = ([float(n) for n in row[1].split()[:3]] for row in rows.values() if row)
    assert "in turns   GiB on each GPU    training     pushing    sampling\n" in text
    assert sums == pytest.approx([a + b for a, b in zip(trainer, server, strict=True)], abs=0.02)
    told = re.search(r"needs for training (\S+), pushing (\S+), sampling (\S+) of 75\.1 GiB; a server holds", text)
    assert told is not None
    assert [float(one) for one in told.groups()] == pytest.approx(sums, abs=0.06)
    assert re.search(r"^time .*, moves 4\.3 s$", text, re.MULTILINE)
    assert re.search(r"^host       43 GB of each trainer node's memory, for weights and state", text, re.MULTILINE)
    assert "\nmoves      43.2 GB down from each GPU and 43.2 GB up in each step, 4.3 s at 20 GB/s, assumed\n" in text


def test_a_phase_that_does_not_fit_is_named_with_its_parts() -> None:
    def problem(*arguments: str) -> str:
        run = planned(load_config([a for a in arguments if "=" not in a], [a for a in arguments if "=" in a]))
        (found,) = check.check_memory(run)
        return found.message

    card = ("algorithms/bapo", "clusters/1x1-h100-turns")
    training = problem("recipes/r1-distill-qwen-7b-8k", *card)
    assert training.startswith('rollout.placement="turns": training needs 161.5 GiB of each GPU, and 95% of its 79.1 ')
    assert "the server 1.9 (context 1.9); set lora.rank=16 to train adapters alone, use a model of" in training
    node = ("algorithms/lora", "clusters/1x8-h100-turns")
    pushing = problem("recipes/r1-distill-qwen-32b-8k", "algorithms/bapo", *node)
    assert re.search(
        r'"turns": pushing weights needs 80\.\d GiB .*: the trainer 17\.\d \(weights 7\.\d, buckets', pushing
    )


def test_a_run_without_a_gpu_is_refused_before_it_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "demo", *EMBEDDED, "rollout.engine=sglang", f"run.dir={tmp_path / 'runs'}"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "SGLang cannot release memory on a CPU" in line]
    assert not [*tmp_path.iterdir()]
