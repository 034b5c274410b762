"""Odd files of prompts and recorded rollouts: each loads correctly, or gives one clear error naming file and line."""

import gzip
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.assets import demo_model_path
from bapo_megatron.config.load import load_config
from bapo_megatron.errors import DataError
from bapo_megatron.hf.tokenizer import load_tokenizer
from bapo_megatron.prompts.jsonl import JsonlSource
from bapo_megatron.prompts.stream import PromptStream
from bapo_megatron.rollout.group_files import group_to_json
from bapo_megatron.rollout.recorded import read_groups, write_groups
from bapo_megatron.tokens import encoded_rows
from bapo_megatron.types import Ended, Group, Prompt, Sample, Segment
from tests.distributed import HANG_S
from tests.outcomes import HangError, Outcomes, deadline

pytestmark = pytest.mark.slow

ROW = b'{"prompt": "1+1=", "answer": "2"}'
ONE = [("1+1=", "2")]
Expected = list[tuple[str, Any]] | str  # prompts and answers, or a pattern for the error


def nested(levels: int) -> bytes:
    return b'{"prompt": "1+1=", "answer": ' + b"[" * levels + b"]" * levels + b"}"


DEEP: Any = 0
for _ in range(99):
    DEEP = [DEEP]

FILES: dict[str, tuple[bytes, Expected]] = {
    "empty": (b"", "the file has no prompts"),
    "one newline": (b"\n", "the file has no prompts"),
    "spaces": (b" \n\t\n \r\n", "the file has no prompts"),
    "no newline at the end": (ROW, ONE),
    "blank lines between": (b"\n\n" + ROW + b"\n\n\n" + ROW + b"\n", ONE * 2),
    "BOM": (b"\xef\xbb\xbf" + ROW + b"\n", ONE),
    "two BOMs": (b"\xef\xbb\xbf\xef\xbb\xbf" + ROW, ":1: not JSON"),
    "BOM in the second line": (ROW + b"\n\xef\xbb\xbf" + ROW, ":2: not JSON"),
    "CRLF": (ROW + b"\r\n" + ROW + b"\r\n", ONE * 2),
    "CR alone": (ROW + b"\r" + ROW, ONE * 2),
    "other line separators in a string": ('{"prompt": "a\u2028b\x85c", "answer": 1}'.encode(), [("a\u2028b\x85c", 1)]),
    "UTF-16": ("\ufeff".encode("utf-16") + ROW, "the file is UTF-16, not UTF-8"),
    "UTF-16 of another order": (ROW.decode().encode("utf-16-be"), ":1: not JSON"),
    "Latin-1": (ROW + b'\n{"prompt": "\xe9", "answer": 1}', ":2: not UTF-8"),
    "overlong UTF-8": (ROW + b'\n\n{"prompt": "\xc0\xaf", "answer": 1}', ":3: not UTF-8"),
    "a surrogate as bytes": (b'{"prompt": "\xed\xa0\x80", "answer": 1}', ":1: not UTF-8"),
    "a lone surrogate": (rb'{"prompt": "\ud800", "answer": 1}', "jsonl:1: field 'prompt' is not valid Unicode"),
    "a lone surrogate in a key": (rb'{"prompt": "a", "answer": {"\udc00": 1}}', ":1: field 'answer' is not valid"),
    "a pair of surrogates": (rb'{"prompt": "\ud83d\ude00", "answer": 1}', [("\U0001f600", 1)]),
    "NUL in a string": (rb'{"prompt": "a\u0000b", "answer": "\u0000"}', [("a\0b", "\0")]),
    "raw NUL in a string": (b'{"prompt": "a\0b", "answer": 1}', ":1: not JSON"),
    "NUL between lines": (ROW + b"\n\0\0\0\n" + ROW, ":2: not JSON"),
    "a hole of zeros": (ROW + b"\n" + b"\0" * 100_000, ":2: not JSON"),
    "random bytes": (bytes(range(256)) * 4, ":1: not JSON|:2: not JSON|not UTF-8"),
    "a gzip file": (gzip.compress(ROW, mtime=0), ONE),
    "a cut line": (ROW + b"\n" + ROW[:20], ":2: not JSON"),
    "two objects in a line": (ROW + ROW, ":1: not JSON"),
    "a JSON list of objects": (b"[" + ROW + b"]", ONE),
    "pretty-printed JSON": (b'{\n"prompt": "a",\n"answer": 1\n}', [("a", 1)]),
    "CSV": (b"prompt,answer\na,b\n", ":1: not JSON"),
    "single quotes": (b"{'prompt': 'a', 'answer': 'b'}", ":1: not JSON"),
    "a comment": (b"# prompts\n" + ROW, ":1: not JSON"),
    "a trailing comma": (b'{"prompt": "a", "answer": 1,}', ":1: not JSON"),
    "a string": (b'"prompt"', "got a string"),
    "a number": (b"3", "got a number"),
    "null": (ROW + b"\nnull", ":2: expected an object .* got null"),
    "true": (b"true", "got a boolean"),
    "an empty object": (b"{}", r":1: field 'prompt' is missing \(fields: none\)"),
    "no answer": (b'{"prompt": "a"}', ":1: field 'answer' is missing"),
    "no prompt": (b'{"answer": "a"}', ":1: field 'prompt' is missing"),
    "another case": (b'{"Prompt": "a", "Answer": 1}', ":1: field 'prompt' is missing"),
    "a prompt that is a list": (b'{"prompt": ["a"], "answer": 1}', ":1: field 'prompt', message 1 must be an object"),
    "a prompt that is null": (
        b'{"prompt": null, "answer": 1}',
        ":1: field 'prompt' must be a string or a list of messages, got null",
    ),
    "an answer that is null": (b'{"prompt": "a", "answer": null}', ":1: field 'answer' must not be null"),
    "an answer that is false": (b'{"prompt": "a", "answer": false}', [("a", False)]),
    "further fields": (b'{"prompt": "a", "answer": 1, "x": [NaN]}', [("a", 1)]),
    "a key twice": (b'{"prompt": "a", "prompt": "b", "answer": 1}', ":1: the key 'prompt' is twice"),
    "NaN": (b'{"prompt": "a", "answer": NaN}', ":1: field 'answer' holds NaN"),
    "-Infinity": (b'{"prompt": "a", "answer": [-Infinity]}', ":1: field 'answer' holds NaN or a number"),
    "1e400": (b'{"prompt": "a", "answer": 1e400}', ":1: field 'answer' holds NaN or a number"),
    "a huge integer": (b'{"prompt": "a", "answer": 1' + b"0" * 300 + b"}", [("a", 10**300)]),
    "an integer of 5,000 digits": (b'{"prompt": "a", "answer": ' + b"9" * 5000 + b"}", ":1: not JSON .*digits"),
    "99 levels": (nested(99).replace(b"[]", b"[0]"), [("1+1=", DEEP)]),
    "101 levels": (nested(101), ":1: field 'answer' is nested"),
    "100,000 levels": (nested(100_000), ":1: .*nested"),
    "100,000 objects": (ROW + b"\n" + b'{"a":' * 100_000, ":2: .*nested"),
    "a line of 50 MB": (b'{"prompt": "a", "answer": "' + b"x" * 50_000_000 + b'"}', [("a", "x" * 50_000_000)]),
    "50 MB without a newline": (b"x" * 50_000_000, ":1: not JSON"),
    "100,000 rows": ((ROW + b"\n") * 100_000, ONE * 100_000),
}


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def dangling(path: Path) -> None:
    path.symlink_to(path.with_name("nowhere"))


