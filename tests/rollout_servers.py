"""Real servers of every kind in `LAUNCHERS`, for the contract suite.

Servers are real processes on loopback; the checkpoints are tiny random ones, saved by transformers.
"""

import asyncio
import contextlib
import importlib.util
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from bapo_megatron.config.schema import Config, RolloutConfig, SyncConfig
from bapo_megatron.engines.http import HttpEngine
from bapo_megatron.engines.pool import EnginePool
from bapo_megatron.engines.start import running_engines
from bapo_megatron.engines.update_group import UpdateGroup, host_store
from bapo_megatron.engines.wire import TensorSpec
from bapo_megatron.hf.facts import ModelFacts
from bapo_megatron.hf.reader import HFReader
from bapo_megatron.hf.shape import hf_tensors
from bapo_megatron.resolved import resolve
from bapo_megatron.rollout.dispatch import Dispatcher
from bapo_megatron.sync.broadcast import BroadcastChannel
from bapo_megatron.tokens import TokenStream
from bapo_megatron.types import NeedsEnvironment, Prompt, Sample, Sampled
from tests.distributed import HANG_S
from tests.engine_processes import started_engines

MAX_CONTEXT = {"embedded": 2048, "sglang": 512, "sglang-tp2": 512}
MAX_RUNNING = 8
MAX_LATE_TOKENS = 50  # more than a response grows by before SGLang updates its numbers, which is 15 batches
VOCAB_SIZE = 96
EOS = 1
KEY = "the-key-of-this-suite"
AUTHORIZATION = {"Authorization": f"Bearer {KEY}"}

Launcher = Callable[[Path, Path], AbstractContextManager[list[str]]]


