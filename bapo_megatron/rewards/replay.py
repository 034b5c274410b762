"""Replay: objects with reset(seed) and step(text) as a step function, environment.kind = "replay:PATH".

Each step makes an object, resets it, plays all turns of the sample again and then the new one. So the answer depends on
turn and state alone, and a lost process or a killed run loses nothing. The state is a list of [text, digest]: the
policy's turns so far, and a digest of what the object answered up to each. Worker processes import this file too.
"""

import hashlib
import inspect
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from typing import Any

_RESULTS = "(observation, reward, done) or (observation, reward, terminated, truncated, info)"


@dataclass(frozen=True, slots=True)
class Replay:
    """A step function that plays with objects made by a function or class."""

    make: Callable[..., Any]

    @property
    def __wrapped__(self) -> Callable[..., Any]:  # messages name the user's function, not this file
        return self.make

    def __call__(self, turn: Mapping[str, Any], state: Sequence[Sequence[str]] | None, **options: Any) -> Any:
        """Play the turns of `state`, then `turn`, with a new object."""
        played = list(state or ())
        with opened(self.make(**options)) as game:
            digest = _digest("", _first_observation(game.reset(seed=seed_of(turn))))
            for number, (text, expected) in enumerate(played, 1):
                digest = _digest(digest, _played(game, text))
                if digest != expected:  # not {"failed": ...}: the policy may have looked for such words
                    raise ValueError(
                        f"turn {number}, played again, was answered differently: an environment that is replayed must "
                        "depend on nothing but its seed and the turns"
                    )
            observation, reward, is_over = answer = _played(game, turn["text"])
        if is_over:
            return {"reward": reward}
        state = [*played, [turn["text"], _digest(digest, answer)]]
        return {"text": observation, "reward": reward, "state": state}


def opened(game: Any) -> AbstractContextManager[Any]:
    """Return a context in which an object is used; it is closed at the end, if it can be."""
    return closing(game) if hasattr(game, "close") else nullcontext(game)


def seed_of(turn: Mapping[str, Any]) -> int:
    """Return the prompt's answer if it is an integer, or its integer "seed", or else a checksum of the prompt."""
    answer = turn["answer"]
    given = answer.get("seed") if isinstance(answer, Mapping) else answer
    return given if type(given) is int else zlib.crc32(turn["prompt"].encode())


def misfit_of(game: Any) -> str | None:
    """Return why an object cannot be replayed, or None."""
    for name, args, kwargs in (("reset", (), {"seed": 0}), ("step", ("text",), {})):
        method = getattr(game, name, None)
        if not callable(method):
            return f"it makes an object of type {type(game).__name__}, which has no {name}"
        if inspect.iscoroutinefunction(method):
            return f"the {name} of its objects is async"
        try:
            inspect.signature(method).bind(*args, **kwargs)
        except ValueError:  # a method that is not written in Python
            continue
        except TypeError as error:
            return f"the signature of its objects' {name} is {inspect.signature(method)}: {error}"
    return None


def _first_observation(answer: Any) -> str | None:
    first = answer[0] if isinstance(answer, tuple) and answer else answer
    return first if isinstance(first, str) else None


def _played(game: Any, text: str) -> tuple[Any, Any, bool]:
    answer = game.step(text)
    if not isinstance(answer, tuple) or len(answer) not in (3, 5):
        raise TypeError(f"step(text) returns {_RESULTS}, not {answer!r:.200}")
    observation, reward, *ends = answer[:4]
    return observation, reward.item() if hasattr(reward, "item") else reward, any(map(bool, ends))


def _digest(before: str, answer: Any) -> str:
    return hashlib.blake2b(f"{before}{answer!r}".encode(), digest_size=6).hexdigest()
