"""Groups keep every bit of every stream on their way through JSON and arrays, and segments join."""

import base64
import json
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from bapo_megatron.rollout.group_files import group_from_json, group_to_json, with_values
from bapo_megatron.tokens import CORE_STREAMS, JoinedRows, TokenStream, encoded_rows
from bapo_megatron.types import (
    Batch,
    Ended,
    Group,
    MicroBatch,
    NeedsEnvironment,
    Prompt,
    Sample,
    Segment,
    Trajectory,
    copied_together,
)

PROMPT = Prompt(7, (1, 2), "3+5=", {"answer": 8}, "chains")
GROUP = Group(
    PROMPT,
    (
        Sample.of(
            "7.0",
            PROMPT,
            (Segment.sampled(4, 2, (5, 6), (-0.1, -1e-17)), Segment.sampled(5, 3, (9,), (-2.5,))),
            Ended("stop", 1.0, parts={"answer": 1.0, "format": 1e-17}),
        ),
        Sample.of("7.1", PROMPT),
        Sample.of("7.2", PROMPT, (Segment.sampled(4, 2, (5,), (-0.1,)),), NeedsEnvironment("length")),
    ),
)
ROUTES = TokenStream("routes", "uint8", (3, 2), missing=255, on="fed")
SCORES = TokenStream("scores", "float32", missing=-1.0)
CHOICES = TokenStream("choices", "uint8", (2,), missing=255, least=0, most=8, distinct=True)


def rows_of(first: int, num: int) -> np.ndarray:
    return (np.arange(first, first + num)[:, None, None] + 10 * np.arange(3)[:, None] + np.arange(2)).astype(np.uint8)


def through_json(group: Group) -> Any:
    return json.loads(json.dumps(group_to_json(group), default=encoded_rows))


def through_arrays(group: Group) -> Any:
    rows = JoinedRows()
    structure = json.loads(json.dumps(with_values(group_to_json(group), rows.put)))
    joined = JoinedRows(rows.arrays())
    value = with_values(structure, joined.take)
    joined.check_empty()
    return value


WAYS = pytest.mark.parametrize("way", [through_json, through_arrays])


@WAYS
def test_a_group_comes_back_bit_for_bit(way: Callable[[Group], Any]) -> None:
    assert group_from_json(way(GROUP)) == GROUP


@WAYS
@given(
    pieces=st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(1, 3)), max_size=8),
    num_prompt_tokens=st.integers(1, 3),
)
def test_fed_rows_arrive_with_the_next_reply_and_lie_with_the_next_token(
    way: Callable[[Group], Any], pieces: list[tuple[int, bool, int]], num_prompt_tokens: int
) -> None:
    """Row i of any stream is made from i, so that each row shows where it belongs."""
    prompt = replace(PROMPT, token_ids=tuple(range(num_prompt_tokens)))
    begun = Group.begun(prompt, 2)
    sample = begun.samples[1]
    (trajectory,) = sample.trajectories
    version = 0
    for grows_older, is_answered, num in pieces:
        version += grows_older
        start = trajectory.num_tokens
        if is_answered:
            trajectory = trajectory.extended([Segment.given("environment", range(start, start + num))])
            continue
        num_fed = trajectory.num_fed([ROUTES])
        late = {ROUTES: rows_of(num_fed, start - num_fed)}
        scores = np.arange(start, start + num, dtype=np.float32)
        rows = {ROUTES: rows_of(start, num), SCORES: scores}
        new = Segment.sampled(version, 0, range(start, start + num), [-float(i) for i in range(num)], rows)
        trajectory = trajectory.extended([new], late)
        assert trajectory.num_fed([ROUTES]) == trajectory.num_tokens
    group = begun.grown(sample.with_trajectory(0, trajectory))
    assert group_from_json(way(group), [ROUTES, SCORES]) == group
    (found,) = group.samples[1].trajectories
    assert found.token_ids.tolist() == list(range(found.num_tokens))
    at = 0
    for number, segment in enumerate(found.segments):
        if ROUTES in segment.rows:
            expected = rows_of(at, segment.num_tokens)
            assert np.array_equal(segment.rows[ROUTES][number == 0 :], expected[number == 0 :])
        if SCORES in segment.rows:
            assert segment.rows[SCORES].tolist() == list(range(at, at + segment.num_tokens))
        assert not segment.token_ids.flags.writeable
        at += segment.num_tokens
    assert sum(s.num_tokens for s in found.segments if ROUTES in s.rows) in (0, found.num_fed([ROUTES]))
    assert group.samples[0].trajectories[0].segments[0] is found.segments[0], "the prompt's rows are kept once"


