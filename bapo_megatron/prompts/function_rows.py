"""Rows of a function of the user's own: data.source = "my_module:my_rows", with data.options as its arguments.

    def my_rows(level=1):
        yield {"prompt": "1+1=", "answer": "2"}

`bapo check` calls it, and so does each process that needs prompts: it returns the same rows each time.
"""

import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from bapo_megatron.config.dotted import SOURCE, Seam
from bapo_megatron.errors import UserError, plural
from bapo_megatron.prompts.rows import Row, as_row

MAX_ROWS = 5_000_000
"""Rows that are read: a function that gives more is taken for one that never ends."""


def function_rows(path: str, options: Mapping[str, Any], table: str) -> Iterator[Row]:
    """Yield the rows of the function at a dotted path.

    Args:
        options: its arguments, by name.
        table: the place of its settings.

    Raises UserError if it cannot be loaded or called, raises, gives no rows, or never ends.
    """
    seam = replace(SOURCE, setting=f"{table}.source")
    function = seam.load(path)
    signature = seam.signature(path, function)
    try:
        signature.bind(**options)
    except TypeError as error:
        raise seam.error(path, f"its signature is {signature}, which does not fit {table}.options: {error}") from None
    number = 0
    try:
        returned = function(**options)
        if isinstance(returned, str | bytes | Mapping) or not isinstance(returned, Iterable):
            raise _misfit(seam, path, f"it returned a value of type {type(returned).__name__}, not rows")
        for number, value in enumerate(returned, start=1):
            if number > MAX_ROWS:
                raise _misfit(seam, path, f"it gave {MAX_ROWS:,} rows, and more follow; let it end")
            yield as_row(f"{path}, row {number}", value)
    except _MisfitError:
        raise
    except (Exception, SystemExit) as error:  # a function of the user may fail in any way
        after = f" after {plural(number, 'row')}" if number else ""
        raise seam.error(path, f"it raised {_told(error, path)}{after}") from error


class _MisfitError(UserError):
    """Something other than rows from the function."""


def _misfit(seam: Seam, path: str, problem: str) -> _MisfitError:
    return _MisfitError(str(seam.error(path, problem)))


def _told(error: BaseException, path: str) -> str:
    """Return an exception's type and text, with the last place in the function's module."""
    file = getattr(sys.modules[path.partition(":")[0]], "__file__", None)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f" ({file}:{lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"
