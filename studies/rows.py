"""A study's rows: one line of NAME.jsonl for each finished run. The page is made from them alone.

So a study continues where its folder of runs is gone, and a row can be committed as soon as its run is done.
"""

import fcntl
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import fmean

from pydantic import BaseModel, ConfigDict, ValidationError

from bapo_megatron.errors import ConfigError, UserError
from bapo_megatron.runtime.files import JsonlWriter, read_jsonl


class Points(BaseModel):
    """A metric over a run: None where it has no value, or none that is finite."""

    model_config = ConfigDict(frozen=True)

    x: tuple[float, ...]  # optimizer updates so far, or probabilities
    y: tuple[float | None, ...]


class Row(BaseModel):
    """What a run leaves that has finished, or failed."""

    model_config = ConfigDict(frozen=True)  # a row of later code may have more

    run: str  # its identity (identity.py)
    code: str  # code_here() of the process that trained it
    variant: str
    seed: int
    time: str  # when its last attempt began, ISO 8601
    machine: str
    packages: Mapping[str, str]
    seconds: float  # of training
    finals: Mapping[str, float]  # by the columns of results.FINALS
    curves: Mapping[str, Points]
    failure: str | None = None  # why training ended early; such a run has curves, but no final figures


_BEGUN = "begun"  # the only key of a line without a row


class RowFile:
    """The rows of one study, and the code with which it began."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, Row]:
        """Return the rows by run, oldest first. The last row of a run counts; an unfinished line is left out.

        Raises:
            ConfigError: a line is an object, but no row.
        """
        rows: dict[str, Row] = {}
        for record in read_jsonl(self.path):
            if _BEGUN in record:
                continue
            try:
                row = Row.model_validate(record)
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(map(str, first["loc"]))
                raise ConfigError(
                    f"{self.path}: a line is not a row of a study ({where}: {first['msg']}); give another --output"
                ) from None
            rows.pop(row.run, None)
            rows[row.run] = row
        return rows

    def code(self) -> str | None:
        """Return the code of the latest row or, before it, of the runs that have begun; None for a new study."""
        records = read_jsonl(self.path)
        return str(records[-1].get(_BEGUN) or records[-1].get("code")) if records else None

    def begin(self, code: str) -> None:
        """Note the code of runs that begin, so that they continue with it, whenever they are interrupted."""
        if self.code() != code:
            with closing(JsonlWriter(self.path)) as writer:
                writer.write({_BEGUN: code})

    def add(self, row: Row) -> None:
        """Append a row, and read it back.

        Raises:
            UserError: the file does not have it afterwards, for instance because the disk is full.
        """
        with closing(JsonlWriter(self.path)) as writer:
            writer.write(row.model_dump())
        if self.read().get(row.run) != row:
            raise UserError(f"{self.path} does not hold the row that was just written; is the disk in order?")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes from adding rows.

        Raises:
            UserError: another process holds the file.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UserError(f"another process trains this study, and writes to {self.path}; wait for it") from None
            yield


def seconds_left(left: Mapping[tuple[str, int], float], rows: Iterable[Row], num_jobs: int) -> float | None:
    """Estimate how long the missing runs take, from the rows of the same variant, or of all; None without any.

    Args:
        left: the share of each missing run that is left, by variant and seed.
        num_jobs: how many runs train at the same time.
    """
    took: dict[str, list[float]] = {}
    for row in rows:
        took.setdefault(row.variant, []).append(row.seconds)
    if not took:
        return None
    mean_s = fmean(seconds for of_variant in took.values() for seconds in of_variant)
    total_s = sum(share * fmean(took.get(variant, [mean_s])) for (variant, _), share in left.items())
    return total_s / max(1, min(num_jobs, len(left)))
