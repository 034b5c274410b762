"""`bapo init`: its files pass the check, on the machine that they are written for."""

import json
import math
import os
import re
import shutil
import tomllib
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron import cli
from bapo_megatron.assets import demo_model_path
from bapo_megatron.config.load import load_config, load_tables
from bapo_megatron.config.schema import Config
from bapo_megatron.config.schema_loss import ClipBoundConfig
from bapo_megatron.errors import UserError
from bapo_megatron.hf.shape import hf_tensors, model_shape
from bapo_megatron.machine.gpus import FULL, GIB, GPUS
from bapo_megatron.machine.shared_gpu import shared_gpu
from bapo_megatron.preflight import starter
from bapo_megatron.preflight.check import violations_of
from bapo_megatron.preflight.known_models import KNOWN_MODELS
from bapo_megatron.preflight.plan import make_plan, planned, step_balance, with_choices
from bapo_megatron.preflight.starter import Hardware, write_config
from bapo_megatron.preflight.suggest import FASTER
from bapo_megatron.resolved import resolve
from tests.distributed import HANG_S

CPU = Hardware(0, "", 0.0, 64.0)
PLAIN = {"prompt": "3+5*2=", "answer": "3+5=1,1*2=2,"}
ROWS = {
    "plain": PLAIN,
    "gsm8k": {"question": "3+5", "answer": "so\n#### 8"},
    "math": {"problem": "3+5", "answer": "8"},
    "humaneval": {"prompt": "def f(): ...", "test": "def check(f): ...", "entry_point": "f"},
}


def machine(count: int, name: str = "NVIDIA H100 80GB HBM3", gib: float = 79.1) -> Hardware:
    return Hardware(count, name, gib, 1000.0)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(PLAIN) + "\n")
    return file


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """Return a function that makes a folder for a known model, with the demo's tokenizer and hollow weights."""

    def make(name: str, hf_config: dict[str, Any] | None = None) -> str:
        hf_config = hf_config or KNOWN_MODELS[name]
        folder = tmp_path / name
        folder.mkdir()
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / file).write_bytes((demo_model_path() / file).read_bytes())
        (folder / "config.json").write_text(json.dumps(hf_config))
        header: dict[str, Any] = {}
        end = 0
        for tensor, size in hf_tensors(model_shape(hf_config)).items():
            start, end = end, end + 2 * math.prod(size)
            header[tensor] = {"dtype": "BF16", "shape": size, "data_offsets": [start, end]}
        written = json.dumps(header).encode()
        (folder / "model.safetensors").write_bytes(len(written).to_bytes(8, "little") + written)
        os.truncate(folder / "model.safetensors", 8 + len(written) + end)  # a hole takes no space
        return str(folder)

    return make


@pytest.mark.parametrize("format_name", ROWS)
def test_the_format_is_recognised_and_the_check_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], format_name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(json.dumps(ROWS[format_name]) + "\n")
    assert cli.main(["init", "demo", "rows.jsonl"]) == 0
    shown = re.fullmatch(r"first prompt:\n(.*)\n(data .*)\n(.*)\n", capsys.readouterr().out, re.DOTALL)
    assert shown is not None
    first, facts, written = shown.groups()
    assert first.startswith("  <unk>" if format_name == "humaneval" else "  3+5")
    assert facts.startswith(f"data     format {format_name}\njudge    ")
    assert written == "demo.toml is written; next: bapo train demo.toml"
    table = tomllib.loads(Path("demo.toml").read_text())
    assert table["data"]["format"] == format_name
    assert table["run"]["name"] == "demo"
    assert cli.main(["check", "demo.toml", f"reward.timeout_s={HANG_S}"]) == 0


def test_lengths_follow_the_prompts(tmp_path: Path, data: Path) -> None:
    data.write_text(json.dumps(PLAIN | {"prompt": "1+" * 50 + "1="}) + "\n")
    config = load_config([write_config("demo", data, tmp_path / "new.toml", CPU).file])
    assert (config.data.max_prompt_tokens, config.rollout.max_response_tokens) == (128, 256)
    assert config.run.name == "new"


