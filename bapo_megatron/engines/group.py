"""The process group that carries weights: rank 0 is the trainer's first process, every other rank an engine.

It is named, built on a store of its own, and independent of any default group: the scheme that SGLang uses
(srt/utils/common.py, init_custom_process_group), so that real SGLang servers can join.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Backend, GroupName, PrefixStore, _new_process_group_helper, _world

GroupBackend = Literal["gloo", "nccl"]

_BACKLOG = 2048  # ranks that may connect at once, as torch has it
_NCCL_SLACK = 10.0  # over NCCL torch's watchdog ends the process at its deadline: whoever broadcasts has to be first


def host_store(host: str, world_size: int, timeout_s: float, port: int = 0) -> dist.TCPStore:
    """Serve the rendezvous store of a new group, on rank 0. The system picks a port for 0 (`.port`).

    It listens at `host` alone: left to itself, torch listens on every interface, and a store obeys whoever reaches it.

    Raises:
        OSError: the port is taken.
    """
    with socket.create_server((host, port), backlog=_BACKLOG) as listener:
        return dist.TCPStore(
            host,
            listener.getsockname()[1],
            world_size,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def connect_store(host: str, port: int, world_size: int, timeout_s: float) -> dist.TCPStore:
    """The store that rank 0 hosts, for the other ranks. Raises dist.DistStoreError when nobody answers in time."""
    return dist.TCPStore(host, port, world_size, is_master=False, timeout=timedelta(seconds=timeout_s))


class UpdateGroup:
    """Membership in one weight-update group. Rank 0 sends."""

    def __init__(
        self, name: str, *, store: dist.Store, rank: int, world_size: int, backend: GroupBackend, timeout_s: float
    ) -> None:
        """Over gloo: blocks until every rank has joined; `timeout_s` bounds that and each broadcast.

        Over NCCL: does not wait for the others, the ranks meet in the first broadcast. Whoever broadcasts watches its
        deadline, and abandons the group at it.

        Raises:
            RuntimeError, dist.DistError: a rank did not join in time.
        """
        self.name = name
        self._backend = backend
        self._launch: Launch | None = None  # the latest, over NCCL
        timeout = timedelta(seconds=timeout_s)
        store.set_timeout(timeout)
        self._store = store  # keeps rank 0's server alive as long as the group
        self._group: dist.ProcessGroup | None
        self._group, _ = _new_process_group_helper(
            world_size,
            rank,
            [],
            Backend(backend),
            PrefixStore(name, store),
            group_name=GroupName(name),
            timeout=timeout * _NCCL_SLACK if backend == "nccl" else timeout,
        )
        # torch looks the ranks of a group up here; a group outside the default one has to say so itself.
        _world.pg_group_ranks[self._group] = {i: i for i in range(world_size)}

    def broadcast(self, tensor: Tensor, timeout_s: float | None = None) -> dist.Work:
        """Start sending (rank 0) or receiving into `tensor`; the caller waits for the returned work.

        Over gloo, `timeout_s` bounds it instead of the group's deadline. Over NCCL, one is started at a time.
        """
        group = self._group
        assert group is not None, "the group was left"
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        if timeout_s is not None:
            options.timeout = timedelta(seconds=timeout_s)
        if self._backend == "gloo":
            return group.broadcast([tensor], options)
        assert self._launch is None or self._launch.is_completed(), "threads would start them in any order"
        self._launch = Launch(lambda: group.broadcast([tensor], options), tensor.device)
        return self._launch

    def close(self) -> None:
        """Leave the group. While a broadcast is pending this blocks, until the broadcast's deadline."""
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)
            del group  # the connections are closed with the last reference

    def abandon(self) -> None:
        """Leave a group whose broadcast may never end: NCCL aborts it, gloo lets go of it at its deadline.

        Returns at once. Where a rank never came to the first broadcast over NCCL, the group and what was to be sent
        stay until this process ends: torch cannot abort a communicator that is still being made.
        """

        def leave() -> None:
            if self._launch is not None:
                self._launch.join()
            if self._group is not None:
                self._group.abort()
            self.close()

        threading.Thread(target=leave, name=f"leave-{self.name}", daemon=True).start()


class Launch(dist.Work):
    """A broadcast on its way, to be polled until it is completed.

    Over NCCL the first collective of a group makes the communicator, and blocks until all ranks have entered it
    (ncclCommInitRank): no deadline of torch's covers that, and nothing can end it. So it is started in a daemon thread,
    which stays behind, with what it was to send, where a rank never comes. Not yet run on a GPU.
    """

    def __init__(self, start: Callable[[], dist.Work], device: torch.device) -> None:
        """Returns at once.

        Args:
            start: starts it; its work sees all that was issued on the caller's current stream of `device` until now.
        """
        super().__init__()
        self._work: Future[dist.Work] = Future()
        place = _after_current_stream(device)
        self._thread = threading.Thread(target=self._run, args=(start, place), name="launch-broadcast", daemon=True)
        self._thread.start()

    def is_completed(self) -> bool:
        """It was sent, or has failed: `wait` tells."""
        return self._work.done() and (self._work.exception() is not None or self._work.result().is_completed())

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """To be called once it is completed. Raises RuntimeError where it failed."""
        assert self._work.done(), "is_completed() comes before wait()"
        return self._work.result().wait(timeout)

    def join(self) -> None:
        """Until it has been started, or could not be: possibly for ever."""
        self._thread.join()

    def _run(self, start: Callable[[], dist.Work], place: contextlib.AbstractContextManager[None]) -> None:
        try:
            with place:
                self._work.set_result(start())
        except Exception as problem:  # whatever it is: it belongs to who waits
            self._work.set_exception(problem)


def _after_current_stream(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """For another thread: a stream on `device` that goes on from where the caller's current one is now."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    issued = torch.cuda.Event()
    issued.record(torch.cuda.current_stream(device))

    @contextlib.contextmanager
    def place() -> Iterator[None]:
        with torch.cuda.device(device):
            stream = torch.cuda.Stream(device)
            stream.wait_event(issued)
            with torch.cuda.stream(stream):
                yield

    return place()
