#!/usr/bin/env python3
"""Make the demo's starting point: a Qwen3 model of about 1M parameters, warm-started on noisy demonstrations.

    python scripts/make_demo_model.py [--model demo|study|moe|hybrid|hybrid-moe] [--output FOLDER] [--num-updates N]
        [--seed S]

The demonstrator writes chains of modular arithmetic as a careless pupil would (scripts/pupils.py):

  * it gets a quarter of the 147 facts (operator, left, right) wrong most of the time, so that there is something to
    unlearn, and right often enough for reinforcement;
  * it gets each of the other facts right 9 times in 10;
  * in 3 answers out of 10 it rambles past the result, so that lengths have a long tail and long answers are bad.

The result is an ordinary Hugging Face checkpoint that solves about 30 % of the task at temperature 1. `--model study`
makes the smaller model for the studies (docs/reproduction.md), `--model moe` a mixture of experts, `--model hybrid` one
with linear attention, and `--model hybrid-moe` one with both, of which the package has no copy.
"""

import argparse
from pathlib import Path

import torch
from pupils import CHAIN_RESPONSE_TOKENS, ChainPupil
from warm_start import (
    SPECIAL_TOKENS,
    build_model,
    build_tokenizer,
    mean_reward,
    save,
    warm_start,
)

from bapo_megatron.assets import SHIPPED_MODELS, shipped_model_path
from bapo_megatron.prompts.chains import MODULUS, OPERATORS, ChainSource
from bapo_megatron.rewards.answers import judge_chain

VOCABULARY = [*SPECIAL_TOKENS, " ", "=", ",", *OPERATORS, *map(str, range(MODULUS))]  # 16: splits by 2, 4

SIZES = {
    "demo": {"num_layers": 4, "hidden_size": 128, "intermediate_size": 512},
    "study": {"num_layers": 2, "hidden_size": 64, "intermediate_size": 256},
    "moe": {"num_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_experts": 8},
    "hybrid": {"num_layers": 4, "hidden_size": 64, "intermediate_size": 128, "num_linear_heads": 4},
    "hybrid-moe": {
        "num_layers": 4,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_experts": 8,
        "num_linear_heads": 4,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="demo")
    parser.add_argument("--output", type=Path, help="default: the package's own copy")
    parser.add_argument("--num-updates", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.output is None and args.model not in SHIPPED_MODELS:
        parser.error(f"--model {args.model} needs --output, as the package has no copy")

    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer(VOCABULARY)
    model = build_model(tokenizer, **SIZES[args.model])
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    pupil = ChainPupil(args.seed)
    warm_start(model, tokenizer, pupil.demonstrate, num_updates=args.num_updates, batch_size=args.batch_size)
    source = ChainSource(1024, args.seed, {})
    questions = [source[i] for i in range(len(source))]
    rate = mean_reward(model, tokenizer, questions, judge_chain, CHAIN_RESPONSE_TOKENS)
    print(f"pass rate at temperature 1: {rate:.3f}")
    save(model, tokenizer, args.output or shipped_model_path(args.model))


if __name__ == "__main__":
    main()
