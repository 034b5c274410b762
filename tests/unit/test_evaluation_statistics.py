"""pass@k, maj@k and bootstrap intervals against brute force."""

import itertools
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_megatron.errors import UserError
from bapo_megatron.estimates import bootstrap, majority_at_k, pass_at_k, powers_up_to, wilson_interval
from bapo_megatron.evaluation import results
from bapo_megatron.evaluation.results import Answered, Evaluation, Problem, compared
from bapo_megatron.evaluation.run import compare

RIGHT = "right"
votes = st.lists(st.sampled_from([RIGHT, "a", "b", "c", None]), min_size=1, max_size=7)


def wins(drawn: tuple[str | None, ...]) -> float:
    counts = Counter(vote for vote in drawn if vote is not None)
    winners = [vote for vote, count in counts.items() if count == max(counts.values())]
    return float(RIGHT in winners) / len(winners) if winners else 0.0


@settings(deadline=None)
@given(cast=votes, data=st.data())
def test_estimates_equal_the_mean_over_all_choices_of_k(cast: list[str | None], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(cast)))
    choices = list(itertools.combinations(cast, k))
    passed = cast.count(RIGHT)
    wrong = Counter(vote for vote in cast if vote not in (RIGHT, None))
    assert pass_at_k(len(cast), passed, k) == pytest.approx(statistics.fmean(RIGHT in drawn for drawn in choices))
    assert majority_at_k(passed, list(wrong.values()), cast.count(None), [k]) == pytest.approx(
        [statistics.fmean(map(wins, choices))]
    )


def test_large_samples_are_exact_and_quick() -> None:
    assert pass_at_k(1024, 1, 512) == pytest.approx(0.5)
    assert majority_at_k(64, [1] * 64, 64, [64])[0] > 0.999
    assert majority_at_k(0, [3, 2], 1, [6]) == [0.0]


@pytest.mark.parametrize("wrong", [[1] * 160, [2] * 80, [1, 2, 3] * 27, list(range(1, 18)), [40, 40, 39, 38, 1, 1, 1]])
def test_a_vote_of_hundreds_agrees_with_draws(wrong: list[int]) -> None:
    passed, abstained = 64, 192 - sum(wrong)
    ks = powers_up_to(256)
    found = majority_at_k(passed, wrong, abstained, ks)
    counts = [passed, *wrong, abstained]
    generator = np.random.default_rng(3)
    for k, probability in zip(ks, found, strict=True):
        drawn = generator.multivariate_hypergeometric(counts, k, size=4000, method="marginals")[:, :-1]
        most = drawn.max(axis=1, keepdims=True)
        won = np.where((most[:, 0] > 0) & (drawn[:, 0] == most[:, 0]), 1 / (drawn == most).sum(axis=1), 0.0)
        assert probability == pytest.approx(won.mean(), abs=4 * won.std() / 4000**0.5 + 1e-3)


def test_no_number_is_too_large() -> None:
    assert majority_at_k(4, [], 1096, [1, 1100]) == pytest.approx([4 / 1100, 1.0])
    none = comb(1096, 550) / comb(1100, 550)  # the chance that all 550 abstain; otherwise it is even
    assert majority_at_k(2, [2], 1096, [550]) == pytest.approx([(1 - none) / 2])


def test_one_response_is_its_own_majority() -> None:
    for passed, wrong, abstained in [(3, [2, 1], 2), (0, [1], 0), (4, [], 0)]:
        num = passed + sum(wrong) + abstained
        assert majority_at_k(passed, wrong, abstained, [1]) == pytest.approx([pass_at_k(num, passed, 1)])


def test_reported_k() -> None:
    assert [powers_up_to(n) for n in (1, 2, 3, 16)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8, 16]]


def test_an_interval_is_that_of_a_literal_bootstrap_and_covers() -> None:
    generator = random.Random(3)
    values = [generator.random() ** 2 for _ in range(30)]
    (low,), (high,) = bootstrap(np.array(values)[:, None])
    means = sorted(statistics.fmean(generator.choices(values, k=30)) for _ in range(10_000))
    assert low == pytest.approx(means[250], abs=0.006)
    assert high == pytest.approx(means[9749], abs=0.006)
    standard_error = statistics.stdev(values) / 30**0.5
    assert high - low == pytest.approx(2 * 1.96 * standard_error, rel=0.1)


def test_one_problem_has_no_interval_and_equal_ones_have_none_to_show() -> None:
    assert np.isnan(bootstrap(np.ones((1, 2)))).all()
    low_M, high_M = bootstrap(np.full((5, 1), 0.25))
    assert low_M == high_M == pytest.approx(0.25)


