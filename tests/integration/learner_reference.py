"""A single-process float64 reference for the learner: plain transformers, one sequence at a time, literal formulas."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from bapo_megatron.types import Batch, ClipBounds

BOUNDS = ClipBounds(low=0.8, high=1.3, positive_share=0.5, saturated=False, num_moves=0)
VOCAB_SIZE = 33  # does not divide by two: tensor parallelism has to pad it
TEMPERATURE = 0.8
LR, ADAM_EPS = 3e-3, 1e-3
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES = {
    "qwen3": lambda: transformers.Qwen3Config(**_SIZES, head_dim=16, tie_word_embeddings=False),
    "qwen2": lambda: transformers.Qwen2Config(**_SIZES, tie_word_embeddings=True),
    "llama": lambda: transformers.LlamaConfig(**_SIZES, tie_word_embeddings=True, rope_parameters=_LLAMA3_ROPE),
}


def save_random_model(family: str, folder: Path) -> None:
    """A tiny checkpoint in which no weight has a value that a mistake in the name map could hit by chance."""
    torch.manual_seed(5)
    config = FAMILIES[family]()
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.15 * noise)
    model.save_pretrained(folder)


def load_float64(folder: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="sdpa", local_files_only=True
    )


def random_batch(num_sequences: int = 9) -> Batch:
    """Sequences of very different lengths; `versions_T` holds each token's index, so that results can be matched."""
    generator = torch.Generator().manual_seed(11)

    def integers(low: int, high: int, size: int) -> Tensor:
        return torch.randint(low, high, (size,), generator=generator)

    seq_lens_S = integers(4, 40, num_sequences)
    prompt_lens_S = torch.minimum(integers(1, 6, num_sequences), seq_lens_S - 1)
    num_tokens = int(seq_lens_S.sum())
    is_response_T = torch.cat(
        [torch.arange(n) >= p for n, p in zip(seq_lens_S.tolist(), prompt_lens_S.tolist(), strict=True)]
    )
    mask_T = is_response_T & (torch.rand(num_tokens, generator=generator) > 0.1)
    return Batch(
        token_ids_T=integers(0, VOCAB_SIZE, num_tokens),
        seq_lens_S=seq_lens_S,
        prompt_lens_S=prompt_lens_S,
        advantages_T=torch.randn(num_tokens, generator=generator) * is_response_T,
        behaviour_logprobs_T=(-3.5 + torch.randn(num_tokens, generator=generator)) * is_response_T,
        versions_T=torch.where(is_response_T, torch.arange(num_tokens), -1),
        mask_T=mask_T,
    )


@dataclass
class Reference:
    """What one update must give; per-token values are indexed as the batch's tokens are."""

    log_probs_T: Tensor
    entropy_T: Tensor
    loss: float
    gradients: dict[str, Tensor]
    grad_norm: float


def reference_update(
    model: torch.nn.Module,
    batch: Batch,
    optimizer: torch.optim.Optimizer | None = None,
    entropy_coef: float = 0.0,
) -> Reference:
    """Scores, loss and gradient at the model's weights; then steps `optimizer` if one is given."""
    log_probs, entropies, start = [], [], 0
    for length in batch.seq_lens_S.tolist():
        ids = batch.token_ids_T[start : start + length]
        logits = model(ids[None]).logits[0] / TEMPERATURE
        all_log_probs = logits.log_softmax(-1)
        first = torch.zeros(1, dtype=torch.float64)
        log_probs.append(torch.cat([first, all_log_probs[:-1].gather(1, ids[1:, None])[:, 0]]))
        entropies.append(torch.cat([first, -(all_log_probs.exp() * all_log_probs).sum(-1)[:-1]]))
        start += length
    log_probs_T, entropy_T = torch.cat(log_probs), torch.cat(entropies)
    loss = literal_loss(log_probs_T, batch)
    model.zero_grad()
    bonus = entropy_coef * entropy_T[batch.mask_T].mean()
    (loss - bonus).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    grad_norm = float(torch.stack([g.norm() for g in gradients.values()]).norm())
    if optimizer is not None:
        optimizer.step()
    return Reference(log_probs_T.detach(), entropy_T.detach(), loss.item(), gradients, grad_norm)


def literal_loss(log_probs_T: Tensor, batch: Batch) -> Tensor:
    """- mean over trained tokens of min(r A, clip(r, low, high) A)."""
    total = torch.zeros((), dtype=torch.float64)
    for t in batch.mask_T.nonzero()[:, 0].tolist():
        ratio = (log_probs_T[t] - batch.behaviour_logprobs_T[t].double()).exp()
        advantage = batch.advantages_T[t].double()
        total = total - torch.minimum(ratio * advantage, ratio.clamp(BOUNDS.low, BOUNDS.high) * advantage)
    return total / int(batch.mask_T.sum())
