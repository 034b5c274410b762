"""Advantages against their formulas in plain Python, and what happens to a user's own."""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bapo_megatron.algorithms.advantages import ESTIMATORS, GroupView, SampleView, has_spread, whiten
from bapo_megatron.buffer.batch import BatchBuilder
from bapo_megatron.config.advantages import advantage_function
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import UserError
from bapo_megatron.types import Ended, Group, Prompt, Sample, Segment

PROMPT = Prompt(3, (1, 2), "3+5=", "8", "chains")

rewards = st.lists(st.sampled_from([-1.0, 0.0, 0.25, 1.0, 3.0]), min_size=2, max_size=9).filter(
    lambda r: len(set(r)) > 1
)

OF_ANY_REWARDS = [name for name, advantage in ESTIMATORS.items() if not advantage.needs_binary]
OF_GROUPS = [name for name, advantage in ESTIMATORS.items() if advantage.needs_group]


def group_of(rewards: list[float]) -> GroupView:
    return GroupView(PROMPT, tuple(SampleView(reward, (4,), "stop", {"all": reward}) for reward in rewards))


@settings(max_examples=100, deadline=None)
@given(rewards=rewards)
def test_formulas(rewards: list[float]) -> None:
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    others = [(sum(rewards) - r) / (len(rewards) - 1) for r in rewards]
    expected = {
        "grpo": [(r - mean) / (std + 1e-6) for r in rewards],
        "dr_grpo": [r - mean for r in rewards],
        "rloo": [r - other for r, other in zip(rewards, others, strict=True)],
        "gdpo": [(r - mean) / (std + 1e-6) for r in rewards],  # the reward has one part
        "reinforce_plus_plus": rewards,
        "reinforce_plus_plus_baseline": [r - mean for r in rewards],
    }
    for name, values in expected.items():
        got = [value for (value,) in advantage_function(name)(group_of(rewards))]
        assert got == pytest.approx(values, abs=1e-12), name
        assert ESTIMATORS[name].function(group_of(rewards)).dtype == torch.float64


@settings(max_examples=100, deadline=None)
@given(rewards=st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=12), scale=st.sampled_from([1.0, 0.1, 40.0]))
def test_max_rl_of_successes_is_the_failures_per_success(rewards: list[float], scale: float) -> None:
    mean = statistics.fmean(rewards)
    expected = [r / mean - 1 for r in rewards] if mean else rewards
    got = [value for (value,) in advantage_function("max_rl")(group_of([scale * r for r in rewards]))]
    assert got == pytest.approx(expected, rel=1e-9, abs=1e-12)


def judged(prompt_id: int, *ends: tuple[int, Ended]) -> Group:
    """Return a group whose responses have these numbers of tokens and these ends."""
    prompt = replace(PROMPT, prompt_id=prompt_id)
    segments = [([Segment.sampled(0, 0, (5,) * n, (-1.0,) * n)] if n else [], end) for n, end in ends]
    return Group(prompt, tuple(Sample.of(f"{prompt_id}.{i}", prompt, *one) for i, one in enumerate(segments)))


def trained(groups: Sequence[Group], kind: str, **sections: Any) -> list[float]:
    """Return the advantages of the trained tokens of a batch."""
    advantage = {"kind": kind, **sections.pop("advantage", {})}
    batch = BatchBuilder(Config.model_validate({"advantage": advantage, **sections})).build(groups, {})
    return batch.advantages_T[batch.mask_T].tolist()


