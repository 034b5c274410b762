"""Hugging Face -> Megatron, split over processes -> Hugging Face, bit for bit; and logits against transformers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from megatron.core import parallel_state
from safetensors.torch import save_file
from torch import Tensor

from bapo_megatron.config.families import own_family
from bapo_megatron.config.schema import ParallelConfig
from bapo_megatron.convert import convert
from bapo_megatron.engines.embedded.model import Model
from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.families import LAYER, Block, Family
from bapo_megatron.hf.shape import load_hf_config, model_shape
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.machine.parameters import model_parameters, rank_parameters
from bapo_megatron.resolved import resolve
from bapo_megatron.types import ClipBounds
from tests.distributed import run_distributed
from tests.hf_models import (
    HYBRID_MIXTURES,
    HYBRIDS,
    MIXTURES,
    MODELS,
    SIZES,
    VOCAB_SIZE,
    save_model,
    save_randomised,
    stack_experts,
)
from tests.integration.hf_roundtrip import (
    TOLERANCE,
    check_exported,
    check_model,
    check_models,
    make_config,
    packed,
    token_ids,
    weights_of,
    write_reference,
)
from tests.unit.test_hybrids import make_published

BOUNDS = ClipBounds(low=0.8, high=1.3, positive_share=0.5, saturated=False, num_moves=0)


def check_layout(root: Path, names: list[str], layout: dict[str, Any], **change: Any) -> None:
    for name in names:
        write_reference(save_model(name, root / name, **change), root / name)
    check_models(root, names, layout)


def test_one_process(tmp_path: Path) -> None:
    check_layout(tmp_path, list(MODELS), {}, num_hidden_layers=3)
    check_layout(tmp_path, ["qwen3-moe-6-experts"], {}, num_hidden_layers=1)


@pytest.mark.slow
def test_two_tensor_ranks_by_two_stages(tmp_path: Path) -> None:
    check_layout(tmp_path, list(MODELS), {"tensor": 2, "pipeline": 2})


def check_hybrids(root: Path, layout: dict[str, Any], **change: Any) -> None:
    """Compare within 5e-5: transformers' own float32 is up to 3e-5 away from its float64."""
    for name in HYBRIDS:
        write_reference(save_model(name, root / name, **change), root / name)
    check_models(root, list(HYBRIDS), layout, tolerance=5e-5)


def test_linear_and_full_attention(tmp_path: Path) -> None:
    check_hybrids(tmp_path, {}, num_hidden_layers=3)


@pytest.mark.slow
def test_linear_and_full_attention_over_two_tensor_ranks_by_two_stages(tmp_path: Path) -> None:
    check_hybrids(tmp_path, {"tensor": 2, "pipeline": 2})


def check_published(rank: int, world_size: int, folder: Path, text: dict[str, Tensor]) -> None:
    learner = MegatronLearner(resolve(make_config({"tensor": 2, "pipeline": 2}), folder))
    own = dict(learner.weights().whole())
    assert own.keys() == text.keys()
    for name, weight in own.items() if rank == 0 else ():  # the others get empty tensors
        assert torch.equal(weight, text[name]), name


@pytest.mark.slow
def test_the_text_of_a_published_folder_leaves_two_tensor_ranks_by_two_stages_as_it_came(tmp_path: Path) -> None:
    every = make_published(tmp_path / "published", num_layers=6)
    text = {name: weight for name, weight in every.items() if not name.startswith(("mtp.", "model.visual."))}
    assert len(text) < len(every)
    run_distributed(check_published, 4, tmp_path / "published", text)


@pytest.mark.slow
def test_experts_over_two_ranks_by_two_stages(tmp_path: Path) -> None:
    """6 experts of which a token uses 1, whose weight is its probability; 128 of which it uses 8, scaled to 1."""
    check_layout(tmp_path, list(MIXTURES), {"expert": 2, "data": 2, "pipeline": 2}, num_hidden_layers=2)


@pytest.mark.slow
def test_stacked_experts_over_two_tensor_ranks_by_two_stages(tmp_path: Path) -> None:
    """Experts that the tensor ranks share out, and a shared one that they split; transformers in float64."""
    for name in HYBRID_MIXTURES:
        model = save_model(name, tmp_path / name)
        stack_experts(model, tmp_path / name)
        write_reference(model.double(), tmp_path / name)
    layout = {"tensor": 2, "sequence": True, "pipeline": 2, "expert": 2}
    check_models(tmp_path, list(HYBRID_MIXTURES), layout, tolerance=5e-5)


def check_start_and_refusals(rank: int, world_size: int, root: Path) -> None:
    """A converted checkpoint starts as its source does; a bad value that only the last rank reads stops all ranks."""
    losses = []
    for start in (None, root / "training"):
        learner = MegatronLearner(resolve(make_config({"tensor": 2}), root / "qwen3"))
        minibatch = packed(token_ids(VOCAB_SIZE))
        if start:
            learner.step(minibatch, BOUNDS)  # this update must be forgotten
            learner.load(start)
        assert learner.version == 0
        for _ in range(2):
            learner.step(minibatch, BOUNDS)
        losses.append([weight.clone() for _, weight in learner.weights().whole()])
        parallel_state.destroy_model_parallel()
    for one, other in zip(*losses, strict=True):
        assert torch.equal(one, other)

    with pytest.raises(CheckpointError, match=r"q_proj\.weight in .*model\.safetensors holds nan"):
        MegatronLearner(resolve(make_config({"tensor": 2}), root / "spoilt"))


