"""The embedded engine with linear attention: whatever happens to a response, its tokens alone make its state."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from bapo_megatron.engines.base import TokenScores
from bapo_megatron.engines.embedded.engine import BatchingEngine, Sequence
from bapo_megatron.engines.embedded.model import Model
from bapo_megatron.engines.embedded.protocol import SamplingParams
from tests.distributed import HANG_S
from tests.hybrid_model import save_hybrid

PROMPTS = ([5, 9, 33, 70, 12, 8], [40, 3], [7, 22, 61, 18, 90, 44, 2, 31, 56], [64] * 70)
TOLERANCE = 4e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hybrids")


@pytest.fixture(scope="module")
def policies(folder: Path) -> dict[str, PreTrainedModel]:
    """Return three versions of the weights by number."""
    return {version: save_hybrid(folder / version, int(version), 256) for version in "123"}


@pytest.fixture
def engine(policies: dict[str, PreTrainedModel], folder: Path) -> Iterator[BatchingEngine]:
    """Return an engine with the first weights."""
    model = Model.from_pretrained(folder / "1", max_len=256)
    engine = BatchingEngine(model, max_running=6, max_context=256, version="1")
    yield engine
    engine.call(sys.exit)
    engine.ended.result(HANG_S)


def submitted(
    engine: BatchingEngine,
    ids: list[list[int]],
    num_tokens: int,
    act: Callable[[int], object] | None = None,
    temperature: float = 1.0,
) -> list[Sequence]:
    """Submit a request for each of the token lists; `act` sees how many tokens the first one has, after each step."""
    sequences = []
    for i, tokens in enumerate(ids):
        params = SamplingParams(max_new_tokens=num_tokens, sampling_seed=i, ignore_eos=True, temperature=temperature)
        sequences.append(engine.new_sequence(str(i), tokens, params))
    if act is not None:
        sequences[0].on_token = lambda: act(len(sequences[0].output_ids))
    engine.submit(sequences)
    return sequences


def push(engine: BatchingEngine, policies: dict[str, PreTrainedModel], version: str) -> None:
    """Install weights on the engine's thread."""
    engine.set_weights(policies[version].state_dict().items())
    engine.publish(version)


@torch.no_grad()
def assert_logprobs(policies: dict[str, PreTrainedModel], sequence: Sequence) -> None:
    """Compare each token's log-prob with transformers, given the weights of its version."""
    ids, first = torch.tensor(sequence.token_ids), len(sequence.prompt_ids)
    for span in sequence.spans:
        logits_TV = policies[span["version"]](ids[None], use_cache=False).logits[0, first - 1 : -1]
        expected = logits_TV.log_softmax(-1).gather(1, ids[first:, None])[:, 0]
        part = slice(span["start"], span["end"])
        torch.testing.assert_close(torch.tensor(sequence.logprobs)[part], expected[part], atol=TOLERANCE, rtol=0)


