"""Fused kernels: which are chosen where, and that local layers pass them what they expect.

The kernels themselves need a GPU. A stand-in computes the same in plain torch, with the arguments of Megatron-Core.
Transformer Engine's are in test_transformer_engine.py.
"""

import types
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor

from bapo_megatron.config.schema import Config
from bapo_megatron.hf.shape import load_hf_config, model_shape
from bapo_megatron.learner import policy
from bapo_megatron.learner.precision import Machine, fusion_fields
from tests.distributed import run_distributed
from tests.integration.learner_reference import save_random_model
from tests.integration.learner_updates import assert_close, make_config, updates

CPU, GPU = Machine(), Machine((9, 0), (12, 9), (2, 11, 0))
FUSIONS = ("bias_activation_fusion", "apply_rope_fusion", "gradient_accumulation_fusion")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for family in ("qwen3", "qwen2", "llama_biases", "gemma", "granite", "olmo2", "smollm3"):
        save_random_model(family, tmp_path / family)
    return tmp_path


def test_which_are_chosen(root: Path) -> None:
    def chosen(family: str, machine: Machine, **of_model: Any) -> tuple[bool, ...]:
        config = Config.model_validate({"model": {"dtype": "bfloat16", **of_model}})
        fields = fusion_fields(config, model_shape(load_hf_config(root / family)), machine)
        assert set(fields) == set(FUSIONS)
        return tuple(fields[name] for name in FUSIONS)

    assert chosen("qwen3", CPU) == (False, False, False)
    assert chosen("qwen3", GPU) == (True, True, True)
    assert chosen("gemma", GPU) == (False, True, True)  # gelu with tanh
    assert chosen("qwen3", GPU, dtype="float32") == (True, True, False)  # Megatron's linears, which need Apex
    assert chosen("qwen3", Machine((9, 0), (12, 9), None)) == (True, False, False)


def wgrad_gemm_accum_fp32(inputs_TH: Tensor, grad_TV: Tensor, main_grad_VH: Tensor) -> None:
    """Stand in for the function of Apex's fused_weight_gradient_mlp_cuda."""
    wgrad_gemm_accum_fp32.num_calls += 1  # type: ignore[attr-defined]
    main_grad_VH.addmm_(grad_TV.T, inputs_TH)


def check_stand_ins(rank: int, world_size: int, root: Path) -> None:
    """Check that each fusion alone, in several families and orders of passes, gives the updates of no fusion."""
    layers.fused_weight_gradient_mlp_cuda = types.SimpleNamespace(wgrad_gemm_accum_fp32=wgrad_gemm_accum_fp32)
    torch.compiler.set_stance("force_eager")  # this tests the call, not the compiler
    wgrad_gemm_accum_fp32.num_calls = 0  # type: ignore[attr-defined]
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("bias_activation_fusion", "llama_biases", {}),
        ("gradient_accumulation_fusion", "qwen2", {}),
        ("gradient_accumulation_fusion", "qwen2", {"schedule": "forwards_first"}),
        ("gradient_accumulation_fusion", "qwen3", {"recompute": True, "recompute_layers": 2}),
    ]
    for name, family, train in cases:
        policy.fusion_fields = lambda *_: {}
        plain = updates(make_config(train=train), root / family)
        policy.fusion_fields = lambda *_, name=name: {name: True}
        fused = updates(make_config(train=train), root / family)
        assert_close(fused, plain, rtol=1e-4, atol=1e-6)
    assert wgrad_gemm_accum_fp32.num_calls > 0  # type: ignore[attr-defined]


def test_the_same_updates(root: Path) -> None:
    run_distributed(check_stand_ins, 1, root)


def test_fused_linears_are_marked_but_not_the_output_layer() -> None:
    """Linears of Transformer Engine and of Megatron each read one flag."""
    engine, megatron = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    engine.fuse_wgrad_accumulation = megatron.gradient_accumulation_fusion = False  # type: ignore[assignment]
    policy.fuse_weight_gradients(torch.nn.ModuleList([engine, megatron, torch.nn.Linear(2, 2)]))
    assert engine.fuse_wgrad_accumulation
    assert megatron.gradient_accumulation_fusion
