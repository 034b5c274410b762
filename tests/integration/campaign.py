"""Drive runs in which engines fail in every way and a trainer pushes real weights, and check them with an oracle.

The trainer is a stand-in: each step's weights are a shipped model's plus noise that depends on the version, so that
tokens from other weights than their segment claims have visibly different log-probs, and a mixture's have other routes.
Everything else is what a run uses.

No deadline passes by itself: if only a deadline can end a fault, the fault lets it pass once the fault has struck.
"""

import asyncio
import functools
import logging
import re
import shutil
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import torch
from aiohttp import web
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from bapo_megatron.assets import shipped_model_path
from bapo_megatron.config.load import load_config
from bapo_megatron.config.schema import SyncConfig
from bapo_megatron.engines.base import Engine
from bapo_megatron.engines.connected import LoopThread
from bapo_megatron.engines.http import HttpEngine
from bapo_megatron.engines.pool import EnginePool
from bapo_megatron.engines.wire import TensorSpec
from bapo_megatron.errors import RequestRefusedError
from bapo_megatron.hf.facts import ModelFacts
from bapo_megatron.prompts.stream import PromptStream
from bapo_megatron.rollout.scheduler import Scheduler
from bapo_megatron.sync.base import RankZeroChannel
from bapo_megatron.sync.broadcast import BroadcastChannel
from bapo_megatron.types import Sample
from tests.distributed import HANG_S
from tests.integration.campaign_answers import Judge, MakeAnswers
from tests.integration.faulty_proxy import FAULTS, ROUTE_FAULTS, Answer, FaultyProxy
from tests.integration.nursery import is_running, kill_session
from tests.integration.vain import NEVER_S, Vain

log = logging.getLogger(__name__)

NOISE = 0.2  # standard deviations
UPDATES_PER_STEP = 2
MAX_STALENESS = 7  # optimizer updates
TRAIN_S = 0.1  # lets sampling continue meanwhile; no assertion depends on how far it gets
VOCAB_SIZE = 16
POLL_S = 0.01  # between two checks of a condition that is certain to come
BUCKET = "/update_weights_from_distributed"
ROLLOUT: dict[str, Any] = {
    "prompts_per_step": 3,
    "samples_per_prompt": 4,
    "groups_in_flight": 5,
    "max_response_tokens": 32,
    "max_retries": 1,
    "max_staleness": MAX_STALENESS,
    "request_timeout_s": HANG_S,
    "startup_timeout_s": HANG_S,
}


class Starter(Protocol):
    """A starter of engine servers of one kind."""

    def start(self, port: int, checkpoint: Path, version: str) -> int:
        """Start a server; return its process id, which leads a session of its own."""
        ...

    def halting(self, site: "Site") -> AbstractAsyncContextManager[None]:
        """Within this context, the engine stops before it completes an arriving request, until told to continue."""
        ...


