"""Local processes that form one gloo group and do a piece of work together whenever they are called."""

import multiprocessing as mp
import os
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

TIMEOUT_S = 600.0
_SLOW_IMPORTS = ("torch.distributed", "transformers", "bapo_megatron.learner.megatron")


class RankError(Exception):
    """A failure of a rank; the message is its traceback."""


class Ranks:
    """A group of ranks: `with Ranks(4, prepare, folder) as work: work(x)` is `prepare(folder)(x)` on each of them.

    `prepare` must be a module-level function. It runs once on each rank, with the variables that torchrun sets.
    """

    def __init__(self, num_ranks: int, prepare: Callable[..., Callable[..., Any]], *args: Any) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload([name for name in _SLOW_IMPORTS if name in sys.modules])
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            rank_args = (theirs, rank, num_ranks, port, prepare, args)
            process = context.Process(target=_serve, args=rank_args, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._first_reply()

    def __call__(self, *args: Any) -> Any:
        """Let all ranks work; return the first one's result."""
        for pipe in self._pipes:
            pipe.send(args)
        return self._first_reply()

    def _first_reply(self) -> Any:
        """Wait for all ranks, or for the first one that fails."""
        replies: dict[Connection, Any] = {}
        while len(replies) < len(self._pipes):
            ready = wait([pipe for pipe in self._pipes if pipe not in replies], TIMEOUT_S)
            if not ready:
                raise RankError(f"only {len(replies)} of {len(self._pipes)} ranks were done after {TIMEOUT_S:g} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                error, replies[pipe] = pipe.recv()
                if error:
                    raise RankError(error)
        return replies[self._pipes[0]]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for pipe in self._pipes:
            pipe.close()  # tells the rank to end
        for process in self._processes:
            process.join(10.0)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(
    pipe: Connection, rank: int, num_ranks: int, port: int, prepare: Callable[..., Callable[..., Any]], args: Any
) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    try:
        work = prepare(*args)
        pipe.send(("", None))
        while True:
            result = work(*pipe.recv())
            pipe.send(("", result if rank == 0 else None))
    except EOFError:
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        with suppress(BrokenPipeError):  # another rank's failure was already reported
            pipe.send((traceback.format_exc(), None))
