"""The user's own prompts: rows as questions.

Rows of well-known data sets become questions too: each of `FORMATS` reads the fields of a row, or raises DataError.
`data.fields` names the columns that hold these fields.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bapo_megatron.config.schema import SourceConfig
from bapo_megatron.errors import DataError, closest, did_you_mean, escaped, plural
from bapo_megatron.prompts.base import Message, Question
from bapo_megatron.prompts.function_rows import function_rows
from bapo_megatron.prompts.hub_rows import hub_rows
from bapo_megatron.prompts.json_values import json_problem
from bapo_megatron.prompts.messages import conversation, tools
from bapo_megatron.prompts.rows import EXAMPLE, Row, kind_of, read_rows

PROMPT_COLUMNS = ("prompt", "messages", "question", "problem", "instruction", "query", "input")
ANSWER_COLUMNS = (
    "answer",
    "ground_truth",
    "reward_model.ground_truth",
    "label",
    "final_answer",
    "expected_answer",
    "solution",
    "target",
    "output",
    "correct_answer",
    "correct",
)
"""Usual names of columns, likelier ones first; a dotted name means a value inside an object."""
_EXPLAINED = {column.rpartition(".")[2] for column in ANSWER_COLUMNS} | {"rationale", "explanation", "solutions"}
_ABOUT = {"type", "source", "sourcename", "category", "subject", "subfield", "topic", "level", "url", "license"}
"""Columns that explain the answer, and columns about the row."""
_CHOICE = re.compile(r"(?i)[a-j]|(?:option|choice)s?[ _-]?\w?")
_MAX_SHOWN = 5  # problems of a file, and rows with the same problem
_MAX_PROBLEMS = 1000  # different ones; then the rest of the file is not read
MAX_PROBLEM_CHARS = 600
"""The longest problem of a row that a message tells."""
_MAX_NAMES = 20  # columns that a message names, each by its beginning
_MAX_COMPARED = 1000  # columns whose names may be meant by another one
_BOXED = "\n\nReason step by step, and put your final answer within \\boxed{}."
_PROGRAM = (
    "Complete this Python function. Answer with one ```python block that holds the whole program, with its imports."
    "\n\n```python\n{}\n```"
)


class RowSource:
    """All rows of a file, a data set of the hub or a function, read once.

    Columns that the format does not read are in `unused`, by the number of rows in which they hold words or choices.

    Args:
        what: the name of all rows in messages.
        format: a key of `FORMATS`.
        fields: columns by the field that they hold, "prompt" or "answer".
        table: the place of `fields` in the configuration.
        skips_empty: whether a run leaves out empty prompts.
        needs_answers: whether each row must have an answer; otherwise it may be None.

    Raises DataError if rows are malformed, which it names, or if there are none.
    """

    def __init__(
        self,
        name: str,
        rows: Iterable[Row],
        *,
        what: str,
        format: str = "plain",
        fields: Mapping[str, str] | None = None,
        table: str = "data",
        skips_empty: bool = True,
        needs_answers: bool = True,
    ) -> None:
        self.name = name
        rows = list(rows)
        self.questions: list[Question] = []
        self.unused: dict[str, int] = {}
        empty: list[str] = []
        problems: dict[str, list[str]] = {}  # problem -> places that have it
        num_read = 0
        for num_read, row in enumerate(rows, start=1):  # noqa: B007 (the number of rows after the loop)
            if len(problems) > _MAX_PROBLEMS:
                break
            try:
                if row.problem:
                    raise DataError(row.problem)
                columns = NamedColumns(row, fields or {}, f"{table}.fields", needs_answers)
                text, answer, messages = FORMATS[format](columns)
                offered = columns.tools()
            except DataError as problem:
                problems.setdefault(str(problem), []).append(row.where)
                continue
            self.questions.append(Question(text, answer, row.where, messages, offered))
            for name, value in _unused(row.values, columns.used):
                is_read = isinstance(value, str) and value in text  # another name of the prompt
                self.unused[name] = self.unused.get(name, 0) + (not is_read and _holds_words(name, value))
            if not text.strip():
                empty.append(row.where)
        if problems:
            if empty and not skips_empty:
                problems["the prompt is empty"] = empty
            raise DataError(_listed(problems, num_read, len(rows)))
        if not rows:
            raise DataError(f"{what} has no prompts; expected rows like {EXAMPLE}")

    @property
    def worth_a_look(self) -> list[str]:
        """The unused columns in which most rows hold words or choices."""
        return [name for name, num in self.unused.items() if 2 * num > len(self.questions)]

    @property
    def not_used(self) -> str:
        """The unused columns, in words; "" if there are none."""
        told = f"not used: {_named([*map(escaped, self.unused)])}" if self.unused else ""
        said = _named([*map(escaped, self.worth_a_look)])
        return f"{told}; most rows have words in {said}, and the model does not see them" if said else told

    def __len__(self) -> int:
        return len(self.questions)

    def __getitem__(self, index: int) -> Question:
        return self.questions[index]


class JsonlSource(RowSource):
    """The rows of a file.

    Args:
        setting: what errors call the path.

    Raises DataError as `RowSource` does, and for a missing or unreadable file.
    """

    def __init__(
        self,
        path: str | None,
        format: str = "plain",
        setting: str = "data.path",
        fields: Mapping[str, str] | None = None,
        *,
        skips_empty: bool = True,
        needs_answers: bool = True,
    ) -> None:
        if not path:
            raise DataError("data.source = 'jsonl' needs data.path: the file with your prompts")
        file = Path(path).expanduser()
        super().__init__(
            "jsonl",
            read_rows(file, setting),
            what=f"{file}: the file",
            format=format,
            fields=fields,
            table="data" if setting == "eval.path" else setting.removesuffix(".path"),
            skips_empty=skips_empty,
            needs_answers=needs_answers,
        )


def row_source(one: SourceConfig, table: str, *, skips_empty: bool, needs_answers: bool) -> RowSource:
    """Return the rows of a file, the hub or a function, as described by `table` of the configuration."""
    rules = {"skips_empty": skips_empty, "needs_answers": needs_answers}
    if one.source == "jsonl":
        return JsonlSource(one.path, one.format, f"{table}.path", one.fields, **rules)
    what, rows = named_rows(one, table)
    return RowSource(one.source, rows, what=what, format=one.format, fields=one.fields, table=table, **rules)


def named_rows(one: SourceConfig, table: str) -> tuple[str, Iterator[Row]]:
    """Return the name of all rows in messages, and the rows of the hub or a function."""
    if one.source == "hub":
        return f"{one.path}: the split {one.split}", hub_rows(one.path, one.subset, one.split, table)
    return f'{table}.source="{one.source}": the function', function_rows(one.source, one.options, table)


def _listed(problems: Mapping[str, Sequence[str]], num_read: int, num_rows: int) -> str:
    """Return a line for each of the first problems, with the first rows that have it."""
    lines = []
    for problem, places in list(problems.items())[:_MAX_SHOWN]:
        others = [place.rpartition(" ")[2].rpartition(":")[2] for place in places[1:_MAX_SHOWN]]
        more = len(places) - 1 - len(others)
        also = f" (also {', '.join(others)}{f' and {more} more' if more else ''})" if others else ""
        lines.append(f"{places[0]}: {problem:.{MAX_PROBLEM_CHARS}}{also}")
    if len(problems) > _MAX_SHOWN:
        num_bad = sum(map(len, problems.values()))
        first = "the first " if num_read < num_rows else ""
        lines.append(f"and more: {num_bad} of {first}{plural(num_read, 'row')} are bad")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class NamedColumns:
    """A row's values by field, from the columns that `data.fields` names, or otherwise the format's own columns."""

    row: Row
    fields: Mapping[str, str]
    setting: str  # the name of data.fields
    needs_answers: bool = True
    used: set[str] = field(default_factory=set)  # columns that were read

    def text(self, field: str, *columns: str) -> str:
        """Return a string. Raises DataError."""
        column, value = self._found(field, *columns)
        if not isinstance(value, str):
            raise DataError(f"field {column!r} must be a string, got {kind_of(value)}")
        _check_json(value, f"field {column!r}")
        return value

    def prompt(self, *columns: str, suffix: str = "") -> tuple[str, tuple[Message, ...]]:
        """Return a prompt's text and its messages, or no messages for a single user message. Raises DataError.

        Args:
            suffix: text to append to the last message.
        """
        column, value = self._found("prompt", *columns)
        if isinstance(value, str):
            return self.text("prompt", *columns) + suffix, ()
        if not isinstance(value, list):
            raise DataError(f"field {column!r} must be a string or a list of messages, got {kind_of(value)}")
        messages = conversation(value, f"field {column!r}")
        for place, message in enumerate(messages, start=1):
            _check_json(message["content"], f"field {column!r}, message {place}")
            _check_json(message, f"field {column!r}, message {place}")
        last: Message = {**messages[-1], "content": messages[-1]["content"] + suffix}
        if len(messages) == 1 and last["role"] == "user" and last.keys() == {"role", "content"}:
            return last["content"], ()
        return last["content"], (*messages[:-1], last)

    def tools(self) -> tuple[dict[str, Any], ...]:
        """Return the row's tools; none if its column `tools` holds something else. Raises DataError."""
        value = self.row.values.get("tools")
        if "tools" in self.used or not _may_be_tools(value):
            return ()
        self.used.add("tools")
        offered = tools(value, "field 'tools'")
        _check_json([*offered], "field 'tools'")
        return offered

    def answer(self, *columns: str) -> Any:
        """Return any JSON value except null; None if there is none and none is needed. Raises DataError."""
        if not (self.needs_answers or "answer" in self.fields or any(has(self.row.values, one) for one in columns)):
            return None
        column, value = self._found("answer", *columns)
        if value is None:
            raise DataError(f"field {column!r} must not be null")
        _check_json(value, f"field {column!r}")
        return value

    def _found(self, field: str, *columns: str) -> tuple[str, Any]:
        """Return the name and value of the column that holds a field."""
        asked = (self.fields[field],) if field in self.fields else columns
        for column in asked:
            if has(self.row.values, column):
                if other := next((f for f, named in self.fields.items() if named == column and f != field), None):
                    raise DataError(
                        f"field {column!r} would be both {other}, as {self.setting}.{other} says, and {field}; name "
                        f"two columns in {self.setting}"
                    )
                self.used.add(column)
                return column, value_at(self.row.values, column)
        present = f"(fields: {_named(sorted(map(repr, self.row.values))) or 'none'})"
        if field in self.fields:
            hint = did_you_mean(*map(repr, closest(asked[0], _all_columns(self.row.values)[:_MAX_COMPARED])))
            missing = f"field {asked[0]!r}, which {self.setting}.{field} names, is missing {present}"
            raise DataError("; ".join(filter(None, (missing, hint))))
        wanted = " or ".join(map(repr, asked if "messages" not in asked else asked[:1]))
        neither = ", and so is 'messages'" if "messages" in asked else ""
        usual = {"prompt": PROMPT_COLUMNS, "answer": ANSWER_COLUMNS}.get(field, ())
        here = next((column for column in usual if has(self.row.values, column)), None)
        hint = f'or set {self.setting}.{field}="{here or "COLUMN"}"' if usual else ""
        found = value_at(self.row.values, here) if here else None
        if isinstance(found, list) and found and isinstance(found[0], list):
            hint = f"(not {here!r}: it is a list of lists, such as several turns; write one list of messages)"
        raise DataError(
            f"field {wanted} is missing {present}{neither}; does data.format fit this file? {hint}".rstrip()
        )