class Policy:
    """The trainer's model, as a channel sees it. All its weights follow from the version."""

    def __init__(self, folder: Path, while_gathering: Callable[[], None]) -> None:
        """`folder`: the checkpoint that the weights begin with."""
        self.version = 0
        self.folder = folder
        self._while_gathering = while_gathering
        self._base = load_file(next(folder.glob("*.safetensors")))

    @functools.cache  # noqa: B019 - one policy per test
    def weights(self, version: int) -> dict[str, Tensor]:
        noise = torch.Generator().manual_seed(version)
        return {
            name: t + NOISE * t.std() * torch.randn(t.shape, generator=noise) if t.dim() > 1 else t
            for name, t in self._base.items()
        }

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.weights(self.version).items():
            self._while_gathering()
            yield name, tensor

    def manifest(self) -> list[TensorSpec]:
        return [TensorSpec.of(name, tensor) for name, tensor in self.weights(self.version).items()]

    def save(self, version: int, folder: Path) -> Path:
        """Save a checkpoint of these weights."""
        if not folder.exists():
            shutil.copytree(self.folder, folder)
            save_file(self.weights(version), folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    def model(self, version: int) -> Any:
        """Return transformers' model with these weights, in float32."""
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = self.save(version, Path(folder) / "model")
            return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


_caller: ContextVar[tuple["Client", str] | None] = ContextVar("caller", default=None)  # and the path that it called


class Client(HttpEngine):
    """A client whose deadlines pass when a strike says so."""

    def __init__(self, url: str) -> None:
        super().__init__(url, request_timeout_s=HANG_S, vocab_size=VOCAB_SIZE)
        self.timers: list[tuple[str, asyncio.TimerHandle, Callable[[], None]]] = []  # timers of calls, by path

    async def send_request(
        self, method: str, path: str, body: Any = None, *, timeout_s: float | None = None, **options: Any
    ) -> bytes:
        token = _caller.set((self, path))
        try:
            return await super().send_request(method, path, body, **options)
        finally:
            _caller.reset(token)

    def expire(self, *paths: str) -> None:
        """Let the deadlines of calls in progress pass: calls of these paths, or of any path."""
        timers, self.timers = self.timers, []
        for path, handle, strike in timers:
            if paths and path not in paths:
                self.timers.append((path, handle, strike))
            elif not handle.cancelled():
                handle.cancel()
                strike()


class Pool(EnginePool):
    """A pool that counts how often each engine was fenced off."""

    def __init__(self, engines: Sequence[Client]) -> None:
        super().__init__(engines)
        self.fences: Counter[str] = Counter()

    def fence(self, engine: Engine, reason: str) -> None:
        super().fence(engine, reason)
        self.fences[engine.url] += 1

    def is_at_risk(self, engine: Engine) -> bool:
        """Return whether one more failure without a good reply would lose the engine for good."""
        return self.num_failures[engine.url] > 1


@dataclass
class Site:
    """An address at which engines come and go, behind a proxy that outlives them."""

    starter: Starter
    reserved: socket.socket  # keeps the port while no engine listens
    port: int
    proxy: FaultyProxy
    client: Client
    pid: int | None = None  # the engine's process, once there was one
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # two engines cannot have the same port
    strikes: set[asyncio.Task[Any]] = field(default_factory=set)  # strikes that are still running

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    def send(self, number: signal.Signals) -> None:
        if self.pid is not None:
            kill_session(self.pid, number)

    async def start(self, checkpoint: Path, version: str = "default") -> None:
        """Start an engine in place of the previous one."""
        async with self.lock:
            self.kill()
            while self.pid is not None and is_running(self.pid):  # it holds the port until it has ended
                await asyncio.sleep(0.01)
            self.pid = await asyncio.to_thread(self.starter.start, self.port, checkpoint, version)

    async def post(self, path: str, body: Any) -> None:
        """Post from a third party, past the proxy."""
        await self._call("POST", path, body)

    async def paused(self) -> str | None:
        """Return how generation is paused."""
        return (await self._call("GET", "/server_info"))["paused"]

    async def num_requests(self) -> int:
        """Return the number of requests for samples in the engine."""
        loads = (await self._call("GET", "/v1/loads"))["loads"]
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)

    async def is_healthy(self) -> bool:
        try:
            await self._call("GET", "/server_info")
        except aiohttp.ClientError:
            return False
        return True

    async def wait_healthy(self) -> None:
        deadline = time.monotonic() + HANG_S
        while not await self.is_healthy():
            assert time.monotonic() < deadline, f"the engine of {self.url} was not healthy after {HANG_S:g} s"
            await asyncio.sleep(POLL_S)

    async def _call(self, method: str, path: str, body: Any = None) -> Any:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=HANG_S), raise_for_status=True) as session,
            session.request(method, self.url + path, json=body) as response,
        ):
            return await response.json() if response.content_type == "application/json" else None