@pytest.mark.parametrize("others", [[0.0, 1.0], [0.5, 0.5], []])
@pytest.mark.parametrize("unfit", [0.5, -1.0, 2.0, 0.99])
def test_max_rl_refuses_a_reward_that_is_not_0_or_1_whatever_its_group(others: list[float], unfit: float) -> None:
    groups = [
        judged(3, (4, Ended("stop", 0.0)), (4, Ended("stop", 1.0))),
        judged(4, *((4, Ended("stop", reward)) for reward in [unfit, *others])),
    ]
    with pytest.raises(UserError) as refused:
        trained(groups, "max_rl")
    assert str(refused.value) == (
        f'advantage.kind="max_rl", prompt 4: a response has the reward {unfit:g}, and must have 0 or 1; let the judge '
        'return these, or set advantage.kind="grpo"'
    )
    assert trained(groups[:1], "max_rl", reward={"scale": 5.0}) == [-1.0] * 4 + [1.0] * 4


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (Ended("stop", 0.5), "the reward 0.5, and its parts add up to 0"),
        (Ended("turns", 1.5, parts={"format": 0.5}), "the reward 1.5, and its parts add up to 0.5"),
    ],
)
def test_gdpo_refuses_a_reward_that_is_more_than_its_parts(end: Ended, said: str) -> None:
    fits = Ended("stop", 1.5, parts={"format": 0.5, "correct": 1.0})
    timed_out = Ended("stop", 0.0, problem="timeout")
    assert trained([judged(3, (1, fits), (1, timed_out))], "gdpo") == pytest.approx([0.5**0.5, -(0.5**0.5)], abs=1e-5)
    with pytest.raises(UserError) as refused:
        trained([judged(3, (1, fits), (1, end))], "gdpo")
    assert str(refused.value) == (
        f'advantage.kind="gdpo", prompt 3: a response has {said}; let what gives rewards always return them as parts '
        'by name, or set advantage.kind="grpo"'
    )


@settings(max_examples=100, deadline=None)
@given(
    groups=st.lists(
        st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3), st.integers(0, 3)), min_size=2, max_size=5),
        min_size=1,
        max_size=4,
    ),
    weights=st.tuples(st.floats(-2, 2), st.sampled_from([0.0, 0.25, 1.0])),
)
def test_gdpo_whitens_the_sum_of_standardised_parts(
    groups: list[list[tuple[int, int, int]]], weights: tuple[float, float]
) -> None:
    """Follow `normalize_then_sum` of TRL 1.16's grpo_trainer.py, which adds 1e-4 to each std."""

    def standardised(values: list[float]) -> list[float]:
        mean, std = statistics.fmean(values), statistics.stdev(values)
        return [(value - mean) / (std + 1e-6) for value in values]

    sums: list[float] = []
    for group in groups:
        _, *parts = zip(*group, strict=True)
        columns = [standardised([x / 3 for x in part]) for part in parts]
        sums += [sum(w * value for w, value in zip(weights, row, strict=True)) for row in zip(*columns, strict=True)]
    mean, std = statistics.fmean(sums), statistics.stdev(sums)
    lengths = [num_tokens for group in groups for num_tokens, *_ in group]
    expected = [(x - mean) / (std + 1e-6) for x, n in zip(sums, lengths, strict=True) for _ in range(n)]
    names = ("correct", "format")

    def end(*values: int) -> Ended:
        parts = {name: value / 3 for name, value in zip(names, values, strict=True)}
        return Ended("stop", sum(w * x for w, x in zip(weights, parts.values(), strict=True)), parts=parts)

    built = [judged(i, *((n, end(*values)) for n, *values in group)) for i, group in enumerate(groups)]
    got = trained(built, "gdpo", reward={"weights": dict(zip(names, weights, strict=True))})
    assert got == pytest.approx(expected, abs=1e-4 if std < 1e-3 else 1e-6)


