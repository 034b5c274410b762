"""The prompts of the guessing game: how many numbers there are. The answer, one of them, is hidden."""

from collections.abc import Iterator

NUM_NUMBERS = 7


def hidden_numbers() -> Iterator[dict[str, str]]:
    """Yield rows for data.source: "7:" with each number from 0 to 6 as its answer."""
    for number in range(NUM_NUMBERS):
        yield {"prompt": f"{NUM_NUMBERS}:", "answer": str(number)}