def circular(path: Path) -> None:
    path.symlink_to(path)


NO_FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a folder": (Path.mkdir, "Is a directory"),
    "a pipe": (pipe, "not a regular file"),
    "/dev/zero": (device, "not a regular file"),
    "a link to nothing": (dangling, "there is no file"),
    "a link to itself": (circular, "Too many levels of symbolic links"),
    "nothing": (lambda path: None, "there is no file"),
}


def clear(error: DataError, pattern: str, file: Path) -> str | None:
    """Return why an error is not clear; None means that it is."""
    text = str(error)
    lines = text.split("\n")  # one for each problem
    if any(str(file) not in line for line in lines) or len(text) > 1000 or not re.search(pattern, lines[0]):
        return f"{text[:300]!r} does not fit {pattern!r}"
    return None


def test_files_of_prompts(tmp_path: Path, outcomes: Outcomes) -> None:
    assert len(FILES) + 2 * len(NO_FILES) >= 50
    for name, (content, expected) in FILES.items():
        file = tmp_path / "prompts.jsonl"
        file.write_bytes(content)
        outcomes.add(*attempt("a file", name, expected, file))
    for suffix in ("jsonl", "parquet"):
        for name, (make, expected) in NO_FILES.items():
            file = tmp_path / f"{name.replace('/', ' ')}.{suffix}"
            make(file)
            outcomes.add(*attempt("no file", name, expected, file))


