"""Hugging Face -> Megatron, split over processes -> Hugging Face, bit for bit; and logits against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from megatron.core import parallel_state
from safetensors.torch import save_file

from bapo_megatron.convert import convert
from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.families import FAMILIES, Family
from bapo_megatron.hf.shape import load_hf_config, model_shape
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.types import ClipBounds
from tests.distributed import run_distributed
from tests.hf_models import MODELS, SIZES, VOCAB_SIZE, save_model, save_randomised
from tests.integration.hf_roundtrip import (
    TOLERANCE,
    check_models,
    check_models_of_rank,
    check_saved,
    make_config,
    packed,
    token_ids,
    weights_of,
    write_reference,
)

BOUNDS = ClipBounds(low=0.8, high=1.3, positive_share=0.5, saturated=False, num_moves=0)


def check_layout(root: Path, names: list[str], layout: dict[str, Any], **change: Any) -> None:
    for name in names:
        write_reference(save_model(name, root / name, **change), root / name)
    check_models(root, names, layout)


def test_one_process(tmp_path: Path) -> None:
    check_layout(tmp_path, list(MODELS), {}, num_hidden_layers=3)


@pytest.mark.slow
def test_two_tensor_ranks_by_two_stages(tmp_path: Path) -> None:
    check_layout(tmp_path, list(MODELS), {"tensor": 2, "pipeline": 2})


def check_start_and_refusals(rank: int, world_size: int, root: Path) -> None:
    """A converted checkpoint starts as its source does; a value that only the last rank reads stops all."""
    losses = []
    for start in (None, root / "training"):
        learner = MegatronLearner(make_config({"tensor": 2}), root / "qwen3")
        minibatch = packed(token_ids(VOCAB_SIZE))
        if start:
            learner.step(minibatch, BOUNDS)  # to be forgotten
            learner.load(start)
        assert learner.version == 0
        for _ in range(2):
            learner.step(minibatch, BOUNDS)
        losses.append([weight.clone() for _, weight in learner.named_weights()])
        parallel_state.destroy_model_parallel()
    for one, other in zip(*losses, strict=True):
        assert torch.equal(one, other)

    with pytest.raises(CheckpointError, match=r"q_proj\.weight in .*model\.safetensors holds nan"):
        MegatronLearner(make_config({"tensor": 2}), root / "spoilt")


def check_new_family(rank: int, world_size: int, root: Path) -> None:
    """The example of docs/models.md."""
    FAMILIES["mistral"] = Family(
        window_switch="sliding_window",
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
            "eos_token_id": 2,
        },
    )
    check_models_of_rank(rank, world_size, root, ["mistral"], {}, TOLERANCE)
    with pytest.raises(CheckpointError, match="sliding-window attention is not supported"):
        model_shape(load_hf_config(root / "mistral") | {"sliding_window": 16})


def test_another_family_is_one_entry_in_one_file(tmp_path: Path) -> None:
    config = transformers.MistralConfig(**SIZES, head_dim=10, sliding_window=None)
    model = save_randomised(config, tmp_path / "mistral")
    write_reference(model, tmp_path / "mistral")
    with pytest.raises(CheckpointError, match="'mistral' is not supported"):
        convert(tmp_path / "mistral")
    run_distributed(check_new_family, 1, tmp_path)
    check_saved(tmp_path / "mistral")


@pytest.mark.slow
def test_starting_from_a_converted_or_a_spoilt_checkpoint(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path / "qwen3")
    convert(tmp_path / "qwen3", tmp_path / "training", to="training")
    save_model("qwen3", tmp_path / "spoilt")
    weights = weights_of(tmp_path / "spoilt")
    weights["model.layers.3.self_attn.q_proj.weight"][-1, -1] = torch.nan
    save_file(weights, tmp_path / "spoilt" / "model.safetensors")
    run_distributed(check_start_and_refusals, 2, tmp_path, timeout_s=120)


@pytest.mark.slow
def test_two_tensor_ranks_with_sequence_parallelism(tmp_path: Path) -> None:
    names = ["llama-biases", "qwen3-tied-yarn"]
    check_layout(tmp_path, names, {"tensor": 2, "sequence": True}, num_hidden_layers=1)


@pytest.mark.slow
def test_an_odd_number_of_layers_over_three_stages(tmp_path: Path) -> None:
    check_layout(tmp_path, ["llama3-tied", "qwen2"], {"pipeline": 3}, num_hidden_layers=3)
