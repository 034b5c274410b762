"""Models with linear and full attention on paper: config.json, tensor names, conversion, sizes and refusals."""

import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from bapo_megatron.config.schema import Config
from bapo_megatron.convert import convert
from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.facts import ModelFacts
from bapo_megatron.hf.reader import SINGLE
from bapo_megatron.hf.shape import (
    LinearAttention,
    hf_tensors,
    layer_entries,
    load_hf_config,
    model_shape,
    rotary_frequencies,
)
from bapo_megatron.learner.fit import check_split
from bapo_megatron.machine.gpus import GIB
from bapo_megatron.machine.parameters import model_parameters
from bapo_megatron.machine.server_memory import DEFAULT_MEM_FRACTION, server_memory
from bapo_megatron.preflight.known_models import KNOWN_MODELS
from tests.hf_models import make_model_config, save_model
from tests.resolving import shaped

QWEN_9B, QWEN_27B = (KNOWN_MODELS[name]["text_config"] for name in ("Qwen3.5-9B", "Qwen3.5-27B"))


def published(text: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of a folder with a vision tower."""
    return {"model_type": "qwen3_5", "text_config": text, "vision_config": {"depth": 2}, "tie_word_embeddings": False}


@pytest.mark.parametrize(("text", "total", "num_tensors"), [(QWEN_9B, 8.95e9, 427), (QWEN_27B, 26.9e9, 851)])
def test_parameters_are_as_the_names_of_the_models_say(text: dict[str, Any], total: float, num_tensors: int) -> None:
    shape = model_shape(published(text))
    assert model_parameters(shape) == pytest.approx(total, rel=2e-3)
    assert len(hf_tensors(shape)) == num_tensors
    assert [layer.linear is None for layer in shape.layers] == [False, False, False, True] * (shape.num_layers // 4)
    assert shape.linear == LinearAttention(16, text.get("linear_num_value_heads", 32), 128, 128, 4)
    assert (shape.head_dim, shape.rotary_dim, shape.num_kv_heads) == (256, 64, 4)
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(**text)
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    expected = {name: tuple(tensor.shape) for name, tensor in theirs.named_parameters()}
    assert hf_tensors(model_shape(text)) == expected
    assert hf_tensors(model_shape(config.to_dict())) == expected, "transformers saves layer_types, without the interval"


def test_names_of_a_published_folder_have_its_prefix() -> None:
    inside, outside = hf_tensors(model_shape(published(QWEN_9B))), hf_tensors(model_shape(QWEN_9B))
    assert list(inside) == [name.replace("model.", "model.language_model.", 1) for name in outside]
    assert "lm_head.weight" in inside


def test_the_text_is_as_its_own_settings_say() -> None:
    """transformers ignores the same keys outside text_config."""
    config = published(QWEN_9B) | {"rms_norm_eps": 1e-3, "full_attention_interval": 2, "num_hidden_layers": 8}
    theirs = transformers.AutoConfig.for_model(**config).text_config
    assert (theirs.rms_norm_eps, theirs.num_hidden_layers) == (1e-6, 32)
    assert model_shape(config) == model_shape(published(QWEN_9B))


def test_positions_outside_of_text_config_are_refused() -> None:
    """A user who adds YaRN there, where neither transformers nor SGLang reads it, would not get it."""
    yarn = {"rope_type": "yarn", "factor": 4.0}
    with pytest.raises(CheckpointError, match="rope_scaling outside text_config would not be read: move it into"):
        model_shape(published(QWEN_9B) | {"rope_scaling": yarn})


def test_without_a_partial_rotary_factor_the_whole_head_is_rotated() -> None:
    """null is not the family's default: transformers then takes 1."""
    assert model_shape(QWEN_9B | {"partial_rotary_factor": None, "rope_parameters": None}).rotary_dim == 256


def test_only_the_first_dimensions_of_a_head_are_rotated() -> None:
    scaled = {"rope_type": "yarn", "rope_theta": 1e7, "factor": 4.0, "original_max_position_embeddings": 32}
    for config in (make_model_config("qwen3.5"), make_model_config("qwen3.5", rope_parameters=scaled)):
        rotary = transformers.models.qwen3_5.modeling_qwen3_5.Qwen3_5TextRotaryEmbedding(config)
        frequencies, factor = rotary_frequencies(model_shape(config.to_dict()))
        assert frequencies.shape == (2,)
        assert torch.equal(frequencies, rotary.inv_freq)
        assert factor == rotary.attention_scaling


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_output_gate": None}, "attn_output_gate=null is not supported: full attention needs its gate"),
        ({"attn_output_gate": False}, "attn_output_gate=false is not supported: full attention needs its gate"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid' is not supported: the gate of linear attention"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype='bfloat16' is not supported: the state of linear attention"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act='gelu_pytorch_tanh' is not supported with linear attention"),
        ({"hidden_act": "relu"}, "hidden_act='relu' is not supported; choose from silu"),
        ({"attention_bias": True}, "attention_bias=true is not supported"),
        ({"linear_num_key_heads": 5}, "linear_num_value_heads=32 cannot share linear_num_key_heads=5"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim=0 is not a positive whole number"),
        (
            {"partial_rotary_factor": 0.255, "rope_parameters": None},
            "partial_rotary_factor=0.255 does not give an even num",
        ),
        ({"partial_rotary_factor": 0.005, "rope_parameters": None}, "partial_rotary_factor=0.005 does not give"),
        ({"rope_parameters": [1]}, "rope_parameters=[1] is not an object"),
        ({"full_attention_interval": None}, "full_attention_interval=null is not a positive number"),
        ({"full_attention_interval": 0}, "full_attention_interval=0 is not a positive number"),
        ({"full_attention_interval": "4"}, 'full_attention_interval="4" is not a positive number'),
        ({"layer_types": 5}, "layer_types=5 is not a list"),
        ({"layer_types": ["linear_attention"] * 31}, "layer_types has 31 values, but num_hidden_layers=32"),
        (
            {"layer_types": ["linear_attention", "full_attention"] * 16},
            "layer_types do not have full attention in every n-th layer alone, as full_attention_interval=4 would give",
        ),
        (
            {"layer_types": ["full_attention", *["linear_attention"] * 31], "full_attention_interval": None},
            "layer_types do not have full attention in every n-th layer alone, as full_attention_interval=1 would give",
        ),
        (
            {"layer_types": [*["linear_attention"] * 31, "sliding_attention"]},
            "layer_types has 'sliding_attention', which is not supported; choose from linear_attention, full_attention",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "dequantise"),
    ],
)
def test_what_is_not_built_is_refused_with_its_setting(change: dict[str, Any], message: str) -> None:
    for config in (QWEN_9B | change, published(QWEN_9B | change)):
        with pytest.raises(CheckpointError, match=re.escape(message)):
            model_shape(config)


def test_another_hybrid_and_contradictions_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"'qwen3_next' is not supported, because .* by key head; the families"):
        model_shape(published(QWEN_9B) | {"model_type": "qwen3_next"})
    with pytest.raises(CheckpointError, match=r"config\.json has no text_config, which describes the language model"):
        model_shape(QWEN_9B | {"model_type": "qwen3_5"})
    with pytest.raises(CheckpointError, match="tie_word_embeddings=false contradicts text_config: make them equal"):
        model_shape(published(QWEN_9B | {"tie_word_embeddings": True}))


