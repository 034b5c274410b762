"""Rows from a user's function and from a data set on the hub, which become questions as the rows of a file do."""

import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron import cli
from bapo_megatron.config.load import load_config
from bapo_megatron.config.schema import Config
from bapo_megatron.config.sources import SOURCE
from bapo_megatron.errors import DataError, UserError, install_command
from bapo_megatron.prompts import build_source, function_rows
from bapo_megatron.prompts.base import Question

MODULE = """
NUMBER = 3
def rows(level=1, answer="8"):
    for i in range(level):
        yield {"question": f"3+{i}=", "solution": {"value": answer}, "id": i}
def chats():
    messages = [{"role": "user", "content": "3+5="}, {"role": "assistant", "content": "8"}]
    return [{"messages": messages, "answer": 8}]
def raises(): raise ValueError("no such\\nfile")
def ends_the_program(): raise SystemExit(3)
def raises_later():
    yield {"prompt": "1+1=", "answer": "2"}
    raise KeyError("price")
def nothing(): return None
def text(): return "1+1="
def table(): return {"prompt": ["1+1="], "answer": ["2"]}
async def later(): return []
def empty(): return iter(())
def endless():
    while True:
        yield {"prompt": "1+1=", "answer": "2"}
def not_rows(): return [{"prompt": "1+1=", "answer": "2"}, ("1+1=", "2"), 3]
def no_prompt(): return [{"prompt": "1+1=", "answer": "2"}, {"frage": "1+1=", "answer": "2"}]
def no_json(): return [{"prompt": "1+1=", "answer": {2}}]
def tuples(): return [{"prompt": ("1+1=",), "answer": 2}]
def long(): return [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+" * 20 + "1=", "answer": "0"}]
"""
DATASETS = """
import json
from pathlib import Path

class DatasetNotFoundError(Exception): pass

def load_dataset(path, name=None, *, split, revision=None):
    asked = [path, name, split, revision]
    with (Path(__file__).parent / "asked.jsonl").open("a") as file:
        file.write(json.dumps(asked) + "\\n")
    if path != "openai/gsm8k":
        raise DatasetNotFoundError(f"Dataset '{path}' doesn't exist on the Hub or cannot be accessed.")
    if name is None:
        raise ValueError("Config name is missing.\\nPlease pick one among the available configs: ['main', 'socratic']")
    if split == "down":
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub (LocalEntryNotFoundError)")
    return [{"question": f"3+{i}=", "answer": f"...\\n#### {3 + i}"} for i in range(3)]
"""
SHORT = ("data.options={}", "reward.kind=chains", "rollout.prompts_per_step=1", "rollout.groups_in_flight=1")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_rows.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    forget(monkeypatch, "my_rows")
    return tmp_path


