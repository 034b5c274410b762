"""Judges, and the scorer that runs them under a deadline."""

import re
import sys
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import math_verify
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bapo_megatron.rewards.worker_pool as pool_module
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import DataError, UserError
from bapo_megatron.prompts.chains import ChainSource
from bapo_megatron.prompts.reasoning_gym import ReasoningGymSource
from bapo_megatron.rewards import RewardScorer
from bapo_megatron.rewards.answers import judge_chain, judge_text
from bapo_megatron.rewards.math import judge_math
from bapo_megatron.rewards.reasoning_gym import build_judge_of_all, gym_answer, gym_judge
from bapo_megatron.rewards.verdicts import JudgeSpec
from bapo_megatron.types import Prompt
from tests.unit.test_reward_hooks import HANG_S, judges, strike_only

HANGS = "$9^{9^{9^9}}$"
ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def prompt(answer: Any, prompt_id: int = 0) -> Prompt:
    return Prompt(prompt_id, (1,), "?", answer, "test")


def make_config(reward: dict[str, Any] | None = None, **data: Any) -> Config:
    return Config.model_validate({"reward": {"timeout_s": HANG_S, **(reward or {})}, "data": data})


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("3+5=1,1*2=2,", 1.0),
        ("=2,", 1.0),
        ("3+5=1,1*2=3,", 0.0),
        ("3+5=1,1*2=2", 0.0),  # cut off before the comma that ends the step
        ("3+5=1,1*2=2,2+1=3,", 0.0),  # rambles on to another result
        ("3+5=1,1*2=2,\n", 0.0),
        ("2", 0.0),
        ("", 0.0),
    ],
)
def test_chain_judge(response, reward):
    assert judge_chain("2", response) == reward


@pytest.mark.parametrize("answer", ["2", 2, ["2"], [2]])
@pytest.mark.parametrize("judge", [judge_chain, judge_text, judge_math])
def test_an_answer_may_be_a_number(judge, answer):
    assert judge(answer, "3+5=1,1*2=2," if judge is judge_chain else "2") == 1.0
    assert judge(answer, "3+5=1,1*2=3," if judge is judge_chain else "3") == 0.0


def test_chain_judge_accepts_the_source_s_answers():
    questions = [ChainSource(50, 0, {})[i] for i in range(50)]
    assert all(judge_chain(q.answer, f"={q.answer},") == 1.0 for q in questions)


@pytest.mark.parametrize(
    ("answer", "response", "reward"),
    [
        ("12", "7 + 5 = 12", 1.0),
        (12, "so \\boxed{12}", 1.0),
        (12, "so \\boxed{13}, not 12", 0.0),
        ("\\frac{1}{2}", "The answer is $0.5$", 1.0),
        ("x^2+1", "it is $1+x^2$", 1.0),
        ("x^2+1", "it is $1+x^3$", 0.0),
        ("$\\sqrt{2}$", "\\boxed{2^{1/2}}", 1.0),
        ("12", "", 0.0),
        ("12", "\\boxed{", 0.0),
        ("12", "\\frac{", 0.0),
        ("12", "\x00 \ud800 $$ $\\frac{}{}$", 0.0),
        ("12", "1" * 200_000 + " so the answer is 12", 1.0),  # only the end is read
        ("?", "\\boxed{?}", 1.0),  # not an expression, but equal
        (True, "\\boxed{True}", 1.0),
        (8, "1 + 7: A simple addition", 0.0),  # the question, not the answer
        (8, "\\boxed{1+7}", 0.0),
        (8, "$1+7=4+4$", 0.0),
        (8, "$1+7=8$", 1.0),
        (8, "What is 16/2?", 0.0),
        (8, "$\\frac{16}{2}$", 0.0),
        (8, "2^3", 0.0),
        (8, "\\boxed{\\sqrt{64}}", 0.0),
        (1200, "$1.2 \\times 10^3$", 1.0),
        ("\\frac{1}{8}", "-(-1/8) = 0.125", 1.0),
        (-0.5, "-1/2", 1.0),
        ("2^{10}", "$2^{10}$", 1.0),  # the reference is a calculation
    ],
)
def test_math_judge(answer, response, reward):
    assert judge_math(answer, response) == reward


