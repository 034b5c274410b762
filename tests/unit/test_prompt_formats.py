"""Well-known data sets as prompts, from JSONL and Parquet, and the answers that responses end with."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_megatron.config.schema import Config
from bapo_megatron.errors import DataError
from bapo_megatron.evaluation.results import Answered, Problem
from bapo_megatron.prompts.jsonl import JsonlSource
from bapo_megatron.prompts.reasoning_gym import ReasoningGymSource
from bapo_megatron.rewards.answers import final_answer
from bapo_megatron.rewards.code import CodeJudge
from bapo_megatron.rewards.reasoning_gym import gym_judge
from bapo_megatron.rewards.verdicts import JudgeSpec
from tests.hang import HANG_S

AIME = {"id": 60, "problem": "Every morning Aya ...", "solution": "...", "answer": "204", "url": "...", "year": "2024"}
MATH_500 = {"problem": "Convert (0,3).", "solution": "...", "answer": "\\left( 3, \\frac{\\pi}{2} \\right)", "level": 2}
GSM8K = {"question": "How many clips?", "answer": "48/2 = <<48/2=24>>24.\n#### 1,072"}
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'def double(x):\n    """Twice x."""\n',
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n",
    "entry_point": "double",
}
SpellBackward = tuple[Any, Callable[[Any, str], float], dict[str, Any]]


@pytest.fixture(scope="module")
def spell_backward() -> SpellBackward:
    """Return the data set "esenihC" for "Chinese", its judge, and the answer to its first item."""
    source = ReasoningGymSource("spell_backward", 1, 0, {})
    return source.data, gym_judge("spell_backward", 1, 0, {}), source[0].answer


def write(folder: Path, rows: list[dict[str, Any]], suffix: str) -> str:
    path = folder / f"data{suffix}"
    if suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(
    ("name", "row", "text", "answer"),
    [
        ("math", AIME, "Every morning Aya", "204"),
        ("math", MATH_500, "Convert", MATH_500["answer"]),
        ("math", {"question": "1+1?", "answer": 2}, "1+1?", 2),
        ("gsm8k", GSM8K, "How many clips?", "1072"),
        ("plain", {"prompt": "1+1=", "answer": {"index": 3}}, "1+1=", {"index": 3}),
    ],
)
def test_fields_of_data_sets(
    tmp_path: Path, suffix: str, name: str, row: dict[str, Any], text: str, answer: Any
) -> None:
    source = JsonlSource(write(tmp_path, [row, row], suffix), name)
    assert len(source) == 2
    assert source[1].text.startswith(text)
    assert source[1].answer == answer
    assert ("\\boxed{}" in source[1].text) == (name != "plain")


def test_a_humaneval_row_is_judged_by_its_tests(tmp_path: Path) -> None:
    path = write(tmp_path, [HUMANEVAL], ".jsonl")
    question = JsonlSource(path, "humaneval")[0]
    assert HUMANEVAL["prompt"].rstrip() in question.text
    config = Config.model_validate({"data": {"source": "jsonl", "path": path, "format": "humaneval"}})
    assert JudgeSpec.of(config).kind == "code"
    judge = CodeJudge(HANG_S)
    right = f"```python\n{HUMANEVAL['prompt']}{HUMANEVAL['canonical_solution']}```"
    assert judge.judge(question.answer, right) == 1.0
    assert judge.judge(question.answer, right.replace("2 * x", "x")) == 0.0


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("math", {"prompt": "a", "answer": 1}, "field 'problem' or 'question' .* is missing .*does data.format fit"),
        ("gsm8k", {"question": "a", "answer": "72"}, "does not end with '#### <number>'"),
        ("gsm8k", {"question": "a", "answer": 72}, "'answer' must be a string, got a number"),
        ("humaneval", {"prompt": "a", "test": "b"}, "field 'entry_point' is missing"),
        ("plain", {"prompt": "a", "answer": None}, "must not be null"),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_row_without_its_fields_is_named(
    tmp_path: Path, suffix: str, name: str, row: dict[str, Any], message: str
) -> None:
    where = r"data.jsonl:1" if suffix == ".jsonl" else r"data.parquet, row 1"
    with pytest.raises(DataError, match=f"{where}: .*{message}"):
        JsonlSource(write(tmp_path, [row], suffix), name)


def test_parquet_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    with pytest.raises(DataError, match="there is no file"):
        JsonlSource(str(path))
    for content in (b"", b"PAR1 nonsense PAR1", b'{"prompt": "a"}'):
        path.write_bytes(content)
        with pytest.raises(DataError, match="not a whole Parquet file"):
            JsonlSource(str(path))


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("first \\boxed{3}, then \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\dfrac{1}{2}}.", "\\frac{1}{2}"),
        ("\\boxed{0.50}", "1/2"),
        ("\\boxed{1,072}", "1072"),
        ("\\boxed{ $x + 1$ }", "x+1"),
        ("\\boxed{\\$18.90}", "189/10"),
        ("cut off \\boxed{\\frac{1", "1"),
        ("<answer> Yes. </answer>", "yes"),
        ("so it is 12.", "12"),
        ("", None),
        ("no idea", None),
        ("\\boxed{}", None),
    ],
)
def test_final_answers(response: str, answer: str | None) -> None:
    assert final_answer("math", "", response) == answer


def test_the_answer_of_a_chain() -> None:
    assert final_answer("chains", "2", "3+5=1,1*2=2,") == "2"
    assert final_answer("chains", "2", "3+5=1,1*2") is None


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from("\\boxed{}<answer>/12,.$ é\ud800")))
def test_any_text_has_an_answer_or_none(text: str) -> None:
    assert final_answer("math", "", text) != ""


@pytest.mark.parametrize("piece", ["\\boxed{", "<answer>", "1,", "-", "{" * 9, "9" * 99])
def test_huge_responses_take_no_time(piece: str) -> None:
    final_answer("math", "", piece * 100_000)
    for reference in ("12", "olleh"):
        final_answer("reasoning_gym", {"index": 0, "answer": reference}, piece * 100_000)


@pytest.mark.parametrize(
    ("reference", "response", "answer"),
    [
        ("olleh", " olhel\n", "olhel"),
        ("olleh", "o l h e l.", "o l h e l."),
        ("olleh", "3 letters: <answer>olhel</answer>", "olhel"),
        ("olleh", "\\boxed{olleh} is 5 letters", "\\boxed{olleh} is 5 letters"),
        ("olleh", " ", None),
        (None, "A or B", "A or B"),
        ("12", "7 + 5 = 13.0", "13"),
        ("12", "\\boxed{1} or <answer> 1,300 </answer> or 5", "1300"),
        ("12", "thirteen", None),
    ],
)
def test_what_the_judge_of_reasoning_gym_judges_is_the_answer(
    reference: str | None, response: str, answer: str | None
) -> None:
    assert final_answer("reasoning_gym", {"index": 0, "answer": reference}, response) == answer


@pytest.mark.gym
@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(["<answer>", "</answer>", "EsenihC", "esenih", "1", "\\boxed{", " ", "\n", "."])))
def test_the_judge_of_reasoning_gym_scores_what_is_grouped(spell_backward: SpellBackward, pieces: list[str]) -> None:
    response, (data, judge, answer) = "".join(pieces), spell_backward
    grouped = final_answer("reasoning_gym", answer, response)
    assert judge(answer, response) == data.score_answer(grouped, data[0])


def test_long_answers_are_equal_by_their_digest() -> None:
    reference = {"index": 0, "answer": "olleh"}
    a, b, c = (
        final_answer("reasoning_gym", reference, "x" * n + end) for n, end in [(5000, "y"), (5000, "y"), (5000, "z")]
    )
    assert a == b != c
    assert len(str(a)) < 300
    assert final_answer("reasoning_gym", reference, "\ud800" * 5000) is not None


@pytest.mark.gym
def test_the_majority_of_bare_wrong_texts_wins(spell_backward: SpellBackward) -> None:
    _, judge, answer = spell_backward
    texts = [answer["answer"], *["esenih"] * 15]
    answered = tuple(
        Answered(judge(answer, text), final_answer("reasoning_gym", answer, text), 7, False, None) for text in texts
    )
    estimates = Problem(0, "Spell Chinese backward", answer, answered).estimates(has_answers=True)
    assert estimates["pass@1"] == estimates["maj@1"] == 1 / 16
    assert estimates["maj@16"] == 0.0
