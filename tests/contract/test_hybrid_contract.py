"""What every rollout engine must do with linear attention: a row's state is of all its tokens, and cannot be shortened.

A response is continued from its state if nothing has dropped it; otherwise all of its tokens are computed again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bapo_megatron.config.schema import SyncConfig
from bapo_megatron.engines.base import GenerateRequest, GenerateResult
from bapo_megatron.engines.wire import TensorSpec
from bapo_megatron.errors import EngineError
from bapo_megatron.sync.broadcast import BroadcastChannel
from tests.distributed import HANG_S
from tests.hybrid_model import save_hybrid
from tests.rollout_servers import LAUNCHERS, Servers, sglang_servers, started

PROMPTS = ([5, 9, 33, 70, 12, 8], [40, 3], [7, 22, 61, 18, 90, 44, 2, 31, 56])
TOLERANCE = 1e-5
ONE_SERVER = {"embedded": LAUNCHERS["embedded"], "sglang": sglang_servers(num_servers=1, tensor_parallel=1)}


@pytest.fixture(scope="module", params=[pytest.param("embedded"), pytest.param("sglang", marks=pytest.mark.slow)])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp(request.param)
    make_model = partial(save_hybrid, published=True)
    with started(request.param, ONE_SERVER[request.param], make_model, folder) as servers:
        yield servers


def assert_logprobs(servers: Servers, request: GenerateRequest, result: GenerateResult, models: str = "a") -> None:
    """Compare each span of new tokens with the model that sampled it."""
    assert len(result.spans) == len(models)
    for model, span in zip(models, result.spans, strict=True):
        expected = servers.logprobs_of(model, [*request.token_ids, *result.token_ids.tolist()])
        expected = expected[len(request.token_ids) - 1 :][span.start : span.end]
        found = torch.tensor(result.behaviour_logprobs[span.start : span.end])
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


def asked(rid: str, ids: Sequence[int] = PROMPTS[2], n: int = 24, seed: int = 0) -> GenerateRequest:
    return GenerateRequest(rid, tuple(ids), n, 1.0, (), seed)


def continued(request: GenerateRequest, result: GenerateResult, *given: int) -> GenerateRequest:
    return asked(f"{request.rid}+", (*request.token_ids, *result.token_ids.tolist(), *given), seed=request.seed)


def test_several_samples_of_one_prompt_have_states_of_their_own(servers: Servers) -> None:
    requests = [asked(f"{i}", PROMPTS[max(i - 2, 0)], seed=i) for i in range(5)]
    results = servers.loop.run(servers.engine.generate_many(requests))
    for request, result in zip(requests, results, strict=True):
        assert_logprobs(servers, request, result)
    assert len({(*result.token_ids.tolist(),) for result in results[:3]}) == 3
    again = asked("again", PROMPTS[0], seed=1)
    result = servers.loop.run(servers.engine.generate(again))
    assert_logprobs(servers, again, result)
    assert result.num_cached_tokens == 0, "the prompt's state ends with its last token, which must be computed"


def test_an_aborted_response_is_continued_from_its_state(servers: Servers) -> None:
    run, engine = servers.loop.run, servers.engine
    request = asked("aborted", n=servers.num_long)
    (pending,) = servers.held(lambda: [servers.loop.submit(engine.generate(request))])
    run(engine.abort())
    run(engine.resume())
    cut: GenerateResult = pending.result(HANG_S)
    assert cut.finish_reason == "abort"
    assert_logprobs(servers, request, cut)
    rest = continued(request, cut)
    result = run(engine.generate(rest))
    assert result.num_cached_tokens == len(rest.token_ids) - 1
    assert_logprobs(servers, rest, result)


def test_a_turn_computes_what_is_new_and_a_shorter_prefix_everything(servers: Servers) -> None:
    request = asked("turn")
    result = servers.loop.run(servers.engine.generate(request))
    following = continued(request, result, 11, 47, 3)
    shorter = replace(following, rid="shorter", token_ids=following.token_ids[:20])
    for each, num_cached in ((following, len(following.token_ids) - 4), (shorter, len(request.token_ids))):
        found = servers.loop.run(servers.engine.generate(each))
        assert_logprobs(servers, each, found)
        if each is shorter and servers.kind == "embedded":
            num_cached = 0  # SGLang also keeps the state at the end of a prompt
        assert found.num_cached_tokens == num_cached


def test_a_retracted_response_is_computed_again(servers: Servers) -> None:
    request = asked("retracted", n=servers.num_long)
    (pending,) = servers.held(lambda: [servers.loop.submit(servers.engine.generate(request))])
    assert servers.post("/pause_generation", {"mode": "retract"})[0] == 200
    assert servers.post("/flush_cache")[0] == 200
    assert servers.post("/continue_generation", {})[0] == 200
    assert_logprobs(servers, request, pending.result(HANG_S))


def test_a_push_drops_states_of_running_and_ended_responses(servers: Servers) -> None:
    ended = asked("ended", PROMPTS[0])
    before = servers.loop.run(servers.engine.generate(ended))
    request = asked("running", n=servers.num_long)
    (pending,) = servers.held(lambda: [servers.loop.submit(servers.engine.generate(request))])
    servers.push("b")
    assert_logprobs(servers, request, pending.result(HANG_S), "ab")
    rest = continued(ended, before)
    result = servers.loop.run(servers.engine.generate(rest))
    assert result.num_cached_tokens == 0
    assert_logprobs(servers, rest, result, "b")


def test_pieces_over_pushes_have_the_log_probs_of_their_weights(servers: Servers) -> None:
    samples, model_of = servers.pieces_over_pushes(PROMPTS, "aba", turn_tokens=12)
    assert len(samples) == 6
    servers.check_pieces(samples, model_of, atol=TOLERANCE, rtol=0)


def test_scores_are_log_probs_of_one_pass(servers: Servers) -> None:
    """Also where the state of a prefix is kept."""
    request = asked("scored")
    result = servers.loop.run(servers.engine.generate(request))
    ids = [*request.token_ids, *result.token_ids.tolist(), 4, 6]
    scores = servers.loop.run(servers.engine.score(ids, 1, 0))
    torch.testing.assert_close(torch.tensor(scores.logprobs_N), servers.logprobs_of("a", ids), atol=TOLERANCE, rtol=0)


def test_names_of_no_weight_are_refused_before_anything_is_sent(servers: Servers) -> None:
    """SGLang would pass over them with a warning."""
    right = servers.manifest("a")
    wrong = [replace(spec, name=spec.name.replace("in_proj_z", "in_proj_gate")) for spec in right]
    more = TensorSpec("model.language_model.layers.0.linear_attn.D", "float32", (4,))
    for manifest in (wrong, [*right, more], right):
        channel = BroadcastChannel(servers.pool, SyncConfig(timeout_s=HANG_S), servers.loop.submit)
        if manifest is right:
            channel.connect(manifest)
        else:
            with pytest.raises(EngineError, match=rf"{servers.url} serves another model: .*linear_attn\.(in_proj|D)"):
                channel.connect(manifest)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
IMAGES = {"partial_rotary_factor": 0.5, "mrope_section": [2, 2, 2], "mrope_interleaved": True}
MSCALE = {"mscale": 1.0, "mscale_all_dim": 0.7}  # SGLang's class for images takes none


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "published", "rope"),
    [("embedded", True, YARN), ("sglang", True, YARN), ("sglang", False, YARN | IMAGES | MSCALE)],
)
def test_longer_contexts_by_yarn_turn_a_part_of_each_head(
    kind: str, published: bool, rope: dict[str, Any], tmp_path: Path
) -> None:
    make_model = partial(save_hybrid, published=published, rope=rope)
    with started(kind, ONE_SERVER[kind], make_model, tmp_path) as servers:
        request = asked("yarn", n=40)  # beyond the original context
        result = servers.loop.run(servers.engine.generate(request))
        assert_logprobs(servers, request, result)
        ids = [*request.token_ids, *result.token_ids.tolist()]
        with_yarn = servers.logprobs_of("a", ids)
        servers.models["a"] = save_hybrid(tmp_path / "plain", 0, servers.max_context)
        assert (servers.logprobs_of("a", ids) - with_yarn).abs().max() > 100 * TOLERANCE
