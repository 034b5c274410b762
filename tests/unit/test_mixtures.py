"""Mixtures of experts on paper: config.json, tensor names, conversion; and shared experts, which are refused."""

import contextlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from bapo_megatron.convert import convert
from bapo_megatron.errors import CheckpointError, EngineError, UserError
from bapo_megatron.hf.facts import ModelFacts
from bapo_megatron.hf.families import Block
from bapo_megatron.hf.reader import SINGLE, HFReader
from bapo_megatron.hf.shape import Experts, LayerShape, hf_tensors, layer_entries, load_hf_config, model_shape
from bapo_megatron.learner.slicing import canonical
from bapo_megatron.preflight.known_models import KNOWN_MODELS
from bapo_megatron.sync.verify import _check_names
from tests.hf_models import MIXTURES, make_model_config, save_model
from tests.unit.test_splits import EXPERTS

QWEN = KNOWN_MODELS["Qwen3-30B-A3B"]


@pytest.mark.parametrize("name", MIXTURES)
def test_names_are_those_of_saved_models_and_conversion_keeps_every_bit(name: str, tmp_path: Path) -> None:
    save_model(name, tmp_path / "source", num_hidden_layers=2)
    hf_config = load_hf_config(tmp_path / "source")
    shape = model_shape(hf_config)
    with HFReader(tmp_path / "source") as read:
        read.check(shape)
    convert(tmp_path / "source", tmp_path / "training", to="training")
    convert(tmp_path / "training", tmp_path / "back")
    before, after = load_file(tmp_path / "source" / SINGLE), load_file(tmp_path / "back" / SINGLE)
    assert before.keys() == after.keys() == hf_tensors(shape).keys()
    assert all(torch.equal(before[tensor], after[tensor]) for tensor in before)
    assert load_hf_config(tmp_path / "back") == hf_config


def test_fused_experts_are_refused_by_name(tmp_path: Path) -> None:
    """transformers fuses experts in memory; a checkpoint holds them one by one."""
    model = save_model("qwen3-moe-6-experts", tmp_path, num_hidden_layers=1)
    save_file(dict(model.state_dict()), tmp_path / SINGLE)
    with pytest.raises(CheckpointError, match=r"18 missing: .*experts\.0\.gate_proj.* 2 unexpected: .*gate_up_proj"):
        convert(tmp_path)


def test_both_spellings_of_the_number_of_experts_are_read() -> None:
    other = {key: value for key, value in QWEN.items() if key != "num_experts"} | {"num_local_experts": 128}
    shape = model_shape(QWEN)
    assert model_shape(other) == model_shape(other | {"num_experts": 128}) == shape
    assert shape.layers[0].mlp == Experts(128, 8, 768, normalised=True)
    assert shape.ffn_sizes == []
    one = model_shape(QWEN | {"num_experts_per_tok": 1, "norm_topk_prob": False})
    assert one.experts == Experts(128, 1, 768, normalised=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_local_experts": 64}, "num_experts=128 and num_local_experts=64 contradict each other: remove one"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok=129 is more than num_experts=128"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok=1 with norm_topk_prob=true is not supported"),
        ({"num_experts": 0}, "num_experts=0 is not a positive whole number"),
        ({"num_experts": 10**30}, f"config.json has num_experts=1{'0' * 30}, but at most 16777216 is supported"),
        ({"num_hidden_layers": 10**9}, "config.json has num_hidden_layers=1000000000, but at most 16384 is supported"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size=null is not a positive whole number"),
        (
            {"mlp_only_layers": [0, 47]},
            "mlp_only_layers=[0, 47] makes these layers dense, which is not supported: every layer needs experts, as "
            "with mlp_only_layers=[]",
        ),
        (
            {"decoder_sparse_step": 2},
            "decoder_sparse_step=2 does not give every layer experts, which is not supported: every layer needs "
            "experts, as with decoder_sparse_step=1",
        ),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0 does not give every layer experts"),
        ({"shared_expert_intermediate_size": 512}, "shared_expert_intermediate_size=512: shared experts are not supp"),
        ({"n_shared_experts": 1}, "n_shared_experts=1: shared experts are not supported, only models without them"),
        ({"use_sliding_window": True}, "use_sliding_window=true is not supported"),
    ],
)
def test_what_is_not_built_is_refused_with_its_numbers(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        model_shape(QWEN | change)


def test_where_a_config_is_silent_transformers_is_believed(tmp_path: Path) -> None:
    silent = {key: QWEN[key] for key in ("model_type", "vocab_size", "hidden_size", "num_attention_heads")}
    (tmp_path / "config.json").write_text(json.dumps(silent | {"num_hidden_layers": 1}))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    (layer,) = model_shape(load_hf_config(tmp_path)).layers
    assert layer.mlp == Experts(
        theirs.num_local_experts, theirs.num_experts_per_tok, theirs.moe_intermediate_size, theirs.norm_topk_prob
    )


_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "vocab_size": 11,
}
_ROUTED: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 10}
# model_type -> its configuration, and the sizes of its experts
SHARING: dict[str, tuple[dict[str, Any], Experts]] = {
    "glm4_moe": (
        {**_SIZES, **_ROUTED, "n_routed_experts": 4, "n_shared_experts": 3, "first_k_dense_replace": 1},
        Experts(4, 2, 10, normalised=True, shared_ffn_size=30),
    ),
    "deepseek_v3": (
        {**_SIZES, **_ROUTED, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2},
        Experts(8, 2, 10, normalised=True, shared_ffn_size=10),
    ),
}


