"""Programs from examples: the task, and how its judge treats right, wrong, hostile and endless programs."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_megatron.config.schema import Config
from bapo_megatron.errors import DataError
from bapo_megatron.prompts.programs import (
    PROGRAMS,
    SHOWN_INPUTS,
    TESTED_INPUTS,
    Program,
    ProgramSource,
    ProgramTask,
    is_told_apart,
    solution,
)
from bapo_megatron.prompts.stream import build_source
from bapo_megatron.rewards import RewardScorer
from bapo_megatron.types import Prompt
from tests.hang import HANG_S


def test_worked_example() -> None:
    task = ProgramTask(Program("x%{}", 5), (3, 7, 12))
    assert task.prompt == "3>3 7>2 12>2:"
    assert solution(task.program.expression) == "```python\ndef f(x): return x%5\n```"
    assert is_told_apart(task.program, task.inputs)
    assert not is_told_apart(task.program, (1, 2, 3))  # x%6 does the same there


def test_expressions_say_what_the_functions_compute() -> None:
    assert len(PROGRAMS) == len({program.expression for program in PROGRAMS}) == 64
    for program in PROGRAMS:
        assert [eval(program.expression, {"x": x}) for x in TESTED_INPUTS] == [program(x) for x in TESTED_INPUTS]


def test_tests_hold_for_their_function_alone() -> None:
    assert len({tuple(program(x) for x in TESTED_INPUTS) for program in PROGRAMS}) == len(PROGRAMS)
    for program, other in zip(PROGRAMS, PROGRAMS[1:] + PROGRAMS[:1], strict=True):
        exec(program.tests, {"f": program})
        with pytest.raises(AssertionError):
            exec(program.tests, {"f": other})


def test_two_examples_can_tell_each_function() -> None:
    pairs = list(itertools.combinations(SHOWN_INPUTS, 2))
    assert all(any(is_told_apart(program, pair) for pair in pairs) for program in PROGRAMS)


@settings(deadline=None, max_examples=30)  # other processes may hold the cores
@given(st.integers(0, 2**32), st.integers(2, 5))
def test_the_examples_fit_one_function_only(seed: int, num_examples: int) -> None:
    task = ProgramTask.random(random.Random(seed), num_examples)
    examples = [tuple(map(int, pair.split(">"))) for pair in task.prompt.removesuffix(":").split(" ")]
    assert [x for x, _ in examples] == sorted({x for x, _ in examples})
    assert len(examples) == num_examples
    assert [p for p in PROGRAMS if all(p(x) == y for x, y in examples)] == [task.program]


def test_items_depend_on_seed_and_index_only() -> None:
    source, again = ProgramSource(50, 3, {}), ProgramSource(50, 3, {})
    assert [source[i] for i in range(50)] == [again[i] for i in reversed(range(50))][::-1]
    assert [source[i].text for i in range(50)] != [ProgramSource(50, 4, {})[i].text for i in range(50)]
    assert len(source) == 50


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"examples": 3}, "options of the source programs: examples: Extra inputs"),
        ({"num_examples": 1}, "num_examples: .*greater than or equal to 2"),
    ],
)
def test_bad_options(options: dict[str, int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        ProgramSource(10, 0, options)


def scorer_of(timeout_s: float) -> RewardScorer:
    return RewardScorer(Config.model_validate({"data": {"source": "programs"}, "reward": {"timeout_s": timeout_s}}))


def test_the_judge_of_programs() -> None:
    """reward.kind = "auto" runs programs."""
    config = Config.model_validate({"data": {"source": "programs", "size": 3}})
    question = build_source(config)[0]
    task = ProgramTask.random(random.Random("programs/0/0"), 3)
    assert question.text == task.prompt
    right = task.program.expression
    verdicts = {
        solution(right): 1.0,
        solution(f"({right})"): 1.0,
        solution(f"{right}+1"): 0.0,
        f"def f(x): return {right}": 0.0,  # no block
        solution(right).removesuffix("```"): 0.0,  # cut off
        solution(f"{right} if x in {task.inputs} else 0"): 0.0,  # memorised
        solution("__import__('os')._exit(0)"): 0.0,
        solution("f(x)"): 0.0,
    }
    items = [(Prompt(i, (1,), question.text, question.answer, "programs"), text) for i, text in enumerate(verdicts)]
    with scorer_of(timeout_s=HANG_S) as scorer:
        assert scorer.score(items) == list(verdicts.values())
        assert scorer.num_timeouts == 0
    with scorer_of(timeout_s=1) as scorer:  # a power like this may or may not need that long
        assert scorer.score([(items[0][0], solution("9**9**9**9"))]) == [0.0]
