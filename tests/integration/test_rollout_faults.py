"""Faults of every kind between scheduler and real engine servers: nothing is lost, nothing hangs, nothing is silent.

Sampling depends on seed, tokens and weights only, so however a run is disturbed it must end with the same responses.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file
from transformers import AutoTokenizer

from bapo_megatron.assets import demo_model_path
from bapo_megatron.config.load import load_config
from bapo_megatron.config.schema import SyncConfig
from bapo_megatron.errors import EngineError
from bapo_megatron.prompts.stream import PromptStream
from bapo_megatron.rollout.base import GenerateRequest, GenerateResult, PauseMode
from bapo_megatron.rollout.client import HttpEngine
from bapo_megatron.rollout.manager import LoopThread
from bapo_megatron.rollout.pool import EnginePool
from bapo_megatron.rollout.scheduler import Scheduler
from bapo_megatron.sync.broadcast import BroadcastChannel
from bapo_megatron.sync.buckets import TensorSpec, plan_buckets
from bapo_megatron.types import Trajectory
from tests.integration.engines import EngineProcess, start_engines

STEPS, PROMPTS, SAMPLES, IN_FLIGHT = 4, 4, 4, 6
SETTINGS: dict[str, Any] = {
    "prompts_per_step": PROMPTS,
    "samples_per_prompt": SAMPLES,
    "groups_in_flight": IN_FLIGHT,
    "tokens_per_round": 12,
}
Responses = dict[str, tuple[tuple[int, ...], tuple[float, ...]]]


class CountingEngine(HttpEngine):
    """Counts the replies that were aborted."""

    num_aborted = 0

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result = await super().generate(request)
        self.num_aborted += result.finish_reason == "abort"
        return result


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineProcess]]:
    started = start_engines(tmp_path_factory.mktemp("engines"), 2)
    yield started
    for server in started:
        server.end()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(demo_model_path())


Make = Callable[..., Scheduler]


@pytest.fixture(scope="module")
def make(tokenizer: Any) -> Make:
    """Builds a scheduler with the demo's prompts, always from the first one on."""

    def build(engines: list[HttpEngine], **settings: Any) -> Scheduler:
        config = load_config(["demo"], [])
        return Scheduler(
            config.rollout.model_copy(update=SETTINGS | settings),
            engines=engines,
            prompts=PromptStream(config, tokenizer),
            score=lambda trajectories: [float(t.num_response_tokens) for t in trajectories],
            stop_token_ids=(tokenizer.eos_token_id,),
            seed=7,
        )

    return build


def responses(trajectories: Any) -> Responses:
    return {t.sample_id: (t.response_ids, t.behaviour_logprobs) for t in trajectories}


def assert_prefix(mine: Responses, whole: Responses) -> None:
    """Same tokens, same log-probs, as far as each response got."""
    for sample_id, (token_ids, logprobs) in mine.items():
        assert token_ids == whole[sample_id][0][: len(token_ids)], sample_id
        assert logprobs == pytest.approx(whole[sample_id][1][: len(token_ids)], abs=1e-4), sample_id


def assert_balanced(scheduler: Scheduler, trained: list[Trajectory], whole: Responses) -> None:
    """The books agree with what is really here, and every finished response is the undisturbed one, to its end."""
    scheduler.ledger.check(scheduler.buffered())
    assert scheduler.ledger.counts()["running"] == 0
    buffered = list(scheduler.buffered())
    num_tokens = sum(t.num_response_tokens for t in (*trained, *buffered))
    assert scheduler.ledger.num_tokens["generated"] == num_tokens
    assert_prefix(responses([*trained, *buffered]), whole)
    for t in (t for t in (*trained, *buffered) if t.finish_reason):
        assert t.num_response_tokens == len(whole[t.sample_id][0]), t.sample_id


async def close(engines: list[HttpEngine]) -> None:
    for engine in engines:
        await engine.close()


@pytest.fixture(scope="module")
def undisturbed(servers: list[EngineProcess], make: Make) -> Responses:
    """Every response that the tests can ask for, each sampled in one piece."""

    async def run() -> Responses:
        engines = [HttpEngine(server.url, request_timeout_s=60) for server in servers]
        count = STEPS * PROMPTS + IN_FLIGHT
        scheduler = make(engines, prompts_per_step=count, groups_in_flight=count, tokens_per_round=None)
        groups, stats = await scheduler.take(0, 0)
        await close(engines)
        assert (stats.num_rounds, stats.num_retries) == (1, 0)
        return responses(t for g in groups for t in g.trajectories)

    whole = asyncio.run(run())
    assert len({len(token_ids) for token_ids, _ in whole.values()}) > 5, "lengths vary, or resuming is not tested"
    return whole


