"""Under which address this machine is reached by others."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

LOOPBACK = "127.0.0.1"
_ANY_PORT = 9  # nothing is sent


def own_address(urls: Sequence[str]) -> str:
    """The address from which this machine talks to the first of these servers that is on another one.

    127.0.0.1 where all are on loopback, or cannot be found.
    """
    for url in urls:
        try:
            found = socket.getaddrinfo(urlsplit(url).hostname, _ANY_PORT, type=socket.SOCK_DGRAM)
            for family, kind, *_, address in found:
                if not ipaddress.ip_address(address[0]).is_loopback:
                    with socket.socket(family, kind) as probe:
                        probe.connect(address)  # of a datagram socket: chooses a route only
                        return probe.getsockname()[0]
        except OSError:  # it will be told as unreachable where it is asked for something
            continue
    return LOOPBACK
