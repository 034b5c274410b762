"""Judges as users may write them, for test_reward_hooks.py: what each does is the text of the response."""

import asyncio
import ctypes
import os
import sys
import time
from functools import partial

from bapo_megatron.errors import UserError

NOT_CALLABLE = 3
_judging: list[str] = []


def plain(answer, response):
    print("judges may print to standard output", response)
    return act(response, answer)


def with_torch(response):
    return float("torch" in sys.modules)


async def in_time(response):
    await asyncio.sleep(0.3)
    return act(response)


async def together(response):
    """Return once 60 responses are being judged at the same time."""
    _judging.append(response)
    while len(_judging) < 60:
        await asyncio.sleep(0.01)
    return act(response)


async def networked(response, **everything):
    assert set(everything) >= {"prompt", "answer", "source"}
    if response == "wait":
        await asyncio.sleep(1000)
    return act(response)


class Judge:
    async def __call__(self, response):
        return act(response)

    def method(self, response):
        return act(response)


instance = Judge()
part = partial(act_on := lambda response, factor: factor * float(response), factor=2.0)


def wrong_parameter(reply):
    return 1.0


def no_response(answer):
    return 1.0


def positional(response, /):
    return 1.0


def act(response, answer=None):
    match response:
        case "hang":
            while True:
                pass
        case "block":
            time.sleep(1000)
        case "exit":
            os._exit(3)
        case "exit without an error":
            os._exit(0)
        case "segfault":
            ctypes.string_at(0)
        case "memory bomb":
            return len(bytearray(1 << 33))
        case "half a GiB":
            return len(bytearray(1 << 29)) >> 29
        case "leave a child behind":
            if (child := os.fork()) == 0:
                time.sleep(1000)
            if path := os.environ.get("CHILDREN"):
                with open(path, "a") as file:
                    file.write(f"{child}\n")
            os._exit(1)
        case "raise":
            raise RuntimeError("on purpose")
        case "leave":
            raise SystemExit(0)
        case "bad data":
            raise UserError("the data is wrong")
        case "nan":
            return float("nan")
        case "text":
            return "1"
        case "nothing":
            return None
        case "table":
            return {"reward": 1.0}
        case "answer":
            return answer
    return float(response)