def test_the_interval_may_be_missing() -> None:
    """transformers saves layer_types alone; with neither, every fourth layer has full attention."""
    plain = {key: value for key, value in QWEN_9B.items() if key != "full_attention_interval"}
    third = [*["linear_attention"] * 2, "full_attention"] * 10 + ["linear_attention"] * 2
    assert model_shape(plain) == model_shape(QWEN_9B)
    assert model_shape(plain | {"layer_types": third}) == model_shape(QWEN_9B | {"full_attention_interval": 3})
    only_linear = model_shape(plain | {"layer_types": ["linear_attention"] * 32})
    assert all(layer.linear is not None for layer in only_linear.layers)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"parallel": {"tensor": 3}},
            "parallel.tensor=3 does not divide 16 attention heads, 4 key-value heads, 16 linear key heads, 32 linear "
            "value heads; parallel.tensor can be 1, 2 or 4",
        ),
        ({"parallel": {"context": 2}}, "parallel.context=2 is not supported with linear attention, whose state runs"),
        ({"advantage": {"kind": "gae"}}, 'advantage.kind="gae": a critic is not supported with linear attention'),
        ({"precision": {"fp8": "hybrid"}}, 'precision.fp8="hybrid" is not supported with linear attention'),
    ],
)
def test_layouts_and_settings_that_are_refused(settings: dict[str, Any], message: str) -> None:
    config = Config.model_validate(settings)
    (violation,) = check_split(config, ModelFacts(published(QWEN_9B)), "model.path")
    assert message in violation.message


def test_flops_of_a_linear_layer_do_not_grow_with_the_length() -> None:
    """They are two per weight, and 1.1 % more for the rule; a full layer also has its squares."""
    shape = model_shape(QWEN_27B)
    linear, full = (replace(shape, layers=(shape.layers[number],)) for number in (0, 3))
    assert linear.forward_flops(10, 10**6, 0) == linear.forward_flops(10, 0, 0)
    assert full.forward_flops(10, 10**6, 0)[0] - full.forward_flops(10, 0, 0)[0] == 2 * 24 * 256 * 10**6
    for one, rule in ((linear, 0.0113), (full, 0.0)):
        weights = sum(entry.num_values(1) for entry in layer_entries(one, one.layers[0]))
        assert one.forward_flops(1, 0, 0)[0] == pytest.approx(2 * weights * (1 + rule), rel=1e-4)


