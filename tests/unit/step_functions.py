"""Environments for the tests, called in worker processes: the prompt's answer says what to do with a turn."""

import asyncio
import os
import threading
from typing import Any


def step(turn: dict[str, Any], state: Any) -> Any:
    """Answer as a plain function."""
    match turn["answer"]:
        case "count":
            count = (state or {"count": 0})["count"] + len(turn["token_ids"])
            return {"text": f"{count};", "state": {"count": count}, "reward": 0.5}
        case "end":
            return {"reward": {"right": 1.0, "short": -0.25}}
        case "failed":
            return {"failed": "no browser"}
        case "raise":
            raise LookupError(turn["text"])
        case "die":
            os._exit(3)
        case "hang":
            threading.Event().wait()
        case "long":
            return {"text": "x" * 2_000_000, "state": None}
    return turn["answer"]


async def astep(turn: dict[str, Any], state: Any) -> Any:
    """Answer as an asynchronous function."""
    if turn["answer"] == "hang":
        await asyncio.Event().wait()
    return step(turn, state)


def talk(turn: dict[str, Any], state: Any, *, num_answers: int = 2) -> Any:
    """Answer the first turns with how many tokens there were so far; reward odd numbers."""
    count = (state or 0) + len(turn["token_ids"])
    if turn["number"] > num_answers:
        return {"reward": float(count % 2)}
    return {"text": f"{count};", "state": count, "reward": 0.5 * (count % 2)}


def no_step(turn: dict[str, Any]) -> Any:
    """Take the wrong parameters."""
