"""The interface of one rollout server. Every implementation passes the same contract suite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from bapo_megatron.engines.update_group import GroupBackend
from bapo_megatron.engines.wire import Bucket, TensorSpec
from bapo_megatron.errors import EngineError
from bapo_megatron.hf.streams import ROUTES
from bapo_megatron.tokens import SAMPLER_STREAMS, Array, Rows, TokenStream

PauseMode = Literal["abort", "retract", "in_place"]

Extra = Literal["weight_manifest", "weight_digests", "score", "release"]
"""What a server can do beyond sampling. "weight_manifest": `WeightTransport.manifest` answers. "weight_digests":
`WeightTransport.digests` returns the digest of each weight as sent (engines/wire.py), and `take` the digest of each as
received. "score" and "release": `Engine.score` and `Engine.hold` answer."""

Memory = Literal["weights", "kv_cache", "cuda_graph"]
"""A kind of memory that a server can release, by SGLang's tags (srt/constants.py)."""

ALL_MEMORY: frozenset[Memory] = frozenset(get_args(Memory))

Transport = Literal["gloo", "nccl", "disk"]
"""How weights reach a server: through a process group with this backend, or a folder that both sides see."""

_SGLANG = ("gloo", "nccl", "disk")


def _is_name(value: object) -> bool:
    return isinstance(value, str)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What one server says it can do."""

    streams: frozenset[str]  # streams of models and plugins whose rows its replies can carry
    transports: frozenset[str]  # `Transport`
    extras: frozenset[str]  # `Extra`

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> Capabilities:
        """Read the capabilities from a `server_info`. A server that names none has SGLang's.

        Example: {"capabilities": ["score"], "transports": ["gloo"], "streams": ["routes"]}
        """
        of_sglang = ["score", "release"] if info.get("enable_memory_saver") else ["score"]
        streams = [*SAMPLER_STREAMS, *([ROUTES] if info.get("enable_return_routed_experts") else [])]
        named = (info.get("streams", streams), info.get("transports", [*_SGLANG]), info.get("capabilities", of_sglang))
        return cls(*(frozenset(filter(_is_name, names if isinstance(names, list) else [])) for names in named))


@dataclass(frozen=True, slots=True)
class GroupSeat:
    """A server's place in a process group whose rank 0 sends the weights (engines/update_group.py)."""

    group: str  # the group's name
    host: str  # where the group's store listens
    port: int
    first_rank: int  # the server's first rank
    world_size: int
    backend: GroupBackend

    @property
    def is_flat(self) -> bool:
        """Whether a bucket arrives as one buffer of bytes (engines/wire.py) rather than one broadcast per weight."""
        return self.backend == "nccl"


@dataclass(frozen=True, slots=True)
class Folder:
    """A Hugging Face checkpoint that both sides see."""

    path: Path


