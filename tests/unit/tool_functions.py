"""Tools for the tests, called in worker processes."""

import threading
from typing import Any, Literal

from pydantic import BaseModel, field_validator


def search(query: str, limit: int = 1, kinds: list[Literal["cat", "dog"]] | None = None) -> dict[str, Any]:
    """Search for something.

    Args:
        query: What to search for.
        limit: How many results.
        kinds: Kinds of results.
    """
    return {"query": query, "limit": limit, "kinds": kinds}


async def shout(text: str) -> str:
    """Return a text in capitals.

    Args:
        text: The text.
    """
    return text.upper()


class City(BaseModel):
    """A place."""

    name: str

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        raise LookupError(f"no city {name}")


def weather(city: City) -> str:
    """Tell the weather.

    Args:
        city: Where.
    """
    return city.name


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first one.
        b: The second one.
    """
    return a + b


def broken(kind: str) -> Any:
    """Fail in a way of the model's choice.

    Args:
        kind: The way.
    """
    match kind:
        case "raise":
            raise LookupError("no such page")
        case "object":
            return object()
        case "nan":
            return float("nan")
        case "exit":
            raise SystemExit("usage")
        case "hang":
            threading.Event().wait()
        case "surrogate":
            return "\ud800"
    return None


def no_hint(query) -> str:  # type: ignore[no-untyped-def]
    """Search.

    Args:
        query: What to search for.
    """
    return query


def no_docstring(query: str) -> str:
    return query


def no_description(query: str) -> str:
    """Search."""
    return query


def any_number(*queries: str) -> str:
    """Search.

    Args:
        queries: What to search for.
    """
    return " ".join(queries)


def unknown_hint(query: "NoSuchType") -> str:  # type: ignore[name-defined]  # noqa: F821
    """Search.

    Args:
        query: What to search for.
    """
    return str(query)


class Other:
    """A place for a tool with the same name."""

    @staticmethod
    def search(query: str) -> str:
        """Search elsewhere.

        Args:
            query: What to search for.
        """
        return query


NUMBER = 3
