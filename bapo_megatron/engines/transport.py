"""Sending weights to a server over SGLang's HTTP API: through a process group, or from a folder in one call."""

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from bapo_megatron.engines.base import Folder, GroupSeat
from bapo_megatron.engines.wire import Bucket, TensorSpec
from bapo_megatron.errors import EngineError, UnreachableEngineError, plural

_MAX_WEIGHTS_REPLY = 64 << 20  # bytes: name and digest of each weight, for each rank; 100 B of experts take 24 MiB


class HttpTransport:
    """Implements `WeightTransport`."""

    def __init__(self, url: str, call: Callable[..., Awaitable[Any]]) -> None:
        """`call` sends a request (method, path, body) to the server and returns the decoded reply."""
        self._url = url
        self._call = call
        self._seat: GroupSeat | None = None

    async def join(self, seat: GroupSeat) -> None:
        """See `WeightTransport.join`."""
        body = {
            "master_address": seat.host,
            "master_port": seat.port,
            "rank_offset": seat.first_rank,
            "world_size": seat.world_size,
            "group_name": seat.group,
            "backend": seat.backend,
        }
        await self._call("POST", "/init_weights_update_group", body)
        self._seat = seat

    async def begin(self) -> None:
        """See `WeightTransport.begin`."""
        try:
            await self._call("POST", "/begin_weight_update", {})
        except UnreachableEngineError:
            raise
        except EngineError:  # a session may have been left open
            with contextlib.suppress(EngineError):  # it may answer that its weights are torn
                await self.end()
            await self._call("POST", "/begin_weight_update", {})

    async def take(self, weights: Bucket | Folder, *, version: int | None, keeps_cache: bool = False) -> dict[str, str]:
        """See `WeightTransport.take`."""
        body: dict[str, Any] = {"flush_cache": version is not None and not keeps_cache}
        if version is not None:
            body["weight_version"] = str(version)
        if isinstance(weights, Folder):
            await self._call("POST", "/update_weights_from_disk", body | {"model_path": str(weights.path)})
            return {}
        assert self._seat is not None, "join() comes before take()"
        specs = weights.specs
        body |= {
            "names": [spec.name for spec in specs],
            "dtypes": [spec.dtype for spec in specs],
            "shapes": [spec.shape for spec in specs],
            "group_name": self._seat.group,
            "load_format": "flattened_bucket" if self._seat.is_flat else None,
        }
        what = f"{plural(len(specs), 'weight')} from {specs[0].name} to {specs[-1].name}"  # SGLang's refusal names none
        reply = as_dict(await self._call("POST", "/update_weights_from_distributed", body, what=what))
        if reply.get("success") is not True:
            raise EngineError(f"{self._url}/update_weights_from_distributed, {what}: the reply does not confirm them")
        return as_dict(reply.get("digests"))

    async def end(self) -> None:
        """See `WeightTransport.end`."""
        await self._call("POST", "/end_weight_update", {})

    async def leave(self) -> None:
        """See `WeightTransport.leave`."""
        seat, self._seat = self._seat, None
        if seat is not None:
            await self._call("POST", "/destroy_weights_update_group", {"group_name": seat.group})

    async def digests(self) -> dict[str, Any]:
        """See `WeightTransport.digests`."""
        return as_dict(await self._check_weights("checksum"))

    async def manifest(self) -> list[TensorSpec]:
        """See `WeightTransport.manifest`."""
        reply = as_dict(await self._check_weights("manifest"))
        try:
            return [
                TensorSpec(str(name), str(dtype), tuple(map(int, shape))) for name, dtype, shape in reply["weights"]
            ]
        except (KeyError, TypeError, ValueError):
            raise EngineError(f"{self._url}/weights_checker: the reply is not a list of weights") from None

    async def _check_weights(self, action: str) -> Any:
        return await self._call("POST", "/weights_checker", {"action": action}, max_bytes=_MAX_WEIGHTS_REPLY)


def as_dict(value: Any) -> dict[str, Any]:
    """Return a part of a reply that should be an object; return an empty dict for anything else."""
    return value if isinstance(value, dict) else {}
