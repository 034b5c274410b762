"""A single-process float64 reference for the learner: plain transformers with eager attention, one sequence at a time,
literal formulas."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from bapo_megatron.config.schema_loss import ClipBoundConfig
from bapo_megatron.hf.adapters import PEFT_PREFIX, TARGETS, Adapters
from bapo_megatron.hf.peft import WEIGHTS, adapter_tensors, write_peft
from bapo_megatron.hf.shape import load_hf_config, model_shape
from bapo_megatron.types import Batch, ClipBounds

BOUNDS = ClipBounds(low=0.8, high=1.3, positive_share=0.5, saturated=False, num_moves=0)
ADAPTERS = Adapters(4, 8.0, TARGETS)
VOCAB_SIZE = 33  # odd: tensor parallelism has to pad it
TEMPERATURE = 0.8
LR, ADAM_EPS = 3e-3, 1e-3
SEARCH = ClipBoundConfig(
    rho0=0.5, low=[0.5, 0.9, 0.01], high=[1.0, 6.0, 0.01], contribution="surrogate", token_weight="rollout_prob"
)
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
_YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
FAMILIES = {
    "qwen3": lambda: transformers.Qwen3Config(**_SIZES, head_dim=16, tie_word_embeddings=False),
    "qwen2": lambda: transformers.Qwen2Config(**_SIZES, tie_word_embeddings=True),
    "llama": lambda: transformers.LlamaConfig(**_SIZES, tie_word_embeddings=True, rope_parameters=_LLAMA3_ROPE),
    "llama_biases": lambda: transformers.LlamaConfig(
        **_SIZES, attention_bias=True, mlp_bias=True, rope_parameters=_YARN_ROPE
    ),
    "gemma": lambda: transformers.GemmaConfig(**_SIZES, head_dim=16),
    "granite": lambda: transformers.GraniteConfig(
        **_SIZES, embedding_multiplier=6.0, attention_multiplier=0.5, residual_multiplier=0.4, logits_scaling=3.0
    ),
    "olmo2": lambda: transformers.Olmo2Config(**_SIZES),
    "smollm3": lambda: transformers.SmolLM3Config(**_SIZES, no_rope_layers=[1, 0, 1, 0]),
}
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
MIXTURE, HYBRID, HYBRID_MIXTURE = "qwen3_moe", "qwen3_5_text", "qwen3_5_moe_text"


def make_mixture() -> transformers.Qwen3MoeConfig:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
    return transformers.Qwen3MoeConfig(**_SIZES | heads | _EXPERTS, norm_topk_prob=True)


_LINEAR: dict[str, Any] = {
    "max_position_embeddings": 256,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "full_attention_interval": 2,
}


def make_hybrid() -> transformers.Qwen3_5TextConfig:
    return transformers.Qwen3_5TextConfig(**_SIZES | _LINEAR)


def make_hybrid_mixture() -> transformers.Qwen3_5MoeTextConfig:
    sizes = {name: size for name, size in _SIZES.items() if name != "intermediate_size"}
    return transformers.Qwen3_5MoeTextConfig(**sizes | _LINEAR | _EXPERTS, shared_expert_intermediate_size=20)


def save_random_model(family: str, folder: Path) -> None:
    """Save a tiny checkpoint with no weight value that a mistake in the name map could hit by chance."""
    torch.manual_seed(5)
    makers = {MIXTURE: make_mixture, HYBRID: make_hybrid, HYBRID_MIXTURE: make_hybrid_mixture, **FAMILIES}
    config = makers[family]()
    is_hybrid = family in (HYBRID, HYBRID_MIXTURE)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            plus_one = family == "gemma" or (is_hybrid and "linear" not in name)
            centre = 1 if "norm" in name and not plus_one else 0  # the others multiply by 1 + weight
            scale = 0.2 if "norm" in name else 0.15
            if is_hybrid and ("embed" in name or "conv1d" in name):
                # as small as the others, they would leave norms that multiply rounding
                scale = 1.5 if "embed" in name else 0.25
            parameter.copy_(centre + scale * noise)
    model.save_pretrained(folder)


def save_adapters(model: Path, adapters: Adapters, folder: Path, seed: int = 3) -> None:
    """Save random adapters, B too, so that every gradient is other than zero."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = adapter_tensors(model_shape(load_hf_config(model)).with_adapters(adapters))
    named = [(name, 0.1 * torch.randn(size, generator=generator)) for name, size in tensors.items()]
    write_peft(folder, named, adapters, str(model))


