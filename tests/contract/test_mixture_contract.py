"""What every rollout engine must do with a mixture of experts: its log-probs, its routes, and pushes by expert.

A row of routes is what the server chose when it read a token to sample or prefill the next one. Experts are compared as
sets: servers return them in different orders.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bapo_megatron.config.schema import SyncConfig
from bapo_megatron.engines.base import GenerateRequest, GenerateResult
from bapo_megatron.engines.wire import TensorSpec
from bapo_megatron.errors import CheckpointError, EngineError
from bapo_megatron.hf.facts import ModelFacts
from bapo_megatron.sync import verify
from bapo_megatron.sync.broadcast import BroadcastChannel
from bapo_megatron.tokens import TokenStream
from bapo_megatron.types import Sampled, Trajectory
from tests.distributed import HANG_S
from tests.hybrid_model import save_hybrid
from tests.mixture_model import save_mixture
from tests.rollout_servers import LAUNCHERS, Servers, sglang_servers, started

PROMPTS = ([5, 9, 33, 70, 12, 8], [40, 3], [7, 22, 61, 18, 90, 44, 2, 31, 56])
TOLERANCE = 1e-5
WITH_ROUTES = {
    "embedded": LAUNCHERS["embedded"],
    "sglang": sglang_servers(num_servers=1, tensor_parallel=1, enable_return_routed_experts=True),
}


FAMILIES = {"qwen3_moe": save_mixture, "qwen3_5_moe": partial(save_hybrid, published=True, experts=True)}
CASES = [
    pytest.param(case, id="-".join(case), marks=[] if case == ("qwen3_moe", "embedded") else [pytest.mark.slow])
    for case in product(FAMILIES, WITH_ROUTES)
]


@pytest.fixture(scope="module", params=CASES)
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    family, kind = request.param
    with started(kind, WITH_ROUTES[kind], FAMILIES[family], tmp_path_factory.mktemp(kind)) as servers:
        yield servers


@pytest.fixture
def routes(servers: Servers) -> TokenStream:
    folder = Path(servers.get("/model_info")["model_path"])
    assert ModelFacts.of(folder).returned_streams() == (), "no run asks for routes unless it needs them"
    (stream,) = ModelFacts.of(folder).returned_streams({"routes"})
    assert stream.name in servers.loop.run(servers.engine.capabilities()).streams
    return stream


@torch.no_grad()
def of_transformers(servers: Servers, model: str, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the log-prob of each token but the first, and the experts of each token, sorted: [T, layers, chosen]."""
    chosen: list[Tensor] = []
    layers = servers.models[model].model.layers
    hooks = [layer.mlp.gate.register_forward_hook(lambda *seen: chosen.append(seen[-1][-1])) for layer in layers]
    logits_TV = servers.models[model](torch.tensor([[*ids]])).logits[0]
    for hook in hooks:
        hook.remove()
    logprobs_T = logits_TV.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return logprobs_T, torch.stack(chosen, 1).sort(-1).values


def assert_equal(servers: Servers, model: str, request: GenerateRequest, result: GenerateResult) -> None:
    """Compare log-probs and routes of one request; all of its tokens are of one version."""
    ids = [*request.token_ids, *result.token_ids.tolist()]
    logprobs_T, chosen_TLK = of_transformers(servers, model, ids)
    num_new = len(result.token_ids)
    torch.testing.assert_close(torch.tensor(result.behaviour_logprobs), logprobs_T[-num_new:], atol=TOLERANCE, rtol=0)
    (rows,) = result.rows.values()
    assert torch.equal(torch.tensor(rows).long().sort(-1).values, chosen_TLK[request.num_fed - 1 : -1])


def asked(
    rid: str, routes: TokenStream, ids: Sequence[int] = PROMPTS[0], n: int = 24, seed: int = 0
) -> GenerateRequest:
    return GenerateRequest(rid, tuple(ids), n, 1.0, (), seed, streams=(routes,))


def test_samples_have_transformers_logprobs_and_routes(servers: Servers, routes: TokenStream) -> None:
    """Some samples share their prompt, which engines compute once."""
    requests = [asked(f"{i}", routes, PROMPTS[max(i - 2, 0)], seed=i) for i in range(5)]
    for request, result in zip(requests, servers.loop.run(servers.engine.generate_many(requests)), strict=True):
        assert_equal(servers, "a", request, result)
    alone = replace(requests[1], rid="alone")
    assert_equal(servers, "a", alone, servers.loop.run(servers.engine.generate(alone)))


