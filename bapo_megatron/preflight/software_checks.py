"""Checks of installed software, mostly without importing it, and of GPUs through their driver."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bapo_megatron_patches.megatron_core import ADVISED as ADVISED_MEGATRON
from bapo_megatron_patches.megatron_core import TRIED as TRIED_MEGATRON

from bapo_megatron.engines import sglang_kernels
from bapo_megatron.errors import UserError, plural
from bapo_megatron.machine.gpus import GIB
from bapo_megatron.preflight.machine_checks import Finding, Grade
from bapo_megatron.preflight.packages import installed_version
from bapo_megatron.runtime import run_python
from bapo_megatron.runtime.environment import trainer_variables

_BF16_CAPABILITY = (8, 0)  # Ampere; fused attention and SGLang need it too
_FP8_CAPABILITY = (8, 9)  # Ada; Hopper is (9, 0)

# Asks Transformer Engine which attention it chooses for a pack, as its DotProductAttention does.
_CHOOSE_ATTENTION = """
import json, sys, torch
from transformer_engine.pytorch.attention.dot_product_attention import utils
heads, kv_heads, head_dim, length, is_split = json.loads(sys.argv[1])
flash, version, fused, kind, unfused, _ = utils.get_attention_backend(utils.AttentionParams(
    qkv_dtype=torch.bfloat16, qkv_layout="thd_thd_thd", batch_size=4, num_heads=heads, num_gqa_groups=kv_heads,
    max_seqlen_q=length, max_seqlen_kv=length, head_dim_qk=head_dim, head_dim_v=head_dim,
    attn_mask_type="padding_causal", window_size=(-1, 0), core_attention_bias_shape=None, context_parallel=is_split))