@WAYS
@pytest.mark.parametrize("needed", [replace(ROUTES, missing=None), replace(ROUTES, on_request=True)])
def test_a_response_that_lacks_rows_is_named(way: Callable[[Group], Any], needed: TokenStream) -> None:
    """Rows may be missing for tokens whose reply has not come yet, and in streams with a value for them."""
    sampled = Segment.sampled(0, 0, (3, 4), (-1.0, -1.0), {needed: rows_of(5, 2)})
    given_in_between = Segment.given("environment", (5, 6, 7), {needed: rows_of(7, 3)})
    at_the_end = Segment.given("environment", (8,))
    first = Segment.given("prompt", PROMPT.token_ids, {needed: rows_of(0, 2)})
    whole = [first, sampled, given_in_between, sampled, at_the_end]
    for number in range(5):
        segments = [replace(s, rows={}) if i == number else s for i, s in enumerate(whole)]
        group = Group(PROMPT, (Sample("7.1", PROMPT, (Trajectory(tuple(segments)),)),))
        if number == 4:
            assert group_from_json(way(group), [needed, SCORES]) == group
        else:
            with pytest.raises(ValueError, match=r"response 7\.1 of prompt 7: stream routes: is missing"):
                group_from_json(way(group), [needed, SCORES])


@WAYS
@given(num_tokens=st.integers(2, 9), second=st.integers(3, 12))
def test_each_sampled_token_is_trained_in_one_trajectory(
    way: Callable[[Group], Any], num_tokens: int, second: int
) -> None:
    """Branches of a response, and of a branch, share its tokens, and rows of inputs, as context."""
    scores = np.arange(2, 6, dtype=np.float32)
    policy = Segment.sampled(4, 2, range(2, 6), [-1.0] * 4, {ROUTES: rows_of(2, 4), SCORES: scores})
    answer = Segment.given("environment", [6, 7], {ROUTES: rows_of(6, 2)})
    last = Segment.sampled(5, 2, [8], [-1.0], {ROUTES: rows_of(8, 1), SCORES: scores[:1]})
    sample = Sample.of("7.1", PROMPT).extended([policy], None, {ROUTES: rows_of(1, 1)})
    whole = sample.trajectories[0].extended([answer, last])
    sample = sample.with_trajectory(0, whole)
    assert sample.with_trajectory(1, whole.branch(9)).num_sampled_tokens == sample.num_sampled_tokens == 5
    branch = whole.branch(num_tokens)
    assert branch.token_ids.tolist() == whole.token_ids.tolist()[:num_tokens]
    assert (branch.num_sampled_tokens, branch.turns) == (0, [])
    assert branch.num_shared_tokens == (0 if num_tokens == 2 else min(num_tokens, 6) if num_tokens < 9 else 9)
    assert branch.num_fed([ROUTES]) == num_tokens, "an engine need not send them again"
    assert not any(SCORES in segment.rows for segment in branch.segments)
    grown = branch.extended(
        [Segment.sampled(6, 3, [20, 21, 22], [-2.0] * 3, {ROUTES: rows_of(20, 3), SCORES: scores[:3]})]
    )
    sample = sample.with_trajectory(1, grown).with_trajectory(2, grown.branch(min(second, grown.num_tokens)))
    assert sample.num_sampled_tokens == 8
    assert sample.sampled_ids.tolist() == [2, 3, 4, 5, 8, 20, 21, 22]
    assert sample.versions.tolist() == [4] * 4 + [5] + [6] * 3
    group = GROUP.grown(sample)
    assert group_from_json(way(group), [ROUTES, SCORES]) == group
    own = Segment.given("prompt", [40, 41])  # the prompt of the policy's own helper
    group = GROUP.grown(sample.with_trajectory(3, replace(whole, segments=(own, *branch.segments[1:]))))
    assert group_from_json(way(group), [ROUTES, SCORES]) == group
    with pytest.raises(AssertionError):
        whole.branch(whole.num_tokens + 1)


@pytest.mark.parametrize(
    ("stream", "values", "said"),
    [
        (ROUTES, np.zeros((2, 3, 2), np.int16), "rows are int16, not uint8"),
        (ROUTES, np.zeros((3, 3, 2), np.uint8), r"rows of shape \[3, 3, 2\], not \[2, 3, 2\]"),
        (ROUTES, "AAAA", "3 bytes are not rows of 6"),
        (ROUTES, [1, 2], r"rows of shape \[3, 2\] must be base64"),
        (CHOICES, np.array([[3, 7], [6, 6]], np.uint8), "row 1 has 6 twice"),
        (CHOICES, np.array([[3, 9], [8, 6]], np.uint8), "row 0 has 9, not <= 8"),
        (CHOICES, np.array([[3, 7], [255, 255]], np.uint8), "row 1 has 255, not <= 8"),
        (SCORES, [1.0], r"rows of shape \[1\], not \[2\]"),
        (SCORES, [1.0, True], "row 1 is not a number"),
        (SCORES, None, "must be a list of numbers"),
    ],
)
def test_rows_that_do_not_fit_are_named(stream: TokenStream, values: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"stream {stream.name}: {said}"):
        stream.checked(values, 2)


