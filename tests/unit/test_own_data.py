"""Files of prompts as people have them, what is wrong with them, and what `bapo init` proposes for them."""

import csv
import gzip
import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_megatron import cli
from bapo_megatron.assets import demo_model_path
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import DataError, UserError
from bapo_megatron.hf.tokenizer import load_tokenizer
from bapo_megatron.preflight.starter import Hardware, write_config
from bapo_megatron.prompts import rows as rows_module
from bapo_megatron.prompts.jsonl import JsonlSource
from bapo_megatron.prompts.stream import PromptStream
from bapo_megatron.rewards.answers import final_answer, judge_text
from tests.hang import HANG_S
from tests.unit.odd_files import outcome

COMING_FROM = Path(__file__).parents[2] / "docs" / "coming-from.md"
TABLE = COMING_FROM.read_text(encoding="utf-8").partition("## Files of prompts")[2].partition("\n## ")[0]
EXAMPLES = [
    (name, json.loads(row), tomllib.loads(setting).get("data", {}).get("fields", {}) if "=" in setting else {})
    for name, row, setting in re.findall(r"^\| (\w+) \| `(\{.*\})` \| `(.*)`.*\|$", TABLE, re.MULTILINE)
]
USER = {"role": "user", "content": "3+5="}
CPU = Hardware(0, "", 0.0, 64.0)


def written(folder: Path, rows: list[Any], suffix: str = ".jsonl") -> str:
    file = folder / f"data{suffix}"
    if suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), file)
    elif suffix == ".csv":
        with file.open("w", newline="") as opened:
            writer = csv.DictWriter(opened, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif suffix == ".json":
        file.write_text(json.dumps(rows, indent=1))
    else:
        file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(file)


def source(path: str, **fields: str) -> JsonlSource:
    return JsonlSource(path, fields=fields)


def test_the_page_has_an_example_of_each() -> None:
    assert [name for name, *_ in EXAMPLES] == ["TRL", "TRL", "verl", "slime", "chats", "tables"]


@pytest.mark.parametrize(("name", "row", "columns"), EXAMPLES)
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_files_of_other_frameworks_work_as_they_are(
    tmp_path: Path, name: str, row: dict[str, Any], columns: dict[str, str], suffix: str
) -> None:
    path = written(tmp_path, [row, row], suffix)
    question = source(path, **columns)[1]
    assert (question.text, question.answer, question.messages) == ("3+5=", "8", ())
    start = write_config("demo", Path(path), tmp_path / "new.toml", CPU, ["reward.kind=chains"])
    assert start.table["data"].get("fields", {}) == columns
    assert (start.prompt.startswith("3+5="), start.answer) == (True, "8")


def test_csv(tmp_path: Path) -> None:
    path = written(
        tmp_path, [{"question": 'a "b",\nc', "answer": "8"}, {"question": "é", "answer": "x" * 200_000}], ".csv"
    )
    first, second = source(path, prompt="question")
    assert (first.text, first.answer, first.where) == ('a "b",\nc', "8", f"{path}:2")
    assert (second.text, len(second.answer), second.where) == ("é", 200_000, f"{path}:4")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file has no prompts"),
        ("prompt,answer\n", "the file has no prompts"),
        ("prompt,answer\na\nb,2\nc,3,4\n", r":2: 1 value for the 2 columns of the header; .*\n.*:4: 3 values"),
        ("prompt,prompt\na,b\n", r":1: the header names the column 'prompt' twice"),
        ('prompt,answer\n"a,1\n', ":2: not CSV: unexpected end of data"),
        ("prompt,solution\na,1\n", r":2: field 'answer' is missing .*data.fields.answer=\"solution\""),
    ],
)
def test_odd_csv_is_one_error(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "data.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        source(str(tmp_path / "data.csv"))


def test_a_conversation_keeps_all_but_the_last_turn_of_the_assistant(tmp_path: Path) -> None:
    system, given = {"role": "system", "content": "6"}, {"role": "assistant", "content": "1"}
    parts = {"role": "user", "content": [{"type": "text", "text": "3+"}, {"type": "text", "text": "5="}]}
    rows = [
        {"messages": [system, USER, given], "answer": 8},
        {"messages": [USER, given, parts, given], "answer": 8},
        {"prompt": [USER], "answer": 8},
    ]
    path = written(tmp_path, rows)
    tokenizer = load_tokenizer(demo_model_path())
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }},{% endfor %}="
    data = {"source": "jsonl", "path": path}
    config = Config.model_validate({"data": {**data, "chat_template": True, "system_prompt": "2"}})
    prompts = PromptStream(config, tokenizer).in_order()
    assert [tokenizer.decode(p.token_ids) for p in prompts] == ["6,3+5=,=", "2,3+5=,1,3+5=,=", "2,3+5=,="]
    assert {p.text for p in prompts} == {"3+5="}
    with pytest.raises(DataError, match=r"data.jsonl:1: the prompt is a conversation; set data.chat_template = true"):
        PromptStream(Config.model_validate({"data": data}), tokenizer).in_order()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": 1}, r"field 'prompt' is missing \(fields: 'answer'\), and so is 'messages'"),
        ({"prompt": 3, "answer": 1}, "'prompt' must be a string or a list of messages, got a number"),
        ({"messages": "hi", "answer": 1, "prompt": None}, "'prompt' must be a string or a list of messages, got null"),
        ({"messages": [], "answer": 1}, "'messages' must have a user message to answer; there is none"),
        ({"messages": [{"role": "system", "content": "a"}], "answer": 1}, "the last one has the role 'system'"),
        ({"messages": [{"role": "bot", "content": "a"}], "answer": 1}, r"message 1 must be .*user, .*got role 'bot'"),
        ({"messages": [USER, "hi"], "answer": 1}, "message 2 must be an object with role .*got a string"),
        ({"messages": [{"role": "user", "content": None}], "answer": 1}, "message 1 must have text as its content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}], "answer": 1},
            "must have text as its content",
        ),
    ],
)
def test_a_row_that_is_no_question(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"data.jsonl:1: .*{message}"):
        source(written(tmp_path, [row]))