@pytest.mark.parametrize("number", [1e-5, 1e-7, -2.5e-7, 1e-12, 1e16, -1e22, 0.0, 3.0, 0.1, 5e-324])
def test_a_reference_that_json_would_write_with_an_exponent(number):
    exact = Fraction(str(number))
    plain = format(Decimal(str(number)), "f")
    fraction = f"\\frac{{{exact.numerator}}}{{{exact.denominator}}}"
    for right in (plain, f"${plain}$", f"\\boxed{{{plain}}}", f"\\boxed{{{fraction}}}", f"\\boxed{{{number}}}"):
        assert judge_math(number, right) == 1.0, right
    for wrong in (number + 1, number * 2 + (number == 0), number * 1.2 + (number == 0), -number or 1.0):
        assert judge_math(number, f"\\boxed{{{format(Decimal(str(wrong)), 'f')}}}") == (wrong == number), wrong


@pytest.mark.parametrize("answer", ["\\$18.90", "$18.90", "$\\$18.90$", "18.90", 18.9])
@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("\\boxed{\\$18.90}", 1.0),
        ("\\boxed{18.9}", 1.0),
        ("It costs \\$18.90.", 1.0),
        ("It costs $18.90.", 1.0),
        ("Of \\$20 there are $20 - 1.1 = \\$18.90$ left.", 1.0),
        ("\\boxed{\\$18.91}", 0.0),
        ("It costs \\$18.91.", 0.0),
    ],
)
def test_amounts_in_dollars(answer, response, reward):
    assert judge_math(answer, response) == reward


@pytest.mark.parametrize("answer", ["", "  ", "$$", "\\", "\\boxed{}", "\\$"])
def test_a_reference_that_cannot_be_read_is_an_error_of_the_data(answer):
    with pytest.raises(UserError, match=re.escape(f"in the answer {answer!r}, so no response could be right")):
        judge_math(answer, "12")


def test_lack_of_memory_is_no_fault_of_the_reference(monkeypatch):
    def parse(*_, **__):
        raise MemoryError

    monkeypatch.setattr(math_verify, "parse", parse)
    with pytest.raises(MemoryError):
        judge_math("12", "12")


@settings(deadline=None)  # other processes may hold the cores
@given(st.text(alphabet="\\{}$^_()[]0123456789+-*/=xyfracbosqt ,.", max_size=40))
def test_math_judge_survives_malformed_latex(response):
    if "^" in response or "!" in response:  # a tower of powers may take forever, which is the scorer's job to stop
        response = response.replace("^", "").replace("!", "")
    assert judge_math("7919", response) in (0.0, 1.0)


@pytest.mark.parametrize(
    ("response", "is_number", "answer"),
    [
        ("7 + 5 = 12.", True, "12"),
        ("12", True, "12"),
        ("1,234", True, "1234"),
        ("-3", True, "-3"),
        ("+3", True, "3"),
        ("-7-3", True, "3"),
        ("7 - -3", True, "-3"),
        ("2.50 euros", True, "2.50"),
        ("<answer> 4 </answer> or 5", True, "4"),
        ("<answer>4</answer> no: <answer>six</answer>", False, "six"),
        ("<answer>4 <answer> five </answer> </answer> <answer>6", False, "five"),
        ("</answer> 4 <answer>5", False, "</answer> 4 <answer>5"),
        ("<answer> </answer> 4", True, None),
        ("no number", True, None),
        (" two words \n", False, "two words"),
        ("", False, None),
    ],
)
def test_final_answer(response, is_number, answer):
    assert gym_answer(response, is_number=is_number) == answer


