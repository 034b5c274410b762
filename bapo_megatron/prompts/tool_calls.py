"""Tool calls as model families write them, read out of a turn's text.

    <tool_call>{"name": "search", "arguments": {"query": "cat"}}</tool_call>             Qwen, Hermes
    <function=search><parameter=query>cat</parameter></function>, also in a <tool_call>  Qwen3-Coder
    <tool_call>[{"name": "search", "arguments": {"query": "cat"}}]</tool_call>           SmolLM2
    <tool_call>search<arg_key>query</arg_key><arg_value>cat</arg_value></tool_call>      GLM
    {"name": "search", "parameters": {"query": "cat"}}, several, or a list of them       Llama, Mistral
    [TOOL_CALLS]search[ARGS]{"query": "cat"}, also with [CALL_ID]                        Mistral, from tokenizer v11
    search{"query": "cat"}, the same without special tokens                              Mistral
    ```python ... ``` where a tool named python is offered                               any

JSON may stand behind text or in a fence; on a line that begins with words, it must name a tool that is offered. What a
model thinks in <think> is not searched. Each call that cannot be read becomes a `BadCall`; the others count.
Worker processes import this file too. The time is linear in the length of the text: marks are found in one pass, and at
most MAX_CALLS calls are read.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bapo_megatron.prompts.json_values import read_json, read_json_at

Schema = Mapping[str, Any]
"""A JSON schema."""

MAX_CALLS = 64  # that are read in one turn
_MARK = re.compile(r"</?(?:tool_call|think)>|<function(?:=|\s+name=)([^<>\s]*)>")
_SPACE = re.compile(r"\s*")
_PARAMETER = re.compile(r"<parameter(?:=|\s+name=)([^<>\s]+)>")
_KEYED = re.compile(r"([^\s<>{}\[\]\"]{1,64})\s*(?=<arg_key>|</tool_call>)")
_KEY = re.compile(r"\s*<arg_key>([^<>]*)</arg_key>\s*<arg_value>")
_JSON = re.compile(r"(?:\[\s*)?\{")
_OPENINGS = (
    r"(?P<mark>\[TOOL_CALLS\])\s*"
    r"|(?<![\w.-])(?P<called>[\w.-]{1,64})(?:\[CALL_ID\][\w-]{0,64})?\[ARGS\]\s*"
    r"|(?<!\w)(?P<offered>%s)(?:[A-Za-z0-9]{9})?(?=\{\s*[\"}])"  # nine: an id without its special token
    r"|(?P<json>(?:\A\s*(?:\[\s*)?\{|(?:\[\s*)?\{\s*\"(?:name|type|id|function|arguments|parameters)\"\s*:))"
)
"""Where a call without tags may begin; %s stands for the names of the offered tools."""
_NAMED = re.compile(r"([\w.-]{1,64})(?:\[CALL_ID\][\w-]{0,64})?(?:\[ARGS\])?\s*(?=\{)")
_BEGINS_LINE = re.compile(r"(?:\A|\n|<\|python_tag\|>)[ \t]*\Z")
_OPEN_FENCE = re.compile(r"```[\w-]*[ \t]*\n\s*\Z|<\|python_tag\|>\s*\Z")
_FENCE_LINE = re.compile(r"^[ \t]*```([^`\n]*)$", re.MULTILINE)
_JSON_FENCES = ("", "json", "jsonc", "tool_call", "tool_calls")
_BETWEEN = re.compile(r"[\s;,]*")  # between the bare objects of one turn
_PYTHON = ("python", "python3", "py")
_MAX_SHOWN = 60  # characters of a call in a reason


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool."""

    name: str
    arguments: dict[str, Any]  # JSON values


@dataclass(frozen=True, slots=True)
class BadCall:
    """A call that cannot be read, and the reason in words for the model that wrote it."""

    reason: str


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """A turn's text in its parts; each without white space around it."""

    thought: str
    content: str  # outside thought and calls
    calls: tuple[Call | BadCall, ...]


def parse_turn(text: str, tools: Mapping[str, Schema]) -> ParsedTurn:
    """Return the parts of a turn, its calls in order. Calls of tools that are not offered are calls too.

    Args:
        tools: the schema of each offered tool's arguments, by name. Without tools, nothing is a call. The arguments
            that Qwen3-Coder writes have no type: each becomes JSON if its schema allows no string.
    """
    found = _Turn(text, tools)
    found.read_marked()
    if tools and not found.calls:
        found.read_bare()
    if "python" in tools and not found.calls:
        found.read_fenced()
    if len(found.calls) > MAX_CALLS:
        found.calls[MAX_CALLS:] = [BadCall(f"a turn has at most {MAX_CALLS} calls; the others were not read")]
    thought = "".join(text[span] for span in found.thoughts)
    return ParsedTurn(thought.strip(), "".join(found.content).strip(), tuple(found.calls))


