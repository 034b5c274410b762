"""Reading config.json, and whether a layout can hold the model."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bapo_megatron.config.schema import Config
from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.facts import ModelFacts
from bapo_megatron.hf.families import FAMILIES, LACKING
from bapo_megatron.hf.shape import hf_tensors, load_hf_config, model_shape, rotary_frequencies
from bapo_megatron.learner.fit import check_split
from tests.distributed import HANG_S
from tests.hf_models import MODELS, make_model_config
from tests.model_folders import compare, embedded

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}


def problems(hf_config: dict[str, Any], **parallel: Any) -> list[str]:
    config = Config.model_validate({"parallel": parallel})
    return [v.message for v in check_split(config, ModelFacts(hf_config), "model.path")]


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (3, 1), (1, 2), (3, 5)])
def test_layouts_that_fit(tensor: int, pipeline: int) -> None:
    assert problems(CONFIG, tensor=tensor, pipeline=pipeline) == []


def test_heads_that_do_not_divide_are_named_with_an_alternative() -> None:
    (problem,) = problems(CONFIG, tensor=2)
    assert problem == (
        "parallel.tensor=2 does not divide 9 attention heads, 3 key-value heads; parallel.tensor can be 1 or 3"
    )


def test_all_problems_come_at_once() -> None:
    found = problems(CONFIG, tensor=2, pipeline=4)
    assert len(found) == 2
    assert found[1] == (
        "parallel.pipeline=4 does not divide 30 layers; parallel.pipeline can be 1, 2, 3, 5, 6, 10, 15 or 30, or set "
        "parallel.last_stage_layers=6"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "mixtral"},
            "'mixtral' is not supported; the families are gemma, granite, llama, mistral, olmo2, qwen2, qwen3, "
            "qwen3_5, qwen3_5_moe, qwen3_5_moe_text, qwen3_5_text, qwen3_moe, smollm3; docs",
        ),
        (
            {"model_type": "olmo3"},
            "'olmo3' is not supported, because it needs sliding windows, and a rotation",
        ),
        ({"model_type": ["llama"]}, "is not supported"),
        ({"model_type": None}, "None is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; choose from silu, gelu_pytorch_tanh"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope scaling 'dynamic' is not supported"),
        ({"rope_scaling": {"type": "yarn"}}, "rope scaling 'yarn' needs the positive number 'factor'"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope scaling ['yarn'] is not supported"),
        ({"rope_theta": 0}, "rope scaling 'default' needs the positive number 'rope_theta', not 0"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 5000.0}},
            "transformers reads rope_scaling alone: rope_theta=5000.0 of rope_parameters would be lost",
        ),
        ({"rope_scaling": {"type": "dynamic"}, "rope_parameters": {"rope_type": "default"}}, "rope scaling 'dynamic'"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0}, "original_max_position_embeddings": None},
            "rope scaling 'yarn' has original_max_position_embeddings=null, which is not a positive number",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": "32"}},
            "rope scaling 'yarn' has beta_fast=\"32\", which is not a positive number",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": 0}}, "truncate=0, which is neither true nor"),
        ({"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 2.0}}, "needs another rope_theta than 1"),
        ({"rope_theta": 10**400}, "needs the positive number 'rope_theta'"),
        ({"attention_bias": "false"}, 'attention_bias="false" is neither true nor false'),
        ({"tie_word_embeddings": None}, "tie_word_embeddings=null is neither true nor false"),
        ({"per_layer_config": {"1": {"num_key_value_heads": 1}}}, "per_layer_config, which makes layers differ"),
        ({"text_config": {"hidden_size": 64}}, "text_config is not supported with model_type 'llama'"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 value, but num_hidden_layers=30"),
        ({"model_type": "gemma", "head_dim": None}, "head_dim=null is not a positive whole number"),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 30}, "layer_types is not supported"),
        ({"model_type": "mistral", "sliding_window": None, "layer_types": None}, "layer_types is not supported"),
        ({"model_type": "qwen2", "max_window_layers": None}, "max_window_layers=null is not a number"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps=NaN is not a positive number"),
        ({"eos_token_id": [2, 1.5]}, "eos_token_id=[2, 1.5] is neither the number of a token nor a list of them"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_parameters of layers that differ are",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported with model_type 'llama', only 1"),
        ({"hidden_size": None}, "hidden_size=null is not a positive whole number"),
        ({"hidden_size": "576"}, 'hidden_size="576" is not a positive whole number'),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 is not a positive whole number"),
        ({"is_causal": False}, "is_causal=false is not supported: only models with is_causal=true"),
        ({"is_causal": None}, "is_causal=null is not supported"),
        ({"hidden_size": 567}, "head_dim=63 of hidden_size=567 and num_attention_heads=9 is odd, and cannot"),
        ({"layer_types": ["chunked_attention"] * 30}, "layer_types has 'chunked_attention': this attention is not"),
        ({"num_key_value_heads": 2}, "num_attention_heads=9 is not a multiple of num_key_value_heads=2"),
        ({"head_dim": 63}, "head_dim=63 is odd, and cannot"),
        ({"quantization_config": {"quant_method": "gptq"}}, "dequantise"),
        (
            {"layer_types": ["sliding_attention"] * 30, "sliding_window": 64},
            "layer_types has 'sliding_attention': sliding-window attention is not supported; set \"full_attention\" "
            "for all layers in config.json, which changes nothing for sequences of at most 64 tokens",
        ),
        (
            {"model_type": "qwen2", "use_sliding_window": True},
            "use_sliding_window=true: sliding-window attention is not",
        ),
        (
            {"model_type": "mistral", "sliding_window": 16},
            "sliding_window=16: sliding-window attention is not supported; set sliding_window=null in config.json, "
            "which changes nothing for sequences of at most 16 tokens",
        ),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16, "max_window_layers": None},
            "max_window_layers=null is not a number",
        ),
        ({"model_type": "granite", "logits_scaling": 0}, "logits_scaling=0 is not a positive number"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers has 1 value, but num_hidden_layers=30"),
        ({"model_type": "smollm3", "no_rope_layers": "1"}, 'no_rope_layers="1" is not a list of 0 and 1'),
        ({"model_type": "smollm3", "no_rope_layer_interval": 0}, "no_rope_layer_interval=0 is not a positive number"),
        (
            {"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 16},
            "sliding-window attention is not supported",
        ),
        (
            {"model_type": "gemma", "use_bidirectional_attention": True},
            "use_bidirectional_attention=true is not supported: only models without it are, as with "
            "use_bidirectional_attention=false",
        ),
    ],
)
def test_unsupported_models_are_refused(change: dict[str, Any], message: str) -> None:
    assert message in problems(CONFIG | change)[0]
    with pytest.raises(CheckpointError, match=re.escape(message)):
        model_shape(CONFIG | change)


def test_gemma_means_the_tanh_form_by_gelu() -> None:
    """transformers' GemmaConfig replaces the value, which the official files have."""
    assert model_shape(CONFIG | {"model_type": "gemma", "hidden_act": "gelu"}).activation == "gelu_pytorch_tanh"