def test_bounds_are_wide_and_fixed_and_one_word_from_bapo(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = write_config("demo", data, data.with_name("new.toml"), CPU)
    config = load_config([written.file])
    assert (config.bapo.scope, config.bapo.low.start, config.bapo.high.start) == ("fixed", 0.9, 3.0)
    assert 'With bapo.preset="default" they adapt' in written.file.read_text()
    assert load_config([written.file], ["bapo.preset=default"]).bapo == ClipBoundConfig()
    assert cli.main(["check", str(written.file), "loss.name=gspo", f"reward.timeout_s={HANG_S}"]) == 0
    assert "bapo." not in "".join(capsys.readouterr())


@pytest.mark.parametrize("setting", ["loss.name=bapo", "loss.name=gspo", "bapo.rho0=0.4", "bapo.preset=paper"])
def test_a_loss_of_the_users_choice_stays(data: Path, setting: str) -> None:
    written = write_config("demo", data, data.with_name("new.toml"), CPU, [setting])
    found, asked = load_config([written.file]), load_config([], [setting])
    assert (found.loss, found.bapo) == (asked.loss, asked.bapo)
    assert "adapt" not in written.file.read_text()


@pytest.mark.parametrize("num_tokens", [255, 256, 257, 302, 511])
def test_a_prompt_that_leaves_room_is_not_refused(tmp_path: Path, data: Path, num_tokens: int) -> None:
    data.write_text(json.dumps(PLAIN | {"prompt": "1" * num_tokens}) + "\n")
    config = load_config([write_config("demo", data, tmp_path / "new.toml", CPU).file])
    assert config.data.max_prompt_tokens == max(256, num_tokens)
    assert config.rollout.max_response_tokens == 512 - max(256, num_tokens)  # the demo reads 512


def test_a_pack_holds_the_longest_sequence(tmp_path: Path, data: Path) -> None:
    folder = tmp_path / "long"
    shutil.copytree(demo_model_path(), folder)
    shape = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(shape | {"max_position_embeddings": 4096}))
    data.write_text(json.dumps(PLAIN | {"prompt": "1" * 1900}) + "\n")
    written = write_config(str(folder), data, tmp_path / "new.toml", CPU)
    assert load_config([written.file]).train.max_tokens_per_microbatch == 2048 + 256
    assert not written.told


@pytest.mark.parametrize(
    ("name", "count", "kind", "gib"),
    [
        ("Qwen2.5-Math-7B", 8, "NVIDIA H100 80GB HBM3", 79.1),
        ("Qwen2.5-Math-7B", 4, "NVIDIA H200", 139.8),
        ("OctoThinker-3B-Long-Zero", 2, "NVIDIA B200", 178.0),
        ("OctoThinker-3B-Long-Zero", 4, "NVIDIA A100-SXM4-80GB", 79.1),
        ("OctoThinker-3B-Long-Zero", 8, "NVIDIA A100-SXM4-40GB", 39.4),
        ("OctoThinker-3B-Long-Zero", 8, "NVIDIA L40S", 44.4),
        ("OctoThinker-3B-Long-Zero", 8, "NVIDIA L40", 44.4),
    ],
)
def test_layouts_fit_the_gpus(
    tmp_path: Path, data: Path, model: Any, name: str, count: int, kind: str, gib: float
) -> None:
    here = machine(count, kind, gib)
    config = load_config([write_config(model(name), data, tmp_path / "new.toml", here).file])
    run = resolve(config)
    assert run.placement.num_gpus == count
    assert config.parallel.size == run.placement.num_server_gpus == count, "all GPUs train and serve"
    assert config.rollout.engine == "sglang"
    assert config.model.dtype == "bfloat16"
    assert config.cluster.gpu == here.gpu
    if here.gpu:
        assert (config.cluster.gpu_memory_gib or GPUS[here.gpu].memory_gib) == gib
        assert not [v.message for v in violations_of(config, elsewhere=True) if v.severity == "error"]
    else:
        assert config.train.recompute is not None, "no plan decides later"


def written_for(hardware: Hardware, model: str, data: Path, *settings: str) -> tuple[Config, str]:
    """Return the configuration, and what it says of the GPUs: in the file and on the terminal."""
    written = write_config(model, data, data.with_name("new.toml"), hardware, settings)
    text = written.file.read_text()
    written.file.unlink()
    (line,) = [line for line in text.splitlines() if line.startswith("# GPUs: ")]
    assert f"\nGPUs     {line.removeprefix('# GPUs: ').removesuffix('.')}" in str(written)
    config = load_tables({"": tomllib.loads(text)})
    errors = [v.message for v in violations_of(config, elsewhere=True) if v.severity == "error"]
    assert not errors or hardware.gpu is None, errors  # without a cluster the check is for this machine
    return config, written.gpus


