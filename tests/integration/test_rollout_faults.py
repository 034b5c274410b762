"""Faults of every kind between scheduler and real engine servers: nothing is lost, nothing hangs, nothing is silent.

Sampling depends only on seed, tokens and weights, so a disturbed run must end with the same responses.
"""

import asyncio
import random
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from bapo_megatron.assets import demo_model_path
from bapo_megatron.config.load import load_config
from bapo_megatron.config.schema import SyncConfig
from bapo_megatron.engines.base import GenerateRequest, GenerateResult, PauseMode
from bapo_megatron.engines.connected import LoopThread
from bapo_megatron.engines.http import HttpEngine
from bapo_megatron.engines.pool import EnginePool
from bapo_megatron.engines.wire import TensorSpec, plan_buckets
from bapo_megatron.errors import EngineError
from bapo_megatron.prompts.stream import PromptStream
from bapo_megatron.rewards.verdicts import Verdict
from bapo_megatron.rollout.dispatch import RolloutStats
from bapo_megatron.rollout.drivers import JudgeOnce
from bapo_megatron.rollout.scheduler import Scheduler
from bapo_megatron.sync.broadcast import BroadcastChannel
from bapo_megatron.types import Sample
from tests.distributed import HANG_S
from tests.engine_processes import EngineProcess, start_engines, started_engines
from tests.integration.faulty_proxy import CALL_FAULTS, FAULTS, RESULT_FAULTS, FaultyProxy
from tests.unit.test_scheduler import verdict

STEPS, PROMPTS, SAMPLES, IN_FLIGHT = 4, 4, 4, 6
MAX_STALENESS = 2
ROUND = 12  # tokens
MAX_UNTRAINED = PROMPTS * (MAX_STALENESS + 1)  # groups: without a bound, a slow group lets others pile up
VOCAB_SIZE = 16
SETTINGS: dict[str, Any] = {
    "prompts_per_step": PROMPTS,
    "samples_per_prompt": SAMPLES,
    "groups_in_flight": IN_FLIGHT,
    "tokens_per_round": ROUND,
    "max_staleness": MAX_STALENESS,
    "startup_timeout_s": HANG_S,
    "request_timeout_s": HANG_S,
}
MODES: dict[str, dict[str, Any]] = {
    "rounds": {},
    "tail": {"abort_tail": True, "tokens_per_round": None},
    "overlap": {"overlap": True},
}
Responses = dict[str, tuple[tuple[int, ...], tuple[float, ...]]]

in_every_mode = pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=() if mode == "rounds" else pytest.mark.slow) for mode in MODES]
)


class CountingEngine(HttpEngine):
    """An engine that counts aborted replies. It does not wait for an answer to `unanswered`, which never comes.

    It gives `cut` one token, and pauses in place before anyone notices.
    """

    num_aborted = 0
    unanswered = ""  # the beginning of a request's rid
    cut = ""  # the same, of a request that is sent alone

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult | EngineError]:
        if is_cut := bool(self.cut) and requests[0].rid.startswith(self.cut):
            requests = [replace(requests[0], max_new_tokens=1)]
            self.cut = ""
        results = await super().generate_many(requests)
        if is_cut:
            await self.pause("in_place")
        self.num_aborted += sum(isinstance(r, GenerateResult) and r.finish_reason == "abort" for r in results)
        return results

    async def send_request(
        self, method: str, path: str, body: Any = None, *, timeout_s: float | None = None, **options: Any
    ) -> bytes:
        if self.unanswered and path == "/generate":
            rids = [body["rid"]] if isinstance(body["rid"], str) else body["rid"]
            timeout_s = 0.1 if any(rid.startswith(self.unanswered) for rid in rids) else timeout_s
        return await super().send_request(method, path, body, timeout_s=timeout_s, **options)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineProcess]]:
    with started_engines(tmp_path_factory.mktemp("engines"), 2) as started:
        yield started


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(demo_model_path())