@dataclass(slots=True)
class _Turn:
    """A turn that is being read."""

    text: str
    tools: Mapping[str, Schema]
    thoughts: list[slice] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[Call | BadCall] = field(default_factory=list)

    def read_marked(self) -> None:
        """Tell thoughts, calls between marks, and the rest from each other."""
        marks, place, num_read = [*_MARK.finditer(self.text)], 0, 0
        for number, mark in enumerate(marks):
            if mark.start() < place:
                continue
            if mark[0] in ("<think>", "</think>"):
                place = self._after_thought(mark, place)
            elif self.tools and mark[0] != "</tool_call>":
                self.content.append(self.text[place : mark.start()])
                calls, place = self._marked_calls(mark)
                if any(isinstance(call, BadCall) for call in calls):
                    place = max(place, self._end_of_bad(marks, number))
                self.calls += calls
                if (num_read := num_read + 1) > MAX_CALLS:
                    return
        self.content.append(self.text[place:])

    def read_bare(self) -> None:
        """Read calls in the content that no tags mark. One that cannot be read ends the search."""
        text = "".join(self.content).strip()
        names = "|".join(map(re.escape, sorted(filter(None, self.tools), key=len, reverse=True))) or "(?!)"
        may_be_json = '"name"' in text and ('"parameters"' in text or '"arguments"' in text)
        foreign = _foreign_blocks(text)
        kept: list[str] = []
        place = num_others = 0
        for opening in re.finditer(_OPENINGS % names, text):
            start, is_json = opening.start(), opening["json"] is not None
            if start < place or (is_json and not may_be_json) or foreign(start):
                continue
            begins_line = start == place or _BEGINS_LINE.search(text, max(place, start - _MAX_SHOWN), start) is not None
            try:
                calls, end = self._bare_calls(text, opening, is_certain=begins_line)
            except ValueError as problem:
                is_other = is_json and not begins_line and not self._names_offered(text[start : start + 2 * _MAX_SHOWN])
                num_others += is_other  # each may have been decoded up to the end of the text
                if is_other and num_others <= MAX_CALLS:
                    calls, end = [], opening.end()
                else:
                    calls, end = [BadCall(str(problem))], len(text)
            if not calls:
                kept.append(text[place:end])
                place = end
                continue
            before = text[place:start]
            fence = _OPEN_FENCE.search(before, max(0, len(before) - _MAX_SHOWN))
            kept.append(before[: fence.start()] if fence else before)
            place = _after(_BETWEEN, text, end)
            if fence and text.startswith("```", place):
                place += len("```")
            self.calls += calls
            if len(self.calls) > MAX_CALLS:
                break
        self.content = [*kept, text[place:]]

    def _bare_calls(self, text: str, opening: re.Match[str], *, is_certain: bool) -> tuple[list[Call | BadCall], int]:
        """Return the calls at a place where some may begin, and the place after them; none if it is something else.

        Args:
            is_certain: whether JSON there may name a tool that is not offered.

        Raises ValueError with the reason if a call begins there that cannot be read.
        """
        name, start = opening["called"] or opening["offered"], opening.end()
        if opening["json"] is not None:
            value, end = _decoded(text, _skipped(text, opening.start()))
            values = value if isinstance(value, list) else [value]
            is_call = all(map(_is_call, values)) and (
                is_certain or any(_function_of(one).get("name") in self.tools for one in values)
            )
            return (_calls(value) if is_call else []), end
        if opening["mark"] is not None:
            if _JSON.match(text, start):
                value, end = _decoded(text, start)
                return _calls(value), end
            if (named := _NAMED.match(text, start)) is None:
                raise ValueError(f"a call is [TOOL_CALLS]NAME[ARGS]{{...}}, but there is {_shown(text, start)}")
            name, start = named[1], named.end()
        value, end = _decoded(text, start)
        return [_call({"name": name, "arguments": value})], end

    def _names_offered(self, text: str) -> bool:
        found = re.search(r'"name"\s*:\s*"([^"]*)"', text)
        return found is not None and found[1] in self.tools

    def read_fenced(self) -> None:
        """Read blocks of Python in the content."""
        kept: list[str] = []
        block: list[str] = []  # the lines of an open block, with the fence
        for line in "".join(self.content).splitlines(keepends=True):
            language = _fence(line)
            if not block and language is None:
                kept.append(line)
            elif block and language == "":
                kept += self._closed(block, line)
                block = []
            else:
                block.append(line)
        if block and _fence(block[0]) in _PYTHON:
            self.calls.append(BadCall("the block of Python does not end with ```"))
        else:
            kept += block
        self.content = kept

    def _closed(self, block: list[str], end: str) -> list[str]:
        """Take a block's code as a call, or return the lines of a block in another language."""
        if _fence(block[0]) not in _PYTHON:
            return [*block, end]
        indent = block[0][: block[0].index("`")]
        self.calls.append(Call("python", {"code": "".join(line.removeprefix(indent) for line in block[1:])}))
        return []

    def _after_thought(self, mark: re.Match[str], place: int) -> int:
        """Return the place after a thought which begins or ends at a mark."""
        if mark[0] == "</think>":  # the prompt has opened the thought: all so far belongs to it
            self.thoughts, self.content, self.calls = [slice(mark.start())], [], []
            return mark.end()
        self.content.append(self.text[place : mark.start()])
        end = self.text.find("</think>", mark.end())
        self.thoughts.append(slice(mark.end(), end if end >= 0 else None))
        return end + len("</think>") if end >= 0 else len(self.text)

    def _marked_calls(self, mark: re.Match[str]) -> tuple[list[Call | BadCall], int]:
        """Return the calls that begin at a mark, and how far they were read; none if a function follows the mark."""
        if mark[1] is not None:
            call, place = self._function(mark)
            after = _skipped(self.text, place)
            return [call], after + len("</tool_call>") if self.text.startswith("</tool_call>", after) else place
        start = _skipped(self.text, mark.end())
        keyed = _KEYED.match(self.text, start)
        if keyed is not None and (self.text.startswith("<arg_key>", keyed.end()) or keyed[1] in self.tools):
            call, place = self._keyed(keyed)
            return [call], place
        if (function := _MARK.match(self.text, start)) is not None and function[1] is not None:
            return [], start
        try:
            value, end = _decoded(self.text, start)
        except ValueError as problem:
            return [BadCall(str(problem))], start
        after = _skipped(self.text, end)
        if self.text.startswith("</tool_call>", after):
            return _calls(value), after + len("</tool_call>")
        is_end = after == len(self.text) or self.text.startswith(("<tool_call>", "</think>"), after)
        if isinstance(value, dict | list) and not is_end:
            return [BadCall(f"a call ends with </tool_call>, but there is {_shown(self.text, after)}")], start
        return _calls(value), after

    def _keyed(self, name: re.Match[str]) -> tuple[Call | BadCall, int]:
        """Return the call of a name with keys and values in tags, and how far it was read."""
        arguments: dict[str, Any] = {}
        place = name.end()
        while (key := _KEY.match(self.text, place)) is not None:
            end = self.text.find("</arg_value>", key.end())
            if end < 0:
                return BadCall(f"<arg_key>{key[1]}</arg_key> has no </arg_value>"), len(self.text)
            value = self.text[key.end() : end].removeprefix("\n").removesuffix("\n")
            called = key[1].strip()
            arguments[called] = _typed(value, _argument_schema(self.tools.get(name[1]), called))
            place = end + len("</arg_value>")
        after = _skipped(self.text, place)
        if self.text.startswith("</tool_call>", after):
            return Call(name[1], arguments), after + len("</tool_call>")
        if after == len(self.text) or self.text.startswith(("<tool_call>", "</think>"), after):
            return Call(name[1], arguments), after
        form = "NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>"
        return BadCall(f"a call is {form}, with as many keys as needed; there is {_shown(self.text, after)}"), place

    def _function(self, mark: re.Match[str]) -> tuple[Call | BadCall, int]:
        """Return the call <function=...> that begins at a mark, and how far it was read."""
        name, place = _unquoted(mark[1]), _skipped(self.text, mark.end())
        arguments: dict[str, Any] = {}
        while (parameter := _PARAMETER.match(self.text, place)) is not None:
            end = self.text.find("</parameter>", parameter.end())
            if end < 0:
                return BadCall(f"<parameter={parameter[1]}> has no </parameter>"), len(self.text)
            value = self.text[parameter.end() : end].removeprefix("\n").removesuffix("\n")
            key = _unquoted(parameter[1])
            arguments[key] = _typed(value, _argument_schema(self.tools.get(name), key))
            place = _skipped(self.text, end + len("</parameter>"))
        if not name or not self.text.startswith("</function>", place):
            form = "<function=NAME><parameter=NAME>value</parameter></function>"
            found = _shown(self.text, place)
            return BadCall(f"a call is {form}, with as many parameters as needed; there is {found}"), place
        return Call(name, arguments), place + len("</function>")

    def _end_of_bad(self, marks: list[re.Match[str]], number: int) -> int:
        """Return where a bad call ends: after its </tool_call>, or where the next call begins or a thought ends."""
        is_function = marks[number][1] is not None
        for later in range(number + 1, len(marks)):
            mark = marks[later]
            if mark[0] == "</tool_call>":
                return mark.end()
            if mark[0] in ("<tool_call>", "</think>") or (is_function and mark[1] is not None):
                return mark.start()
        return len(self.text)


