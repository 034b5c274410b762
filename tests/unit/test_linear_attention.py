"""The gated delta rule and its convolution in plain torch, sequence by sequence against literal recurrences."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated, torch_chunk_gated_delta_rule

from bapo_megatron.errors import install_command
from bapo_megatron.hf.facts import ModelFacts
from bapo_megatron.hf.shape import RULE_CHUNK, model_shape
from bapo_megatron.learner.linear_attention import causal_convolution, delta_rule, gated_norm
from bapo_megatron.learner.packs import Sequences
from bapo_megatron.learner.precision import Machine, check_precision
from bapo_megatron.preflight.checks.all import check_settings
from bapo_megatron.preflight.known_models import KNOWN_MODELS
from bapo_megatron.resolved import resolve
from tests.unit.test_hybrids import QWEN_9B
from tests.unit.test_precision import GOOD, load_config

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 6, 5, 4
LENGTHS = st.lists(st.integers(0, 2 * RULE_CHUNK + 2), min_size=1, max_size=4).filter(any)


def cumulated(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def inputs_of(lengths: list[int], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return queries, keys, values, decays and betas of a pack; decays from 1 down to e^-8 per token."""
    generator, num_tokens = torch.Generator().manual_seed(sum(lengths)), sum(lengths)

    def random(*size: int) -> Tensor:
        return torch.randn(num_tokens, *size, generator=generator, dtype=torch.float64)

    q, k = random(KEY_HEADS, KEY_DIM), random(KEY_HEADS, KEY_DIM)
    parts = q, k, random(VALUE_HEADS, VALUE_DIM), -random(VALUE_HEADS).exp().clamp(max=8), random(VALUE_HEADS).sigmoid()
    return [part.to(dtype).requires_grad_() for part in parts]


def literal_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lengths: list[int]) -> Tensor:
    """Return the answers token by token, from the definition."""
    copies, found, token = VALUE_HEADS // KEY_HEADS, [], 0
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(copies, dim=1) for x in (q / KEY_DIM**0.5, k))
    for length in lengths:
        state = torch.zeros(VALUE_HEADS, KEY_DIM, VALUE_DIM, dtype=v.dtype)
        for _ in range(length):
            state = g[token].exp()[:, None, None] * state
            known = torch.einsum("ndv,nd->nv", state, k[token])
            state = state + k[token][:, :, None] * (beta[token][:, None] * (v[token] - known))[:, None]
            found.append(torch.einsum("ndv,nd->nv", state, q[token]))
            token += 1
    return torch.stack(found)


@settings(deadline=None, max_examples=8)
@given(lengths=LENGTHS)
def test_rule_equals_the_recurrence(lengths: list[int]) -> None:
    inputs = inputs_of(lengths)
    got, wanted = delta_rule(*inputs, Sequences.of(cumulated(lengths))), literal_rule(*inputs, lengths)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
    grad = torch.randn_like(wanted)
    gradients = (torch.autograd.grad(out, inputs, grad) for out in (got, wanted))
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-11)


def test_a_state_that_is_forgotten_leaves_no_rounding_behind() -> None:
    """Some heads forget all before a token (A up to 16, softplus up to 20), and answer exactly for those after it."""
    lengths, generator = [70, 1, 130], torch.Generator().manual_seed(0)
    inputs = inputs_of(lengths)
    forgets = torch.rand(sum(lengths), VALUE_HEADS, generator=generator) < 0.5
    inputs[3] = torch.where(forgets, -320.0, -0.01).double().requires_grad_()
    short = [x.detach().float().requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in short]
    got, wanted = delta_rule(*short, Sequences.of(cumulated(lengths))), literal_rule(*exact, lengths)
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=2e-6)
    grad = torch.randn(wanted.shape, generator=generator, dtype=torch.float64)
    gradients = torch.autograd.grad(got, short, grad.float()), torch.autograd.grad(wanted, exact, grad)
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=0, atol=4e-6 * float(other.abs().max()))


