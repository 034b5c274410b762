"""Tools: the environment that runs the calls in a turn and returns one message for each, environment.kind = "tools".

    turn's text -> prompts/tool_calls.py -> arguments, checked against the type hints -> function -> message

A turn without a call ends the sample: the judge of [reward] scores its words. Whatever is wrong with a call, and what
a tool raises, goes to the policy as the answer. Worker processes import this file too.
"""

import asyncio
import inspect
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from bapo_megatron.config.dotted import TOOL
from bapo_megatron.prompts.tool_calls import BadCall, Call, parse_turn
from bapo_megatron.prompts.tools import ToolOptions, load_tools
from bapo_megatron.rewards.arithmetic import shown, worked_out
from bapo_megatron.rewards.interpreter import Interpreter

log = logging.getLogger(__name__)

_MAX_CHARS = 50_000  # in the answers to one turn


async def calculator(expression: str) -> str:
    """Work out an arithmetic expression exactly.

    Args:
        expression: Numbers, parentheses and + - * / // % **, such as "(3 + 4) * 2**10 / 7".
    """
    return shown(worked_out(expression))


def python(code: str) -> str:
    """Run Python code and return what it prints, and the value of a last line that is an expression. Variables stay.

    Args:
        code: The code. There is no network.
    """
    raise NotImplementedError("an Interpreter runs it, with the code of earlier calls")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the policy may call, and what it takes."""

    function: Callable[..., Any]
    types: Mapping[str, Any]  # pydantic's TypeAdapter of each argument
    required: frozenset[str]

    @classmethod
    def of(cls, path: str, function: Callable[..., Any]) -> "Tool":
        """Read the type hints. Raises UserError if one cannot be read."""
        from pydantic import TypeAdapter
        from pydantic.errors import PydanticUserError

        parameters = inspect.signature(function).parameters
        try:
            hints = get_type_hints(function)
            types = {name: TypeAdapter(hints[name]) for name in parameters}
        except (PydanticUserError, NameError, TypeError) as error:
            raise TOOL.error(path, f"its type hints cannot be read: {' '.join(str(error).split())}") from error
        required = frozenset(name for name, one in parameters.items() if one.default is one.empty)
        return cls(function, types, required)

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of its arguments, without descriptions."""
        return {"properties": {name: one.json_schema() for name, one in self.types.items()}}

    def checked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments as the function takes them. Raises ValueError with the reason if they do not fit."""
        from pydantic import ValidationError

        takes = ", ".join(self.types) or "none"
        if unknown := arguments.keys() - self.types.keys():
            raise ValueError(f"unknown argument {min(unknown)!r}; the arguments are: {takes}")
        if missing := self.required - arguments.keys():
            raise ValueError(f"argument {min(missing)!r} is missing; the arguments are: {takes}")
        checked = {}
        for name, value in arguments.items():
            try:
                checked[name] = self.types[name].validate_json(json.dumps(value), strict=True)
            except RecursionError:
                raise ValueError(f"argument {name!r} is nested too deeply") from None
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                inside = "".join(f"[{part!r}]" for part in first["loc"])
                raise ValueError(f"argument {name!r}{inside}: {first['msg']}, not {value!r:.80}") from None
            except Exception as error:  # a validator of the user's may fail in any way
                raise ValueError(f"argument {name!r}: {type(error).__name__}: {error}") from None
        return checked


class Toolbox:
    """The tools of a run, as a step function; environments.py says what it returns."""

    def __init__(self, options: ToolOptions, timeout_s: float) -> None:
        """Load the tools; Python code may run for half of `timeout_s` in a turn. Raises UserError like `load_tools`."""
        functions = load_tools(options.tools)
        self._role = options.role
        self._tools = {name: Tool.of(name, function) for name, function in functions.items()}
        self._schemas = {name: tool.schema for name, tool in self._tools.items()}
        self._interpreter = Interpreter(timeout_s / 2) if functions.get("python") is python else None
        self._code_s = timeout_s / 2
        self._is_async = all(map(inspect.iscoroutinefunction, functions.values()))

    @property
    def step(self) -> Callable[[Mapping[str, Any], Any], Any]:
        """The step function: asynchronous if all tools are."""
        return self._answer if self._is_async else self._answer_alone

    def _answer_alone(self, turn: Mapping[str, Any], state: Any) -> dict[str, Any]:
        return asyncio.run(self._answer(turn, state))

    async def _answer(self, turn: Mapping[str, Any], state: Any) -> dict[str, Any]:
        calls = parse_turn(turn["text"], self._schemas).calls
        if not calls:
            return {"judge": True}
        pieces: Sequence[Sequence[str]] = state or []
        deadline_s = time.monotonic() + self._code_s
        messages = []
        for call in calls:
            if isinstance(call, Call) and call.name == "python" and self._interpreter is not None:
                text, pieces = self._run(call, pieces, deadline_s)
            else:
                text = await self._said(call)
            named = {"name": call.name} if isinstance(call, Call) and call.name in self._tools else {}
            text = text.encode(errors="replace").decode()[: _MAX_CHARS // len(calls)]  # no half of a character
            messages.append({"role": self._role, "content": text, **named})
        if self._role == "user":  # templates want turns to alternate
            messages = [{"role": "user", "content": "\n".join(message["content"] for message in messages)}]
        return {"messages": messages, "state": pieces}

    def _run(
        self, call: Call, pieces: Sequence[Sequence[str]], deadline_s: float
    ) -> tuple[str, Sequence[Sequence[str]]]:
        """Return what code printed, and the state after it."""
        assert self._interpreter is not None
        try:
            arguments = self._tools["python"].checked(call.arguments)
        except ValueError as problem:
            return f"Error: {problem}", pieces
        text, pieces = self._interpreter.run(arguments["code"], pieces, deadline_s)
        return text or "(It printed nothing.)", pieces

    async def _said(self, call: Call | BadCall) -> str:
        """Return a tool's answer to a call, or what is wrong with the call or with the answer."""
        if isinstance(call, BadCall):
            return f"Error: {call.reason}"
        tool = self._tools.get(call.name)
        if tool is None:
            return f"Error: there is no tool {call.name[:80]!r}; the tools are: {', '.join(self._tools)}"
        try:
            arguments = tool.checked(call.arguments)
        except ValueError as problem:
            return f"Error: {problem}"
        try:
            value = tool.function(**arguments)
            if inspect.isawaitable(value):
                value = await value
        except (Exception, SystemExit) as error:  # a user's function may fail in any way, and the policy should know
            return f"{type(error).__name__}: {error}"
        if isinstance(value, str):
            return value
        try:
            return json.dumps(value, ensure_ascii=False)  # with NaN: the policy may choose arguments that lead to it
        except (TypeError, ValueError, RecursionError) as problem:
            log.warning("tool %r returned no JSON value but %s: %s", call.name, type(value).__name__, problem)
            return f"TypeError: {call.name} returned no JSON value but {type(value).__name__}"