def attempt(kind: str, name: str, expected: Expected, file: Path) -> tuple[str, str, str | None]:
    try:
        with deadline(HANG_S):
            source = JsonlSource(str(file))
    except DataError as error:
        if not isinstance(expected, str):
            return kind, "clear error", f"{name}: refused: {str(error)[:300]}"
        why = clear(error, expected, file)
        return kind, "clear error", why and f"{name}: {why}"
    except (Exception, HangError) as error:
        return kind, type(error).__name__, f"{name}: {error!r}"[:300]
    found = [(question.text, question.answer) for question in source.questions]
    return kind, "right", None if found == expected else f"{name}: loaded something else: {str(found)[:100]}"


def test_prompts_of_evaluation_are_read_by_the_same_code(tmp_path: Path) -> None:
    file = tmp_path / "eval.jsonl"
    file.write_bytes(ROW + b"\n" + ROW[:-1])
    config = load_config(["demo"], ['data.source="jsonl"', f'data.path="{file}"'])
    with pytest.raises(DataError, match=r"eval.jsonl:2: not JSON"):
        PromptStream(config, load_tokenizer(demo_model_path()))


# recorded rollouts


PROMPT = Prompt(1, (3, 4), "1+1=", "2", "chains")
SEGMENTS = (Segment.sampled(0, 1, (5, 6), (-0.5, -1.0)),)
GROUP = Group(PROMPT, tuple(Sample.of(f"1.{i}", PROMPT, SEGMENTS, Ended("stop", 1.0)) for i in range(2)))
LINE = json.dumps(group_to_json(GROUP), default=encoded_rows).encode()


def edited(*path: Any, value: Any = None, drop: bool = False) -> bytes:
    body = json.loads(LINE)
    holder = body
    for key in path[:-1]:
        holder = holder[key]
    if drop:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return json.dumps(body).encode()