@pytest.mark.parametrize("seed", range(3))
def test_aborts_and_pauses_at_random_moments_lose_no_token(
    servers: list[EngineProcess], make: Make, undisturbed: Responses, seed: int
) -> None:
    chaos = random.Random(seed)
    step = 0

    async def disturb(engines: list[CountingEngine], scheduler: Scheduler) -> None:
        modes: list[PauseMode] = ["retract", "in_place"]
        while True:
            await asyncio.sleep(chaos.uniform(0.0, 0.03))
            engine = chaos.choice(engines)
            match chaos.choice(("abort one", "abort all", "pause", "pause and abort")):
                case "abort one":
                    running = [t.sample_id for t in scheduler.buffered() if t.finish_reason is None]
                    if running:
                        await engine.abort(f"{chaos.choice(running)}-s{step}r{chaos.randrange(3)}a0")
                case "abort all":
                    await engine.abort()
                case what:
                    await engine.pause(chaos.choice(modes))
                    try:
                        await asyncio.sleep(chaos.uniform(0.0, 0.02))
                        if what == "pause and abort":
                            await engine.abort()
                    finally:
                        await engine.resume()

    async def run() -> tuple[list[Trajectory], int]:
        nonlocal step
        engines = [CountingEngine(server.url, request_timeout_s=20) for server in servers]
        scheduler = make(engines)
        trained = []
        disturbing = asyncio.create_task(disturb(engines, scheduler))
        for step in range(STEPS):
            groups, stats = await asyncio.wait_for(scheduler.take(step, 0), 30)
            assert len(groups) == PROMPTS
            assert stats.num_retries == 0
            trained += [t for g in groups for t in g.trajectories]
            assert_balanced(scheduler, trained, undisturbed)
        assert not disturbing.done(), disturbing.exception()
        disturbing.cancel()
        await asyncio.gather(disturbing, return_exceptions=True)
        await close(engines)  # type: ignore[arg-type]
        return trained, sum(e.num_aborted for e in engines)

    trained, num_aborted = asyncio.run(run())
    assert num_aborted > 0
    assert len(trained) == len({t.sample_id for t in trained}) == STEPS * PROMPTS * SAMPLES
    assert sum(t.num_resumed_tokens for t in trained) > 0
    assert all(t.reward == t.num_response_tokens for t in trained)


def test_a_request_that_is_aborted_before_its_first_token_comes_back_empty(servers: list[EngineProcess]) -> None:
    async def run() -> GenerateResult:
        engine = HttpEngine(servers[0].url, request_timeout_s=10)
        await engine.pause("in_place")
        request = GenerateRequest("early", (3, 4), 4, 1.0, (1,), 0)
        asking = asyncio.create_task(engine.generate(request))
        try:
            while (await engine.server_info())["num_waiting_reqs"] == 0:
                await asyncio.sleep(0.01)
            await engine.abort("early")
            return await asyncio.wait_for(asking, 10)
        finally:
            await engine.resume()
            await engine.close()

    result = asyncio.run(run())
    assert (result.token_ids, result.spans, result.finish_reason) == ((), (), "abort")


FAULTS = {  # what the proxy does -> what the error must say
    "status 500": "HTTP 500",
    "garbage": "no output_ids",
    "no log-probs": "no output_token_logprobs",
    "wrong length": r"\d+ log-probs for \d+ tokens",
    "nan": "log-prob nan at output token 0",
    "bad count": "cached_tokens None is not a count",
    "closed": "ServerDisconnectedError",
    "silence": "no answer within 2 s",
}