def _decoded(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value that begins at a place, and the place after it. Raises ValueError with the reason."""
    try:
        return read_json_at(text, start)
    except json.JSONDecodeError as problem:
        reason = f"{problem.msg.removesuffix(' starting at')}, at {_shown(text, problem.pos)}"
    except ValueError as problem:
        reason = str(problem)
    raise ValueError(f"the call is not JSON: {reason}")


def _unquoted(name: str) -> str:
    return name[1:-1] if len(name) > 1 and name[0] == name[-1] and name[0] in "\"'" else name


def _function_of(value: Any) -> Any:
    """Return the object with a call's name and arguments, which may be inside {"type": "function", "function": ...}."""
    inner = value.get("function") if isinstance(value, dict) else None
    return inner if isinstance(inner, dict) else value


def _is_call(value: Any) -> bool:
    value = _function_of(value)
    return isinstance(value, dict) and "name" in value and ("arguments" in value or "parameters" in value)


def _calls(value: Any) -> list[Call | BadCall]:
    return [*map(_call, value)] if isinstance(value, list) and value else [_call(value)]


def _call(value: Any) -> Call | BadCall:
    value = _function_of(value)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return BadCall('a call is an object like {"name": "...", "arguments": {...}}')
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):  # some models write the arguments as a string of JSON
        try:
            arguments, _ = _decoded(arguments, _skipped(arguments, 0))
        except ValueError as problem:
            return BadCall(f'"arguments" as a string: {problem}')
    if arguments is not None and not isinstance(arguments, dict):
        return BadCall('"arguments" is not an object')
    return Call(value["name"], arguments or {})


