"""The prompts of the tool demo: sums of digits, which its model knows by heart, and products, for which it needs help.

prompt    4+5=      37*46=      37*46+58=
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

_HARD_SHARE = 0.6


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum or a product of numbers. Example: Sum((37, 46, 58), "*+").answer == 1760."""

    numbers: tuple[int, ...]
    operators: str

    @classmethod
    def random(cls, rng: random.Random) -> "Sum":
        if rng.random() >= _HARD_SHARE:
            return cls((rng.randrange(10), rng.randrange(10)), "+")
        operators = rng.choice(("*", "*+"))
        return cls(tuple(rng.randrange(10, 100) for _ in range(len(operators) + 1)), operators)

    @property
    def prompt(self) -> str:
        rest = (f"{operator}{number}" for operator, number in zip(self.operators, self.numbers[1:], strict=True))
        return f"{self.numbers[0]}{''.join(rest)}="

    @property
    def is_hard(self) -> bool:
        return "*" in self.operators

    @property
    def answer(self) -> int:
        value = self.numbers[0]
        for operator, number in zip(self.operators, self.numbers[1:], strict=True):
            value = value * number if operator == "*" else value + number
        return value


def sums(num: int = 4096, seed: int = 0) -> Iterator[dict[str, str]]:
    """Yield rows for data.source: prompt and answer of `num` random sums."""
    rng = random.Random(f"sums/{seed}")
    for _ in range(num):
        one = Sum.random(rng)
        yield {"prompt": one.prompt, "answer": str(one.answer)}