Make = Callable[..., Scheduler]


@pytest.fixture(scope="module")
def make(tokenizer: Any) -> Make:
    """Return a function that builds a scheduler with the demo's prompts, always from the first one on."""

    def build(engines: Sequence[HttpEngine], **settings: Any) -> Scheduler:
        config = load_config(["demo"], [])
        return Scheduler(
            config.rollout.model_copy(update=SETTINGS | settings),
            pool=EnginePool(engines),
            prompts=PromptStream(config, tokenizer),
            driver=JudgeOnce(lambda samples: [verdict(s.num_sampled_tokens) for s in samples]),
            stop_token_ids=(tokenizer.eos_token_id,),
            seed=7,
        )

    return build


def connect(*urls: str, timeout_s: float = HANG_S) -> list[CountingEngine]:
    return [CountingEngine(url, request_timeout_s=timeout_s, vocab_size=VOCAB_SIZE) for url in urls]


def move_clock(seconds: float) -> None:
    """Move the running event loop's clock, and so all its deadlines, forward."""
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds  # type: ignore[method-assign]


async def take(scheduler: Scheduler, step: int) -> tuple[list[Sample], RolloutStats]:
    """Return one step's responses, within a deadline."""
    groups, stats = await asyncio.wait_for(scheduler.take(step, 0), HANG_S)
    assert groups is not None
    assert len(groups) == scheduler.config.prompts_per_step
    return [t for g in groups for t in g.samples], stats


async def close(scheduler: Scheduler, engines: Sequence[HttpEngine]) -> None:
    await asyncio.wait_for(scheduler.close(), HANG_S)
    for engine in engines:
        await engine.close()


def responses(samples: Any) -> Responses:
    return {t.sample_id: (tuple(t.sampled_ids), tuple(t.behaviour_logprobs)) for t in samples}


def assert_prefix(mine: Responses, whole: Responses) -> None:
    """Check that tokens and log-probs are the same, as far as each response got."""
    for sample_id, (token_ids, logprobs) in mine.items():
        assert token_ids == whole[sample_id][0][: len(token_ids)], sample_id
        assert logprobs == pytest.approx(whole[sample_id][1][: len(token_ids)], abs=1e-4), sample_id


def assert_balanced(scheduler: Scheduler, trained: list[Sample], whole: Responses) -> None:
    """Check that the books agree with what is here, and finished responses are complete, as in the undisturbed run."""
    scheduler.ledger.check(scheduler.book.buffered())
    assert scheduler.ledger.counts()["running"] == 0 or scheduler.config.overlap
    assert len({t.sample_id for t in trained}) == len(trained)
    buffered = list(scheduler.book.buffered())
    num_tokens = sum(t.num_sampled_tokens for t in (*trained, *buffered))
    assert scheduler.ledger.num_tokens["generated"] == num_tokens
    assert_prefix(responses([*trained, *buffered]), whole)
    for t in (t for t in (*trained, *buffered) if t.finish_reason):
        assert t.num_sampled_tokens == len(whole[t.sample_id][0]), t.sample_id


@pytest.fixture(scope="module")
def undisturbed(servers: list[EngineProcess], make: Make) -> Responses:
    """Return every response that the tests can ask for, each sampled in one piece."""

    async def run() -> Responses:
        engines = connect(*(server.url for server in servers))
        count = (STEPS + 1) * PROMPTS + MAX_UNTRAINED
        scheduler = make(engines, prompts_per_step=count, groups_in_flight=count, tokens_per_round=None)
        groups, stats = await scheduler.take(0, 0)
        await close(scheduler, engines)
        assert groups is not None
        assert (stats.num_rounds, stats.num_retries) == (1, 0)
        return responses(t for g in groups for t in g.samples)

    whole = asyncio.run(run())
    assert len({len(token_ids) for token_ids, _ in whole.values()}) > 5, "lengths vary, or resuming is not tested"
    return whole