def forget(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """Let a module be imported again, and be gone after the test unless it was there before."""
    monkeypatch.setitem(sys.modules, module, sys)
    del sys.modules[module]


@pytest.fixture
def hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Make a library `datasets` that gives one data set; return a function that tells what it was asked for."""
    (folder / "datasets.py").write_text(DATASETS)
    monkeypatch.syspath_prepend(str(folder))
    forget(monkeypatch, "datasets")
    return lambda: (folder / "asked.jsonl").read_text().splitlines()[-1]


def questions(**data: Any) -> list[Question]:
    source = build_source(Config.model_validate({"data": data}))
    assert source.name == data["source"]
    return [source[i] for i in range(len(source))]


def errors(capsys: pytest.CaptureFixture[str], *settings: str) -> list[str]:
    code = cli.main(["check", "demo", *SHORT, *settings])
    lines = capsys.readouterr().err.splitlines()
    assert code == (2 if lines else 0)
    return lines


def test_a_function_gives_rows() -> None:
    fields = {"prompt": "question", "answer": "solution.value"}
    first, second = questions(source="my_rows:rows", options={"level": 2, "answer": 5}, fields=fields)
    assert (first.text, first.answer, first.where) == ("3+0=", 5, "my_rows:rows, row 1")
    assert (second.text, second.where) == ("3+1=", "my_rows:rows, row 2")
    (chat,) = questions(source="my_rows:chats")
    assert (chat.text, chat.answer) == ("3+5=", 8)


def test_check_accepts_a_function(capsys: pytest.CaptureFixture[str]) -> None:
    columns = ("data.fields.prompt=question", "data.fields.answer=solution.value")
    assert errors(capsys, "data.source=my_rows:rows", *columns) == []


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("raises", "it raised ValueError: no such file (FOLDER/my_rows.py:9)"),
        ("ends_the_program", "it raised SystemExit: 3 (FOLDER/my_rows.py:10)"),
        ("raises_later", "it raised KeyError: 'price' (FOLDER/my_rows.py:13) after 1 row"),
        ("nothing", "it returned a value of type NoneType, not rows"),
        ("text", "it returned a value of type str, not rows"),
        ("table", "it returned a value of type dict, not rows"),
        ("endless", "it gave 3 rows and did not end; make it end sooner"),
        ("rows data.options.levl=2", "its signature is (level=1, answer='8'), which does not fit data.options: got an"),
        ("NUMBER", "it is of type int, which is not callable"),
    ],
)
def test_a_function_that_gives_no_rows_is_one_error(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, problem: str
) -> None:
    monkeypatch.setattr(function_rows, "MAX_ROWS", 3)
    name, *settings = name.split()
    (line,) = errors(capsys, f"data.source=my_rows:{name}", *settings)
    assert line.startswith(f'bapo: data.source="my_rows:{name}": {problem.replace("FOLDER", str(folder))}')
    assert line.endswith(f"Expected: {SOURCE.expected}")


@pytest.mark.filterwarnings("ignore:coroutine")
def test_a_coroutine_is_no_rows() -> None:
    with pytest.raises(UserError, match="it returned a value of type coroutine, not rows"):
        questions(source="my_rows:later")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "empty",
            'data.source="my_rows:empty": the function has no prompts; expected rows like {"prompt": "...", "answer": '
            "...}",
        ),
        (
            "not_rows",
            'my_rows:not_rows, row 2: expected an object like {"prompt": "...", "answer": ...}, got a value of type '
            "tuple",
        ),
        (
            "no_prompt",
            "my_rows:no_prompt, row 2: field 'prompt' is missing (fields: 'answer', 'frage'), and so is 'messages'; "
            'does data.format fit this file? or set data.fields.prompt="COLUMN"',
        ),
        ("no_json", "my_rows:no_json, row 1: field 'answer' is not a JSON value but set; correct or remove it"),
        (
            "tuples",
            "my_rows:tuples, row 1: field 'prompt' must be a string or a list of messages, got a value of type tuple",
        ),
        (
            "long",
            "my_rows:long, row 2: the prompt has 42 tokens, more than data.max_prompt_tokens = 16; correct it, or set "
            'data.on_bad_prompt = "skip"',
        ),
    ],
)
def test_rows_of_a_function_are_checked_as_those_of_a_file(
    capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    assert errors(capsys, f"data.source=my_rows:{name}")[0] == f"bapo: {message}"


def test_sources_of_a_mixture_and_sets_may_be_functions(capsys: pytest.CaptureFixture[str]) -> None:
    sources = 'data.sources=[{name="a", source="my_rows:raises"}, {name="b", source="my_rows:chats"}]'
    (line,) = [line for line in errors(capsys, sources) if "warning" not in line]
    assert line.startswith('bapo: data.sources.a.source="my_rows:raises": it raised ValueError')
    (line,) = errors(capsys, "data.source=my_rows:chats", "eval.interval_steps=2")
    assert line == (
        'bapo: eval.interval_steps with data.source="my_rows:chats" needs eval.sets, which name the prompts to '
        "evaluate on; set them, or leave eval.interval_steps out"
    )
    sets = 'eval.sets=[{name="held-out", source="my_rows:no_json"}]'
    (line,) = errors(capsys, "data.source=my_rows:chats", "eval.interval_steps=2", sets)
    assert line.startswith("bapo: my_rows:no_json, row 1: field 'answer' is not a JSON value")


def test_a_split_of_the_hub(hub: Callable[[], str]) -> None:
    found = questions(source="hub", path="openai/gsm8k", subset="main", split="train[:3]", format="gsm8k")
    assert [question.answer for question in found] == ["3", "4", "5"]
    assert found[2].where == "openai/gsm8k train[:3], row 3"
    assert hub() == '["openai/gsm8k", "main", "train[:3]", null]'
    questions(source="hub", path="openai/gsm8k@abc", subset="main", fields={"prompt": "question"})
    assert hub() == '["openai/gsm8k", "main", "train", "abc"]'


def test_the_library_itself_reads_a_folder(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    pytest.importorskip("datasets", reason="needs the extra datasets")
    monkeypatch.setenv("HF_HOME", str(folder))
    (folder / "mine").mkdir()
    (folder / "mine" / "train.csv").write_text("question,answer\n3+5=,8\n1+1=,2\n")
    found = questions(source="hub", path="mine", split="train[1:]", fields={"prompt": "question"})
    assert [(question.text, question.answer) for question in found] == [("1+1=", 2)]
    with pytest.raises(DataError, match=r"data.split=test: datasets cannot load this: ValueError: Unknown split"):
        questions(source="hub", path="mine", split="test")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            ("data.path=openai/gsmk", "data.subset=main"),
            "data.path=openai/gsmk, data.subset=main, data.split=train: datasets cannot load this: "
            "DatasetNotFoundError: Dataset 'openai/gsmk' doesn't exist on the Hub or cannot be accessed; correct the",
        ),
        (
            ("data.path=openai/gsm8k",),
            "data.path=openai/gsm8k, data.split=train: datasets cannot load this: ValueError: Config name is missing. "
            "Please pick one among the available configs: ['main', 'socratic']; correct the settings, or, if",
        ),
        (
            ("data.path=openai/gsm8k", "data.subset=main", "data.split=down"),
            "data.path=openai/gsm8k, data.subset=main, data.split=down: datasets cannot load this: ConnectionError: "
            "Couldn't reach 'openai/gsm8k' on the Hub (LocalEntryNotFoundError); correct the settings, or, if the "
            'hub cannot be reached, download a file of it elsewhere and set data.source="jsonl"',
        ),
        (
            ("data.path=openai/gsm8k", "data.subset=main"),
            "openai/gsm8k train, row 1: field 'prompt' is missing (fields: 'answer', 'question'), and so is "
            "'messages'; does data.format fit this file? or set data.fields.prompt=\"question\" (also 2, 3)",
        ),
        (
            ("data.path=my_rows.py",),
            'data.path=my_rows.py is a file, not a data set on the hub; set data.source="jsonl"',
        ),
        ((), 'data.source="hub" needs data.path; set it to the name of a data set, such as "openai/gsm8k"'),
    ],
)
def test_what_the_hub_does_not_give_is_one_error(
    hub: Callable[[], str], capsys: pytest.CaptureFixture[str], settings: tuple[str, ...], problem: str
) -> None:
    (line,) = errors(capsys, "data.source=hub", *settings)
    assert line.startswith(f"bapo: {problem}")


def test_without_the_library_the_extra_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    (line,) = errors(capsys, "data.source=hub", "data.path=openai/gsm8k")
    assert line == (
        'bapo: data.source="hub" needs datasets, which cannot be imported; run '
        f'`{install_command("datasets")}`, or download a file of it and set data.source="jsonl"'
    )


def test_on_another_machine_the_hub_is_a_warning(hub: Callable[[], str], capsys: pytest.CaptureFixture[str]) -> None:
    """A run for a cluster is checked on a machine that may not reach the hub."""
    for name, code in (("gpu", 0), ("nodes", 2)):
        value = {"gpu": "h100", "nodes": 1}[name]
        assert (
            cli.main(["check", "demo", *SHORT, "data.source=hub", "data.path=no/where", f"cluster.{name}={value}"])
            == code
        )
        assert "DatasetNotFoundError" in capsys.readouterr().err


def test_a_missing_file_may_be_meant_for_the_hub(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = errors(capsys, "data.source=jsonl", "data.path=openai/gsm8k")
    assert line.endswith(
        'openai/gsm8k; if openai/gsm8k is a data set of the Hugging Face hub, set data.source="hub", or run '
        "`hf download openai/gsm8k --repo-type dataset --local-dir data/gsm8k`, and give one of its files"
    )
    (line,) = errors(capsys, "data.source=jsonl", "data.path=mine/rows.jsonl")
    assert line.endswith("mine/rows.jsonl")


def test_init_proposes_for_all_rows(hub: Callable[[], str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["init", "demo", "openai/gsm8k", "data.subset=main", "-o", "gsm8k.toml"]) == 0
    table = tomllib.loads(Path("gsm8k.toml").read_text())["data"]
    expected = {"source": "hub", "path": "openai/gsm8k", "subset": "main", "format": "gsm8k"}
    assert {key: table[key] for key in (*expected, "chat_template")} == {**expected, "chat_template": False}
    assert load_config(["gsm8k.toml"]).data.split == "train"
    assert cli.main(["init", "demo", "my_rows:rows", "data.fields.answer=solution.value", "-o", "own.toml"]) == 0
    table = tomllib.loads(Path("own.toml").read_text())["data"]
    assert table["source"] == "my_rows:rows"
    assert "path" not in table
    assert (table["format"], table["fields"]) == ("math", {"answer": "solution.value"})
    capsys.readouterr()
    assert cli.main(["init", "demo", "my_rows:chats", "data.source=chains", "-o", "x.toml"]) == 2
    assert capsys.readouterr().err == (
        'bapo: data.source="chains" makes prompts, and DATA names others; leave data.source out\n'
    )
    assert cli.main(["init", "demo", "no/where", "-o", "x.toml"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no/where, and as a data set of the hub: data.path=no/where, data.split=train: datasets cannot" in line
    with pytest.raises(DataError):
        questions(source="hub", path="no/where")
