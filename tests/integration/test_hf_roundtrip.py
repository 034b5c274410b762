"""Hugging Face -> Megatron, split over processes -> Hugging Face, bit for bit; and logits against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from safetensors.torch import save_file

from bapo_megatron.convert import convert
from bapo_megatron.errors import CheckpointError
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.types import ClipBounds
from tests.distributed import run_distributed
from tests.hf_models import MODELS, VOCAB_SIZE, save_model
from tests.integration.hf_roundtrip import check_models, make_config, packed, token_ids, weights_of, write_reference

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