@in_every_mode
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_aborts_and_pauses_at_random_moments_lose_no_token(
    servers: list[EngineProcess], make: Make, undisturbed: Responses, seed: int, mode: str
) -> None:
    """The first step is built so that requests are aborted and, without rounds, a response is left with one token."""
    chaos = random.Random(seed)
    is_streamed = mode != "rounds"
    cut = next(name for name, (ids, _) in undisturbed.items() if re.match(r"[135]\.", name) and len(ids) > ROUND + 1)

    async def abort_waiting(engine: CountingEngine) -> None:
        while (await engine.server_info())["num_waiting_reqs"] == 0:  # the engine is paused
            await asyncio.sleep(0.01)
        await engine.abort()
        await engine.resume()

    async def abort_all_of_step_0(engine: CountingEngine, scheduler: Scheduler) -> None:
        while scheduler.sampling.step == 0:  # the engine is paused: from now on `cut` is resumed
            await asyncio.sleep(0.01)
        await engine.abort()
        await engine.resume()

    async def disturb(engines: list[CountingEngine], scheduler: Scheduler, enough: asyncio.Event) -> None:
        modes: list[PauseMode] = ["retract", "in_place"]
        while not enough.is_set():
            num_before = scheduler.ledger.num_tokens["generated"]
            # otherwise a slow machine would never make progress
            while scheduler.ledger.num_tokens["generated"] == num_before and not enough.is_set():
                await asyncio.sleep(0.002)
            await asyncio.sleep(chaos.uniform(0.0, 0.03))
            engine = chaos.choice(engines)
            match chaos.choice(("abort one", "abort all", "pause", "pause and abort")):
                case "abort one":
                    if open_rids := list(scheduler.dispatcher.open_requests):
                        await engine.abort(chaos.choice(open_rids))
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

    async def run() -> tuple[list[Sample], int]:
        engines = connect(*(server.url for server in servers))
        scheduler = make(engines, **MODES[mode])
        enough = asyncio.Event()
        engines[1].cut = f"{cut}-" if is_streamed else ""
        await engines[0].pause("in_place")
        trained: list[Sample] = []
        for step in range(STEPS + 1):
            taking = asyncio.create_task(take(scheduler, step))
            if step == 0:
                await abort_waiting(engines[0])
            elif step == 1:
                if is_streamed:
                    await abort_all_of_step_0(engines[1], scheduler)
                disturbing = asyncio.create_task(disturb(engines, scheduler, enough))
            mine, stats = await taking
            assert (stats.num_retries, stats.num_fenced) == (0, 0)
            trained += mine
            assert_balanced(scheduler, trained, undisturbed)
        assert not disturbing.done(), disturbing.exception()
        enough.set()  # cancelling would leave a pause whose answer nobody awaits, and it would outlast this test
        await asyncio.wait_for(disturbing, HANG_S)
        await asyncio.wait_for(scheduler.close(), HANG_S)
        assert_balanced(scheduler, trained, undisturbed)
        # A last step takes as many groups as can be left, so `cut` is trained, whatever happened to it.
        last = make(engines, prompts_per_step=MAX_UNTRAINED, **MODES[mode] | {"max_staleness": 0})
        last.load_state_dict(scheduler.state_dict())
        trained += (await take(last, STEPS + 1))[0]
        await close(last, engines)
        assert_balanced(last, trained, undisturbed)
        return trained, sum(e.num_aborted for e in engines)

    trained, num_aborted = asyncio.run(run())
    assert num_aborted > 0
    assert len(trained) == ((STEPS + 1) * PROMPTS + MAX_UNTRAINED) * SAMPLES
    num_resumed = {t.sample_id: t.num_resumed_tokens for t in trained}
    assert num_resumed[cut] > 0 if is_streamed else sum(num_resumed.values()) > 0
    assert all(t.reward == t.num_sampled_tokens for t in trained)


