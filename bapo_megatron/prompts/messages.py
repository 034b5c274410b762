"""Messages of a row, as people write them, in the one form that chat templates take; and what a template leaves out.

    written   {"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    read      {"role": "assistant", "content": "", "tool_calls": [{..., "function": {"name": "f", "arguments": {}}}]}

A key that is not read is refused. An empty value (null, "", [] or {}) asks for nothing: columns of Parquet fill absent
keys with null.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bapo_megatron.errors import DataError
from bapo_megatron.prompts.base import Message
from bapo_megatron.prompts.rows import kind_of, parsed_json

ROLES = ("system", "developer", "user", "assistant", "tool")
_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content")
_THOUGHT = "reasoning"  # another name of reasoning_content
_HINTS = {
    "function_call": "write it as tool_calls",
    "thinking": "name it reasoning_content",
    "from": 'name it "role", with one of its values',
    "value": 'name it "content"',
}
_CALL = '{"function": {"name": "...", "arguments": {...}}}'
_TOOL = '{"type": "function", "function": {"name": "...", "parameters": {...}}}'
_NOTHING: tuple[Any, ...] = (None, "", [], {})
_MARK = "x7Kq9"  # a text that no template contains

Tool = dict[str, Any]
"""A tool as chat templates show it: {"type": "function", "function": {"name": ..., "parameters": JSON schema}}."""


def conversation(value: Sequence[Any], what: str) -> list[Message]:
    """Return the messages that the policy answers, without the assistant's last turn. Raises DataError."""
    if value and isinstance(value[0], list):
        raise DataError(
            f"{what} is a list of lists, such as several turns of messages; a prompt is one list of messages, and one "
            "row asks for one response"
        )
    messages = [_message(one, f"{what}, message {i}") for i, one in enumerate(value, start=1)]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        last = f"the last one has the role {messages[-1]['role']!r}" if messages else "there is none"
        raise DataError(f"{what} must have a user message to answer; {last}")
    return messages


def tools(value: Any, what: str) -> tuple[Tool, ...]:
    """Return the tools that a row offers, written as a list or as JSON text. Raises DataError."""
    if isinstance(value, str) and value:
        value = _decoded(value, what)
    if value in _NOTHING:
        return ()
    if not isinstance(value, list):
        raise DataError(f"{what} must be a list of tools like {_TOOL}, got {kind_of(value)}")
    return tuple(_tool(one, f"{what}, tool {i}") for i, one in enumerate(value, start=1))


def _arguments(value: Any, what: str) -> dict[str, Any]:
    """Return a call's arguments, written as an object or as JSON text. Raises DataError."""
    if isinstance(value, str) and value:
        value = _decoded(value, what)
    if value in _NOTHING:
        return {}
    if not isinstance(value, dict):
        raise DataError(f"{what} must be an object, got {kind_of(value)}")
    return value


def _message(value: Any, what: str) -> Message:
    if isinstance(value, dict):
        value = {key: found for key, found in value.items() if key == "content" or found not in _NOTHING}
    role = value.get("role") if isinstance(value, dict) else None
    if role not in ROLES:
        found = f"role {role!r:.40}" if isinstance(value, dict) else kind_of(value)
        raise DataError(f"{what} must be an object with role ({', '.join(ROLES)}) and content, got {found}")
    if _THOUGHT in value and "reasoning_content" not in value:
        value["reasoning_content"] = value.pop(_THOUGHT)
    _refuse_others(value, _KEYS, what)
    message: Message = {"role": role, "content": _text(value.get("content"), what, value)}
    for key in ("tool_call_id", "name", "reasoning_content"):
        if key in value:
            if not isinstance(value[key], str):
                raise DataError(f"{what}: {key} must be a string, got {kind_of(value[key])}")
            message[key] = value[key]
    if "tool_calls" in value:
        if role != "assistant" or not isinstance(value["tool_calls"], list):
            raise DataError(f"{what}: tool_calls must be a list in an assistant's message, with calls like {_CALL}")
        message["tool_calls"] = [_call(one, f"{what}, call {i}") for i, one in enumerate(value["tool_calls"], start=1)]
    return message


def _text(content: Any, what: str, message: Mapping[str, Any]) -> str:
    """Return a message's content as one text; "" if an assistant's message has only calls or thoughts."""
    if content is None and message["role"] == "assistant" and message.keys() & {"tool_calls", "reasoning_content"}:
        return ""
    if isinstance(content, list):
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else kind_of(part)
            if kind != "text" or not isinstance(part.get("text"), str):
                raise DataError(f"{what} must have text as its content, got a part of the type {kind!r:.40}")
            _refuse_others(part, ("type", "text"), f"{what}: a part of its content")
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        without = " and no tool_calls" if message["role"] == "assistant" else ""
        raise DataError(f"{what} must have text as its content, got {kind_of(content)}{without}")
    return content


