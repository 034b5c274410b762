"""The gated delta rule against transformers' own: chunks that follow each other, and token by token."""

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from bapo_megatron.kernels.delta_rule import rule_of_chunk, rule_of_token

ROWS, KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 3, 2, 6, 8, 12


def inputs(num_tokens: int) -> list[Tensor]:
    """Return queries, keys, values, decays and betas as [rows, heads, tokens, dimension]."""
    torch.manual_seed(num_tokens)
    q, k = torch.randn(2, ROWS, KEY_HEADS, num_tokens, KEY_DIM)
    v = torch.randn(ROWS, HEADS, num_tokens, VALUE_DIM)
    decay, beta = -torch.rand(ROWS, HEADS, num_tokens, 1) * 3, torch.rand(ROWS, HEADS, num_tokens, 1)
    return [q, k, v, decay, beta]


def of_transformers(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, ...]:
    q, k = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (q, k))
    tokens_first = (x.transpose(1, 2) for x in (q, k, v, decay[..., 0], beta[..., 0]))
    out, end = torch_recurrent_gated_delta_rule(
        *tokens_first, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    return out.transpose(1, 2), end


@pytest.mark.parametrize("num_tokens", [1, 5, 64, 130])
def test_chunks_and_tokens_equal_transformers(num_tokens: int) -> None:
    whole, start = inputs(num_tokens), torch.randn(ROWS, HEADS, KEY_DIM, VALUE_DIM)
    expected = of_transformers(*whole, start)
    for length in (50, 1):
        outs, state = [], start
        for part in zip(*(x.split(length, 2) for x in whole), strict=True):
            if length > 1:
                out, state = rule_of_chunk((*part, state))
            else:
                q, k, v, decay, beta = (x[:, :, 0] for x in part)
                out, state = rule_of_token(q, k, v, decay[..., 0], beta[..., 0], state)
                out = out[:, :, None]
            outs.append(out)
        torch.testing.assert_close((torch.cat(outs, 2), state), expected, atol=3e-6, rtol=3e-6)


def test_padding_leaves_the_state() -> None:
    *parts, decay, beta = inputs(9)
    start, is_padding = torch.zeros(ROWS, HEADS, KEY_DIM, VALUE_DIM), (torch.arange(9) >= 6)[:, None]
    padded = rule_of_chunk((*parts, decay.masked_fill(is_padding, 0), beta.masked_fill(is_padding, 0), start))
    out, state = rule_of_chunk([*(x[:, :, :6] for x in (*parts, decay, beta)), start])
    torch.testing.assert_close((padded[0][:, :, :6], padded[1]), (out, state), atol=1e-6, rtol=1e-6)