def test_a_request_that_is_aborted_before_its_first_token_comes_back_empty(servers: list[EngineProcess]) -> None:
    async def run() -> GenerateResult:
        (engine,) = connect(servers[0].url)
        await engine.pause("in_place")
        request = GenerateRequest("early", (3, 4), 4, 1.0, (1,), 0)
        asking = asyncio.create_task(engine.generate(request))
        try:
            while (await engine.server_info())["num_waiting_reqs"] == 0:
                await asyncio.sleep(0.01)
            await engine.abort("early")
            return await asyncio.wait_for(asking, HANG_S)
        finally:
            await engine.resume()
            await engine.close()

    result = asyncio.run(run())
    assert (result.token_ids.tolist(), result.spans, result.finish_reason) == ([], (), "abort")


@in_every_mode
def test_random_faults_of_every_kind_are_repeated_and_change_nothing(
    servers: list[EngineProcess], make: Make, undisturbed: Responses, mode: str
) -> None:
    """Each response is spoilt at most twice in a row, which repeats can repair, so no engine is fenced."""
    chaos = random.Random(0)
    left = [fault for fault in FAULTS if fault != "silence"]
    chaos.shuffle(left)
    num_spoilt: dict[str, int] = {}
    hits: Counter[str] = Counter()

    def spoil(rids: Sequence[str]) -> dict[str, str]:
        faults = {}
        samples = [rid.split("-")[0] for rid in rids]
        if all(num_spoilt.get(sample, 0) < 2 for sample in samples) and (len(hits) < 4 or chaos.random() < 0.5):
            victims = samples if chaos.random() < 0.5 else samples[::2]
            left.insert(0, kind := left.pop())
            victims = samples if kind in CALL_FAULTS else victims
            faults = {rid: kind for rid, sample in zip(rids, samples, strict=True) if sample in victims}
        for rid, sample in zip(rids, samples, strict=True):
            num_spoilt[sample] = num_spoilt.get(sample, 0) + 1 if rid in faults else 0
        return faults

    async def run() -> None:
        async with FaultyProxy(servers[0].url, spoil) as proxy:
            proxy.hits = hits
            engines = connect(proxy.url, servers[1].url)
            scheduler = make(engines, max_retries=2, **MODES[mode])
            trained: list[Sample] = []
            num_retries = step = 0
            while step < STEPS:
                mine, stats = await take(scheduler, step)
                trained += mine
                num_retries += stats.num_retries
                assert stats.num_fenced == 0
                assert all(proxy.url in error and "request" in error for error in stats.errors)
                assert_balanced(scheduler, trained, undisturbed)
                step += 1
            assert 0 < num_retries <= proxy.num_spoilt
            assert mode == "overlap" or num_retries == proxy.num_spoilt
            await close(scheduler, engines)

    asyncio.run(run())
    assert len(hits) > 3


