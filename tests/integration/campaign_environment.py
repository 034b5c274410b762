"""An environment of three turns that fails in every way: the tokens of a turn decide how, so that a test knows it."""

import asyncio
import json
import os
import threading
import zlib
from typing import Any

NUM_TURNS = 3
FAILURES = ("hang", "raise", "exit", "number", "no words", "no JSON", "failed")
_PERCENT = 2  # the share of turns that fail in each way
_PERCENT_LONG = 20


def kind_of(turn: dict[str, Any]) -> str:
    """Return what becomes of a turn: one of FAILURES, "answer", "long" or "end"."""
    asked = json.dumps([turn["prompt"], turn["number"], turn["token_ids"], turn["end"]])
    drawn = zlib.crc32(asked.encode()) % 100
    if drawn < _PERCENT * len(FAILURES):
        return FAILURES[drawn // _PERCENT]
    if turn["number"] == NUM_TURNS:
        return "end"
    return "long" if drawn >= 100 - _PERCENT_LONG else "answer"


def said(turn: dict[str, Any], state: Any) -> dict[str, Any]:
    """Return what is said to a turn that does not fail."""
    count = (state or {"count": 0})["count"] + len(turn["token_ids"])
    if (kind := kind_of(turn)) == "end":
        return {"reward": {"count": float(count), "last": -0.5}}
    words = f"{count}*{count}" if kind == "answer" else f"{count}+" * 20
    return {"text": words, "state": {"count": count}, "reward": 0.25 * (count % 2)}


def step(turn: dict[str, Any], state: Any) -> Any:
    """Answer as a plain function."""
    match kind_of(turn):
        case "hang":
            threading.Event().wait()
        case "raise":
            raise LookupError(turn["text"])
        case "exit":
            os._exit(3)
        case "number":
            return 42
        case "no words":
            return {"text": None}
        case "no JSON":
            return {"text": "1", "state": {1, 2}}
        case "failed":
            return {"failed": "no browser"}
    return said(turn, state)


async def astep(turn: dict[str, Any], state: Any) -> Any:
    """Answer as an asynchronous function, whose process many turns share."""
    if kind_of(turn) == "hang":
        await asyncio.Event().wait()
    return step(turn, state)
