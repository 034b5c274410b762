"""A small programming task: find the function behind a few examples, and write it in Python.

prompt    3>3 7>2 12>2:              (input>output, inputs in ascending order)
response  ```python
          def f(x): return x%5
          ```

The functions are FORMS with a constant from 2 to 9. A prompt's examples fit exactly one of them. The tests, for
reward.kind = "code", use all of TESTED_INPUTS, most of which no prompt shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from bapo_megatron.config.base import Section
from bapo_megatron.prompts.base import Question, read_options

FORMS: dict[str, Callable[[int, int], int]] = {
    "x+{}": lambda x, c: x + c,
    "x-{}": lambda x, c: x - c,
    "{}-x": lambda x, c: c - x,
    "x*{}": lambda x, c: x * c,
    "x//{}": lambda x, c: x // c,
    "x%{}": lambda x, c: x % c,
    "x*x+{}": lambda x, c: x * x + c,
    "x*x-{}": lambda x, c: x * x - c,
}
"""Functions by their Python expression."""
CONSTANTS = range(2, 10)
SHOWN_INPUTS = range(16)
TESTED_INPUTS = range(-10, 31)


class ProgramOptions(Section):
    """`[data.options]` of the source "programs"."""

    num_examples: int = Field(default=3, ge=2, le=8)


@dataclass(frozen=True, slots=True)
class Program:
    """A function of the family. Example: Program("x*{}", 3) computes x*3."""

    form: str
    constant: int

    def __call__(self, x: int) -> int:
        return FORMS[self.form](x, self.constant)

    @property
    def expression(self) -> str:
        return self.form.format(self.constant)

    @property
    def tests(self) -> str:
        """Python code that fails unless `f` computes this function."""
        outputs = [self(x) for x in TESTED_INPUTS]
        return f"assert [f(x) for x in {TESTED_INPUTS}] == {outputs}"


def solution(expression: str) -> str:
    """Return a response that the judge can read. Example: solution("x*3") defines f as x*3."""
    return f"```python\ndef f(x): return {expression}\n```"


PROGRAMS = tuple(Program(form, constant) for form in FORMS for constant in CONSTANTS)
_OUTPUTS = {program: [program(x) for x in SHOWN_INPUTS] for program in PROGRAMS}


def is_told_apart(program: Program, inputs: Sequence[int]) -> bool:
    """Return whether no other function of the family agrees with `program` on `inputs`, a part of SHOWN_INPUTS."""
    outputs = _OUTPUTS[program]
    return not any(
        all(others[x] == outputs[x] for x in inputs) for other, others in _OUTPUTS.items() if other != program
    )


@dataclass(frozen=True, slots=True)
class ProgramTask:
    """A function, with inputs on which no other function of the family agrees with it."""

    program: Program
    inputs: tuple[int, ...]

    @classmethod
    def random(cls, rng: random.Random, num_examples: int) -> ProgramTask:
        """Draw a task; each function of the family is equally likely."""
        program = rng.choice(PROGRAMS)
        while True:
            inputs = tuple(sorted(rng.sample(SHOWN_INPUTS, num_examples)))
            if is_told_apart(program, inputs):
                return cls(program, inputs)

    @property
    def prompt(self) -> str:
        return " ".join(f"{x}>{self.program(x)}" for x in self.inputs) + ":"


class ProgramSource:
    """`size` random tasks with answers for reward.kind = "code". Raises DataError for unknown options."""

    name = "programs"

    def __init__(self, size: int, seed: int, options: dict[str, Any]) -> None:
        self.options = read_options(ProgramOptions, self.name, options)
        self.size, self.seed = size, seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Question:
        rng = random.Random(f"programs/{self.seed}/{index}")
        task = ProgramTask.random(rng, self.options.num_examples)
        return Question(task.prompt, {"tests": task.program.tests}, f"programs item {index}")