@pytest.mark.parametrize("model_type", SHARING)
def test_a_shape_can_say_shared_experts_of_families_that_are_refused(model_type: str) -> None:
    """The weights of a layer's MLP are counted as transformers builds it, from the same config.json."""
    options, experts = SHARING[model_type]
    config = transformers.AutoConfig.for_model(model_type, **options)
    with torch.device("meta"):
        theirs = transformers.AutoModel.from_config(config).layers[-1].mlp
    down = replace(EXPERTS[-1], name="mlp.shared_experts.linear_fc2.weight", tensors={"shared.down_proj.weight": "ES"})
    layer = LayerShape(experts, Block((*EXPERTS[1:], down)))
    ours = sum(entry.num_values(1) for entry in layer_entries(model_shape(QWEN | {"hidden_size": 64}), layer))
    assert ours == sum(weight.numel() for weight in theirs.parameters())
    with pytest.raises(CheckpointError, match=f"model_type '{model_type}' is not supported"):
        model_shape(config.to_dict())


def test_grouped_linears_and_local_experts_have_the_same_names() -> None:
    """A rank with experts 4 to 7 of Transformer Engine's grouped linears, or of Megatron's own modules."""
    name = "mlp.experts.local_experts.7.linear_fc1.weight"
    assert canonical("mlp.experts.linear_fc1.weight3", range(4, 8)) == name
    assert canonical("mlp.experts.local_experts.3.linear_fc1.weight", range(4, 8)) == name
    assert canonical("mlp.router.weight", range(4, 8)) == "mlp.router.weight"


def test_the_parameters_of_experts_come_expert_by_expert() -> None:
    """An engine that makes one tensor of an expert's three gets them in a row."""
    shape = model_shape(make_model_config("qwen3-moe-6-experts").to_dict())
    names = [name for name in hf_tensors(shape) if ".layers.1.mlp.experts." in name]
    assert names == [
        f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight"
        for expert in range(6)
        for part in ("gate", "up", "down")
    ]


@pytest.mark.parametrize(
    ("num_experts", "dtype", "missing"), [(128, "uint8", 255), (255, "uint8", 255), (256, "int16", -1)]
)
def test_routes_are_declared_and_asked_for_on_request(
    num_experts: int, dtype: str, missing: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN | {"num_experts": num_experts}))
    (stream,) = ModelFacts.of(tmp_path).streams
    assert (stream.dtype, stream.missing, stream.most, stream.shape) == (dtype, missing, num_experts - 1, (48, 8))
    assert ModelFacts.of(tmp_path).returned_streams() == ()
    assert ModelFacts.of(tmp_path).returned_streams({"routes"}) == (stream,)


def test_a_dense_model_has_no_routes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KNOWN_MODELS["Qwen3-32B"]))
    with pytest.raises(UserError, match="qwen3 models have no stream 'routes', which the run needs"):
        ModelFacts.of(tmp_path).returned_streams({"routes"})


@pytest.mark.parametrize("held", [{"lm_head.weight": "7"}, {"lm_head.weight": "8"}, {}])
def test_an_output_layer_that_sglang_does_not_tie_is_refused(held: dict[str, str]) -> None:
    """Its qwen3_moe would sample with random weights (srt/models/qwen3_moe.py)."""
    sent, checksum = ["model.embed_tokens.weight"], {"model.embed_tokens.weight": "7"} | held
    said = "http://engine:1 serves another model: its lm_head.weight is not the embedding"
    is_refused = held.get("lm_head.weight") == "8"
    with pytest.raises(EngineError, match=said) if is_refused else contextlib.nullcontext():
        _check_names("http://engine:1", sent, {"ranks": [{"checksums": checksum}]})


def test_names_are_compared_although_sglang_stacks_experts() -> None:
    sent = [*hf_tensors(model_shape(make_model_config("qwen3-moe-6-experts", num_hidden_layers=2).to_dict()))]
    stacked = {
        "self_attn.qkv_proj.weight": ("q_proj", "k_proj", "v_proj"),
        "mlp.experts.w13_weight": ("experts.0.gate_proj", "experts.5.up_proj"),
        "mlp.experts.w2_weight": ("experts.3.down_proj",),
    }
    apart = [name for name in sent if not any(part in name for parts in stacked.values() for part in parts)]
    held = [name for name in apart if ".experts." not in name]
    held += [f"model.layers.{layer}.{name}" for layer in range(2) for name in stacked]
    checksum = {"ranks": [{"checksums": dict.fromkeys([*held, "model.rotary_emb.cos_sin_cache"], "")}]}
    _check_names("http://engine:1", sent, checksum)
    for names, said in (
        ([name for name in sent if ".layers.1.mlp.experts." not in name], "has, unlike the policy, 2 weights, such as"),
        ([*sent, "model.layers.0.mlp.experts.gate_up_proj"], "lacks 1 weight, such as 'model.layers.0.mlp.experts.gat"),
        ([*sent, "model.layers.2.mlp.experts.0.up_proj.weight"], "lacks 1 weight, such as 'model.layers.2.mlp.experts"),
    ):
        with pytest.raises(EngineError, match=f"http://engine:1 serves another model: it {said}"):
            _check_names("http://engine:1", names, checksum)