class EventLoop:
    """An asyncio loop in a thread, which runs the client's coroutines."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def submit(self, coro: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coro, self._loop)

    def run(self, coro: Coroutine[Any, Any, Any], timeout_s: float = HANG_S) -> Any:
        return self.submit(coro).result(timeout_s)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


@dataclass
class Servers:
    """The running servers of one kind (two, or one with two ranks), their clients, and a connected weight channel."""

    kind: str
    loop: EventLoop
    urls: list[str]
    models: dict[str, PreTrainedModel]
    weights: dict[str, dict[str, Tensor]]  # the models' weights, as a checkpoint names them
    engines: list[HttpEngine] = field(default_factory=list)
    pool: EnginePool = field(default_factory=lambda: EnginePool([]))
    channel: BroadcastChannel | None = None
    version: int = 0
    num_long: int = 450  # response length at which a test can catch a response halfway

    @property
    def url(self) -> str:
        return self.urls[0]

    @property
    def max_context(self) -> int:
        return MAX_CONTEXT[self.kind]

    @property
    def engine(self) -> HttpEngine:
        return self.engines[0]

    def connect(self, timeout_s: float = HANG_S) -> None:
        config = SyncConfig(bucket_mib=0.2, timeout_s=timeout_s)  # several buckets
        self.pool = EnginePool(self.engines)
        self.channel = BroadcastChannel(self.pool, config, self.loop.submit)
        self.channel.connect(self.manifest("a"))

    def manifest(self, model: str) -> list[TensorSpec]:
        return [TensorSpec.of(name, tensor) for name, tensor in self.weights[model].items()]

    def push(self, model: str) -> int:
        """Give all servers the weights "a" or "b"; return the new version."""
        assert self.channel is not None
        self.version += 1
        stats = self.channel.push(iter(self.weights[model].items()), self.version)
        assert stats.is_whole, self.pool.describe()
        return self.version

    def pieces_over_pushes(
        self, prompts: Sequence[Sequence[int]], models: str, *, turn_tokens: int, streams: tuple[TokenStream, ...] = ()
    ) -> tuple[list[Sample], dict[int, str]]:
        """Push each model, and then sample a piece of four tokens; after a turn, tokens are given.

        Returns:
            Two samples of each prompt, and the model of each weight version.
        """
        config = RolloutConfig(prompts_per_step=len(prompts), max_response_tokens=12, tokens_per_round=4)
        dispatcher = Dispatcher(
            config, self.pool, stop_token_ids=(), run_seed=3, streams=streams, max_turn_tokens=turn_tokens
        )
        rows = [Prompt(i, tuple(ids), "", "", "test") for i, ids in enumerate(prompts)]
        samples = [Sample.of(f"{prompt.prompt_id}.{i}", prompt) for prompt in rows for i in range(2)]
        model_of: dict[int, str] = {}
        for step, model in enumerate(models):
            model_of[self.push(model)] = model
            dispatcher.version = self.version
            grown: list[Sample] = []
            self.loop.run(dispatcher.grow_together(samples, step, grown.append))
            samples = [s.answered([11, 47, 3]) if isinstance(s.need, NeedsEnvironment) else s for s in grown]
        return samples, model_of

    @torch.no_grad()
    def logprobs_of(self, model: str, ids: Sequence[int]) -> Tensor:
        """Return transformers' log-prob of each token but the first, from one pass."""
        logits_TV = self.models[model](torch.tensor([[*ids]]), use_cache=False).logits[0, :-1]
        return logits_TV.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]

    def check_pieces(self, samples: Sequence[Sample], model_of: dict[int, str], *, atol: float, rtol: float) -> None:
        """Compare each sampled piece with the model that sampled it: `pieces_over_pushes` returns both."""
        for (trajectory,) in (sample.trajectories for sample in samples):
            ids, place = trajectory.token_ids.tolist(), 0
            for segment in trajectory.segments:
                if isinstance(segment.origin, Sampled):
                    expected = self.logprobs_of(model_of[segment.origin.version], ids)
                    expected = expected[place - 1 : place - 1 + segment.num_tokens]
                    found = torch.tensor(segment.origin.behaviour_logprobs)
                    torch.testing.assert_close(found, expected, atol=atol, rtol=rtol)
                place += segment.num_tokens

    def push_in_place(self, model: str) -> int:
        """Give the first server new weights by the raw API, one broadcast per tensor; it keeps its running requests."""
        names, tensors = zip(*self.weights[model].items(), strict=True)
        self.version += 1
        world_size = 1 + int(self.loop.run(self.engine.server_info())["tp_size"])
        store = host_store("127.0.0.1", world_size, HANG_S)
        group_name = f"raw-{self.version}"
        address = {"master_address": "127.0.0.1", "master_port": store.port, "group_name": group_name}
        joining = self.post_later(
            "/init_weights_update_group", address | {"rank_offset": 1, "world_size": world_size, "backend": "gloo"}
        )
        group = UpdateGroup(group_name, store=store, rank=0, world_size=world_size, backend="gloo", timeout_s=HANG_S)
        assert joining.result(HANG_S)[0] == 200
        assert self.post("/pause_generation", {"mode": "in_place"})[0] == 200
        assert self.post("/begin_weight_update")[0] == 200
        body = {"names": names, "dtypes": ["float32"] * len(names), "shapes": [list(t.shape) for t in tensors]}
        body |= {"group_name": group_name, "flush_cache": False, "weight_version": str(self.version)}
        updating = self.post_later("/update_weights_from_distributed", body)
        for work in [group.broadcast(tensor) for tensor in tensors]:
            work.wait()
        assert updating.result(HANG_S)[0] == 200, updating.result()
        for path, body in (
            ("/end_weight_update", {}),
            ("/destroy_weights_update_group", {"group_name": group_name}),
            ("/continue_generation", {}),
        ):
            assert self.post(path, body)[0] == 200
        group.close()
        return self.version

    def get(self, path: str, timeout_s: float = HANG_S) -> Any:
        """Return the first server's answer as JSON."""
        request = urllib.request.Request(self.url + path, headers=AUTHORIZATION)
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return json.loads(response.read())

    def post(self, path: str, body: Any = None, timeout_s: float = HANG_S) -> tuple[int, Any]:
        """Return status and JSON (or text) of a raw request to the first server."""
        data = json.dumps(body if body is not None else {}).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"} | AUTHORIZATION)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                status, raw = response.status, response.read()
        except urllib.error.HTTPError as refusal:
            status, raw = refusal.code, refusal.read()
        try:
            return status, json.loads(raw)
        except ValueError:
            return status, raw.decode()

    def post_later(self, path: str, body: Any) -> Future[tuple[int, Any]]:
        async def call() -> tuple[int, Any]:
            return await asyncio.to_thread(self.post, path, body)

        return self.loop.submit(call())

    def load(self) -> dict[str, Any]:
        """Return the first server's numbers: exact ones, or SGLang's of some batches ago, unless it is idle."""
        return self.get("/v1/loads")["loads"][0]

    def num_running(self) -> int:
        """Return the number of requests that are being decoded: each has at least one token."""
        return int(self.load()["num_running_reqs"])

    def held(self, begin: Callable[[], list[Future[Any]]]) -> list[Future[Any]]:
        """Return unfinished responses of `num_long` tokens, held by a pause in place.

        If they are too near their ends to tell, or one has ended, start all of them again.
        """
        deadline = time.monotonic() + HANG_S
        while time.monotonic() < deadline:
            self.wait_until_idle()
            pending = begin()
            self.wait_until_running(pending)
            assert self.post("/pause_generation", {"mode": "in_place"})[0] == 200
            self.get("/server_info")  # unlike the pause, SGLang answers this when it has come to it
            load = self.load()
            num_tokens = 0 if self.kind == "embedded" else load["num_used_tokens"]  # a sum over these responses
            if load["num_running_reqs"] == len(pending) and num_tokens < self.num_long - MAX_LATE_TOKENS:
                return pending
            assert self.post("/continue_generation", {})[0] == 200
            for future in pending:
                future.result(HANG_S)
        raise AssertionError("no response could be held")

    def wait_until_idle(self) -> None:
        """Wait until the server counts no request as running."""
        deadline = time.monotonic() + HANG_S
        while self.num_running():
            assert time.monotonic() < deadline, f"requests were still running after {HANG_S:g} s"
            time.sleep(0.01)

    def wait_until_running(self, pending: list[Future[Any]]) -> None:
        """Wait until all these requests are being decoded, or one has ended."""
        deadline = time.monotonic() + HANG_S
        while self.num_running() < len(pending) and not any(future.done() for future in pending):
            assert time.monotonic() < deadline, f"{len(pending)} requests were not running after {HANG_S:g} s"
            time.sleep(0.01)