@settings(max_examples=100, deadline=None)
@given(
    groups=st.lists(
        st.lists(st.tuples(st.integers(1, 6), st.sampled_from([0.0, 0.1, 1.0]), st.booleans()), min_size=2, max_size=4),
        min_size=1,
        max_size=4,
    ),
    gamma=st.sampled_from([0.5, 0.99, 1.0]),
)
@pytest.mark.parametrize("kind", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_reinforce_plus_plus_whitens_over_the_trained_tokens_of_the_batch(
    kind: str, groups: list[list[tuple[int, float, bool]]], gamma: float
) -> None:
    """Against sums written out, with the sample standard deviation; truncated responses are not trained."""
    values: list[float] = []
    for group in groups:
        mean = statistics.fmean(reward for _, reward, _ in group)
        for num_tokens, reward, is_cut in group:
            if not is_cut and kind == "reinforce_plus_plus":
                values += [gamma**k * reward for k in reversed(range(num_tokens))]
            elif not is_cut:
                values += [reward - mean] * num_tokens
    assume(len(values) > 1)
    mean, std = statistics.fmean(values), statistics.stdev(values)
    expected = [(value - mean) / (std + 1e-8) for value in values]
    ends = [[(n, Ended("length" if is_cut else "stop", r)) for n, r, is_cut in group] for group in groups]
    built = [judged(i, *group) for i, group in enumerate(ends)]
    got = trained(built, kind, advantage={"gamma": gamma}, rollout={"truncated": "mask"})
    assert got == pytest.approx(expected if std > 1e-9 else [0.0] * len(values), abs=1e-5)


def test_of_several_sequences_each_ends_with_the_reward() -> None:
    """A sample with two trajectories, of two tokens and one, against one of a single token."""
    (one,) = judged(3, (2, Ended("stop", 1.0))).samples
    sample = replace(one, trajectories=(*one.trajectories, *judged(3, (1, Ended("stop", 1.0))).samples[0].trajectories))
    group = Group(PROMPT, (sample, replace(judged(3, (1, Ended("stop", 0.0))).samples[0], sample_id="3.1")))
    values = [0.5, 1.0, 1.0, 0.0]
    mean, std = statistics.fmean(values), statistics.stdev(values)
    got = trained([group], "reinforce_plus_plus", advantage={"gamma": 0.5})
    assert got == pytest.approx([(value - mean) / std for value in values], abs=1e-6)


turns = st.lists(st.sampled_from([-1.0, 0.0, 0.1, 1.0]), min_size=1, max_size=5)


def group_of_turns(samples: list[list[float]], gamma: float) -> GroupView:
    views = (SampleView(sum(r), (1,) * len(r), "stop", earlier_rewards=tuple(r[:-1])) for r in samples)
    return GroupView(PROMPT, tuple(views), gamma)


@settings(max_examples=100, deadline=None)
@given(samples=st.lists(turns, min_size=2, max_size=6), gamma=st.sampled_from([0.3, 0.9, 1.0]))
def test_turns_get_their_standardised_returns(samples: list[list[float]], gamma: float) -> None:
    """Against sums written out: each sample counts once, and each of its turns equally."""
    returns = [[sum(gamma ** (j - k) * r[j] for j in range(k, len(r))) for k in range(len(r))] for r in samples]
    weighted = [(value, 1 / len(of_sample)) for of_sample in returns for value in of_sample]
    mean = sum(w * value for value, w in weighted) / len(samples)
    std = (sum(w * (value - mean) ** 2 for value, w in weighted) / (len(samples) - 1)) ** 0.5
    got = advantage_function("grpo_turns")(group_of_turns(samples, gamma))
    assert list(map(len, got)) == list(map(len, samples))
    expected = [(value - mean) / (std + 1e-6) for value, _ in weighted]
    assert [*chain(*got)] == pytest.approx(expected, abs=1e-8)


@settings(max_examples=100, deadline=None)
@given(rewards=rewards, num_turns=st.lists(st.integers(1, 5), min_size=9, max_size=9))
def test_turns_without_rewards_of_their_own_get_the_advantage_of_their_sample(
    rewards: list[float], num_turns: list[int]
) -> None:
    by_turns, expected = advantage_function("grpo_turns"), advantage_function("grpo")(group_of(rewards))
    assert by_turns(group_of(rewards)) == expected, "bit for bit"
    counts = num_turns[: len(rewards)]
    several = [[0.0] * (n - 1) + [r] for n, r in zip(counts, rewards, strict=True)]
    spread = [a for (a,), n in zip(expected, counts, strict=True) for _ in range(n)]
    assert [*chain(*by_turns(group_of_turns(several, 1.0)))] == pytest.approx(spread)


def test_turns_of_one_sample_or_with_equal_returns_teach_nothing() -> None:
    assert ESTIMATORS["grpo_turns"].function(group_of_turns([[1.0, 0.5]], 0.5)) == [[0.0, 0.0]]
    assert ESTIMATORS["grpo_turns"].function(group_of_turns([[0.5, 1.0], [1.0]], 0.5)) == [[0.0, 0.0], [0.0]]


@pytest.mark.parametrize("name", OF_GROUPS)
@pytest.mark.parametrize("rewards", [[0.1] * 3, [0.1] * 7, [1.0], []])
def test_equal_rewards_give_exact_zeros(name: str, rewards: list[float]) -> None:
    assert advantage_function(name)(group_of(rewards)) == [[0.0]] * len(rewards)


@pytest.mark.parametrize("name", OF_GROUPS)
@pytest.mark.parametrize("rewards", [[0.1 + 0.2, 0.3, 0.3], [0.1 + 0.2 - 0.3, 0.0], [1e8 + 1e-8, 1e8], [1e-30, 0.0]])
def test_rewards_that_differ_by_rounding_are_equal(name: str, rewards: list[float]) -> None:
    assert len(set(rewards)) > 1
    assert advantage_function(name)(group_of(rewards)) == [[0.0]] * len(rewards)


@pytest.mark.parametrize(
    "values",
    [[], [0.7], [0.0] * 4, [1.0] * 8, [-1.0] * 8, [1e-9] * 3, [1e9] * 3, [0.1 + 0.2, 0.3, 0.3], [1e6 + 1e-9, 1e6]],
)
@pytest.mark.parametrize("is_centred", [False, True])
def test_a_batch_without_spread_is_whitened_to_zeros(values: list[float], is_centred: bool) -> None:
    assert whiten(torch.tensor(values, dtype=torch.float64), is_centred=is_centred).tolist() == [0.0] * len(values)


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(st.floats(-5, 5), min_size=2, max_size=30),
    offset=st.sampled_from([0.0, 1.0, -3.5, 1e4]),
    is_centred=st.booleans(),
)
def test_whitening(values: list[float], offset: float, is_centred: bool) -> None:
    """No mean is subtracted from centred values, to the last bit; otherwise the result has mean 0. Both are bounded."""
    plain = torch.tensor(values, dtype=torch.float64)
    centred = plain - plain.mean()
    given_values = centred if is_centred else plain + offset
    got = whiten(given_values, is_centred=is_centred)
    assert got.isfinite().all()
    assert float(got.abs().max()) <= len(values) ** 0.5
    if not has_spread(float(given_values.min()), float(given_values.max())):
        assert not got.any()
    elif is_centred:
        assert torch.equal(got, centred / (centred.std() + 1e-6))
        assert torch.equal(whiten(centred), got), "a mean that is a rounding error stays"
    else:
        assert abs(float(got.mean())) < 1e-6