def test_the_error_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=re.escape(f"{tmp_path / 'config.json'}: model_type 'gpt2'")):
        model_shape({"model_type": "gpt2"}, tmp_path)


def test_a_window_that_no_layer_uses_is_accepted() -> None:
    assert problems(CONFIG | {"use_sliding_window": True}) == []  # Llama has no such option
    qwen = CONFIG | {"model_type": "qwen2", "use_sliding_window": True}
    assert problems(qwen | {"max_window_layers": 30}) == []
    assert problems(qwen | {"max_window_layers": 29}) != []
    mistral = CONFIG | {"model_type": "mistral"}
    assert problems(mistral | {"sliding_window": None}) == []
    assert problems(mistral) != []  # 4096 in transformers, if config.json leaves it out


@pytest.mark.parametrize("family", FAMILIES)
def test_where_a_config_is_silent_transformers_is_believed(family: str, tmp_path: Path) -> None:
    """transformers and our code read the smallest config.json of each family."""
    sizes = {"vocab_size": 11, "hidden_size": 64, "intermediate_size": 20, "num_hidden_layers": 2}
    silent: dict[str, Any] = {"model_type": family, "num_attention_heads": 32, "sliding_window": None, **sizes}
    if FAMILIES[family].prefix != "model.":
        silent = {"model_type": family, "text_config": silent | {"model_type": f"{family}_text"}}
    (tmp_path / "config.json").write_text(json.dumps(silent))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path).get_text_config()
    ours = model_shape(silent)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 64 // 32)
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.activation == theirs.hidden_act
    assert ours.tied_embeddings == theirs.tie_word_embeddings
    assert ours.max_positions == theirs.max_position_embeddings
    assert ours.rope == theirs.rope_parameters
    assert ours.eos_token_ids == frozenset([] if theirs.eos_token_id is None else [theirs.eos_token_id])


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"type": "linear", "factor": 2.0},
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        {"rope_type": "yarn", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ],
)
def test_files_from_before_transformers_5_mean_the_same(scaling: dict[str, Any] | None, tmp_path: Path) -> None:
    old = CONFIG | {"rope_scaling": scaling, "torch_dtype": "bfloat16", "eos_token_id": [7, 8]}
    (tmp_path / "config.json").write_text(json.dumps(old))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(theirs)
    frequencies, factor = rotary_frequencies(model_shape(old))
    assert torch.equal(frequencies, rotary.inv_freq)
    assert factor == rotary.attention_scaling
    assert model_shape(old).eos_token_ids == {7, 8}