def test_partial_rollouts_over_three_versions(
    engine: BatchingEngine, policies: dict[str, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces end by their length, an abort or a retraction; more responses than rows, so that they wait and move."""
    computed: list[int] = []
    for name in ("prefill", "append"):
        original = getattr(engine.model, name)
        monkeypatch.setattr(
            engine.model, name, lambda ids, lens, *a, f=original: computed.append(int(lens.sum())) or f(ids, lens, *a)
        )

    def finished(sequences: list[Sequence]) -> list[list[int]]:
        for sequence in sequences:
            assert_logprobs(policies, sequence.done.result(HANG_S))
        return [s.token_ids for s in sequences]

    ids = finished(submitted(engine, [prompt for prompt in PROMPTS for _ in range(2)], 9))
    engine.call(lambda: push(engine, policies, "2")).result(HANG_S)
    cut = submitted(engine, ids, 9, lambda n: n == 4 and engine.call(lambda: engine.abort(None)))
    ids = finished(cut)
    assert sorted(len(s.output_ids) for s in cut) == [0, 0, 4, 4, 4, 4, 4, 4], "six rows, two in the queue"
    assert not any(s.num_cached for s in cut), "states of other weights are not continued"
    computed.clear()
    rest = submitted(engine, ids, 3)
    ids = finished(rest)
    begun = [s.num_cached for s in rest if s.num_cached]
    assert begun == [len(s.prompt_ids) - 1 for s in rest if s.num_cached]
    assert 0 < len(begun) <= 6
    assert sum(computed) == sum(len(s.prompt_ids) for s in rest if not s.num_cached), "the others' states were kept"

    def retract() -> None:
        engine.pause("retract")
        push(engine, policies, "3")
        engine.resume()

    last = submitted(engine, ids, 8, lambda n: n == 5 and engine.call(retract))
    finished(last)
    assert {tuple(span["version"] for span in s.spans) for s in last} == {("2", "3"), ("3",)}
    assert max(s.num_retractions for s in last) == 1


@pytest.mark.parametrize(("temperature", "num_different"), [(1.0, 5), (0.0, 1)])
def test_equal_tokens_are_computed_once_and_rows_have_their_own_states(
    temperature: float,
    num_different: int,
    engine: BatchingEngine,
    policies: dict[str, PreTrainedModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Samples of one prompt, and answers of them that are continued with given tokens."""
    shapes: list[tuple[int, ...]] = []
    for name in ("prefill", "append"):
        original = getattr(engine.model, name)
        monkeypatch.setattr(
            engine.model, name, lambda ids, *a, f=original: shapes.append(tuple(ids.shape)) or f(ids, *a)
        )
    sequences = submitted(engine, [PROMPTS[2]] * 5, 12, temperature=temperature)
    for sequence in sequences:
        assert_logprobs(policies, sequence.done.result(HANG_S))
    assert len({tuple(s.output_ids) for s in sequences}) == num_different
    continued = submitted(engine, [[*s.token_ids, 11, 47] for s in sequences], 6, temperature=temperature)
    for sequence in continued:
        assert_logprobs(policies, sequence.done.result(HANG_S))
        assert sequence.num_cached == len(sequence.prompt_ids) - 3, "the last sampled token, and the given ones"
    assert shapes == [(1, len(PROMPTS[2])), (num_different, 3)]


def test_weights_replaced_in_place_continue_from_the_states_of_the_earlier_ones(
    engine: BatchingEngine, policies: dict[str, PreTrainedModel]
) -> None:
    """As transformers does with the cache of one model and the weights of another."""

    def replace() -> None:
        engine.pause("in_place")
        push(engine, policies, "2")
        engine.resume()

    (sequence,) = submitted(engine, [PROMPTS[0]], 12, lambda n: n == 5 and engine.call(replace))
    sequence.done.result(HANG_S)
    assert sequence.spans == [{"version": "1", "start": 0, "end": 5}, {"version": "2", "start": 5, "end": 12}]
    ids = torch.tensor([sequence.token_ids])
    first_new = len(PROMPTS[0]) + 4  # the last token of version 1 had not been fed
    with torch.no_grad():
        before = policies["1"](ids[:, :first_new], use_cache=True)
        after = [
            policies["2"](ids[:, i : i + 1], past_key_values=before.past_key_values, use_cache=True).logits
            for i in range(first_new, ids.shape[1] - 1)
        ]
    logprobs_TV = torch.cat([before.logits, *after], 1)[0].log_softmax(-1)
    expected = logprobs_TV.gather(1, ids[0, 1:, None])[len(PROMPTS[0]) - 1 :, 0]
    torch.testing.assert_close(torch.tensor(sequence.logprobs), expected, atol=TOLERANCE, rtol=0)
    (again,) = submitted(engine, [sequence.token_ids], 2)
    assert again.done.result(HANG_S).num_cached == 0
    assert_logprobs(policies, again)


def test_broken_weights_leave_nothing_behind(engine: BatchingEngine, policies: dict[str, PreTrainedModel]) -> None:
    """Attention multiplies what later tokens of a row left by 0, but nan stays nan."""

    def break_weights() -> None:
        name = "model.layers.0.mlp.down_proj.weight"
        engine.set_weights([(name, torch.full_like(engine.model.named_weights[name], torch.nan))])
        engine.publish("broken")

    engine.call(break_weights).result(HANG_S)
    for sequence in submitted(engine, [[64 + i] * 90 for i in range(6)], 5):
        with pytest.raises(FloatingPointError, match="the weights are broken"):
            sequence.done.result(HANG_S)
    engine.call(lambda: push(engine, policies, "2")).result(HANG_S)
    for sequence in submitted(engine, list(PROMPTS), 5):
        assert_logprobs(policies, sequence.done.result(HANG_S))


def test_scores_leave_states_alone(engine: BatchingEngine, policies: dict[str, PreTrainedModel]) -> None:
    scores: list[TokenScores | None] = []
    (sequence,) = submitted(engine, [PROMPTS[0]], 6, lambda _: scores.append(engine.score(PROMPTS[2], 1, 0)))
    assert_logprobs(policies, sequence.done.result(HANG_S))
    ids = torch.tensor(PROMPTS[2])
    with torch.no_grad():
        expected = policies["1"](ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    assert len(scores) == 6
    for found in scores:
        assert found is not None
        torch.testing.assert_close(torch.tensor(found.logprobs_N), expected, atol=TOLERANCE, rtol=0)
