"""A judge that hangs on some responses and kills its process on others."""

import os
import time
import zlib


def judge(response: str) -> float:
    """Anything but a hang or a crash is judged by the length."""
    match zlib.crc32(response.encode()) % 97:
        case 0:
            time.sleep(600)
        case 1:
            os._exit(1)
    return float(len(response))
