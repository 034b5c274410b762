"""The gradient of the token embedding on a GPU equals torch's, with the same bits every time in a deterministic run."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bapo_megatron.learner.embedding import Lookup

VOCAB_SIZE, HIDDEN_SIZE, NUM_TOKENS = 152_064, 512, 4096


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)  # as a rank does
    yield
    torch.use_deterministic_algorithms(False)


def test_rows_are_added_in_a_fixed_order() -> None:
    generator = torch.Generator(device="cuda").manual_seed(0)
    weight_VH: Any = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, device="cuda", generator=generator).bfloat16()
    weight_VH.requires_grad_()
    rows_1T = torch.randint(50, (1, NUM_TOKENS), device="cuda", generator=generator)  # each row about 80 times
    grad_1TH = torch.randn(1, NUM_TOKENS, HIDDEN_SIZE, device="cuda", generator=generator).bfloat16()
    found = []
    for _ in range(3):
        weight_VH.main_grad = torch.zeros(VOCAB_SIZE, HIDDEN_SIZE, device="cuda")
        Lookup.apply(weight_VH, rows_1T, None, False).backward(grad_1TH)
        found.append(weight_VH.main_grad)
    wanted_VH = torch.zeros(VOCAB_SIZE, HIDDEN_SIZE, dtype=torch.float64)
    wanted_VH.index_add_(0, rows_1T[0].cpu(), grad_1TH[0].double().cpu())
    torch.testing.assert_close(found[0].double().cpu(), wanted_VH, rtol=1e-5, atol=1e-4)
    assert all(torch.equal(found[0], other) for other in found[1:])
