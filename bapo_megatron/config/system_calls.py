"""Linux system calls by name, and the sandbox's answer to each one from a judged program: system_calls.txt."""

import functools
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from bapo_megatron.errors import closest, did_you_mean

Answer = Literal["allow", "check", "missing", "refuse"]

_TABLE = Path(__file__).with_name("system_calls.txt")
_MACHINES = ("x86_64", "aarch64")  # columns of the table


@dataclass(frozen=True, slots=True)
class SystemCall:
    """A row of the table. Example: SystemCall("fork", {"x86_64": 57}, "refuse")"""

    name: str
    numbers: dict[str, int]  # by machine
    answer: Answer


@functools.cache
def system_calls() -> dict[str, SystemCall]:
    """Read the table, by name."""
    rows = (line.split() for line in _TABLE.read_text(encoding="utf-8").splitlines())
    calls = {}
    for name, *numbers, answer in (row for row in rows if row and row[0] != "#"):
        by_machine = {machine: int(number) for machine, number in zip(_MACHINES, numbers, strict=True) if number != "-"}
        calls[name] = SystemCall(name, by_machine, cast(Answer, answer))
    return calls


def calls_of(machine: str, allowed: Collection[str]) -> dict[Answer, dict[str, int]]:
    """Return a machine's call numbers by answer and name; `allowed` are allowed whatever the table says.

    The result is empty for a machine that the table does not know.
    """
    calls: dict[Answer, dict[str, int]] = {"allow": {}, "check": {}, "missing": {}, "refuse": {}}
    for call in system_calls().values():
        if machine in call.numbers:
            calls["allow" if call.name in allowed else call.answer][call.name] = call.numbers[machine]
    return calls if machine in _MACHINES else {}


def known_calls(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return `names`, if all are system calls. Raises ValueError, for a pydantic validator."""
    for name in names:
        if name not in system_calls():
            advice = did_you_mean(*closest(name, system_calls())) or "`man 2 syscalls` lists them"
            raise ValueError(f'"{name}" is not a system call; {advice}')
    return names
