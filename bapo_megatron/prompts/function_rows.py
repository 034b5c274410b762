"""Rows from the user's own function: data.source = "my_module:my_rows", with data.options as its arguments.

    def my_rows(level=1):
        yield {"prompt": "1+1=", "answer": "2"}

`bapo check` calls it, and so does each process that needs prompts, so it must return the same rows each time.
"""

import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from bapo_megatron.config.sources import SOURCE
from bapo_megatron.errors import UserError, in_one_line, plural
from bapo_megatron.prompts.rows import MAX_ROWS, Row, as_row


def function_rows(path: str, options: Mapping[str, Any], table: str) -> Iterator[Row]:
    """Yield the rows of the function at a dotted path.

    Args:
        options: the function's arguments, by name.
        table: the place of its settings in the configuration.

    Raises UserError if it cannot be loaded or called, raises, gives no rows, or never ends.
    """
    seam = replace(SOURCE, setting=f"{table}.source")
    function = seam.load(path)
    signature = seam.signature(path, function)
    try:
        signature.bind(**options)
    except TypeError as error:
        raise seam.error(path, f"its signature is {signature}, which does not fit {table}.options: {error}") from None

    def failed(error: BaseException, num_rows: int) -> UserError:
        after = f" after {plural(num_rows, 'row')}" if num_rows else ""
        return seam.error(path, f"it raised {_told(error, path)}{after}")

    try:
        returned = function(**options)
        rows = iter(returned) if _may_be_rows(returned) else None
    except (Exception, SystemExit) as error:  # a user's function may fail in any way
        raise failed(error, 0) from error
    if rows is None:
        raise seam.error(path, f"it returned a value of type {type(returned).__name__}, not rows")
    for number in range(1, MAX_ROWS + 1):
        try:
            value = next(rows)
        except StopIteration:
            return
        except (Exception, SystemExit) as error:
            raise failed(error, number - 1) from error
        yield as_row(f"{path}, row {number}", value)
    raise seam.error(path, f"it gave {MAX_ROWS:,} rows and did not end; make it end sooner")


def _may_be_rows(returned: Any) -> bool:
    return isinstance(returned, Iterable) and not isinstance(returned, str | bytes | Mapping)


def _told(error: BaseException, path: str) -> str:
    """Return an exception's type and text, and the last line of the function's module in its traceback."""
    file = getattr(sys.modules[path.partition(":")[0]], "__file__", None)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f" ({file}:{lines[-1]})" if lines else ""
    return f"{in_one_line(error)}{where}"
