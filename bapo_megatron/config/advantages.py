"""The advantages that `advantage.kind` may name: built-in ones, and the user's own functions."""

from collections.abc import Callable, Sequence
from typing import Any

from bapo_megatron.config.dotted import Seam, imported

ESTIMATORS = imported("bapo_megatron.algorithms.advantages:ESTIMATORS")
WITH_CRITIC = ("gae", "n_step")
"""Per-token advantages from a critic's values (`algorithms/gae.py`)."""
FROM_TEACHER = "teacher"
"""Per-token advantages from a teacher's log-probs (`algorithms/teacher.py`), and from no reward."""

ADVANTAGE = Seam(
    "advantage.kind",
    (*ESTIMATORS, *WITH_CRITIC, FROM_TEACHER),
    "def advantage(group: GroupView) -> list[float], one for each sample; or a list for each, one for each turn",
    ("group",),
    other_names={"ppo": "gae", "a2c": "n_step"},
)


def advantage_function(kind: str) -> Callable[[Any], list[list[float]]]:
    """Return the function that `advantage.kind` names, from a `GroupView` to one value for each turn of each sample.

    Raises:
        UserError: the dotted path does not lead to such a function, or (when called) the result does not fit.
    """
    function = ESTIMATORS[kind].function if kind in ESTIMATORS else ADVANTAGE.load(kind)

    def of_turns(group: Any) -> list[list[float]]:
        result = function(group)
        try:
            values = result.tolist() if hasattr(result, "tolist") else list(result)
            pairs = zip(group.samples, values, strict=True)
            return [_of_turns(value, len(sample.turn_lengths)) for sample, value in pairs]
        except (TypeError, ValueError):
            turns = [len(sample.turn_lengths) for sample in group.samples]
            raise ADVANTAGE.error(kind, f"it returned {result!r} for samples with {turns} turns") from None

    return of_turns


def _of_turns(value: Any, num_turns: int) -> list[float]:
    """Return one value for each turn. Raises TypeError or ValueError unless there is one value, or one per turn."""
    if not isinstance(value, Sequence):
        return [float(value)] * num_turns
    if len(value) != num_turns:
        raise ValueError(value)
    return [float(one) for one in value]