def merged_float64(model: Path, adapters: Path, sizes: Adapters) -> dict[str, Tensor]:
    """Return W + alpha / rank * B A."""
    weights = {name: weight.double() for name, weight in load_file(model / "model.safetensors").items()}
    saved = load_file(adapters / WEIGHTS)
    for name in weights:
        a, b = (saved.get(f"{PEFT_PREFIX}{name.removesuffix('weight')}lora_{one}.weight") for one in "AB")
        if a is not None and b is not None:
            weights[name] += sizes.scale * b.double() @ a.double()
    return weights


def load_float64(folder: Path) -> torch.nn.Module:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", local_files_only=True
    )
    if model.config.model_type in (MIXTURE, HYBRID_MIXTURE):
        model.set_experts_implementation("eager")  # the other one has no float64
    return model


def random_batch(num_sequences: int = 9, seq_lens: Sequence[int] | None = None) -> Batch:
    """Return sequences of very different lengths, or given ones; `versions_T` holds minus each token's index, so that
    results can be matched and ages are positive."""
    generator = torch.Generator().manual_seed(11)

    def integers(low: int, high: int, size: int) -> Tensor:
        return torch.randint(low, high, (size,), generator=generator)

    seq_lens_S = integers(4, 40, num_sequences) if seq_lens is None else torch.tensor(seq_lens)
    prompt_lens = torch.minimum(integers(1, 6, seq_lens_S.numel()), seq_lens_S - 1).clamp(min=1)
    num_tokens = int(seq_lens_S.sum())
    is_response_T = torch.cat(
        [torch.arange(n) >= p for n, p in zip(seq_lens_S.tolist(), prompt_lens.tolist(), strict=True)]
    )
    mask_T = is_response_T & (torch.rand(num_tokens, generator=generator) > 0.1)
    return Batch(
        token_ids_T=integers(0, VOCAB_SIZE, num_tokens),
        seq_lens_S=seq_lens_S,
        sampled_T=is_response_T,
        advantages_T=torch.randn(num_tokens, generator=generator) * is_response_T,
        behaviour_logprobs_T=(-3.5 + torch.randn(num_tokens, generator=generator)) * is_response_T,
        versions_T=torch.where(is_response_T, -torch.arange(num_tokens), -1),
        mask_T=mask_T,
    )


def forest_batch() -> Batch:
    """Return the random batch with prompts that groups of 4, 1, 3 and 2 sequences begin with; one has a single token.

    All sampled tokens of one response are masked, and a long response is alone with its prompt.
    """
    prompt_S = torch.tensor([0, 0, 0, 0, 1, 2, 2, 2, 3, 3])
    prompts = (9, 4, 1, 17)
    generator = torch.Generator().manual_seed(12)
    responses = torch.randint(1, 20, (10,), generator=generator).tolist()
    batch = random_batch(seq_lens=[prompts[p] + r for p, r in zip(prompt_S.tolist(), responses, strict=True)])
    starts_S = batch.seq_lens_S.cumsum(0) - batch.seq_lens_S
    shared_lens_S = torch.tensor(prompts)[prompt_S]
    is_prompt_T = torch.cat([torch.arange(n) < p for n, p in zip(batch.seq_lens_S, shared_lens_S, strict=True)])
    token_ids_T = batch.token_ids_T.clone()
    for sequence, prompt in enumerate(prompt_S.tolist()):
        first, of = int(starts_S[(prompt_S == prompt).nonzero()[0, 0]]), int(starts_S[sequence])
        token_ids_T[of : of + prompts[prompt]] = batch.token_ids_T[first : first + prompts[prompt]]
    sampled_T, num_tokens = ~is_prompt_T, is_prompt_T.numel()
    mask_T = sampled_T & (torch.rand(num_tokens, generator=generator) > 0.1)
    mask_T[starts_S[1] : starts_S[2]] = False
    return Batch(
        token_ids_T=token_ids_T,
        seq_lens_S=batch.seq_lens_S,
        sampled_T=sampled_T,
        advantages_T=torch.randn(num_tokens, generator=generator) * sampled_T,
        behaviour_logprobs_T=(-3.5 + torch.randn(num_tokens, generator=generator)) * sampled_T,
        versions_T=torch.where(sampled_T, -torch.arange(num_tokens), -1),
        mask_T=mask_T,
        prompt_S=prompt_S,
        shared_lens_S=shared_lens_S,
    )