class WeightTransport(Protocol):
    """How weights reach one server. An update is `begin`, `take` of every bucket, `end`; or `take` of a folder.

    All methods are coroutines with a deadline, and raise `EngineError` naming the server.
    """

    async def join(self, seat: GroupSeat) -> None:
        """Take a seat in the group that sends the buckets of all later updates. Returns once all ranks have joined."""
        ...

    async def begin(self) -> None:
        """Begin an update. An unfinished one is dropped, because all its weights will be replaced."""
        ...

    async def take(self, weights: Bucket | Folder, *, version: int | None, keeps_cache: bool = False) -> dict[str, str]:
        """Take the next weights. The trainer broadcasts a bucket's weights while this call is in progress.

        Args:
            weights: a bucket lists its weights in byte order; a folder holds all of them.
            version: given with the last bucket or with a folder; publishes the weights.
            keeps_cache: keep using what requests have already computed with older weights.

        Returns the digest of each weight of a bucket as it arrived, if the server has the extra "weight_digests".
        """
        ...

    async def end(self) -> None: ...
    async def leave(self) -> None:
        """Leave the group, if any."""
        ...

    async def manifest(self) -> list[TensorSpec]:
        """Describe every weight, in Hugging Face names; needs the extra "weight_manifest"."""
        ...

    async def digests(self) -> dict[str, Any]:
        """Return the checksums of the weights in use, as SGLang's /weights_checker does."""
        ...


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Continue `token_ids` (prompt, plus the response so far when a partial one is resumed)."""

    rid: str
    token_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...]  # with rollout.ignore_stop_tokens, a reply that "stops" at another is continued
    seed: int  # the same seed, tokens and weights give the same continuation
    top_p: float = 1.0  # sample from the fewest likeliest tokens whose tempered probabilities sum to at least this
    top_k: int | None = None  # and from at most this many; None means all
    streams: tuple[TokenStream, ...] = ()  # streams of models and plugins whose rows to return
    num_fed: int = 1  # leading tokens whose rows of fed streams the client already has; the first token has none

    @property
    def is_cut(self) -> bool:
        """Whether sampling may leave tokens out; the server then returns log-probs renormalised over the rest."""
        return self.top_p < 1 or self.top_k is not None


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Output tokens [start, end) were sampled by this weight version."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class GenerateResult:
    """Sampled tokens. `spans` cover all of them, in order. Arrays are read-only.

    `behaviour_logprobs` are for the distribution sampled from: tempered, cut by `top_p` and `top_k`, and renormalised.
    """

    rid: str
    token_ids: Array  # int64
    behaviour_logprobs: Array  # float32
    spans: tuple[VersionSpan, ...]
    finish_reason: Literal["stop", "length", "abort"]
    num_prompt_tokens: int
    num_cached_tokens: int
    rows: Rows = field(default_factory=dict)  # rows of the request's streams; fed ones start at input token `num_fed`


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Untempered log-probs of N given tokens, and the likeliest tokens at each position, best first."""

    logprobs_N: Array  # float32
    top_ids_NK: Array  # int32
    top_logprobs_NK: Array  # float32
    version: int = -1  # the weight version; -1 means the initial weights, or unknown


@dataclass(frozen=True, slots=True)
class EngineState:
    """One engine's state. Example: EngineState("http://127.0.0.1:30000", is_up=True, is_live=True, version=12, ...)."""

    url: str
    is_up: bool  # it answers
    is_live: bool  # it samples: not fenced off
    version: int  # weight version; -1 means the initial weights, or unknown
    num_running: int  # requests being sampled
    num_waiting: int


class Engine(Protocol):
    """The client of one server, for one event loop.

    All methods are coroutines with a deadline; all raise `EngineError` naming server and request.
    """

    url: str

    @property
    def transport(self) -> WeightTransport: ...
    async def capabilities(self) -> Capabilities:
        """Return the streams that replies can carry, the transports, and the extras."""
        ...

    async def generate(self, request: GenerateRequest) -> GenerateResult: ...
    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult | EngineError]:
        """Sample all requests in one call, so that batches do not depend on when requests arrive.

        Returns a result or an error per request, in order. Raises EngineError if the call itself failed.
        """
        ...

    async def score(self, token_ids: Sequence[int], first: int, top_k: int) -> TokenScores:
        """Score the given tokens from index `first` (at least 1) to the last; needs the extra "score".

        Args:
            top_k: number of likeliest tokens to return at each position; may be 0.
        """
        ...

    async def hold(self, memory: Set[Memory]) -> None:
        """Hold this memory, and release the rest; needs the extra "release" and the pause mode "retract".

        Weights are lost with their memory: push them before `resume`.
        """
        ...

    async def abort(self, rid: str | None = None) -> None:
        """End one request, or all (None). Each returns with finish_reason "abort" and its tokens so far."""
        ...

    async def pause(self, mode: PauseMode) -> None: ...
    async def resume(self) -> None: ...
    async def health(self) -> bool:
        """Return whether `check_health` succeeds; never raises."""
        ...

    async def check_health(self) -> None:
        """Return if the server answers, paused or not. Raises EngineError if not, KeyRefusedError for a wrong key."""
        ...

    async def server_info(self) -> dict[str, Any]: ...
    async def load(self) -> tuple[int, int, int]:
        """Return the weight version (-1 means the initial weights) and the numbers of running and waiting requests."""
        ...

    async def start_profile(self, folder: str) -> None:
        """Start a trace; `stop_profile` writes it into a folder on the server's machine."""
        ...

    async def stop_profile(self) -> None: ...
    async def close(self) -> None:
        """Close the client; it cannot be used afterwards."""
        ...


def listed(memory: Set[str]) -> str:
    """Return memory as words. Example: listed({"weights", "kv_cache"}) == "kv_cache and weights"."""
    return " and ".join(sorted(memory))
