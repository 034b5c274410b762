"""Procedural data sets of reasoning-gym (https://github.com/open-thought/reasoning-gym)."""

from typing import Any

from bapo_megatron.errors import DataError, closest, did_you_mean, install_command
from bapo_megatron.prompts.base import Question


def create_dataset(name: str | None, size: int, seed: int, options: dict[str, Any]) -> Any:
    """Create a data set: `data[i]` is {question, answer, metadata}, and `data.score_answer(text, entry)` judges.

    Raises DataError for an unknown data set, or for options that it does not accept.
    """
    try:
        from reasoning_gym.factory import DATASETS
        from reasoning_gym.factory import create_dataset as create
    except ImportError as error:
        raise DataError(
            f"data.source = 'reasoning_gym' needs reasoning-gym, which cannot be imported ({error}); run "
            f"`{install_command('gym')}`, which compiles one package, pycosat, and so needs a C compiler and "
            "Python's headers (Debian, Ubuntu: apt install gcc python3-dev)"
        ) from error
    if name not in DATASETS:
        hint = did_you_mean(*closest(str(name), DATASETS)) or "choose one, such as basic_arithmetic"
        raise DataError(f"data.dataset = {name!r} is not one of reasoning-gym's {len(DATASETS)} data sets; {hint}")
    try:
        return create(name, size=size, seed=seed, **options)
    except (TypeError, ValueError, AssertionError) as error:  # the data set checks its settings with asserts
        raise DataError(f"data.options of the reasoning-gym data set {name}: {error}") from error


class ReasoningGymSource:
    """Entries of one data set.

    An answer is {"index": i, "answer": the reference answer}: JSON cannot carry whole entries, so the judge makes the
    same entry again from its index.
    """

    name = "reasoning_gym"

    def __init__(self, dataset: str | None, size: int, seed: int, options: dict[str, Any]) -> None:
        self.data = create_dataset(dataset, size, seed, options)
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Question:
        entry = self.data[index]
        return Question(
            entry["question"],
            {"index": index, "answer": reference_answer(entry)},
            f"reasoning_gym {self.dataset} item {index}",
        )


def reference_answer(entry: dict[str, Any]) -> str | None:
    """Return the entry's answer as text; None if the data set judges answers without a reference."""
    answer = entry["answer"]
    return None if answer is None else str(answer)
