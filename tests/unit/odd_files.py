"""Files of prompts with odd contents, each made from a seed: `python -m tests.unit.odd_files 2000` tries many."""

import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from bapo_megatron.errors import DataError
from bapo_megatron.prompts.jsonl import JsonlSource

PROMPTS, ANSWERS = ["1+1=", "1+2=", "1+3="], ["2", "3", "4"]
MAX_CHARS = 5000  # the longest message
ZONES = ("UTC", "Mars/Olympus", "+99:99", "-00:00:01", "", "\x1b[2J", "x" * 3000)


def write_odd(folder: Path, seed: int) -> tuple[Path, bool]:
    """Write a file; return it, and whether `PROMPTS` and `ANSWERS` must be found in it."""
    draw = random.Random(seed)
    kind = draw.choice(["parquet", "parquet", "csv", "json"])
    file = folder / f"data.{kind}"
    is_right = draw.random() < 0.6
    names = ["prompt", "answer"] if is_right else [_name(draw), draw.choice(["answer", _name(draw)])]
    num_more = draw.choice([1, 3, 30, 3000])
    more = dict.fromkeys(_name(draw) for _ in range(num_more))  # no name twice
    if kind == "parquet":
        is_right = _write_parquet(file, draw, names, [*more][:100], is_right)
    elif kind == "csv":
        columns = [*names, *(json.dumps(name)[1:-1].replace('"', "").replace(",", "") for name in more)]
        twice = [columns[-1]] if draw.random() < 0.3 else []
        cells = [[p, a, *["x" * 9] * num_more, "x"] for p, a in zip(PROMPTS, ANSWERS, strict=True)]
        is_right = is_right and len({*columns}) == len(columns) and not twice
        file.write_text(
            "\n".join(",".join(line[: len(columns + twice)]) for line in [columns + twice, *cells]), "utf-8", "replace"
        )
    else:
        row = dict.fromkeys(more, 1)
        rows = [json.dumps({names[0]: p, names[1]: a} | row) for p, a in zip(PROMPTS, ANSWERS, strict=True)]
        if draw.random() < 0.3:
            rows[-1], is_right = rows[-1][:-1] + f", {json.dumps([*more][-1])}: 2}}", False
        file.write_text("\n".join(rows), "utf-8")
    if draw.random() < 0.25:
        _damage(file, draw)
        return file, False
    return file, is_right and names == ["prompt", "answer"]


def _name(draw: random.Random) -> str:
    name = "".join(draw.choices("abcxyz _.-é\u2028\x1b\n\t", k=draw.choice([3, 8, 30])))
    return name * draw.choice([1] * 50 + [2000])


def _write_parquet(file: Path, draw: random.Random, names: list[str], more: list[str], is_right: bool) -> bool:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {names[0]: pa.array(PROMPTS)}
    columns[names[1]] = _odd_column(draw) if not is_right and draw.random() < 0.7 else pa.array(ANSWERS)
    for name in more:
        columns.setdefault(name, _odd_column(draw))
    while columns:
        try:
            pq.write_table(pa.table(columns), file, use_dictionary=draw.random() < 0.7, compression="zstd")
            return is_right
        except (pa.ArrowException, ValueError):  # the library itself does not write such a column
            columns = {name: column for name, column in columns.items() if _is_writable(name, column, file)}
    file.write_bytes(b"PAR1")
    return False


def _is_writable(name: str, column: Any, file: Path) -> bool:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        pq.write_table(pa.table({name: column}), file)
    except (pa.ArrowException, ValueError):
        return False
    return True


def _odd_column(draw: random.Random) -> Any:
    """Return three values of some type, extreme ones for times and dates."""
    import pyarrow as pa

    numbers = [draw.choice([0, 1, -1, 2**62, -(2**62), 2**63 - 1, draw.getrandbits(62)]) for _ in PROMPTS]
    types = [*(pa.timestamp(draw.choice(["ms", "us", "ns"]), zone) for zone in ZONES), pa.duration("us"), pa.date64()]
    plain = [
        pa.array(numbers).view(draw.choice(types)),
        pa.array([number >> 33 for number in numbers], pa.int32()).view(pa.date32()),
        pa.array([b"\xff\xfe", b"\x00", b""]),
        pa.array([b"\xff\xfe", b"a", b"b"]).view(pa.string()),
        pa.array([float("nan"), float("inf"), -0.0]),
        pa.array(["x" * draw.choice([1, 5000])] * 3).dictionary_encode(),
        pa.array([[("a", 1)], [], None], pa.map_(pa.string(), pa.int64())),
        pa.array([None] * 3),
    ]
    column = draw.choice(plain)
    shape = draw.choice(["flat", "flat", "list", "struct"])
    if shape == "list":
        return pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), column)
    return pa.StructArray.from_arrays([column], ["inner"]) if shape == "struct" else column


def _damage(file: Path, draw: random.Random) -> None:
    data = bytearray(file.read_bytes())
    if draw.random() < 0.3:
        del data[draw.randrange(len(data)) :]
    for _ in range(draw.randrange(1, 6)):
        if data:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    file.write_bytes(data)


def outcome(folder: Path, seed: int) -> str:
    """Return what an odd file gives, "prompts" or "error", or else what is wrong."""
    file, must_be_read = write_odd(folder, seed)
    try:
        source = JsonlSource(str(file))
    except DataError as error:
        text = str(error)
        if must_be_read:
            return f"refused: {text:.300}"
        is_short = len(text) <= MAX_CHARS and len(text.splitlines()) <= 6
        return "error" if is_short else f"{len(text)} characters: {text:.300}"
    if must_be_read and [(one.text, one.answer) for one in source.questions] != [*zip(PROMPTS, ANSWERS, strict=True)]:
        return f"other prompts: {source.questions[:1]}"
    told = source.not_used
    return "prompts" if told.isprintable() and len(told) <= MAX_CHARS else f"not short or plain: {told[:300]!r}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(Counter(outcome(Path(folder), seed) for seed in range(int(sys.argv[1]))))