def test_one_spoilt_result_of_many_costs_its_own_request_only(
    servers: list[EngineProcess], make: Make, undisturbed: Responses
) -> None:
    """Spoil one result in every way, one after the other; the client accepts the others of the same call."""
    left = list(RESULT_FAULTS)

    def spoil(rids: Sequence[str]) -> dict[str, str]:
        return {rids[len(rids) // 2]: left.pop()} if left and len(rids) > 3 else {}

    async def run() -> None:
        async with FaultyProxy(servers[0].url, spoil) as proxy:
            engines = connect(proxy.url)
            scheduler = make(engines, max_retries=2)
            trained: list[Sample] = []
            for step in range(STEPS):
                mine, stats = await take(scheduler, step)
                assert stats.num_retries == len(stats.errors), "one request each"
                trained += mine
                assert_balanced(scheduler, trained, undisturbed)
            assert proxy.hits == dict.fromkeys(RESULT_FAULTS, 1)
            await close(scheduler, engines)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        *(("rounds", kind) for kind in FAULTS),
        *(pytest.param("tail", kind, marks=pytest.mark.slow) for kind in ("nan", "closed")),
    ],
)
def test_a_fault_that_stays_fences_that_engine_and_the_others_finish_its_samples(
    servers: list[EngineProcess], make: Make, undisturbed: Responses, kind: str, mode: str
) -> None:
    def spoil(rids: Sequence[str]) -> dict[str, str]:
        return {rid: kind for rid in rids if rid.startswith("2.1-")}

    async def run() -> None:
        async with FaultyProxy(servers[0].url, spoil) as proxy:
            engines = connect(proxy.url, servers[1].url)
            engines[0].unanswered = "2.1-" if kind == "silence" else ""
            scheduler = make(engines, max_retries=1, max_staleness=0, groups_in_flight=PROMPTS, **MODES[mode])
            trained, stats = await take(scheduler, 0)
            assert stats.num_fenced == 1
            assert scheduler.pool.live() == [engines[1]]
            reason = scheduler.pool.describe()
            assert re.search(FAULTS[kind], reason), reason
            assert f"{proxy.url} is fenced" in reason
            assert "gave up after 2 attempts" in reason
            if kind in RESULT_FAULTS:
                assert "request 2.1-s0c" in reason
            assert any(re.search(FAULTS[kind], error) for error in stats.errors)
            assert_balanced(scheduler, trained, undisturbed)

            proxy.spoil = lambda rids: {}
            engines[0].unanswered = ""
            scheduler.pool.admit(engines[0])  # both hold the same weights, version 0
            mine, _ = await take(scheduler, 1)
            trained += mine
            assert scheduler.pool.live() == engines
            assert_balanced(scheduler, trained, undisturbed)
            await close(scheduler, engines)

    asyncio.run(run())


@in_every_mode
@pytest.mark.parametrize("end", [signal.SIGSTOP, signal.SIGKILL], ids=["hangs", "dies"])
def test_an_engine_that_ends_in_the_middle_of_a_step_is_fenced_and_nothing_is_lost(
    servers: list[EngineProcess],
    make: Make,
    undisturbed: Responses,
    tmp_path: Path,
    end: signal.Signals,
    mode: str,
) -> None:
    doomed = servers[1] if end == signal.SIGSTOP else start_engines(tmp_path, 1)[0]

    async def run() -> None:
        engines = connect(servers[0].url) + connect(doomed.url, timeout_s=HANG_S / 10)
        scheduler = make(engines, max_retries=0, **MODES[mode])
        watching = asyncio.create_task(scheduler.pool.watch())
        trained, _ = await take(scheduler, 0)
        await engines[1].pause("in_place")
        taking = asyncio.create_task(take(scheduler, 1))
        while (await engines[1].server_info())["num_waiting_reqs"] == 0:
            await asyncio.sleep(0.01)
        doomed.process.send_signal(end)
        if end == signal.SIGSTOP:
            engines[1]._timeout_s = 0.1  # for the requests that follow
            move_clock(HANG_S / 10)  # past the deadline of those that it has, but of nothing else
        trained += (await taking)[0]
        while scheduler.pool.is_live(engines[1]):  # with overlap, the other engine may have been quick enough
            await asyncio.sleep(0.05)
        assert f"{doomed.url} is fenced ({doomed.url}/" in scheduler.pool.describe()
        assert_balanced(scheduler, trained, undisturbed)
        if end == signal.SIGSTOP:
            doomed.process.send_signal(signal.SIGCONT)
            engines[1]._timeout_s = HANG_S / 10
            await engines[1].resume()
            while not scheduler.pool.back():
                await asyncio.sleep(0.05)
            scheduler.pool.admit(engines[1])
            trained += (await take(scheduler, 2))[0]
            assert scheduler.pool.live() == engines
            assert_balanced(scheduler, trained, undisturbed)
        watching.cancel()
        await close(scheduler, engines)

    try:
        asyncio.run(asyncio.wait_for(run(), HANG_S))
    finally:
        doomed.process.send_signal(signal.SIGCONT)
        if doomed is not servers[1]:
            doomed.end()


