"""The process group that carries weights: rank 0 is the trainer's first process, every other rank an engine.

It is named, built on a store of its own, and independent of any default group: the scheme that SGLang uses
(srt/utils/common.py, init_custom_process_group), so that real SGLang servers can join.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Literal

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Backend, GroupName, PrefixStore, _new_process_group_helper, _world

from bapo_megatron.sync.launch import Launch

GroupBackend = Literal["gloo", "nccl"]

_NCCL_SLACK = 10.0  # over NCCL torch's watchdog ends the process at its deadline: whoever broadcasts has to be first


def host_store(host: str, world_size: int, timeout_s: float) -> dist.TCPStore:
    """The rendezvous store of a new group, on a port that the system picks (`.port`). For rank 0."""
    return dist.TCPStore(
        host, 0, world_size, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
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