def _argument_schema(tool: Any, name: str) -> Any:
    """Return the schema of an argument; {} if the schema of its tool, which programs send, has none."""
    properties = tool.get("properties") if isinstance(tool, Mapping) else None
    return properties.get(name, {}) if isinstance(properties, Mapping) else {}


def _typed(text: str, schema: Any) -> Any:
    """Return an argument that has no type of its own, as its schema wants it."""
    if _takes_text(schema):
        return text
    try:
        return read_json(text)
    except ValueError:
        return text


def _takes_text(schema: Any) -> bool:
    """Return whether a schema allows a string. `true` allows anything, and so does a value of another type."""
    if not isinstance(schema, Mapping):
        return True
    types = schema.get("type")
    if types is None:
        options = schema.get("anyOf", schema.get("oneOf"))
        return not isinstance(options, list) or any(map(_takes_text, options))
    return "string" in types if isinstance(types, list) else types == "string"


def _foreign_blocks(text: str) -> Callable[[int], bool]:
    """Return a function that tells whether a place is in a fenced block of another language than JSON.

    It must be asked about places in ascending order.
    """
    lines = _FENCE_LINE.finditer(text)
    language: str | None = None  # language of the latest place's block
    following = next(lines, None)

    def is_foreign(place: int) -> bool:
        nonlocal language, following
        while following is not None and following.start() <= place:
            language = following[1].strip().lower() if language is None else None
            following = next(lines, None)
        return language is not None and language not in _JSON_FENCES

    return is_foreign


def _fence(line: str) -> str | None:
    """Return the language, "" for none, of a line that begins or ends a block of code; None for another line."""
    found = line.strip()
    return None if not found.startswith("```") or "`" in found[3:] else found[3:].strip().lower()


def _skipped(text: str, start: int) -> int:
    """Return the first place from `start` with no white space."""
    return _after(_SPACE, text, start)


def _after(pattern: re.Pattern[str], text: str, start: int) -> int:
    """Return where the match of a pattern that may be empty ends."""
    found = pattern.match(text, start)
    assert found is not None
    return found.end()


def _shown(text: str, place: int) -> str:
    return repr(text[place : place + _MAX_SHOWN]) if place < len(text) else "the end"
