"""Log-probs from hidden states: ours against full logits, in one run, with errors against float64.

    python benchmarks/logprobs.py memory [TOKENS] [VOCAB]      peak of forward and backward (default 8192, 152064)
    python benchmarks/logprobs.py time [TOKENS] [VOCAB]        time and error of each way (default 1024, 32000)
    python benchmarks/logprobs.py time --size 7b --device cuda --backend both --output rows.json
                                                               the same on a GPU, in bfloat16, both ways by turns,
                                                               with the peak of memory; the rows as JSON too

Ways: ours (`algorithms/logprobs.py`, in chunks of so many rows, logits computed again in the backward pass); a plain
vocabulary-parallel cross-entropy (whole logits, Megatron-Core's VocabParallelCrossEntropy, one rank, no entropy);
Hugging Face's (whole logits, log_softmax, gather). The last two keep the logits: where free memory is short they are
left out. Times on a CPU are CPU seconds: what an idle machine's clock would show, whatever else runs on this one.

Memory is the growth of this process's resident set over what it held before the call, its peak as Linux counts it
(/proc/self/status), gradients included; each measurement runs in a process of its own.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bapo_megatron.algorithms.logprobs import VocabShard, token_log_probs

HIDDEN_SIZE = 64  # small, so that the gradients of hidden states and weights do not hide the cost of logits
CHUNK_TOKENS = (256, 512, 1024)
GPU_CHUNK_TOKENS = (256, 1024, 4096)
NUM_RUNS = 5
GPU_HIDDEN_SIZE = 3584  # of a 7B model, for matrix products as in training
MIB = 1 << 20
# Tokens, vocabulary and hidden size of one rank: whole models, and one of eight tensor ranks of Qwen3-32B.
SIZES = {
    "tiny": (64, 512, 32),
    "1.5b": (8192, 151_936, 1536),
    "7b": (8192, 152_064, 3584),
    "32b-tp8": (16_384, 18_992, 5120),
}

Way = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(chunk_tokens: int, **options: Any) -> Way:
    def way(hidden_RH: Tensor, weight_VH: Tensor, targets_R: Tensor) -> Tensor:
        size = weight_VH.shape[0]
        shard = VocabShard(group=None, start=0, size=size, vocab_size=size)
        return token_log_probs(hidden_RH, weight_VH, targets_R, shard=shard, chunk_tokens=chunk_tokens, **options)[0]

    return way


def vocab_parallel(hidden_RH: Tensor, weight_VH: Tensor, targets_R: Tensor) -> Tensor:
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    return -vocab_parallel_cross_entropy((hidden_RH @ weight_VH.T)[:, None], targets_R[:, None])[:, 0]


def hugging_face(hidden_RH: Tensor, weight_VH: Tensor, targets_R: Tensor) -> Tensor:
    return (hidden_RH @ weight_VH.T).log_softmax(-1).gather(1, targets_R[:, None])[:, 0]


def our_ways(title: str, chunks: tuple[int, ...], **options: Any) -> dict[str, Way]:
    return {
        **{f"{title}, {chunk}": ours(chunk, **options) for chunk in chunks},
        f"{title}, {chunks[0]}, no entropy": ours(chunks[0], with_entropy=False, **options),
    }


OTHER_WAYS: dict[str, Way] = {"vocab-parallel": vocab_parallel, "Hugging Face": hugging_face}
WAYS = our_ways("ours", CHUNK_TOKENS) | OTHER_WAYS


def inputs(
    num_tokens: int, vocab_size: int, device: str = "cpu", hidden_size: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Make inputs, float32 on a CPU, bfloat16 on a GPU; the spread of logits does not depend on the hidden size."""
    default, dtype = (GPU_HIDDEN_SIZE, torch.bfloat16) if device == "cuda" else (HIDDEN_SIZE, torch.float32)
    size = hidden_size or default
    generator = torch.Generator().manual_seed(0)
    hidden_RH = torch.randn(num_tokens, size, generator=generator).to(device, dtype).requires_grad_()
    spread = 0.3 * (HIDDEN_SIZE / size) ** 0.5
    weight_VH = torch.randn(vocab_size, size, generator=generator).mul_(spread).to(device, dtype).requires_grad_()
    return hidden_RH, weight_VH, torch.randint(vocab_size, (num_tokens,), generator=generator).to(device)


def run(way: Way, hidden_RH: Tensor, weight_VH: Tensor, targets_R: Tensor) -> tuple[Tensor, float, float]:
    """Return log-probs and the seconds (see `now`) of the forward and the backward pass."""
    hidden_RH.grad = weight_VH.grad = None
    start = now(hidden_RH)
    log_probs_R = way(hidden_RH, weight_VH, targets_R)
    middle = now(hidden_RH)
    log_probs_R.mean().backward()
    return log_probs_R.detach(), middle - start, now(hidden_RH) - middle