def test_of_several_gpus_the_faster_placement_is_written(data: Path, model: Any) -> None:
    here, folder = machine(8), model("Qwen2.5-Math-7B")
    config, use = written_for(here, folder, data)
    told = re.fullmatch(
        r"trainer and servers share all of them, with an expected step of (\d+) s; 4 \+ 4 GPUs take (\d+) s, "
        r"turns take (\d+) s",
        use,
    )
    assert told is not None
    assert float(told[1]) < FASTER * float(told[2])
    assert FASTER * float(told[1]) <= float(told[3])
    assert config.rollout.placement == "split"
    turns, use = written_for(here, folder, data, "rollout.placement=turns")
    assert use == f"trainer and servers take turns on all of them, with an expected step of {told[3]} s"
    assert turns.takes_turns
    halves, use = written_for(here, folder, data, "rollout.placement=separate")
    assert use == f"4 + 4 for trainer and servers, with an expected step of {told[2]} s"
    assert halves.parallel.size == resolve(halves).placement.num_server_gpus == 4
    for one, step_s in ((config, told[1]), (halves, told[2]), (turns, told[3])):
        run = planned(one)
        of_step = step_balance(one, make_plan(run))
        assert of_step is not None
        assert round(of_step.step_s) == int(step_s)


def test_of_equally_fast_placements_the_separate_one_is_written(data: Path, model: Any) -> None:
    """Overlapped, trainer and servers with GPUs of their own work at the same time. Turns cannot overlap."""
    settings = ["rollout.overlap=true", "rollout.max_staleness=4", "loss.name=grpo"]
    config, use = written_for(machine(2), model("Qwen2.5-0.5B-Instruct"), data, *settings)
    assert config.rollout.placement == "separate"
    told = re.fullmatch(
        r"1 \+ 1 for trainer and servers, with an expected step of (.*) s; shared ones take (.*) s", use
    )
    assert told is not None
    assert FASTER * float(told[1]) <= float(told[2])


def test_a_placement_that_does_not_fit_is_named(data: Path, model: Any) -> None:
    _, use = written_for(machine(8, "NVIDIA B200", 178.0), model("DeepSeek-R1-Distill-Qwen-32B"), data)
    assert "; 4 + 4 GPUs do not fit, turns take " in use
    cards, folder = machine(8, "NVIDIA GeForce RTX 4090", 23.5), model("OctoThinker-3B-Long-Zero")
    config, use = written_for(cards, folder, data)
    assert config.rollout.placement == "turns"
    assert re.search("; 4 \\+ 4 GPUs take .* s, shared ones take .* s$", use)
    config, use = written_for(replace(cards, memory_gib=20.0), folder, data)
    assert use.endswith(", turns do not fit"), "the machine's memory is too small"
    assert config.rollout.placement == "split"
    with pytest.raises(UserError, match=r'does not fit 8 x .* 4090: no layout fits with rollout.placement="split"$'):
        written_for(cards, model("Qwen3-32B"), data, "rollout.placement=split")


def test_a_step_that_is_too_short_to_plan_decides_nothing(data: Path) -> None:
    config, use = written_for(machine(2), "demo", data)
    assert (config.rollout.placement, use) == ("separate", "1 + 1 for trainer and servers")


def use_of(config: Config, gib: float, how: str = "") -> str:
    """Return what must be said of a GPU that trainer and server share."""
    run = planned(config)
    shared = shared_gpu(with_choices(run), gib)
    assert shared.fits
    have = f"{FULL * gib:.1f} GiB"
    if config.takes_turns:
        most = max(sum(both) for both in shared.phases.values())
        return f"trainer and server take turns on it{how}, and need at most {most / GIB:.1f} of {have}"
    needs = f"{shared.trainer.total / GIB:.1f} and {shared.server_bytes / GIB:.1f}"
    return f"trainer and server share it{how}, and need {needs} of {have}"


def planned_step_s(config: Config, placement: str) -> float:
    """Return the expected time of a step with another placement; infinite if it does not fit."""
    rollout = config.rollout.model_copy(update={"placement": placement})
    changed = config.model_copy(update={"rollout": rollout})
    plan = make_plan(planned(changed))
    of_step = step_balance(changed, plan)
    assert of_step is not None
    return of_step.step_s if plan.fits else math.inf


