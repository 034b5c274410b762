"""Reading config.json, and whether a layout can hold the model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.errors import CheckpointError
from bapo_megatron.learner.hf.shapes import hf_tensors, load_hf_config, model_shape, validate_layout

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


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (3, 1), (1, 2), (3, 5)])
def test_layouts_that_fit(tensor: int, pipeline: int) -> None:
    assert validate_layout(CONFIG, tensor, pipeline) == []


def test_heads_that_do_not_divide_are_named_with_an_alternative() -> None:
    (problem,) = validate_layout(CONFIG, 2, 1)
    assert problem == (
        "parallel.tensor=2 does not divide 9 attention heads, 3 key-value heads; parallel.tensor can be 1 or 3"
    )


def test_all_problems_come_at_once() -> None:
    problems = validate_layout(CONFIG, 2, 4)
    assert len(problems) == 2
    assert "parallel.pipeline=4 does not divide 30 layers" in problems[1]
    assert "1, 2, 3, 5, 6, 10, 15 or 30" in problems[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mixtral"}, "'mixtral' is not supported; supported are llama, qwen2, qwen3"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope scaling 'yarn' is not supported"),
        ({"hidden_size": None}, "no 'hidden_size'"),
    ],
)
def test_unsupported_models_are_refused(change: dict[str, Any], message: str) -> None:
    assert message in validate_layout(CONFIG | change, 1, 1)[0]
    with pytest.raises(CheckpointError, match=message.replace("(", r"\(")):
        model_shape(CONFIG | change)


def test_rope_is_read_from_old_and_new_config_files() -> None:
    assert model_shape(CONFIG).rope == {"rope_type": "default", "rope_theta": 100000.0}
    new = {k: v for k, v in CONFIG.items() if k != "rope_theta"}
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": 5000.0}
    assert model_shape(new).rope == {"rope_type": "default", "rope_theta": 5000.0}


def test_tensor_names_are_those_of_transformers() -> None:
    """Built by transformers itself, for each family, with and without tied embeddings."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 11,
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    for cls in (transformers.LlamaConfig, transformers.Qwen2Config, transformers.Qwen3Config):
        for tied in (True, False):
            config = (
                cls(**sizes, head_dim=8, tie_word_embeddings=tied)
                if cls is not transformers.Qwen2Config
                else cls(**sizes, tie_word_embeddings=tied)
            )
            model = transformers.AutoModelForCausalLM.from_config(config)
            expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
            assert hf_tensors(model_shape(config.to_dict())) == expected, (cls.__name__, tied)


def test_config_file_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        load_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
        load_hf_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert load_hf_config(tmp_path) == CONFIG


def test_module_needs_neither_torch_nor_megatron() -> None:
    code = (
        "import sys, bapo_megatron.learner.hf.shapes\n"
        "assert not any(m.split('.')[0] == 'megatron' for m in sys.modules), 'megatron was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
