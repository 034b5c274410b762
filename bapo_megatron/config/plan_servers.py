"""Where servers of others are, and what SGLang is told in [sglang.extra] that the plan counts with."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from bapo_megatron.config.schema import Config
from bapo_megatron.config.violation import Violation

_DEFAULT_PORTS = {"http": 80, "https": 443}


def server_address(url: str) -> tuple[str, int] | None:
    """Host and port of a base URL; None where it is not one.

    Example: server_address("http://node3:30000") == ("node3", 30000); server_address("node3:30000") is None.
    """
    try:
        parts = urlsplit(url)
        port = _DEFAULT_PORTS.get(parts.scheme) if parts.port is None else parts.port
    except ValueError:  # a port above 65535, or half an IPv6 address
        return None
    return (parts.hostname, port) if parts.hostname and port and parts.scheme in _DEFAULT_PORTS else None


def check_servers(config: Config) -> Iterator[Violation]:
    """URLs, and the share of a GPU's memory."""
    r = config.rollout
    for url in r.urls if r.engine == "attach" else ():
        if server_address(url) is None:
            yield Violation(f'rollout.urls: "{url}" is no URL of a server; write it like "http://127.0.0.1:30000"')
    share = config.sglang.extra.get("mem_fraction_static")
    if share is not None and not (type(share) in (int, float) and 0 < share < 1):
        yield Violation(
            f"sglang.extra.mem_fraction_static={share!r} is no share of a GPU's memory, for weights and KV cache; set "
            "it between 0 and 1, such as 0.85, or leave it out"
        )
