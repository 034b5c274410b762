r"""What a chat template puts between a sampled turn and the next one: the tokens of new messages.

    sampled: 37*46?<|im_end|>
    given:   \n<|im_start|>user\n1702<|im_end|>\n<|im_start|>assistant\n

Rendering the real history again could change what was sampled: templates trim, drop thoughts, and write tool calls in
their own way. So a dummy history is rendered, with the new messages behind it; what follows its last end token is kept.
"""

import bisect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bapo_megatron.prompts.encoding import Options, chat_text, rendered_ids, words_ids

_TURN, _WORDS = "turn7Kq9", "words7Kq9"  # texts that no template contains
_CALL_ID = "call00000"  # nine letters and digits: Mistral's templates refuse others
_HOLE = "\ufdd0"  # no character: around a special token that a message spells
_QUESTION = {"role": "user", "content": "q"}
_NO_ARGUMENTS: tuple[Any, ...] = ({}, "{}")


class Continuation:
    """The chat template of a tokenizer, as turns continue in it.

    Args:
        options: the template's, as prompts get them.
    """

    def __init__(self, tokenizer: Any, options: Options) -> None:
        """Learn from dummy conversations how the template ends a turn, and which messages it shows after one."""
        self._tokenizer, self._options = tokenizer, options
        added = tokenizer.added_tokens_decoder.items()
        self._special = {token.content: int(token_id) for token_id, token in added if token.special and token.content}
        longest_first = sorted(self._special, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._end = self._find_end()
        self._refusals = {role: self._refused(role) for role in ("user", "tool")}

    @property
    def shows_tools(self) -> bool:
        """Whether the template shows the policy what tools there are."""
        return "tools" in str(self._tokenizer.chat_template)

    @property
    def end_id(self) -> int | None:
        """The token with which the template ends a turn; None if it has none."""
        return self._special.get(self._end)

    def refusal(self, role: str) -> str | None:
        """Return why no message of this role can follow a turn, or None if one can."""
        return self._refusals[role] if role in self._refusals else self._refused(role)

    def ids(
        self, messages: Sequence[Mapping[str, Any]], turn: Sequence[int], *, is_cut: bool, max_tokens: int
    ) -> tuple[list[int], bool]:
        """Return the tokens from the end of a turn to the beginning of the next one.

        Args:
            messages: what comes between, each with "role" and "content", both strings. Special tokens that they spell
                stay text.
            turn: the turn's tokens. Whatever special token stopped it is its end; otherwise the end is added.
            is_cut: whether a limit ended the turn.
            max_tokens: the most tokens to return. Words that do not fit are left out, the last ones first, but nothing
                of the template is.

        Returns the tokens, and whether words were left out.

        Raises:
            ValueError: the template does not take these messages, or has more tokens than `max_tokens` without them.
        """
        for role in dict.fromkeys(str(message["role"]) for message in messages):
            if (refusal := self.refusal(role)) is not None:
                other = 'return them with the role "user", or ' if role != "user" and self._end else ""
                raise ValueError(f"{refusal}; {other}return text")
        is_ended = not is_cut and bool(turn) and turn[-1] in self._special.values()
        end = [] if is_ended else [self._special[self._end]]

        def shortened(num_chars: int) -> list[int]:
            return [*end, *self._between(_first(messages, num_chars))]

        def is_too_long(num_chars: int) -> bool:
            return len(shortened(num_chars)) > max_tokens

        whole = sum(len(message["content"]) for message in messages)
        if len(token_ids := shortened(whole)) <= max_tokens:
            return token_ids, False
        high = max_tokens
        while high < whole and not is_too_long(high):
            high *= 2
        num_chars = bisect.bisect_left(range(min(high, whole)), True, key=is_too_long) - 1
        if num_chars < 0:
            raise ValueError(
                f"environment.max_answer_tokens={max_tokens} is less than the {len(shortened(0))} tokens that the chat "
                "template itself puts between two turns; set it higher"
            )
        return shortened(num_chars), True

    def whole(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Return the tokens of a conversation in the chat template, up to the opening of the policy's turn.

        Args:
            messages: as the template reads them, the policy's earlier ones included. Special tokens that they spell
                stay text.
            tools: what the template shows to the policy as its tools.

        Raises:
            ValueError: the template does not take these messages.
        """
        options = {**self._options, "tools": list(tools)} if tools else self._options

        def rendered(some: Sequence[Mapping[str, Any]]) -> str:
            try:
                return chat_text(self._tokenizer, [*map(dict, some)], options, opens_turn=True)
            except Exception as problem:  # a template may fail in any way
                reason = " ".join(str(problem).split()) or type(problem).__name__
                raise ValueError(f"the model's chat template refuses the messages: {reason}") from problem

        first, *others = self._pieces(messages, rendered)
        return [*rendered_ids(self._tokenizer, first), *self._piece_ids(others)]

    def _find_end(self) -> str:
        """Return the first special token after a turn, or "": it need not be the tokenizer's end of a sequence."""
        try:
            text = self._text([_QUESTION, *_turns(())], opens_turn=False)
        except Exception:  # a template may fail in any way
            return ""
        found = self._pattern.search(text.rpartition(_TURN)[2])
        return found[0] if found else ""

    def _refused(self, role: str) -> str | None:
        if not self._end:
            return "the model's chat template ends a turn with no special token, so no message can follow it"
        try:
            text = self._rendered([{"role": role, "content": _WORDS}])
        except ValueError as problem:
            return f"the model's chat template refuses {role!r} messages after a turn: {problem}"
        if _WORDS not in text:
            return f"the model's chat template does not show {role!r} messages after a turn"
        return None

    def _between(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens after a turn's end. Raises ValueError like `ids`."""
        first, *others = self._pieces(messages, self._rendered)
        return [*self._rendered_ids(first), *self._piece_ids(others)]

    def _pieces(
        self, messages: Sequence[Mapping[str, Any]], rendered: Callable[[Sequence[Mapping[str, Any]]], str]
    ) -> list[str]:
        """Return what the template writes, cut around each special token that the messages spell."""
        marked = [self._marked(message, rf"{_HOLE}\g<0>{_HOLE}") for message in messages]
        pieces = rendered(marked).split(_HOLE)
        if marked != list(messages):
            self._check_pieces(pieces, rendered([self._marked(message, "?") for message in messages]))
        return pieces

    def _piece_ids(self, pieces: Sequence[str]) -> list[int]:
        """Return the tokens of pieces after the first: a spelled token, what follows it, and so on."""
        token_ids: list[int] = []
        for word, piece in zip(pieces[::2], pieces[1::2], strict=True):
            token_ids += [*words_ids(self._tokenizer, word), *self._rendered_ids(piece)]
        return token_ids

    def _rendered_ids(self, text: str) -> list[int]:
        """Return the tokens of a text behind a special token, where tokenizers may add no space."""
        if not text:
            return []
        token_ids = rendered_ids(self._tokenizer, f"{self._end}{text}")
        return token_ids[token_ids.index(self._special[self._end]) + 1 :]

    def _check_pieces(self, pieces: Sequence[str], harmless: str) -> None:
        """Check that the holes came out of the template as they were put in: JSON with escapes would hide them."""
        found = [token for piece in pieces[::2] for token in self._pattern.findall(piece)]
        if len(pieces) % 2 == 0 or found != self._pattern.findall(harmless):
            raise ValueError("a message spells a special token, and the chat template cannot show it as text")

    def _marked(self, message: Mapping[str, Any], instead: str) -> dict[str, Any]:
        """Return a message in which special tokens that its words spell are replaced."""

        def marked(value: Any) -> Any:
            if isinstance(value, str):
                return self._pattern.sub(instead, value.replace(_HOLE, "\ufffd"))
            if isinstance(value, Mapping):
                return {marked(key): marked(part) for key, part in value.items()}
            return [marked(part) for part in value] if isinstance(value, list | tuple) else value

        return {key: part if key == "role" else marked(part) for key, part in message.items()}

    def _rendered(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the text from the end of a dummy turn to the beginning of the next one.

        Raises:
            ValueError: the template refuses the messages; says why.
        """
        messages = [_identified(message) for message in messages]
        problems = []
        for turn in _turns(messages):
            history = [_QUESTION, turn]
            try:
                num_ends = self._text(history, opens_turn=False).count(self._end)
                parts = self._text([*history, *messages], opens_turn=True).split(self._end, num_ends)
            except Exception as problem:  # a template may fail in any way
                problems.append(" ".join(str(problem).split()) or type(problem).__name__)
                continue
            if len(parts) == num_ends + 1 and _TURN not in parts[-1]:
                return parts[-1]
            problems.append(f"it writes the turn before them with another number of {self._end}")
        raise ValueError(problems[0])

    def _text(self, messages: Sequence[Mapping[str, Any]], *, opens_turn: bool) -> str:
        return chat_text(self._tokenizer, [*map(dict, messages)], self._options, opens_turn=opens_turn)


def _identified(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with the names that some templates ask of a tool's."""
    return {"name": "tool", "tool_call_id": _CALL_ID, **message} if message["role"] == "tool" else message


def _turns(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield dummy turns before the messages, first the one that calls what they answer. Templates differ in what they
    take: arguments as an object or as text, one call in a turn, or none."""
    tools = [message for message in messages if message["role"] == "tool"]
    for called, arguments in itertools.product((tools, tools[:1]) if tools else (), _NO_ARGUMENTS):
        named = [(tool["tool_call_id"], {"name": tool["name"], "arguments": arguments}) for tool in called]
        calls = [{"id": call_id, "type": "function", "function": function} for call_id, function in named]
        yield {"role": "assistant", "content": _TURN, "tool_calls": calls}
    yield {"role": "assistant", "content": _TURN}


def _first(messages: Sequence[Mapping[str, Any]], num_chars: int) -> list[dict[str, Any]]:
    """Return the messages with no more than the first characters of their contents."""
    kept = []
    for message in messages:
        kept.append({**message, "content": message["content"][: max(num_chars, 0)]})
        num_chars -= len(message["content"])
    return kept
