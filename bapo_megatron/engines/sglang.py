"""A run's SGLang servers on this machine, with GPUs or without.

Each server is `python -m bapo_megatron.engines.sglang_server` with its own port and log.
"""

import importlib.metadata
import json
import math
import os
import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bapo_megatron.config.schema import Config
from bapo_megatron.engines.processes import loopback_variables
from bapo_megatron.engines.supervisor import EngineSpec
from bapo_megatron.errors import UserError
from bapo_megatron.hf.shape import ModelShape, rotary_frequencies
from bapo_megatron.resolved import Resolved
from bapo_megatron.resolved.placement import NodeShare, ServerPart
from bapo_megatron.runtime import LOOPBACK, num_cores, python_module
from bapo_megatron.runtime.environment import ALLOCATOR_VARIABLES, nccl_variables
from bapo_megatron.runtime.nccl import may_share_gpus

OWN_ARGUMENTS = {
    "model_path": "model.path",
    "dtype": "model.dtype",
    "host": 'rollout.engine="attach" for servers elsewhere',
    "port": 'rollout.engine="attach" for servers of your own',
    "tensor_parallel_size": "rollout.server_tensor_parallel",
    "tp_size": "rollout.server_tensor_parallel",
    "context_length": "data.max_prompt_tokens and rollout.max_response_tokens",
    "max_running_requests": "rollout.max_concurrent_requests",
    "api_key": 'rollout.engine="attach" and rollout.api_key for servers with a key of your own',
    "admin_api_key": 'rollout.engine="attach" and rollout.api_key for servers with a key of your own',
    "tokenizer_worker_num": 'rollout.engine="attach": a server of several workers does not ask for the key of the run',
    "grpc_port": 'rollout.engine="attach": that port does not ask for the key of the run',
}
"""Arguments of SGLang that the launcher sets, and where to set them instead."""

_CONTEXT_SLACK = 2  # SGLang ends a request two tokens before its context length (srt/managers/scheduler.py:2714)
_STATES_PER_REQUEST = 4  # linear attention: SGLang holds 3 for a running request, and the others at ends of prefixes
_MAX_CPU_KV_TOKENS = 32_768  # size of the key-value cache; requests that do not fit are retracted and wait


def engine_specs(run: Resolved, logs: Sequence[Path], ports: Sequence[int], here: NodeShare) -> list[EngineSpec]:
    """Describe this machine's share of a run's servers, one for each log and port.

    Raises:
        UserError: SGLang is not installed.
    """
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    check_installed(has_gpu=num_gpus > 0)
    visible = visible_gpus(num_gpus)
    return [
        EngineSpec(
            f"http://{here.host}:{port}",
            command(run, here, i, port, has_gpu=num_gpus > 0),
            log,
            environment(run.config, here, i, visible),
        )
        for i, (log, port) in enumerate(zip(logs, ports, strict=True))
    ]


def command(run: Resolved, here: NodeShare, server: int, port: int, *, has_gpu: bool) -> list[str]:
    """Build the command line of one server of a share; `sglang.extra` wins."""
    config, r = run.config, run.config.rollout
    context = _CONTEXT_SLACK + config.longest_sequence
    arguments: dict[str, Any] = {
        "model_path": str(run.folder),
        "host": here.host,
        "port": port,
        "tensor_parallel_size": r.server_tensor_parallel,
        "dtype": config.model.dtype,
        "context_length": context,
        "max_running_requests": r.max_concurrent_requests,
        "random_seed": config.run.seed + here.servers[server],
        "skip_tokenizer_init": True,  # we send token ids
        "skip_server_warmup": True,
        "sleep_on_idle": True,  # an idle scheduler would burn a core
    }
    if overrides := model_overrides(run):
        arguments["json_model_override_args"] = overrides
    if config.model.replay_routes:
        arguments["enable_return_routed_experts"] = True
    if has_gpu:
        arguments["enable_fp32_lm_head"] = True  # in bfloat16 a log-prob is up to 0.06 off where logits reach 16
    else:
        kv_tokens = min(r.max_concurrent_requests * context, _MAX_CPU_KV_TOKENS)
        arguments |= {
            "device": "cpu",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "disable_overlap_schedule": True,
            "mem_fraction_static": 1.0,  # max_total_tokens bounds the cache, whatever memory other processes take
            "max_total_tokens": max(kv_tokens, context + _CONTEXT_SLACK),
            "max_mamba_cache_size": _STATES_PER_REQUEST * r.max_concurrent_requests,
            "enable_deterministic_inference": True,  # otherwise seeds have no effect
        }
    planned = _arguments_of(here.part) if has_gpu and here.part is not None else {}
    if planned and config.takes_turns:
        arguments["enable_memory_saver"] = True
    # a shipped cluster's mem_fraction_static=0.85 is turned off with false, and the plan's value stays
    own = {name: value for name, value in config.sglang.extra.items() if value is not False or name not in planned}
    rendered = [part for name, value in (arguments | planned | own).items() for part in _render(name, value)]
    return [*python_module("bapo_megatron.engines.sglang_server"), *rendered]