print(f"flash-attn {version}" if flash else f"cuDNN {int(kind)}" if fused else "unfused" if unfused else "none")
"""


@dataclass(frozen=True, slots=True)
class NvidiaDriver:
    """Facts from the NVIDIA driver. `problem` says why there are none."""

    version: str = ""
    cuda: tuple[int, int] = (0, 0)  # the newest CUDA that it can run
    gpus: tuple[tuple[str, int, int], ...] = ()  # name, total bytes, bytes in use
    visible: tuple[int, ...] = ()  # indexes into `gpus` that CUDA_VISIBLE_DEVICES leaves to a run
    problem: str = ""


def read_driver() -> NvidiaDriver:
    """Query the driver through nvidia-ml-py; never raises."""
    try:
        import pynvml
    except ImportError:
        return NvidiaDriver(problem="nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return NvidiaDriver(problem=f"no driver: {error}")
    try:
        cuda = pynvml.nvmlSystemGetCudaDriverVersion()
        gpus, uuids = [], []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            gpus.append((_text(pynvml.nvmlDeviceGetName(handle)), int(memory.total), int(memory.used)))
            uuids.append(_text(pynvml.nvmlDeviceGetUUID(handle)))
        return NvidiaDriver(
            _text(pynvml.nvmlSystemGetDriverVersion()),
            (cuda // 1000, cuda % 1000 // 10),
            tuple(gpus),
            visible_indexes(os.environ.get("CUDA_VISIBLE_DEVICES"), uuids),
        )
    except pynvml.NVMLError as error:
        return NvidiaDriver(problem=f"the driver does not answer: {error}")
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def visible_indexes(setting: str | None, uuids: Sequence[str]) -> tuple[int, ...]:
    """Return the GPUs that CUDA shows to a process: all before the first invalid entry, or none if one is repeated
    (CUDA C++ Programming Guide, "CUDA Environment Variables"). A MIG instance counts as invalid.

    Args:
        setting: CUDA_VISIBLE_DEVICES: indexes, or beginnings of UUIDs. None means unset, which shows all.
        uuids: UUIDs of all GPUs, in the driver's order, which is also CUDA's if all GPUs are of one model.

    Example: visible_indexes("1,0", ["GPU-a", "GPU-b", "GPU-c"]) == (1, 0)
    """
    if setting is None:
        return tuple(range(len(uuids)))
    found: list[int] = []
    for entry in setting.split(","):
        index = _index(entry.strip(), uuids)
        if index is None:
            break
        if index in found:
            return ()
        found.append(index)
    return tuple(found)


def _index(entry: str, uuids: Sequence[str]) -> int | None:
    if entry.isdecimal():
        return int(entry) if int(entry) < len(uuids) else None
    named = [i for i, uuid in enumerate(uuids) if entry.startswith("GPU-") and uuid.startswith(entry)]
    return named[0] if len(named) == 1 else None


def check_gpus(driver: NvidiaDriver, needed: int) -> Iterator[Finding]:
    """Check the driver and the visible GPUs; warn of GPUs whose memory is in use."""
    verdict: Grade = "error" if needed else "absent"
    if driver.problem:
        yield Finding("driver", verdict, driver.problem, "install NVIDIA's driver and `pip install nvidia-ml-py`")
        yield Finding("GPUs", verdict, f"none, {needed} needed" if needed else "none: CPU use only")
        return
    yield Finding("driver", "ok", f"{driver.version}, for CUDA up to {driver.cuda[0]}.{driver.cuda[1]}")
    here, shown = len(driver.gpus), len(driver.visible)
    names = ", ".join(sorted({f"{name} ({total / GIB:.0f} GiB)" for name, total, _ in driver.gpus}))
    what = f"{here} x {names}" if here else "none"
    if shown < here:
        what += f", {shown or 'none'} visible (CUDA_VISIBLE_DEVICES)"
    busy = [f"GPU {i}: {driver.gpus[i][2] / GIB:.1f} GiB" for i in driver.visible if driver.gpus[i][2] > GIB]
    if shown < needed:
        advice = "lower parallel.* or rollout.num_servers" if here < needed else "name more in CUDA_VISIBLE_DEVICES"
        yield Finding("GPUs", "error", f"{what}, {needed} needed", advice)
    elif not shown:
        yield Finding("GPUs", "absent", f"{what}: CPU use only")
    elif busy:
        yield Finding("GPUs", "warning", f"{what}; in use: {', '.join(busy)}", "`nvidia-smi` shows by which process")
    else:
        yield Finding("GPUs", "ok", what)


def check_torch(facts: dict[str, Any], driver: NvidiaDriver, *, attaches: bool = False) -> Iterator[Finding]:
    """Check torch and its CUDA against the driver, and NCCL, from the facts (or the "problem") of a group probe.

    Args:
        attaches: whether weights go over NCCL to servers of another environment, which do not tell their version.
    """
    if "torch" not in facts:
        advice = "`nvidia-smi` shows which processes use the GPUs" if driver.visible else ""
        yield Finding("torch", "error", facts["problem"], advice)
        return
    cuda = facts["cuda"]
    what = f"{facts['torch']}, " + (f"built for CUDA {cuda}" if cuda else "built for CPUs")
    if not driver.visible:
        yield Finding("torch", "ok", what)
        yield Finding("NCCL", "absent", "not used without GPUs: gloo is")
        return
    if cuda is None:
        yield Finding("torch", "error", what, "there are GPUs: install a CUDA build of torch")
    elif problem := driver_problem(driver, cuda):
        yield Finding("torch", "error", f"{what}; {problem}", update_driver(cuda))
    elif facts["num_gpus"] == 0:
        why = f"{what}; it sees 0 of {plural(len(driver.visible), 'GPU')}"
        yield Finding("torch", "error", why, "`python -c 'import torch; torch.cuda.init()'` shows why")
    else:
        yield Finding("torch", "ok", what)
    if "nccl" in facts:
        same = f'attached servers need the same: install torch {facts["torch"]} there, or set sync.channel="disk"'
        yield Finding("NCCL", "ok", facts["nccl"], same if attaches else "")
    else:
        yield Finding("NCCL", "error", "torch cannot use it", "install a CUDA build of torch")


_OLDEST_DRIVERS = {12: "525", 13: "580"}  # by CUDA's major version, whose minor ones they all run


def driver_problem(driver: NvidiaDriver, cuda: str) -> str:
    """Say that the driver is too old for torch's CUDA; empty if it is not, or does not answer."""
    if driver.problem or int(cuda.split(".")[0]) <= driver.cuda[0]:
        return ""
    return f"the NVIDIA driver {driver.version} runs CUDA up to {driver.cuda[0]}.{driver.cuda[1]}"


def update_driver(cuda: str) -> str:
    """Return the advice for a driver that is too old for this CUDA."""
    oldest = _OLDEST_DRIVERS.get(int(cuda.split(".")[0]))
    needed = f"{oldest} or newer (as root: apt-get install nvidia-driver-{oldest})" if oldest else "a newer one"
    return f"update the driver to {needed}, and restart"