def test_only_an_advantage_that_compares_the_group_is_centred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of raw rewards the mean is subtracted, and of built-in advantages it is not: equal rewards keep their exact 0."""
    (tmp_path / "raw_reward.py").write_text("def advantage(group): return group.rewards_G")
    monkeypatch.syspath_prepend(str(tmp_path))

    def advantages(kind: str, *groups: list[tuple[float, int]]) -> list[float]:
        def sample(i: int, reward: float, num_turns: int) -> Sample:
            of_turns = (Segment.sampled(0, 0, (5,), (-1.0,)), Segment.given("environment", (6,)))
            return Sample.of(f"3.{i}", PROMPT, of_turns * num_turns, Ended("stop", reward))

        built = [Group(PROMPT, tuple(sample(i, *one) for i, one in enumerate(group))) for group in groups]
        config = Config.model_validate({"advantage": {"kind": kind, "whiten_batch": True}})
        batch = BatchBuilder(config).build(built, {})
        return batch.advantages_T[batch.sampled_T].tolist()

    raw = advantages("raw_reward:advantage", [(0.0, 1), (1.0, 1)], [(1.0, 1), (1.0, 1)])
    assert raw == pytest.approx([-1.5, 0.5, 0.5, 0.5], abs=1e-5)
    assert advantages("raw_reward:advantage", [(1.0, 1), (1.0, 1)]) == [0.0, 0.0]
    # the first response has two turns, so that the mean over turns is not 0
    *_, one, two = advantages("dr_grpo", [(0.0, 2), (1.0, 1)], [(1.0, 1), (1.0, 1)])
    assert (one, two) == (0.0, 0.0)


@pytest.mark.parametrize("name", OF_ANY_REWARDS)
@settings(max_examples=50, deadline=None)
@given(rewards=rewards, factor=st.floats(0.5, 4))
def test_the_trait_says_whether_a_scale_of_rewards_does_nothing(name: str, rewards: list[float], factor: float) -> None:
    advantage = advantage_function(name)
    plain, scaled = (torch.tensor(advantage(group_of([f * r for r in rewards]))) for f in (1.0, factor))
    expected = plain if ESTIMATORS[name].divides_by_group else factor * plain
    torch.testing.assert_close(scaled, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "expected"), [("baseline_40", [-0.4, 0.6]), ("baseline_50", [-0.5, 0.5])])
def test_a_constant_baseline_is_not_centred_on_the_group(name: str, expected: list[float]) -> None:
    advantage = advantage_function(f"studies.regimes:{name}")
    assert [value for (value,) in advantage(group_of([0.0, 1.0]))] == pytest.approx(expected)
    assert [value for (value,) in advantage(group_of([0.0] * 2))] == pytest.approx([expected[0]] * 2)


MODULE = """
seen = []