def generated_problems(num: int, num_samples: int) -> tuple[Problem, ...]:
    """Return problems of all difficulties; wrong answers repeat."""
    generator = random.Random(7)

    def respond(difficulty: float) -> Answered:
        passes = generator.random() > difficulty
        answer = "7" if passes else generator.choice(["8", "9", None])
        return Answered(float(passes), answer, generator.randint(1, 99), generator.random() < 0.1, None)

    return tuple(
        Problem(i, f"problem {i}", "7", tuple(respond(generator.random() ** 0.5) for _ in range(num_samples)))
        for i in range(num)
    )


def test_avg_at_16_of_100_problems_agrees_with_brute_force() -> None:
    problems = generated_problems(100, 16)
    estimates = Evaluation({}, problems, has_answers=True, seed=0).estimates
    means = [statistics.fmean(r.reward for r in p.responses) for p in problems]
    found = estimates["avg@16"]
    assert found.value == pytest.approx(statistics.fmean(means))
    generator = random.Random(11)
    resampled = sorted(statistics.fmean(generator.choices(means, k=100)) for _ in range(10_000))
    assert found.low == pytest.approx(resampled[250], abs=0.004)
    assert found.high == pytest.approx(resampled[9749], abs=0.004)

    assert estimates["pass@1"] == found
    assert estimates["maj@1"] == found
    assert estimates["pass@16"].value == statistics.fmean(any(r.passes for r in p.responses) for p in problems)
    drawn = [generator.sample([r.answer for r in p.responses], 4) for p in problems for _ in range(300)]
    assert estimates["pass@4"].value == pytest.approx(statistics.fmean("7" in d for d in drawn), abs=0.01)
    by_vote = [wins(tuple(RIGHT if a == "7" else a for a in d)) for d in drawn]
    assert estimates["maj@4"].value == pytest.approx(statistics.fmean(by_vote), abs=0.01)


def test_tables_and_json_hold_what_was_found() -> None:
    answered = [
        Answered(1.0, "7", 10, False, None),
        Answered(0.0, None, 20, True, "timeout"),
        Answered(0.5, "8", 30, False, None),
        Answered(0.0, "8", 40, False, "error"),
    ]
    problems = (Problem(0, "easy\none", "7", (answered[0],) * 4), Problem(1, "x" * 500, "7", tuple(answered)))
    evaluation = Evaluation({"checkpoint": "demo"}, problems, has_answers=True, seed=0)
    record = evaluation.to_json()
    assert (record["num_problems"], record["verifier_timeouts"], record["verifier_errors"]) == (2, 1, 1)
    hard = record["problems"][1]
    assert (hard["avg@4"], hard["pass@1"], hard["pass@4"], hard["maj@4"]) == (0.375, 0.25, 1.0, 0.0)
    assert (hard["response_tokens"], hard["truncated_share"]) == (25.0, 0.25)
    assert hard["verifier_problems"] == [None, "timeout", None, "error"]
    table = evaluation.table()
    assert "1 verifier timeout, 1 verifier error" in table
    assert table.index("1/4") < table.index("4/4"), "the hardest first"
    assert max(map(len, table.splitlines())) < 100
    without = Evaluation({}, problems[:1], has_answers=False, seed=0)
    assert not any(name.startswith("maj") for name in without.estimates)
    assert without.to_json()["estimates"]["avg@4"] == {"value": 1.0, "low": None, "high": None}


def test_estimates_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def count(passed: int, wrong: Sequence[int], abstained: int, ks: Sequence[int]) -> list[float]:
        asked.append(passed)
        return majority_at_k(passed, wrong, abstained, ks)

    monkeypatch.setattr(results, "majority_at_k", count)
    evaluation = Evaluation({}, generated_problems(5, 4), has_answers=True, seed=0)
    record = evaluation.to_json()
    evaluation.table()
    assert len(asked) == 5, "once per problem, whoever asks"
    means = [statistics.fmean(p["maj@4"] for p in record["problems"]), evaluation.estimates["maj@4"].value]
    assert means[0] == pytest.approx(means[1])


def answered(reward: float) -> Answered:
    return Answered(reward, None, 10, False, None)


@pytest.mark.parametrize(("reward", "interval"), [(1.0, (0.676, 1.0)), (0.0, (0.0, 0.324))])
def test_eight_of_eight_alike_leave_a_doubt(reward: float, interval: tuple[float, float]) -> None:
    problems = tuple(Problem(i, "p", "7", (answered(reward),) * 4) for i in range(8))
    estimates = Evaluation({}, problems, has_answers=True, seed=0).estimates
    for name in ("avg@4", "pass@1", "pass@4", "maj@4"):
        assert (estimates[name].low, estimates[name].high) == pytest.approx(interval, abs=1e-3)
    assert (estimates["response_tokens"].low, estimates["response_tokens"].high) == (10, 10)


