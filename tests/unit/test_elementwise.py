"""Norm, rotary embedding and gated activation of the local layers against autograd's own derivatives in float64."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bapo_megatron.learner.elementwise import GatedActivation, RMSNorm, rotate, rotation_of

ROWS = st.sampled_from([(1,), (7, 1), (127,), (128, 1), (129,), (300, 1), (40, 1, 3), (0, 1)])  # around a tile's rows


def norm_of(weight: Tensor, eps: float, plus_one: bool) -> RMSNorm:
    settings: Any = SimpleNamespace(
        params_dtype=weight.dtype, layernorm_zero_centered_gamma=plus_one, sequence_parallel=False
    )
    norm = RMSNorm(settings, weight.numel(), eps)
    norm.weight.data.copy_(weight)
    return norm


def with_gradients(out: Tensor, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    return [out.detach().double(), *(g.double() for g in torch.autograd.grad(out, inputs, grad))]


def assert_close(got: list[Tensor], wanted: list[Tensor], terms: list[Tensor] | None = None) -> None:
    """Compare to a few roundings of the largest of `terms`, whose differences are the results; default: `wanted`."""
    for a, b, term in zip(got, wanted, terms or wanted, strict=True):
        largest = float(term.abs().max()) if term.numel() else 0.0
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6 * largest)


@given(
    rows=ROWS,
    width=st.sampled_from([2, 16, 33, 128]),
    scale=st.sampled_from([1e-4, 1.0, 1e4]),
    eps=st.sampled_from([1e-6, 1e-5]),
    plus_one=st.booleans(),
    is_strided=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_norm_equals_float64(
    rows: tuple[int, ...], width: int, scale: float, eps: float, plus_one: bool, is_strided: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = scale * torch.randn(*rows, 2 * width, generator=generator)
    x = (x[..., :width] if is_strided else x[..., :width].contiguous()).requires_grad_()
    grad = torch.randn(*rows, width, generator=generator)
    norm = norm_of(torch.rand(width, generator=generator), eps, plus_one)
    got = with_gradients(norm(x), [x, norm.weight], grad)

    x64, weight64 = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    factor64 = weight64 + 1 if plus_one else weight64
    wanted = with_gradients(F.rms_norm(x64, (width,), factor64, eps), [x64, weight64], grad.double())
    through_x = (factor64 * grad / (x64.square().mean(-1, keepdim=True) + eps).sqrt()).detach()  # before the projection
    through_weight = (grad * wanted[0] / factor64.detach()).abs().flatten(0, -2).sum(0)
    assert_close(got, wanted, [wanted[0], through_x, through_weight])


@given(
    rows=ROWS,
    width=st.sampled_from([1, 3, 16, 40]),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
    activation=st.sampled_from(["silu", "gelu_pytorch_tanh"]),
    is_strided=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_gated_activation_equals_float64(
    rows: tuple[int, ...], width: int, scale: float, activation: str, is_strided: bool, seed: int
) -> None:
    functions = {"silu": F.silu, "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh")}
    function = functions[activation]
    generator = torch.Generator().manual_seed(seed)
    x = scale * torch.randn(*rows, 4 * width, generator=generator)
    x = (x[..., : 2 * width] if is_strided else x[..., : 2 * width].contiguous()).requires_grad_()
    grad = torch.randn(*rows, width, generator=generator)
    settings: Any = SimpleNamespace(activation_func=function)
    got = with_gradients(GatedActivation(settings)(x), [x], grad)

    x64 = x.detach().double().requires_grad_()
    gate, up = x64.chunk(2, dim=-1)
    wanted = with_gradients(function(gate) * up, [x64], grad.double())
    # Far out, the gate's own factor is a difference of ones, and the derivative multiplies it by up to nine.
    terms = [(gate * up).detach(), torch.cat((grad * up, grad * gate), dim=-1).detach()]
    assert_close(got, wanted, terms)


@given(
    num_tokens=st.integers(0, 40),
    num_heads=st.integers(1, 4),
    half=st.sampled_from([1, 3, 16]),
    factor=st.sampled_from([1.0, 0.7, 1.14]),
    is_strided=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_rotation_is_multiplication_by_a_complex_number(
    num_tokens: int, num_heads: int, half: int, factor: float, is_strided: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    angles_TX = 100 * torch.rand(num_tokens, half, generator=generator)
    x = torch.randn(num_tokens, 1, 2 * num_heads, 2 * half, generator=generator)
    x = (x[:, :, ::2] if is_strided else x[:, :, :num_heads].contiguous()).requires_grad_()
    grad = torch.randn(x.shape, generator=generator)
    got = with_gradients(rotate(x, rotation_of(angles_TX, torch.float32, factor)), [x], grad)

    x64 = x.detach().double().requires_grad_()
    unit_TX = torch.polar(torch.tensor(factor).double(), angles_TX.double())
    turned = torch.complex(*x64.chunk(2, dim=-1)) * unit_TX[:, None, None]
    wanted = torch.cat((turned.real, turned.imag), dim=-1)
    assert_close(got, with_gradients(wanted, [x64], grad.double()))


def test_norm_of_zeros_is_zero() -> None:
    x = torch.zeros(3, 8, requires_grad=True)
    out = norm_of(torch.ones(8), 1e-6, plus_one=False)(x)
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert out.abs().max() == 0
    torch.testing.assert_close(grad, torch.full_like(x, 1e3))  # weight / sqrt(eps)


@pytest.mark.parametrize("plus_one", [False, True])
def test_bfloat16_is_torchs_own(plus_one: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 16, generator=generator).bfloat16()
    weight = torch.rand(16, generator=generator).bfloat16()
    got = norm_of(weight, 1e-6, plus_one)(x)
    wanted = F.rms_norm(x.float(), (16,), weight.float() + plus_one, 1e-6)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), wanted, rtol=2**-7, atol=1e-6)


def test_inputs_alone_are_kept() -> None:
    kept: list[Tensor] = []
    x = torch.randn(9, 1, 24, requires_grad=True)
    settings: Any = SimpleNamespace(activation_func=F.silu)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        GatedActivation(settings)(x)
        norm_of(torch.ones(24), 1e-6, plus_one=False)(x)
    assert sorted(t.numel() for t in kept) == [9, 24, 9 * 24, 9 * 24]  # 1 / rms, weight, and x twice
    assert {t.data_ptr() for t in kept if t.numel() == 9 * 24} == {x.data_ptr()}
