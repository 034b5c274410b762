"""Requests of an agent program, matched to the tokens that its earlier requests have led to.

    stored     system, user | turn 1 | tool | turn 2
    request    system, user, turn 1, tool, turn 2, tool'      the stored tokens, then tool'
    request    system, user, turn 1, tool'                    a branch: the tokens up to turn 1, then tool'
    request    system, user'                                  a sequence of its own, from the chat template

Messages are compared, never text with tokens: by role, text, and calls with their arguments as JSON. A turn of the
policy is stored as it was sampled; it becomes tokens again only in a history that it has no place in, as context.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from bapo_megatron.errors import plural
from bapo_megatron.prompts.continuation import Continuation, TooLongError
from bapo_megatron.runtime.bodies import BadRequestError
from bapo_megatron.types import Given, NeedsEnvironment, NeedsTokens, Sample, Segment, Trajectory

Message = Mapping[str, Any]
"""A message as chat templates read it: "role"; "content", a string; perhaps "tool_calls", whose arguments are JSON."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for a turn of the policy."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()  # what the policy may call, as the request describes it
    calls: bool = True  # whether calls in its turn are looked for
    max_tokens: int | None = None  # a limit of the turn


class ContextError(BadRequestError):
    """A request that does not fit into what a sample may still have."""

    code: ClassVar[str | None] = "context_length_exceeded"


@dataclass(frozen=True, slots=True)
class _Place:
    """A place in a stored sequence from which it can be continued: after a turn, or after the first request."""

    messages: tuple[Message, ...]  # up to here
    tools: tuple[Mapping[str, Any], ...]
    trajectory: int
    num_tokens: int  # up to here
    turn: tuple[int, ...] | None  # the tokens of the turn that ends here; None after the first request
    is_cut: bool = False  # whether a limit ended the turn

    def leads_to(self, asked: Asked) -> bool:
        """Return whether only new messages follow this place in a request: none after a request that is repeated."""
        new = asked.messages[len(self.messages) :]
        if self.tools != asked.tools or any(message["role"] == "assistant" for message in new):
            return False
        has_fitting_end = bool(new) if self.turn is not None else len(asked.messages) == len(self.messages)
        return has_fitting_end and all(map(_are_same, self.messages, asked.messages))


@dataclass(slots=True)
class Conversations:
    """All that the program of one sample has asked, and where the turns are in the sample's trajectories."""

    chat: Continuation
    max_given_tokens: int  # in one trajectory, its first request included
    _places: list[_Place] = field(default_factory=list)

    def continued(self, sample: Sample, asked: Asked) -> Sample:
        """Return the sample with the tokens of a request's new messages; it needs the next turn.

        Raises:
            ContextError: the messages are too long.
            BadRequestError: the chat template does not take them.
        """
        if asked.messages[-1]["role"] == "assistant":
            raise BadRequestError("messages: the last one is the assistant's; the policy begins its turns itself")
        place = self._place(sample, asked)
        index = len(sample.trajectories)
        try:
            if place is None:
                token_ids = self.chat.whole(asked.messages, asked.tools, self.max_given_tokens)
                grown = Trajectory((Segment.given("prompt", token_ids),))
            else:
                grown = sample.trajectories[place.trajectory]
                if grown.num_tokens == place.num_tokens and place.turn is not None:
                    index = place.trajectory
                else:
                    grown = grown.branch(place.num_tokens)
                if place.turn is not None:
                    grown = grown.extended([Segment.given("environment", self._between(place, asked))])
        except TooLongError as problem:
            raise self._too_long() from problem
        except ValueError as problem:
            raise BadRequestError(f"messages: {problem}") from problem
        if sum(s.num_tokens for s in grown.segments if _is_given(s)) > self.max_given_tokens:
            raise self._too_long()
        if not grown.num_tokens:
            raise BadRequestError("messages: the chat template writes nothing for them")
        if place is None:
            self._places.append(_Place(asked.messages, asked.tools, index, grown.num_tokens, None))
        return replace(sample.with_trajectory(index, grown), need=NeedsTokens(index, asked.max_tokens))

    def keep(self, sample: Sample, asked: Asked, reply: Message, *, is_cut: bool) -> None:
        """Remember the turn that has just ended, and the message that the program got for it."""
        assert isinstance(sample.need, NeedsEnvironment), f"{sample.sample_id} has no turn that ended"
        index, turn = sample.need.trajectory, tuple(sample.turn.turns[-1].tolist())
        messages = (*asked.messages, reply)
        self._places.append(_Place(messages, asked.tools, index, sample.turn.num_tokens, turn, is_cut=is_cut))

    def _place(self, sample: Sample, asked: Asked) -> _Place | None:
        """Return the latest place in a history that leads to a request, if possible one without a branch; or None."""
        found = [place for place in self._places if place.leads_to(asked)]

        def rank(place: _Place) -> tuple[int, bool]:
            is_end = sample.trajectories[place.trajectory].num_tokens == place.num_tokens
            return len(place.messages), is_end

        return max(found, key=rank, default=None)

    def _between(self, place: _Place, asked: Asked) -> Sequence[int]:
        """Return the tokens of the messages after a turn. Raises ValueError."""
        assert place.turn is not None
        new = [_named(message, asked.messages) for message in asked.messages[len(place.messages) :]]
        return self.chat.all_ids(new, place.turn, is_cut=place.is_cut, max_tokens=self.max_given_tokens)

    def _too_long(self) -> ContextError:
        return ContextError(
            f"messages: without the policy's turns they have more than the {plural(self.max_given_tokens, 'token')} of "
            "data.max_prompt_tokens + (environment.max_turns - 1) x environment.max_answer_tokens"
        )


def _is_given(segment: Segment) -> bool:
    """Whether nobody's policy sampled a segment: neither here, nor in the trajectory that a branch comes from."""
    return isinstance(segment.origin, Given) and segment.origin.by != "trajectory"


def _named(message: Message, history: Sequence[Message]) -> Message:
    """Return a tool's message with the name of the tool whose call it answers, for templates that show it."""
    if message["role"] != "tool":
        return message
    calls = {call["id"]: call["function"]["name"] for one in history for call in one.get("tool_calls", ())}
    name = message.get("name") or calls.get(message.get("tool_call_id"))
    return {**message, **({} if name is None else {"name": name})}


def _are_same(mine: Message, other: Message) -> bool:
    """Return whether a message of a request is the stored one."""
    return _essence(mine) == _essence(other)


def _essence(message: Message) -> tuple[Any, ...]:
    """Return what makes two messages the same. Thoughts and ids of calls may change on their way, and white space
    around a turn."""
    text = message["content"].strip() if message["role"] == "assistant" else message["content"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return message["role"], text, calls