def test_a_mean_of_other_rewards_is_no_share() -> None:
    problems = tuple(Problem(i, "p", "7", (answered(-1.0), answered(1.0))) for i in range(8))
    estimates = Evaluation({}, problems, has_answers=True, seed=0).estimates
    assert estimates["avg@2"] == results.Estimate(0.0, 0.0, 0.0)
    assert estimates["pass@2"].low == pytest.approx(0.676, abs=1e-3)


def test_wilson_agrees_with_its_definition() -> None:
    for num, passed in [(8, 8), (8, 0), (30, 11)]:
        share = passed / num
        for edge in wilson_interval(share, num):
            if 1e-9 < edge < 1 - 1e-9:  # the edge is 1.96 of its own standard errors away from the share
                assert abs(share - edge) == pytest.approx(1.959964 * (edge * (1 - edge) / num) ** 0.5, rel=1e-6)
    assert wilson_interval(1.0, 8)[1] == pytest.approx(1.0)
    assert wilson_interval(0.0, 8)[0] == pytest.approx(0.0)


def evaluation_of(rewards: Sequence[Sequence[float]], names: Sequence[str], **facts: object) -> dict[str, Any]:
    problems = tuple(
        Problem(i, name, "4", tuple(Answered(r, None, 10, False, None, {"half": r / 2}) for r in row))
        for i, (name, row) in enumerate(zip(names, rewards, strict=True))
    )
    return Evaluation(facts, problems, has_answers=False, seed=0).to_json()


def test_parts_of_the_reward_are_estimates_and_a_missing_one_counts_as_0() -> None:
    responses = (
        Answered(1.2, None, 5, False, None, {"right": 1.0, "form": 0.2}),
        Answered(0.0, None, 5, False, "error"),
    )
    evaluation = Evaluation({}, (Problem(0, "q", "4", responses),), has_answers=False, seed=0)
    assert {name: e.value for name, e in evaluation.estimates.items()}["reward/right"] == 0.5
    assert evaluation.estimates["reward/form"].value == pytest.approx(0.1)
    assert "reward/form" in evaluation.table()
    assert evaluation.to_json()["problems"][0]["parts"] == [{"right": 1.0, "form": 0.2}, {}]
    (plain,) = Evaluation({}, (Problem(0, "q", "4", responses[1:]),), has_answers=False, seed=0).to_json()["problems"]
    assert "parts" not in plain


rewards_of = st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=2)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("abcd"), rewards_of, rewards_of), min_size=1, max_size=8), st.randoms())
def test_a_comparison_pairs_the_same_questions(drawn: list[Any], generator: random.Random) -> None:
    """The second evaluation has another order and another question; questions asked twice keep their order."""
    before = evaluation_of([row for _, row, _ in drawn], [name for name, *_ in drawn], temperature=1.0)
    letters = [*{name for name, *_ in drawn}]
    generator.shuffle(letters)
    moved = [one for letter in letters for one in drawn if one[0] == letter]
    after = evaluation_of(
        [[9.0, 9.0], *[row for *_, row in moved]], ["other", *[name for name, *_ in moved]], temperature=0.6
    )
    text = compared(before, after)
    avg = next(line.split() for line in text.splitlines() if line.startswith("avg "))
    means = [statistics.fmean(statistics.fmean(one[i]) for one in drawn) for i in (1, 2)]
    assert [float(x) for x in avg[1:4]] == pytest.approx([*means, means[1] - means[0]], abs=1e-3)
    signs = [statistics.fmean(after) - statistics.fmean(before) for _, before, after in drawn]
    assert avg[-1] == f"{sum(s > 0 for s in signs)}/{sum(s < 0 for s in signs)}"
    assert f"of both evaluations (of {len(drawn)} and {len(drawn) + 1})" in text
    assert "they were asked differently: temperature 1.0 and 0.6" in text
    if len(drawn) > 1:
        low, high = (float(x.strip("[],")) for x in avg[4:6])
        assert low - 1e-3 <= means[1] - means[0] <= high + 1e-3


def test_paired_differences_are_more_precise_than_either_evaluation() -> None:
    levels = [random.Random(3).random() for _ in range(40)]
    one, other = ([[level + d] for level in levels] for d in (0.0, 0.1))
    names = [str(i) for i in range(40)]
    avg = next(
        line for line in compared(evaluation_of(one, names), evaluation_of(other, names)).splitlines() if "avg" in line
    )
    assert "+0.100   [+0.100, +0.100]" in avg
    assert avg.endswith("40/0")


def test_evaluations_that_share_nothing_are_not_compared(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no problem in common"):
        compared(evaluation_of([[1.0]], ["a"]), evaluation_of([[1.0]], ["b"]))
    for content in (None, "{", "[]", '{"problems": []}', "\udc00"):
        if content is not None:
            (tmp_path / "result.json").write_bytes(content.encode(errors="surrogatepass"))
        with pytest.raises(UserError, match=r"is not the folder of an evaluation: .*result.json.* give folders that"):
            compare(tmp_path, tmp_path)
