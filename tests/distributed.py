"""Run a test body in new processes that share a gloo group, with a deadline and the child's traceback."""

import gc
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.hang import HANG_S

# These take seconds to import. The server that forks the children imports those that this test session has imported.
_SLOW_IMPORTS = ("torch.distributed", "transformers", "bapo_megatron.learner.megatron")
# What the forked ranks and engines of killable.py run; they all share one server.
_RUNS = ("bapo_megatron.trainer", "bapo_megatron.train", "bapo_megatron.engines.embedded.server")


def run_distributed(
    fn: Callable[..., None],
    world_size: int,
    *args: Any,
    timeout_s: float = HANG_S,
    backend: str = "gloo",
    spawned: bool = False,
) -> None:
    """Call `fn(rank, world_size, *args)` in `world_size` new processes that share a process group.

    The processes are forked from a server that holds imported modules and nothing else: no thread, no group, no state.
    `fn` must be importable (a module-level function) and report failure by raising; its module may register `backend`.
    If `spawned`, they import everything themselves.
    Raises AssertionError with the tracebacks of the ranks that failed, or TimeoutError naming the ranks still running
    after `timeout_s`.
    """
    with tempfile.TemporaryDirectory(prefix="bapo-test-") as folder:
        context: Any = mp.get_context("spawn") if spawned else forkserver()
        processes = [
            context.Process(target=_child, args=(fn, rank, world_size, folder, backend, args), daemon=True)
            for rank in range(world_size)
        ]
        try:
            for process in processes:
                process.start()
            _join(processes, time.monotonic() + timeout_s)
            codes = [process.exitcode for process in processes]  # None means still running
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                    process.join()
        tracebacks = [f"rank {path.stem}:\n{path.read_text()}" for path in sorted(Path(folder).glob("*.traceback"))]
        assert not tracebacks, "\n".join(["a distributed test failed", *tracebacks])
        assert not any(codes), f"a rank died without a traceback; exit codes by rank: {codes}"
        if None in codes:
            unfinished = [rank for rank, code in enumerate(codes) if code is None]
            raise TimeoutError(f"ranks {unfinished} of {world_size} were still running after {timeout_s:g} s")


def in_new_process(fn: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a module-level function, run in a process that ran nothing else and so may itself fork."""
    with ProcessPoolExecutor(1, mp_context=forkserver()) as pool:
        return pool.submit(fn, *args).result(HANG_S)


def forkserver() -> Any:
    """Return a multiprocessing context whose processes need not import the slow modules."""
    context = mp.get_context("forkserver")
    runs = _RUNS if "tests.integration.killable" in sys.modules else ()
    context.set_forkserver_preload([*(name for name in _SLOW_IMPORTS if name in sys.modules), *runs])
    return context


def _join(processes: list[Any], deadline: float) -> None:
    """Wait until all have ended, one has failed (the others would wait for it in a collective), or the time is up."""
    while time.monotonic() < deadline and any(process.is_alive() for process in processes):
        if any(process.exitcode not in (None, 0) for process in processes):
            return
        time.sleep(0.02)


def _child(fn: Callable[..., None], rank: int, world_size: int, folder: str, backend: str, args: tuple) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # collections need not visit a million imported objects
    try:
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=2 * HANG_S),  # the parent's deadline comes first
        )
        fn(rank, world_size, *args)
        dist.barrier()
    except BaseException:
        # Rename it into place, so that the parent never reads half a traceback.
        partial = Path(folder, f"{rank}.partial")
        partial.write_text(traceback.format_exc())
        partial.rename(Path(folder, f"{rank}.traceback"))
        raise SystemExit(1) from None
    dist.destroy_process_group()