@dataclass
class Reference:
    """The expected results of one update; per-token values are indexed like the batch's tokens."""

    log_probs_T: Tensor
    entropy_T: Tensor
    loss: float
    gradients: dict[str, Tensor]
    grad_norm: float
    metrics: dict[str, float]  # means over trained tokens, and maxima
    bounds: tuple[float, float, float]  # low, high, positive share of SEARCH


def reference_update(
    model: torch.nn.Module,
    batch: Batch,
    optimizer: torch.optim.Optimizer | None = None,
    entropy_coef: float = 0.0,
    version: int = 0,
    kl: tuple[Tensor, str, float] | None = None,
    loss_of: Callable[[Tensor, Batch], Tensor] | None = None,
    mean_of: Callable[[Tensor, Batch], Tensor] = lambda values_T, batch: values_T[batch.mask_T].mean(),
) -> Reference:
    """Return scores, loss and gradient at the model's weights; then step `optimizer` if one is given.

    `kl` adds a term to the gradient only: log-probs of the reference policy, estimator, weight.
    `loss_of` maps log-probs and batch to the loss; it defaults to `literal_loss`, a mean over trained tokens.
    `mean_of` averages the other terms.
    """
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
    loss = (loss_of or literal_loss)(log_probs_T, batch)
    model.zero_grad()
    total = loss - entropy_coef * mean_of(entropy_T, batch)
    if kl is not None:
        reference_T, estimator, weight = kl
        total = total + weight * mean_of(literal_kl(log_probs_T, reference_T, estimator), batch)
    total.backward()
    gradients = _as_saved({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    grad_norm = float(torch.stack([g.norm() for g in gradients.values()]).norm())
    if optimizer is not None:
        optimizer.step()
    metrics = literal_metrics(log_probs_T.detach(), entropy_T.detach(), batch, version)
    bounds = literal_bounds(log_probs_T.detach(), batch)
    return Reference(log_probs_T.detach(), entropy_T.detach(), loss.item(), gradients, grad_norm, metrics, bounds)


def _as_saved(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take experts apart that transformers fuses in memory, but not in checkpoints."""
    found = {}
    for name, tensor in tensors.items():
        layer, _, fused = name.partition(".experts.")
        for number, one in enumerate(tensor if fused else ()):
            parts = one.chunk(2) if fused == "gate_up_proj" else [one]
            for part, values in zip(("gate", "up") if len(parts) > 1 else ("down",), parts, strict=True):
                found[f"{layer}.experts.{number}.{part}_proj.weight"] = values
        if not fused:
            found[name] = tensor
    return found


def literal_loss(log_probs_T: Tensor, batch: Batch, bounds: ClipBounds = BOUNDS) -> Tensor:
    """Return - mean over trained tokens of min(r A, clip(r, low, high) A)."""
    total = torch.zeros((), dtype=torch.float64)
    for t in batch.mask_T.nonzero()[:, 0].tolist():
        ratio = (log_probs_T[t] - batch.behaviour_logprobs_T[t].double()).exp()
        advantage = batch.advantages_T[t].double()
        total = total - torch.minimum(ratio * advantage, ratio.clamp(bounds.low, bounds.high) * advantage)
    return total / int(batch.mask_T.sum())


def literal_kl(log_probs_T: Tensor, reference_T: Tensor, estimator: str) -> Tensor:
    """Return the term of each token."""
    difference = log_probs_T - reference_T
    return {"k1": difference, "k2": difference**2 / 2, "k3": torch.exp(-difference) - 1 + difference}[estimator]


def literal_bounds(log_probs_T: Tensor, batch: Batch, search: ClipBoundConfig = SEARCH) -> tuple[float, float, float]:
    """Return low, high and rho of Algorithm 1, with the reading and token weights of SEARCH. Each probe visits every
    token, and none is a near tie."""
    mask_T = batch.mask_T
    behaviour = batch.behaviour_logprobs_T[mask_T].double()
    ratio, advantage = (log_probs_T[mask_T] - behaviour).exp(), batch.advantages_T[mask_T].double()
    mass, is_positive = behaviour.exp() * advantage.abs(), advantage > 0
    low, high, i, j = search.low.points, search.high.points, 0, 0

    def rho() -> float:
        positive = (mass * ratio.clamp(max=high[i]))[is_positive].sum()
        negative = (mass * ratio.clamp(min=low[j]))[~is_positive].sum()
        share = float(positive / (positive + negative))
        assert abs(share - search.rho0) > 1e-5, "rounding could decide this probe: choose another target"
        return share

    while rho() < search.rho0 and j + 1 < len(low):
        if i + 1 < len(high):
            i += 1
        else:
            j += 1
    return low[j], high[i], rho()


def literal_metrics(log_probs_T: Tensor, entropy_T: Tensor, batch: Batch, version: int) -> dict[str, float]:
    """Return some metrics of an update whose weights have seen `version` updates, each straight from its definition."""
    mask_T = batch.mask_T
    ratio = (log_probs_T - batch.behaviour_logprobs_T.double()).exp()[mask_T]
    advantage, age = batch.advantages_T[mask_T], (version - batch.versions_T[mask_T]).double()
    clipped_high, clipped_low = (advantage > 0) & (ratio >= BOUNDS.high), (advantage < 0) & (ratio <= BOUNDS.low)
    deviation = (log_probs_T + entropy_T)[mask_T]
    kept = torch.where(clipped_high | clipped_low, 0.0, advantage.double())
    positive_low = (advantage > 0) & (deviation < 0)
    probs = log_probs_T[mask_T].exp()
    is_rare, is_uncommon = probs < 0.1, (probs >= 0.1) & (probs < 0.2)
    return {
        "loss/ratio_mean": ratio.mean().item(),
        "loss/effective_share": (ratio.sum() ** 2 / (ratio.numel() * ratio.square().sum())).item(),
        "loss/ratio_max": ratio.max().item(),
        "loss/entropy": entropy_T[mask_T].mean().item(),
        "loss/clip_high_share": clipped_high.double().mean().item(),
        "loss/clip_low_share": clipped_low.double().mean().item(),
        "entropy_rule/covariance": (ratio * deviation * kept).mean().item(),
        "entropy_rule/positive_low": positive_low.double().mean().item(),
        "entropy_rule/positive_low_clipped": (positive_low & clipped_high).double().mean().item(),
        "entropy_rule/positive_low_age_1_3": (positive_low & (age >= 1) & (age <= 3)).double().mean().item(),
        "profile/p00_share": is_rare.double().mean().item(),
        "profile/p00_ratio": (is_rare * ratio).mean().item(),
        "profile/p10_abs_log_ratio": (is_uncommon * ratio.log().abs()).mean().item(),
        "profile/p10_entropy": (is_uncommon * entropy_T[mask_T]).mean().item(),
        "profile/p10_clip_high_share": (is_uncommon & clipped_high).double().mean().item(),
        "staleness/mean": age.mean().item(),
        "staleness/max": age.max().item(),
        "train/tokens": float(mask_T.sum()),
    }