def _arguments_of(part: ServerPart) -> dict[str, Any]:
    """Return the arguments that keep a server to its part of a GPU."""
    arguments = {
        "mem_fraction_static": part.mem_fraction,
        "max_total_tokens": part.kv_tokens,
        "cuda_graph_max_bs_decode": part.max_batch,
        "chunked_prefill_size": part.prefill_tokens,
    }
    return arguments | ({"max_mamba_cache_size": part.num_states} if part.num_states else {})


def environment(config: Config, here: NodeShare, server: int, visible: Sequence[str]) -> dict[str, str]:
    """Return the variables that one server of a share needs in addition to this process's environment.

    Args:
        visible: this machine's GPUs, as CUDA_VISIBLE_DEVICES names them; empty means CPUs.
    """
    r = config.rollout
    variables = {
        "HF_HUB_OFFLINE": "1",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # for the slack: positions past the model's own are not used
        "SGLANG_MAMBA_CONV_DTYPE": config.model.dtype,  # else bfloat16: in float32, log-probs are up to 0.035 off
    }
    if here.host == LOOPBACK:
        variables |= loopback_variables()
    if visible:
        mine = named_gpus(here.gpus[server], visible)
        variables |= nccl_variables(config.sglang.extra) | {"CUDA_VISIBLE_DEVICES": ",".join(mine)}
        if here.part is not None:
            variables["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "false"  # trainer ranks hold unequal memory
            variables |= _memory_saver_variables() if config.takes_turns else {}
        return variables
    _, threads = config.divide_cores(num_cores(), here.num_ranks, len(here.servers) * r.server_tensor_parallel)
    cpus = cpu_groups(server, r.server_tensor_parallel, threads, sorted(os.sched_getaffinity(0)))
    variables |= {
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "TORCHDYNAMO_DISABLE": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false",  # ranks and other processes share this machine's memory
    }
    return variables | ({"SGLANG_CPU_OMP_THREADS_BIND": "|".join(cpus)} if cpus else {})


def _memory_saver_variables() -> dict[str, str]:
    """Return the variables with which a server releases all of its memory, and gets it back.

    torch_memory_saver does not start with expandable segments, which a user may have set for trainer ranks. NCCL would
    keep the old pages of CUDA graphs (sgl-project/sglang#40648).
    """
    own = {name: os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ}
    fixed = {name: re.sub(r"(expandable_segments\s*:\s*)\w+", r"\1False", value) for name, value in own.items()}
    return {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1", "NCCL_GRAPH_REGISTER": "0"} | fixed


def model_overrides(run: Resolved) -> dict[str, Any]:
    """Return settings that SGLang reads from config.json and must find other than they are.

    It does not read layer_types, or partial_rotary_factor inside rope_parameters, and wants the images' part of a
    model, for which nothing is sent, left out by name. It obeys dual_chunk_attention_config, which the trainer, like
    transformers, does not know.
    """
    assert run.model is not None
    hf_config, shape = run.model.hf_config, run.shape
    text: dict[str, Any] = {}
    is_hybrid = shape.output_gate  # also if no layer has linear attention
    if is_hybrid and hf_config.get("full_attention_interval") is None:
        is_full = [layer.linear is None for layer in shape.layers]
        text["full_attention_interval"] = [*is_full, True].index(True) + 1
    turned = shape.rope.get("partial_rotary_factor", 1.0)
    if turned != hf_config.get("partial_rotary_factor", None if is_hybrid else 1.0):
        text["partial_rotary_factor"] = turned
    if hf_config.get("dual_chunk_attention_config") is not None:
        text["dual_chunk_attention_config"] = None
    is_old = hf_config.get("rope_scaling") or "rope_type" not in (hf_config.get("rope_parameters") or {})
    if shape.rope["rope_type"] != "default" or (is_hybrid and is_old):
        # SGLang merges a table with the file's. Null for the older name, which comes first, empties both.
        text |= {"rope_scaling": None, "rope_parameters": _told_rope(shape)}
    if "text_config" not in hf_config:
        return text
    return {"language_model_only": True} | ({"text_config": text} if text else {})


def _told_rope(shape: ModelShape) -> dict[str, Any]:
    """Return the rotary settings as SGLang's `get_rope` computes what transformers does.

    SGLang reads original_max_position_embeddings from inside, takes no null, and does not know attention_factor: its
    attn_factor multiplies the factor that follows from `factor`. Its YaRN with sections for images takes no mscale.

    Source: sglang/srt/layers/rotary_embedding, factory.py and yarn.py.
    """
    told = {key: value for key, value in shape.rope.items() if value is not None and not key.startswith("mscale")}
    if told["rope_type"] == "default":
        return told
    told |= {"factor": float(told["factor"])}
    told.setdefault("original_max_position_embeddings", shape.max_positions)
    if told["rope_type"] == "yarn":
        from_factor = 0.1 * math.log(max(told["factor"], 1.0)) + 1
        told |= {"attn_factor": rotary_frequencies(shape)[1] / from_factor, "extrapolation_factor": 1}
        told = {"beta_fast": 32, "beta_slow": 1} | told
    return told


def check_installed(has_gpu: bool) -> None:
    """Raise UserError if SGLang is missing or, on a CPU, is a version whose imports we do not know."""
    from bapo_megatron_patches.sglang import SUPPORTED

    how = f"run scripts/install_{'gpu' if has_gpu else 'sglang_cpu'}.sh"
    try:
        installed = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            f'rollout.engine="sglang" needs SGLang, which is not installed in {sys.prefix}; {how}, '
            'or set rollout.engine="embedded"'
        ) from None
    if not has_gpu and installed != SUPPORTED:
        raise UserError(f"without a GPU, SGLang {SUPPORTED} is needed, but {installed} is installed; {how}")


def knows(model_type: str) -> bool:
    """Return whether SGLang or transformers, as installed here, reads a config.json of this type; True without SGLang.

    SGLang serves a model that it has no class for with transformers' modules.
    """
    packages = [find_spec(name) for name in ("sglang", "transformers")]
    sglang, transformers = (spec and spec.submodule_search_locations for spec in packages)
    if not sglang or not transformers:
        return True
    files = [*Path(sglang[0], "srt/configs").glob("*.py"), *Path(transformers[0], "models/auto").glob("*auto*.py")]
    return any(f'"{model_type}"' in file.read_text(encoding="utf-8") for file in files)


def cpu_groups(server: int, tensor_parallel: int, threads: int, cpus: Sequence[int]) -> tuple[str, ...]:
    """Return the CPUs of each rank of a server, such as ("0,1", "2,3"); ranks share them if there are too few.

    Empty for a server with one rank, which the operating system places.
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


def named_gpus(gpus: Sequence[int], visible: Sequence[str]) -> tuple[str, ...]:
    """Return the names of a server's GPUs. If there are too few, they are shared: counting begins again at the first.

    Example: named_gpus((2, 3), ["4", "5", "6", "7"]) == ("6", "7")
    """
    is_enough = max(gpus) < len(visible)
    assert is_enough or (may_share_gpus() and len(gpus) <= len(visible)), "preflight/checks/layout.py counts them"
    return tuple(visible[number % len(visible)] for number in gpus)


def _render(name: str, value: Any) -> list[str]:
    """Render an argument for the command line. True is a bare flag; False and None omit it."""
    flag = "--" + name.replace("_", "-")
    if value is True:
        return [flag]
    if value is False or value is None:
        return []
    if isinstance(value, list | tuple):
        return [flag, *map(str, value)]
    return [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