def _call(value: Any, what: str) -> dict[str, Any]:
    """Read a call; its name and arguments may also stand in the call itself."""
    if not isinstance(value, dict):
        raise DataError(f"{what} must be an object like {_CALL}, got {kind_of(value)}")
    function = value.get("function", value)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise DataError(f"{what} must have a name: {_CALL}")
    named = ("name", "arguments")
    _refuse_others(value, ("id", "type", *(("function",) if function is not value else named)), what)
    if value.get("type") not in ("function", None):
        raise DataError(f"{what} is of the type {value['type']!r:.40}; only functions are read")
    if function is not value:
        _refuse_others(function, named, f"{what}: its function")
    arguments = _arguments(function.get("arguments"), f"{what}: its arguments")
    call = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if (call_id := value.get("id")) in _NOTHING:
        return call
    if not isinstance(call_id, str):
        raise DataError(f"{what}: its id must be a string, got {kind_of(call_id)}")
    return {"id": call_id, **call}


def _tool(value: Any, what: str) -> Tool:
    """Read a tool; what describes its function may also stand in the tool itself."""
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise DataError(f"{what} must be an object like {_TOOL}, got {kind_of(value)}")
    if function is not value:
        _refuse_others(value, ("type", "function"), what)
        if value.get("type", "function") != "function":
            raise DataError(f"{what} is of the type {value['type']!r:.40}; only functions can be shown")
    return {"type": "function", "function": function}


def _decoded(text: str, what: str) -> Any:
    value, problem = parsed_json(text)
    if problem:
        raise DataError(f"{what}: {problem}")
    return value


def _refuse_others(value: Mapping[str, Any], known: Sequence[str], what: str) -> None:
    """Raise DataError if an object says something under a key that is not read."""
    if others := [key for key, found in value.items() if key not in known and found not in _NOTHING]:
        hint = _HINTS.get(others[0], "remove it, or give it as text of the content")
        raise DataError(
            f"{what} has the key {others[0]!r:.60}, which no chat template would show ({', '.join(known)} are read); "
            f"{hint}"
        )


Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], str]
"""Puts messages and tools into a chat template."""


def as_taken(
    messages: list[dict[str, Any]], offered: Sequence[Mapping[str, Any]], render: Render
) -> list[dict[str, Any]]:
    """Return messages in the form that a chat template takes: arguments of calls as objects, or otherwise as text."""
    arguments = [call["function"]["arguments"] for one in messages for call in one.get("tool_calls", ())]
    if not arguments:
        return messages
    as_text = [
        {**one, "tool_calls": [*map(_with_text, one["tool_calls"])]} if "tool_calls" in one else one for one in messages
    ]
    for form in (messages, as_text):
        try:
            text = render(form, offered)
        except Exception:  # a template may fail in any way
            continue
        if form is as_text or not any(one and str(one) in text and str(one) != json.dumps(one) for one in arguments):
            return form  # otherwise it writes objects as Python does, and expects text
    return as_text


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def is_needed(field: str) -> bool:
    """Return whether a prompt would mean something else without a field that `left_out` names."""
    return field.endswith(("content", ".name", ".arguments", ".parameters")) and field != "reasoning_content"


def left_out(
    messages: Sequence[Mapping[str, Any]], offered: Sequence[Mapping[str, Any]], render: Render
) -> Iterator[tuple[str, int]]:
    """Yield the fields that a chat template does not show, each with the place of its message or tool, from 0.

    Each field gets another value in turn, and the rendered text must change with it. A template that refuses the other
    value has read it.

    Example: ("reasoning_content", 1), ("tool_calls[0].id", 1), ("tools.description", 0)
    """
    text = render(messages, offered)

    def is_shown(others: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> bool:
        try:
            return render(others, tools) != text
        except Exception:  # a template may refuse a value in any way
            return True

    for place, message in enumerate(messages):
        for field, other in _variants(message):
            if not is_shown([*messages[:place], other, *messages[place + 1 :]], offered):
                yield field, place
    for place, tool in enumerate(offered):
        for field, other in _variants(tool, "tools."):
            if not is_shown(messages, [*offered[:place], other, *offered[place + 1 :]]):
                yield field, place


def _variants(value: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each field of a message, call or tool by its path, and the whole with another value there."""
    for key, item in value.items():
        if key in ("role", "type") or item in _NOTHING:
            continue
        inner: Iterator[tuple[str, Any]]
        if key == "tool_calls":
            inner = (
                (name, [*item[:number], other, *item[number + 1 :]])
                for number, call in enumerate(item)
                for name, other in _variants(call, f"tool_calls[{number}].")
            )
        elif key == "function":
            inner = _variants(item, path)
        else:
            inner = iter([(path + key, _changed(key, item))])
        for name, other in inner:
            yield name, {**value, key: other}


def _changed(key: str, value: Any) -> Any:
    """Return another value of the same kind for a field."""
    if key == "arguments" and isinstance(value, dict):
        return {**value, _MARK: _MARK}
    if key == "parameters" and isinstance(value, dict):
        known = value.get("properties")
        more = {_MARK: {"type": "string", "description": _MARK}}
        return {**value, "properties": {**(known if isinstance(known, dict) else {}), **more}}
    return value + _MARK if isinstance(value, str) else json.dumps(value) + _MARK
