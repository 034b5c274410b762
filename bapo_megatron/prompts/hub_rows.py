"""Rows of a data set on the Hugging Face hub, read with the library `datasets`, an extra."""

from collections.abc import Iterator
from pathlib import Path

from bapo_megatron.errors import DataError, in_one_line, install_command
from bapo_megatron.prompts.rows import Row, as_row

_MAX_REASON_CHARS = 300


def hub_rows(path: str | None, subset: str | None, split: str, table: str) -> Iterator[Row]:
    """Yield the rows of a split; what is not in the cache is downloaded, with a progress bar.

    Args:
        path: a name, such as "openai/gsm8k" or "openai/gsm8k@REVISION".
        table: the place of these settings in the configuration.

    Raises DataError if the library is missing, or cannot load the rows.
    """
    if not path:
        raise DataError(f"{table}.source = 'hub' needs {table}.path: the name of the data set")
    if Path(path).expanduser().is_file():
        raise DataError(f'{table}.path={path} is a file, not a data set on the hub; set {table}.source="jsonl"')
    try:
        import datasets
    except ImportError:
        raise DataError(
            f'{table}.source="hub" needs datasets, which cannot be imported; run `{install_command("datasets")}`, or '
            f'download a file of it and set {table}.source="jsonl"'
        ) from None
    name, _, revision = path.partition("@")
    asked = f"{table}.path={path}, {f'{table}.subset={subset}, ' if subset is not None else ''}{table}.split={split}"
    try:
        rows = list(datasets.load_dataset(name, subset, split=split, revision=revision or None))
    except Exception as error:  # the library raises many types
        reason = in_one_line(error)[:_MAX_REASON_CHARS].rstrip(".")
        raise DataError(
            f"{asked}: datasets cannot load this: {reason}; correct the settings, or, if the hub cannot be reached, "
            f'download a file of it elsewhere and set {table}.source="jsonl"'
        ) from error
    for number, value in enumerate(rows, start=1):
        yield as_row(f"{path} {split}, row {number}", value)
