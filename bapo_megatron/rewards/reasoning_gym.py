"""Judge of reasoning-gym prompts: the data set's own scorer, applied to a response's final answer."""

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from bapo_megatron.errors import DataError
from bapo_megatron.prompts.reasoning_gym import create_dataset, reference_answer
from bapo_megatron.rewards.stated import spoken

_OPEN, _CLOSE = "<answer>", "</answer>"
_NUMBER = re.compile(r"(?:(?<![\d)])[-+])?\d[\d,]*(?:\.\d+)?")  # the minus of 7-3 is an operator, not a sign
_PLAIN_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def gym_judge(dataset: str | None, size: int, seed: int, options: dict[str, Any]) -> Callable[..., float]:
    """Build a judge for the answers of a ReasoningGymSource with the same arguments. Raises DataError.

    The score is the data set's own, from 0 to 1. Thoughts are not read. If the reference is a plain number, the scorer
    gets the response's last number, and only a full score counts: some scorers give partial credit to "12" for "2".
    """
    data = create_dataset(dataset, size, seed, options)

    @lru_cache(maxsize=1024)  # responses to one prompt follow each other
    def entry_at(index: int) -> dict[str, Any]:
        return data[index]

    def judge(answer: Any, response: str, in_thought: bool = False) -> float:
        entry = entry_at(answer["index"])
        reference = reference_answer(entry)
        if reference != answer["answer"]:
            raise DataError(f"reasoning_gym {dataset} item {answer['index']} changed: was {answer['answer']!r}")
        is_number = is_plain_number(reference)
        score = float(data.score_answer(gym_answer(spoken(response, in_thought), is_number=is_number), entry))
        return float(score >= 1.0) if is_number else score

    return judge


def build_judge_of_all(datasets: Mapping[str, Mapping[str, Any]], seed: int) -> Callable[..., float]:
    """Build a judge for the prompts of one or more data sets. Raises DataError.

    Args:
        datasets: dataset, size and options of each data set, by name of the prompt source.
    """
    judges = {source: gym_judge(seed=seed, **arguments) for source, arguments in datasets.items()}
    if len(judges) == 1:
        return next(iter(judges.values()))

    def judge(answer: Any, response: str, source: str, in_thought: bool = False) -> float:
        return judges[source](answer, response, in_thought)

    return judge


def is_plain_number(reference: str | None) -> bool:
    """Return whether a reference is a number in digits, in which case a response's last number counts."""
    return reference is not None and _PLAIN_NUMBER.fullmatch(reference) is not None


def gym_answer(response: str, *, is_number: bool) -> str | None:
    """Return a response's last <answer>...</answer>, or without one all of it, stripped. None means an empty text.

    With `is_number`, return the last number of that text. Takes time linear in the length, so that evaluation may group
    by answers outside a judge process. Example: gym_answer("7 + 5 = 12.", is_number=True) == "12"
    """
    begin = response.rfind(_OPEN, 0, max(0, response.rfind(_CLOSE)))
    text = response[begin + len(_OPEN) : response.find(_CLOSE, begin)] if begin >= 0 else response
    text = text.strip()
    if not is_number:
        return text or None
    numbers = _NUMBER.findall(text)
    return numbers[-1].replace(",", "").removeprefix("+") if numbers else None
