"""Dotted paths, "package.module:name", by which settings name the user's own functions and objects.

Judge processes import this file too, so it imports neither torch nor the configuration.
"""

import importlib
import inspect
import operator
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bapo_megatron.errors import UserError, closest, did_you_mean, in_one_line

_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def is_dotted(value: str) -> bool:
    """Return whether a value has the form "package.module:name"."""
    return _PATH.fullmatch(value) is not None


def _of_file(value: str) -> str:
    """Return advice for the path of a file: "judges/math.py:judge" is to be "judges.math:judge"."""
    found = re.fullmatch(r"(?:\./)?([\w/.]+)\.py(?::(\w+))?", value)
    return f'; write "{found[1].replace("/", ".")}:{found[2] or "my_name"}"' if found else ""


def imported(path: str | Callable[..., Any]) -> Any:
    """Import the object at "package.module:name"; a function stays as it is."""
    if callable(path):
        return path
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def hidden_file(module: str) -> str:
    """Say which file of the working folder an imported module of the same name hides; "" if it hides none.

    The folder is last on the search path, so that no file in it hides a module of Python or of a package.
    """
    place = os.path.join(os.getcwd(), *module.split("."))
    own = next((file for file in (f"{place}.py", os.path.join(place, "__init__.py")) if os.path.isfile(file)), None)
    loaded = sys.modules.get(module)
    if own is None or loaded is None:
        return ""
    file = getattr(loaded, "__file__", None)
    if file is not None and os.path.exists(file) and os.path.samefile(own, file):
        return ""
    return f"{own} is hidden by the module {module} of {file or 'Python itself'}"


@dataclass(frozen=True, slots=True)
class Seam:
    """A setting that accepts a dotted path, its built-in names, and the object expected at such a path."""

    setting: str
    names: tuple[str, ...]
    expected: str  # as an error message shows it
    parameters: tuple[str, ...] | None = None  # passed by position; None means the object is checked elsewhere
    num_needed: int | None = None  # how many of the first parameters a function must take; None means all
    prefix: str = ""  # what may stand before a path, such as "replay:"
    other_names: Mapping[str, str] = field(default_factory=dict, hash=False)  # elsewhere, in lower case -> here

    def is_prefixed(self, value: str) -> bool:
        """Return whether a value is a dotted path behind the prefix."""
        return bool(self.prefix) and value.startswith(self.prefix) and is_dotted(value.removeprefix(self.prefix))

    def known(self, value: str) -> str:
        """Return `value` if it is a built-in name or a dotted path. Raises ValueError, for a pydantic validator."""
        if value in self.names or is_dotted(value) or self.is_prefixed(value):
            return value
        names = "".join(f'"{name}", ' for name in self.names)[:-2] + " or " * bool(self.names)
        prefixed = f' or "{self.prefix}my_module:my_name"' if self.prefix else ""
        here = self.other_names.get(value.lower())
        meant = did_you_mean(*(f'"{name}"' for name in ([here] if here else closest(value, self.names))))
        advice = _of_file(value) or (meant and f"; {meant}")
        raise ValueError(f'must be {names}a path like "my_module:my_name"{prefixed}, got "{value}"{advice}')

    def load(self, path: str) -> Any:
        """Import the object at "package.module:name", without the prefix, and check that it can be called as expected.

        Raises:
            UserError: names the setting, the path and what is expected there.
        """
        bare = path.removeprefix(self.prefix) if self.is_prefixed(path) else path
        module, _, name = bare.partition(":")
        if (folder := os.getcwd()) not in sys.path and "" not in sys.path:
            sys.path.append(folder)  # a console script does not look there
        try:
            loaded = importlib.import_module(module)
        except (Exception, SystemExit) as error:  # a user's module may fail in any way
            reason = in_one_line(error)
            advice = "it must be installed, in the working directory, or on PYTHONPATH"
            if of_file := _of_file(path):
                raise self.error(path, f"a module has no .py in its name{of_file}") from None
            if isinstance(error, ImportError) and (hidden := hidden_file(error.name or "")):
                advice = f"{hidden}; rename yours"
            raise self.error(path, f"importing {module} failed: {reason}; {advice}") from error
        if hidden := hidden_file(module):
            raise self.error(path, f"{hidden}; rename yours, and the module in this path")
        try:
            found = operator.attrgetter(name)(loaded)
        except AttributeError:
            meant = did_you_mean(*closest(name, vars(loaded)))
            raise self.error(path, f"{loaded.__file__ or module} has no {name}{meant and f'; {meant}'}") from None
        if self.parameters is not None:
            self.check(path, found)
        return found

    def check(self, path: str, function: Any) -> None:
        """Check that a function found at `path` can be called as expected. Raises UserError."""
        assert self.parameters is not None
        most = len(self.parameters)
        if not any(self.takes(path, function, n) for n in range(self.num_needed or most, most + 1)):
            signature, asked = self.signature(path, function), ", ".join(self.parameters)
            raise self.error(path, f"its signature is {signature}, which does not fit: the parameters are {asked}")

    def takes(self, path: str, function: Any, num_parameters: int) -> bool:
        """Return whether a function found at `path` can be called with the first parameters. Raises UserError."""
        assert self.parameters is not None
        given = self.parameters[:num_parameters]
        try:
            return tuple(self.signature(path, function).bind(*given).arguments) == given
        except TypeError:
            return False

    def signature(self, path: str, found: Any) -> inspect.Signature:
        """Return the signature of the object found at `path`. Raises UserError if it has none."""
        if not callable(found):
            raise self.error(path, f"it is of type {type(found).__name__}, which is not callable")
        try:
            return inspect.signature(found)
        except (TypeError, ValueError):
            raise self.error(path, "its signature cannot be read; wrap it in a Python function") from None

    def error(self, path: str, problem: str) -> UserError:
        """Return an error about the object at `path`."""
        end = "" if problem.endswith("?") else "."
        return UserError(f'{self.setting}="{path}": {problem}{end} Expected: {self.expected}')


REWARD = Seam(
    "reward.kind",
    ("auto", "chains", "reasoning_gym", "math", "text", "code", "none"),
    "def judge(answer, response) -> float, plain or async, with parameters out of prompt, answer, response, source "
    "(they are passed by name)",
)
KEEP_GROUP = Seam(
    "rollout.keep_group",
    ("all", "informative"),
    "def keep_group(group: Group, config: Config) -> bool",
    ("group", "config"),
)
ANNOTATOR = Seam(
    "rollout.annotators",
    (),
    "def make(config: Config) -> Annotator, an object with streams, deadline_s and async def rows(sample)",
    ("config",),
)
ENVIRONMENT = Seam(
    "environment.kind",
    ("none", "calculator", "guess", "tools", "agent"),
    "def step(turn, state, **options) -> dict, plain or async, or after replay: a class or function whose objects have "
    "reset(seed) and step(text), as docs/turns.md says",
    prefix="replay:",
)
TOOL = Seam(
    "environment.options.tools",
    ("calculator", "python"),
    "def search(query: str) -> str, plain or async, with type hints and a docstring that says what the tool does and, "
    "in lines under Args:, what each argument is",
)
