"""Shaped rewards, and which groups and responses teach something."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_megatron.config.schema import Config
from bapo_megatron.rewards.shaping import is_informative, is_trained, shaped_reward
from bapo_megatron.types import Ended, FinishReason, Group, Prompt, Sample, Segment

PROMPT = Prompt(3, (1, 2), "?", "a", "test")


def make_config(penalty: float = 0.0, buffer: int = 0, **rollout: Any) -> Config:
    reward = {"overlong_penalty": penalty, "overlong_buffer_tokens": buffer}
    return Config.model_validate({"reward": reward, "rollout": {"max_response_tokens": 100, **rollout}})


def response(num_tokens: int, reason: FinishReason = "stop", reward: float | None = 1.0) -> Sample:
    segment = Segment.sampled(0, 0, (5,) * num_tokens, (-0.5,) * num_tokens)
    return Sample.of(f"3.{num_tokens}", PROMPT, (segment,) if num_tokens else (), Ended(reason, reward))


def group(*samples: Sample) -> Group:
    return Group(PROMPT, samples)


@pytest.mark.parametrize(
    ("num_tokens", "reason", "shaped"),
    [
        (0, "stop", 1.0),
        (80, "stop", 1.0),
        (81, "stop", 0.9),
        (90, "stop", 0.0),
        (99, "stop", -0.9),
        (100, "stop", -1.0),
        (100, "length", -1.0),
    ],
)
def test_the_penalty_grows_over_the_buffer(num_tokens: int, reason: FinishReason, shaped: float) -> None:
    assert shaped_reward(response(num_tokens, reason), make_config(2.0, 20)) == pytest.approx(shaped)


def test_without_a_buffer_only_truncated_responses_pay_and_by_default_none() -> None:
    config = make_config(0.5)
    assert shaped_reward(response(100, "stop"), config) == 1.0
    assert shaped_reward(response(100, "length"), config) == 0.5
    assert shaped_reward(response(100, "length"), make_config()) == 1.0


@given(st.integers(0, 100), st.integers(0, 100), st.floats(0, 10), st.integers(0, 100))
def test_longer_never_pays_and_never_costs_more_than_the_penalty(a: int, b: int, penalty: float, buffer: int) -> None:
    config = make_config(penalty, buffer)
    short, long = (shaped_reward(response(n), config) for n in sorted((a, b)))
    truncated = shaped_reward(response(100, "length"), config)
    assert 1.0 >= short >= long >= truncated == 1.0 - penalty


def test_an_unscored_response_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="has no verdict"):
        shaped_reward(response(3, reward=None), make_config())


def test_masking_leaves_out_truncated_responses_only() -> None:
    for truncated, reason, trained in (
        ("keep", "length", True),
        ("mask", "length", False),
        ("mask", "stop", True),
    ):
        assert is_trained(response(100, reason), make_config(truncated=truncated)) is trained  # type: ignore[arg-type]


class TestInformative:
    def test_rewards_have_to_differ(self) -> None:
        assert is_informative(group(response(3), response(4, reward=0.0)), make_config())
        assert not is_informative(group(response(3), response(4)), make_config())
        assert not is_informative(group(response(3)), make_config())
        assert not is_informative(group(response(3, reward=0.1 + 0.2), response(4, reward=0.3)), make_config())

    def test_shaped_rewards_count(self) -> None:
        equal_verdicts = group(response(50), response(95))
        assert not is_informative(equal_verdicts, make_config())
        assert is_informative(equal_verdicts, make_config(1.0, 20))
        assert not is_informative(group(response(3), response(100, "length", reward=2.0)), make_config(1.0))

    @pytest.mark.parametrize(("kind", "differs"), [("grpo", False), ("gdpo", True)])
    def test_parts_have_to_differ_if_they_count(self, kind: str, differs: bool) -> None:
        def of_parts(num_tokens: int, **parts: float) -> Sample:
            return replace(response(num_tokens), need=Ended("stop", 1.0, parts=parts))

        config = Config.model_validate({"advantage": {"kind": kind}})
        equal_sums = group(of_parts(3, correct=1.0, format=0.0), of_parts(4, correct=0.0, format=1.0))
        assert is_informative(equal_sums, config) == differs
        assert not is_informative(group(of_parts(3, correct=1.0), of_parts(4, correct=1.0)), config)
        timed_out = replace(response(4), need=Ended("stop", 0.0, "timeout"))
        assert is_informative(group(of_parts(3, correct=1.0), timed_out), config)

    def test_some_token_has_to_be_trained(self) -> None:
        cut = group(response(100, "length"), response(100, "length", reward=0.0))
        assert is_informative(cut, make_config())
        assert not is_informative(cut, make_config(truncated="mask"))
        one_left = group(*cut.samples, response(9))
        assert is_informative(one_left, make_config(truncated="mask"))
        empty = group(response(0), response(100, "length", reward=0.0))
        assert not is_informative(empty, make_config(truncated="mask"))
