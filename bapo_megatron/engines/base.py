"""The engine seam: the interface of a server. One contract suite runs against every implementation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from bapo_megatron.engines.wire import TensorSpec
from bapo_megatron.errors import EngineError
from bapo_megatron.tokens import Rows, TokenStream

PauseMode = Literal["abort", "retract", "in_place"]

Capability = Literal["weight_manifest", "weight_digests", "gloo_only"]
"""Additions of a server to SGLang's API, listed under "capabilities" in its `server_info`: `weights_manifest`
answers; `weights_checksum` has a digest of each weight as it was sent (engines/wire.py), and `update_weights` of each
that it received; it receives over gloo only."""


def can(info: Mapping[str, Any], capability: Capability) -> bool:
    """Tell whether a server reports this capability in its `server_info`."""
    return capability in info.get("capabilities", ())


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

    async def generate(self, request: GenerateRequest) -> GenerateResult: ...
    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult | EngineError]:
        """Sample all requests in one call, so that batches do not depend on the time of arrival.

        Returns a result or an error per request, in order. Raises EngineError if the call itself failed.
        """
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

    async def init_update_group(
        self, address: str, port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None: ...
    async def begin_weight_update(self) -> None: ...
    async def update_weights(
        self, specs: Sequence[TensorSpec], group_name: str, *, flat: bool, version: int | None
    ) -> dict[str, str]:
        """Announce weights; the trainer broadcasts them on the group while this call is under way.

        Returns the digest of each weight as it arrived, if the server has capability "weight_digests".

        `flat`: as one buffer of bytes (see engines/wire.py), not one broadcast each. `version` is given with the last
        bucket only: it publishes the weights and flushes the cache.
        """
        ...

    async def end_weight_update(self) -> None: ...
    async def destroy_update_group(self, group_name: str) -> None: ...
    async def update_weights_from_disk(self, folder: str, *, version: int) -> None:
        """Load and publish a Hugging Face checkpoint folder that both sides see; no session and no group needed."""
        ...

    async def start_profile(self, folder: str) -> None:
        """Start a trace that `stop_profile` writes into a folder of the server's machine."""
        ...

    async def stop_profile(self) -> None: ...
    async def close(self) -> None:
        """Leave the server. The client is not used afterwards."""
        ...

    async def weights_checksum(self) -> dict[str, Any]: ...
    async def weights_manifest(self) -> list[TensorSpec]:
        """Describe every weight, in Hugging Face names; needs capability "weight_manifest"."""
        ...
