"""The prompts of the guessing game: how many numbers there are. The answer, one of them, is hidden."""

import random
from collections.abc import Iterator

NUM_NUMBERS = 7


def hidden_numbers(num: int = 4096, seed: int = 0) -> Iterator[dict[str, str]]:
    """Yield rows for data.source: `num` times the prompt "7:" with a random answer from 0 to 6."""
    rng = random.Random(f"hidden numbers/{seed}")
    for _ in range(num):
        yield {"prompt": f"{NUM_NUMBERS}:", "answer": str(rng.randrange(NUM_NUMBERS))}