class FaultyProxy:
    """Stands before an engine; `fault(rid)` says what to do to a /generate reply."""

    def __init__(self, target: str, fault: Callable[[str], str | None]) -> None:
        self.fault = fault
        self.num_faults = 0
        self.url = ""
        self._target = target

    async def __aenter__(self) -> FaultyProxy:
        app = web.Application()
        app.add_routes([web.route("*", "/{path:.*}", self._forward)])
        self._session = aiohttp.ClientSession()
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()
        await self._runner.cleanup()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        async with self._session.request(request.method, self._target + request.path, data=raw) as response:
            reply = await response.read()
            status = response.status
        fault = self.fault(json.loads(raw)["rid"]) if request.path == "/generate" else None
        if fault is None:
            return web.Response(body=reply, status=status)
        self.num_faults += 1
        meta = (body := json.loads(reply))["meta_info"]
        match fault:
            case "status 500":
                return web.Response(text="out of memory", status=500)
            case "garbage":
                return web.Response(body=b'{"output_ids": [3, \xff')
            case "no log-probs":
                del meta["output_token_logprobs"]
            case "wrong length":
                meta["output_token_logprobs"].pop()
            case "nan":
                meta["output_token_logprobs"][0][0] = float("nan")
            case "bad count":
                meta["cached_tokens"] = None
            case "closed":
                assert request.transport is not None
                request.transport.close()
            case "silence":
                await asyncio.sleep(60)
        return web.json_response(body)


def test_random_faults_of_every_kind_are_repeated_and_change_nothing(
    servers: list[EngineProcess], make: Make, undisturbed: Responses
) -> None:
    chaos = random.Random(0)
    quick = [fault for fault in FAULTS if fault != "silence"]
    seen = set()

    def fault(rid: str) -> str | None:
        if rid.endswith("a2") or chaos.random() > 0.4:  # the last attempt is answered
            return None
        seen.add(kind := chaos.choice(quick))
        return kind

    async def run() -> None:
        async with FaultyProxy(servers[0].url, fault) as proxy:
            engines = [HttpEngine(url, request_timeout_s=20) for url in (proxy.url, servers[1].url)]
            scheduler = make(engines, max_retries=2)
            trained, num_retries = [], 0
            for step in range(STEPS):
                groups, stats = await asyncio.wait_for(scheduler.take(step, 0), 30)
                trained += [t for g in groups for t in g.trajectories]
                num_retries += stats.num_retries
                assert len(stats.errors) == stats.num_retries
                assert all(proxy.url in error and "request " in error for error in stats.errors)
                assert_balanced(scheduler, trained, undisturbed)
            assert num_retries == proxy.num_faults
            assert seen == set(quick)
            await close(engines)

    asyncio.run(run())


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_that_stays_is_loud_names_the_request_and_loses_nothing(
    servers: list[EngineProcess], make: Make, undisturbed: Responses, kind: str
) -> None:
    async def run() -> None:
        async with FaultyProxy(servers[0].url, lambda rid: kind if rid.startswith("2.1-") else None) as proxy:
            engines = [HttpEngine(url, request_timeout_s=2) for url in (proxy.url, servers[1].url)]
            scheduler = make(engines, max_retries=1)
            with pytest.raises(EngineError, match=FAULTS[kind]) as raised:
                await asyncio.wait_for(scheduler.take(0, 0), 15)
            message = str(raised.value)
            assert proxy.url in message
            assert "request 2.1-s0r0" in message
            assert "gave up after 2 attempts" in message
            assert_balanced(scheduler, [], undisturbed)
            assert scheduler.ledger.num_tokens["generated"] > 0  # the others' tokens are kept

            proxy.fault = lambda rid: None
            groups, _ = await asyncio.wait_for(scheduler.take(0, 0), 15)
            assert_balanced(scheduler, [t for g in groups for t in g.trajectories], undisturbed)
            await close(engines)

    asyncio.run(run())


@pytest.mark.parametrize("end", [signal.SIGSTOP, signal.SIGKILL], ids=["hangs", "dies"])
def test_an_engine_that_ends_in_the_middle_of_a_round_is_an_error_and_nothing_is_lost(
    servers: list[EngineProcess], make: Make, undisturbed: Responses, tmp_path: Path, end: signal.Signals
) -> None:
    doomed = servers[1] if end == signal.SIGSTOP else start_engines(tmp_path, 1)[0]

    async def run() -> None:
        engines = [HttpEngine(url, request_timeout_s=2) for url in (servers[0].url, doomed.url)]
        scheduler = make(engines, max_retries=1)
        groups, _ = await scheduler.take(0, 0)
        trained = [t for g in groups for t in g.trajectories]
        await engines[1].pause("in_place")
        taking = asyncio.create_task(scheduler.take(1, 0))
        while (await engines[1].server_info())["num_waiting_reqs"] == 0:
            await asyncio.sleep(0.01)
        doomed.process.send_signal(end)
        with pytest.raises(EngineError, match=f"{doomed.url}/generate, request") as raised:
            await asyncio.wait_for(taking, 10)
        assert "gave up after 2 attempts" in str(raised.value)
        assert_balanced(scheduler, trained, undisturbed)
        if end == signal.SIGSTOP:
            doomed.process.send_signal(signal.SIGCONT)
            await engines[1].resume()
            groups, _ = await scheduler.take(1, 0)
            trained += [t for g in groups for t in g.trajectories]
            assert_balanced(scheduler, trained, undisturbed)
        await close(engines)

    try:
        asyncio.run(run())
    finally:
        doomed.process.send_signal(signal.SIGCONT)
        if doomed is not servers[1]:
            doomed.end()