def test_a_mapped_column_that_is_missing_is_told_with_the_nearest(tmp_path: Path) -> None:
    path = written(tmp_path, [{"question": "a", "meta": {"truth": "b"}}])
    with pytest.raises(DataError, match=r"'qestion', which data.fields.prompt names, is missing .*mean 'question'\?"):
        source(path, prompt="qestion", answer="meta.truth")
    with pytest.raises(DataError, match=r"'meta.trut', which data.fields.answer names, .*did you mean 'meta.truth'\?"):
        source(path, prompt="question", answer="meta.trut")
    with pytest.raises(DataError, match=r"'a', which eval.sets.aime.fields.prompt names"):
        JsonlSource(path, "math", "eval.sets.aime.path", {"prompt": "a"})


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ('data.fields={promt="a"}', "data.fields must name prompt or answer, not promt; did you mean prompt?"),
        ('data.fields={prompt="a", answer="a"}', 'data.fields must name two columns, not "a" twice, for prompt and'),
    ],
)
def test_a_mapping_that_cannot_be(capsys: pytest.CaptureFixture[str], setting: str, message: str) -> None:
    assert cli.main(["check", "demo", "data.source=jsonl", "data.path=x.jsonl", setting]) == 2
    assert message in capsys.readouterr().err


def test_all_bad_rows_are_listed_up_to_a_few(tmp_path: Path) -> None:
    good = {"prompt": "1+1=", "answer": 2}
    rows = [good, {"prompt": " ", "answer": 1}, {"prompt": "a"}, "{", '{"prompt": "a", "answer": NaN}', {"prompt": "b"}]
    path = written(tmp_path, rows)
    with pytest.raises(DataError) as error:
        JsonlSource(path, skips_empty=False)
    lines = str(error.value).splitlines()
    assert [line.partition("data.jsonl:")[2][:2] for line in lines] == ["3:", "4:", "5:", "2:"]
    assert lines[0].endswith("(also 6)")
    assert lines[3].endswith(":2: the prompt is empty")
    with pytest.raises(DataError) as error:
        JsonlSource(path)
    assert "is empty" not in str(error.value)
    many = written(tmp_path, [{"prompt": "a"}] * 9 + [{f"x{i}": 1} for i in range(9)])
    with pytest.raises(DataError) as error:
        source(many)
    lines = str(error.value).splitlines()
    assert lines[0].endswith("(also 2, 3, 4, 5 and 4 more)")
    assert lines[-1] == "and more: 18 of 18 rows are bad"
    assert len(lines) == 6


