"""Linear attention on a GPU: flash-linear-attention against the rule in plain torch, and whole updates with it."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from bapo_megatron.learner.linear_attention import fla_delta_rule, torch_delta_rule
from bapo_megatron.learner.packs import Sequences
from tests.gpu.updates import Result, gradient_cosine, log_prob_distance, needs, one_update, save_model
from tests.integration.learner_reference import load_float64, random_batch, reference_update

BF16, ENGINE, LOCAL = "model.dtype=bfloat16", "model.implementation=transformer_engine", "model.implementation=local"
KEY_HEADS, VALUE_HEADS, DIM = 4, 8, 128
FAR = {torch.float32: 5e-3, torch.bfloat16: 2e-2}  # relative, of a whole tensor; fla multiplies in TF32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("fla")
    return save_model(tmp_path_factory.mktemp("gpu") / "model", "qwen3_5_text")


@pytest.fixture(scope="module")
def float32(folder: Path) -> Result:
    return one_update(folder, LOCAL)


def results(rule: object, inputs: list[Tensor], weights_TNV: Tensor, sequences: Sequences) -> list[Tensor]:
    """Return the rule's answers, and the gradients of its inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out_TNV = rule(*leaves, sequences)
    (out_TNV.double() * weights_TNV).sum().backward()
    return [out_TNV.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("dtype", FAR)
@pytest.mark.parametrize("lengths", [(70, 1, 3, 130, 17), (64, 64, 1000, 5)])
def test_flash_linear_attention_is_the_delta_rule(lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    pytest.importorskip("fla")
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(sum(lengths), *size, device="cuda", generator=generator)

    q_TKD, k_TKD = (normal(KEY_HEADS, DIM).to(dtype) for _ in range(2))
    v_TNV, weights_TNV = normal(VALUE_HEADS, DIM).to(dtype), normal(VALUE_HEADS, DIM).double()
    g_TN, beta_TN = -torch.nn.functional.softplus(normal(VALUE_HEADS)) / 2, normal(VALUE_HEADS).sigmoid()
    inputs = [q_TKD, k_TKD, v_TNV, g_TN, beta_TN]
    sequences = Sequences.of(torch.tensor([0, *lengths]).cumsum(0), device=q_TKD.device)
    exact = results(torch_delta_rule, [x.double() for x in inputs], weights_TNV, sequences)
    for found, want in zip(results(fla_delta_rule, inputs, weights_TNV, sequences), exact, strict=True):
        assert (found.double() - want).norm() < FAR[dtype] * want.norm()


def test_float32_is_near_the_float64_reference(folder: Path, float32: Result) -> None:
    batch = random_batch()
    want = reference_update(load_float64(folder), batch)
    mask_T = batch.mask_T
    torch.testing.assert_close(float32.log_probs_T[mask_T].double(), want.log_probs_T[mask_T], rtol=1e-3, atol=1e-3)
    for name, gradient in float32.gradients.items():
        assert (gradient.double() - want.gradients[name]).norm() < 0.01 * want.gradients[name].norm(), name


@pytest.mark.parametrize("implementation", [LOCAL, ENGINE])
def test_bfloat16_is_near_float32(folder: Path, float32: Result, implementation: str) -> None:
    needs(folder, BF16, implementation)
    ours = one_update(folder, BF16, implementation)
    assert log_prob_distance(ours, float32) < 0.02
    assert gradient_cosine(ours, float32) > 0.99
