"""Gates in the processes of a run: a rank waits before a step until the test lets it go on, or ends it.

Python runs a module named `sitecustomize` as it starts; the one that `Gates` writes puts the gates in.
"""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Gates:
    """Gates before some steps, counted from 1 as on the screen; "import": before a rank imports torch.

    Example:
        gates = Gates(folder, 2)
        run = Popen(command, env=os.environ | gates.environment)
        gates.wait(2, is_alive)  # one step is done, saved, and recorded; the second one waits
        gates.open(2)
    """

    def __init__(self, folder: Path, *places: int | str) -> None:
        self._folder = folder
        folder.mkdir(parents=True)
        for place in places:
            (folder / f"closed-{place}").touch()
        (folder / "sitecustomize.py").write_text("import tests.integration.gates as g\ng.build_in_ranks()\n")
        path = [str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environment = {"PYTHONPATH": os.pathsep.join(path), "BAPO_TEST_GATES": str(folder)}

    def wait(self, place: int | str, is_alive: Callable[[], bool], complaint: Callable[[], str] = str) -> None:
        """Return once a rank stands before it."""
        from tests.distributed import HANG_S  # with torch, which the processes of a run are to import themselves

        deadline = time.monotonic() + HANG_S
        while not (self._folder / f"reached-{place}").exists():
            assert is_alive(), f"the run ended before gate {place}\n{complaint()}"
            assert time.monotonic() < deadline, f"nobody came to gate {place}\n{complaint()}"
            time.sleep(0.05)

    def open(self, place: int | str) -> None:
        (self._folder / f"closed-{place}").unlink()


def build_in_ranks() -> None:
    """In any process of the run, as it starts."""
    command = " ".join(sys.orig_argv)
    if "bapo_megatron.worker" in command or "bapo_megatron.slurm.node" in command:
        build()


def build() -> None:
    """Put the gates into this process, a rank."""
    from bapo_megatron import runtime
    from bapo_megatron.runtime.stopwatch import Stopwatch

    steps, starting = Stopwatch.steps, runtime.starting

    def steps_through_gates(self: Stopwatch, numbers: Iterable[int]) -> Iterator[int]:
        for step in steps(self, numbers):
            _pass(step + 1)
            yield step

    def starting_through_gate() -> object:
        _pass("import")
        return starting()

    Stopwatch.steps = steps_through_gates  # type: ignore[method-assign]
    runtime.starting = starting_through_gate  # type: ignore[assignment]


def _pass(place: int | str) -> None:
    """Wait; a rank ends with its launcher."""
    folder = Path(os.environ["BAPO_TEST_GATES"])
    while (folder / f"closed-{place}").exists():
        (folder / f"reached-{place}").touch()
        time.sleep(0.02)