def test_rule_rounds_as_in_transformers() -> None:
    """In float32 inside, whatever the type of the inputs; the result has the type of the values."""
    lengths = [70, 130]
    inputs = [x.detach() for x in inputs_of(lengths, torch.bfloat16)]
    inputs[3] = inputs[3].float()
    got = delta_rule(*inputs, Sequences.of(cumulated(lengths)))
    assert got.dtype == torch.bfloat16
    for part, whole in zip(got.split(lengths), zip(*(x.split(lengths) for x in inputs), strict=True), strict=True):
        q, k, *rest = whole
        q, k = (x.repeat_interleave(VALUE_HEADS // KEY_HEADS, dim=1) for x in (q, k))
        wanted, _ = torch_chunk_gated_delta_rule(*(x[None] for x in (q, k, *rest)), use_qk_l2norm_in_kernel=True)
        torch.testing.assert_close(part, wanted[0], rtol=0.01, atol=1e-3)


def test_the_rule_keeps_its_inputs_and_a_state_for_each_chunk() -> None:
    lengths, kept = [256, 100], []
    inputs = inputs_of(lengths)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()), lambda x: x):
        delta_rule(*inputs, Sequences.of(cumulated(lengths)))
    num_states = sum(-(-length // RULE_CHUNK) for length in lengths)
    assert sum(kept) == sum(x.numel() for x in inputs) + num_states * VALUE_HEADS * KEY_DIM * VALUE_DIM


@settings(deadline=None, max_examples=30)
@given(lengths=LENGTHS, width=st.integers(1, 5))
def test_no_tap_of_the_convolution_reaches_into_the_sequence_before(lengths: list[int], width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(sum(lengths), 3, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(3, 1, width, generator=generator, dtype=torch.float64).requires_grad_()
    got = causal_convolution(x, weight, Sequences.of(cumulated(lengths), width - 1))
    wanted = torch.cat(
        [
            F.silu(sum(F.pad(part, (0, 0, width - 1, 0))[i : i + len(part)] * weight[:, 0, i] for i in range(width)))
            for part in x.split(lengths)
        ]
    )
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
    grad = torch.randn_like(wanted)
    for mine, other in zip(*(torch.autograd.grad(out, (x, weight), grad) for out in (got, wanted)), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_rounds_as_in_transformers(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x, gate = (torch.randn(50, 8, generator=generator).to(dtype) for _ in range(2))
    theirs = Qwen3_5RMSNormGated(8, eps=1e-6)
    theirs.weight.data.copy_(torch.randn(8, generator=generator))
    theirs.to(dtype)
    tolerance = 0 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(gated_norm(x, gate, theirs.weight, 1e-6), theirs(x, gate), rtol=tolerance, atol=1e-7)


def test_a_gpu_needs_flash_linear_attention() -> None:
    def found(machine: Machine | None) -> list[str]:
        shape, config = model_shape(QWEN_9B), load_config([], [])
        return [violation.message for violation in check_precision(config, shape=shape, machine=machine)]

    with_fla = partial(Machine, GOOD.compute_capability)
    assert found(None) == found(Machine()) == found(with_fla(fla=(0, 6, 0))) == []
    needed = "model.path holds a qwen3_5_text model, whose linear attention needs flash-linear-attention 0.6 on a GPU"
    assert found(GOOD) == [f"{needed}; run {install_command('fla')}"]
    assert "0.6 on a GPU, and an older one is installed; run" in found(with_fla(fla=()))[0], "it had another package"
    assert found(with_fla(fla=(0, 4, 1))) == [f"{needed}, and 0.4.1 is installed; run {install_command('fla')}"]


def test_a_reference_needs_flash_linear_attention_too() -> None:
    """It is told once: with the policy, if that has linear attention itself."""
    hybrid = QWEN_9B
    dense = KNOWN_MODELS["Qwen3-32B"] | {"model_type": "qwen3", "vocab_size": hybrid["vocab_size"]}
    settings = ["model.dtype=bfloat16", "loss.kl_coef=0.1", "loss.reference_path=x"]

    def found(policy: dict[str, Any], machine: Machine) -> list[str]:
        violations = check_settings(
            resolve(load_config([], settings), policy), reference=ModelFacts(hybrid), num_gpus=2, machine=machine
        )
        return [v.message for v in violations if v.severity == "error"]

    needed = "holds a qwen3_5_text model, whose linear attention needs flash-linear-attention 0.6 on a GPU; run pip"
    for policy, setting in ((dense, "loss.reference_path"), (hybrid, "model.path")):
        assert found(policy, replace(GOOD, fla=(0, 6))) == []
        (message,) = found(policy, GOOD)
        assert message.startswith(f"{setting} {needed}")
