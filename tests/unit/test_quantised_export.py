"""What engines receive for FP8 parameters, with stand-ins for Transformer Engine's modules and tensors."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import fp8_utils
from torch import Tensor
from torch.nn import Module, ModuleList, Parameter

from bapo_megatron.hf.shape import ModelShape, entries, hf_tensors, model_shape
from bapo_megatron.learner.adam import WEIGHT
from bapo_megatron.learner.exchange import gather_weights, parameters_by_global_name
from bapo_megatron.learner.slicing import to_shard
from bapo_megatron.learner.weight_source import ModelWeights, Unquantised, Wrapped

LAYOUT: Any = SimpleNamespace(
    rank=0,
    pipeline_rank=0,
    pipeline_size=1,
    axes={
        "dense": SimpleNamespace(
            rank=0, size=1, is_first_copy=True, is_first=True, copies=SimpleNamespace(size=lambda: 1, rank=lambda: 0)
        )
    },
    stage_of_layer=lambda *_: 0,
)
# Transformer Engine's names for the parts of a layer (module/layernorm_linear.py, linear.py, rmsnorm.py)
ENGINE_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


class Quantised(torch.Tensor):
    """A tensor that claims bfloat16, as Transformer Engine's do, and holds a weight rounded to float8_e4m3."""

    @staticmethod
    def of(tensor: Tensor) -> Quantised:
        return tensor.to(torch.float8_e4m3fn).to(torch.bfloat16).as_subclass(Quantised)

    def dequantize(self) -> Tensor:  # type: ignore[override]
        return self.as_subclass(torch.Tensor)


def make_shape() -> ModelShape:
    return model_shape(
        {
            "model_type": "qwen3",
            "vocab_size": 11,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 6,
            "attention_bias": True,
        }
    )


def add(root: Module, name: str, parameter: Parameter) -> None:
    *path, last = name.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, Module())
        root = getattr(root, part)
    root.register_parameter(last, parameter)


def engine_tree(shape: ModelShape, weights: dict[str, Tensor]) -> tuple[ModuleList, dict[Parameter, Tensor]]:
    """Return parameters under Transformer Engine's names, with quantised matrices, and the float32 weights of these."""
    chunk, main = Module(), {}
    layers = ModuleList(Module() for _ in range(shape.num_layers))
    for number, layer in enumerate(layers, start=1):
        layer.layer_number = number  # type: ignore[assignment]
    chunk.add_module("decoder", Module())
    chunk.decoder.add_module("layers", layers)  # type: ignore[union-attr, operator]

    def read(name: str, index: tuple[slice, ...]) -> Tensor:
        return weights[name][index]

    for entry in entries(shape):
        value = to_shard(entry, read, 0, 1)
        is_matrix = entry.layer is not None and value.dim() == 2
        parameter = Parameter(Quantised.of(value) if is_matrix else value.bfloat16())
        if is_matrix:
            main[parameter] = value
        name = entry.megatron_name
        for ours, engine in ENGINE_NAMES.items():
            name = name.replace(ours, engine)
        add(chunk, name, parameter)
    return ModuleList([chunk]), main


@pytest.fixture
def engine_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_utils, "HAVE_TE_FP8_TENSOR_CLASS", True)
    monkeypatch.setattr(fp8_utils, "FP8_TENSOR_CLASS", Quantised)


@pytest.mark.usefixtures("engine_tensors")
def test_engines_get_the_main_weights_rounded_to_bfloat16() -> None:
    """With and without FP8 parameters, the bits are the same."""
    torch.manual_seed(0)
    shape = make_shape()
    weights = {name: torch.randn(size) for name, size in hf_tensors(shape).items()}
    model, main = engine_tree(shape, weights)
    assert any(map(fp8_utils.is_float8tensor, model.parameters()))
    assert len(main) == 4 * shape.num_layers

    def gather(parameter: Parameter, name: str) -> Tensor:
        assert name == WEIGHT
        return main[parameter]

    def rounded(name: str, tensor: Tensor) -> None:
        assert type(tensor) is torch.Tensor, name
        assert tensor.dtype == torch.bfloat16, name
        assert torch.equal(tensor, weights[name].bfloat16()), name

    source = Wrapped(ModelWeights(model, shape, LAYOUT, version=3), Unquantised(partial(gather, name=WEIGHT)))
    exported = dict(source.whole())
    assert exported.keys() == weights.keys()
    for name, tensor in exported.items():
        rounded(name, tensor)
    assert [spec.dtype for spec in source.manifest()] == ["bfloat16"] * len(weights)
    assert source.version == 3
    pieces = list(source.pieces())
    assert {piece.name for piece in pieces} == weights.keys()
    for piece in pieces:
        rounded(piece.name, piece.values.reshape(piece.size))

    # not what the forward pass computes with, which is coarser
    dequantised = dict(gather_weights(model, shape, LAYOUT, lambda p: getattr(p, "dequantize", p.detach)()))
    differs = {name for name in weights if not torch.equal(dequantised[name], exported[name])}
    assert differs == {name for name in weights if "_proj.weight" in name}


def test_norms_inside_linears_have_their_own_names() -> None:
    shape = make_shape()
    model, _ = engine_tree(shape, {name: torch.randn(size) for name, size in hf_tensors(shape).items()})
    engine = {name for name, _ in model[0].named_parameters()}
    assert "decoder.layers.1.mlp.linear_fc1.layer_norm_weight" in engine
    assert parameters_by_global_name(model).keys() == {entry.megatron_name for entry in entries(shape)}
    assert not any(map(fp8_utils.is_float8tensor, model.parameters()))  # as without Transformer Engine