def now(tensor: Tensor) -> float:
    """Return CPU seconds of this process, or on a GPU the clock once it is idle."""
    if not tensor.is_cuda:
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def resident_bytes(which: str) -> int:
    """Return `VmRSS` (now) or `VmHWM` (peak) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(which):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {which}: this benchmark needs Linux")


def measure_memory(way: str, num_tokens: int, vocab_size: int) -> None:
    """Print the peak over the inputs, in bytes. Runs in its own process: a peak cannot be reset."""
    tensors = inputs(num_tokens, vocab_size)
    run(WAYS[way], *inputs(8, 64))  # exclude libraries and threads that the first call loads
    before = resident_bytes("VmRSS")
    run(WAYS[way], *tensors)
    print(resident_bytes("VmHWM") - before)


def memory(num_tokens: int, vocab_size: int) -> None:
    logits = 4 * num_tokens * vocab_size
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    print(f"memory: {num_tokens} tokens x {vocab_size}; float32 logits {logits / MIB:.0f} MiB")
    for way in WAYS:
        if not way.startswith("ours") and 4 * logits > free:
            print(f"{way:>22}: left out, may need four times the logits; choose a smaller size")
            continue
        command = [sys.executable, __file__, "measure-memory", way, str(num_tokens), str(vocab_size)]
        peak = int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout)
        print(f"{way:>22}: peak {peak / MIB:6.0f} MiB = {peak / logits:.3f} of the logits")


def timing(
    num_tokens: int, vocab_size: int, device: str, ways: dict[str, Way], hidden_size: int | None
) -> dict[str, Any]:
    """Print a line for each way; return them as numbers. Bytes are the growth over the inputs, on a GPU only."""
    hidden_RH, weight_VH, targets_R = inputs(num_tokens, vocab_size, device, hidden_size)
    exact = [x.detach().double().requires_grad_() for x in (hidden_RH, weight_VH)]
    exact_R, _, _ = run(hugging_face, exact[0], exact[1], targets_R)
    size = hidden_RH.shape[1]
    print(f"time: {num_tokens} tokens x {vocab_size}, hidden {size}, median of {NUM_RUNS}, ways taking turns")
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    errors, peaks = {}, {}
    for way in ways.values():
        run(way, *inputs(8, 64, device, hidden_size))  # compiles kernels
    for _ in range(NUM_RUNS):
        for name, way in ways.items():
            before = reset_peak() if device == "cuda" else 0
            log_probs_R, forward, backward = run(way, hidden_RH, weight_VH, targets_R)
            seconds[name].append((forward, backward))
            peaks[name] = torch.cuda.max_memory_allocated() - before if device == "cuda" else None
            assert hidden_RH.grad is not None
            assert weight_VH.grad is not None
            pairs = ((log_probs_R, exact_R), (hidden_RH.grad, exact[0].grad), (weight_VH.grad, exact[1].grad))
            errors[name] = [float((got - want).abs().max() / want.abs().max()) for got, want in pairs]
    rows = {}
    for name, pairs_s in seconds.items():
        forward, backward = (statistics.median(x) for x in zip(*pairs_s, strict=True))
        peak = peaks[name]
        rows[name] = {"forward_s": forward, "backward_s": backward, "errors": errors[name], "peak_bytes": peak}
        print(
            f"{name:>22}: forward {forward * 1e3:6.0f} ms, backward {backward * 1e3:6.0f} ms, together "
            f"{(forward + backward) * 1e3:6.0f} ms; largest relative error: log-probs {errors[name][0]:.1e}, "
            f"gradients {errors[name][1]:.1e} {errors[name][2]:.1e}"
            + (f"; peak {peak / MIB:.0f} MiB" if peak is not None else "")
        )
    return rows


def reset_peak() -> int:
    """Forget the peak of the GPU's memory; return the bytes in use."""
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def start_one_rank(device: str = "cpu") -> None:
    """Form the tensor-parallel group that Megatron's cross-entropy needs."""
    from megatron.core import parallel_state

    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()


def main() -> None:
    if sys.argv[1:2] == ["measure-memory"]:
        way, num_tokens, vocab_size = sys.argv[2:]
        if way == "vocab-parallel":
            start_one_rank()
        return measure_memory(way, int(num_tokens), int(vocab_size))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("memory", "time"), nargs="?", default="memory")
    parser.add_argument("tokens", type=int, nargs="?")
    parser.add_argument("vocab", type=int, nargs="?")
    parser.add_argument("--size", choices=SIZES, help="time only: tokens, vocabulary and hidden size by name")
    parser.add_argument("--output", type=Path, help="time only: file for the rows, as JSON")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="time only")
    parser.add_argument("--backend", choices=("torch", "triton", "both"), default="torch", help="time only")
    options = parser.parse_args()
    defaults = (8192, 152_064) if options.mode == "memory" else (1024, 32_000)
    num_tokens, vocab_size, hidden_size = SIZES[options.size] if options.size else (*defaults, None)
    num_tokens, vocab_size = options.tokens or num_tokens, options.vocab or vocab_size
    print(f"{platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    if options.mode == "memory":
        return memory(num_tokens, vocab_size)
    if options.device == "cuda":
        print(torch.cuda.get_device_name())
    chunks = GPU_CHUNK_TOKENS if options.device == "cuda" else CHUNK_TOKENS
    ways = {} if options.backend == "triton" else our_ways("ours", chunks)
    ways |= {} if options.backend == "torch" else our_ways("Triton", chunks, backend="triton")
    start_one_rank(options.device)
    rows = timing(num_tokens, vocab_size, options.device, ways | OTHER_WAYS, hidden_size)
    if options.output:
        options.output.write_text(json.dumps(rows, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
