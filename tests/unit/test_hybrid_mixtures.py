"""Qwen3.5-MoE on paper: both forms of its folders, names, conversion, sizes and refusals."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from bapo_megatron.config.schema import Config
from bapo_megatron.convert import convert
from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.facts import ModelFacts
from bapo_megatron.hf.reader import SINGLE, HFReader
from bapo_megatron.hf.shape import Experts, hf_tensors, load_hf_config, model_shape
from bapo_megatron.learner.fit import check_replay, check_split
from bapo_megatron.machine.parameters import active_parameters, model_parameters
from bapo_megatron.preflight.known_models import KNOWN_MODELS
from tests.hf_models import save_model

WHOLE = KNOWN_MODELS["Qwen3.5-35B-A3B"]
TEXT = WHOLE["text_config"]


def saved(folder: Path) -> dict[str, Tensor]:
    """Save a model of three layers with its experts one by one; return its weights as published."""
    model = save_model("qwen3.5-moe", folder, num_hidden_layers=3)
    return dict(model.state_dict())


def test_sizes_are_as_the_name_says_and_names_as_transformers_has_them() -> None:
    shape = model_shape(WHOLE)
    assert model_parameters(shape) == 34_660_610_688
    assert active_parameters(shape) == 34_660_610_688 - 40 * 248 * 3 * 2048 * 512
    assert shape.experts == Experts(256, 8, 512, normalised=True, shared_ffn_size=512)
    assert shape.num_full_layers == 10
    assert shape.ffn_sizes == [512]
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**TEXT))
    sizes = {name: tuple(tensor.shape) for name, tensor in theirs.named_parameters()}
    fused = {name: size for name, size in sizes.items() if ".experts." in name}
    ours = hf_tensors(model_shape(TEXT))
    assert {name: size for name, size in ours.items() if ".experts." not in name} == {
        name: size for name, size in sizes.items() if name not in fused
    }
    assert fused["model.layers.39.mlp.experts.gate_up_proj"] == (256, 1024, 2048)
    assert ours["model.layers.39.mlp.experts.255.up_proj.weight"] == (512, 2048)
    inside = hf_tensors(shape)
    assert "model.language_model.layers.39.mlp.experts.255.up_proj.weight" in inside
    assert len(inside) == len(ours) == len(sizes) - len(fused) + 40 * 256 * 3


@pytest.mark.parametrize("is_stacked", [False, True])
def test_both_forms_are_read_and_the_published_one_is_written(is_stacked: bool, tmp_path: Path) -> None:
    weights = saved(source := tmp_path / "source")
    if is_stacked:
        save_file(weights, source / SINGLE)
    assert ("model.layers.0.mlp.experts.down_proj" in load_file(source / SINGLE)) == is_stacked
    convert(source, tmp_path / "training", to="training")
    convert(tmp_path / "training", tmp_path / "back", max_file_bytes=20_000)
    after = {name: one for file in (tmp_path / "back").glob("*.safetensors") for name, one in load_file(file).items()}
    assert after.keys() == weights.keys()
    assert all(torch.equal(after[name], weights[name]) for name in after)
    assert load_hf_config(tmp_path / "back") == load_hf_config(source)
    _, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info.values()), info


def test_a_slice_of_a_stack_is_read_as_of_single_experts(tmp_path: Path) -> None:
    weights = saved(tmp_path)
    save_file(weights, tmp_path / SINGLE)
    shape = model_shape(load_hf_config(tmp_path))
    with HFReader(tmp_path) as read:
        read.check(shape)
        up = read("model.layers.2.mlp.experts.4.up_proj.weight", (slice(3, 9), slice(5, 20)))
        down = read("model.layers.2.mlp.experts.5.down_proj.weight")
    assert torch.equal(up, weights["model.layers.2.mlp.experts.gate_up_proj"][4, 14 + 3 : 14 + 9, 5:20])
    assert torch.equal(down, weights["model.layers.2.mlp.experts.down_proj"][5])


def test_a_published_folder_keeps_its_names(tmp_path: Path) -> None:
    weights = saved(source := tmp_path / "source")
    named = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in weights.items()}
    save_file(named | {"mtp.layers.0.mlp.experts.0.up_proj.weight": torch.zeros(2, 2)}, source / SINGLE)
    text = json.loads((source / "config.json").read_text())
    whole = {"model_type": "qwen3_5_moe", "tie_word_embeddings": False, "text_config": text}
    (source / "config.json").write_text(json.dumps(whole))
    convert(source, tmp_path / "back")
    after = load_file(tmp_path / "back" / SINGLE)
    assert after.keys() == named.keys()
    assert all(torch.equal(after[name], named[name]) for name in named)


def without(weights: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in weights.items() if not name.endswith(names)}


STACK = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda w: without(w, STACK), r"12 missing: model\.layers\.1\.mlp\.experts\.0\.gate_proj\.weight, "),
        (
            lambda w: w | {STACK: w[STACK][:, :26].clone()},
            r"of another shape: .*gate_up_proj .* is \[6, 26, 24\], config.json",
        ),
        (lambda w: w | {STACK: w[STACK].to(torch.int8)}, r"of a type that is not supported: .*gate_up_proj .* is I8"),
        (
            lambda w: w | {"model.layers.1.mlp.experts.3.up_proj.weight": torch.zeros(14, 24)},
            r"11 missing: .*1 unexpected: model\.layers\.1\.mlp\.experts\.gate_up_proj",
        ),
        (lambda w: w | {STACK: w[STACK] * torch.nan}, r"experts\.0\.gate_proj.weight in .* holds nan or infinity"),
    ],
    ids=["missing", "shape", "type", "both", "nan"],
)
def test_stacks_that_do_not_fit_are_refused_by_name(spoil: Any, message: str, tmp_path: Path) -> None:
    save_file(spoil(saved(tmp_path)), tmp_path / SINGLE)
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob=false is not supported: the shares of the chosen experts need a"),
        ({"norm_topk_prob": None}, "norm_topk_prob=null is n"),
        ({"num_local_experts": 256}, "num_local_experts=256 is not supported: only models without it are"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size=0 is not a positive whole number"),
        ({"n_shared_experts": 1}, "n_shared_experts=1: shared experts are not supported"),
        ({"num_experts_per_tok": 257}, "num_experts_per_tok=257 is more than num_experts=256"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok=1 with norm_topk_prob=true is not supported"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers=[0] makes these layers dense"),
        ({"attn_output_gate": False}, "attn_output_gate=false is not supported"),
        ({"full_attention_interval": 0}, "full_attention_interval=0 is not a positive number"),
    ],
)
def test_what_is_not_built_is_refused_with_its_setting(change: dict[str, Any], message: str) -> None:
    for config in (TEXT | change, {"model_type": "qwen3_5_moe", "text_config": TEXT | change}):
        with pytest.raises(CheckpointError, match=re.escape(message)):
            model_shape(config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"parallel": {"tensor": 4, "sequence": True}}, "parallel.tensor=4 does not divide 2 key-value heads"),
        ({"parallel": {"tensor": 2}}, "experts with parallel.tensor=2 need parallel.sequence=true"),
        ({"parallel": {"context": 2}}, "parallel.context=2 is not supported with linear attention"),
        ({"parallel": {"expert": 6, "data": 6}}, "parallel.expert=6 does not divide 256 experts"),
        ({"advantage": {"kind": "gae"}}, 'advantage.kind="gae": a critic is not supported with experts'),
        ({"precision": {"fp8": "hybrid"}}, 'precision.fp8="hybrid" is not supported with experts'),
    ],
)
def test_layouts_and_settings_that_are_refused_once(settings: dict[str, Any], message: str) -> None:
    (violation,) = check_split(Config.model_validate(settings), ModelFacts(WHOLE), "model.path")
    assert message in violation.message


def test_its_routes_are_replayed() -> None:
    config = Config.model_validate({"model": {"replay_routes": True}})
    assert list(check_replay(config, ModelFacts(WHOLE))) == []
    (stream,) = ModelFacts(WHOLE).streams
    assert (stream.shape, stream.dtype) == ((40, 8), "int16")