@pytest.mark.gym
class TestReasoningGymJudge:
    def test_every_reference_answer_gets_the_full_score(self):
        source = ReasoningGymSource("basic_arithmetic", 100, 3, ONE_DIGIT)
        judge = gym_judge("basic_arithmetic", 100, 3, ONE_DIGIT)
        for i in range(100):
            answer = source[i].answer
            assert judge(answer, f"Let me see: 9 * 99, so {answer['answer']}.") == 1.0
            assert judge(answer, "") == 0.0
            assert judge(answer, f"1{answer['answer'].lstrip('-')}") == 0.0  # more digits must earn no partial score

    def test_words_keep_the_data_set_s_partial_score(self):
        source = ReasoningGymSource("letter_counting", 10, 0, {})
        judge = gym_judge("letter_counting", 10, 0, {})
        assert judge(source[0].answer, source[0].answer["answer"]) == 1.0
        source = ReasoningGymSource("spell_backward", 10, 0, {})
        judge = gym_judge("spell_backward", 10, 0, {})
        assert judge(source[0].answer, source[0].answer["answer"]) == 1.0
        assert judge(source[0].answer, "x") < 1.0

    def test_prompts_of_another_seed_are_refused(self):
        source = ReasoningGymSource("basic_arithmetic", 100, 3, ONE_DIGIT)
        judge = gym_judge("basic_arithmetic", 100, 4, ONE_DIGIT)
        other = ReasoningGymSource("basic_arithmetic", 100, 4, ONE_DIGIT)
        changed = next(i for i in range(100) if source[i].answer != other[i].answer)
        with pytest.raises(DataError, match=rf"item {changed} changed"):
            judge(source[changed].answer, "1")


class TestKinds:
    @pytest.mark.parametrize(
        ("data", "kind"),
        [
            ({"source": "chains"}, "chains"),
            ({"source": "jsonl", "path": "p.jsonl"}, "math"),
            ({"source": "reasoning_gym", "dataset": "basic_arithmetic"}, "reasoning_gym"),
        ],
    )
    def test_auto_follows_the_source(self, data, kind):
        assert JudgeSpec.of(make_config(**data)).kind == kind

    def test_judge_and_source_must_go_together(self):
        with pytest.raises(UserError, match="judges prompts of that source only, not of 'jsonl'"):
            JudgeSpec.of(make_config({"kind": "reasoning_gym"}, source="jsonl", path="p.jsonl"))
        for kind in ("chains", "code"):
            with pytest.raises(UserError, match=r"cannot judge prompts of data.source = 'reasoning_gym'"):
                JudgeSpec.of(make_config({"kind": kind}, source="reasoning_gym", dataset="basic_arithmetic"))

    @pytest.mark.gym
    def test_bad_data_set_is_told_at_once(self):
        with pytest.raises(UserError, match="not one of reasoning-gym's"):
            RewardScorer(make_config(source="reasoning_gym", dataset="nonsense"))


def test_exact_judges_need_no_process(monkeypatch):
    monkeypatch.setattr(pool_module.subprocess, "Popen", lambda *_, **__: pytest.fail("a process"))
    with RewardScorer(make_config()) as scorer:
        assert scorer.score([(prompt("2"), "1*2=2,"), (prompt("2"), "1*2=3,")]) == [1.0, 0.0]
        assert scorer.score([]) == []


@pytest.fixture(scope="module")
def math_scorer() -> Iterator[RewardScorer]:
    with RewardScorer(make_config(source="jsonl", path="p.jsonl")) as scorer:
        yield scorer


