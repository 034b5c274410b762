"""The parts of weight sync and checkpoints that depend on CUDA streams, NCCL and page-locked memory."""

import gc
import time

import torch
import torch.distributed as dist

from bapo_megatron.checkpoint.host_buffer import HostBuffer
from bapo_megatron.engines.update_group import Launch, UpdateGroup, host_store
from tests.distributed import HANG_S

BUSY_CYCLES = 200_000_000  # about 0.1 s


def finish(work: dist.Work) -> None:
    deadline = time.monotonic() + HANG_S
    while not work.is_completed():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert work.wait()


def test_a_broadcast_sees_what_its_caller_packed_on_a_busy_stream() -> None:
    store = host_store("127.0.0.1", 1, 60)
    alone = UpdateGroup("alone", store=store, rank=0, world_size=1, backend="nccl", timeout_s=HANG_S)
    for value in range(3):
        with torch.cuda.stream(torch.cuda.Stream()):
            data, seen = torch.zeros(2**20, device="cuda"), torch.zeros(2**20, device="cuda")
            torch.cuda._sleep(BUSY_CYCLES)
            data.fill_(value + 1)

            def start(data: torch.Tensor = data, seen: torch.Tensor = seen) -> dist.Work:
                seen.copy_(data)
                assert alone.process_group is not None
                return alone.process_group.broadcast([data], dist.BroadcastOptions())

            finish(Launch(start, data.device))
            torch.cuda.synchronize()
            assert (seen == value + 1).all()
            finish(alone.broadcast(data))
    alone.abandon()


def test_copies_to_locked_memory_are_complete_and_ordered() -> None:
    buffer = HostBuffer()
    for value in (1.0, 2.0):
        tensor = torch.zeros(1000, 1000, device="cuda", dtype=torch.bfloat16)
        torch.cuda._sleep(BUSY_CYCLES)
        tensor.fill_(value)
        transposed, count, on_cpu = buffer.copy([tensor.t(), torch.arange(7, device="cuda"), torch.full((3,), value)])
        tensor.zero_()
        assert transposed.is_pinned()
        buffer.wait()
        assert (transposed == value).all()
        assert count.tolist() == list(range(7))
        assert on_cpu.tolist() == [value] * 3
    del buffer
    gc.collect()
    assert not transposed.is_pinned(), "given back"
