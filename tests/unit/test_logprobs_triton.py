"""The Triton kernels against fp64 and against torch: on a GPU if there is one, otherwise by Triton's interpreter."""

import inspect
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton comes with torch's CUDA builds; pip install triton==3.7.1 interprets it")

from bapo_megatron.algorithms import logprobs, logprobs_triton
from bapo_megatron.algorithms.logprobs import VocabShard, token_log_probs
from tests.distributed import HANG_S, run_distributed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split each row of a small vocabulary into several blocks."""
    monkeypatch.setattr(logprobs_triton, "BLOCK", 32)


def inputs(rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + vocab)
    hidden_RH = 2 * torch.randn(rows, 16, generator=generator)
    weight_VH = torch.randn(vocab, 16, generator=generator)
    targets_R = torch.randint(vocab, (rows,), generator=generator)
    targets_R[:2] = torch.tensor([0, vocab - 1])[:rows]
    tensors = [hidden_RH.to(DEVICE, dtype).requires_grad_(), weight_VH.to(DEVICE, dtype).requires_grad_()]
    return [*tensors, targets_R.to(DEVICE)]


def combined_loss(log_probs_R: torch.Tensor, entropy_R: torch.Tensor) -> torch.Tensor:
    factor_R = torch.linspace(-1, 2, log_probs_R.numel(), dtype=log_probs_R.dtype, device=log_probs_R.device)
    return (factor_R * log_probs_R).sum() + 0.7 * (factor_R.cos() * entropy_R).sum()


def brute_force(tensors: list[torch.Tensor], temperature: float) -> list[torch.Tensor]:
    """Return values and gradients in float64, from the complete matrix of logits."""
    hidden_RH, weight_VH = (x.detach().double().requires_grad_() for x in tensors[:2])
    log_p_RV = torch.log_softmax(hidden_RH @ weight_VH.T / temperature, dim=1)
    log_probs_R = log_p_RV.gather(1, tensors[2][:, None])[:, 0]
    entropy_R = -(log_p_RV.exp() * log_p_RV).sum(dim=1)
    combined_loss(log_probs_R, entropy_R).backward()
    assert hidden_RH.grad is not None
    assert weight_VH.grad is not None
    return [log_probs_R.detach(), entropy_R.detach(), hidden_RH.grad, weight_VH.grad]


def call(tensors: list[torch.Tensor], temperature: float, shard: VocabShard, **kwargs: object) -> list[torch.Tensor]:
    outputs = token_log_probs(*tensors, temperature=temperature, shard=shard, backend="triton", **kwargs)  # type: ignore
    combined_loss(*outputs).backward()
    return [*(x.detach() for x in outputs), tensors[0].grad, tensors[1].grad]  # type: ignore[list-item]


def whole(vocab: int, size: int | None = None) -> VocabShard:
    return VocabShard(group=None, start=0, size=size or vocab, vocab_size=vocab)


def assert_close(got: list[torch.Tensor], wanted: list[torch.Tensor], tolerance: float = 2e-5) -> None:
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 5), st.integers(1, 100), st.sampled_from([1.0, 0.6, 1.7]), st.integers(1, 6))
def test_values_and_gradients_against_fp64(rows: int, vocab: int, temperature: float, chunk_tokens: int) -> None:
    tensors = inputs(rows, vocab)
    wanted = brute_force(tensors, temperature)
    got = call(tensors, temperature, whole(vocab), chunk_tokens=chunk_tokens)
    assert_close(got, wanted)


def test_a_row_of_many_blocks() -> None:
    tensors = inputs(2, 1500)
    wanted = brute_force(tensors, 1.0)
    assert_close(call(tensors, 1.0, whole(1500)), wanted)


def test_padding_has_no_probability_and_no_gradient() -> None:
    tensors = inputs(5, 70)
    wanted = brute_force(tensors, 1.0)
    tensors[1] = torch.cat([tensors[1].detach(), torch.full((3, 16), 50.0, device=DEVICE)]).requires_grad_()
    got = call(tensors, 1.0, whole(70, size=73))
    assert not got[3][70:].any()
    assert_close([*got[:3], got[3][:70]], wanted)


def test_one_output_alone_and_without_entropy() -> None:
    """Test the kernels' branches without entropy, and without a gradient on the log-probs."""
    for pick, with_entropy in ((0, True), (1, True), (0, False)):
        grads = []
        for backend in ("torch", "triton"):
            tensors = inputs(4, 50)
            outputs = token_log_probs(*tensors, shard=whole(50), with_entropy=with_entropy, backend=backend)  # type: ignore
            outputs[pick].sum().backward()
            grads.append([outputs[0].detach(), outputs[1].detach(), tensors[0].grad, tensors[1].grad])
        torch.testing.assert_close(grads[1], grads[0], rtol=2e-5, atol=2e-5)


def test_large_logits_do_not_overflow() -> None:
    tensors = inputs(4, 100)
    tensors[0] = (1000 * tensors[0]).detach().requires_grad_()
    assert all(torch.isfinite(x).all() for x in call(tensors, 1.0, whole(100)))


