"""A judge that hangs on one response, and kills its process on another."""

import os
import time


def judge(response: str) -> float:
    """Anything but a hang or a crash is judged by the length."""
    match response:
        case "hang":
            time.sleep(600)
        case "crash":
            os._exit(1)
    return float(len(response))
