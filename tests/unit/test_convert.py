"""`bapo convert`: round trips, types, refusals, and writing that fails or is killed at any byte."""

import json
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from bapo_megatron.checkpoint.folder import FORMAT, WEIGHT, seal
from bapo_megatron.cli import main
from bapo_megatron.convert import convert
from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf import writer
from bapo_megatron.hf.reader import INDEX, SINGLE
from tests.distributed import HANG_S, in_new_process
from tests.hf_models import save_model

COMPANIONS = {"tokenizer.json": '{"version": "1.0"}', "merges.txt": "a b", "chat_template.jinja": "{{ x }}"}
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Make a Hugging Face folder with companions, and a file that does not belong to it."""
    folder = tmp_path / "source"
    save_model("qwen3-biases", folder, num_hidden_layers=2)
    for name, text in COMPANIONS.items():
        (folder / name).write_text(text)
    (folder / "training_args.bin").write_bytes(b"not ours")
    return folder


def weights_of(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a Hugging Face folder, or of a training checkpoint at version 0."""
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    return {name.removeprefix(f"{WEIGHT}/"): tensor for name, tensor in tensors.items()}


def assert_equal_weights(one: Path, other: Path) -> None:
    left, right = weights_of(one), weights_of(other)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def change_config(folder: Path, **change: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))


def test_a_folder_goes_through_training_and_back_unchanged(source: Path, tmp_path: Path) -> None:
    training, back = tmp_path / "new" / "training", tmp_path / "back"
    assert main(["convert", str(source), str(training), "--to", "training", "--max-file-gb", "0.000005"]) == 0
    assert len(list(training.glob("*.safetensors"))) > 3
    assert main(["convert", str(training), str(back)]) == 0
    assert_equal_weights(source, back)
    for name, text in COMPANIONS.items():
        assert (back / name).read_text() == text
    assert sorted(p.name for p in back.iterdir()) == sorted(
        [*COMPANIONS, SINGLE, "config.json", "generation_config.json"]
    )
    assert (back / SINGLE).stat().st_mode == (back / "config.json").stat().st_mode
    _, info = transformers.AutoModelForCausalLM.from_pretrained(back, output_loading_info=True)
    assert not any(info.values()), info


