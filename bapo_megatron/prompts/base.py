"""Prompt sources: indexable lists of questions that depend only on settings and seed."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NotRequired, Protocol, TypeVar

from pydantic import ValidationError
from typing_extensions import TypedDict

from bapo_megatron.config.base import Section
from bapo_megatron.errors import DataError

_Options = TypeVar("_Options", bound=Section)


class Message(TypedDict):
    """A message of a conversation, in the form that chat templates take."""

    role: str
    content: str
    tool_calls: NotRequired[list[dict[str, Any]]]  # the arguments of each call are an object
    tool_call_id: NotRequired[str]
    name: NotRequired[str]
    reasoning_content: NotRequired[str]


@dataclass(frozen=True, slots=True)
class Question:
    """A question before tokenisation.

    Example: Question(text="3+5*2=", answer="2", where="chains item 7")
    """

    text: str  # in a conversation, the last message
    answer: Any  # JSON value, see types.Prompt.answer
    where: str  # its place, for error messages
    messages: tuple[Message, ...] = ()
    """The whole conversation, for the chat template; empty if it is only the user's text."""
    tools: tuple[dict[str, Any], ...] = ()
    """What the chat template shows as tools; see prompts/messages.py."""

    def conversation(self, system_prompt: str | None) -> list[dict[str, Any]]:
        """Return all messages, preceded by the system prompt unless the conversation has its own."""
        messages: list[Message] = [*self.messages] or [{"role": "user", "content": self.text}]
        if system_prompt is not None and messages[0]["role"] not in ("system", "developer"):
            messages.insert(0, {"role": "system", "content": system_prompt})
        return [{**message} for message in messages]

    def reworded(self, words: Callable[[str], str]) -> "Question":
        """Return the question with other words in the user's last message. Raises DataError without such a message.

        Args:
            words: maps the message's own words to the new ones.
        """
        if not self.messages:
            return replace(self, text=words(self.text))
        place = max((i for i, one in enumerate(self.messages) if one["role"] == "user"), default=None)
        if place is None:
            raise DataError(f"{self.where}: no message of the conversation is the user's")
        changed: Message = {**self.messages[place], "content": words(self.messages[place]["content"])}
        return replace(self, messages=(*self.messages[:place], changed, *self.messages[place + 1 :]))


class PromptSource(Protocol):
    """Questions by index; `source[i]` depends only on the settings, the seed and `i`."""

    name: str

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Question: ...


def read_options(section: type[_Options], source: str, options: dict[str, Any]) -> _Options:
    """Read a source's `[data.options]`. Raises DataError for unknown or contradictory options."""
    try:
        return section(**options)
    except ValidationError as error:
        reasons = "; ".join(
            ": ".join(filter(None, (".".join(map(str, e["loc"])), e["msg"].removeprefix("Value error, "))))
            for e in error.errors()
        )
        raise DataError(f"data.options of the source {source}: {reasons}") from error
