"""The demo task: a chain of +, - and *, worked out from left to right modulo 7, with written steps.

prompt    3+5*2=
response  3+5=1,1*2=2,      (each step ends with a comma; the last result is the answer)
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from pydantic import Field, model_validator

from bapo_megatron.config.base import Section
from bapo_megatron.prompts.base import Question, read_options

MODULUS = 7
OPERATORS = "+-*"


def apply_operator(operator: str, left: int, right: int) -> int:
    """Compute `left operator right` modulo 7. Example: apply_operator("-", 2, 5) == 4."""
    match operator:
        case "+":
            return (left + right) % MODULUS
        case "-":
            return (left - right) % MODULUS
        case "*":
            return (left * right) % MODULUS
    raise AssertionError(f"not an operator of the chains task: {operator!r}")


class ChainOptions(Section):
    """`[data.options]` of the source "chains"."""

    min_terms: int = Field(default=3, ge=2)
    max_terms: int = Field(default=6, le=10_000)

    @model_validator(mode="after")
    def _ordered(self) -> ChainOptions:
        if self.max_terms < self.min_terms:
            raise ValueError(f"max_terms ({self.max_terms}) is smaller than min_terms ({self.min_terms})")
        return self


@dataclass(frozen=True, slots=True)
class Chain:
    """Terms and the operators between them. Example: Chain(terms=(3, 5, 2), operators="+*") is 3+5*2."""

    terms: tuple[int, ...]
    operators: str

    @classmethod
    def random(cls, rng: random.Random, min_terms: int, max_terms: int) -> Chain:
        terms = tuple(rng.randrange(MODULUS) for _ in range(rng.randint(min_terms, max_terms)))
        return cls(terms, "".join(rng.choice(OPERATORS) for _ in terms[1:]))

    @property
    def prompt(self) -> str:
        steps = (f"{operator}{term}" for operator, term in zip(self.operators, self.terms[1:], strict=True))
        return f"{self.terms[0]}{''.join(steps)}="

    @property
    def answer(self) -> str:
        result = self.terms[0]
        for operator, term in zip(self.operators, self.terms[1:], strict=True):
            result = apply_operator(operator, result, term)
        return str(result)


class ChainSource:
    """`size` random chains. Raises DataError for unknown or contradictory options."""

    name = "chains"

    def __init__(self, size: int, seed: int, options: dict[str, Any]) -> None:
        self.options = read_options(ChainOptions, self.name, options)
        self.size, self.seed = size, seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Question:
        rng = random.Random(f"chains/{self.seed}/{index}")
        chain = Chain.random(rng, self.options.min_terms, self.options.max_terms)
        return Question(chain.prompt, chain.answer, f"chains item {index}")
