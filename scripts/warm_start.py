"""Shared parts of the scripts that make the shipped models: a tiny Qwen3 policy learns from demonstrations.

    a careless pupil (pupils.py) writes (prompt, response) -> warm_start -> mean_reward -> save

Reinforcement needs frequent mistakes, and right answers that still occur often enough to be reinforced.
"""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from bapo_megatron.prompts.base import Question

PAD, EOS, UNK = SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")
MAX_POSITIONS = 512

Policy = Qwen3ForCausalLM | Qwen3MoeForCausalLM | Qwen3_5ForCausalLM | Qwen3_5MoeForCausalLM


def build_tokenizer(vocabulary: Sequence[str]) -> PreTrainedTokenizerFast:
    """Build a tokenizer for the characters and longer texts in `vocabulary`, which begins with SPECIAL_TOKENS."""
    assert tuple(vocabulary[: len(SPECIAL_TOKENS)]) == SPECIAL_TOKENS
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token=UNK))
    phrases = [token for token in vocabulary if len(token) > 1 and token not in SPECIAL_TOKENS]
    pieces = Regex("|".join([*map(_escaped, phrases), r"[\s\S]"])) if phrases else Regex(".")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pieces, behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        model_max_length=MAX_POSITIONS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def _escaped(text: str) -> str:
    """Escape for Oniguruma, which escapes special characters differently from Python."""
    return "".join(rf"\x{{{ord(character):x}}}" for character in text)


def build_model(
    tokenizer: PreTrainedTokenizerFast,
    *,
    num_layers: int,
    hidden_size: int,
    intermediate_size: int,
    num_experts: int | None = None,
    num_linear_heads: int | None = None,
) -> Policy:
    """Build a float32 model with 4 query heads and 2 key-value heads.

    Args:
        num_experts: make a mixture of experts, two of which compute each token, and with linear attention a shared one.
        num_linear_heads: value heads of linear attention, which all but every fourth layer then has.
    """
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden_size // 4,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "initializer_range": 0.05,
        "dtype": torch.float32,
    }
    model: Policy
    if num_linear_heads is not None:
        sizes |= {"linear_num_key_heads": num_linear_heads // 2, "linear_num_value_heads": num_linear_heads}
        sizes |= {"linear_key_head_dim": hidden_size // 4, "linear_value_head_dim": hidden_size // 4}
        if num_experts is None:
            model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes))
        else:
            sizes |= {"moe_intermediate_size": sizes.pop("intermediate_size"), "num_experts": num_experts}
            sizes |= {"num_experts_per_tok": 2, "shared_expert_intermediate_size": intermediate_size}
            model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**sizes))
    elif num_experts is None:
        model = Qwen3ForCausalLM(Qwen3Config(**sizes))
    else:
        of_experts = {"num_experts": num_experts, "num_experts_per_tok": 2, "norm_topk_prob": True}
        sizes |= {"moe_intermediate_size": intermediate_size, **of_experts}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def warm_start(
    model: Policy,
    tokenizer: PreTrainedTokenizerFast,
    demonstrate: Callable[[], tuple[str, ...]],
    *,
    num_updates: int,
    batch_size: int,
) -> None:
    """Train on demonstrations; `demonstrate` returns the next (prompt, response), perhaps with more turns."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)
    warmup = 30
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda i: min(1.0, (i + 1) / warmup) * (0.05 + 0.95 * (1 + math.cos(math.pi * i / num_updates)) / 2),
    )
    started = time.monotonic()
    model.train()
    for update in range(1, num_updates + 1):
        token_ids, labels = demonstration_batch(tokenizer, [demonstrate() for _ in range(batch_size)])
        # padding is on the right, where causal attention ignores it
        loss = model(input_ids=token_ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if update % 50 == 0 or update == num_updates:
            elapsed_s = time.monotonic() - started
            print(f"update {update}/{num_updates}  loss {loss.item():.3f}  {elapsed_s:.0f} s", flush=True)


def demonstration_batch(
    tokenizer: PreTrainedTokenizerFast, demonstrations: Sequence[tuple[str, ...]]
) -> tuple[Tensor, Tensor]:
    """Return token ids and labels, int64 [size, longest], padded on the right; labels outside responses are -100.

    Each demonstration alternates between what is given and a response; the last response ends with the end token.
    """
    rows, labels = [], []
    for texts in demonstrations:
        ids: list[int] = []
        labelled: list[int] = []
        for number, text in enumerate(texts):
            piece = tokenizer.encode(text)
            ids += piece
            labelled += piece if number % 2 else [-100] * len(piece)
        rows.append(torch.tensor([*ids, tokenizer.eos_token_id]))
        labels.append(torch.tensor([*labelled, tokenizer.eos_token_id]))
    pad = torch.nn.utils.rnn.pad_sequence
    return (
        pad(rows, batch_first=True, padding_value=tokenizer.pad_token_id),
        pad(labels, batch_first=True, padding_value=-100),
    )


@torch.no_grad()
def sample_responses(
    model: Policy, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str], max_tokens: int
) -> list[str]:
    """Sample one response to each prompt at temperature 1."""
    batch = tokenizer(list(prompts), return_tensors="pt", padding=True)
    model.eval()
    output = model.generate(  # type: ignore[misc]
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max_tokens,
    )
    return tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def mean_reward(
    model: Policy,
    tokenizer: PreTrainedTokenizerFast,
    questions: Sequence[Question],
    judge: Callable[[Any, str], float],
    max_tokens: int,
) -> float:
    """Return the mean reward of one sample per question at temperature 1."""
    responses = sample_responses(model, tokenizer, [question.text for question in questions], max_tokens)
    return fmean(judge(question.answer, text) for question, text in zip(questions, responses, strict=True))


def save(model: Policy, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save as an ordinary Hugging Face checkpoint."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # readable by everyone, because the package ships it
    print(f"saved to {folder}")