@pytest.mark.parametrize(
    ("name", "kind", "gib", "placement", "chunk"),
    [
        ("Qwen2.5-1.5B-Instruct", "NVIDIA H100 80GB HBM3", 79.1, "split", None),
        ("Qwen2.5-3B-Instruct", "NVIDIA H100 80GB HBM3", 79.1, "turns", None),
        ("Qwen2.5-0.5B-Instruct", "NVIDIA GeForce RTX 4090", 23.5, "turns", None),
        ("Qwen2.5-0.5B-Instruct", "NVIDIA L4", 22.0, "turns", None),
        ("Qwen2.5-0.5B-Instruct", "NVIDIA A100-SXM4-40GB", 39.4, "split", None),
        ("Qwen2.5-0.5B-Instruct", "NVIDIA L40", 44.4, "split", None),
        ("Qwen2.5-1.5B-Instruct", "NVIDIA L40", 44.4, "turns", None),
    ],
)
def test_trainer_and_server_share_one_gpu(
    data: Path, model: Any, name: str, kind: str, gib: float, placement: str, chunk: int | None
) -> None:
    here = machine(1, kind, gib)
    config, use = written_for(here, folder := model(name), data)
    assert (config.rollout.engine, config.rollout.placement) == ("sglang", placement)
    assert (config.parallel.size, config.rollout.num_servers, config.model.dtype) == (1, 1, "bfloat16")
    assert (config.cluster.gpu, config.lora.rank) == (here.gpu, None)
    assert config.train.logprob_chunk_tokens == chunk
    if here.gpu:
        assert use == use_of(config, gib)
        split_s, turns_s = (planned_step_s(config, one) for one in ("split", "turns"))
        assert placement == ("turns" if turns_s < FASTER * split_s else "split")
    apart, use = written_for(machine(1, kind, gib), folder, data, "rollout.placement=separate")
    assert (apart.rollout.engine, use) == ("embedded", "the trainer has it")


@pytest.mark.parametrize(("kind", "gib"), [("NVIDIA GeForce RTX 4090", 23.5), ("NVIDIA L4", 22.0)])
def test_smaller_chunks_of_logits_leave_room_for_responses(data: Path, model: Any, kind: str, gib: float) -> None:
    settings = ["rollout.placement=split"]
    config, use = written_for(machine(1, kind, gib), model("Qwen2.5-0.5B-Instruct"), data, *settings)
    assert (config.rollout.placement, config.train.logprob_chunk_tokens) == ("split", 512)
    assert use == use_of(config, gib)


def test_turns_need_the_machines_memory_and_no_overlap(data: Path, model: Any) -> None:
    """3B has 40 GiB of weights and state."""
    folder, here = model("Qwen2.5-3B-Instruct"), machine(1)
    config, use = written_for(replace(here, memory_gib=40.0), folder, data)
    assert (config.rollout.placement, config.lora.rank) == ("split", 16)
    assert "share it with LoRA" in use
    overlapped = ("rollout.overlap=true", "rollout.max_staleness=4", "loss.name=grpo")
    config, _ = written_for(here, folder, data, *overlapped)
    assert (config.rollout.placement, config.lora.rank) == ("split", 16)


@pytest.mark.parametrize(
    ("name", "kind", "gib", "placement"),
    [
        ("Qwen2.5-Math-7B", "NVIDIA H100 80GB HBM3", 79.1, "turns"),
        ("Qwen2.5-3B-Instruct", "NVIDIA GeForce RTX 4090", 23.5, "turns"),
        ("Qwen2.5-1.5B-Instruct", "NVIDIA GeForce RTX 4090", 23.5, "split"),
        ("Qwen2.5-Math-7B", "NVIDIA H100 80GB HBM3", 79.1, "split"),
    ],
)
def test_a_gpu_that_does_not_hold_all_state_trains_adapters(
    data: Path, model: Any, name: str, kind: str, gib: float, placement: str
) -> None:
    here = machine(1, kind, gib)
    asked = [f"rollout.placement={placement}"] * (placement == "split")
    config, use = written_for(here, folder := model(name), data, *asked)
    assert (config.rollout.placement, config.lora.rank, config.optimizer.lr) == (placement, 16, 1e-5)
    run = planned(config)
    told = re.fullmatch(
        f"{use_of(config, gib, ' with LoRA')}; to train all weights, they would need (.*) at least",
        use,
    )
    assert told is not None
    without = run.changed(config.model_copy(update={"lora": type(config.lora)()}))
    assert abs(float(told[1]) - make_plan(without).trainer_needs / GIB) < 1
    assert float(told[1]) > FULL * gib
    own, use = written_for(here, folder, data, "lora.rank=8", "optimizer.lr=3e-5", *asked)
    assert (own.lora.rank, own.optimizer.lr) == (8, 3e-5)
    assert use == use_of(own, gib)


