"""Compiled Triton kernels against torch at a real vocabulary; tests/unit/test_logprobs_triton.py runs here too."""

import pytest
import torch

from bapo_megatron.algorithms.logprobs import Backend, VocabShard, token_log_probs

VOCAB_SIZE, HIDDEN_SIZE, ROWS = 152_064, 512, 700


def outputs_and_gradients(backend: Backend, dtype: torch.dtype, temperature: float) -> list[torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, device="cuda", generator=generator)

    hidden_RH = normal(ROWS, HIDDEN_SIZE).to(dtype).requires_grad_()
    weight_VH = (0.1 * normal(VOCAB_SIZE, HIDDEN_SIZE)).to(dtype).requires_grad_()
    targets_R = torch.randint(VOCAB_SIZE, (ROWS,), device="cuda", generator=generator)
    shard = VocabShard(None, 0, VOCAB_SIZE, VOCAB_SIZE - 10)
    log_probs_R, entropy_R = token_log_probs(
        hidden_RH,
        weight_VH,
        targets_R.clamp(max=shard.vocab_size - 1),
        temperature=temperature,
        shard=shard,
        chunk_tokens=256,
        backend=backend,
    )
    (log_probs_R.sum() + 0.3 * (entropy_R**2).sum()).backward()
    assert hidden_RH.grad is not None
    assert weight_VH.grad is not None
    return [log_probs_R.detach(), entropy_R.detach(), hidden_RH.grad, weight_VH.grad]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 1e-2)])
def test_triton_equals_torch(dtype: torch.dtype, tolerance: float, temperature: float) -> None:
    pytest.importorskip("triton")
    got, want = (outputs_and_gradients(backend, dtype, temperature) for backend in ("triton", "torch"))
    for a, b in zip(got[:2], want[:2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)
    for a, b in zip(got[2:], want[2:], strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max()))
