"""Log-probs and entropies from hidden states, ours against full logits: time and peak memory.

    python -m benchmarks.logprobs [--quick]
    python -m benchmarks.logprobs time --size 7b --device cuda --backend both --output rows.json
                                    torch's and Triton's chunks on a GPU, in bfloat16, with errors against float64

The ways are ours (`algorithms/logprobs.py`, in chunks of rows, with logits recomputed in the backward pass); Hugging
Face's (whole logits, log_softmax, gather, the entropy of log_softmax); verl's functions for whole logits; and
Megatron-Core's vocabulary-parallel cross-entropy on one rank, which has no entropy, against ours without entropy. Each
computes log-probs and their gradients, which must agree. Times on a CPU are CPU seconds, forward and backward.

Memory is the growth of this process's resident set during the call, at its peak, as Linux counts it
(/proc/self/status), including gradients; each measurement runs in its own process.
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
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bapo_megatron.algorithms.logprobs import VocabShard, token_log_probs
from benchmarks.side_by_side import MIB, LeftOut, Rows, Turns, main, resident_bytes, same, take_turns

HIDDEN_SIZE = 64  # small, so that the gradients of hidden states and weights do not hide the cost of logits
CHUNK_TOKENS = (256, 1024, 4096)  # on a GPU
NUM_RUNS = 5
GPU_HIDDEN_SIZE = 3584  # as in a 7B model, for matrix products as in training
# Tokens, vocabulary and hidden size per rank: for whole models, and for one of eight tensor ranks of Qwen3-32B.
SIZES = {
    "tiny": (64, 512, 32),
    "1.5b": (8192, 151_936, 1536),
    "7b": (8192, 152_064, 3584),
    "32b-tp8": (16_384, 18_992, 5120),
}

Way = Callable[[Tensor, Tensor, Tensor], Tensor]  # hidden states, weights and targets to log-probs


def ours(chunk_tokens: int | None = None, **options: Any) -> Way:
    def way(hidden_RH: Tensor, weight_VH: Tensor, targets_R: Tensor) -> Tensor:
        size = weight_VH.shape[0]
        shard = VocabShard(group=None, start=0, size=size, vocab_size=size)
        return token_log_probs(hidden_RH, weight_VH, targets_R, shard=shard, chunk_tokens=chunk_tokens, **options)[0]

    return way


def vocab_parallel(hidden_RH: Tensor, weight_VH: Tensor, targets_R: Tensor) -> Tensor:
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    return -vocab_parallel_cross_entropy((hidden_RH @ weight_VH.T)[:, None], targets_R[:, None])[:, 0]


def hugging_face(hidden_RH: Tensor, weight_VH: Tensor, targets_R: Tensor) -> Tensor:
    log_probs_RV = (hidden_RH @ weight_VH.T).log_softmax(-1)
    with torch.no_grad():
        -(log_probs_RV.exp() * log_probs_RV).sum(-1)
    return log_probs_RV.gather(1, targets_R[:, None])[:, 0]


def verl(hidden_RH: Tensor, weight_VH: Tensor, targets_R: Tensor) -> Tensor:
    from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits

    logits_RV = hidden_RH @ weight_VH.T
    with torch.no_grad():
        entropy_from_logits(logits_RV)
    return logprobs_from_logits(logits_RV, targets_R)


OURS, NO_ENTROPY = "ours", "ours, without entropy"
HUGGING_FACE, VERL, MEGATRON = "Hugging Face: whole logits", "verl: whole logits", "Megatron-Core: cross-entropy alone"
WAYS: dict[str, Way] = {
    OURS: ours(),
    NO_ENTROPY: ours(with_entropy=False),
    HUGGING_FACE: hugging_face,
    VERL: verl,
    MEGATRON: vocab_parallel,
}
PAIRS = ((OURS, HUGGING_FACE), (OURS, VERL), (NO_ENTROPY, MEGATRON))


def inputs(
    num_tokens: int, vocab_size: int, device: str = "cpu", hidden_size: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Make inputs: float32 on a CPU, bfloat16 on a GPU. The spread of logits does not depend on the hidden size."""
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
    """Return the CPU seconds of this process or, on a GPU, wait until it is idle and return the clock."""
    if not tensor.is_cuda:
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def rows(quick: bool) -> Rows:
    """Compare time, then memory, with each way that is installed."""
    pairs = list(PAIRS)
    try:
        import_module("verl.utils.torch_functional")
    except ImportError as error:
        yield LeftOut("log-probs and entropy against verl's functions", f"verl cannot be imported ({error})")
        pairs.remove((OURS, VERL))
    ways = list(dict.fromkeys(name for pair in pairs for name in pair))
    num_tokens, vocab_size, num_turns = (512, 32_000, 5) if quick else (1024, 32_000, 15)
    start_one_rank()
    turns = time_turns(ways, num_tokens, vocab_size, num_turns)
    for mine, other in pairs:
        yield turns.row(f"time, {num_tokens} tokens x {vocab_size}", other, ours=mine)
    num_tokens, vocab_size, num_turns = (1024, 64_000, 1) if quick else (8192, 64_000, 3)
    turns = memory_turns(ways, num_tokens, vocab_size, num_turns)
    for mine, other in pairs:
        yield turns.row(f"peak of memory, {num_tokens} tokens x {vocab_size}", other, ours=mine, unit="MiB")