def by_length(group):
    seen.append(group)
    return [sample.reward / sample.num_tokens for sample in group.samples]

def by_turn(group):
    return [[reward - 0.5 for reward in sample.turn_rewards] for sample in group.samples]

def as_tensor(group): return group.rewards_G * 2
def too_few(group): return [0.0]
def one_number(group): return 1.0
def words(group): return ["a"] * len(group.samples)
def too_many_turns(group): return [[0.0, 0.0, 0.0]] * len(group.samples)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_advantages.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_advantages", raising=False)


TWO_TURNS = GroupView(
    PROMPT,
    (
        SampleView(1.0, (3, 2), "stop", parts={"format": 0.25, "answer": 0.75}, earlier_rewards=(0.25,)),
        SampleView(0.0, (4, 0), "length"),
    ),
)


@pytest.mark.usefixtures("own")
def test_one_value_per_sample_or_per_turn() -> None:
    assert advantage_function("own_advantages:by_length")(TWO_TURNS) == [[0.2, 0.2], [0.0, 0.0]]
    assert advantage_function("own_advantages:by_turn")(TWO_TURNS) == [[-0.25, 0.25], [-0.5, -0.5]]
    assert advantage_function("own_advantages:as_tensor")(TWO_TURNS) == [[2.0, 2.0], [0.0, 0.0]]


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("name", ["too_few", "one_number", "words", "too_many_turns"])
def test_a_result_that_does_not_fit_is_one_message(name: str) -> None:
    with pytest.raises(UserError, match=f'advantage.kind="own_advantages:{name}": it returned .* with .2, 2. turns'):
        advantage_function(f"own_advantages:{name}")(TWO_TURNS)