Strike = Callable[["Campaign", Site, Answer], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Fault:
    """What happens to the `nth` call of a path (0: the next) at one site."""

    kind: str
    path: str
    strike: Strike
    nth: int = 0
    part: bytes = b""  # what the call's body must contain
    is_everywhere: bool = False  # it strikes the other sites as well
    is_absent: bool = False  # the engine takes no part in the broadcast that the call announces

    @property
    def is_of_push(self) -> bool:
        return self.path != "/generate"


class Campaign:
    """Engines under attack, over several legs with different settings. `hits` counts faults that really happened."""

    def __init__(
        self,
        starter: Starter,
        num_sites: int,
        folder: Path,
        vain: Vain,
        make_answers: MakeAnswers = Judge,
        model: str = "demo",
    ) -> None:
        """`model`: a shipped one; the routes of a mixture are recorded."""
        self.hits: Counter[tuple[str, str]] = Counter()  # by leg and kind
        self.refused: Counter[str] = Counter()  # refusals of wrong routes, by kind
        self.policy = Policy(shipped_model_path(model), self._before_a_bucket)
        self.streams = tuple(ModelFacts.of(self.policy.folder).streams)
        self.trained: list[Sample] = []
        self.dropped: list[Sample] = []  # samples that were not trained, because an environment failed
        self.left: list[Sample] = []  # samples in the buffers at the end of each leg
        self.num_fenced = 0
        self.leg = ""
        self.num_steps = 0
        self.vain = vain
        self.between_pushes = asyncio.Lock()  # held by a push, and by a strike on sampling until it stands
        self.pool: Pool | None = None  # None between legs
        self._folder = folder
        self._num_planned = 0  # steps
        self._absent: Site | None = None  # where an engine is going to take no part in a broadcast
        self._num_trained_in_leg = 0
        self._loop = LoopThread()
        self._tokenizer = AutoTokenizer.from_pretrained(self.policy.folder)
        self.config = load_config(["demo"], [])
        self._answers = make_answers(self.config, self._tokenizer)
        self._run(self._keep_timers())
        self.sites = [self._run(self._open_site(starter)) for _ in range(num_sites)]

    def run_leg(self, name: str, settings: dict[str, Any], plan: Sequence[Sequence[Fault]]) -> None:
        """Do one training run, in which step i meets the faults of plan[i], until all of them have happened."""
        self.leg = name
        began_s = time.monotonic()
        began_hits = sum((Counter(site.proxy.hits) for site in self.sites), Counter())
        began_answers = self._answers.hits()
        self._run(self._heal())
        for site in self.sites:
            site.client = Client(site.proxy.url)
        self.pool = pool = Pool([site.client for site in self.sites])
        watch = self._loop.submit(pool.watch())
        self._scheduler = scheduler = self._new_scheduler(pool, settings)
        self._channel = BroadcastChannel(pool, SyncConfig(bucket_mib=0.5, timeout_s=NEVER_S), self._loop.submit)
        self._channel.connect(self.policy.manifest())
        self._push()
        for faults in plan:
            self._let_all_happen()
            for fault in faults:
                self._arm(fault)
            log.info("%s, step %d, %.1f s: %s", name, self.num_steps, time.monotonic() - began_s, faults)
            self._num_planned += 1
            self._step()
        self._let_all_happen()
        self._unless_refused(scheduler.close)
        self._audit([])
        self.left += scheduler.book.buffered()
        self.dropped += self._dropped()
        self.num_fenced += pool.num_fenced
        self._channel.close()
        self.pool = None
        watch.cancel()
        for site in self.sites:
            self._run(site.client.close())
        hits = sum((Counter(site.proxy.hits) for site in self.sites), Counter()) - began_hits
        for kind, count in (hits + (self._answers.hits() - began_answers)).items():
            self.hits[name, kind] += count

    @property
    def kinds(self) -> set[str]:
        """Return the kinds of faults that happened."""
        return {kind for _, kind in self.hits}

    def table(self) -> str:
        """Return a table of the faults that happened: a row for each kind, a column for each leg."""
        legs = list(dict.fromkeys(leg for leg, _ in self.hits))
        kinds = sorted({kind for _, kind in self.hits})
        width = max(map(len, kinds))
        rows = [" " * width + "".join(f"{leg:>16}" for leg in [*legs, "all"])]
        for kind in [*kinds, "all"]:
            counts = [sum(n for (a, b), n in self.hits.items() if a == leg and kind in (b, "all")) for leg in legs]
            rows.append(f"{kind:<{width}}" + "".join(f"{n or '':>16}" for n in [*counts, sum(counts)]))
        return "\n".join(rows)

    @property
    def samples(self) -> list[Sample]:
        return [*self.trained, *self.dropped, *self.left]

    def close(self) -> None:
        self._answers.close()
        for site in self.sites:
            site.kill()
            self._run(site.proxy.__aexit__())
            site.reserved.close()
        self._loop.close()

    # what faults are made of

    async def caught(self, site: Site, answer: Answer) -> asyncio.Task[web.StreamResponse]:
        """Return the call once its requests are in the engine, which stops working on them."""
        async with site.starter.halting(site):
            reply = asyncio.get_running_loop().create_task(answer())  # type: ignore[arg-type]
            self._keep(site, reply)
            while await site.num_requests() < site.proxy.num_sampling:  # some may have been dropped by their caller
                await asyncio.sleep(POLL_S)
        return reply

    def later(self, site: Site, *actions: Awaitable[Any]) -> None:
        """Do these actions one after the other, whatever happens to the call."""

        async def do() -> None:
            for action in actions:
                await action

        self._keep(site, asyncio.get_running_loop().create_task(do()))

    async def until_fenced(self, site: Site) -> AsyncIterator[None]:
        """Yield repeatedly until the engine, which was live, is fenced off or the leg is over."""
        pool = self.pool
        num_fences = pool.fences[site.proxy.url] if pool else 0
        while pool and pool is self.pool and pool.is_live(site.client) and pool.fences[site.proxy.url] == num_fences:
            yield
            await asyncio.sleep(POLL_S)

    async def fenced(self, site: Site) -> None:
        """Return once the engine is fenced off, or the leg is over."""
        async for _ in self.until_fenced(site):
            pass

    async def until_waited_for(self, site: Site) -> None:
        """Wait until a held engine is asked for something other than samples, or no other engine has work."""
        others, pool = [each for each in self.sites if each is not site], self.pool
        while not site.proxy.num_held and any(each.proxy.num_sampling and not each.strikes for each in others):
            if pool is not self.pool:
                return
            await asyncio.sleep(POLL_S)

    async def going_on(self, site: Site) -> None:
        """Let a stopped or paused engine continue."""
        site.send(signal.SIGCONT)
        await site.post("/continue_generation", {})
        site.proxy.release()

    def checkpoint(self, version: int | None) -> Path:
        """Return a checkpoint of a version that was once pushed; None means the one that the run started from."""
        return self.policy.folder if version is None else self.policy.save(version, self._folder / f"v{version}")

    # the run

    def _arm(self, fault: Fault) -> None:
        site = self.sites[(self._num_planned + fault.is_of_push) % len(self.sites)]
        for each in self.sites if fault.is_everywhere else [site]:
            self._prepare(each)

        async def trap(answer: Answer) -> web.StreamResponse:
            if fault.kind not in FAULTS | ROUTE_FAULTS:  # the proxy counts its own
                self.hits[self.leg, fault.kind] += 1
            return await fault.strike(self, site, answer)

        site.proxy.set_trap(fault.path, trap, fault.nth, fault.part)
        self._absent = site if fault.is_absent else self._absent

    def _prepare(self, site: Site) -> None:
        """Make sure that an engine is healthy and takes part: only then can a fault happen to it."""
        pool = self.pool
        assert pool is not None

        async def until_well() -> None:
            while site.strikes:
                await asyncio.wait(site.strikes)
            await site.wait_healthy()
            while not pool.is_live(site.client) and site.client not in pool.back():
                await asyncio.sleep(POLL_S)

        self._run(until_well())
        while not pool.is_live(site.client):
            self._push()
            self._run(until_well())
        while pool.is_at_risk(site.client):
            self._step()

    def _let_all_happen(self) -> None:
        """Run steps until every armed fault has happened."""
        while armed := [site for site in self.sites if site.proxy.is_armed]:
            for site in armed:
                self._prepare(site)
            self._step()

    def _step(self) -> None:
        """Take groups to train, train, and push."""
        groups = None
        while groups is None:
            groups, _ = self._unless_refused(lambda: self._scheduler.take(self.num_steps, self.policy.version))
            if groups is None:
                self._push()
        self._audit([t for g in groups for t in g.valid])
        self.num_steps += 1
        time.sleep(TRAIN_S)
        self.policy.version += UPDATES_PER_STEP
        self._push()

    def _unless_refused(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Do it again after each refusal of wrong routes, which ends a run: the next attempt must miss nothing."""
        while True:
            try:
                return self._run(work())
            except RequestRefusedError as refusal:
                kind = next((kind for kind, said in ROUTE_FAULTS.items() if re.search(said, str(refusal))), None)
                if kind is None:
                    raise
                self.refused[kind] += 1
                self._audit([])

    def _push(self) -> None:
        async def release() -> None:
            self.between_pushes.release()

        assert self.pool is not None
        if self.streams:  # as a run that replays routes
            self._run(self._scheduler.sampling.pause())
        self._run(self.between_pushes.acquire())
        self.pool.expect(self.policy.version)
        began_s = time.monotonic()
        RankZeroChannel(self._channel).push(self.policy)  # type: ignore[arg-type]
        assert time.monotonic() - began_s < HANG_S, f"{self.leg}: a push took too long"
        self._run(release())

    def _before_a_bucket(self) -> None:
        """Prepare a broadcast in which an engine takes no part; a push with such a fault goes bucket by bucket."""
        site = self._absent
        if site is None or site.proxy.url not in self.vain.members:
            return
        self.vain.settle()
        if site.proxy.is_next(BUCKET):
            self.vain.begin()
            self._absent = None

    def _audit(self, mine: list[Sample]) -> None:
        """Check after a step that the books balance, the bound holds, and nothing was trained twice."""
        scheduler = self._scheduler
        first = len(self.trained) - self._num_trained_in_leg
        self.trained += mine
        self._num_trained_in_leg += len(mine)
        in_leg = self.trained[first:]
        assert len({t.sample_id for t in in_leg}) == len(in_leg), f"{self.leg}: a sample was trained twice"
        last_update = self.policy.version + UPDATES_PER_STEP - 1
        for t in mine:
            assert t.finish_reason is not None
            assert t.reward is not None
            assert all(0 <= last_update - v <= MAX_STALENESS for v in t.versions), f"{self.leg}: {t.sample_id} is stale"

        async def check_books() -> None:
            buffered, dropped, ledger = list(scheduler.book.buffered()), self._dropped(), scheduler.ledger
            ledger.check(buffered)
            samples = [*in_leg, *dropped, *buffered]
            assert ledger.num_samples["admitted"] == len(samples)
            assert ledger.num_tokens["generated"] == sum(t.num_sampled_tokens for t in samples)
            assert ledger.num_given["given"] == sum(t.num_given_tokens for t in samples)
            assert ledger.dropped == Counter({"failed": len(dropped)} if dropped else {})
            for sample in (*mine, *dropped, *buffered):
                self._answers.check(sample)

        self._run(check_books())

    def _dropped(self) -> list[Sample]:
        """Return this leg's samples that an environment has ended and that are neither trained nor here."""
        first = len(self.trained) - self._num_trained_in_leg
        known = {t.sample_id for t in (*self.trained[first:], *self._scheduler.book.buffered())}
        return [t for t in self._answers.ended.values() if t.sample_id not in known]

    def _new_scheduler(self, pool: EnginePool, settings: dict[str, Any]) -> Scheduler:
        self._num_trained_in_leg = 0
        return Scheduler(
            self.config.rollout.model_copy(update=ROLLOUT | settings),
            pool=pool,
            prompts=PromptStream(self.config, self._tokenizer),
            driver=self._answers.driver(ROLLOUT["max_response_tokens"]),
            stop_token_ids=self._answers.stop_token_ids,
            max_turn_tokens=self._answers.max_turn_tokens,
            seed=self.num_steps,
            updates_per_step=UPDATES_PER_STEP,
            streams=self.streams,
        )

    async def _open_site(self, starter: Starter) -> Site:
        reserved = socket.socket()
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        proxy = await FaultyProxy(f"http://127.0.0.1:{port}").__aenter__()
        return Site(starter, reserved, port, proxy, Client(proxy.url))

    async def _heal(self) -> None:
        """Wait until all engines are up and undisturbed, once the last leg's faults are over."""
        for site in self.sites:
            site.proxy.disarm()
            while site.strikes:
                await asyncio.wait(site.strikes)
            if site.pid is None or not await site.is_healthy():
                await site.start(self.policy.folder)
        for site in self.sites:
            await site.wait_healthy()
            await site.post("/continue_generation", {})

    def _keep(self, site: Site, task: asyncio.Task[Any]) -> None:
        def end(task: asyncio.Task[Any]) -> None:
            site.strikes.discard(task)
            if not task.cancelled() and (problem := task.exception()) is not None:
                log.error("a strike at %s failed", site.url, exc_info=problem)

        site.strikes.add(task)
        task.add_done_callback(end)

    async def _keep_timers(self) -> None:
        """Tell clients of the deadlines of their calls; this runs on the loop that makes the calls."""
        loop = asyncio.get_running_loop()
        call_at = loop.call_at

        def kept(when: float, callback: Any, *arguments: Any, **options: Any) -> asyncio.TimerHandle:
            handle = call_at(when, callback, *arguments, **options)
            if (caller := _caller.get()) is not None:
                client, path = caller
                client.timers = [timer for timer in client.timers if not timer[1].cancelled()]
                client.timers.append((path, handle, functools.partial(callback, *arguments)))
            return handle

        loop.call_at = kept  # type: ignore[method-assign]

    def _run(self, coroutine: Any) -> Any:
        return self._loop.run(coroutine, HANG_S, f"leg {self.leg!r}, step {self.num_steps}")
