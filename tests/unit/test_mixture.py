"""Mixtures of prompt sources ([[data.sources]]): exact shares, resuming, names and files."""

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_megatron.buffer.batch import source_metrics
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import CheckpointError
from bapo_megatron.prompts.mixture import PromptMixture, prompts_of
from bapo_megatron.prompts.stream import PromptStream
from bapo_megatron.types import Ended, Group, Prompt, Sample


class Bytes:
    """A tokenizer whose tokens are bytes."""

    chat_template = None

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [self.encode(text) for text in texts]}

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())


TOKENIZER: Any = Bytes()
WEIGHTS = st.lists(st.integers(1, 60) | st.floats(1e-3, 1e3), min_size=1, max_size=5)


def mixture(*weights: float, seed: int = 0, size: int = 20, **data: Any) -> PromptMixture:
    sources = tuple(
        {"name": f"s{i}", "weight": weight, "size": size, "options": {"max_terms": 3 + i}}
        for i, weight in enumerate(weights)
    )
    made = prompts_of(Config.model_validate({"run": {"seed": seed}, "data": {"sources": sources, **data}}), TOKENIZER)
    assert isinstance(made, PromptMixture)
    return made


@settings(deadline=None, max_examples=50)  # other processes may hold the cores
@given(WEIGHTS, st.integers(0, 120), st.integers(1, 60))
def test_each_source_has_its_share_of_every_window_of_the_stream(weights: list[float], start: int, length: int) -> None:
    mixed = mixture(*weights)
    names = [mixed.next().source for _ in range(start + length)]
    for i, weight in enumerate(weights):
        share = weight / sum(weights)
        for num in (start, start + length):
            assert abs(names[:num].count(f"s{i}") - share * num) < 1 + 1e-9, "from the start, within one prompt"
        assert abs(names[start:].count(f"s{i}") - share * length) < 2 + 1e-9, "in between, within one at each end"


def test_equal_weights_alternate_and_decimal_ones_are_exact() -> None:
    mixed = mixture(1, 1)
    assert [mixed.next().source for _ in range(6)] == ["s0", "s1"] * 3
    mixed = mixture(0.7, 0.2, 0.1)
    for _ in range(30):
        assert Counter(mixed.next().source for _ in range(10)) == {"s0": 7, "s1": 2, "s2": 1}


@settings(deadline=None, max_examples=30)
@given(WEIGHTS, st.integers(0, 80))
def test_a_mixture_goes_on_with_the_very_next_prompt_wherever_it_was_left(weights: list[float], num_read: int) -> None:
    whole, half, resumed = (mixture(*weights) for _ in range(3))
    before = [half.next() for _ in range(num_read)]
    assert before == [whole.next() for _ in range(num_read)]
    resumed.load_state_dict(json.loads(json.dumps(half.state_dict())))
    after = [resumed.next() for _ in range(50)]
    assert after == [whole.next() for _ in range(50)]
    assert [prompt.prompt_id for prompt in before + after] == list(range(num_read + 50)), "unique across sources"
    assert resumed.state_dict() == whole.state_dict()


def test_a_source_gives_the_prompts_that_it_gives_alone() -> None:
    mixed = mixture(3, 2)
    config = Config.model_validate({"data": {"size": 20, "options": {"max_terms": 4}}})
    alone = PromptStream(config, TOKENIZER)
    found = [prompt.text for prompt in (mixed.next() for _ in range(100)) if prompt.source == "s1"]
    assert found == [alone.next().text for _ in range(40)]


def test_skipped_prompts_of_all_sources_are_counted() -> None:
    mixed = mixture(1, 1, max_prompt_tokens=6, on_bad_prompt="skip")  # prompts of 3 terms only
    assert {len(mixed.next().token_ids) for _ in range(40)} == {6}
    assert mixed.num_skipped > 0


def test_a_checkpoint_of_another_mixture_is_refused() -> None:
    state = mixture(3, 1).state_dict()
    with pytest.raises(
        CheckpointError, match=r"had the weights {'s0': 3.0, 's1': 1.0}, but this run's data.sources have"
    ):
        mixture(1, 1).load_state_dict(state)
    with pytest.raises(CheckpointError, match="size = 20, but this run has 21"):
        mixture(3, 1, size=21).load_state_dict(state)
    single = PromptStream(Config(), TOKENIZER)
    with pytest.raises(CheckpointError, match="had a single source"):
        mixture(1, 1).load_state_dict(single.state_dict())
    with pytest.raises(CheckpointError, match="had source = None"):
        single.load_state_dict(state)


def test_metrics_of_each_source() -> None:
    def group(source: str, *rewards: float) -> Group:
        prompt = Prompt(0, (1,), "", "", source)
        return Group(prompt, tuple(Sample.of(f"0.{i}", prompt, need=Ended("stop", r)) for i, r in enumerate(rewards)))

    sources = Config.model_validate({"data": {"sources": ({"name": "a"}, {"name": "b"}, {"name": "c"})}}).data.sources
    metrics = source_metrics([group("a", 1.0, 0.0), group("b", 1.0), group("a", 1.0, 1.0)], sources)
    assert metrics == pytest.approx(
        {
            "data/a/prompt_share": 2 / 3,
            "data/a/reward": 0.75,
            "data/b/prompt_share": 1 / 3,
            "data/b/reward": 1.0,
            "data/c/prompt_share": 0.0,
            "data/c/reward": float("nan"),
        },
        nan_ok=True,
    )