def test_a_gpu_that_does_not_hold_both_is_the_trainers(data: Path, model: Any) -> None:
    """Models with linear attention can have no adapters."""
    hf_config = deepcopy(KNOWN_MODELS["Qwen3.5-9B"])
    hf_config["text_config"] |= {"num_hidden_layers": 7, "layer_types": None}
    here, folder = machine(1), model("Qwen3.5-9B", hf_config)
    config, use = written_for(here, folder, data)
    assert (config.rollout.engine, config.rollout.placement, config.cluster.gpu) == ("embedded", "separate", None)
    assert config.lora.rank is None
    assert re.match(
        r"the trainer has it, and the engine samples on CPUs, which is slow; "
        r'rollout.placement="turns": training needs .* GiB of each GPU, and 95% of its 79.1 is 75.1',
        use,
    )
    with pytest.raises(UserError, match=r"a trainer rank and a server need .*; use a model of at most about 2\."):
        written_for(here, folder, data, "rollout.placement=split")


def test_a_gpu_that_does_not_hold_the_trainer_is_refused(data: Path, model: Any) -> None:
    here = machine(1, "NVIDIA GeForce RTX 4090", 23.5)
    with pytest.raises(
        UserError,
        match=r"does not fit 1 x NVIDIA GeForce RTX 4090: the trainer alone needs .* GiB, and 95% of the GPU is 22.3 "
        r'GiB; use a smaller model, or more GPUs; rollout.placement="turns": training needs',
    ):
        written_for(here, model("Qwen2.5-Math-7B"), data)
    assert not data.with_name("new.toml").exists()


def test_of_several_gpus_adapters_are_the_last_resort(data: Path, model: Any) -> None:
    cards = machine(8, "NVIDIA GeForce RTX 4090", 23.5)
    config, use = written_for(cards, folder := model("Qwen2.5-Math-7B"), data)
    assert (config.lora.rank, config.optimizer.lr) == (16, 1e-5)
    assert "with LoRA, because training all weights does not fit" in use
    config, use = written_for(machine(8), folder, data)
    assert config.lora.rank is None
    assert "LoRA" not in use


def test_what_does_not_fit_is_refused(tmp_path: Path, data: Path, model: Any) -> None:
    folder = model("Qwen3-32B")
    with pytest.raises(UserError, match=r"does not fit 2 x NVIDIA L40S: a trainer rank needs .* GiB"):
        write_config(folder, data, tmp_path / "new.toml", machine(2, "NVIDIA L40S", 44.4))
    with pytest.raises(UserError, match=r"does not fit this machine: the trainer needs .* GiB and the engine"):
        write_config(folder, data, tmp_path / "new.toml", CPU)
    assert not (tmp_path / "new.toml").exists()


