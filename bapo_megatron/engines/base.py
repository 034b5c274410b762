"""The engine seam: the interface of a server. One contract suite runs against every implementation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from bapo_megatron.engines.update_group import GroupBackend
from bapo_megatron.engines.wire import Bucket, TensorSpec
from bapo_megatron.errors import EngineError
from bapo_megatron.tokens import Array, Rows, TokenStream

PauseMode = Literal["abort", "retract", "in_place"]

Extra = Literal["weight_manifest", "weight_digests", "score", "release"]
"""What a server can do beyond sampling: `WeightTransport.manifest` answers; `WeightTransport.digests` has a digest of
each weight as it was sent (engines/wire.py), and `take` of each that it received; `Engine.score` answers;
`Engine.release` does."""

Transport = Literal["gloo", "nccl", "disk"]
"""A way of weights into a server: a process group with this backend, or a folder that both sides see."""

_SGLANG = ("gloo", "nccl", "disk")


def _is_name(value: object) -> bool:
    return isinstance(value, str)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The abilities that one server names."""

    streams: frozenset[str]  # of models and plugins: replies can carry their rows
    transports: frozenset[str]  # `Transport`
    extras: frozenset[str]  # `Extra`

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> Capabilities:
        """Read the capabilities from a `server_info`; one that names none is SGLang's.

        Example: {"capabilities": ["score"], "transports": ["gloo"], "streams": ["routes"]}
        """
        of_sglang = ["score", "release"] if info.get("enable_memory_saver") else ["score"]
        named = (info.get("streams", []), info.get("transports", [*_SGLANG]), info.get("capabilities", of_sglang))
        return cls(*(frozenset(filter(_is_name, names if isinstance(names, list) else [])) for names in named))


@dataclass(frozen=True, slots=True)
class GroupSeat:
    """A server's place in a process group whose rank 0 sends the weights (engines/update_group.py)."""

    group: str  # its name
    host: str  # where the group's store listens
    port: int
    first_rank: int  # of the server's
    world_size: int
    backend: GroupBackend

    @property
    def is_flat(self) -> bool:
        """Whether a bucket comes as one buffer of bytes (engines/wire.py), instead of a broadcast for each weight."""
        return self.backend == "nccl"


@dataclass(frozen=True, slots=True)
class Folder:
    """A Hugging Face checkpoint that both sides see."""

    path: Path


class WeightTransport(Protocol):
    """The way of weights into one server. An update is `begin`, `take` of every bucket, `end`; or `take` of a folder.

    All methods are coroutines with a deadline, and raise `EngineError` naming the server.
    """

    async def join(self, seat: GroupSeat) -> None:
        """Take a seat in the group that sends the buckets of all later updates. Returns once all ranks have joined."""
        ...

    async def begin(self) -> None:
        """Begin an update; one that broke off before is dropped, since all its weights are replaced."""
        ...

    async def take(self, weights: Bucket | Folder, *, version: int | None, keeps_cache: bool = False) -> dict[str, str]:
        """Take the next weights. The trainer broadcasts those of a bucket while this call is in progress.

        Args:
            weights: a bucket announces them in the order of their bytes; a folder holds all.
            version: with the last bucket, or a folder: publishes the weights.
            keeps_cache: what requests have computed so far with older weights stays in use.

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
    stop_token_ids: tuple[int, ...]
    seed: int  # the same seed, tokens and weights give the same continuation
    top_p: float = 1.0  # sample from the likeliest tokens whose tempered probabilities sum to this or just above
    top_k: int | None = None  # and from no more than this many; None: all
    streams: tuple[TokenStream, ...] = ()  # of models and plugins: their rows are to be returned
    num_fed: int = 1  # leading tokens whose rows of fed streams are there already; the first token has none

    @property
    def is_cut(self) -> bool:
        """Whether tokens may be left out, so that the server is asked for log-probs of the rest, renormalised."""
        return self.top_p < 1 or self.top_k is not None


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Output tokens [start, end) were sampled by this weight version."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """Sampled tokens. `spans` cover all of them, in order.

    `behaviour_logprobs` are of the distribution sampled from: tempered, cut by `top_p` and `top_k`, and renormalised.
    """

    rid: str
    token_ids: tuple[int, ...]
    behaviour_logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    finish_reason: Literal["stop", "length", "abort"]
    num_prompt_tokens: int
    num_cached_tokens: int
    rows: Rows = field(default_factory=dict)  # of the request's streams: fed ones from token `num_fed` of its input on


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Log-probs of N given tokens, not tempered, and the likeliest tokens in their places, best first."""

    logprobs_N: Array  # float32
    top_ids_NK: Array  # int32
    top_logprobs_NK: Array  # float32


@dataclass(frozen=True, slots=True)
class EngineState:
    """One engine's state. Example: EngineState("http://127.0.0.1:30000", is_up=True, is_live=True, version=12, ...)."""

    url: str
    is_up: bool  # it answers
    is_live: bool  # it samples: not fenced off
    version: int  # of its weights; -1: the ones it started with, or unknown
    num_running: int  # requests that it samples
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
        """Sample all requests in one call, so that batches do not depend on the time of arrival.

        Returns a result or an error per request, in order. Raises EngineError if the call itself failed.
        """
        ...

    async def score(self, token_ids: Sequence[int], first: int, top_k: int) -> TokenScores:
        """Score given tokens from number `first` (at least 1) to the last; needs the extra "score".

        Args:
            top_k: number of likeliest tokens to return in each place; may be 0.
        """
        ...

    async def release(self) -> None:
        """Give back the memory of weights and cache; needs the extra "release" and a pause that keeps no cache."""
        ...

    async def restore(self) -> None:
        """Take the memory back. Weights are lost: a push must follow before `resume`."""
        ...

    async def abort(self, rid: str | None = None) -> None:
        """End one request, or all (None); they return with finish_reason "abort" and what they have so far."""
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
        """Return the weight version (-1: the weights it started with), and the requests running and waiting."""
        ...

    async def start_profile(self, folder: str) -> None:
        """Start a trace that `stop_profile` writes into a folder of the server's machine."""
        ...

    async def stop_profile(self) -> None: ...
    async def close(self) -> None:
        """Leave the server. The client is not used afterwards."""
        ...