def test_giving_up_on_a_round_keeps_what_has_returned(
    servers: list[EngineProcess], make: Make, undisturbed: Responses
) -> None:
    """A deadline of the caller cancels `take` while one engine holds its requests back."""

    async def run() -> None:
        engines = [HttpEngine(server.url, request_timeout_s=20) for server in servers]
        scheduler = make(engines)
        await engines[1].pause("in_place")
        try:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(scheduler.take(0, 0), 2)
        finally:
            await engines[1].resume()
        assert_balanced(scheduler, [], undisturbed)
        assert scheduler.ledger.num_tokens["generated"] > 0
        groups, _ = await asyncio.wait_for(scheduler.take(1, 0), 15)
        assert_balanced(scheduler, [t for g in groups for t in g.trajectories], undisturbed)
        await close(engines)

    asyncio.run(run())


def test_a_judge_that_fails_loses_no_sample(servers: list[EngineProcess], make: Make, undisturbed: Responses) -> None:
    async def run() -> None:
        engines = [HttpEngine(server.url, request_timeout_s=20) for server in servers]
        scheduler = make(engines)
        judge = scheduler._score

        def broken(trajectories: Any) -> list[float]:
            raise RuntimeError("the judge is ill")

        scheduler._score = broken
        with pytest.raises(RuntimeError, match="ill"):
            await scheduler.take(0, 0)
        assert_balanced(scheduler, [], undisturbed)
        scheduler._score = judge
        groups, _ = await asyncio.wait_for(scheduler.take(0, 0), 15)
        assert_balanced(scheduler, [t for g in groups for t in g.trajectories], undisturbed)
        await close(engines)

    asyncio.run(run())


def test_a_refused_weight_push_is_one_clear_error_and_nothing_is_sampled_until_a_whole_one(
    make: Make, undisturbed: Responses, servers: list[EngineProcess], tmp_path: Path
) -> None:
    target = start_engines(tmp_path, 1)[0]
    loop = LoopThread()
    try:
        engine = HttpEngine(target.url, request_timeout_s=20)
        weights = load_file(next(demo_model_path().glob("*.safetensors")))
        name = sorted(weights)[len(weights) // 2]
        config = SyncConfig(bucket_mib=1.0, timeout_s=10.0)
        manifest = [TensorSpec.of(n, t) for n, t in weights.items()]
        channel = BroadcastChannel(EnginePool([engine]), config, loop.submit)
        channel.connect(manifest)
        wrong = {n: torch.cat([t, t]) if n == name else t for n, t in weights.items()}
        wrong_manifest = [TensorSpec.of(n, t) for n, t in wrong.items()]
        channel._plan = plan_buckets(wrong_manifest, 2**20)  # past the handshake, which would not let it through
        channel._session.manifest = tuple(wrong_manifest)
        began_s = time.monotonic()
        with pytest.raises(EngineError, match="update_weights_from_distributed") as raised:
            channel.push(iter(wrong.items()), 1)
        assert target.url in str(raised.value)
        assert name in str(raised.value)
        assert time.monotonic() - began_s < 15
        info = loop.run(engine.server_info(), 10)
        assert info["paused"]
        assert info["weight_version"] == "0"

        channel = BroadcastChannel(EnginePool([engine]), config, loop.submit)
        channel.connect(manifest)
        assert channel.push(iter(weights.items()), 1).is_whole
        groups, _ = loop.run(make([engine]).take(0, 1), 30)
        trained = [t for g in groups for t in g.trajectories]
        assert {v for t in trained for v in t.versions} == {1}
        assert_prefix(responses(trained), undisturbed)
        channel.close()
        loop.run(engine.close(), 10)
    finally:
        loop.close()
        target.end()