def _named(names: Sequence[str]) -> str:
    """Return the first of some names of columns, and how many others there are."""
    more = f" and {len(names) - _MAX_NAMES:,} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(f"{name:.60}" for name in names[:_MAX_NAMES]) + more


def has(values: Mapping[str, Any], column: str) -> bool:
    """Return whether a row has a column or, for a dotted name, an object with that value."""
    head, _, rest = column.partition(".")
    return column in values or (bool(rest) and isinstance(values.get(head), dict) and has(values[head], rest))


def value_at(values: Mapping[str, Any], column: str) -> Any:
    """Return the value of a column for which `has` is true."""
    if column in values:
        return values[column]
    head, _, rest = column.partition(".")
    return value_at(values[head], rest)


def _may_be_tools(value: Any) -> bool:
    """Return whether a value looks like descriptions of tools: objects in a list, or text that begins like them."""
    if isinstance(value, str):
        return re.match(r"\s*\[\s*[{\]]", value) is not None
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def _unused(values: Mapping[str, Any], used: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield each column that was not read; of an object with a value that was read, its other values."""
    for name, value in values.items():
        if name in used or value is None:
            continue
        inner = {one.removeprefix(f"{name}.") for one in used if one.startswith(f"{name}.")}
        if inner and isinstance(value, dict):
            yield from ((f"{name}.{key}", item) for key, item in _unused(value, inner))
        else:
            yield name, value


def _holds_words(column: str, value: Any) -> bool:
    """Return whether a value may be a part of the question: several words, a list of texts, or a choice."""
    if column.rpartition(".")[2].lower() in _EXPLAINED | _ABOUT:
        return False
    if _CHOICE.fullmatch(column):
        return value not in ("", [], {})
    if isinstance(value, str):
        return len(value.split()) > 1 and any(map(str.isalpha, value))
    if isinstance(value, dict):
        value = [item for key, item in value.items() if key.lower() not in _ABOUT]
    return isinstance(value, list) and any(
        isinstance(one, str | list | dict) and one not in ("", [], {}) for one in value
    )


def _all_columns(values: Mapping[str, Any]) -> list[str]:
    inner = (f"{name}.{key}" for name, value in values.items() if isinstance(value, dict) for key in value)
    return [*map(str, values), *inner]


PromptParts = tuple[str, Any, tuple[Message, ...]]
"""A question's text, answer and messages."""


def plain(row: NamedColumns) -> PromptParts:
    """Read `prompt` (a string or a list of messages), or otherwise `messages`, and `answer`, any JSON value."""
    text, messages = row.prompt("prompt", "messages")
    return text, row.answer("answer"), messages


def math(row: NamedColumns) -> PromptParts:
    """Read MATH-500, AIME 2024 and 2025: `problem` (or `question`) and `answer`; ask for \\boxed{}."""
    text, messages = row.prompt("problem", "question", "Problem", "Question", suffix=_BOXED)
    return text, row.answer("answer", "Answer"), messages


def gsm8k(row: NamedColumns) -> PromptParts:
    """Read GSM8K: `question`, and the number after #### in `answer`; ask for \\boxed{}."""
    _, mark, number = row.text("answer", "answer").rpartition("####")
    number = number.strip().replace(",", "")
    if not mark or not number:
        raise DataError("field 'answer' does not end with '#### <number>', as GSM8K's answers do")
    text, messages = row.prompt("question", suffix=_BOXED)
    return text, number, messages


def humaneval(row: NamedColumns) -> PromptParts:
    """Read HumanEval: `prompt`, `test` and `entry_point`; the answer is for reward.kind = "code"."""
    tests = f"{row.text('test', 'test')}\n\ncheck({row.text('entry_point', 'entry_point')})\n"
    return _PROGRAM.format(row.text("prompt", "prompt").rstrip()), {"tests": tests}, ()


FORMATS: dict[str, Callable[[NamedColumns], PromptParts]] = {
    "plain": plain,
    "math": math,
    "gsm8k": gsm8k,
    "humaneval": humaneval,
}
"""Formats by `data.format`."""


def _check_json(value: Any, what: str) -> None:
    """Raise DataError unless a value can be written as JSON, here and by any process that gets it later."""
    if problem := json_problem(value):
        raise DataError(f"{what} {problem}; correct or remove it")