def time_turns(names: list[str], num_tokens: int, vocab_size: int, num_turns: int) -> Turns:
    tensors = inputs(num_tokens, vocab_size)

    def work(way: Way) -> Callable[[], tuple[Tensor | None, ...]]:
        return lambda: (run(way, *tensors)[0], tensors[0].grad, tensors[1].grad)

    return take_turns({name: work(WAYS[name]) for name in names}, num_turns, agree=same(1e-4))


def memory_turns(names: list[str], num_tokens: int, vocab_size: int, num_turns: int) -> Turns:
    load_before = os.getloadavg()[0]
    peaks: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(num_turns):
        for name in names:
            command = [sys.executable, "-m", "benchmarks.logprobs", "peak", name, str(num_tokens), str(vocab_size)]
            found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
            peaks[name].append(int(found.stdout.split()[-1]) / MIB)
    return Turns(peaks, load_before, os.getloadavg()[0])


def measure_memory(way: str, num_tokens: int, vocab_size: int) -> None:
    """Print the peak above the inputs, in bytes. Run it in its own process: a peak cannot be reset."""
    if way == MEGATRON:
        start_one_rank()
    tensors = inputs(num_tokens, vocab_size)
    run(WAYS[way], *inputs(8, 64))  # so that libraries and threads that the first call loads do not count
    before = resident_bytes("VmRSS")
    run(WAYS[way], *tensors)
    print(resident_bytes("VmHWM") - before)


def chunked_ways(title: str, **options: Any) -> dict[str, Way]:
    return {
        **{f"{title}, {chunk}": ours(chunk, **options) for chunk in CHUNK_TOKENS},
        f"{title}, {CHUNK_TOKENS[0]}, no entropy": ours(CHUNK_TOKENS[0], with_entropy=False, **options),
    }


def relative_error(got: Tensor | None, want: Tensor | None) -> float:
    """Return the largest difference relative to the largest value. The tensors may be gradients, but must exist."""
    assert got is not None
    assert want is not None
    return float((got - want).abs().max() / want.abs().max())


def timing(
    num_tokens: int, vocab_size: int, device: str, ways: dict[str, Way], hidden_size: int | None
) -> dict[str, Any]:
    """Print a line for each way, and return its numbers. Bytes are the growth above the inputs, on a GPU only."""
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
            pairs = ((log_probs_R, exact_R), (hidden_RH.grad, exact[0].grad), (weight_VH.grad, exact[1].grad))
            errors[name] = [relative_error(got, want) for got, want in pairs]
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
    """Reset the GPU's peak memory; return the bytes in use."""
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def start_one_rank(device: str = "cpu") -> None:
    """Form the tensor-parallel group that Megatron's cross-entropy needs."""
    from megatron.core import parallel_state

    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()


def gpu_main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.logprobs time")
    parser.add_argument("tokens", type=int, nargs="?", default=1024)
    parser.add_argument("vocab", type=int, nargs="?", default=32_000)
    parser.add_argument("--size", choices=SIZES, help="tokens, vocabulary and hidden size by name")
    parser.add_argument("--output", type=Path, help="file for the rows, as JSON")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--backend", choices=("torch", "triton", "both"), default="torch")
    options = parser.parse_args(argv)
    size = SIZES[options.size] if options.size else (options.tokens, options.vocab, None)
    print(f"{platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    if options.device == "cuda":
        print(torch.cuda.get_device_name())
    ways = {} if options.backend == "triton" else chunked_ways("ours")
    ways |= {} if options.backend == "torch" else chunked_ways("Triton", backend="triton")
    ways |= {name: WAYS[name] for name in (HUGGING_FACE, MEGATRON)}
    start_one_rank(options.device)
    found = timing(size[0], size[1], options.device, ways, size[2])
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["peak"]:
        torch.set_num_threads(1)
        measure_memory(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    elif sys.argv[1:2] == ["time"]:
        gpu_main(sys.argv[2:])
    else:
        main(__doc__, rows)
