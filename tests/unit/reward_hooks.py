"""Judges as users may write them, for test_reward_hooks.py; the response's text says what each does."""

import asyncio
import ctypes
import os
import signal
import sys
from functools import partial

from bapo_megatron.errors import UserError

NOT_CALLABLE = 3
NUM_TOGETHER = 60
NUM_BESIDE_A_CRASH = 5
_judging: list[str] = []
_all_are_here = asyncio.Event()
_pipes = []


def plain(answer, response):
    print("judges may print to standard output", response)
    return act(response, answer)


def killed_once(response):
    """Wait for the end of the process if the response says so, and judge the response the next time."""
    number, _, what = response.partition(": ")
    if what and _is_first_time(number):
        act(what)
    return act(number)


def with_torch(response):
    return float("torch" in sys.modules)


async def together(response):
    """Return once NUM_TOGETHER responses are being judged at the same time."""
    await _others(response, NUM_TOGETHER)
    return act(response)


async def beside_a_crash(response):
    """Judge nothing until all are here. A number then waits for the process to end, and is judged the next time."""
    if _is_first_time(response):
        await _others(response, NUM_BESIDE_A_CRASH)
        if response.isdecimal():
            await asyncio.Event().wait()
    return act(response)


async def _others(response, number):
    _judging.append(response)
    if len(_judging) == number:
        _all_are_here.set()
    await _all_are_here.wait()


def _is_first_time(response):
    """Return whether no process was asked this before; processes with the same folder SEEN share the answer."""
    try:
        os.close(os.open(os.path.join(os.environ["SEEN"], response), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _say(line):
    """Tell the test, through the pipe SAID if there is one; this process and its children then hold the pipe open."""
    if path := os.environ.get("SAID"):
        _pipes.append(open(path, "w"))  # noqa: SIM115
        print(line, file=_pipes[-1], flush=True)


async def networked(response, **everything):
    assert set(everything) >= {"prompt", "answer", "source"}
    if response == "wait":
        await asyncio.Event().wait()
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


def in_parts(response, answer):
    """Return parts by name with a reason, or whatever the response asks for."""
    match response:
        case "no format":
            return {"correct": 1.0}
        case "a number":
            return 1.0
        case "half a part":
            return {"correct": 1.0, "format": "good"}
    return {"correct": float(response == str(answer)), "format": len(response)}, f"I read {response}"


def reasoned(response):
    return 0.5, "so so"


async def waits(response):
    await asyncio.sleep(0)
    return 2.0


def act(response, answer=None):
    match response:
        case "hang":
            _say(os.getpid())
            while True:
                pass
        case "block":
            signal.pause()
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
        case "wait to be killed":
            _say(os.getpid())
            signal.pause()
        case "leave a child behind":
            _say("one")
            if os.fork() == 0:
                os.setsid()
                signal.pause()
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