def test_mistakes_leave_no_file(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(starter, "this_hardware", lambda: CPU)
    Path("bad.jsonl").write_text('{"foo": 1}\n')
    Path("long.jsonl").write_text(json.dumps(PLAIN | {"prompt": "1+" * 600 + "1="}) + "\n")
    for arguments, message in (
        (["demo", "none.jsonl"], "there is no file"),
        (["demo", "bad.jsonl"], "give data.fields.prompt=COLUMN data.fields.answer=COLUMN, out of 'foo'"),
        (["demo", "long.jsonl"], "the longest prompt has 1202 tokens, which leaves no room"),
        (["models/none", str(data)], "there is no folder"),
        (["demo", str(data), "-o", "no/such/folder.toml"], "cannot write no/such/folder.toml"),
        (["demo", str(data), "-o", "bad.jsonl"], "bad.jsonl exists: give another name with -o"),
        (["demo"], "the following arguments are required: DATA"),
    ):
        assert cli.main(["init", *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.glob("*.toml")) == []


def test_all_that_is_missing_is_said_at_once(tmp_path: Path) -> None:
    file = tmp_path / "units.csv"
    file.write_text("id,task,wanted\n1,3 km in m?,3000\n")
    with pytest.raises(UserError) as caught:
        write_config(str(tmp_path / "none"), file, tmp_path / "x.toml", CPU, ["reward.kind=no_module:judge"])
    model, data, judge = str(caught.value).split("\n")
    assert "there is no folder" in model
    assert "give data.fields.prompt=COLUMN data.fields.answer=COLUMN, out of 'id', 'task', 'wanted'" in data
    assert 'reward.kind="no_module:judge": importing no_module failed' in judge


def test_wrong_settings_are_said_with_what_else_is_wrong(tmp_path: Path, data: Path) -> None:
    settings = ["optimizer.lr=fast", "optimizer.lrr=1", "bare", "reward.kind=no_module:judge"]
    (tmp_path / "x.toml").touch()
    for output, refusal in (("x.toml", "x.toml exists"), ("none/x.toml", "cannot write")):
        with pytest.raises(UserError) as caught:
            write_config(str(tmp_path / "none"), data.with_name("rows.jsnl"), tmp_path / output, CPU, settings)
        lines = str(caught.value).split("\n")
        assert len(lines) == 7
        for part in (
            "override 'bare' is not of the form",
            "did you mean optimizer.lr?",
            "optimizer.lr must be a number",
            refusal,
            "model.path = ",
            "DATA: there is no file",
            "importing no_module failed",
        ):
            assert sum(part in line for line in lines) == 1, part
    with pytest.raises(UserError) as caught:
        write_config("demo", data, tmp_path / "y.toml", CPU, ["data.fields.promt=a", "train.num_steps=0"])
    assert len(str(caught.value).split("\n")) == 2, "the data are not read with other columns than were meant"


@pytest.mark.parametrize("max_turns", [1, 2, 4, 30])
def test_answers_of_an_environment_fit_the_model(tmp_path: Path, data: Path, max_turns: int) -> None:
    settings = ["environment.kind=calculator", f"environment.max_turns={max_turns}"]
    write_config("demo", data, tmp_path / "new.toml", CPU, settings)
    config = load_config([tmp_path / "new.toml"], [])
    assert config.longest_sequence <= 512
    assert config.environment.max_answer_tokens == {1: 256, 2: 224, 4: 74, 30: 7}[max_turns]


def test_a_file_in_another_folder_holds_there_too(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Paths in a configuration are relative to the working folder; in a file for another folder, they are absolute."""
    monkeypatch.setattr(starter, "this_hardware", lambda: CPU)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(demo_model_path(), "policy")
    shutil.copy(data, "rows.jsonl")
    Path("exp").mkdir()
    assert cli.main(["init", "policy", "rows.jsonl", "-o", "exp/mine.toml"]) == 0
    assert cli.main(["init", "policy", "rows.jsonl", "-o", "here.toml"]) == 0
    paths = [tomllib.loads(Path(name).read_text()) for name in ("exp/mine.toml", "here.toml")]
    here = [(table["model"]["path"], table["data"]["path"]) for table in paths]
    assert here == [(str(tmp_path / "policy"), str(tmp_path / "rows.jsonl")), ("policy", "rows.jsonl")]
    monkeypatch.chdir("exp")
    assert cli.main(["check", "mine.toml", "reward.kind=chains"]) == 0
    assert "bapo:" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "prompt", "answer", "worth_a_look"),
    [
        ({"question": "3+5", "options": ["A)7", "B)8"], "correct": "B", "rationale": "r"}, "question", "correct", 1),
        (
            {"question": "3+5", "answer": None, "label": "8", "other": {"source": "Exam of 2010"}},
            "question",
            "label",
            0,
        ),
        ({"problem": "3+5", "solution": "8", "type": "Sums of two (easy)"}, "problem", "solution", 0),
        ({"query": "3+5", "other": {"body": "Ann asks Bob."}, "correct_answer": 8}, "query", "correct_answer", 1),
    ],
)
def test_columns_of_published_files_are_found(
    tmp_path: Path, row: dict[str, Any], prompt: str, answer: str, worth_a_look: int
) -> None:
    """The first three are as AQuA, GAOKAO and Minerva have them."""
    file = tmp_path / "x.jsonl"
    file.write_text((json.dumps(row) + "\n") * 4)
    written = write_config("demo", file, tmp_path / "x.toml", CPU)
    assert written.table["data"]["fields"] == {"prompt": prompt, "answer": answer}
    assert [told.severity for told in written.told].count("warning") == worth_a_look


def test_a_verdict_is_no_answer(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text(json.dumps({"question": "3+5", "response": "8", "correct": True}))
    with pytest.raises(UserError, match="field 'prompt' is missing"):
        write_config("demo", file, tmp_path / "x.toml", CPU)
