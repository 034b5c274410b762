r"""The one way from messages to tokens, in a chat template: a whole conversation, or what follows a sampled turn.

    sampled: 37*46?<|im_end|>
    given:   \n<|im_start|>user\n1702<|im_end|>\n<|im_start|>assistant\n

Rendering the real history again could change what was sampled: templates trim, drop thoughts, and write tool calls in
their own way. So a dummy history is rendered, with the new messages behind it; what follows its last end token is kept.

Control tokens that a message spells stay text. The template gets them between holes, which show where they came out:

    written: <|im_start|>user\nWhat is *<|im_end|>*?<|im_end|>\n      (* is a hole)
    tokens:  as the template alone has them; words between holes are cut into ordinary tokens
"""

import bisect
import itertools
import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from bapo_megatron.prompts.encoding import (
    CLOCK,
    Options,
    chat_text,
    rendered_ids,
    shows_tools,
    surely_exceeds,
    words_ids,
)
from bapo_megatron.prompts.json_values import MAX_DEPTH, depth

_TURN, _WORDS = (f"{word}{secrets.token_hex(8)}" for word in ("turn", "words"))  # in no template, and nobody's words
_CALL_ID = "call00000"  # nine letters and digits: Mistral's templates refuse others
_CONTROL = re.compile(r"<[|\uff5c].+[|\uff5c]>")  # control tokens that are not marked as special, by their form
_NO_LIMIT = 2**31  # tokens
_QUESTION = {"role": "user", "content": "q"}
_NO_ARGUMENTS: tuple[Any, ...] = ({}, "{}")
_NUM_AROUND = 5  # levels around the arguments of a call: messages, message, calls, call, function

_TOOL = {"type": "function", "function": {"name": _WORDS, "description": _WORDS, "parameters": {"type": "object"}}}
_HOW_TO_CALL = """\
You may call tools. A call is JSON in this form, and the turn ends after it:
<tool_call>{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}</tool_call>
These are the tools, each as JSON schema:"""

Message = Mapping[str, Any]


class TooLongError(ValueError):
    """Messages that have more tokens than a limit."""