def test_bfloat16_operands_give_float32_results() -> None:
    tensors = inputs(4, 100, torch.bfloat16)
    wanted = brute_force(tensors, 1.0)
    got = call(tensors, 1.0, whole(100))
    assert got[0].dtype == got[1].dtype == torch.float32
    assert got[2].dtype == got[3].dtype == torch.bfloat16
    assert_close(got[:2], wanted[:2])
    assert_close(got[2:], wanted[2:], tolerance=1e-2)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 5), st.integers(2, 100), st.sampled_from([1.0, 0.6]), st.booleans())
def test_a_bfloat16_gradient_is_the_float32_one_rounded(
    rows: int, vocab: int, temperature: float, has_entropy: bool
) -> None:
    generator = torch.Generator().manual_seed(rows * 1000 + vocab)

    def normal(*size: int) -> torch.Tensor:
        return (5 * torch.randn(*size, generator=generator)).to(DEVICE)

    logits_CV, pull_C, entropy_C = normal(rows, vocab), normal(rows), normal(rows).abs()
    columns_C = torch.randint(-1, vocab, (rows,), generator=generator).to(DEVICE)
    arguments = (columns_C, temperature, (logits_CV / temperature).logsumexp(1), pull_C, entropy_C)
    entropy_pull_C = normal(rows) if has_entropy else None
    exact, low = (
        logprobs_triton.logit_gradients(logits_CV.clone(), *arguments, entropy_pull_C, dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert low.dtype == torch.bfloat16
    if DEVICE == "cuda":
        assert torch.equal(low, exact.bfloat16())
    else:  # the interpreter cuts digits off; test_the_kernels_compile_for_hopper finds the rounding instruction
        torch.testing.assert_close(low.float(), exact, rtol=2**-7, atol=1e-30)
    by_torch = logprobs.logit_gradients(logits_CV.clone(), *arguments, entropy_pull_C, torch.bfloat16)
    torch.testing.assert_close(low, by_torch, rtol=2**-6, atol=1e-4)  # two steps of bfloat16


@pytest.mark.parametrize("bad", ["float64", "strided"])
def test_what_the_kernels_cannot_read_is_refused(bad: str) -> None:
    logits_CV = torch.zeros(4, 6, dtype=torch.float64) if bad == "float64" else torch.zeros(6, 4).T
    with pytest.raises(AssertionError, match="kernels"):
        logprobs_triton.row_statistics(logits_CV, torch.zeros(4, dtype=torch.int64), 1.0, True)


def _parallel_rank(rank: int, size: int) -> None:
    hidden_RH, weight_VH, targets_R = inputs(6, 50)
    wanted = brute_force([hidden_RH, weight_VH, targets_R], 0.8)
    rows = 52 // size
    padded_VH = torch.cat([weight_VH.detach(), torch.zeros(2, 16)])
    mine_VH = padded_VH[rank * rows : (rank + 1) * rows].clone().requires_grad_()
    shard = VocabShard(dist.group.WORLD, rank * rows, rows, 50)
    got = call([hidden_RH, mine_VH, targets_R], 0.8, shard, chunk_tokens=4)
    assert_close(got[:3], wanted[:3])
    real = shard.num_real
    assert_close([got[3][:real]], [wanted[3][rank * rows : rank * rows + real]])


@pytest.mark.skipif(DEVICE == "cuda", reason="the ranks of this test speak gloo; on GPUs see tests/gpu")
def test_vocabulary_over_two_ranks() -> None:
    run_distributed(_parallel_rank, 2)


_COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from bapo_megatron.algorithms import logprobs_triton as kernels

statistics = {"logits": "*fp32", "columns": "*i64", "out": "*fp32", "num_rows": "i32", "num_columns": "i32"}
rows = dict.fromkeys(("log_zs", "pulls", "entropies", "entropy_pulls"), "*fp32")
gradients = [
    {"logits": "*fp32", "grads": grads, "columns": "*i64", **rows, "num_columns": "i32"} for grads in ("*fp32", "*bf16")
]
for kernel, types, flag in (
    (kernels.statistics_kernel, statistics, "with_entropy"),
    *((kernels.gradients_kernel, types, "has_entropy") for types in gradients),
):
    types |= {"scale": "fp32", flag: "constexpr", "block": "constexpr"}
    source = ASTSource(kernel, types, {flag: True, "block": kernels.BLOCK})
    done = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": kernels.NUM_WARPS})
    assert done.asm["cubin"]
    assert "st.local" not in done.asm["ptx"], "registers are spilled"
    rounds_to_nearest = "cvt.rn.bf16" in done.asm["ptx"]
    assert rounds_to_nearest == (types.get("grads") == "*bf16")
"""


def test_the_kernels_compile_for_hopper() -> None:
    """They compile down to machine code, which needs no GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", _COMPILE], check=True, env=environment, timeout=HANG_S)


def test_torch_and_triton_have_one_interface() -> None:
    for name in ("row_statistics", "logit_gradients"):
        parameters = [list(inspect.signature(getattr(m, name)).parameters) for m in (logprobs, logprobs_triton)]
        assert parameters[0] == parameters[1]