@pytest.mark.usefixtures("own")
def test_the_view_is_of_the_group_that_was_judged() -> None:
    """The view has prompt, scaled rewards and lengths; the returned values reach the tokens of their responses."""
    lengths = (2, 4, 0)
    responses = tuple(
        Sample.of(
            f"3.{i}", PROMPT, [Segment.sampled(0, 0, (5,) * n, (-1.0,) * n)] if n else [], Ended("stop", float(i + 1))
        )
        for i, n in enumerate(lengths)
    )
    config = Config.model_validate({"advantage": {"kind": "own_advantages:by_length"}, "reward": {"scale": 8.0}})
    with pytest.raises(ZeroDivisionError):  # the user's own error is not hidden
        BatchBuilder(config).build([Group(PROMPT, responses)], {})
    batch = BatchBuilder(config).build([Group(PROMPT, responses[:2])], {})
    (_, view) = sys.modules["own_advantages"].seen
    assert view.prompt == PROMPT
    assert [(s.reward, s.turn_lengths, s.finish_reason) for s in view.samples] == [
        (8.0, (2,), "stop"),
        (16.0, (4,), "stop"),
    ]
    assert batch.advantages_T.tolist() == [0, 0, 4, 4, 0, 0, 4, 4, 4, 4]


def with_parts(reward: float) -> Ended:
    return Ended("stop", reward, parts={"all": reward})


def sample_of_turns(index: int, rewards: Sequence[float | None], end: Ended) -> Sample:
    """Return a sample whose turn k, from 0, has k + 1 tokens; the last turn has the rest of the reward."""
    turns = ([Segment.sampled(0, 0, (5,) * (k + 1), (-1.0,) * (k + 1))] for k in range(len(rewards)))
    first, *others = (list(turn) for turn in turns)
    segments = [*first, *chain(*([Segment.given("environment", (7,)), *turn] for turn in others))]
    return replace(Sample.of(f"3.{index}", PROMPT, segments, end), turn_rewards=tuple(rewards[:-1]))


def test_rewards_of_turns_are_scaled_and_their_advantages_reach_their_tokens() -> None:
    samples = (
        sample_of_turns(0, (0.5, None, 1.0), Ended("stop", 1.5)),
        sample_of_turns(1, (0.25, 0.0), Ended("turns", 0.25)),
    )
    settings_ = {"advantage": {"kind": "grpo_turns", "gamma": 0.5}, "reward": {"scale": 4.0, "clip": 5.0}}
    batch = BatchBuilder(Config.model_validate(settings_)).build([Group(PROMPT, samples)], {})
    expected = advantage_function("grpo_turns")(group_of_turns([[2.0, 0.0, 3.0], [1.0, 0.0]], 0.5))
    assert batch.rewards_S is not None
    assert batch.rewards_S.tolist() == [5.0, 1.0]
    of_tokens = [[a] * (k + 1) for turns in expected for k, a in enumerate(turns)]
    assert batch.advantages_T[batch.sampled_T].tolist() == torch.tensor([*chain(*of_tokens)]).tolist()
    assert not batch.advantages_T[~batch.sampled_T].any()


@pytest.mark.parametrize("kind", OF_ANY_REWARDS)
@settings(max_examples=20, deadline=None)
@given(
    groups=st.lists(st.lists(turns, min_size=10, max_size=12), min_size=1, max_size=3),
    failed=st.integers(0, 9),
    whitens=st.booleans(),
)
def test_a_tenth_of_failed_samples_changes_no_bit_for_the_others(
    kind: str, groups: list[list[list[float]]], failed: int, whitens: bool
) -> None:
    config = Config.model_validate(
        {"advantage": {"kind": kind, "gamma": 0.9, "whiten_batch": whitens}, "reward": {"running_std": True}}
    )
    ends = [
        Group(
            PROMPT,
            tuple(
                sample_of_turns(i, r, Ended("failed", None, "error") if i % 10 == failed else with_parts(sum(r)))
                for i, r in enumerate(samples)
            ),
        )
        for samples in groups
    ]
    batch, alone = (
        BatchBuilder(config).build(one, {}) for one in (ends, [replace(g, samples=tuple(g.valid)) for g in ends])
    )
    assert batch.num_sequences < sum(map(len, groups))
    assert batch.advantages_T.equal(alone.advantages_T)
    assert batch.metrics == alone.metrics