def test_a_server_divides_its_memory_between_states_and_keys() -> None:
    """A request holds five times 50 MB of state and 1 MB for convolutions in 24 layers."""
    config, shape = Config.model_validate({"model": {"dtype": "bfloat16"}}), model_shape(QWEN_9B)
    memory = server_memory(shaped(config, shape), 80)
    assert memory.kv_bytes_per_token == 8 * 2 * 4 * 256 * 2
    assert memory.state_bytes == 24 * (4 * 32 * 128 * 128 + 2 * 8192 * 3)
    assert memory.state_cache == pytest.approx(0.9 * memory.kv_cache)
    assert memory.weights + memory.kv_cache + memory.state_cache == int(DEFAULT_MEM_FRACTION * 80 * GIB)

    rollout = {"max_response_tokens": 1000, "max_concurrent_requests": 1000, "prompts_per_step": 1000}
    many = {"model": {"dtype": "bfloat16"}, "data": {"max_prompt_tokens": 1000}, "rollout": rollout}
    by_states = server_memory(shaped(Config.model_validate(many), shape), 80)
    assert by_states.concurrency == by_states.num_states // 5 < by_states.kv_tokens // 2000
    few_states = many | {"sglang": {"extra": {"mamba_full_memory_ratio": 9.0}}}
    by_tokens = server_memory(shaped(Config.model_validate(few_states), shape), 80)
    assert by_tokens.concurrency == by_tokens.kv_tokens // 2000

    whole = server_memory(shaped(config, model_shape({**KNOWN_MODELS["Qwen3-32B"], "model_type": "qwen3"})), 80)
    assert (whole.state_bytes, whole.state_cache) == (0, 0)


def test_the_agreed_facts_tell_layers_apart() -> None:
    shape = model_shape(make_model_config("qwen3.5").to_dict())
    facts = shape.to_json()
    assert facts["linear_layers"] == [0, 1, 3, 4]
    assert facts["linear"]["num_value_heads"] == 6
    assert facts["output_gate"] is True
    assert json.loads(json.dumps(facts)) == facts


def make_published(folder: Path, num_layers: int = 3) -> dict[str, torch.Tensor]:
    """Write a tiny folder in the form of the published ones, with tensors that stay unread; return all of them."""
    save_model("qwen3.5", folder, num_hidden_layers=num_layers)
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(published(text) | {"dtype": "float32"}))
    weights = {
        name.replace("model.", "model.language_model.", 1): weight
        for name, weight in load_file(folder / SINGLE).items()
    }
    weights |= {"mtp.fc.weight": torch.zeros(3), "mtp.norm.weight": torch.ones(2)}
    weights |= {"model.visual.blocks.0.attn.qkv.weight": torch.zeros(2, 2)}
    save_file(weights, folder / SINGLE)
    return weights


def test_conversion_keeps_every_bit_of_the_text_and_says_what_it_leaves_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = make_published(tmp_path / "source")
    caplog.set_level(logging.WARNING)
    convert(tmp_path / "source", tmp_path / "training", to="training")
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == (
        f"{tmp_path / 'source'} holds 3 tensors that are left out, as only text is trained: model.visual.*, mtp.*"
    )
    convert(tmp_path / "training", tmp_path / "back")
    after = load_file(tmp_path / "back" / SINGLE)
    assert {*before} - {*after} == {name for name in before if "mtp." in name or "visual" in name}
    assert all(torch.equal(before[tensor], after[tensor]) for tensor in after)
    assert load_hf_config(tmp_path / "back") == load_hf_config(tmp_path / "source")
    _, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info.values()), info


def test_an_export_in_another_type_says_so_in_both_places(tmp_path: Path) -> None:
    make_published(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "half", dtype="bfloat16")
    written = json.loads((tmp_path / "half" / "config.json").read_text())
    assert (written["dtype"], written["text_config"]["dtype"]) == ("bfloat16", "bfloat16")


def test_a_foreign_tensor_is_still_unexpected(tmp_path: Path) -> None:
    weights = make_published(tmp_path)
    save_file(weights | {"model.layers.0.mlp.up_proj.weight": torch.zeros(20, 24)}, tmp_path / SINGLE)
    with pytest.raises(CheckpointError, match=r"1 unexpected: model\.layers\.0\.mlp\.up_proj\.weight"):
        convert(tmp_path)