def test_an_export_keeps_what_is_neither_weights_nor_for_a_trainer(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The list says what is left out: a file of a kind that nobody thought of is kept."""
    monkeypatch.setattr(writer, "_MAX_COMPANION_BYTES", 1000)
    kept = ["LICENSE", "NOTICE", "README.md", "modeling_x.py", "additional_chat_templates/tool_use.jinja", "odd.thing"]
    left_out = ["pytorch_model.bin.index.json", "adapter_config.json", "optimizer.pt", ".gitattributes", "model.gguf"]
    left_out += [".cache/x", "__pycache__/x.pyc", "original/consolidated.00.pth", "original/params.json"]
    left_out += ["checkpoint-5/config.json", "checkpoint-5/trainer_state.json", "deep/deeper/file.txt"]
    large = ["film.mp4", "data/rows.jsonl"]
    for name in (*kept, *left_out):
        (source / name).parent.mkdir(exist_ok=True, parents=True)
        (source / name).write_text("{}")
    for name in large:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("x" * 1001)
    (source / "tokenizer.json").write_text("{" + " " * 1000 + "}")
    (source / "gone.txt").symlink_to("/nope")
    convert(source, tmp_path / "training", to="training")
    convert(tmp_path / "training", tmp_path / "back")
    for target in ("training/hf_config", "back"):
        root = tmp_path / target
        found = {str(file.relative_to(root)) for file in root.rglob("*") if file.is_file()} - {SINGLE}
        assert found == {*kept, *COMPANIONS, "config.json", "generation_config.json"}
    warnings = [record.message for record in caplog.records if "not copied" in record.message]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"data, film.mp4 of {source}: over 64 MiB or not readable")


def test_bfloat16_survives_a_stay_in_float32(source: Path, tmp_path: Path) -> None:
    """A trainer saves its float32 weights; converting back gives the original bits."""
    convert(source, tmp_path / "bf16", dtype="bfloat16")
    convert(tmp_path / "bf16", tmp_path / "fp32", dtype="float32")
    summary = convert(tmp_path / "fp32", tmp_path / "again", dtype="bfloat16")
    assert summary.dtypes == ("float32",)
    assert_equal_weights(tmp_path / "bf16", tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["dtype"] == "bfloat16"
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again").dtype == torch.bfloat16


def test_a_value_that_the_type_cannot_hold_is_named(source: Path, tmp_path: Path) -> None:
    weights = weights_of(source)
    weights[UP][0, 0] = 1e6
    save_file(weights, source / SINGLE)
    with pytest.raises(CheckpointError, match=rf"{re.escape(UP)} of .* once converted to float16, holds nan or inf"):
        convert(source, tmp_path / "target", dtype="float16")
    assert not (tmp_path / "target").exists()


def test_validation_alone_writes_nothing(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(source.parent.rglob("*"))
    assert main(["convert", str(source)]) == 0
    num_parameters = sum(weight.numel() for weight in weights_of(source).values())
    assert capsys.readouterr().out == (
        f"qwen3, 2 layers, {num_parameters:,} parameters in {len(weights_of(source))} tensors, float32: "
        "names, shapes and values are in order\n"
    )
    assert sorted(source.parent.rglob("*")) == before


def test_a_run_is_converted_at_its_latest_checkpoint(source: Path, tmp_path: Path) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    with pytest.raises(CheckpointError, match="without a checkpoint yet"):
        convert(tmp_path / "run")
    step = checkpoints / "step-000007"
    convert(source, step / "learner", to="training")
    (step / "state.json").write_text(seal({"format": FORMAT, "step": 7}))
    (checkpoints / "latest").write_text("step-000007")
    for i, place in enumerate((tmp_path / "run", step, step / "learner")):
        convert(place, tmp_path / f"target-{i}")
        assert_equal_weights(source, tmp_path / f"target-{i}")
    with pytest.raises(CheckpointError, match="training checkpoint already"):
        convert(step, tmp_path / "other", to="training")


def remove_tensor(folder: Path) -> None:
    weights = weights_of(folder)
    del weights[UP]
    save_file(weights, folder / SINGLE)


def add_tensor(folder: Path) -> None:
    save_file(weights_of(folder) | {"model.stray": torch.ones(1)}, folder / SINGLE)


def reshape_tensor(folder: Path) -> None:
    weights = weights_of(folder)
    save_file(weights | {UP: weights[UP].T.contiguous()}, folder / SINGLE)


def spoil_tensor(folder: Path) -> None:
    weights = weights_of(folder)
    weights[UP][3, 2] = float("nan")
    save_file(weights, folder / SINGLE)


def cut_file(folder: Path) -> None:
    os.truncate(folder / SINGLE, (folder / SINGLE).stat().st_size - 1)


def make_index_disagree(folder: Path) -> None:
    (folder / SINGLE).rename(folder / "1.safetensors")
    weight_map = dict.fromkeys(weights_of(folder), "1.safetensors")
    del weight_map[UP]
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (remove_tensor, f"1 missing: {UP}"),
        (add_tensor, f"1 unexpected: model.stray ({SINGLE})"),
        (reshape_tensor, f"1 of another shape: {UP} ({SINGLE}) is [24, 20], config.json says [20, 24]"),
        (spoil_tensor, f"{UP} in @/{SINGLE} holds nan or infinity"),
        (cut_file, f"cannot read @/{SINGLE}"),
        (make_index_disagree, f"@/1.safetensors holds {UP}, which {INDEX} does not place there"),
        (lambda folder: change_config(folder, model_type="mamba"), "'mamba' is not supported"),
        (
            lambda folder: change_config(folder, attention_bias=False),
            "8 unexpected: model.layers.0.self_attn",
        ),
        (lambda folder: (folder / "config.json").unlink(), "@ is neither a Hugging Face folder (no config.json) nor"),
        (lambda folder: (folder / "config.json").write_text("{"), "@/config.json is not valid JSON"),
        (lambda folder: (folder / SINGLE).unlink(), "@ holds neither"),
    ],
)
def test_bad_sources_are_one_message_and_exit_code_2(
    spoil: Callable[[Path], None], message: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(source)
    for arguments in ([], [str(tmp_path / "target")], [str(tmp_path / "target"), "--to", "training"]):
        assert main(["convert", str(source), *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("bapo: ")
        assert message.replace("@", str(source)) in line
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_an_existing_target_is_left_alone(source: Path, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    convert(source, tmp_path / "target")
    for target in (tmp_path / "target", source, source / "config.json"):
        with pytest.raises(CheckpointError, match="exists: remove it, or name another folder"):
            convert(source, target)
    assert_equal_weights(source, tmp_path / "target")
    with pytest.raises(CheckpointError, match="cannot write"):
        convert(source, source / "config.json" / "target")


def test_a_torn_or_foreign_training_checkpoint_is_named(source: Path, tmp_path: Path) -> None:
    training = tmp_path / "training"
    convert(source, training, to="training")
    index = training / "index.json"
    whole = index.read_text()
    for text, message in (
        (whole[:-1], "index.json is torn"),
        (whole.replace('"version": 0', '"version": 1'), "index.json is torn: its xxh3_128"),
        (resealed(whole, lambda body: body.update(format=9)), "has format 9, this version reads"),
        (resealed(whole, lambda body: body["facts"]["model"].update(hidden_size=25)), "hidden_size is 25, not 24"),
    ):
        index.write_text(text)
        with pytest.raises(CheckpointError, match=message):
            convert(training)
    index.write_text(whole)
    (file,) = training.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-7] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"{re.escape(str(file))} is torn: its xxh3_128"):
        convert(training)
    index.unlink()
    with pytest.raises(CheckpointError, match=r"index\.json is missing"):
        convert(training)


def resealed(text: str, change: Callable[[dict], None]) -> str:
    body = json.loads(text)
    del body["xxh3_128"]
    change(body)
    return seal(body)


def test_a_checkpoint_of_the_first_format_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "old" / "hf").mkdir(parents=True)
    (tmp_path / "old" / "state.json").write_text('{"format": 1, "version": 3}')
    with pytest.raises(CheckpointError, match="has format 1, this version reads format 2"):
        convert(tmp_path / "old")


def in_child(prepare: Callable[[], None], action: Callable[[], object]) -> int:
    """Return the exit code of `action` in a forked process: 2 for a CheckpointError, minus the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(int(HANG_S))
            torch.set_num_threads(1)  # a forked process waits forever for threads that torch started before
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            prepare()
            action()
        except CheckpointError:
            os._exit(2)
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def limit_file_size(num_bytes: int, reaction: signal.Handlers) -> Callable[[], None]:
    """Return a function that makes writes beyond `num_bytes` of a file fail with an error, or kill the process."""

    def prepare() -> None:
        signal.signal(signal.SIGXFSZ, reaction)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))

    return prepare