def test_a_name_on_the_hub_is_told_what_to_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"there is no file .*hf download openai/gsm8k --repo-type dataset --local-dir"):
        source("openai/gsm8k")


@pytest.mark.parametrize(
    ("reference", "response", "reward"),
    [
        ("Paris", "Paris", 1.0),
        ("Paris", "The answer is **Paris**.", 1.0),
        ("Paris", "I think of Rome.\nAnswer: Paris", 1.0),
        ("Paris", "<answer>PARIS</answer> or Rome", 1.0),
        ("Paris", "\\boxed{\\text{Paris}}", 1.0),
        ("Paris", "Paris or Rome", 0.0),
        ("Paris", "", 0.0),
        ("yes", "Yes.", 1.0),
        ("yes", "yes and no", 0.0),
        ("B", "(B)", 1.0),
        ("B", "B) Paris", 1.0),
        ("B", "A or B", 0.0),
        ("A", "A or B", 0.0),
        (True, "true", 1.0),
        ("?", "?", 1.0),
    ],
)
def test_the_judge_of_words(reference: Any, response: str, reward: float) -> None:
    assert judge_text(reference, response) == reward


@given(st.text(st.sampled_from("\\boxed{}<answer>/(B). \nanswer is:é\ud800"), max_size=60))
def test_any_text_is_judged_as_it_is_grouped(response: str) -> None:
    found = final_answer("text", "B", response)
    assert judge_text("B", response) == float(found == "b")


@pytest.mark.parametrize(
    ("answers", "judge"),
    [
        (["Paris", "New York"], "text"),
        (["B", "yes", "8"], "text"),
        (["yes", True], "text"),
        (["8", 3], None),
        (["x^2+1"], None),
    ],
)
def test_init_picks_the_judge_by_the_answers(tmp_path: Path, answers: list[Any], judge: str | None) -> None:
    path = written(tmp_path, [{"prompt": "3+5=", "answer": answer} for answer in answers])
    table = write_config("demo", Path(path), tmp_path / "new.toml", CPU).table
    assert table.get("reward", {}).get("kind") == judge


def test_init_takes_settings_and_speaks_of_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, new = written(tmp_path, [{"frage": "3+5=", "antwort": "yes"}]), str(tmp_path / "new.toml")
    assert cli.main(["init", "demo", path, "-o", new]) == 2
    error = capsys.readouterr().err
    assert "give data.fields.prompt=COLUMN data.fields.answer=COLUMN, out of 'frage', 'antwort'" in error
    asked = written(tmp_path, [{"question": "3+5=", "result": "8"}], ".csv")
    assert cli.main(["init", "demo", asked, "-o", new]) == 2
    error = capsys.readouterr().err
    assert "no answers under a usual name; give data.fields.prompt=question data.fields.answer=COLUMN" in error
    assert cli.main(["init", "demo", str(tmp_path / "none.jsonl"), "-o", new]) == 2
    assert "DATA: there is no file" in capsys.readouterr().err
    columns = ["data.fields.prompt=frage", "data.fields.answer=antwort"]
    assert cli.main(["init", "demo", path, columns[0], "-o", new, columns[1]]) == 0
    out = capsys.readouterr().out
    assert out.startswith("first prompt:\n  3+5=\n")
    assert "\ndata     format plain, prompt = 'frage', answer = 'antwort'\njudge    text\nanswer   yes\n" in out
    with pytest.raises(UserError, match=r"data\.nothing"):
        write_config("demo", Path(path), tmp_path / "other.toml", CPU, ["data.nothing=3"])


GOOD = {"prompt": "1+1=", "answer": "2"}
MIXED: list[Any] = [GOOD, {"prompt": 3, "answer": "2"}, ["1+1=", "2"], "7", {"prompt": {"a": 1}, "answer": 1}, "a,b"]
JUDGES = """
def text(response): return "good"
def parts(response): return {"correct": 1.0, "short": 0.5}
"""
ROW = 'expected an object like {"prompt": "...", "answer": ...}'