def tiny_model(folder: Path, seed: int, max_context: int) -> Qwen3ForCausalLM:
    """Save and return a random Qwen3 whose distributions are neither flat nor certain."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=max_context,
        tie_word_embeddings=False,
        eos_token_id=EOS,
        pad_token_id=0,
        bos_token_id=None,
        initializer_range=0.15,
    )
    model = Qwen3ForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


@contextlib.contextmanager
def embedded(checkpoint: Path, folder: Path) -> Iterator[list[str]]:
    """Start two embedded engines."""
    arguments = ("--max-context", str(MAX_CONTEXT["embedded"]), "--max-running", str(MAX_RUNNING))
    arguments += ("--update-timeout-s", str(HANG_S))
    with started_engines(folder, 2, *arguments, model=checkpoint, key=KEY) as engines:
        yield [engine.url for engine in engines]


def sglang_servers(num_servers: int, tensor_parallel: int, **extra: Any) -> Launcher:
    """Start real SGLang servers, as the local launcher does, with more arguments."""

    @contextlib.contextmanager
    def launch(checkpoint: Path, folder: Path) -> Iterator[list[str]]:
        if importlib.util.find_spec("sglang") is None:
            pytest.skip("SGLang is not installed; scripts/install_sglang_cpu.sh does that")
        rollout = {
            "engine": "sglang",
            "max_response_tokens": MAX_CONTEXT["sglang"] // 2,
            "max_concurrent_requests": MAX_RUNNING,
            "num_servers": num_servers,
            "server_tensor_parallel": tensor_parallel,
            "engine_threads": 1,
            "startup_timeout_s": HANG_S,
            "max_restarts": 0,
        }
        data = {"max_prompt_tokens": MAX_CONTEXT["sglang"] // 2}
        config = Config.model_validate({"data": data, "rollout": rollout, "sglang": {"extra": extra}})
        run = resolve(config, checkpoint)
        with running_engines(run, folder, run.placement.without_trainer().on(), KEY) as urls:
            yield urls

    return launch


LAUNCHERS: dict[str, Launcher] = {
    "embedded": embedded,
    "sglang": sglang_servers(num_servers=2, tensor_parallel=1),
    "sglang-tp2": sglang_servers(num_servers=1, tensor_parallel=2),
}


def _weights_of(folder: Path) -> dict[str, Tensor]:
    shape = ModelFacts.of(folder).shape
    with HFReader(folder) as read:
        read.check(shape)
        return {name: read(name) for name in hf_tensors(shape)}


@contextlib.contextmanager
def started(
    kind: str, launch: Launcher, make_model: Callable[[Path, int, int], PreTrainedModel], folder: Path
) -> Iterator[Servers]:
    """Start servers of one kind with the first of two models."""
    models = {name: make_model(folder / name, seed, MAX_CONTEXT[kind]) for seed, name in enumerate("ab")}
    weights = {name: _weights_of(folder / name) for name in models}
    loop = EventLoop()
    with contextlib.ExitStack() as stack:
        stack.callback(loop.stop)
        urls = stack.enter_context(launch(folder / "a", folder))
        servers = Servers(kind, loop, urls, models, weights)
        servers.engines = [HttpEngine(url, request_timeout_s=HANG_S, vocab_size=VOCAB_SIZE, key=KEY) for url in urls]
        for engine in servers.engines:
            stack.callback(lambda engine=engine: loop.run(engine.close()))
        servers.connect()
        yield servers
