#!/usr/bin/env python3
"""Make the starting point of the cross-domain study: a Qwen3 model with about 0.3M parameters that knows three tasks.

    python scripts/make_domains_model.py [--output FOLDER] [--num-updates N] [--seed S]

The demonstrators are careless pupils like the demo's (scripts/make_demo_model.py): they get a quarter of each task's
facts wrong most of the time, and the others right 9 times in 10.

    task                facts                                             sometimes they also
    chains              operator, left, right -> result                   continue past the result
    programs            which function the examples show -> program       append terms to the program
    spell_backward      letter -> letter (reasoning-gym's data set)       leave letters out

The result is an ordinary Hugging Face checkpoint. Its tokenizer has a token for each printable ASCII character, and one
for each of the fixed texts around programs and words, so that these take no time to sample.
"""

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pupils import (
    CHAIN_RESPONSE_TOKENS,
    PROGRAM_RESPONSE_TOKENS,
    SPELLING,
    SPELLING_RESPONSE_TOKENS,
    ChainPupil,
    ProgramPupil,
    SpellingPupil,
)
from warm_start import (
    SPECIAL_TOKENS,
    build_model,
    build_tokenizer,
    mean_reward,
    save,
    warm_start,
)

from bapo_megatron.assets import shipped_model_path
from bapo_megatron.prompts.base import PromptSource
from bapo_megatron.prompts.chains import ChainSource
from bapo_megatron.prompts.programs import ProgramSource
from bapo_megatron.prompts.reasoning_gym import ReasoningGymSource
from bapo_megatron.rewards.answers import judge_chain
from bapo_megatron.rewards.code import CodeJudge
from bapo_megatron.rewards.reasoning_gym import gym_judge

PHRASES = ["```python\n", "def f(x): return ", "\n```", "Spell this word backward (example: sun -> nus): "]
PRINTABLE = [chr(code) for code in range(32, 127)]
VOCABULARY = [*SPECIAL_TOKENS, *PRINTABLE, "\n", *PHRASES, "<unused>"]  # 104: splits by 8
NUM_EVALUATED = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=shipped_model_path("study-domains"))
    parser.add_argument("--num-updates", type=int, default=2400)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer(VOCABULARY)
    model = build_model(tokenizer, num_layers=3, hidden_size=96, intermediate_size=192)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    chains, programs, spelling = ChainPupil(args.seed), ProgramPupil(args.seed), SpellingPupil(args.seed)
    pupils = (chains, programs, spelling, programs)  # programs come twice because they are the hardest to learn
    one_after_the_other = itertools.cycle([pupil for pupil in pupils for _ in range(args.batch_size)])
    warm_start(  # each update has one task, so that no short response is padded to a long one
        model,
        tokenizer,
        lambda: next(one_after_the_other).demonstrate(),
        num_updates=args.num_updates,
        batch_size=args.batch_size,
    )
    for source, judge, max_tokens in domains(args.seed):
        reward = mean_reward(model, tokenizer, [source[i] for i in range(NUM_EVALUATED)], judge, max_tokens)
        print(f"{source.name}: mean reward at temperature 1: {reward:.3f}")
    save(model, tokenizer, args.output)


def domains(seed: int) -> list[tuple[PromptSource, Callable[[Any, str], float], int]]:
    """Return source, judge and maximum length of a response (in tokens) for each task."""
    spelling = "spell_backward", NUM_EVALUATED, seed, SPELLING
    return [
        (ChainSource(NUM_EVALUATED, seed, {}), judge_chain, CHAIN_RESPONSE_TOKENS),
        (ProgramSource(NUM_EVALUATED, seed, {}), CodeJudge(10.0).judge, PROGRAM_RESPONSE_TOKENS),
        (ReasoningGymSource(*spelling), gym_judge(*spelling), SPELLING_RESPONSE_TOKENS),
    ]


if __name__ == "__main__":
    main()