def test_giving_up_on_a_step_keeps_what_has_returned(
    servers: list[EngineProcess], make: Make, undisturbed: Responses
) -> None:
    """The caller cancels `take` while one engine holds its requests back."""

    async def run() -> None:
        engines = connect(*(server.url for server in servers))
        scheduler = make(engines)
        await engines[1].pause("in_place")
        taking = asyncio.create_task(take(scheduler, 0))
        try:
            while scheduler.ledger.num_tokens["generated"] == 0:
                await asyncio.sleep(0.01)
            taking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await taking
        finally:
            await engines[1].resume()
        assert_balanced(scheduler, [], undisturbed)
        trained, _ = await take(scheduler, 1)
        assert_balanced(scheduler, trained, undisturbed)
        await close(scheduler, engines)

    asyncio.run(run())


def test_a_judge_that_fails_loses_no_sample(servers: list[EngineProcess], make: Make, undisturbed: Responses) -> None:
    async def run() -> None:
        engines = connect(*(server.url for server in servers))
        scheduler = make(engines)
        driver = scheduler.driver

        def broken(samples: Any) -> list[Verdict]:
            raise RuntimeError("the judge is ill")

        scheduler.driver = JudgeOnce(broken)
        with pytest.raises(RuntimeError, match="ill"):
            await scheduler.take(0, 0)
        assert_balanced(scheduler, [], undisturbed)
        scheduler.driver = driver
        trained, _ = await take(scheduler, 0)
        assert_balanced(scheduler, trained, undisturbed)
        await close(scheduler, engines)

    asyncio.run(run())


def test_a_refused_weight_push_is_one_clear_error_and_nothing_is_sampled_until_a_whole_one(
    make: Make, undisturbed: Responses, servers: list[EngineProcess], tmp_path: Path
) -> None:
    target = start_engines(tmp_path, 1)[0]
    loop = LoopThread()
    try:
        (engine,) = connect(target.url)
        weights = load_file(next(demo_model_path().glob("*.safetensors")))
        name = sorted(weights)[len(weights) // 2]
        config = SyncConfig(bucket_mib=1.0, timeout_s=HANG_S)
        manifest = [TensorSpec.of(n, t) for n, t in weights.items()]
        channel = BroadcastChannel(EnginePool([engine]), config, loop.submit)
        channel.connect(manifest)
        wrong = {n: torch.cat([t, t]) if n == name else t for n, t in weights.items()}
        wrong_manifest = [TensorSpec.of(n, t) for n, t in wrong.items()]
        channel.plan = plan_buckets(wrong_manifest, 2**20)  # past the handshake, which would refuse it
        channel.session.manifest = tuple(wrong_manifest)
        with pytest.raises(EngineError, match=r"update_weights_from_distributed.*HTTP 400") as raised:
            channel.push(iter(wrong.items()), 1)
        assert target.url in str(raised.value)
        assert name in str(raised.value)
        info = loop.run(engine.server_info(), HANG_S)
        assert info["paused"]
        assert info["weight_version"] == "0"

        channel = BroadcastChannel(EnginePool([engine]), config, loop.submit)
        channel.connect(manifest)
        assert channel.push(iter(weights.items()), 1).is_whole
        groups, _ = loop.run(make([engine]).take(0, 1), HANG_S)
        trained = [t for g in groups or [] for t in g.samples]
        assert {v for t in trained for v in t.versions} == {1}
        assert_prefix(responses(trained), undisturbed)
        channel.close()
        loop.run(engine.close(), HANG_S)
    finally:
        loop.close()
        target.end()