def test_two_turns_over_pushes_have_the_routes_of_their_time(servers: Servers, routes: TokenStream) -> None:
    """Each piece has another weight version; between the turns, and at the end, tokens are given."""
    samples, model_of = servers.pieces_over_pushes(PROMPTS, "abab", turn_tokens=6, streams=(routes,))
    assert len(samples) == 6
    servers.check_pieces(samples, model_of, atol=TOLERANCE, rtol=0)
    assert all({origin.version for origin, _ in sample.sampled_segments} == {*model_of} for sample in samples)
    for (trajectory,) in (sample.trajectories for sample in samples):
        compare(servers, trajectory, routes, model_of)


def compare(servers: Servers, trajectory: Trajectory, routes: TokenStream, model_of: dict[int, str]) -> None:
    """Compare each row with the choice of the weights that sampled the first token after it."""
    ids = trajectory.token_ids.tolist()
    chosen = {model: of_transformers(servers, model, ids)[1] for model in "ab"}
    version, place = None, len(ids)
    num_different = 0
    for segment in reversed(trajectory.segments):
        place -= segment.num_tokens
        if isinstance(segment.origin, Sampled):
            version = segment.origin.version
        if version is None:
            assert routes not in segment.rows, "no reply has followed the last given tokens"
            continue
        first = max(place, 1)  # no token precedes the first one
        rows = torch.tensor(segment.rows[routes][first - place :]).long().sort(-1).values
        model = model_of[version]
        inputs = slice(first - 1, place + segment.num_tokens - 1)
        assert torch.equal(rows, chosen[model][inputs])
        num_different += int((rows != chosen["b" if model == "a" else "a"][inputs]).any(-1).sum())
    assert num_different > len(ids), "the two models must differ for this to mean much"


def test_an_aborted_response_has_its_routes_and_continues(servers: Servers, routes: TokenStream) -> None:
    run, engine = servers.loop.run, servers.engine
    request = asked("aborted", routes, n=servers.num_long)
    (pending,) = servers.held(lambda: [servers.loop.submit(engine.generate(request))])
    run(engine.abort())
    run(engine.resume())
    cut: GenerateResult = pending.result(HANG_S)
    assert cut.finish_reason == "abort"
    assert_equal(servers, "a", request, cut)
    ids = (*request.token_ids, *cut.token_ids.tolist())
    rest = replace(request, rid="continued", token_ids=ids, max_new_tokens=5, num_fed=len(ids))
    result = run(engine.generate(rest))
    assert_equal(servers, "a", rest, result)
    assert len(result.rows[routes]) == len(result.token_ids), "one row per new token"


def test_a_push_in_place_keeps_the_rows_of_earlier_tokens(servers: Servers, routes: TokenStream) -> None:
    request = asked("in-place", routes, n=servers.num_long)
    (pending,) = servers.held(lambda: [servers.loop.submit(servers.engine.generate(request))])
    servers.push_in_place("b")
    result: GenerateResult = pending.result(HANG_S)
    first_new = len(request.token_ids) + result.spans[1].start - 1  # the token that the new weights read first
    old = of_transformers(servers, "a", [*request.token_ids, *result.token_ids.tolist()])[1][:first_new]
    assert torch.equal(torch.tensor(result.rows[routes]).long().sort(-1).values[:first_new], old)


@pytest.mark.parametrize("knows_config", [True, False])
def test_fused_experts_are_refused_before_anything_is_sent(
    servers: Servers, knows_config: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang would skip them without an error. Its config.json may be on another machine."""

    def unreadable(folder: Path, own: object = None) -> None:
        raise CheckpointError(f"{folder} is elsewhere")

    if not knows_config:
        monkeypatch.setattr(verify.ModelFacts, "of", unreadable)
    prefix, held = servers.manifest("a")[0].name.removesuffix("embed_tokens.weight"), servers.models["a"].state_dict()
    fused = [TensorSpec.of(name.replace("model.", prefix, 1), tensor) for name, tensor in held.items()]
    for manifest, name in ((fused, r"layers\.0\.mlp\.experts\.(gate_up|down)_proj"), (servers.manifest("a"), "")):
        channel = BroadcastChannel(servers.pool, SyncConfig(timeout_s=HANG_S), servers.loop.submit)
        if name:
            with pytest.raises(EngineError, match=rf"{servers.url} serves another model: .*{name}"):
                channel.connect(manifest)
        else:
            channel.connect(manifest)
