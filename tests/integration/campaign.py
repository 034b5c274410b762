"""A driver for runs under fire: engines that fail in every way, a trainer that pushes real weights, and an oracle.

The trainer is a stand-in: each step's weights are the demo's with noise that depends on the version, so that tokens of
other weights than their segment claims have visibly other log-probs. Everything else is what a run uses.
"""

import asyncio
import functools
import logging
import shutil
import signal
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import torch
from aiohttp import web
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from bapo_megatron.assets import demo_model_path
from bapo_megatron.config.load import load_config
from bapo_megatron.config.schema import SyncConfig
from bapo_megatron.engines.connected import LoopThread
from bapo_megatron.engines.http import HttpEngine
from bapo_megatron.engines.pool import EnginePool
from bapo_megatron.engines.wire import TensorSpec
from bapo_megatron.prompts.stream import PromptStream
from bapo_megatron.rewards import RewardScorer
from bapo_megatron.rollout.scheduler import Scheduler
from bapo_megatron.sync.base import push_until_whole
from bapo_megatron.sync.broadcast import BroadcastChannel
from bapo_megatron.types import Trajectory
from tests.distributed import HANG_S
from tests.integration.faulty_proxy import FAULTS, Answer, FaultyProxy
from tests.integration.nursery import is_running, kill_session

log = logging.getLogger(__name__)

NOISE = 0.2  # standard deviations
UPDATES_PER_STEP = 2
MAX_STALENESS = 7  # optimizer updates
TRAIN_S = 0.1
VOCAB_SIZE = 16
TOLERANCE = 1e-4
ROLLOUT: dict[str, Any] = {
    "prompts_per_step": 3,
    "samples_per_prompt": 4,
    "groups_in_flight": 5,
    "max_response_tokens": 32,
    "max_retries": 1,
    "max_staleness": MAX_STALENESS,
}


class Starter(Protocol):
    """Starts engine servers of one kind."""

    def start(self, port: int, checkpoint: Path, version: str) -> int:
        """The id of the server's process, the leader of a session of its own."""
        ...


@dataclass(frozen=True)
class Timeouts:
    """Seconds. A step has to end within `step_s`, whatever happens in it."""

    request_s: float
    sync_s: float
    startup_s: float
    step_s: float


class Policy:
    """The trainer's model, as a channel sees it. All its weights follow from the version."""

    def __init__(self) -> None:
        self.version = 0
        self._base = load_file(next(demo_model_path().glob("*.safetensors")))

    @functools.cache  # noqa: B019 - one policy per test
    def weights(self, version: int) -> dict[str, Tensor]:
        noise = torch.Generator().manual_seed(version)
        return {
            name: t + NOISE * t.std() * torch.randn(t.shape, generator=noise) if t.dim() > 1 else t
            for name, t in self._base.items()
        }

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.weights(self.version).items()

    def weight_specs(self) -> list[TensorSpec]:
        return [TensorSpec.of(name, tensor) for name, tensor in self.named_weights()]

    def save(self, version: int, folder: Path) -> Path:
        """A checkpoint of these weights."""
        if not folder.exists():
            shutil.copytree(demo_model_path(), folder)
            save_file(self.weights(version), folder / "model.safetensors", metadata={"format": "pt"})
        return folder


