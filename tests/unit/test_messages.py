"""Messages and tools of rows: each field is in the rendered prompt, refused, or named."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_megatron import cli
from bapo_megatron.assets import demo_model_path
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import DataError
from bapo_megatron.hf.tokenizer import load_tokenizer
from bapo_megatron.prompts.continuation import Continuation
from bapo_megatron.prompts.jsonl import JsonlSource, RowSource
from bapo_megatron.prompts.messages import as_taken, conversation, tools
from bapo_megatron.prompts.rows import Row
from bapo_megatron.prompts.stream import PromptStream

TEMPLATES = sorted((Path(__file__).parent / "chat_templates").glob("*.jinja"))
WITH_TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{{ m.name }}{{ m.tool_call_id }}</>{% endfor %}"
)
CALL = {"id": "c1", "type": "function", "function": {"name": "calc", "arguments": {"e": "31*17"}}}
USER = {"role": "user", "content": "31*17?"}
HISTORY = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "527"}]
TOOL = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object", "properties": {}}}}
DATA = {"source": "jsonl", "path": "x", "chat_template": True, "max_prompt_tokens": 100_000}


def stream(template: str, *rows: dict[str, Any], **data: Any) -> PromptStream:
    tokenizer = load_tokenizer(demo_model_path())
    tokenizer.chat_template = template
    source = RowSource("jsonl", [Row(f"x:{i}", row) for i, row in enumerate(rows, start=1)], what="x")
    return PromptStream(Config.model_validate({"data": {**DATA, **data}}), tokenizer, source)


def shown(prompts: PromptStream, index: int = 0) -> str:
    """Return a prompt as the model sees it."""
    question = prompts.source[index]
    chat = Continuation(prompts.tokenizer, {})
    messages = as_taken(question.conversation(prompts.data.system_prompt), question.tools, chat.text)
    return chat.text(messages, question.tools)


class Generator:
    """Rows whose every text is another one, so that it can be found again."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.fields: dict[str, str] = {}  # text -> name of its field

    def text(self, field: str) -> str:
        made = f"mk{len(self.fields):03d}"
        self.fields[made] = field
        return made

    def maybe(self, share: float = 0.5) -> bool:
        return self.random.random() < share

    def row(self) -> dict[str, Any]:
        """Return a row whose last message is one that the policy answers, most of the time."""
        roles = self.random.choices(
            ("system", "developer", "user", "assistant", "tool", "function"), (3, 1, 6, 6, 4, 0.3), k=4
        )
        messages = [self.message(role) for role in [*roles[: self.random.randint(0, 4)], "user"]]
        row = {"messages": messages, "answer": "8"}
        if self.maybe(0.3):
            row["tools"] = [self.tool() for _ in range(self.random.randint(1, 2))]
        for column in ("level", "context", "choices"):
            if self.maybe(0.2):
                row[column] = self.text(column)
        return row

    def message(self, role: str) -> dict[str, Any]:
        made: dict[str, Any] = {"role": role, "content": self.text("content")}
        if self.maybe(0.2):
            made["content"] = [{"type": "text", "text": made["content"]}]
        if role == "assistant" and self.maybe():
            made["tool_calls"] = [self.call() for _ in range(self.random.randint(1, 2))]
            if self.maybe():
                made["content"] = None
        if role == "tool" and self.maybe():
            made["tool_call_id"] = self.text("tool_call_id")
        for field, share in (("name", 0.2), ("reasoning_content", 0.2), ("refusal", 0.05), ("weight", 0.02)):
            if self.maybe(share):
                made[field] = self.text(field)
        return made

    def call(self) -> dict[str, Any]:
        arguments: Any = {self.text("arguments"): self.text("arguments")}
        function = {
            "name": self.text("tool_calls.name"),
            "arguments": json.dumps(arguments) if self.maybe() else arguments,
        }
        if self.maybe(0.2):
            return function
        made = {"type": "function", "function": function}
        return {"id": self.text("tool_calls.id"), **made} if self.maybe() else made

    def tool(self) -> dict[str, Any]:
        parameters = {"type": "object", "properties": {self.text("parameters"): {"type": "string"}}}
        function = {
            "name": self.text("tools.name"),
            "description": self.text("tools.description"),
            "parameters": parameters,
        }
        return function if self.maybe(0.2) else {"type": "function", "function": function}


def vanished(seed: int, template: str) -> list[str]:
    """Return the fields of a generated row that are neither in the prompt, nor refused, nor named."""
    generator = Generator(seed)
    row = generator.row()
    try:
        prompts = stream(template, row)
        prompts.in_order()
    except DataError:
        return []
    text = shown(prompts)
    named = {name.rpartition(".")[2] if name.startswith("tool_calls") else name for name in prompts.left_out}
    assert isinstance(prompts.source, RowSource)
    named |= {*prompts.source.unused}
    return [
        field
        for made, field in generator.fields.items()
        if made in json.dumps(row) and made not in text and field not in named and field.rpartition(".")[2] not in named
    ]


NUM_CASES = 4  # for each template


@pytest.mark.parametrize("template", [*TEMPLATES, None], ids=lambda file: file.stem if file else "with_tools")
def test_nothing_of_a_generated_row_vanishes(template: Path | None) -> None:
    text = template.read_text(encoding="utf-8") if template else WITH_TOOLS
    lost = {seed: found for seed in range(NUM_CASES) if (found := vanished(seed, text))}
    assert not lost


@pytest.mark.slow
def test_nothing_of_many_generated_rows_vanishes() -> None:
    texts = [WITH_TOOLS, *(file.read_text(encoding="utf-8") for file in TEMPLATES)]
    lost = {seed: found for seed in range(500) if (found := vanished(seed, texts[seed % len(texts)]))}
    assert not lost


