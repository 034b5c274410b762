"""The lookup of token embeddings and its gradient against torch's own."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bapo_megatron.learner.embedding import Lookup, embed

NUM_ROWS, WIDTH = 7, 3


def reference(weight_VH: Tensor, rows_1T: Tensor, elsewhere_1T: Tensor, grad_1TH: Tensor) -> tuple[Tensor, Tensor]:
    """Return embeddings and the dense gradient, token by token."""
    hidden_1TH, grad_VH = torch.zeros_like(grad_1TH), torch.zeros_like(weight_VH)
    for t in range(rows_1T.shape[1]):
        if not elsewhere_1T[0, t]:
            hidden_1TH[0, t] = weight_VH[rows_1T[0, t]]
            grad_VH[rows_1T[0, t]] += grad_1TH[0, t]
    return hidden_1TH, grad_VH


@given(
    rows=st.lists(st.tuples(st.integers(0, NUM_ROWS - 1), st.booleans()), max_size=30),
    with_elsewhere=st.booleans(),
    has_main=st.booleans(),
    hooks_need_grad=st.booleans(),
)
def test_lookup_and_gradient(
    rows: list[tuple[int, bool]], with_elsewhere: bool, has_main: bool, hooks_need_grad: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    rows_1T = torch.tensor([[row for row, _ in rows]], dtype=torch.int64)
    elsewhere_1T = torch.tensor([[with_elsewhere and other for _, other in rows]], dtype=torch.bool)
    weight_VH: Any = torch.randn(NUM_ROWS, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    grad_1TH = torch.randn(1, len(rows), WIDTH, generator=generator, dtype=torch.float64)
    before_VH = torch.randn(NUM_ROWS, WIDTH, generator=generator)
    if has_main:
        weight_VH.main_grad = before_VH.clone()
    hidden_1TH = Lookup.apply(weight_VH, rows_1T, elsewhere_1T if with_elsewhere else None, hooks_need_grad)
    hidden_1TH.backward(grad_1TH)

    wanted_1TH, wanted_VH = reference(weight_VH.detach(), rows_1T, elsewhere_1T, grad_1TH)
    torch.testing.assert_close(hidden_1TH, wanted_1TH, rtol=0, atol=0)
    if not has_main:
        torch.testing.assert_close(weight_VH.grad, wanted_VH, rtol=1e-12, atol=1e-12)
        return
    torch.testing.assert_close(weight_VH.main_grad, before_VH + wanted_VH.float(), rtol=1e-5, atol=1e-5)
    if hooks_need_grad:
        torch.testing.assert_close(weight_VH.grad, torch.zeros_like(weight_VH), rtol=0, atol=0)
    else:
        assert weight_VH.grad is None


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_looks_up_its_own_rows(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bapo_megatron.learner.embedding.reduce_from_tensor_model_parallel_region", lambda x, group: x)
    weight_VH = torch.randn(3 * NUM_ROWS, WIDTH)
    layer: Any = SimpleNamespace(
        weight=weight_VH[rank * NUM_ROWS :][:NUM_ROWS],
        vocab_start_index=rank * NUM_ROWS,
        num_embeddings_per_partition=NUM_ROWS,
        tp_group=SimpleNamespace(size=lambda: 3),
        reduce_scatter_embeddings=False,
    )
    token_ids_1T = torch.arange(3 * NUM_ROWS)[None]
    hidden_1TH = embed(layer, token_ids_1T, hooks_need_grad=False)
    mine = (token_ids_1T // NUM_ROWS == rank)[..., None]
    torch.testing.assert_close(hidden_1TH, torch.where(mine, weight_VH, 0.0), rtol=0, atol=0)