@dataclass
class Site:
    """An address at which engines come and go, behind a proxy that outlives them."""

    starter: Starter
    reserved: socket.socket  # keeps the port while no engine listens
    port: int
    proxy: FaultyProxy
    pid: int | None = None  # of the engine, once there was one
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # two engines cannot have the same port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    def send(self, number: signal.Signals) -> None:
        if self.pid is not None:
            kill_session(self.pid, number)

    async def start(self, checkpoint: Path, version: str = "default") -> None:
        """Start an engine in the place of the one that was here."""
        async with self.lock:
            self.kill()
            while self.pid is not None and is_running(self.pid):  # it has the port until then
                await asyncio.sleep(0.01)
            self.pid = await asyncio.to_thread(self.starter.start, self.port, checkpoint, version)

    async def post(self, path: str, body: Any) -> None:
        """From a third party, past the proxy."""
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=HANG_S)) as session,
            session.post(self.url + path, json=body),
        ):
            pass

    async def is_healthy(self) -> bool:
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session,
                session.get(self.url + "/server_info") as response,
            ):
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def wait_healthy(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not await self.is_healthy():
            assert time.monotonic() < deadline, f"the engine of {self.url} was not healthy after {timeout_s:g} s"
            await asyncio.sleep(0.05)


Strike = Callable[["Campaign", Site, Answer], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Fault:
    """What happens to the `nth` call of a path (0: the next) at one site."""

    kind: str
    path: str
    strike: Strike
    nth: int = 0

    @property
    def is_of_push(self) -> bool:
        return self.path != "/generate"


class Campaign:
    """Engines under fire, over several legs of different settings. `hits` counts faults that really happened."""

    def __init__(self, starter: Starter, num_sites: int, folder: Path, timeouts: Timeouts) -> None:
        self.hits: Counter[tuple[str, str]] = Counter()  # by leg and kind
        self.policy = Policy()
        self.trained: list[Trajectory] = []
        self.left: list[Trajectory] = []  # in the buffers at the end of each leg
        self.timeouts = timeouts
        self.num_fenced = 0
        self.leg = ""
        self.num_steps = 0
        self._folder = folder
        self._num_trained_in_leg = 0
        self._strikes: set[asyncio.Task[Any]] = set()
        self._loop = LoopThread()
        self._tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
        self.config = load_config(
            ["demo"], ["reward.kind='tests.integration.campaign_judge:judge'", "reward.timeout_s=1.0"]
        )
        self._scorer = RewardScorer(self.config)
        self.sites = [self._run(self._open_site(starter)) for _ in range(num_sites)]

    def run_leg(self, name: str, settings: dict[str, Any], plan: Sequence[Sequence[Fault]]) -> None:
        """One training run, in which step i meets the faults of plan[i]."""
        self.leg = name
        began_s = time.monotonic()
        began_hits = sum((Counter(site.proxy.hits) for site in self.sites), Counter())
        began_judge = Counter(hang=self._scorer.num_timeouts, crash=self._scorer.num_errors)
        num_starts = len(self.sites) + 1
        self._loop.run(self._heal(), num_starts * self.timeouts.startup_s, f"the engines to recover before {name!r}")
        engines = [
            HttpEngine(s.proxy.url, request_timeout_s=self.timeouts.request_s, vocab_size=VOCAB_SIZE)
            for s in self.sites
        ]
        pool = EnginePool(engines)
        watch = self._loop.submit(pool.watch())
        scheduler = self._scheduler(pool, settings)
        channel = BroadcastChannel(pool, SyncConfig(bucket_mib=1.0, timeout_s=self.timeouts.sync_s), self._loop.submit)
        channel.connect(self.policy.weight_specs())
        self._push(channel, scheduler)
        for faults in plan:
            for fault in faults:
                self._arm(fault)
            log.info("%s, step %d, %.1f s: %s", name, self.num_steps, time.monotonic() - began_s, faults)
            groups = None
            while groups is None:
                groups, _ = self._run(scheduler.take(self.num_steps, self.policy.version))
                if groups is None:
                    self._push(channel, scheduler)
            mine = [t for g in groups for t in g.trajectories]
            self._audit(scheduler, mine)
            self.num_steps += 1
            time.sleep(TRAIN_S)
            self.policy.version += UPDATES_PER_STEP
            self._push(channel, scheduler)
        self._run(scheduler.close())
        self._audit(scheduler, [])
        self.left += scheduler.book.buffered()
        self.num_fenced += pool.num_fenced
        channel.close()
        watch.cancel()
        for engine in engines:
            self._run(engine.close())
        hits = sum((Counter(site.proxy.hits) for site in self.sites), Counter()) - began_hits
        judge = Counter(hang=self._scorer.num_timeouts, crash=self._scorer.num_errors) - began_judge
        for kind, count in (hits + Counter({f"judge: {k}": n for k, n in judge.items()})).items():
            self.hits[name, kind] += count

    @property
    def kinds(self) -> set[str]:
        """Of the faults that happened."""
        return {kind for _, kind in self.hits}

    def table(self) -> str:
        """Faults that happened: a row for each kind, a column for each leg."""
        legs = list(dict.fromkeys(leg for leg, _ in self.hits))
        kinds = sorted({kind for _, kind in self.hits})
        width = max(map(len, kinds))
        rows = [" " * width + "".join(f"{leg:>16}" for leg in [*legs, "all"])]
        for kind in [*kinds, "all"]:
            counts = [sum(n for (a, b), n in self.hits.items() if a == leg and kind in (b, "all")) for leg in legs]
            rows.append(f"{kind:<{width}}" + "".join(f"{n or '':>16}" for n in [*counts, sum(counts)]))
        return "\n".join(rows)

    def check_logprobs(self) -> tuple[int, float, float]:
        """Every token against the weights of the version that its segment claims, by transformers in float32.

        Returns: tokens compared, largest difference, and the share of segments that other weights would have betrayed.
        """
        model = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32).eval()
        samples = [*self.trained, *self.left]
        versions = sorted({v for t in samples for v in t.versions})
        num_tokens, worst, num_segments, num_betrayed = 0, 0.0, 0, 0
        for index, version in enumerate(versions):
            mine = [t for t in samples if version in t.versions]
            right = _logprobs(model, self.policy.weights(version), mine, self.config.rollout.temperature)
            other = versions[index - 1]
            wrong = _logprobs(model, self.policy.weights(other), mine, self.config.rollout.temperature)
            for t, right_N, wrong_N in zip(mine, right, wrong, strict=True):
                said_N = torch.tensor(t.behaviour_logprobs)
                is_mine_N = torch.tensor(t.versions) == version
                difference = float((said_N - right_N).abs()[is_mine_N].max())
                assert difference < TOLERANCE, f"{t.sample_id}: tokens of version {version} are off by {difference}"
                num_tokens += int(is_mine_N.sum())
                worst = max(worst, difference)
                num_segments += 1
                num_betrayed += float((said_N - wrong_N).abs()[is_mine_N].max()) > TOLERANCE
        return num_tokens, worst, num_betrayed / num_segments

    def close(self) -> None:
        self._scorer.close()
        for site in self.sites:
            site.kill()
            self._run(site.proxy.__aexit__())
            site.reserved.close()
        self._loop.close()

    # what faults are made of

    async def caught(self, site: Site, answer: Answer) -> asyncio.Task[web.StreamResponse]:
        """The call, once its requests are in the engine, which does not go on with them."""
        await site.post("/pause_generation", {"mode": "in_place"})
        reply = asyncio.get_running_loop().create_task(answer())  # type: ignore[arg-type]
        self._keep(reply)
        await asyncio.sleep(self.timeouts.request_s / 40)
        return reply

    def later(self, *actions: Awaitable[Any]) -> None:
        """Do this one after the other, whatever becomes of the call."""

        async def do() -> None:
            for action in actions:
                await action

        self._keep(asyncio.get_running_loop().create_task(do()))

    def checkpoint(self, version: int | None) -> Path:
        """Of a version that was pushed once, or the one that the run started from."""
        return demo_model_path() if version is None else self.policy.save(version, self._folder / f"v{version}")

    # the run

    def _arm(self, fault: Fault) -> None:
        site = self.sites[self.num_steps % len(self.sites)]
        if fault.is_of_push:
            site = self.sites[(self.num_steps + 1) % len(self.sites)]

        async def trap(answer: Answer) -> web.StreamResponse:
            if fault.kind not in FAULTS:  # those are counted by the proxy
                self.hits[self.leg, fault.kind] += 1
            return await fault.strike(self, site, answer)

        async def pass_on(answer: Answer) -> web.StreamResponse:
            return await answer()

        for _ in range(fault.nth):
            site.proxy.set_trap(fault.path, pass_on)
        site.proxy.set_trap(fault.path, trap)

    def _push(self, channel: BroadcastChannel, scheduler: Scheduler) -> None:
        scheduler.pool.expect(self.policy.version)
        began_s = time.monotonic()
        push_until_whole(channel, self.policy)  # type: ignore[arg-type]
        assert time.monotonic() - began_s < self.timeouts.step_s, f"{self.leg}: a push took too long"

    def _audit(self, scheduler: Scheduler, mine: list[Trajectory]) -> None:
        """After a step: the books balance, the bound holds, nothing was trained twice."""
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
            buffered = list(scheduler.book.buffered())
            scheduler.ledger.check(buffered)
            num_tokens = sum(t.num_response_tokens for t in (*in_leg, *buffered))
            assert scheduler.ledger.num_tokens["generated"] == num_tokens
            assert not scheduler.ledger.dropped

        self._run(check_books())

    def _scheduler(self, pool: EnginePool, settings: dict[str, Any]) -> Scheduler:
        self._num_trained_in_leg = 0

        def score(trajectories: Sequence[Trajectory]) -> list[float]:
            texts = self._tokenizer.batch_decode([t.response_ids for t in trajectories], skip_special_tokens=True)
            return self._scorer.score([(t.prompt, text) for t, text in zip(trajectories, texts, strict=True)])

        own = {"request_timeout_s": self.timeouts.request_s, "startup_timeout_s": self.timeouts.startup_s}
        return Scheduler(
            self.config.rollout.model_copy(update=ROLLOUT | own | settings),
            pool=pool,
            prompts=PromptStream(self.config, self._tokenizer),
            score=score,
            stop_token_ids=(self._tokenizer.eos_token_id,),
            seed=self.num_steps,
            updates_per_step=UPDATES_PER_STEP,
        )

    async def _open_site(self, starter: Starter) -> Site:
        reserved = socket.socket()
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        proxy = await FaultyProxy(f"http://127.0.0.1:{port}").__aenter__()
        return Site(starter, reserved, port, proxy)

    async def _heal(self) -> None:
        """All engines up and undisturbed, once the last leg's faults have run their course."""
        for site in self.sites:
            site.proxy.disarm()
        if self._strikes:
            await asyncio.wait(self._strikes)
        for site in self.sites:
            site.send(signal.SIGCONT)
            if site.pid is None or not await site.is_healthy():
                await site.start(demo_model_path())
        for site in self.sites:
            await site.wait_healthy(self.timeouts.startup_s)
            await site.post("/continue_generation", {})

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._strikes.add(task)
        task.add_done_callback(self._strikes.discard)

    def _run(self, coroutine: Any) -> Any:
        return self._loop.run(coroutine, self.timeouts.step_s, f"leg {self.leg!r}, step {self.num_steps}")


def _logprobs(
    model: Any, weights: dict[str, Tensor], samples: Sequence[Trajectory], temperature: float
) -> list[Tensor]:
    """Log-prob float32 [response tokens] of each sample under these weights."""
    model.load_state_dict(weights)
    results: list[Tensor] = []
    for begin in range(0, len(samples), 64):
        some = samples[begin : begin + 64]
        rows = [torch.tensor(t.prompt.token_ids + t.response_ids) for t in some]
        token_ids_BT = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        with torch.inference_mode():
            logits_BTV = model(token_ids_BT).logits.float() / temperature
        logprobs_BT = logits_BTV.log_softmax(-1)[:, :-1].gather(2, token_ids_BT[:, 1:, None])[:, :, 0]
        for t, row in zip(some, logprobs_BT, strict=True):
            first = len(t.prompt.token_ids) - 1
            results.append(row[first : first + t.num_response_tokens])
    return results
