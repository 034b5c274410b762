"""Tools: the functions that a policy may call, and their JSON schemas, which a chat template shows to it.

Worker processes import this file too, so it imports neither torch nor the configuration.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from bapo_megatron.config.dotted import TOOL, imported, is_dotted
from bapo_megatron.errors import UserError
from bapo_megatron.prompts.encoding import Options, shows_tools

if TYPE_CHECKING:
    from bapo_megatron.config.schema import EnvironmentConfig

ROLES = ("tool", "user")
_MORE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """The options of environment.kind = "tools".

    Raises UserError for other values.
    """

    tools: tuple[str, ...] = ()  # built-in names and dotted paths
    role: Literal["tool", "user"] = "tool"  # the role of messages with answers
    in_prompt: bool = False  # whether the prompts say themselves which tools there are

    def __post_init__(self) -> None:
        given = list(self.tools) if isinstance(self.tools, tuple) else self.tools
        if not isinstance(given, list) or not given or not all(isinstance(name, str) for name in given):
            raise _misfit(f'tools is a list of names, such as ["calculator", "my_module:search"], not {given!r:.200}')
        if self.role not in ROLES:
            raise _misfit(f'role is "tool" or "user", not {self.role!r:.80}')
        if not isinstance(self.in_prompt, bool):
            raise _misfit(f"in_prompt is true or false, not {self.in_prompt!r:.80}")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> ToolOptions:
        if unknown := options.keys() - {one.name for one in fields(cls)}:
            raise _misfit(f"there is no option {min(unknown)!r}; they are tools, role and in_prompt")
        return cls(**options)

    @classmethod
    def if_used(cls, environment: EnvironmentConfig) -> ToolOptions | None:
        """Return the options of a configuration's tools; None without tools."""
        return cls.of(environment.options) if environment.kind == "tools" else None

    def shown(self, tokenizer: Any, template_options: Options) -> list[dict[str, Any]]:
        """Return the schemas for the prompts of a tokenizer; none if `in_prompt`, because the prompts have them.

        A chat template that does not show them gets them in words: see `Continuation.text`.

        Raises UserError if the template fails with them.
        """
        if self.in_prompt:
            return []
        schemas = schemas_of(self.tools)
        try:
            shows_tools(tokenizer, schemas, template_options)
        except Exception as error:  # a template may fail in any way
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"the model's chat template fails with tools: {reason}") from error
        return schemas


def _misfit(problem: str) -> UserError:
    return UserError(f'environment.options of environment.kind = "tools": {problem}')


def load_tools(names: Iterable[str]) -> dict[str, Callable[..., Any]]:
    """Return functions by the name under which a policy calls them.

    Args:
        names: built-in names and dotted paths.

    Raises:
        UserError: a function cannot be found or is not a tool, or two have the same name.
    """
    found: dict[str, tuple[str, Callable[..., Any]]] = {}
    for path in dict.fromkeys(names):
        if path not in TOOL.names and not is_dotted(path):
            known = ", ".join(f'"{name}"' for name in TOOL.names)
            raise UserError(f'{TOOL.setting}: must be {known} or a path like "my_module:my_tool", not "{path}"')
        function = imported(f"bapo_megatron.rewards.tools:{path}") if path in TOOL.names else TOOL.load(path)
        if problem := _problem(path, function):
            raise TOOL.error(path, problem)
        name = function.__name__
        if name in found:
            raise TOOL.error(path, f'it has the name "{name}", as "{found[name][0]}" has; rename one function')
        found[name] = (path, function)
    return {name: function for name, (_, function) in found.items()}


def _problem(path: str, function: Any) -> str | None:
    """Return why a function cannot be a tool, or None."""
    parameters = TOOL.signature(path, function).parameters.values()
    if not (inspect.isfunction(function) or inspect.ismethod(function)):
        return f"it is of type {type(function).__name__}, not a function"
    for parameter in parameters:
        if parameter.kind in _MORE or parameter.kind is parameter.POSITIONAL_ONLY:
            return f"its parameter {parameter} cannot be passed by name"
        if parameter.annotation is parameter.empty:
            return f"its parameter {parameter.name} has no type hint"
    return None


def schemas_of(names: Iterable[str]) -> list[dict[str, Any]]:
    """Return what a chat template needs to know about tools: JSON schemas out of type hints and docstrings.

    Raises UserError like `load_tools`, and for a function without the docstring that a schema needs.
    """
    from transformers.utils import get_json_schema  # imports torch

    schemas = []
    for path in dict.fromkeys(names):
        (function,) = load_tools([path]).values()
        try:
            schemas.append(get_json_schema(function))
        except Exception as error:  # its own kinds, and what get_type_hints raises
            reason = " ".join(map(str, error.args)) or type(error).__name__
            raise TOOL.error(path, f"it has no schema: {' '.join(reason.split())}") from error
    return schemas
