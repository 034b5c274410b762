"""Annotators: values of tokens that the user's own object adds to ended samples."""

import asyncio
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bapo_megatron.buffer.batch import BatchBuilder
from bapo_megatron.config.annotators import own_annotators
from bapo_megatron.config.schema import Config
from bapo_megatron.engines.base import GenerateRequest, GenerateResult
from bapo_megatron.errors import EngineError, UserError
from bapo_megatron.rollout.annotators import Annotators
from bapo_megatron.rollout.book import groups_of
from bapo_megatron.rollout.group_files import group_to_json
from bapo_megatron.rollout.recorded import read_groups, write_groups
from bapo_megatron.simulate.clock import run_on_clock
from bapo_megatron.tokens import TokenStream, encoded_rows
from bapo_megatron.types import Ended, Group, Prompt, Sample, Segment, Trajectory
from tests.unit.test_scheduler import ScriptedEngine, make

PLACES = TokenStream("places", "float32", (2,), missing=-1)
DOUBLES = TokenStream("doubles", "int64", missing=0)
PROMPT = Prompt(7, (1, 2), "", "", "test")


class Marks:
    """An annotator of two streams: each token's place, twice, and its id, doubled."""

    streams = (PLACES, DOUBLES)
    deadline_s = 5.0

    async def rows(self, sample: Sample) -> Mapping[TokenStream, Any]:
        await asyncio.sleep(0.1 * (sample.num_sampled_tokens % 3))
        places = np.arange(sample.num_sampled_tokens, dtype="float32")
        return {PLACES: np.stack([places, places + 0.1], 1), DOUBLES: (2 * sample.sampled_ids).tolist()}


def named(segments: Sequence[Segment]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for segment in segments:
        for stream, rows in segment.rows.items():
            found.setdefault(stream.name, []).extend(rows.tolist())
    return found


def check_marks(sample: Sample) -> None:
    rows = named([segment for trajectory in sample.trajectories for segment in trajectory.segments])
    assert rows["doubles"] == (2 * sample.sampled_ids).tolist()
    assert [place for place, _ in rows["places"]] == [*range(sample.num_sampled_tokens)]


def as_json(groups: Sequence[Group]) -> str:
    return json.dumps([group_to_json(group) for group in groups], default=encoded_rows)


def ended(*trajectories: Sequence[Segment], reward: float | None = 1.0) -> Sample:
    first = Segment.given("prompt", PROMPT.token_ids)
    need = Ended("stop" if reward is not None else "failed", reward)
    return Sample("7.0", PROMPT, tuple(Trajectory((first, *segments)) for segments in trajectories), need)


def sampled(*token_ids: int) -> Segment:
    return Segment.sampled(0, 0, token_ids, [-1.0] * len(token_ids))


def annotated(one: Any, *samples: Sample, times: int = 1) -> tuple[list[Sample], Annotators]:
    annotators, found = Annotators((one,)), list(samples)

    async def run() -> None:
        for _ in range(times):
            found[:] = await annotators.annotated(samples)

    run_on_clock(run())
    return found, annotators


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_trained_samples_have_the_rows_before_and_after_a_restart(is_overlapped: bool, tmp_path: Path) -> None:
    def scheduler_of() -> Any:
        settings: dict[str, Any] = {"overlap": is_overlapped, "max_staleness": 2}
        annotators = Annotators((Marks(),))
        return make(ScriptedEngine(), tokens_per_round=5, groups_in_flight=6, annotators=annotators, **settings)

    async def run() -> tuple[list[Group], dict[str, Any]]:
        scheduler = scheduler_of()
        (first, _), (second, _) = [await scheduler.take(step, 0) for step in range(2)]
        state = scheduler.state_dict()
        await scheduler.close()
        return [*first, *second], state

    groups, state = run_on_clock(run())
    for sample in (s for group in groups for s in group.samples):
        check_marks(sample)
    write_groups(tmp_path, 1, groups)
    assert as_json(read_groups(tmp_path, 1, Marks.streams)) == as_json(groups)
    kept = [s for some in groups_of(state, Marks.streams) for g in some for s in g.samples if s.reward is not None]
    assert kept, "samples have ended that are not trained yet"
    for sample in kept:
        check_marks(sample)
    again = scheduler_of()
    again.load_state_dict(state)
    after = again.state_dict()
    assert json.dumps(after, default=encoded_rows) == json.dumps(state, default=encoded_rows)


def test_other_samples_sample_meanwhile() -> None:
    class Engine(ScriptedEngine):
        """Answer requests for other prompts than 0 once the annotator has begun with prompt 0."""

        async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult | EngineError]:
            if not all(request.rid.startswith("0.") for request in requests):
                await annotator.has_begun.wait()
                annotator.others_sample.set()
            return await super().generate_many(requests)

    class Waits(Marks):
        """Return the rows of prompt 0 once a request for another prompt is answered."""

        def __init__(self) -> None:
            self.has_begun, self.others_sample = asyncio.Event(), asyncio.Event()

        async def rows(self, sample: Sample) -> Mapping[TokenStream, Any]:
            if sample.prompt.prompt_id == 0:
                self.has_begun.set()
                await self.others_sample.wait()
            return await super().rows(sample)

    annotator = Waits()
    annotators = Annotators((annotator,))
    scheduler = make(Engine(), overlap=True, max_staleness=2, groups_in_flight=2, annotators=annotators)

    async def run() -> list[Group]:
        groups, _ = await scheduler.take(0, 0)
        await scheduler.close()
        assert groups is not None
        return groups

    for sample in (s for group in run_on_clock(run()) for s in group.samples):
        check_marks(sample)
    assert annotators.num_failed == 0


