"""A run that trains adapters: where its model may be, and what reads its checkpoints."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from bapo_megatron import cli
from bapo_megatron.assets import demo_model_path
from bapo_megatron.convert import hf_folder
from bapo_megatron.errors import CheckpointError, ConfigError
from bapo_megatron.hf.adapters import Adapters
from bapo_megatron.hf.peft_config import read_adapters
from bapo_megatron.runtime.files import read_jsonl
from tests.distributed import HANG_S
from tests.hang import PATIENT
from tests.integration.killable import Attempt, Engine, small_run
from tests.integration.learner_reference import merged_float64

ADAPTERS = Adapters(8, 16.0, ("q_proj", "down_proj"))
LORA = ("lora.rank=8", "lora.alpha=16", 'lora.targets=["q_proj","down_proj"]', "parallel.tensor=1", "optimizer.lr=0.1")


def weights_of(run: Path) -> dict[str, Tensor]:
    with hf_folder(run) as (folder, version):
        assert version
        return load_file(folder / "model.safetensors")


def responses(source: Path, output: Path) -> list[object]:
    command = ["eval", str(source), "demo", *PATIENT, "-n", "2", "--limit", "3", "--output", str(output)]
    assert cli.main(command) == 0
    return [row["response"] for row in read_jsonl(output / "responses.jsonl")]


@pytest.mark.slow
def test_a_run_follows_its_model_to_another_folder_and_no_other_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(demo_model_path(), tmp_path / "model")

    def attempt(model: Path, num_steps: int, *settings: str) -> Attempt:
        settings = (*LORA, *settings, f"model.path={model}", f"train.num_steps={num_steps}")
        return Attempt(small_run(tmp_path, "run", *settings), engine)

    engine = Engine(tmp_path / "engine")
    try:
        with attempt(tmp_path / "model", 1) as first:
            first.finish()
        run, moved = first.run_dir, (tmp_path / "model").rename(tmp_path / "moved")
        with pytest.raises(CheckpointError, match=r"in .*/model, which is not there"), hf_folder(run):
            pass
        with pytest.raises(ConfigError, match=r"(?s)started with other settings.*lora\.rank"):
            attempt(moved, 2, "lora.rank=4")
        with attempt(moved, 2) as second:
            second.finish()
        assert [row["step"] for row in read_jsonl(run / "metrics.jsonl")] == [1, 2]

        other = tmp_path / "other"
        shutil.copytree(moved, other)
        weights = load_file(moved / "model.safetensors")
        save_file(weights | {"lm_head.weight": 2 * weights["lm_head.weight"]}, other / "model.safetensors")
        with attempt(other, 3) as third:
            for rank in third.ranks:
                rank.join(HANG_S)
            assert [rank.exitcode for rank in third.ranks] == [2]
            (line,) = third.errors().splitlines()
        assert f"adapters of the weights that were in {moved}, and those in {other} differ" in line
    finally:
        engine.kill()

    merged = weights_of(run)
    assert {name for name, one in merged.items() if not one.equal(weights[name])} == {
        name for name in weights if name.endswith(("q_proj.weight", "down_proj.weight"))
    }
    assert cli.main(["convert", str(run), str(tmp_path / "merged")]) == 0
    for name, one in load_file(tmp_path / "merged" / "model.safetensors").items():
        assert one.equal(merged[name]), name
    assert cli.main(["convert", str(run), str(tmp_path / "peft"), "--to", "peft"]) == 0
    assert read_adapters(tmp_path / "peft") == ADAPTERS
    for name, exact in merged_float64(moved, tmp_path / "peft", ADAPTERS).items():
        assert (merged[name] - exact).norm() < 2e-7 * exact.norm(), name
    of_run, of_merged = responses(run, tmp_path / "one"), responses(tmp_path / "merged", tmp_path / "two")
    assert of_run == of_merged
    assert of_run != responses(moved, tmp_path / "three")
    assert json.loads((tmp_path / "peft" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(moved)
