"""Which words of a response count: judged pairs, thoughts, boxes, and the answer that a majority votes with."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_megatron.errors import UserError
from bapo_megatron.rewards.answers import final_answer, judge_text
from bapo_megatron.rewards.code import last_program
from bapo_megatron.rewards.judges import Judge
from bapo_megatron.rewards.math import judge_math
from bapo_megatron.rewards.stated import boxes, spoken, undecorated
from bapo_megatron.rewards.verdicts import FIELDS, fields_of
from bapo_megatron.rollout.drivers import begins_in_thought
from bapo_megatron.types import Prompt, Segment, Trajectory
from tests.unit.judged_pairs import PAIRS, errors, ours

MEASURED = Path(__file__).parents[2] / "docs" / "measured" / "judge.toml"


@pytest.mark.slow
def test_the_judge_errs_no_more_than_measured() -> None:
    measured = tomllib.loads(MEASURED.read_text(encoding="utf-8"))["math"]
    negatives, positives = errors(ours)
    assert (len(PAIRS), sum(pair.verdict for pair in PAIRS)) == (measured["num_pairs"], measured["num_right"])
    assert len(negatives) <= measured["false_negatives"][1], negatives
    assert len(positives) <= measured["false_positives"][1], positives


@pytest.mark.parametrize("kind", ["boxes", "thoughts"])
def test_no_pair_of_this_kind_is_misjudged(kind: str) -> None:
    pairs = [pair for pair in PAIRS if pair.kind == kind]
    assert [pair for pair in pairs if ours(pair) != pair.verdict] == []


PIECES = st.lists(st.sampled_from(["<think>", "</think>", "a", "\\boxed{8}", "\n", "answer: b"]), max_size=12)


@settings(max_examples=100, deadline=None)
@given(PIECES, st.booleans())
def test_only_words_outside_thoughts_are_read(pieces: list[str], in_thought: bool) -> None:
    """Against a reader that walks through the pieces."""
    kept: list[str] = []
    is_open = in_thought
    for piece in pieces:
        if piece == "</think>":
            kept, is_open = [], False
        elif piece == "<think>":
            is_open = True
        elif not is_open:
            kept.append(piece)
    assert spoken("".join(pieces), in_thought) == "".join(kept)


@pytest.mark.parametrize(
    ("response", "in_thought", "text", "program"),
    [
        ("<think>answer: Paris", False, 0.0, None),
        ("answer: Paris", True, 0.0, None),
        ("Rome?</think>Paris", True, 1.0, None),
        ("<think>```python\nx\n```", False, 0.0, None),
        ("<think>```python\nx\n```</think>```python\ny\n```", False, 0.0, "y\n"),
        ("```python\nx\n```", True, 0.0, None),
        ("The correct option is **Paris**.", False, 1.0, None),
        ("\\boxed{\\textbf{Paris.}}", False, 1.0, None),
    ],
)
def test_words_and_programs_are_read_outside_thoughts_too(
    response: str, in_thought: bool, text: float, program: str | None
) -> None:
    assert judge_text("Paris", response, in_thought) == text
    assert last_program(response, in_thought) == program


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("\\boxed{7}. No: \\boxed{8}.", "8"),
        ("\\boxed{7} and \\boxed{8}", "7;8"),
        ("<think>\\boxed{7}</think>The answer is **8**.", "8"),
        ("\\boxed{1\\,234 dollars}", "1234"),
        ("The answer is 8. Note: 9 fails.", "8"),
    ],
)
def test_a_majority_votes_with_the_answer_that_was_judged(response: str, answer: str) -> None:
    assert final_answer("math", "8", response) == answer


NUMBERS = ("8", "73", "1\\,234", "0.5")
WORDS = (
    "{}",
    "{} dollars",
    "{}\\text{{ cm}}",
    "{} m",
    "{} square meters",
    "x = {}",
    "at least {}",
    "{}_3",
    "\\approx {}",
)


@pytest.mark.parametrize(
    "asked", ["8", "73", "1234", "12 cm", "8 m", "73 dollars", "at least 8", "8_3", "\\frac{1}{2}"]
)
def test_answers_are_grouped_only_if_the_judge_takes_them_for_the_same(asked: str) -> None:
    verdicts: dict[str | None, set[float]] = {}
    for number in NUMBERS:
        groups = set()
        for words in WORDS:
            response = f"\\boxed{{{words.format(number)}}}"
            groups.add(group := final_answer("math", asked, response))
            verdicts.setdefault(group, set()).add(judge_math(asked, response))
        assert len(groups) < len(WORDS), "dollars do not change a number"
    assert all(len(found) == 1 for found in verdicts.values()), verdicts


@pytest.mark.parametrize("answer", [["72"], [["72"]], [72], "72", 72])
def test_a_list_of_one_is_its_item(answer: Any) -> None:
    assert judge_math(answer, "\\boxed{72}") == 1.0
    assert judge_text(answer, "72") == 1.0


@pytest.mark.parametrize("answer", [[3, 5], [], {"value": 8}, [[1, 2]]])
def test_a_list_or_an_object_is_no_answer_of_mathematics(answer: Any) -> None:
    with pytest.raises(UserError, match="compare with one answer: make it a string or a number"):
        judge_math(answer, "8")


def test_a_judge_may_ask_whether_the_prompt_opened_a_thought() -> None:
    prompt = Prompt(0, (1,), "?", "8", "test")
    assert [*fields_of(prompt, "x", True)] == [*FIELDS]
    judge = Judge.of(lambda response, in_thought=False: float(in_thought), "mine:judge")
    assert judge(fields_of(prompt, "x", True)) == 1.0
    plain = Judge.of(lambda response: float(response == "<think>x"), "mine:judge")
    assert plain(fields_of(prompt, "<think>x", True)) == 1.0, "it gets the whole text"


@pytest.mark.parametrize(
    ("given_", "is_open"),
    [
        ("<|user|>Use <think> tags<|assistant|><think>\n", True),
        ("<think>\n\n</think>\n\n", False),
        ("Use <think>.", False),
    ],
)
def test_a_prompt_opens_a_thought_only_at_its_end(given_: str, is_open: bool) -> None:
    prompt = Segment.given("prompt", tuple(map(ord, given_)))
    trajectory = Trajectory((prompt, Segment.sampled(0, 0, (65, 66), [-1.0] * 2)))
    assert begins_in_thought(trajectory, lambda ids: "".join(map(chr, ids))) == is_open
    assert not begins_in_thought(trajectory, lambda ids: "".join(map(chr, ids)).replace("<think>", "")), (
        "a special token"
    )


@pytest.mark.parametrize(
    "piece",
    ["\\boxed{", "\\boxed{}", "{", "}", "\\boxed ", "<think>", "answer is ", "*", "\\textbf{", "\\,", "1 000 ", "$"],
)
def test_hostile_text_takes_linear_time(piece: str) -> None:
    """A quadratic reader would need minutes for these."""
    text = piece * 200_000
    assert len(spoken(text)) <= len(text)
    boxes(text)
    undecorated(text)
    judge_text("8", text)
    final_answer("math", "8", text)