def test_calls_and_tools_reach_the_prompt() -> None:
    prompts = stream(WITH_TOOLS, {"messages": HISTORY, "tools": json.dumps([TOOL]), "answer": "527"})
    (prompt,) = prompts.in_order()
    text = shown(prompts)
    assert '"arguments": {"e": "31*17"}' in text
    assert text.startswith('[{"type": "function", "function": {"name": "calc"')
    ids = prompts.tokenizer.encode(text, add_special_tokens=False)
    assert list(prompt.token_ids) == ids


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (
            {"role": "function", "name": "f", "content": "x"},
            r"message 1 must be .*tool\) and content, got role 'function'",
        ),
        ({"role": "assistant", "content": None}, "got null and no tool_calls"),
        ({"role": "user", "content": None, "tool_calls": [CALL]}, "must have text as its content, got null"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "tool_calls must be a list in an assistant's message"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "the key 'function_call'.* write it as tool_calls"),
        ({"role": "user", "content": "x", "weight": 0}, "has the key 'weight', which no chat template would show"),
        ({"role": "user", "content": "x", "name": 3}, "name must be a string, got a number"),
        ({"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}, "call 1 must have a name"),
        ({"role": "assistant", "tool_calls": [{**CALL, "index": 1}]}, "call 1 has the key 'index'"),
        ({"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}, "of the type 'custom'"),
        ({"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{a"}}]}, "not JSON"),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}, "must be an object, got a list"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "a part of the type 'image_url'"),
        (
            {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "x"}}]},
            "'cache_control'",
        ),
    ],
)
def test_what_cannot_be_shown_is_refused_by_name(message: dict[str, Any], problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        conversation([message, USER], "field 'messages'")


def test_values_that_say_nothing_are_as_if_absent() -> None:
    nothing = {"name": None, "tool_calls": [], "reasoning_content": "", "refusal": None, "annotations": []}
    assert conversation([{**USER, **nothing}], "x") == [USER]
    assert tools(None, "x") == tools([], "x") == tools("[]", "x") == ()


def test_turns_of_messages_are_told_apart_from_messages() -> None:
    with pytest.raises(DataError, match="'question' is a list of lists, such as several turns of messages"):
        conversation([[USER]], "field 'question'")
    row = Row("x:1", {"id": 1, "question": [[USER]], "function": []})
    with pytest.raises(DataError, match=r"field 'prompt' is missing .*\(not 'question': it is a list of lists"):
        RowSource("jsonl", [row], what="x")


def test_what_a_template_does_not_show_is_refused_if_it_is_needed() -> None:
    only_users = "{% for m in messages if m.role in ('user', 'tool') %}{{ m.content }}{% endfor %}"
    system = {"role": "developer", "content": "Be short."}
    for row, problem in [
        ({"messages": [system, USER], "answer": 1}, r"x:1: .* does not show content of message 1 \(developer\)"),
        ({"messages": HISTORY, "answer": 1}, r"does not show tool_calls\[0\].name of message 2 \(assistant\)"),
    ]:
        with pytest.raises(DataError, match=problem):
            stream(only_users, row).in_order()
    (found,) = stream(only_users, {"prompt": "a", "tools": [TOOL], "answer": 1}).in_order()
    assert len(found.token_ids) > len(json.dumps(TOOL)), "the tools stand in the only message that it shows"
    with pytest.raises(DataError, match=r"does not show data\.system_prompt"):
        stream(only_users, {"prompt": "a", "answer": 1}, system_prompt="Be short.").in_order()
    with pytest.raises(DataError, match="x:1: the prompt has tools; set data"):
        stream(only_users, {"prompt": "a", "tools": [TOOL], "answer": 1}, chat_template=False).in_order()


def test_a_late_row_is_refused_too() -> None:
    rows = [{"messages": [USER, USER], "answer": 1}] * 300
    prompts = stream("{{ messages[0].content }}{{ messages[1].content }}", *rows, {"messages": [USER] * 3, "answer": 1})
    with pytest.raises(DataError, match=r"x:301: .* content of message 3"):
        prompts.check()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    row = {"question": "2 of them?", "answer": "8", "Body": "Ann has 4 cats.", "Type": "Sum", "choices": ["4", "8"]}
    file.write_text("\n".join(json.dumps({**row, "id": i}) for i in range(8)))
    return file


def test_check_names_unused_columns(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["data.source=jsonl", f"data.path={data}", "data.fields.prompt=question", "rollout.prompts_per_step=4"]
    assert cli.main(["check", "demo", *settings]) == 0
    shown = capsys.readouterr().err
    assert "warning" in shown
    assert "not used: Body, Type, choices, id; most rows have words in Body, choices, and" in shown
    data.write_text(data.read_text().replace("Body", "rationale").replace("choices", "numbers"))
    data.write_text(data.read_text().replace('["4", "8"]', "[4, 8]"))
    assert cli.main(["check", "demo", *settings]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    assert "bapo: note: " in told.out
    assert "not used: rationale, Type, numbers, id\n" in told.out


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["Body", "answer", "a", "b.c"]), min_size=2, max_size=4))
def test_a_key_that_is_twice_is_told(keys: list[str]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "x.jsonl"
        inner = ", ".join(f'"{key}": "v"' for key in keys)
        file.write_text(f'{{"prompt": "q", "answer": {{{inner}}}}}\n')
        if len(set(keys)) == len(keys):
            assert len(JsonlSource(str(file))) == 1
        else:
            with pytest.raises(DataError, match=r"x.jsonl:1: the key '.*' is twice in one object"):
                JsonlSource(str(file))