@pytest.mark.parametrize("name", MODELS)
def test_rotary_frequencies_are_those_of_transformers(name: str) -> None:
    config = make_model_config(name)
    rotary = transformers.AutoModelForCausalLM.from_config(config).model.rotary_emb
    frequencies, factor = rotary_frequencies(model_shape(config.to_dict()))
    assert torch.equal(frequencies, rotary.inv_freq)
    assert factor == rotary.attention_scaling


def test_generated_folders_mean_to_the_engine_what_they_mean_to_transformers(tmp_path: Path) -> None:
    """tests/integration/test_model_folders.py compares the learner, too, on more of them."""
    outcomes = compare(range(100, 120), tmp_path / "model", embedded)
    assert outcomes["equal"] >= 8, outcomes


def test_rope_is_read_from_old_and_new_config_files() -> None:
    assert model_shape(CONFIG).rope == {"rope_type": "default", "rope_theta": 100000.0}
    new = {k: v for k, v in CONFIG.items() if k != "rope_theta"}
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": 5000.0}
    assert model_shape(new).rope == {"rope_type": "default", "rope_theta": 5000.0}


@pytest.mark.parametrize("name", MODELS)
def test_tensor_names_are_those_of_transformers(name: str) -> None:
    config = make_model_config(name)
    model = transformers.AutoModelForCausalLM.from_config(config)
    expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert hf_tensors(model_shape(config.to_dict())) == expected


def test_stop_tokens_do_not_make_another_model() -> None:
    one, other = model_shape(CONFIG | {"eos_token_id": [1, 2]}), model_shape(CONFIG | {"eos_token_id": 3})
    assert one.eos_token_ids == {1, 2}
    assert one == other
    assert json.loads(json.dumps(one.to_json())) == other.to_json()


def test_config_file_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        load_hf_config(tmp_path)
    for text in ("{", f'{{"vocab_size": {"9" * 5000}}}', "[" * 100_000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
            load_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json does not hold a JSON object"):
        load_hf_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"cannot read .*config\.json"):
        load_hf_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert load_hf_config(tmp_path) == CONFIG


def test_module_needs_neither_torch_nor_megatron() -> None:
    code = (
        "import sys, bapo_megatron.hf.shape\n"
        "assert not {m.split('.')[0] for m in sys.modules} & {'megatron', 'torch', 'transformers'}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG_S)


def test_families_that_lack_something_are_real_ones_that_are_not_supported() -> None:
    assert not LACKING.keys() & FAMILIES.keys()
    assert LACKING.keys() <= {*transformers.CONFIG_MAPPING.keys()}
