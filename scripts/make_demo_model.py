#!/usr/bin/env python3
"""Make the demo's starting point: a Qwen3 model of about 1M parameters, warm-started on noisy demonstrations.

    python scripts/make_demo_model.py [--output FOLDER] [--num-updates N] [--seed S]

The demonstrator writes chains of modular arithmetic (bapo_megatron/prompts/chains.py) as a careless pupil would:

  * a quarter of the 147 facts (operator, left, right) it believes wrongly most of the time, so that there is something
    to unlearn, and the right result still turns up often enough to be reinforced;
  * every other fact it gets right 9 times in 10;
  * in 3 answers of 10 it rambles on past the result, so that lengths have a long tail and long
    answers are the bad ones.

The result is an ordinary Hugging Face checkpoint that solves about 0.3 of the task at temperature 1.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from bapo_megatron.assets import demo_model_path
from bapo_megatron.prompts.chains import MODULUS, OPERATORS, Chain, ChainOptions, apply_operator
from bapo_megatron.rewards.chains import judge_chain

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
VOCABULARY = [PAD, EOS, UNK, " ", "=", ",", *OPERATORS, *(str(digit) for digit in range(MODULUS))]  # 16: splits by 2, 4
MAX_RESPONSE_TOKENS = 48
MAX_POSITIONS = 512

WRONG_FACTS_SHARE = 0.25
WRONG_FACT_BELIEVED, WRONG_FACT_RIGHT = 0.72, 0.18  # the rest of the time: any digit
RIGHT_FACT_RIGHT = 0.90
RAMBLE, RAMBLE_ON = 0.30, 0.85


class Demonstrator:
    """Writes noisy solutions; which facts it has wrong depends on the seed only."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"demonstrations/{seed}")
        rng = random.Random(f"wrong facts/{seed}")
        facts = [(o, a, b) for o in OPERATORS for a in range(MODULUS) for b in range(MODULUS)]
        self.believed = {
            fact: rng.choice([x for x in range(MODULUS) if x != apply_operator(*fact)])
            for fact in rng.sample(facts, round(WRONG_FACTS_SHARE * len(facts)))
        }

    def result(self, operator: str, left: int, right: int) -> int:
        right_result = apply_operator(operator, left, right)
        believed = self.believed.get((operator, left, right))
        draw = self.rng.random()
        if believed is None:
            return right_result if draw < RIGHT_FACT_RIGHT else self.rng.randrange(MODULUS)
        if draw < WRONG_FACT_BELIEVED:
            return believed
        return right_result if draw < WRONG_FACT_BELIEVED + WRONG_FACT_RIGHT else self.rng.randrange(MODULUS)

    def solve(self, chain: Chain) -> str:
        value, text = chain.terms[0], ""
        for operator, term in zip(chain.operators, chain.terms[1:], strict=True):
            result = self.result(operator, value, term)
            text += f"{value}{operator}{term}={result},"
            value = result
        step_length = len("1+2=3,")
        going_on = self.rng.random() < RAMBLE
        while going_on and len(text) + step_length < MAX_RESPONSE_TOKENS:
            operator, term = self.rng.choice(OPERATORS), self.rng.randrange(MODULUS)
            result = apply_operator(operator, value, term)
            text += f"{value}{operator}{term}={result},"
            value = result
            going_on = self.rng.random() < RAMBLE_ON
        return text


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
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


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.05,
        dtype=torch.float32,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def demonstration_batch(
    demonstrator: Demonstrator, tokenizer: PreTrainedTokenizerFast, options: ChainOptions, size: int
) -> tuple[Tensor, Tensor]:
    """Token ids and labels, int64 [size, longest], padded on the right; labels are -100 on prompts and padding."""
    rows, labels = [], []
    for _ in range(size):
        chain = Chain.random(demonstrator.rng, options.min_terms, options.max_terms)
        prompt = tokenizer.encode(chain.prompt)
        response = [*tokenizer.encode(demonstrator.solve(chain)), tokenizer.eos_token_id]
        rows.append(torch.tensor(prompt + response))
        labels.append(torch.tensor([-100] * len(prompt) + response))
    pad = torch.nn.utils.rnn.pad_sequence
    return (
        pad(rows, batch_first=True, padding_value=tokenizer.pad_token_id),
        pad(labels, batch_first=True, padding_value=-100),
    )


def warm_start(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, num_updates: int, batch_size: int, seed: int
) -> None:
    demonstrator, options = Demonstrator(seed), ChainOptions()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)
    warmup = 30
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda i: min(1.0, (i + 1) / warmup) * (0.05 + 0.95 * (1 + math.cos(math.pi * i / num_updates)) / 2),
    )
    started = time.monotonic()
    model.train()
    for update in range(1, num_updates + 1):
        token_ids, labels = demonstration_batch(demonstrator, tokenizer, options, batch_size)
        # padding is on the right, where causal attention never looks back at it
        loss = model(input_ids=token_ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if update % 50 == 0 or update == num_updates:
            elapsed_s = time.monotonic() - started
            print(f"update {update}/{num_updates}  loss {loss.item():.3f}  {elapsed_s:.0f} s", flush=True)


@torch.no_grad()
def pass_rate(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, num_prompts: int, seed: int) -> float:
    """Share of chains answered right by one sample each at temperature 1."""
    rng, options = random.Random(f"evaluation/{seed}"), ChainOptions()
    chains = [Chain.random(rng, options.min_terms, options.max_terms) for _ in range(num_prompts)]
    batch = tokenizer([chain.prompt for chain in chains], return_tensors="pt", padding=True)
    model.eval()
    output = model.generate(  # type: ignore[misc]
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=MAX_RESPONSE_TOKENS,
    )
    responses = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(judge_chain(chain.answer, text) for chain, text in zip(chains, responses, strict=True)) / num_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=demo_model_path())
    parser.add_argument("--num-updates", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    warm_start(model, tokenizer, args.num_updates, args.batch_size, args.seed)
    print(f"pass rate at temperature 1: {pass_rate(model, tokenizer, 1024, args.seed):.3f}")
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    (args.output / "model.safetensors").chmod(0o644)  # written for its owner alone; it is to be packed and shared
    print(f"saved to {args.output}")


if __name__ == "__main__":
    main()