@pytest.mark.parametrize(
    ("name", "rows", "settings", "messages"),
    [
        pytest.param(
            "a.jsonl",
            [{"question": "1+1=", "answer": "2"}] * 2,
            ["data.fields.prompt=qestion"],
            [
                "a.jsonl:1: field 'qestion', which data.fields.prompt names, is missing (fields: 'answer', 'question')"
                "; did you mean 'question'? (also 2)"
            ],
            id="a column that does not exist",
        ),
        pytest.param(
            "a.jsonl",
            MIXED,
            [],
            [
                "a.jsonl:2: field 'prompt' must be a string or a list of messages, got a number",
                f"a.jsonl:3: {ROW}, got a list",
                f"a.jsonl:4: {ROW}, got a number",
                "a.jsonl:5: field 'prompt' must be a string or a list of messages, got an object",
                "a.jsonl:6: not JSON: Expecting value (column 1)",
            ],
            id="mixed types",
        ),
        *(
            pytest.param(
                name,
                [text],
                [],
                [f'{name}: the file has no prompts; expected rows like {{"prompt": "...", "answer": ...}}'],
                id=f"an empty file {name} {text}".rstrip(),
            )
            for name, text in (("a.jsonl", ""), ("a.csv", ""), ("a.csv", "prompt,answer"), ("a.json", "[]"))
        ),
        pytest.param(
            "a.jsonl",
            [GOOD, {"answer": "2"}],
            [],
            [
                "a.jsonl:2: field 'prompt' is missing (fields: 'answer'), and so is 'messages'; does data.format fit "
                'this file? or set data.fields.prompt="COLUMN"'
            ],
            id="neither prompt nor messages",
        ),
        pytest.param(
            "a.jsonl",
            [GOOD],
            ["reward.kind=my_judges:text"],
            [
                'reward.kind="my_judges:text" returned no reward for a first sample, a.jsonl:1: TypeError("a judge '
                "returns a number, not str: 'good'\") (my_judges.py, line 2); correct the judge"
            ],
            id="a judge that returns a string",
        ),
        pytest.param(
            "a.jsonl",
            [GOOD],
            ["reward.kind=my_judges:parts", "reward.weights.correct=1"],
            [
                'reward.kind="my_judges:parts" returned no reward for a first sample, a.jsonl:1: TypeError("a judge '
                "returned {'correct': 1.0, 'short': 0.5}, with parts that reward.weights does not name: 'short'; set "
                'reward.weights = {correct = 1.0, short = 1.0}, where 0 only records a part") (my_judges.py, line 3); '
                "correct the judge"
            ],
            id="parts without weights",
        ),
        pytest.param(
            "a.jsonl",
            [GOOD],
            ['data.fields={prompt="x", answer="x"}'],
            [
                'data.fields must name two columns, not "x" twice, for prompt and answer (override data.fields='
                '{prompt="x", answer="x"})'
            ],
            id="a mapping that names a column twice",
        ),
        pytest.param(
            "a.jsonl",
            [GOOD] * 2,
            ["data.fields.prompt=answer"],
            [
                "a.jsonl:1: field 'answer' would be both prompt, as data.fields.prompt says, and answer; name two "
                "columns in data.fields (also 2)"
            ],
            id="a mapping that names the other field's column",
        ),
        pytest.param(
            "a.csv",
            ["prompt,prompt,answer", "1,2,3"],
            [],
            ["a.csv:1: the header names the column 'prompt' twice; rename one"],
            id="a header that names a column twice",
        ),
    ],
)
def test_bad_input_is_told_before_a_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    rows: list[Any],
    settings: list[str],
    messages: list[str],
) -> None:
    """Each error names the row, what was found there, and what is accepted."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    Path("my_judges.py").write_text(JUDGES)
    Path(name).write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    kind = [] if any(one.startswith("reward.kind") for one in settings) else ["reward.kind=chains"]
    small = ("data.options={}", "rollout.prompts_per_step=1", "rollout.groups_in_flight=1")
    arguments = ("demo", "data.source=jsonl", f"data.path={name}", f"reward.timeout_s={HANG_S}", *small, *kind)
    assert cli.main(["check", *arguments, *settings]) == 2
    assert capsys.readouterr().err.splitlines() == [f"bapo: {message}" for message in messages]


ROWS = [{"prompt": "3+5?", "answer": "8"}, {"prompt": "4+5?", "answer": "9"}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def packed(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("x.jsonl.gz", packed(LINES)),
        ("x.jsonl", packed(LINES)),
        ("x.gz", packed(LINES)),
        ("x.csv.gz", packed(b"prompt,answer\n3+5?,8\n4+5?,9\n")),
        ("x.json.GZ", packed(json.dumps(ROWS).encode())),
        ("x.jsonl", json.dumps(ROWS, indent=2).encode()),
        ("x.txt", b"\xef\xbb\xbf" + json.dumps(ROWS).encode()),
        ("x.json", LINES.replace(b"\n", b"\r\n")),
    ],
)
def test_rows_are_told_by_their_content(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    found = source(str(tmp_path / name))
    assert [(one.text, one.answer) for one in found.questions] == [("3+5?", "8"), ("4+5?", "9")]


def test_parquet_under_another_name(tmp_path: Path) -> None:
    file = Path(written(tmp_path, ROWS, ".parquet"))
    for data in (file.read_bytes(), packed(file.read_bytes())):
        (tmp_path / "x.jsonl").write_bytes(data)
        assert len(source(str(tmp_path / "x.jsonl"))) == 2


@pytest.mark.parametrize(
    ("name", "data", "problem"),
    [
        ("x.jsonl", packed(LINES)[:-9], r"x.jsonl: not a whole gzip file: .*; run `gzip -t"),
        ("x.jsonl", b"\x1f\x8b\x08junk", "not a whole gzip file"),
        ("x.jsonl.zst", b"\x28\xb5\x2f\xfd\x00", "compressed with zstd; run `zstd -d"),
        ("x.jsonl", b"PK\x03\x04..", "a zip archive"),
        ("x.csv", b"\xff\xfea\x00", "UTF-16, not UTF-8; run `iconv"),
        ("x.json", json.dumps({"data": ROWS}).encode(), "one JSON object whose 'data' holds 2 rows; save that list"),
        (
            "x.jsonl",
            json.dumps({"version": 1, "data": ROWS}, indent=1).encode(),
            r"x.jsonl: one JSON object whose 'data'",
        ),
        ("x.jsonl", json.dumps({"examples": ROWS}).encode(), "whose 'examples' holds 2 rows"),
        ("x.jsonl", b"[1]", "x.jsonl, item 1: expected an object"),
        ("x.json", b'[{"prompt": "a", "answer": "8"},]', r"x.json: not JSON: .*column 33"),
        ("x.jsonl", b'{"prompt": "a", "answer": "8", "answer": "9"}', "x.jsonl:1: the key 'answer' is twice"),
        ("x.json", b'[{"prompt": "a", "meta": {"b": 1, "b": 1}, "answer": 1}]', "x.json: the key 'b' is twice"),
    ],
)
def test_a_file_that_holds_no_rows_is_told_for_what_it_is(tmp_path: Path, name: str, data: bytes, problem: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=problem):
        source(str(tmp_path / name))


def test_gzip_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "_MAX_UNPACKED_BYTES", len(LINES))
    (tmp_path / "x.jsonl").write_bytes(packed(LINES))
    assert len(source(str(tmp_path / "x.jsonl"))) == 2
    (tmp_path / "x.jsonl").write_bytes(packed(LINES + b"\n"))
    with pytest.raises(DataError, match="unpack it, or split it"):
        source(str(tmp_path / "x.jsonl"))


def test_a_column_of_parquet_that_is_there_twice(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table([["a"], ["b"], ["c"]], names=["prompt", "answer", "answer"])
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"x.parquet: the column 'answer' is there twice"):
        source(str(tmp_path / "x.parquet"))


@pytest.mark.parametrize("seed", range(40))
def test_any_file_gives_prompts_or_a_short_error(tmp_path: Path, seed: int) -> None:
    """docs/measured/data.toml has the counts of 2,000 such files."""
    pytest.importorskip("pyarrow")
    assert outcome(tmp_path, seed) in ("prompts", "error")


@pytest.mark.parametrize("seed", [516, 1771])
def test_damaged_metadata_of_parquet_ends_no_process(tmp_path: Path, seed: int) -> None:
    pytest.importorskip("pyarrow")
    assert outcome(tmp_path, seed) == "error"


@pytest.mark.parametrize(
    ("name", "bytes_of_limit", "rows", "problem"),
    [
        ("MAX_ROWS", 9, 10, "10 rows and 30 values are more than 9 and "),
        ("_MAX_VALUES", 29, 10, "10 rows and 30 values are more than 5,000,000 and 29; split it"),
        ("_MAX_UNPACKED_BYTES", 10 * 1002 - 1, 10, "more than 0 GiB in Parquet; split it"),
        ("_MAX_UNPACKED_BYTES", 10 * 1002, 10, ""),
        ("_MAX_BATCH_BYTES", 1, 10, ""),  # one row after the other
    ],
)
@pytest.mark.parametrize("in_list", [False, True])
def test_parquet_is_bounded_as_its_values_are(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    bytes_of_limit: int,
    rows: int,
    problem: str,
    in_list: bool,
) -> None:
    """A dictionary holds a text once, however many rows have it."""
    pyarrow = pytest.importorskip("pyarrow")
    text = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows, pyarrow.int32()), ["x" * 1000])
    more = pyarrow.ListArray.from_arrays(pyarrow.array(range(rows + 1), pyarrow.int32()), text) if in_list else text
    table = pyarrow.table({"prompt": ["?"] * rows, "answer": ["2"] * rows, "more": more})
    file = tmp_path / "x.parquet"
    pytest.importorskip("pyarrow.parquet").write_table(table, file)
    monkeypatch.setattr(rows_module, name, bytes_of_limit)
    if not problem:
        assert len(source(str(file))) == rows
        return
    with pytest.raises(DataError, match=re.escape(f"{file}: {problem}")):
        source(str(file))


def test_a_column_that_python_cannot_read_matters_only_if_it_is_asked_for(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    odd = pyarrow.array([1], pyarrow.timestamp("us", "Mars/Olympus"))
    file = tmp_path / "x.parquet"
    pytest.importorskip("pyarrow.parquet").write_table(
        pyarrow.table({"prompt": ["?"], "answer": ["2"], "t": odd}), file
    )
    assert len(source(str(file))) == 1
    with pytest.raises(
        DataError, match=r"field 't' is not a JSON value but timestamp\[us, tz=Mars/Olympus\] that Python"
    ):
        JsonlSource(str(file), fields={"answer": "t"})


@pytest.mark.slow
def test_headers_and_objects_of_many_names_are_read_in_linear_time(tmp_path: Path) -> None:
    """The name that is there twice comes last."""
    names = [f"c{i}" for i in range(200_000)]
    (tmp_path / "x.csv").write_text(",".join(["prompt", "answer", *names, names[-1]]) + "\n")
    with pytest.raises(DataError, match=r"x.csv:1: the header names the column 'c199999' twice"):
        source(str(tmp_path / "x.csv"))
    members = ", ".join(f'"{name}": 1' for name in [*names, names[-1]])
    (tmp_path / "x.jsonl").write_text(f"{{{members}}}\n")
    with pytest.raises(DataError, match=r"x.jsonl:1: the key 'c199999' is twice"):
        source(str(tmp_path / "x.jsonl"))


@pytest.mark.parametrize("chat", [False, True])
def test_a_prompt_that_is_far_too_long_is_not_tokenised(tmp_path: Path, chat: bool) -> None:
    tokenizer = load_tokenizer(demo_model_path())
    words = "1" * 100_000
    value = [{"role": "user", "content": words}, {"role": "assistant", "content": "?"}, USER] if chat else words
    (tmp_path / "x.jsonl").write_text(json.dumps({"prompt": value, "answer": "2"}))
    data = {"source": "jsonl", "path": str(tmp_path / "x.jsonl"), "max_prompt_tokens": 16, "chat_template": chat}
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    calls: list[Any] = []
    tokenizer.encode = lambda *a, **_: calls.append(a)
    told = f"x.jsonl:1: the prompt has 100,00{5 * chat} characters, too many for data.max_prompt_tokens = 16"
    with pytest.raises(DataError, match=told):
        PromptStream(Config.model_validate({"data": data}), tokenizer).check()
    skipping = PromptStream(Config.model_validate({"data": data | {"on_bad_prompt": "skip"}}), tokenizer)
    with pytest.raises(DataError, match=r"0 empty, 2 over data\.max_prompt_tokens, 0 refused"):
        skipping.next()
    assert calls == []
