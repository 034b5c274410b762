"""The process group that carries weights: rank 0 is the trainer's first process, all other ranks are engines.

It has its own name and store and needs no default group, as in SGLang (srt/utils/common.py,
init_custom_process_group), so that real SGLang servers can join.
"""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Backend, GroupName, PrefixStore

_T = TypeVar("_T")
GroupBackend = Literal["gloo", "nccl"]

_BACKLOG = 2048  # ranks that may connect at the same time, as in torch
_CONNECT_S = 30.0  # a process reaches its own store immediately, unless the machine is busy
_PROBE_INTERVAL_S = 1.0
_NCCL_SLACK = 10.0  # over NCCL, torch's watchdog ends the process at its deadline, so the sender's own must come first


def host_store(host: str, world_size: int, timeout_s: float, port: int = 0) -> dist.TCPStore:
    """Serve the rendezvous store of a new group, on rank 0. For port 0 the system picks one (`.port`).

    It listens at `host` only. By default torch listens on every interface, and a store obeys every client.

    Raises:
        OSError: the port is taken.
    """
    with socket.create_server((host, port), backlog=_BACKLOG) as listener:
        return dist.TCPStore(
            host,
            listener.getsockname()[1],
            world_size,
            is_master=True,
            timeout=timedelta(seconds=max(timeout_s, _CONNECT_S)),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def connect_store(host: str, port: int, world_size: int, timeout_s: float) -> dist.TCPStore:
    """Connect to the store that rank 0 hosts. Raises dist.DistStoreError if nothing answers in time."""
    return dist.TCPStore(host, port, world_size, is_master=False, timeout=timedelta(seconds=timeout_s))


def reach_store(host: str, port: int, world_size: int, timeout_s: float) -> dist.TCPStore:
    """Connect to a store that is already hosted, as an engine does when told to join a group.

    torch would keep trying to reach a store that is gone because the sender has cancelled the rendezvous.

    Raises:
        RuntimeError: the store is gone, or the other ranks do not come in time.
    """
    reached = in_thread("reach-store", lambda: connect_store(host, port, world_size, timeout_s))
    while not wait([reached], _PROBE_INTERVAL_S).done:
        try:
            socket.create_connection((host, port), timeout_s).close()
        except OSError as problem:
            raise RuntimeError(f"nobody is waiting at {host}:{port} any longer: {problem}") from problem
    return reached.result()


def in_thread(name: str, call: Callable[[], _T]) -> Future[_T]:
    """Start `call` in a daemon thread, because it may block forever; return its outcome as a future."""
    outcome: Future[_T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except Exception as problem:  # any error belongs to the code that waits
            outcome.set_exception(problem)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome


class UpdateGroup:
    """Membership in one weight-update group. Rank 0 sends."""

    def __init__(
        self, name: str, *, store: dist.Store, rank: int, world_size: int, backend: GroupBackend, timeout_s: float
    ) -> None:
        """Join the group.

        Over gloo this blocks until every rank has joined; `timeout_s` bounds it and each broadcast. Over NCCL it does
        not wait: the ranks meet in the first broadcast, and its caller watches the deadline and abandons the group.

        Raises:
            RuntimeError, dist.DistError: a rank did not join in time.
        """
        self.name = name
        self.backend = backend
        self.server: dist.Store | None = None  # on rank 0, serves the rendezvous as long as the group lives
        self._launch: Launch | None = None  # the latest, over NCCL
        self._is_abandoned = False
        timeout = timedelta(seconds=timeout_s)
        store.set_timeout(timeout)
        self._store = store  # the connection must last as long as the group
        self.process_group: dist.ProcessGroup | None  # None once left
        self.process_group, _ = distributed_c10d._new_process_group_helper(
            world_size,
            rank,
            [],
            Backend(backend),
            PrefixStore(name, store),
            group_name=GroupName(name),
            timeout=timeout * _NCCL_SLACK if backend == "nccl" else timeout,
        )
        # torch looks up a group's ranks here; a group outside the default one has to add itself.
        distributed_c10d._world.pg_group_ranks[self.process_group] = {i: i for i in range(world_size)}

    def broadcast(self, tensor: Tensor, timeout_s: float | None = None) -> dist.Work:
        """Start sending (rank 0) or receiving into `tensor`; the caller waits for the returned work.

        Over gloo, `timeout_s` replaces the group's deadline. Over NCCL, broadcasts start one at a time.
        """
        group = self.process_group
        assert group is not None, "the group was left"
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        if timeout_s is not None:
            options.timeout = timedelta(seconds=timeout_s)
        if self.backend == "gloo":
            return group.broadcast([tensor], options)
        assert self._launch is None or self._launch.is_completed(), "threads would start them in any order"
        self._launch = Launch(lambda: group.broadcast([tensor], options), tensor.device)
        return self._launch

    def close(self) -> None:
        """Leave the group. A pending broadcast blocks this until its deadline."""
        group, self.process_group = self.process_group, None
        if group is not None:
            dist.destroy_process_group(group)
            del group  # the connections are closed with the last reference

    def abandon(self) -> None:
        """Leave a group whose broadcast may never end, without waiting: NCCL aborts it, gloo drops it at its deadline.

        If a rank never came to the first broadcast over NCCL, the group and its data stay until this process ends:
        torch cannot abort a communicator that is still being made.
        """
        if self._is_abandoned:
            return
        self._is_abandoned = True

        def leave() -> None:
            if self._launch is not None:
                self._launch.join()
            if self.process_group is not None:
                self.process_group.abort()
            self.close()

        in_thread(f"leave-{self.name}", leave)


class Launch(dist.Work):
    """A broadcast over NCCL, started in a thread and polled until it is completed.

    The first collective of a group makes the communicator and blocks until all ranks have entered it
    (ncclCommInitRank); no deadline of torch's covers that, and nothing can end it. If a rank never comes, the thread
    stays behind with the data it was to send.
    """

    def __init__(self, start: Callable[[], dist.Work], device: torch.device) -> None:
        """Call `start` in a thread; its work sees all that the caller's current stream of `device` was given so far."""
        super().__init__()
        place = _after_current_stream(device)

        def started() -> dist.Work:
            with place:
                return start()

        self._work = in_thread("launch-broadcast", started)

    def is_completed(self) -> bool:
        """Return whether it was sent or has failed; `wait` reports which."""
        return self._work.done() and (self._work.exception() is not None or self._work.result().is_completed())

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Finish a completed broadcast. Raises RuntimeError if it failed."""
        assert self._work.done(), "is_completed() comes before wait()"
        return self._work.result().wait(timeout)

    def join(self) -> None:
        """Wait until the broadcast has started or has failed to start, possibly forever."""
        wait([self._work])


def _after_current_stream(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Return a context for another thread: a stream on `device` that waits for the caller's current one."""
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
