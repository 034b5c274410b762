#!/usr/bin/env python3
"""Make the starting point of the tool demo and the guessing game: a Qwen3 model of 126k parameters.

    python scripts/make_tool_model.py [--output FOLDER] [--num-updates N] [--seed S]

The demonstrators are in scripts/pupils.py. `CalculatorPupil` asks a calculator in 20 % of its answers, and not always
correctly; otherwise it knows sums of digits by heart, more or less, and says anything for a product. Much less would
not do: reinforcement finds the calculator only if it is asked often enough. `GuessingPupil` guesses a number, mostly
without regard to the answers before.
"""

import argparse
import random
from pathlib import Path

import torch
from make_demo_model import SIZES
from pupils import CalculatorPupil, GuessingPupil
from warm_start import SPECIAL_TOKENS, build_model, build_tokenizer, save, warm_start

from bapo_megatron.assets import shipped_model_path

VOCABULARY = [*SPECIAL_TOKENS, *"0123456789", *"+-*=?.;!<>:"]  # 24: splits by 2, 4
GAMES_SHARE = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=shipped_model_path("tool"))
    parser.add_argument("--num-updates", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer(VOCABULARY)
    model = build_model(tokenizer, **SIZES["study"])
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    pupils, rng = (CalculatorPupil(args.seed), GuessingPupil(args.seed)), random.Random(f"games/{args.seed}")

    def demonstrate() -> tuple[str, ...]:
        return pupils[rng.random() < GAMES_SHARE].demonstrate()

    warm_start(model, tokenizer, demonstrate, num_updates=args.num_updates, batch_size=args.batch_size)
    save(model, tokenizer, args.output)


if __name__ == "__main__":
    main()
