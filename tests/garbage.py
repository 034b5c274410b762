"""What a function leaves to Python's garbage collector."""

import gc
from collections.abc import Callable

from torch import Tensor


def tensors_in_cycles(function: Callable[[], object]) -> list[Tensor]:
    """Return the tensors that only the garbage collector can free after `function`, after one call to warm up."""
    function()
    gc.collect()
    gc.disable()
    try:
        function()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return [found for found in gc.garbage if isinstance(found, Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