def check_chip(capability: Sequence[int]) -> Finding:
    """Check that the GPU supports bfloat16."""
    what = f"compute capability {'.'.join(map(str, capability))}"
    if tuple(capability) < _BF16_CAPABILITY:
        return Finding("chip", "error", f"{what} is too old: bfloat16 needs 8.0 (Ampere)", "use a newer GPU")
    return Finding("chip", "ok", what)


def check_attention(
    sglang_extra: Mapping[str, Any], heads: int, kv_heads: int, head_dim: int, length: int, is_split: bool
) -> Finding:
    """Check which attention Transformer Engine chooses for packs ("thd"), with the variables of a trainer rank.

    Args:
        heads, kv_heads: heads of one tensor rank.
        length: tokens of the longest sequence.
        is_split: whether there is context parallelism.
    """
    pack = f"packs of {length} tokens, {plural(heads, 'head')} of {head_dim}"
    arguments = json.dumps([heads, kv_heads, head_dim, length, is_split])
    chosen, problem = run_python(_CHOOSE_ATTENTION, arguments, environment=trainer_variables(sglang_extra))
    if problem:
        return Finding("attention", "warning", f"Transformer Engine does not say which it chooses: {problem}")
    if chosen == "none":
        advice = 'install flash-attn, or set model.implementation="local"'
        return Finding("attention", "error", f"{pack}: no fused kernel", advice)
    if chosen == "unfused":
        advice = "unset NVTE_UNFUSED_ATTN to make a run fail instead of using memory for all pairs of tokens"
        return Finding("attention", "warning", f"{pack}: unfused", advice)
    return Finding("attention", "ok", f"{pack}: {chosen}")


def check_megatron(has_gpu: bool) -> Finding:
    installed, mend = installed_version("megatron-core"), f"pip install megatron-core=={ADVISED_MEGATRON}"
    if installed is None:
        return Finding("megatron-core", "error", "is not installed", mend)
    if installed in TRIED_MEGATRON:
        return Finding("megatron-core", "ok", installed)
    what = f"{installed} was not tried; {' and '.join(TRIED_MEGATRON)} were"
    return Finding("megatron-core", "warning" if has_gpu else "error", what, mend)


def check_sglang() -> Iterator[Finding]:
    """Check how an installed SGLang serves on the GPUs here."""
    if (installed := installed_version("sglang")) is None:
        return
    try:
        serving = sglang_kernels.choose()
    except UserError as error:
        yield Finding("SGLang", "error", str(error))
        return
    if serving.is_usual:
        yield Finding("SGLang", "ok", f"{installed}; {serving.line}")
    else:
        yield Finding("SGLang", "warning", f"{installed}; {serving.line}", sglang_kernels.REMEDY)


def check_memory_saver() -> Finding:
    """Check that the library with which SGLang releases memory is installed, for servers that take turns on GPUs."""
    name, installed = "torch_memory_saver", installed_version("torch_memory_saver")
    if installed is None:
        what = 'is not installed, and SGLang releases memory with it for rollout.placement="turns"'
        return Finding(name, "error", what, "scripts/install_gpu.sh packages")
    return Finding(name, "ok", installed)


REBUILD_ENGINE = "scripts/install_gpu.sh compiled builds it against this torch"


def transformer_engine_problem() -> str:
    """Say why Transformer Engine cannot be imported in a new process; empty if it can be."""
    # torch first, as in a trainer: whoever comes first decides which cuBLAS both load.
    return run_python("import torch, transformer_engine.pytorch")[1]


def check_transformer_engine(facts: dict[str, Any], needed: bool) -> Finding:
    """Check that Transformer Engine can be imported, and whether this chip has FP8."""
    name, installed = "Transformer Engine", installed_version("transformer-engine")
    if installed is None:
        verdict: Grade = "error" if needed else "absent"
        return Finding(name, verdict, "is not installed: no FP8", "scripts/install_gpu.sh, on a GPU machine")
    if "torch" not in facts:
        return Finding(name, "absent", f"{installed}; not examined, as torch did not answer")
    if not facts["num_gpus"]:
        return Finding(name, "absent", f"{installed}, and no GPU to use it")
    if problem := transformer_engine_problem():
        return Finding(name, "error", f"{installed} cannot be imported: {problem}", REBUILD_ENGINE)
    capability = tuple(facts["capability"])
    chip = f"compute capability {capability[0]}.{capability[1]}"
    if capability < _FP8_CAPABILITY:
        return Finding(name, "error" if needed else "ok", f"{installed}; {chip} has no FP8")
    return Finding(name, "ok", f"{installed}; FP8 is possible ({chip})")
