"""One learner on one GPU, in a process of its own: what it scores, and what one update does."""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from bapo_megatron.buffer.packing import one_minibatch
from bapo_megatron.config.load import load_config
from bapo_megatron.hf.shape import load_hf_config, model_shape
from bapo_megatron.learner.precision import check_precision, this_machine
from bapo_megatron.resolved import resolve
from tests.distributed import HANG_S
from tests.integration.learner_reference import BOUNDS, TEMPERATURE, Reference, random_batch

# Every size of a layer is a multiple of 128, which suits every FP8 recipe.
SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}
HYBRID: dict[str, Any] = {
    "full_attention_interval": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
}
SETTINGS = [f"rollout.temperature={TEMPERATURE}", "optimizer.lr=1e-4", "optimizer.clip_grad=1e9"]


@dataclass
class Result:
    """The tensors of one update, on the CPU in float32; tokens are in the order of the batch."""

    log_probs_T: Tensor  # before the update
    gradients: dict[str, Tensor]
    exported: dict[str, Tensor]  # before the update
    updated: dict[str, Tensor]
    metrics: dict[str, float]


def save_model(folder: Path, family: str = "qwen3") -> Path:
    """Save a model of about 10M parameters in bfloat16, at the scale that training starts from."""
    torch.manual_seed(0)
    sizes = SIZES | {"head_dim": 64, "tie_word_embeddings": False}
    config = {
        "qwen3": lambda: transformers.Qwen3Config(**sizes),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**sizes | EXPERTS),
        "qwen3_5_text": lambda: transformers.Qwen3_5TextConfig(**sizes | HYBRID),
    }[family]()
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def refusals(folder: Path, *overrides: str) -> list[str]:
    """Return why this machine cannot run these settings."""
    shape = model_shape(load_hf_config(folder))
    config = load_config([], [*SETTINGS, *overrides])
    return [v.message for v in check_precision(config, shape=shape, machine=this_machine())]


def needs(folder: Path, *overrides: str) -> None:
    """Skip the test if this machine cannot run these settings."""
    if found := refusals(folder, *overrides):
        pytest.skip("; ".join(found))


def one_update(folder: Path, *overrides: str) -> Result:
    """Return what a learner with these settings does, in a new process, because Megatron's groups belong to it."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_one_update, folder, overrides).result(timeout=HANG_S)


def _one_update(folder: Path, overrides: tuple[str, ...]) -> Result:
    from bapo_megatron.learner.megatron import MegatronLearner

    torch.backends.cuda.matmul.allow_tf32 = False
    learner = MegatronLearner(resolve(load_config([], [*SETTINGS, *overrides]), folder))
    batch = random_batch()
    if learner.config.model.replay_routes:
        from tests.integration.test_routes import routed_batch

        batch = routed_batch(folder)
    minibatch = one_minibatch(batch, max_tokens=100, share=learner.share)
    log_probs_T = torch.zeros(batch.token_ids_T.numel())
    scores = learner.log_probs(minibatch)
    assert scores is not None
    for micro, log_probs_R in zip(minibatch.micro_batches, scores, strict=True):
        log_probs_T[micro.batch_rows_R] = log_probs_R.float().cpu()

    def copied(named: Any) -> dict[str, Tensor]:
        return {name: tensor.float().cpu().clone() for name, tensor in named}

    exported = copied(learner.weights().whole())
    metrics = learner.step(minibatch, BOUNDS).metrics
    return Result(log_probs_T, copied(learner.named_gradients()), exported, copied(learner.weights().whole()), metrics)


def check_exact(found: Result, want: Reference) -> None:
    """Compare a float32 update with the float64 reference."""
    mask_T = random_batch().mask_T
    torch.testing.assert_close(found.log_probs_T[mask_T].double(), want.log_probs_T[mask_T], rtol=1e-4, atol=1e-4)
    assert found.gradients.keys() == want.gradients.keys()
    for name, gradient in found.gradients.items():
        torch.testing.assert_close(gradient.double(), want.gradients[name], rtol=1e-3, atol=1e-5, msg=name)


def log_prob_distance(a: Result, b: Result) -> float:
    """Return the mean |difference| over response tokens, in nats."""
    mask_T = random_batch().mask_T
    return float((a.log_probs_T - b.log_probs_T)[mask_T].abs().mean())


def gradient_cosine(a: Result, b: Result) -> float:
    """Return the cosine of the angle between the whole gradients."""
    assert a.gradients.keys() == b.gradients.keys()
    one, two = (torch.cat([r.gradients[name].flatten() for name in sorted(r.gradients)]) for r in (a, b))
    return float(torch.cosine_similarity(one.double(), two.double(), dim=0))
