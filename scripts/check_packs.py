"""Install each pack into an empty Python of the GPU machine's versions, and import all that a stage imports of it.

    scripts/gpu_session.sh check-packs [--env FOLDER] [--output FILE]

It needs no GPU, but a network, a C compiler, and Python 3.12 (PYTHON312, or python3.12 in PATH), of which it makes an
environment with exactly the torch of requirements/gpu-image.txt (2 GB). --env names such an environment to use again.
Of the other packages of that file, those that something here asks for are added, and nothing else.

What only a GPU can answer is pretended (fake_hopper.py): imports take the branches of a Hopper, libraries are loaded
with a stand-in for the driver's, and Triton's kernels are compiled but not launched. Exit code 1 if a check fails.
"""

import argparse
import ctypes
import importlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_packing
from gpu_packing import IMAGE, MIB, NCCL, ROOT, PackError, listed_in, name_of

PYTHON = "3.12"
CHECK_TIMEOUT_S = 1800
SERVER = "bapo_megatron.engines.sglang_server"  # the product's entry: it also replaces what cannot be loaded
SGLANG = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.layers.attention.torch_native_backend",
    "sglang.srt.layers.attention.triton_backend",
    "sglang.srt.layers.sampler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.scheduler_components.weight_updater",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.models.llama",
    "sglang.srt.models.qwen2",
    "sglang.srt.models.qwen3",
    "sglang.srt.models.qwen3_moe",
    "sglang.srt.plugins",
    "sglang.srt.server_args",
    "sglang.srt.utils",
    "sglang.srt.utils.auth",
    "torch_memory_saver",
)
PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")


# ---- in the machine's Python, each in a process of its own


def check_serve() -> dict[str, Any]:
    """Import the server's modules, from the product's entry on, and what stages try first."""
    import gpu_session

    lists = [names for stage in gpu_session.STAGES.values() for names in getattr(stage, "modules", ())]
    serving = [names for names in lists if names not in gpu_session.TRAINING]  # a server has no Megatron-Core
    of_stages = [name.strip() for names in serving for name in names.split(",")]
    facts = imports((SERVER, *SGLANG, *of_stages))
    from sglang.srt.utils import is_cuda

    assert is_cuda(), "SGLang took its branches for another device"
    from torch_memory_saver import torch_memory_saver

    mode = torch_memory_saver._impl_ctor_kwargs.get("hook_mode", "preload")
    assert mode == "preload", f"torch_memory_saver is in mode {mode}, and cannot release CUDA graphs"
    return facts


