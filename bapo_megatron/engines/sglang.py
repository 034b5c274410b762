"""SGLang servers on this machine, with GPUs or without.

    with started([ServerSpec(...)], logs, timeout_s) as urls: ...          # as they are
    engine_specs(config, model_path, logs, ports, share) -> engines/start.py  # for a run, which restarts them

Every server is `python -m bapo_megatron.engines.sglang_server` on a port of its own, with a log of its own.
"""

import contextlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bapo_megatron.config.schema import Config
from bapo_megatron.engines import processes
from bapo_megatron.engines.supervisor import EngineSpec, supervised
from bapo_megatron.errors import UserError
from bapo_megatron.runtime.ranks import num_cores

_CONTEXT_SLACK = 2  # SGLang ends a request two tokens before its context length (srt/managers/scheduler.py:2714)
_MAX_CPU_KV_TOKENS = 32_768  # size of the key-value cache; requests that do not fit are retracted and wait


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """One SGLang server.

    `cpus`: one group of CPU numbers per tensor-parallel rank; `gpus`: one GPU, as CUDA_VISIBLE_DEVICES names it, per
    tensor-parallel rank. Where empty, SGLang places its ranks itself.

    Example: ServerSpec(Path("model"), max_context=512, max_running=64, tensor_parallel=2, cpus=("0", "1"))
    """

    model_path: Path
    max_context: int
    max_running: int
    tensor_parallel: int = 1
    dtype: str = "float32"
    threads: int = 1
    cpus: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    seed: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)
    host: str = processes.LOOPBACK


def command(spec: ServerSpec, port: int, *, has_gpu: bool) -> list[str]:
    """Build the command line of one server; `extra` wins."""
    arguments: dict[str, Any] = {
        "model_path": str(spec.model_path),
        "host": spec.host,
        "port": port,
        "tensor_parallel_size": spec.tensor_parallel,
        "dtype": spec.dtype,
        "context_length": spec.max_context + _CONTEXT_SLACK,
        "max_running_requests": spec.max_running,
        "random_seed": spec.seed,
        "skip_tokenizer_init": True,  # we speak token ids
        "skip_server_warmup": True,
        "sleep_on_idle": True,  # an idle scheduler would burn a core
    }
    if not has_gpu:
        kv_tokens = min(spec.max_running * arguments["context_length"], _MAX_CPU_KV_TOKENS)
        arguments |= {
            "device": "cpu",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "disable_overlap_schedule": True,
            "mem_fraction_static": 0.1,
            "max_total_tokens": max(kv_tokens, arguments["context_length"] + _CONTEXT_SLACK),
            "enable_deterministic_inference": True,  # else seeds have no effect
        }
    rendered = [part for name, value in (arguments | dict(spec.extra)).items() for part in _render(name, value)]
    return [sys.executable, "-m", "bapo_megatron.engines.sglang_server", *rendered]


def environment(spec: ServerSpec, *, has_gpu: bool) -> dict[str, str]:
    """Return the variables that one server needs beside this process's environment."""
    variables = {
        "HF_HUB_OFFLINE": "1",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # for the slack: positions past the model's own are not used
    }
    if spec.host == processes.LOOPBACK:
        variables |= processes.loopback_variables()
    if not has_gpu:
        variables |= {
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": str(spec.threads),
            "TORCHDYNAMO_DISABLE": "1",
            "TORCH_COMPILE_DISABLE": "1",
        }
        if spec.cpus:
            variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(spec.cpus)
    elif spec.gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(spec.gpus)
    return variables