class TestScorer:
    def test_rewards_keep_their_order(self, math_scorer):
        items = [(prompt(i), str(i if i % 3 else i + 1)) for i in range(60)]
        assert math_scorer.score(items) == [float(i % 3 != 0) for i in range(60)]

    def test_a_hang_costs_its_own_sample_only(self, math_scorer, monkeypatch):
        strike_only(HANGS, monkeypatch)
        before = math_scorer.num_timeouts
        hang = (prompt("\\sqrt{5}"), HANGS)
        items = [hang, *((prompt(str(i)), f"\\boxed{{{i}}}") for i in range(20)), hang]
        assert math_scorer.score(items) == [0.0, *[1.0] * 20, 0.0]
        assert math_scorer.num_timeouts == before + 2

    def test_a_worker_killed_while_idle_costs_nothing(self):
        others = judges()
        with RewardScorer(make_config(source="jsonl", path="p.jsonl")) as scorer:
            (idle,) = judges() - others
            idle.kill()
            assert scorer.score([(prompt(str(i)), str(i)) for i in range(20)]) == [1.0] * 20
            assert (scorer.num_errors, scorer.num_timeouts) == (0, 0)

    def test_processes_that_never_live_are_told(self, monkeypatch):
        monkeypatch.setattr(sys, "executable", "/bin/false")
        with pytest.raises(
            RuntimeError, match=r"no process that judges responses \(math\) could be started: it ended before"
        ):
            RewardScorer(make_config(source="jsonl", path="p.jsonl"))

    @pytest.mark.gym
    def test_an_exception_is_counted(self):
        config = make_config(source="reasoning_gym", dataset="basic_arithmetic", options=ONE_DIGIT)
        with RewardScorer(config) as scorer:
            assert scorer.score([(prompt({"nonsense": 1}), "1")]) == [0.0]
            assert (scorer.num_errors, scorer.num_timeouts) == (1, 0)

    def test_a_reference_that_cannot_be_read_stops_the_run(self, math_scorer):
        with pytest.raises(UserError, match=r"reward\.kind = 'math': .* in the answer '', so no response"):
            math_scorer.score([(prompt("1"), "1"), (prompt(""), "1")])
        assert math_scorer.score([(prompt("1"), "1")]) == [1.0]

    @pytest.mark.gym
    def test_data_of_another_run_stops_this_one(self):
        config = make_config(source="reasoning_gym", dataset="basic_arithmetic", options=ONE_DIGIT)
        with RewardScorer(config) as scorer, pytest.raises(UserError, match="item 0 changed"):
            scorer.score([(prompt({"index": 0, "answer": "none of these"}), "1")])

    def test_close_ends_the_processes(self):
        others = judges()
        scorer = RewardScorer(make_config(source="jsonl", path="p.jsonl"))
        assert judges() - others
        scorer.close()
        scorer.close()
        assert judges() <= others
        with pytest.raises(RuntimeError, match="closed"):
            scorer.score([(prompt("1"), "1")])


GYM = {"source": "reasoning_gym", "size": 10}


class TestMixtures:
    @pytest.mark.gym
    def test_data_sets_of_reasoning_gym_are_told_apart_by_the_source(self):
        sources = (
            {"name": "sums", "dataset": "basic_arithmetic", "options": ONE_DIGIT, **GYM},
            {"name": "spelling", "dataset": "spell_backward", **GYM},
        )
        judge = build_judge_of_all(JudgeSpec.of(make_config(sources=sources)).datasets, 0)
        for source, questions in (
            ("sums", ReasoningGymSource("basic_arithmetic", 10, 0, ONE_DIGIT)),
            ("spelling", ReasoningGymSource("spell_backward", 10, 0, {})),
        ):
            answer = questions[3].answer
            assert judge(answer=answer, response=answer["answer"], source=source) == 1.0
            assert judge(answer=answer, response="", source=source) == 0.0

    def test_files_and_formats_of_one_kind_share_a_judge(self):
        sources = ({"name": "a", "path": "a.jsonl"}, {"name": "b", "path": "b.jsonl", "format": "gsm8k"})
        assert JudgeSpec.of(make_config(sources=sources)) == JudgeSpec.of(make_config(source="jsonl", path="c.jsonl"))

    def test_kinds_of_judges_are_not_mixed_but_in_a_function_of_yours(self):
        sources = ({"name": "a"}, {"name": "b", "source": "programs"})
        with pytest.raises(UserError, match=r"one judge .* leads data.sources.a to 'chains', data.sources.b to 'code'"):
            JudgeSpec.of(make_config(sources=sources))
        assert JudgeSpec.of(make_config({"kind": "my:judge"}, sources=sources)).kind == "my:judge"