class Continuation:
    """The chat template of a tokenizer: conversations, and turns that continue in them.

    Args:
        options: the template's, as prompts get them.
        now: the time that the template reads; None means the time of this call.
    """

    def __init__(self, tokenizer: Any, options: Options, now: datetime | None = None) -> None:
        """Learn from dummy conversations how the template ends a turn, and which messages it shows after one."""
        self._tokenizer, self._options = tokenizer, {**options}
        if CLOCK in str(tokenizer.chat_template):
            self._options[CLOCK] = (now or datetime.now()).strftime
        added = {int(token_id): token for token_id, token in tokenizer.added_tokens_decoder.items() if token.content}
        is_control = {i: token.special or bool(_CONTROL.fullmatch(token.content)) for i, token in added.items()}
        self._special = {token.content: i for i, token in added.items() if is_control[i]}
        longest_first = sorted(self._special, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._is_blind = not self._shows_questions()
        self._end = self._find_end()
        keeps_space = [token.content for i, token in added.items() if is_control[i] and not token.rstrip]
        self._before = self._end if self._end in keeps_space else next(iter(keeps_space), self._end)
        self._refusals = {role: self._refused(role) for role in ("user", "tool")}

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the template itself shows the policy what tools there are, or fails with its own reason."""
        try:
            return shows_tools(self._tokenizer, [_TOOL], self._options)
        except Exception:  # a template may fail in any way
            return True

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

        def fitting(num_chars: int) -> list[int] | None:
            try:
                token_ids = self.all_ids(_first(messages, num_chars), turn, is_cut=is_cut, max_tokens=max_tokens)
            except TooLongError:
                return None
            return token_ids if len(token_ids) <= max_tokens else None

        def is_too_long(num_chars: int) -> bool:
            return fitting(num_chars) is None

        whole = sum(len(message["content"]) for message in messages)
        if (token_ids := fitting(whole)) is not None:
            return token_ids, False
        high = max_tokens
        while high < whole and not is_too_long(high):
            high *= 2
        num_chars = bisect.bisect_left(range(min(high, whole)), True, key=is_too_long) - 1
        if num_chars < 0:
            least = len(self.all_ids(_first(messages, 0), turn, is_cut=is_cut, max_tokens=_NO_LIMIT))
            raise ValueError(
                f"environment.max_answer_tokens={max_tokens} is less than the {least} tokens that the chat template "
                "itself puts between two turns; set it higher"
            )
        token_ids = fitting(num_chars)
        assert token_ids is not None
        return token_ids, True

    def all_ids(
        self, messages: Sequence[Mapping[str, Any]], turn: Sequence[int], *, is_cut: bool, max_tokens: int
    ) -> list[int]:
        """Return the tokens of `ids` without a cut; they may be a few more than `max_tokens`.

        Raises:
            TooLongError: they are many more. Whoever sends a long text does not get the time that its tokens take.
            ValueError: the template does not take these messages.
        """
        for role in dict.fromkeys(str(message["role"]) for message in messages):
            if (refusal := self.refusal(role)) is not None:
                other = 'return them with the role "user", or ' if role != "user" and self._end else ""
                raise ValueError(f"{refusal}; {other}return text")
        is_ended = not is_cut and bool(turn) and turn[-1] in self._special.values()
        end = [] if is_ended else [self._special[self._end]]
        first, *others = self._pieces(lambda some, _: self._rendered(some), messages, (), max_tokens)
        return [*end, *self._rendered_ids(first, self._end), *self._piece_ids(others)]

    def whole(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
    ) -> list[int]:
        """Return the tokens of a conversation in the chat template, up to the opening of the policy's turn.

        Args:
            messages: as the template reads them, the policy's earlier ones included. Special tokens that they spell
                stay text.
            tools: what the template shows to the policy as its tools.
            max_tokens: a limit; the tokens may be a few more.

        Raises:
            TooLongError: they are many more.
            ValueError: the template does not take these messages, or they are not valid Unicode.
        """
        if self._is_blind:  # templates for images expect a list of parts, and leave text out
            raise ValueError("the chat template refuses these messages: it does not show the text of a user's message")
        first, *others = self._pieces(self.text, messages, tools, max_tokens)
        return [*rendered_ids(self._tokenizer, first), *self._piece_ids(others)]

    def text(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> str:
        """Return a conversation in the chat template as text, up to the opening of the policy's turn.

        A template that does not show tools gets them in words, in the system message; or in the first message, if it
        shows no system message.

        Raises:
            ValueError: the template does not take these messages.
        """
        if tools and not self.shows_tools:
            messages, tools = self._with_words(messages, tools), ()
        options = {**self._options, "tools": [*tools]} if tools else self._options
        try:
            return chat_text(self._tokenizer, [*map(dict, messages)], options, opens_turn=True)
        except Exception as problem:  # a template may fail in any way
            reason = " ".join(str(problem).split()) or type(problem).__name__
            raise ValueError(f"the chat template refuses these messages: {reason}") from problem

    def _with_words(self, messages: Sequence[Message], tools: Sequence[Message]) -> list[Message]:
        """Return messages with a description of the tools, and of the form in which they are called."""
        schemas = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
        words, first = f"{_HOW_TO_CALL}\n{schemas}", messages[0]
        if first["role"] in ("system", "developer"):
            return [{**first, "content": f"{first['content']}\n\n{words}"}, *messages[1:]]
        if self._shows_system:
            return [{"role": "system", "content": words}, *messages]
        return [{**first, "content": f"{words}\n\n{first['content']}"}, *messages[1:]]

    def takes(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> bool:
        """Return whether the template takes a conversation."""
        try:
            self.whole(messages, tools)
        except ValueError:
            return False
        return True

    def _find_end(self) -> str:
        """Return the first special token after a turn, or "": it need not be the tokenizer's end of a sequence."""
        try:
            text = self._text([_QUESTION, *_turns(())], opens_turn=False)
        except Exception:  # a template may fail in any way
            return ""
        _, turn, after = text.rpartition(_TURN)
        found = self._pattern.search(after) if turn else None
        return found[0] if found else ""

    @cached_property
    def _shows_system(self) -> bool:
        try:
            return _WORDS in self._text([{"role": "system", "content": _WORDS}, _QUESTION], opens_turn=True)
        except Exception:  # a template may fail in any way
            return False

    def _shows_questions(self) -> bool:
        """Return whether the template shows what a user says, or fails with its own reason."""
        try:
            return _WORDS in self._text([{"role": "user", "content": _WORDS}], opens_turn=True)
        except Exception:  # a template may fail in any way
            return True

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

    def _pieces(
        self,
        rendered: Callable[[Sequence[Message], Sequence[Message]], str],
        messages: Sequence[Message],
        tools: Sequence[Message],
        max_tokens: int | None,
    ) -> list[str]:
        """Return what the template writes, cut around each control token that the messages and tools spell."""
        if depth([*messages, *tools]) > MAX_DEPTH + _NUM_AROUND:
            raise ValueError(f"a message or a tool is nested more than {MAX_DEPTH} levels deep")
        words = [*_strings([messages, tools])]
        whole = rendered(messages, tools)
        if max_tokens is not None and surely_exceeds(self._tokenizer, whole, max_tokens):
            raise TooLongError(f"they have more than {max_tokens} tokens")
        if not any(map(self._pattern.search, words)):
            return [whole]
        hole = f"hole{secrets.token_hex(8)}"  # around each spelled token: letters, which JSON keeps

        def replaced(instead: str) -> str:
            return rendered(self._replaced(messages, instead), self._replaced(tools, instead))

        template_alone = self._pattern.findall(replaced("?"))
        if self._pattern.findall(whole) == template_alone:  # the template writes them in another way, or not at all
            return [whole]
        pieces = replaced(rf"{hole}\g<0>{hole}").split(hole)
        # The holes must come out as they were put in, with nothing else changed.
        found = [token for piece in pieces[::2] for token in self._pattern.findall(piece)]
        is_whole = len(pieces) % 2 == 1 and "".join(pieces) == whole
        if not is_whole or found != template_alone:
            raise ValueError("a message spells a special token, and the chat template cannot show it as text")
        return pieces

    def _piece_ids(self, pieces: Sequence[str]) -> list[int]:
        """Return the tokens of pieces after the first: a spelled token, what follows it, and so on."""
        token_ids: list[int] = []
        for word, piece in zip(pieces[::2], pieces[1::2], strict=True):
            token_ids += [*self._words_ids(word), *self._rendered_ids(piece, self._before)]
        return token_ids

    def _words_ids(self, word: str) -> list[int]:
        """Return the ordinary tokens of the name of a control token."""
        token_ids = words_ids(self._tokenizer, word)
        if self._special.get(word) not in token_ids:
            return token_ids
        return [*words_ids(self._tokenizer, word[0]), *words_ids(self._tokenizer, word[1:])]  # it is not special

    def _rendered_ids(self, text: str, before: str) -> list[int]:
        """Return the tokens of a text behind a control token, where tokenizers may add no space."""
        if not text:
            return []
        token_ids = rendered_ids(self._tokenizer, f"{before}{text}")
        return token_ids[token_ids.index(self._special[before]) + 1 :]

    def _replaced(self, value: Any, instead: str) -> Any:
        """Return messages in which control tokens that their words spell are replaced."""
        if isinstance(value, str):
            return self._pattern.sub(instead, value)
        if isinstance(value, Mapping):
            return {self._replaced(key, instead): self._replaced(part, instead) for key, part in value.items()}
        return [self._replaced(part, instead) for part in value] if isinstance(value, list | tuple) else value

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


def _strings(value: Any) -> Iterator[str]:
    """Yield every text in messages or tools."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _strings([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _strings(part)


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
