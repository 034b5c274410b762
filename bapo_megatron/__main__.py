"""`python -m bapo_megatron` is the command `bapo`, and finds the same modules."""

import sys

if not sys.flags.safe_path:
    sys.path.append(sys.path.pop(0))  # the working folder must not hide modules that are imported below

import os
from pathlib import Path

from bapo_megatron.cli import main


def _remember_checkout() -> None:
    """Let the processes of a run find this package if it is not installed, but in the working folder."""
    root = str(Path(__file__).parents[1])
    kept, sys.path[:] = [*sys.path], [folder for folder in sys.path if folder != root]
    is_installed = any(finder.find_spec("bapo_megatron", None) for finder in sys.meta_path)
    sys.path[:] = kept
    if not is_installed:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), root]))


if __name__ == "__main__":
    _remember_checkout()
    sys.exit(main())