def check_project() -> dict[str, Any]:
    """Import every module of this project that can run there: the package, benchmarks, tests on GPUs, the stages."""
    folders = {"bapo_megatron": "bapo_megatron", "benchmarks": "benchmarks", "tests/gpu": "tests.gpu"}
    files = (file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    names = (".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files)
    left_out = re.compile(r"\.plugins\b|\.__main__$|\.sglang_server$|^benchmarks\.(against_trl|soak\w*)$")
    modules = [name for name in sorted(names) if not left_out.search(name)]
    return imports([*modules, "gpu_session"])


def check_kernels() -> dict[str, Any]:
    """Load SGLang's compiled kernels, and import its modules with them."""
    facts = imports(("sgl_kernel", *SGLANG))
    import torch

    wanted = ("rmsnorm", "fused_add_rmsnorm", "silu_and_mul", "top_p_renorm_probs")
    operators = [name for name in wanted if hasattr(torch.ops.sgl_kernel, name)]
    kernels = sys.modules["sgl_kernel"]
    assert "sm90" in kernels.common_ops.__file__, kernels.common_ops.__file__
    assert len(operators) == len(wanted), operators
    return facts | {"line": f"registers {', '.join(operators)}"}


def check_te() -> dict[str, Any]:
    """Load Transformer Engine's library; ask for what the build of its torch part needs."""
    import gpu_session

    command = [sys.executable, *gpu_session.install_command()]
    subprocess.run(command, check=True, stdout=sys.stderr)
    # Not what the machine's packages need in turn: their versions here may be newer.
    wanted = [name_of(line) for line in gpu_packing.needs()]
    there = {name_of(distribution.name) for distribution in importlib.metadata.distributions()}
    if absent := sorted(set(wanted) - there):
        raise PackError(f"the build lacks {', '.join(absent)}")
    facts = imports(("transformer_engine.common",))
    (library,) = gpu_packing.OFFLINE.glob("transformer_engine/wheel_lib/*.so")
    assert hasattr(ctypes.CDLL(str(library), mode=os.RTLD_NOW), "nvte_create_tensor")
    return facts | {"line": f"all {len(wanted)} packages that its build and this project name are there"}


def check_nccl() -> dict[str, Any]:
    """Ask which NCCL torch calls, which is the pack's with LD_PRELOAD."""
    import torch

    version = ctypes.c_int()
    assert ctypes.CDLL(None).ncclGetVersion(ctypes.byref(version)) == 0
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libnccl" in line}
    path = str(gpu_packing.FOLDER / "nccl" / NCCL)
    assert path in loaded, loaded
    assert version.value == 23007, version.value
    torch_calls = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cuda.so")).ncclGetVersion
    torch_calls(ctypes.byref(version))
    return {"line": f"ncclGetVersion {version.value}; torch was built with {torch.cuda.nccl.version()}"}


def check_fla() -> dict[str, Any]:
    """Import flash-linear-attention, and the layer that calls it."""
    return imports(("fla.ops.gated_delta_rule", "bapo_megatron.learner.linear_attention"))


def check_smollm2() -> dict[str, Any]:
    """Make a folder in bfloat16 of the joined pieces, and load its tokenizer."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "model")
        command = [sys.executable, str(ROOT / "scripts" / "prepare_smollm2.py"), str(folder), "--dtype", "bfloat16"]
        subprocess.run(command, check=True, stdout=sys.stderr)
        from safetensors import safe_open
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        with safe_open(folder / "model.safetensors", "pt") as weights:
            dtypes = {str(weights.get_slice(name).get_dtype()) for name in weights.keys()}  # noqa: SIM118 - no mapping
        assert dtypes == {"BF16"}, dtypes
        assert tokenizer.decode(tokenizer.encode("What is 7 + 5?"), skip_special_tokens=True) == "What is 7 + 5?"
        num_bytes = (folder / "model.safetensors").stat().st_size
        return {"line": f"{num_bytes / MIB:.0f} MiB in bfloat16, {len(tokenizer)} tokens"}


def check_triton() -> dict[str, Any]:
    """Compile this project's Triton kernels for three architectures, and SGLang's attention for Hopper."""
    counts = {f"sm_{architecture}": len(own_kernels(architecture)) for architecture in (80, 90, 100)}
    importlib.import_module(SERVER)
    counts["SGLang's, sm_90"] = len(sglang_kernels())
    return {"line": ", ".join(f"{what}: {count} kernels" for what, count in counts.items())}


def own_kernels(architecture: int) -> dict[str, int]:
    """Compile the kernels of logprobs_triton.py with every option; return bytes of machine code by kernel."""
    import fake_hopper
    import torch

    from bapo_megatron.algorithms.logprobs import VocabShard, token_log_probs

    with fake_hopper.compile_only(architecture) as compiled:
        for dtype in (torch.float32, torch.bfloat16):
            for with_entropy in (True, False):
                hidden_RH, weight_VH = (torch.zeros(size, 16, dtype=dtype, requires_grad=True) for size in (3, 64))
                targets_R, shard = torch.zeros(3, dtype=torch.int64), VocabShard(None, 0, 64, 64)
                log_probs_R, entropy_R = token_log_probs(
                    hidden_RH, weight_VH, targets_R, shard=shard, with_entropy=with_entropy, backend="triton"
                )
                (log_probs_R + entropy_R).sum().backward()
    return dict(compiled)


def sglang_kernels() -> dict[str, int]:
    """Compile what SGLang's server launches for a dense model with attention in Triton, for two shapes of heads.

    Shape legend: B requests, T tokens in the cache, S splits of a request's cache, D head dimension
    """
    import fake_hopper
    import torch
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd
    from sglang.kernels.ops.attention.kv_indices import create_flashinfer_kv_indices_triton
    from sglang.kernels.ops.attention.metadata import get_num_kv_splits_triton
    from sglang.kernels.ops.memory import gpu_tensor_hash as tensor_hash

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    requests, tokens, splits = 4, 64, 8
    int32_T, int64_T = empty(tokens, dtype=torch.int32), empty(tokens, dtype=torch.int64)
    starts = torch.arange(0, 16 * (requests + 1), 16, dtype=torch.int32)
    with fake_hopper.compile_only(90) as compiled:
        for heads, kv_heads, dim in ((12, 2, 128), (9, 3, 64)):
            k, v = empty(tokens, kv_heads, dim), empty(tokens, kv_heads, dim)
            query, output = empty(requests, heads, dim), empty(requests, heads, dim)
            sums = [empty(requests, heads, splits, *last, dtype=torch.float32) for last in ((dim,), ())]
            num_splits = torch.full((requests,), 4, dtype=torch.int32)
            rest = (*sums, num_splits, splits, dim**-0.5, 1.0, 1.0)
            decode_attention_fwd(query, k, v, output, starts, int64_T, *rest)
            query, output = empty(tokens, heads, dim), empty(tokens, heads, dim)
            rest = (None, True, None, 16, 1.0, 1.0)
            extend_attention_fwd(query, k, v, output, k, v, starts, starts, int64_T, *rest)
        table = empty(8, tokens, dtype=torch.int32)
        create_flashinfer_kv_indices_triton[(requests,)](table, int64_T, int64_T, int32_T, None, int64_T, tokens)
        get_num_kv_splits_triton[(1,)](int32_T, int64_T, requests, 1, 12, 2, splits, 132, MAX_NUM_SEQ=256)
        words, digests = empty(4096, dtype=torch.uint8).view(torch.uint32), empty(8, dtype=torch.uint64)
        mixing = {"FM_C1": tensor_hash.FMIX32_C1, "FM_C2": tensor_hash.FMIX32_C2}
        mixing |= {"POS_A": tensor_hash.POS_C1, "POS_B": tensor_hash.POS_C2}
        sizes = {"TILE": 8192, "BLOCK": 1024, "USE_CG": True}
        tensor_hash.hash_tiles32_kernel_blocked[(1,)](words, digests, 1024, 1, 2, **mixing, **sizes)
    return dict(compiled)


def imports(modules: Sequence[str]) -> dict[str, Any]:
    """Import modules as on a Hopper; name those that fail, with the reason."""
    import fake_hopper

    fake_hopper.pretend()
    failed = {}
    for name in dict.fromkeys(modules):
        try:
            importlib.import_module(name)
        except BaseException as error:  # it may also end the process
            traceback.print_exc()
            failed[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"
    return {"modules": len(dict.fromkeys(modules)), "missing": failed}


# ---- outside


@dataclass(frozen=True)
class Check:
    """One function above, in a process that has these packs and variables."""

    function: Callable[[], dict[str, Any]]
    packs: tuple[str, ...]
    with_driver: bool = False  # a library wants libcuda.so.1
    preload_nccl: bool = False


CHECKS = {
    "serve": Check(check_serve, ("serve",)),
    "project": Check(check_project, ("serve",)),
    "triton": Check(check_triton, ("serve",)),
    "kernels": Check(check_kernels, ("serve", "kernels"), with_driver=True),
    "te": Check(check_te, ("serve", "te"), with_driver=True),
    "nccl": Check(check_nccl, ("nccl",), preload_nccl=True),
    "fla": Check(check_fla, ("serve", "fla")),
    "smollm2": Check(check_smollm2, ("serve", "smollm2-1", "smollm2-2")),
}


def make_environment(folder: Path, torch: str) -> Path:
    """Make an environment with this torch and what it needs; return its Python."""
    name = os.environ.get("PYTHON312") or f"python{PYTHON}"
    python = shutil.which(name)
    if python is None or version_of(Path(python)) != PYTHON:
        raise PackError(f"{name} is not Python {PYTHON}: set PYTHON312 to one, or --env to an environment that has one")
    print(f"making an environment of {python} with torch {torch}", flush=True)
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    made = folder / "bin" / "python"
    if subprocess.run([made, *PIP, f"torch=={torch}"]).returncode:
        raise PackError(f"pip could not install torch {torch}: see above")
    return made


def version_of(python: Path) -> str:
    code = "import sys; print(*sys.version_info[:2], sep='.')"
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()


_DISTRIBUTIONS = """
import importlib.metadata as m, json, platform, sys
print(json.dumps({"python": platform.python_version(), "needs": {d.name: d.requires or [] for d in m.distributions()},
    "versions": {d.name: d.version for d in m.distributions()}}))
"""


def facts_of(python: Path, torch: str) -> dict[str, Any]:
    """Return versions in an environment; refuse one with another Python or torch, or with more than torch needs."""
    done = subprocess.run([python, "-I", "-c", _DISTRIBUTIONS], capture_output=True, text=True)
    if done.returncode:
        raise PackError(f"{python} does not start: {done.stderr.strip().splitlines()[-1:]}")
    facts = json.loads(done.stdout)
    versions = {name_of(name): version for name, version in facts["versions"].items()}
    if not facts["python"].startswith(f"{PYTHON}.") or versions.get("torch", "").partition("+")[0] != torch:
        has = f"Python {facts['python']} with torch {versions.get('torch')}"
        raise PackError(f"{python} is {has}, not Python {PYTHON} with torch {torch}")
    needs = {name_of(name): list(map(name_of, listed)) for name, listed in facts["needs"].items()}
    of_torch, queue = {"pip", "setuptools", "wheel"}, ["torch"]
    while queue:
        if (name := queue.pop()) not in of_torch:
            of_torch.add(name)
            queue += needs.get(name, ())
    if more := sorted(versions.keys() - of_torch):
        raise PackError(f"{python} has more than torch needs, which may hide what a pack lacks: {', '.join(more)}")
    return facts | {"versions": versions}


def add_image(python: Path, folder: Path, packs: Sequence[Path], there: set[str]) -> int:
    """Install into a folder what the project and the packs need, in turn, and the machine has; return how many."""
    image = {name_of(line): line for line in listed_in(IMAGE)}
    queue = [*gpu_packing.TESTS, *gpu_packing.OF_PROJECT, *gpu_packing.WITH_SOURCE, "accelerate"]
    queue += [line for pack in packs for wheel in pack.glob("*.whl") for line in gpu_packing.needs_in(wheel)]
    queue += [line for pack in packs for archive in pack.glob("*.tar.gz") for line in gpu_packing.source_needs(archive)]
    installed: set[str] = set()
    while new := sorted({name_of(line) for line in queue if "extra ==" not in line} & image.keys() - there - installed):
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            command = [python, *PIP, "--no-deps", "--no-compile", "--target", scratch, *(image[name] for name in new)]
            if subprocess.run(command).returncode:
                raise PackError("pip could not install the machine's packages: see above")
            queue = [line for d in importlib.metadata.distributions(path=[scratch]) for line in d.requires or ()]
            shutil.copytree(scratch, folder, dirs_exist_ok=True)
        installed |= set(new)
    return len(installed)


def driver_stand_in(libraries: Sequence[Path], folder: Path) -> None:
    """Compile a libcuda.so.1 with every function of the driver that libraries name; none may be called."""
    folder.mkdir(exist_ok=True)
    command = ["nm", "-D", "--undefined-only", *map(str, libraries)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = sorted(set(re.findall(r" U (cu[A-Z]\w*)", said)))
    code = "#include <stdlib.h>\n" + "".join(f"void {name}(void) {{ abort(); }}\n" for name in names)
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(folder / "libcuda.so.1"), "-xc", "-"]
    subprocess.run(command, input=code, text=True, check=True)


_AS_ON_THE_MACHINE = """set -euo pipefail
source scripts/common.sh
use_offline $PACKS
if [[ -n "$PRELOAD" ]]; then export LD_PRELOAD="$PRELOAD"; fi
exec "$PY" scripts/check_packs.py --inside "$CHECK"
"""


def run_check(name: str, python: Path, folder: Path) -> dict[str, Any]:
    """Install the packs of a check as on the machine, and run it there; return what it says."""
    check, log = CHECKS[name], folder / f"{name}.log"
    packs = folder / "packs"
    variables = {
        "CHECK": name,
        "PACKS": " ".join(check.packs),
        "PRELOAD": str(packs / "nccl" / NCCL) if check.preload_nccl else "",
        "BAPO_PACKS": str(packs),
        "OFFLINE": str(folder / f"offline-{name}"),
        "VENV": str(python.parents[1]),
        "PYTHONPATH": os.pathsep.join((str(folder / "image"), str(ROOT / "scripts"))),
        "TRITON_CACHE_DIR": str(folder / "triton"),  # empty, so that kernels are compiled
    }
    if check.with_driver:
        variables["LD_LIBRARY_PATH"] = str(folder / "driver")
    began = time.monotonic()
    with log.open("w") as output:
        done = subprocess.run(
            ["bash", "-c", _AS_ON_THE_MACHINE],
            cwd=ROOT,
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            timeout=CHECK_TIMEOUT_S,
        )
    seconds = {"seconds": round(time.monotonic() - began)}
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1]) | seconds
    told = log.read_text(errors="replace").strip().splitlines() or ["it ended without output"]
    return {"failed": told[-1], "log": told} | seconds


def inside(name: str) -> int:
    """Run a check in this process; its last line is JSON."""
    facts = {"missing": {}} | CHECKS[name].function()
    print(json.dumps(facts))
    return 0


def written(facts: dict[str, Any], sizes: dict[str, tuple[float, int]], results: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a log in TOML."""
    yield "# Packs for a GPU machine (scripts/gpu_packing.py), installed next to torch into an empty environment, where"
    yield "# imports took the branches of a Hopper. num_image_packages of the machine's other packages were there, in"
    yield "# the versions of requirements/gpu-image.txt where it has them, otherwise the newest."
    yield "\n[environment]"
    yield 'command = "scripts/gpu_session.sh check-packs"'
    yield f"date = {time.strftime('%Y-%m-%d')}"
    for key in ("python", "torch", "num_image_packages"):
        yield f"{key} = {json.dumps(facts[key])}"
    for name, (mib, num_files) in sizes.items():
        yield f"\n[packs.{name}]\nmib = {mib:.1f}\nfiles = {num_files}"
    for name, result in results.items():
        yield f"\n[checks.{name}]  # {CHECKS[name].function.__doc__}\npacks = {json.dumps(CHECKS[name].packs)}"
        for key in ("modules", "failed", "line"):
            if key in result:
                yield f"{key} = {json.dumps(result[key])}"
        if "modules" in result:
            yield f"missing = {len(result['missing'])}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu_session.sh check-packs", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    names = f"{', '.join(CHECKS)} (default: all)"
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=names)
    parser.add_argument("--env", type=Path, help="environment to use, which has torch and what it needs")
    parser.add_argument("--output", type=Path, help="write the results as TOML")
    parser.add_argument("--inside", choices=CHECKS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        return inside(options.inside)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            if strange := [name for name in options.checks if name not in CHECKS]:
                raise PackError(f"there is no check {strange[0]!r}; checks are {', '.join(CHECKS)}")
            return check_all(options.checks or list(CHECKS), options.env, options.output, Path(scratch))
        except (PackError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2


def check_all(names: Sequence[str], env: Path | None, output: Path | None, folder: Path) -> int:
    (torch,) = (line.removeprefix("torch==") for line in listed_in(IMAGE) if line.startswith("torch=="))
    packs = list(dict.fromkeys(pack for name in names for pack in CHECKS[name].packs))
    sizes = {}
    for name in packs:  # what it installs into a pack's folder must not travel
        source, copy = gpu_packing.FOLDER / name, folder / "packs" / name
        if not (source / gpu_packing.FACTS).exists():
            raise PackError(f"pack {name} is missing: run `scripts/gpu_session.sh pack {name}`")
        files = json.loads((source / gpu_packing.FACTS).read_text())["files"]
        copy.mkdir(parents=True)
        for file in (*files, gpu_packing.FACTS):
            shutil.copy(source / file, copy / file)
        sizes[name] = (sum(its["bytes"] for its in files.values()) / MIB, len(files))
    python = (env / "bin" / "python").absolute() if env else make_environment(folder / "env", torch)
    facts = facts_of(python, torch)
    num = add_image(python, folder / "image", [folder / "packs" / name for name in packs], set(facts["versions"]))
    facts |= {"torch": torch, "num_image_packages": num}
    print(f"Python {facts['python']}, torch {torch}, {num} packages of {IMAGE.name}", flush=True)
    if any(CHECKS[name].with_driver for name in names):
        unpacked = folder / "libraries"
        for wheel in (folder / "packs").glob("*/*.whl"):
            if name_of(wheel.name.partition("-")[0]) in ("sglang-kernel", gpu_packing.TE_LIBRARY):
                shutil.unpack_archive(wheel, unpacked, "zip")
        driver_stand_in(list(unpacked.rglob("*.so")), folder / "driver")
        shutil.rmtree(unpacked)
    for name, (mib, num_files) in sizes.items():
        print(f"pack {name}: {mib:.1f} MiB in {num_files} files")
    results, is_good = {}, True
    for name in names:
        result = results[name] = run_check(name, python, folder)
        missing = result.get("missing", {})
        is_good &= not (missing or "failed" in result)
        what = result.get("failed") or (
            f"{result['modules']} modules, {len(missing)} missing" if "modules" in result else "done"
        )
        line = f"; {result['line']}" if "line" in result else ""
        print(f"{name}: {what}{line}; {result['seconds']} s", flush=True)
        for told in (*(f"{module}: {why}" for module, why in missing.items()), *result.get("log", ())[-20:]):
            print(f"    {told}")
    if output:
        output.write_text("\n".join(written(facts, sizes, results)) + "\n", encoding="utf-8")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
