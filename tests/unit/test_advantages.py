"""Advantages against their formulas in plain Python, and what happens to a user's own."""

import statistics
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_megatron.algorithms.advantages import ESTIMATORS, GroupView, SampleView
from bapo_megatron.buffer.batch import BatchBuilder
from bapo_megatron.config.advantages import advantage_function
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import UserError
from bapo_megatron.types import Ended, Group, Prompt, Sample, Segment

PROMPT = Prompt(3, (1, 2), "3+5=", "8", "chains")

rewards = st.lists(st.sampled_from([-1.0, 0.0, 0.25, 1.0, 3.0]), min_size=2, max_size=9).filter(
    lambda r: len(set(r)) > 1
)


def group_of(rewards: list[float]) -> GroupView:
    return GroupView(PROMPT, tuple(SampleView(reward, (4,), "stop") for reward in rewards))


@settings(max_examples=100, deadline=None)
@given(rewards=rewards)
def test_formulas(rewards: list[float]) -> None:
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    others = [(sum(rewards) - r) / (len(rewards) - 1) for r in rewards]
    expected = {
        "grpo": [(r - mean) / (std + 1e-6) for r in rewards],
        "dr_grpo": [r - mean for r in rewards],
        "rloo": [r - other for r, other in zip(rewards, others, strict=True)],
    }
    for name, values in expected.items():
        got = [value for (value,) in advantage_function(name)(group_of(rewards))]
        assert got == pytest.approx(values, abs=1e-12), name
        assert ESTIMATORS[name].function(group_of(rewards)).dtype == torch.float64


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("rewards", [[0.1] * 3, [0.1] * 7, [1.0], []])
def test_equal_rewards_give_exact_zeros(name: str, rewards: list[float]) -> None:
    assert advantage_function(name)(group_of(rewards)) == [[0.0]] * len(rewards)


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=50, deadline=None)
@given(rewards=rewards, factor=st.floats(0.5, 4))
def test_the_trait_says_whether_a_scale_of_rewards_does_nothing(name: str, rewards: list[float], factor: float) -> None:
    plain, scaled = (ESTIMATORS[name].function(group_of([f * r for r in rewards])) for f in (1.0, factor))
    expected = plain if ESTIMATORS[name].divides_by_std else factor * plain
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
        SampleView(1.0, (3, 2), "stop", parts={"format": 0.25, "answer": 0.75}, turn_rewards=(0.0, 1.0)),
        SampleView(0.0, (4, 0), "length", turn_rewards=(0.5, 0.0)),
    ),
)


@pytest.mark.usefixtures("own")
def test_one_value_per_sample_or_per_turn() -> None:
    assert advantage_function("own_advantages:by_length")(TWO_TURNS) == [[0.2, 0.2], [0.0, 0.0]]
    assert advantage_function("own_advantages:by_turn")(TWO_TURNS) == [[-0.5, 0.5], [0.0, -0.5]]
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