def test_rows_lie_in_the_order_of_sampled_tokens_over_all_trajectories_and_reach_the_batch() -> None:
    answer = Segment.given("environment", (9,))
    sample = ended([sampled(3, 4), answer, sampled(5)], [Segment.given("trajectory", (3,)), sampled(6)])
    (found,), _ = annotated(Marks(), sample)
    check_marks(found)
    failed, silent = ended([sampled(3)], reward=None), ended([])
    assert annotated(Marks(), failed, silent)[0] == [failed, silent]
    plain = dataclasses.replace(ended([sampled(5)]), sample_id="7.1")
    batch = BatchBuilder(Config()).build([Group(PROMPT, (found, plain))], {})
    assert batch.extra[DOUBLES].tolist() == [0, 0, 6, 8, 0, 10, 0, 0, 0, 12, 0, 0, 0]
    assert batch.extra[PLACES][2:4].tolist() == torch.tensor([[0, 0.1], [1, 1.1]]).tolist()
    assert batch.extra[PLACES][-1].tolist() == [-1, -1], "no rows"


async def late(rows: Mapping[TokenStream, Any]) -> Mapping[TokenStream, Any]:
    await asyncio.sleep(6)
    return rows


async def broken(rows: Mapping[TokenStream, Any]) -> Mapping[TokenStream, Any]:
    raise LookupError("no teacher")


async def half(rows: Mapping[TokenStream, Any]) -> Mapping[TokenStream, Any]:
    return {PLACES: rows[PLACES]}


async def short(rows: Mapping[TokenStream, Any]) -> Mapping[TokenStream, Any]:
    return {**rows, DOUBLES: rows[DOUBLES][1:]}


async def wide(rows: Mapping[TokenStream, Any]) -> Mapping[TokenStream, Any]:
    return {**rows, PLACES: rows[PLACES].astype("float64")}


async def nothing(rows: Mapping[TokenStream, Any]) -> Any:
    return None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (late, "no rows in 5 s"),
        (broken, "LookupError('no teacher')"),
        (half, "not rows of places, doubles"),
        (short, "stream doubles: rows of shape [1], not [2]"),
        (wide, "stream places: rows are float64, not float32"),
        (nothing, "TypeError"),
    ],
)
def test_a_failure_costs_the_rows_of_its_sample(
    change: Callable[..., Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Fails(Marks):
        async def rows(self, sample: Sample) -> Mapping[TokenStream, Any]:
            return await change(await super().rows(sample))

    sample = ended([sampled(3, 4)])
    found, annotators = annotated(Fails(), sample, sample)
    assert found == [sample, sample]
    assert annotators.num_failed == 2
    assert all(m.startswith("annotator Fails, sample 7.0 of prompt 7: ") and reason in m for m in caplog.messages)
    with pytest.raises(UserError, match=r"an annotator failed on all of the first 32 samples, .*; annotator Fails, "):
        annotated(Fails(), sample, times=32)


MADE: dict[str, tuple[dict[str, Any], str]] = {
    "no streams": ({"streams": ()}, "it has 0 streams and a deadline_s of 5"),
    "no deadline": ({"deadline_s": 0}, "it has 2 streams and a deadline_s of 0"),
    "plain": ({"rows": lambda self, sample: {}}, "it has no method `async def rows"),
    "needed": ({"streams": (TokenStream("a", "float32"),)}, "ValueError: stream a: an annotator adds numbers"),
    "not kept": ({"streams": (TokenStream("a", "float32", missing=0, kept=False),)}, "ValueError: stream a: an ann"),
    "taken": ({"streams": (TokenStream("mask", "float32", missing=0),)}, "ValueError: stream mask: the name is taken"),
    "twice": ({"streams": (PLACES, PLACES)}, "ValueError: stream places: the name is taken"),
}


@pytest.mark.parametrize("case", MADE)
def test_one_that_does_not_fit_is_refused_in_one_message(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, reason = MADE[case]
    monkeypatch.setattr(f"{__name__}.make_marks", lambda config: type("One", (Marks,), changes)())
    config = Config.model_validate({"rollout": {"annotators": [f"{__name__}:make_marks"]}})
    with pytest.raises(UserError) as error:
        own_annotators(config, ())
    message = str(error.value)
    assert message.startswith(f'rollout.annotators="{__name__}:make_marks": ')
    assert reason in message
    assert message.endswith("Expected: def make(config: Config) -> Annotator, an object with streams, deadline_s and "
                            "async def rows(sample)")  # fmt: skip


def make_marks(config: Config) -> Marks:
    return Marks()


def test_the_streams_of_a_model_are_taken() -> None:
    config = Config.model_validate({"rollout": {"annotators": [f"{__name__}:make_marks"]}})
    with pytest.raises(UserError, match="stream places: the name is taken"):
        own_annotators(config, ["places"])
    (made,) = own_annotators(config, ["routes"])
    assert made.streams == (PLACES, DOUBLES)