SEGMENT = ("samples", 0, "trajectories", 0, "segments", 0)
NEED = ("samples", 1, "need")
VALUES = (*SEGMENT, "values")
LOGPROBS = "response 1.0 of prompt 1: stream behaviour_logprobs: "
RECORDS: dict[str, tuple[bytes, str | None]] = {
    "whole": (LINE + b"\n", None),
    "no newline at the end": (LINE, None),
    "of an earlier version": (edited("prompt_values", drop=True), "prompt_values: Field required"),
    "empty": (b"", "is empty"),
    "a cut line": (LINE + b"\n" + LINE[:100], "line 2"),
    "no JSON": (b"x", "line 1"),
    "a list": (b"[]", "line 1"),
    "NUL": (b"\0", "line 1"),
    "not UTF-8": (b"\xff\xfe", "line 1"),
    "deep": (b"[" * 100_000, "line 1"),
    "no prompt": (edited("prompt", drop=True), "prompt: Field required"),
    "no samples": (edited("samples", drop=True), "samples: Field required"),
    "a sample without a trajectory": (edited("samples", 1, "trajectories", value=[]), "samples.1.trajectories"),
    "a trajectory that is not there": (
        edited(*NEED, value={"needs": "environment", "turn_end": "stop", "trajectory": 1}),
        "trajectory 1 is not one of 1",
    ),
    "a token that is a string": (edited(*VALUES, "token_ids", value=["5", 6]), "prompt 1: stream token_ids: "),
    "a token that is a fraction": (edited(*VALUES, "token_ids", value=[5.5, 6]), "prompt 1: stream token_ids: "),
    "a negative token": (edited(*VALUES, "token_ids", value=[-5, 6]), "prompt 1: stream token_ids: "),
    "a huge token": (edited(*VALUES, "token_ids", value=[10**30, 6]), "prompt 1: stream token_ids: "),
    "a token too many": (
        edited(*VALUES, "token_ids", value=[5, 6, 7]),
        rf"{LOGPROBS}rows of shape \[2\], not \[3\]",
    ),
    "no log-probs": (
        edited(*VALUES, "behaviour_logprobs", drop=True),
        f"{LOGPROBS}is missing",
    ),
    "a log-prob that is NaN": (
        edited(*VALUES, "behaviour_logprobs", value=[float("nan"), -1]),
        f"{LOGPROBS}row 0 has nan",
    ),
    "a log-prob that is -inf": (
        edited(*VALUES, "behaviour_logprobs", value=[float("-inf"), -1]),
        f"{LOGPROBS}row 0 has -inf",
    ),
    "a log-prob that is null": (
        edited(*VALUES, "behaviour_logprobs", value=[None, -1]),
        f"{LOGPROBS}row 0 is not a number",
    ),
    "a version that is true": (edited(*SEGMENT, "version", value=True), "version"),
    "no version": (edited(*SEGMENT, "version", drop=True), "a segment has version and step, or by; this one has step"),
    "a reward that is NaN": (edited(*NEED, "reward", value=float("nan")), r"samples.1.need.nothing.reward"),
    "a reward that is a string": (edited(*NEED, "reward", value="1"), "samples.1.need.nothing.reward"),
    "a part of a reward that is NaN": (
        edited(*NEED, "reward", value={"a": float("nan")}),
        "samples.1.need.nothing.rew",
    ),
    "no reward": (LINE.replace(b'"reward": 1.0', b'"reward": null'), "without a reward"),
    "a sample that has not ended": (edited(*NEED, value={"needs": "tokens", "trajectory": 0}), "without a reward"),
    "another need": (edited(*NEED, "needs", value="x"), "samples.1.need"),
    "another finish reason": (edited(*NEED, "reason", value="x"), "samples.1.need.nothing.reason"),
    "a surrogate": (edited("prompt", "text", value="\ud800"), "line 1"),
}


def test_recorded_rollouts(tmp_path: Path, outcomes: Outcomes) -> None:
    file = write_groups(tmp_path, 1, [GROUP])
    assert read_groups(tmp_path, 1) == [GROUP]
    packed = file.read_bytes()
    whole = gzip.compress(LINE * 50, mtime=0)
    contents = {name: (gzip.compress(text, mtime=0), why) for name, (text, why) in RECORDS.items()}
    contents |= {f"cut after {n} bytes": (whole[:n], "cannot be read|is empty") for n in (0, 1, 9, 15, len(whole) - 9)}
    contents |= {f"byte {n} changed": (changed(packed, n), "cannot be read") for n in (0, 2, 40, len(packed) - 6)}
    contents["no gzip"] = (LINE, "cannot be read")
    for name, (content, why) in contents.items():
        file.write_bytes(content)
        outcomes.add(*replay(tmp_path, file, name, why))
    for name, (make, _) in NO_FILES.items():
        file.unlink(missing_ok=True)
        make(file)
        outcomes.add(*replay(tmp_path, file, name, "cannot be read|is missing"))
        if file.is_dir():
            file.rmdir()
    assert outcomes.total > 40


def changed(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :]


def replay(folder: Path, file: Path, name: str, why: str | None) -> tuple[str, str, str | None]:
    try:
        with deadline(HANG_S):
            groups = read_groups(folder, 1)
    except DataError as error:
        wrong = "refused" if why is None else clear(error, why, file)
        return "a record", "clear error", wrong and f"{name}: {wrong}"
    except (Exception, HangError) as error:
        return "a record", type(error).__name__, f"{name}: {error!r}"[:300]
    return "a record", "right", None if why is None and groups == [GROUP] else f"{name}: loaded"
