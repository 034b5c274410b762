"""A judge that hangs on one response, and kills its process on another."""

import os
import signal


def judge(response: str) -> float:
    """Judge by length, unless the response asks for a hang or a crash."""
    match response:
        case "hang":
            signal.pause()
        case "crash":
            os._exit(1)
    return float(len(response))