def engine_specs(
    config: Config, model_path: Path, logs: Sequence[Path], ports: Sequence[int], share: processes.EngineShare
) -> list[EngineSpec]:
    """Describe this machine's share of the servers of `config.rollout`, one for each log and port.

    Raises:
        UserError: SGLang is not installed.
    """
    import torch

    r = config.rollout
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    check_installed(has_gpu=num_gpus > 0)
    threads = r.engine_threads or max(1, num_cores() // (share.count * r.server_tensor_parallel))
    specs = [
        ServerSpec(
            model_path,
            max_context=r.engine_max_context or config.data.max_prompt_tokens + r.max_response_tokens,
            max_running=r.max_concurrent_requests,
            tensor_parallel=r.server_tensor_parallel,
            dtype=config.model.dtype,
            threads=threads,
            cpus=cpu_groups(i, r.server_tensor_parallel, threads, sorted(os.sched_getaffinity(0))),
            gpus=gpus(i, r.server_tensor_parallel, share.first_gpu, visible_gpus(num_gpus)),
            seed=config.run.seed + share.first + i,
            extra=config.sglang.extra,
            host=share.host,
        )
        for i in range(share.count)
    ]
    return [_engine_spec(*parts, has_gpu=num_gpus > 0) for parts in zip(specs, logs, ports, strict=True)]


@contextlib.contextmanager
def started(specs: Sequence[ServerSpec], logs: Sequence[Path], timeout_s: float) -> Iterator[list[str]]:
    """Start servers, and yield their URLs once all are healthy; they end with the block, without restarts.

    Raises:
        UserError: SGLang is not installed, or refuses its arguments.
        EngineError: a server ended or was not healthy in time.
    """
    import torch

    has_gpu = torch.cuda.is_available()
    check_installed(has_gpu=has_gpu)
    with processes.reserved_ports(len(specs)) as ports:
        engines = [_engine_spec(*parts, has_gpu=has_gpu) for parts in zip(specs, logs, ports, strict=True)]
        with supervised(engines, startup_timeout_s=timeout_s) as urls:
            yield urls


def _engine_spec(spec: ServerSpec, log: Path, port: int, *, has_gpu: bool) -> EngineSpec:
    return EngineSpec(
        url=f"http://{spec.host}:{port}",
        command=command(spec, port, has_gpu=has_gpu),
        environment=environment(spec, has_gpu=has_gpu),
        log=log,
    )


def check_installed(has_gpu: bool) -> None:
    """Raise UserError if SGLang is missing, or is a version whose imports we do not know on a CPU."""
    from bapo_megatron_patches.sglang import SUPPORTED

    how = f"pip install sglang=={SUPPORTED}" if has_gpu else "run scripts/install_sglang_cpu.sh"
    try:
        installed = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            f'rollout.engine="sglang" needs SGLang, which is not installed in {sys.prefix}; {how}, '
            'or set rollout.engine="embedded"'
        ) from None
    if not has_gpu and installed != SUPPORTED:
        raise UserError(f"without a GPU, SGLang {SUPPORTED} is needed, and {installed} is installed; {how}")


def cpu_groups(server: int, tensor_parallel: int, threads: int, cpus: Sequence[int]) -> tuple[str, ...]:
    """Return the CPUs of each rank of a server, such as ("0,1", "2,3"); shared if there are too few.

    Empty for a server of one rank, which the operating system places.
    """
    if tensor_parallel == 1:
        return ()
    firsts = [(server * tensor_parallel + rank) * threads for rank in range(tensor_parallel)]
    chosen = [sorted({cpus[(first + i) % len(cpus)] for i in range(threads)}) for first in firsts]
    return tuple(",".join(map(str, group)) for group in chosen)


def visible_gpus(count: int) -> list[str]:
    """List the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else [str(i) for i in range(count)]


def gpus(server: int, tensor_parallel: int, first_gpu: int, visible: Sequence[str]) -> tuple[str, ...]:
    """Return the GPUs of one server; those before `first_gpu` are the trainer's. Empty without GPUs."""
    first = first_gpu + server * tensor_parallel
    assert not visible or first + tensor_parallel <= len(visible), "config/plan.py has counted them"
    return tuple(visible[first : first + tensor_parallel])


def _render(name: str, value: Any) -> list[str]:
    """Render an argument for the command line; True is a bare flag, False and None leave it out."""
    flag = "--" + name.replace("_", "-")
    if value is True:
        return [flag]
    if value is False or value is None:
        return []
    if isinstance(value, list | tuple):
        return [flag, *map(str, value)]
    return [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