def die_before_file_operation(number: int) -> Callable[[], None]:
    """Return a function that ends the process without clean-up before its `number`-th file operation."""

    def prepare() -> None:
        left = number

        def hook(event: str, arguments: tuple) -> None:
            nonlocal left
            if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod"):
                left -= 1
                if left < 0:
                    os._exit(9)

        sys.addaudithook(hook)

    return prepare


def check_what_is_left(source: Path, target: Path) -> None:
    """Check for no target or a complete one; leftovers are refused unless complete, and the next attempt works."""
    if target.exists():
        assert_equal_weights(source, target)
    leftovers = [path for path in target.parent.iterdir() if path not in (source, target)]
    assert [path.name for path in leftovers] in ([], [f".writing-{target.name}"])
    for path in leftovers:
        try:
            convert(path)
        except CheckpointError:
            continue
        assert_equal_weights(source, path)


@pytest.mark.parametrize("to", ["hf", "training"])
def test_a_full_disk_is_one_error_and_leaves_nothing(to: str, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    largest = (source / SINGLE).stat().st_size
    for num_bytes in [0, 1, 8, 9, *range(100, largest, largest // 20), largest - 1]:
        prepare = limit_file_size(num_bytes, signal.SIG_IGN)
        assert in_child(prepare, lambda: convert(source, target, to=to)) == 2  # type: ignore[arg-type]
        assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("to", ["hf", "training"])
def test_being_killed_at_any_byte_leaves_no_half_folder(to: str, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    largest = (source / SINGLE).stat().st_size
    for num_bytes in [0, 1, 8, 9, *range(100, largest, largest // 20), largest - 1]:
        prepare = limit_file_size(num_bytes, signal.SIG_DFL)
        assert in_child(prepare, lambda: convert(source, target, to=to)) == -signal.SIGXFSZ  # type: ignore[arg-type]
        assert not target.exists()
        check_what_is_left(source, target)
    convert(source, target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]


@pytest.mark.parametrize("to", ["hf", "training"])
def test_dying_before_any_file_operation_leaves_no_half_folder(to: str, source: Path, tmp_path: Path) -> None:
    def action() -> None:
        convert(source, target, to=to, max_file_bytes=10_000)  # type: ignore[arg-type]

    deaths = 0
    for number in range(1000):
        target = tmp_path / f"target-{number}" / "target"
        code = in_child(die_before_file_operation(number), action)
        if target.parent.exists():
            check_what_is_left(source, target)
        if code == 0:
            break
        assert code == 9
        deaths += 1
    assert deaths > 20
    assert target.exists()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory in use from /proc")
def test_conversion_takes_the_memory_of_one_file_not_of_the_model(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "vocab_size": 4000}
    save_model("llama3-tied", tmp_path / "source", **sizes, num_attention_heads=8)
    weight_bytes = (tmp_path / "source" / SINGLE).stat().st_size
    assert weight_bytes > 90e6

    limit = weight_bytes + int(30e6)  # the source is memory-mapped
    said = in_new_process(convert_within, limit, tmp_path / "source", tmp_path / "target", [int(1e9), int(10e6)])
    assert "memory" in said[0], "all in one file"
    assert said[1] == ""
    assert_equal_weights(tmp_path / "source", tmp_path / "target")


def convert_within(limit_bytes: int, source: Path, target: Path, sizes: list[int]) -> list[str]:
    """Convert into files of these sizes, with `limit_bytes` more memory than now in use; return the errors."""
    torch.set_num_threads(1)  # more threads would count with their stacks, one per core
    said = []
    for max_file_bytes in sizes:
        status = Path("/proc/self/status").read_text()
        num_bytes = int(re.search(r"VmData:\s+(\d+) kB", status)[1]) * 1024 + limit_bytes  # type: ignore[index]
        resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, resource.RLIM_INFINITY))
        try:
            convert(source, target, max_file_bytes=max_file_bytes)
            said.append("")
        except (MemoryError, RuntimeError) as error:
            said.append(str(error))
    return said