@given(st.binary(min_size=6, max_size=60).map(lambda data: data[: len(data) // 6 * 6]), st.data())
def test_rows_in_base64_are_read_as_python_reads_them(data: bytes, draw: st.DataObject) -> None:
    text = base64.b64encode(data).decode()
    if draw.draw(st.booleans()):
        place = draw.draw(st.integers(0, len(text) - 1))
        text = text[:place] + draw.draw(st.sampled_from("Az0+/=- \n\0_é")) + text[place + 1 :]
    num_rows = len(data) // ROUTES.row_bytes
    try:
        expected = base64.b64decode(text, validate=True)
    except ValueError:
        with pytest.raises(ValueError, match="stream routes: rows of shape"):
            ROUTES.checked(text, num_rows)
        return
    if len(expected) == len(data):
        assert ROUTES.checked(text, num_rows).tobytes() == expected
        assert encoded_rows(ROUTES.checked(text, num_rows)) == base64.b64encode(expected).decode()
    else:
        with pytest.raises(ValueError, match="stream routes: "):
            ROUTES.checked(text, num_rows)


@given(
    st.sampled_from([1, 2, 8, 16, 17]).flatmap(
        lambda num: st.lists(st.lists(st.integers(0, 24), min_size=num, max_size=num), max_size=6)
    )
)
def test_a_row_that_repeats_a_value_is_refused(rows: list[list[int]]) -> None:
    stream = TokenStream("choices", "int16", (len(rows[0]) if rows else 2,), distinct=True)
    values = np.array(rows, np.int16).reshape(-1, *stream.shape)
    repeats = next((number for number, row in enumerate(rows) if len(set(row)) < len(row)), None)
    if repeats is None:
        assert stream.checked(values, len(rows)) is values
        return
    (first,) = [x for x in sorted(rows[repeats]) if rows[repeats].count(x) > 1][:1]
    with pytest.raises(ValueError, match=f"stream choices: row {repeats} has {first} twice"):
        stream.checked(values, len(rows))


def test_missing_rows_are_valid_where_rows_may_be_filled() -> None:
    rows = np.array([[255, 255], [3, 7]], np.uint8)
    assert CHOICES.checked(rows.copy(), 2, filled=True).tolist() == rows.tolist()
    rows[0, 0] = 4
    with pytest.raises(ValueError, match="row 0 has 255, not <= 8"):
        CHOICES.checked(rows, 2, filled=True)


def test_core_values_have_attributes_of_their_stream() -> None:
    for stream in CORE_STREAMS:
        assert f"{stream.name}_T" in Batch.__dataclass_fields__
        assert stream.on != "sampled" or f"{stream.name}_R" in MicroBatch.__dataclass_fields__


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.float64, torch.bfloat16]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Draw a tensor of any bits: of no, one or several dimensions, empty or not, in order of memory or transposed."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.lists(st.integers(0, 5), max_size=3))
    raw = torch.from_numpy(np.random.default_rng(draw(st.integers(0, 999))).integers(0, 256, (1, 8 * 125), np.uint8))
    values = (raw % 2).bool() if dtype == torch.bool else raw.view(dtype)
    tensor = values[0, : int(np.prod(shape))].view(shape)
    return tensor.transpose(0, 1) if len(shape) > 1 and draw(st.booleans()) else tensor


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


@given(st.lists(tensors(), min_size=1, max_size=14))
def test_what_is_copied_together_keeps_every_bit(given_tensors: list[torch.Tensor]) -> None:
    before = [bits(x) for x in given_tensors]
    copies = copied_together(given_tensors, DEVICE)
    assert len({x.untyped_storage().data_ptr() for x in copies if x.numel()}) <= 1, "one piece"
    for copy, x, old in zip(copies, given_tensors, before, strict=True):
        assert (copy.device.type, copy.dtype, copy.shape) == (DEVICE.type, x.dtype, x.shape)
        assert bits(copy) == bits(x) == old
        assert copy.storage_offset() * copy.itemsize % 256 == 0
        copy.zero_()  # a view of another would now be changed, too


def test_a_micro_batch_goes_to_a_device_in_one_copy_and_stays_as_it_is_on_a_cpu() -> None:
    values = {f.name: torch.zeros(3) for f in fields(MicroBatch) if f.name != "extra"} | {"is_token_T": None}
    batch = MicroBatch(**values, extra={ROUTES: torch.zeros(3, 3, 2), SCORES: torch.zeros(3)})  # type: ignore[arg-type]
    same = batch.to(torch.device("cpu"))
    assert all(getattr(same, name) is value for name, value in values.items())
    assert all(same.extra[stream] is rows for stream, rows in batch.extra.items())
    copies: list[torch.Size] = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._to_copy.default:
                copies.append(args[0].shape)
            return func(*args, **(kwargs or {}))

    with Counting():
        moved = batch.to(torch.device("meta"))
    assert len(copies) == 1
    assert moved.is_token_T is None
    assert moved.extra[ROUTES].shape == (3, 3, 2)
    assert list(moved.extra) == [ROUTES, SCORES]