# Two families that no checkpoint has, each over the transformers class that computes the same; and the one of the docs
# with a block of its own.
_FEED_FORWARD = tuple(
    replace(p, tensors={name.replace("mlp.", "feed_forward."): dims for name, dims in p.tensors.items()})
    for p in LAYER.parameters
)
PLAIN = Family("plain", refused=("use_alibi",))
MIXED = Family("mixed", qkv_bias=True, out_bias="output_bias", qk_norm=True, layer=Block(_FEED_FORWARD))
OWN: dict[str, tuple[str, transformers.PreTrainedConfig]] = {  # model.family, and a model
    "plain": (f"{__name__}:PLAIN", transformers.LlamaConfig(**SIZES, head_dim=10)),
    "mixed": (
        f"{__name__}:MIXED",
        transformers.Qwen3Config(**SIZES, head_dim=10, attention_bias=True, tie_word_embeddings=True),
    ),
    "exaone4": (
        "docs.examples.exaone4:FAMILY",
        transformers.Exaone4Config(**SIZES, sliding_window=None, layer_types=["full_attention"] * 6),
    ),
}


def save_own(name: str, folder: Path) -> None:
    write_reference(save_randomised(OWN[name][1], folder), folder)
    config = load_hf_config(folder) | {"model_type": name, "output_bias": True}
    (folder / "config.json").write_text(json.dumps(config))
    if name == "mixed":
        weights = {tensor.replace("mlp.", "feed_forward."): weight for tensor, weight in weights_of(folder).items()}
        save_file(weights, folder / "model.safetensors")


def check_embedded(folder: Path, own: Family) -> None:
    """Compare the embedded engine's logits at every position, token by token, with transformers'."""
    model, found = Model.from_pretrained(folder, max_len=64, own=own), []
    for ids in token_ids(VOCAB_SIZE):
        cache = model.new_cache(num_rows=1, max_len=64)
        for position, token in enumerate(ids[:-1]):
            if position == 0:
                logits = model.prefill(token[None, None], torch.tensor([1]), cache, 0)
            else:
                logits = model.decode(token[None], torch.tensor([position]), cache)
            found.append(logits)
    want = torch.load(folder.with_suffix(".pt"), weights_only=True)["logits"]
    torch.testing.assert_close(torch.cat(found), want, rtol=0, atol=TOLERANCE)


def check_own(rank: int, world_size: int, root: Path) -> None:
    for name, (path, _) in OWN.items():
        check_model(root / name, {"tensor": world_size}, TOLERANCE, path)
    if rank == 0:
        for name, (path, _) in OWN.items():
            family = own_family(path)
            assert family is not None
            check_embedded(root / name, family)
            shape = model_shape(load_hf_config(root / name), own=family)
            assert rank_parameters(shape, ParallelConfig(), 0).total == model_parameters(shape)
        with pytest.raises(CheckpointError, match="use_alibi=true is not supported"):
            model_shape(load_hf_config(root / "plain") | {"use_alibi": True}, own=PLAIN)


def test_another_family_is_one_object(tmp_path: Path) -> None:
    """A dotted path alone gives the learner, the embedded engine, checkpoints and estimates a new family."""
    for name in OWN:
        save_own(name, tmp_path / name)
        with pytest.raises(CheckpointError, match=f"{name!r} is not supported"):
            convert(tmp_path / name)
    run_distributed(check_own, 2, tmp_path)
    for name in OWN:
        check_exported(tmp_path / name)


@pytest.mark.slow
def test_starting_from_a_converted_or_a_spoilt_checkpoint(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path / "qwen3")
    convert(tmp_path / "qwen3", tmp_path / "training", to="training")
    save_model("qwen3", tmp_path / "spoilt")
    weights = weights_of(tmp_path / "spoilt")
    weights["model.layers.3.self_attn.q_proj.weight"][-1, -1] = torch.nan
    save_file(weights, tmp_path / "spoilt" / "model.safetensors")
    run_distributed(check_start_and_refusals, 2, tmp_path)


@pytest.mark.slow
def test_two_tensor_ranks_with_sequence_parallelism(tmp_path: Path) -> None:
    names = ["llama-biases", "qwen3-tied-yarn"]
    check_layout(tmp_path, names, {"tensor": 2, "sequence": True}, num_hidden_layers=1)


@pytest.mark.slow
def test_an_odd_number_of_layers_over_three_stages(tmp_path: Path) -> None:
    check_layout(tmp_path, ["llama3-tied", "qwen2"], {"pipeline": 3}, num_hidden_layers=3)
