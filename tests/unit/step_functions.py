"""Environments for the tests, called in worker processes: the prompt's answer says what to do with a turn."""

import asyncio
import os
import random
import threading
from typing import Any

import numpy as np


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
        case "wide":
            return {"text": "\u65e5" * 330_000}
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


class Game:
    """A guessing game with a state of its own, and with gymnasium's results if `is_gym`."""

    num_closed = 0

    def __init__(self, most: int = 99, *, is_gym: bool = False, is_seeded: bool = True) -> None:
        self.most, self.is_gym, self.is_seeded = most, is_gym, is_seeded

    def reset(self, *, seed: int) -> Any:
        self.rest = random.Random(seed if self.is_seeded else None).randint(0, 1 << 60)
        self.asked: list[str] = []
        return ("guess", {}) if self.is_gym else None

    def close(self) -> None:
        Game.num_closed += 1

    def step(self, text: str) -> Any:
        if text == "crash":
            raise LookupError(text)
        self.asked.append(text)
        found, is_late = text == str(self.rest % 10), len(self.asked) >= self.most
        said, reward = f"{self.rest % 1000003} {' '.join(self.asked)}", np.float32(found) / 2
        self.rest //= 7
        return (said, reward, found, is_late, {}) if self.is_gym else (said, reward, found or is_late)


class NoStep:
    """An object without a step."""

    def reset(self, seed: int) -> None: ...


class NoSeed(Game):
    """A game whose reset takes no seed."""

    def reset(self) -> None: ...  # type: ignore[override]


class AsyncGame(Game):
    """A game with an asynchronous step."""

    async def step(self, text: str) -> Any: ...


class OddGame(Game):
    """A game whose step returns no tuple."""

    def step(self, text: str) -> Any:
        return text


def no_game() -> Any:
    raise OSError("no display")
