"""The embedded engine's gated delta rule against transformers' own, whole rows and token by token."""

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from bapo_megatron.engines.embedded.delta_rule import delta_rule, delta_step

ROWS, KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 3, 2, 6, 8, 12


def inputs(num_tokens: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(num_tokens)
    q, k = torch.randn(2, ROWS, num_tokens, KEY_HEADS, KEY_DIM)
    v = torch.randn(ROWS, num_tokens, HEADS, VALUE_DIM)
    decay = -torch.rand(ROWS, num_tokens, HEADS) * 3
    return q, k, v, decay, torch.rand(ROWS, num_tokens, HEADS)


def of_transformers(
    q: torch.Tensor, k: torch.Tensor, *rest: torch.Tensor, state: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k = (x.repeat_interleave(HEADS // KEY_HEADS, 2) for x in (q, k))
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    return torch_recurrent_gated_delta_rule(q, k, *rest, **options)


@pytest.mark.parametrize("num_tokens", [1, 5, 64, 130])
@pytest.mark.parametrize("has_state", [False, True])
def test_rows_equal_transformers_token_by_token(num_tokens: int, has_state: bool) -> None:
    state = torch.randn(ROWS, HEADS, KEY_DIM, VALUE_DIM) if has_state else None
    found = delta_rule(*inputs(num_tokens), state)
    torch.testing.assert_close(found, of_transformers(*inputs(num_tokens), state=state), atol=3e-6, rtol=3e-6)


def test_steps_and_padding_continue_a_row() -> None:
    q, k, v, decay, beta = inputs(9)
    whole, end = delta_rule(q, k, v, decay, beta)
    is_padding = (torch.arange(9) >= 6)[None, :, None]
    out, state = delta_rule(q, k, v, decay.masked_fill(is_padding, 0), beta.masked_fill(is_padding, 0))
    torch.testing.assert_close(out[:, :6], whole[:, :6], atol=1e-6, rtol=1e-6)
    for t in range(6, 9):
        out, state = delta_step(q[:, t], k[:, t], v[:, t], decay[:, t], beta[:, t], state)
        torch.testing.assert_close(out, whole[:, t], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(state, end, atol=1e-6, rtol=1e-6)
