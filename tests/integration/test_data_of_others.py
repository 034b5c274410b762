"""Five problems in the formats of TRL, verl and slime, as CSV, as Parquet and from a function: the same prompts."""

import contextlib
import csv
import functools
import hashlib
import io
import json
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.assets import demo_model_path
from bapo_megatron.cli import main
from bapo_megatron.config.load import load_config
from bapo_megatron.hf.tokenizer import load_tokenizer
from bapo_megatron.prompts.stream import PromptStream
from bapo_megatron.runs.steps import read_metrics
from bapo_megatron.types import Prompt
from tests.hang import PATIENT
from tests.integration.test_train import bapo

PROBLEMS = {"3+5*2=": "2", "1+1=": "2", "6-2+3=": "0", "4*4=": "2", "5+5-1=": "2"}
TINY = (
    "parallel.tensor=1",
    "rollout.samples_per_prompt=2",
    "rollout.max_response_tokens=16",
    "monitor.progress=lines",
    *PATIENT,
)
Row = dict[str, Any]


def user(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def trl(index: int, question: str, answer: str) -> Row:
    return {"prompt": user(question), "solution": answer}


def verl(index: int, question: str, answer: str) -> Row:
    return {
        "data_source": "openai/gsm8k",
        "prompt": user(question),
        "ability": "math",
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "extra_info": {"answer": f"#### {answer}", "index": index, "question": question, "split": "train"},
    }


def slime(index: int, question: str, answer: str) -> Row:
    return {"messages": user(question), "label": answer, "metadata": {"level": index}}


def table(index: int, question: str, answer: str) -> Row:
    return {"question": question, "answer": answer}


def plain(index: int, question: str, answer: str) -> Row:
    return {"prompt": question, "answer": answer}


FORMATS: dict[str, tuple[str, Callable[[int, str, str], Row], dict[str, str]]] = {
    "TRL": ("train.jsonl", trl, {"answer": "solution"}),
    "verl": ("train.parquet", verl, {"answer": "reward_model.ground_truth"}),
    "slime": ("train.jsonl", slime, {"prompt": "messages", "answer": "label"}),
    "CSV": ("train.csv", table, {}),
    "Parquet": ("train.parquet", table, {}),
    "function": ("my_rows.py", plain, {}),
}
"""File, rows and the columns that `bapo init` proposes, by format."""
TRAINED = ("TRL", "function")  # the others are read to the same prompts, from which the same run follows


@dataclass(frozen=True)
class Outcome:
    """What a user sees of the three commands."""

    data: dict[str, Any]  # the configuration that init wrote
    printed: str  # the output of init
    is_unchanged: bool  # whether init left the file of prompts alone
    prompts: list[Prompt]
    metrics: list[dict[str, float]]  # none if the format is not TRAINED


def write(file: Path, rows: list[Row]) -> None:
    if file.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), file)
    elif file.suffix == ".csv":
        with file.open("w", newline="") as opened:
            writer = csv.DictWriter(opened, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif file.suffix == ".py":
        file.write_text(f"def rows():\n    yield from {rows!r}\n")
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def by_process(arguments: Sequence[str]) -> tuple[int, str]:
    """Return the exit code and the output of a command."""
    done = bapo(*arguments)
    return done.returncode, done.stdout if done.returncode == 0 else done.stderr


def within(arguments: Sequence[str]) -> tuple[int, str]:
    """Return what `by_process` does, of a command that runs in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        return main(arguments), output.getvalue()


@pytest.fixture(scope="module")
def outcome_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """Run the commands once per format."""

    @functools.cache
    def outcome_of(name: str) -> Outcome:
        file_name, row, _ = FORMATS[name]
        folder = tmp_path_factory.mktemp(name)
        file, config = folder / file_name, folder / "x.toml"
        write(file, [row(i, question, answer) for i, (question, answer) in enumerate(PROBLEMS.items())])
        digest = hashlib.sha256(file.read_bytes()).digest()
        commands = {
            "init": ("init", "demo", "my_rows:rows" if name == "function" else str(file), "-o", str(config)),
            "check": ("check", str(config)),
        }
        if name in TRAINED:
            commands["train"] = ("train", str(config), "train.num_steps=2", f"run.dir={folder}", *TINY)
        printed, facts = {}, []
        for verb, arguments in commands.items():
            began_s = time.monotonic()
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(folder)
                patch.syspath_prepend(folder)
                patch.delitem(sys.modules, "my_rows", raising=False)
                code, printed[verb] = by_process(arguments) if verb == "train" else within(arguments)
            assert code == 0, f"{name}: bapo {verb}\n{printed[verb]}"
            facts.append(f"{verb} {code} ({time.monotonic() - began_s:.0f} s)")
        data, judge = (next(s for s in printed["init"].splitlines() if s.startswith(key)) for key in ("data", "judge"))
        print(f"{name:<8} {data:<60} {judge:<14} {', '.join(facts)}")
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.syspath_prepend(folder)
            patch.delitem(sys.modules, "my_rows", raising=False)
            prompts = PromptStream(load_config([str(config)]), load_tokenizer(demo_model_path())).in_order()
        return Outcome(
            tomllib.loads(config.read_text())["data"],
            printed["init"],
            hashlib.sha256(file.read_bytes()).digest() == digest,
            prompts,
            read_metrics(folder / "x" / "metrics.jsonl") if name in TRAINED else [],
        )

    return outcome_of


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_a_file_is_read_as_it_is(name: str, outcome_of: Callable[[str], Outcome]) -> None:
    found = outcome_of(name)
    assert found.data.get("fields", {}) == FORMATS[name][2]
    assert "first prompt:\n  3+5*2=" in found.printed
    assert "\njudge    math\nanswer   2\n" in found.printed
    assert [row["step"] for row in found.metrics] == ([1, 2] if name in TRAINED else [])
    assert found.is_unchanged


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "other"), [("TRL", "verl"), ("TRL", "slime"), ("CSV", "Parquet"), ("TRL", "function")]
)
def test_the_same_problems_are_the_same_prompts(name: str, other: str, outcome_of: Callable[[str], Outcome]) -> None:
    """A table of bare questions gets a different prompt from a conversation: words that say how to answer."""
    mine, others = ([(p.token_ids, p.answer) for p in outcome_of(one).prompts] for one in (name, other))
    assert mine == others
    assert len(mine) == len(PROBLEMS)


@pytest.mark.slow
def test_the_same_problems_train_the_same(outcome_of: Callable[[str], Outcome]) -> None:
    what = ("reward/mean", "loss/policy", "optimizer/grad_norm")
    mine, others = ([[row[key] for key in what] for row in outcome_of(one).metrics] for one in TRAINED)
    assert mine == others
