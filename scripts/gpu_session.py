"""The stages of scripts/gpu_session.sh, which sets the environment: their steps, what each needs, and its outcome."""

import argparse
import contextlib
import fcntl
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import gpu_packing
from gpu_packing import ROOT, TE_WHEELS, source

from bapo_megatron.preflight import software_checks as software
from bapo_megatron.runtime import run_python
from bapo_megatron.runtime.files import write_atomically

STAGE_S = float(os.environ.get("BAPO_STAGE_S", "480"))  # time for one call
LEAST_S = 30.0  # do not start a step with less time left
DRAIN_S = 5.0  # for the last output of a step that has ended
IMPORT_S = 150.0
LINE_CHARS = 200
UNFINISHED = 75
NOT_READY = 2
FOLDER = Path(os.environ.get("BAPO_SESSION", "gpu-session"))
LAST = ROOT / "benchmarks"  # losses files of earlier sessions
BUILT = FOLDER / "built"  # Transformer Engine's torch part, compiled here
BUILD_CODE = FOLDER / "build.code"  # exit code of the compiler, once it is done
BUILD_LOCK = FOLDER / "build.lock"  # held by the compiler and all that it started
PYTEST = ("-m", "pytest", "-rs", "-p", "no:cacheprovider")
ENGINE = ("GPU", "Transformer Engine")
LENGTHS = (2048, 16_384, 65_536)
PACKAGES = ("torch", "triton", "megatron-core", "transformer-engine", "sglang", "sglang-kernel", "flash-attn")

# What a losses file has of each update: its name in metrics.jsonl, and how far sessions on the same kind of GPU may be
# apart, relatively and absolutely. Other kernels in bfloat16 move log-probs by about 0.001, the search moves bounds by
# 0.01 or more.
LOSSES = {
    "loss": ("loss/policy", 0.0, 0.002),
    "low": ("bapo/low", 0.0, 0.001),
    "high": ("bapo/high", 0.0, 0.001),
    "grad_norm": ("optimizer/grad_norm", 0.02, 0.0),
}

_FACTS = "import json; from bapo_megatron.preflight.group import torch_facts; print(json.dumps(torch_facts()))"
_ATTENTION = f"""
import json, pathlib
from bapo_megatron.preflight.software_checks import check_attention
found = {{length: check_attention({{}}, 28, 4, 128, length, False).what for length in {LENGTHS}}}
pathlib.Path({str(FOLDER / "attention.json")!r}).write_text(json.dumps(found))
print(*found.values(), sep="; ")
"""
_BUILD = """
code=0
"$PY" -m pip wheel --no-build-isolation --no-deps --wheel-dir "$BUILT" "$SOURCE" >"$BUILT/build.log" 2>&1 || code=$?
echo "$code" >"$BUILD_CODE"
"""


@dataclass(frozen=True)
class Step:
    """One command of a stage."""

    name: str
    command: tuple[str, ...]  # arguments of Python
    needs: tuple[str, ...] = ("GPU",)
    dry: tuple[str, ...] | None = None  # the command in a dry run; None means that a dry run skips the step
    limit_s: float = STAGE_S
    rows: str | None = None  # file that the command writes
    is_timed: bool = False  # must not run while the compiler does
    has_losses: bool = False  # its rows are compared with the last session's
    packs: tuple[str, ...] = ()  # put on the path before it; without one, the step is left out
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """One call. `seconds` are estimates; the head of scripts/gpu_session.sh says what each stage proves."""

    loan: str  # "first" or "second" quarter of an hour, or "later"
    seconds: int
    steps: tuple[Step, ...]
    packs: tuple[str, ...] = ()  # put on the path first
    modules: tuple[str, ...] = ()  # imported next, each entry in its own process: without them nothing starts


def logprobs(size: str, dry: bool = False) -> Step:
    file = f"logprobs-{size}.json"
    base = ("-m", "benchmarks.logprobs", "time", "--output", str(FOLDER / file))
    return Step(
        f"logprobs-{size}",
        (*base, "--size", size, "--device", "cuda", "--backend", "both"),
        dry=(*base, "--size", "tiny") if dry else None,
        limit_s=240,
        rows=file,
        is_timed=True,
    )


def updates(name: str, arguments: str, needs: tuple[str, ...] = ("GPU",), rows: str = "", **options: Any) -> Step:
    file = rows or f"{name}.json"
    command = ("benchmarks/gpu_step.py", "--output", str(FOLDER / file), *shlex.split(arguments))
    return Step(name, command, needs, (*command, "--tiny"), rows=file, is_timed=True, has_losses=True, **options)


def one_gpu(script: str, name: str, arguments: str, dry: str, limit_s: float, **options: Any) -> Step:
    """Return a step of benchmarks/one_gpu_SCRIPT.py."""
    file = f"{name}.jsonl"
    command = (f"benchmarks/one_gpu_{script}.py", "--output", str(FOLDER / file))
    own = (*command, *shlex.split(arguments))
    return Step(name, own, dry=(*command, *shlex.split(dry)), limit_s=limit_s, rows=file, **options)


def exchange(name: str, arguments: str, dry: str, limit_s: float, **options: Any) -> Step:
    logs = f"--logs {shlex.quote(str(FOLDER))} "
    return one_gpu("exchange", name, logs + arguments, logs + dry, limit_s, **options)


def ranks(part: str, seconds: int, *first: Step) -> Stage:
    nccl = shlex.quote(str(gpu_packing.FOLDER / "nccl" / gpu_packing.NCCL))
    step = one_gpu(
        "ranks",
        part,
        f"--part {part} --backend nccl --nccl {nccl}",
        f"--part {part} --backend gloo --engine embedded",
        450,
        variables={"NCCL_MULTI_RANK_GPU_ENABLE": "1"},
    )
    serves = part != "c2"
    packs = ("serve", "nccl") if serves else ("nccl",)
    return Stage("second" if part == "c2" else "first", seconds, (*first, step), packs, SERVING if serves else TRAINING)


def experts(name: str, variant: str) -> Step:
    """Return updates of experts, in their own process: Megatron-Core's dispatcher keeps a model alive until it ends."""
    return updates(name, f"--model 30b-a3b-3l --turns 3 --variants {shlex.quote(variant)}", ENGINE, limit_s=100)


def two_steps() -> Step:
    """Two steps of a whole run, sums in a fixed order, so that the second step samples the same tokens every time."""
    base = ("-m", "bapo_megatron", "train", "demo", f"run.dir={FOLDER}", "run.name=train", "run.deterministic=true")
    sizes = ("rollout.prompts_per_step=4", "rollout.samples_per_prompt=4", "rollout.groups_in_flight=6")
    dry = (*base, "train.num_steps=2", *sizes, "parallel.tensor=1", "monitor.progress=lines")
    command = (*dry, "model.dtype=bfloat16", "model.implementation=transformer_engine")
    return Step("train", command, ENGINE, dry, rows="train/metrics.jsonl", has_losses=True)


TRAINING = ("torch, bapo_megatron.learner.megatron",)
SERVING = (*TRAINING, "bapo_megatron.engines.sglang_server, sglang.srt.entrypoints.http_server")
GPU_TESTS = (*PYTEST, "-m", "gpu", "tests/gpu")
LAYER_TESTS = tuple(f"tests/gpu/test_{name}_gpu.py" for name in ("precision", "experts", "hybrid", "train"))
OF_7B = "te 'te shared prompts' 'te tensorwise' 'te chunk 4096' 'te triton'"
SHARED = "mem_fraction_static=0.3, log_level='warning'"  # a trainer uses the GPU, too
QUICK_START = "log_level='warning', disable_prefill_cuda_graph=true"
SPLIT = f'"sglang.extra={{{QUICK_START}}}"'  # the plan decides the server's part of the GPU
TURNS = "rollout.placement=turns"
GRAPHS = f'"sglang.extra={{{SHARED}, disable_prefill_cuda_graph=true}}"'
FEW = "rollout.prompts_per_step=4 rollout.samples_per_prompt=4 rollout.groups_in_flight=6"
WITHOUT_KERNELS = {"BAPO_SGLANG_KERNELS": "off"}
SMOLLM2 = "models/SmolLM2-135M-Instruct"
SUMS = str(FOLDER / "sums.jsonl")
OF_SUMS = f"data.source=jsonl data.path={SUMS} data.options={{}} eval.path={SUMS} eval.interval_steps=20"
_SUMS = f"""
import json, random
draw = random.Random(0)
with open({SUMS!r}, "w") as file:
    for _ in range(2000):
        a, b = draw.randrange(100), draw.randrange(100)
        print(json.dumps({{"prompt": f"What is {{a}} + {{b}}?", "answer": str(a + b)}}), file=file)
"""
EXPERTS = (
    experts("one-by-one", "te"),
    experts("grouped", "te grouped"),
    replace(experts("fused", "te grouped moe_permute_fusion true"), dry=None),  # Transformer Engine fuses
)
BUILD = Step("build", (), needs=("GPU", "CUDA toolkit", "source", "ninja"), packs=("te",))
INSTALL = Step("install", (), needs=("GPU", "built"))
STAGES: dict[str, Stage] = {
    "turns": Stage(
        "first",
        180,
        (
            one_gpu(
                "learn",
                "turns",
                f"--steps 30 {TURNS} {SPLIT}",
                f"--engine embedded --steps 2 {TURNS} {FEW}",
                420,
            ),
        ),
        packs=("serve",),
        modules=(*SERVING, "torch_memory_saver"),
    ),
    "c1": ranks("c1", 240),
    "c3": ranks("c3", 220),
    "c2": ranks("c2", 200, BUILD),  # the compiler runs next to ranks that nobody times
    "d": Stage(
        "second",
        280,
        (
            BUILD,
            INSTALL,
            updates("7b-half", f"--model 7b-half --packs 8 --turns 3 --variants {OF_7B}", limit_s=230),
            updates("profile", "--model 1.5b --packs 8 --turns 1 --profile --variants te", ENGINE, limit_s=60),
            updates("peak", "--model 1.5b --turns 1 --optimizer-peak --variants te", limit_s=60),
        ),
        packs=("te",),
        modules=TRAINING,
    ),
    "a": Stage(
        "later",
        300,
        (
            exchange(
                "serve",
                f'"sglang.extra={{{SHARED}, disable_cuda_graph=true}}"',
                "--engine embedded --tokens 16",
                200,
                variables=WITHOUT_KERNELS,
            ),
            exchange("graphs", GRAPHS, "--prompts 8 --tokens 16", 150, variables=WITHOUT_KERNELS),
            exchange("kernels", GRAPHS, "--engine embedded --tokens 16", 150, packs=("kernels",)),
        ),
        packs=("serve",),
        modules=SERVING,
    ),
    "b": Stage(
        "later",
        180,
        (one_gpu("learn", "learn", f"--steps 30 {SPLIT}", f"--engine embedded --steps 2 {FEW}", 420),),
        packs=("serve",),
        modules=SERVING,
    ),
    "e": Stage("later", 120, EXPERTS, modules=TRAINING),
    "linear": Stage(
        "later",
        90,
        (
            Step("tests", (*PYTEST, "tests/gpu/test_hybrid_gpu.py"), limit_s=120),
            updates("linear", "--model qwen3.5-9b-4l --turns 3 --variants te local", ("GPU", "linear attention")),
        ),
        packs=("fla",),
        modules=TRAINING,
    ),
    "smollm2": Stage(
        "later",
        240,
        (
            Step("model", ("scripts/prepare_smollm2.py", SMOLLM2), limit_s=120),
            Step("sums", ("-c", _SUMS), needs=(), dry=("-c", _SUMS)),
            exchange("language", f"--model {SMOLLM2} {GRAPHS}", "--engine embedded --tokens 16", 150),
            one_gpu(
                "learn",
                "sums-learn",
                f"--config smollm2_135m --steps 20 {OF_SUMS} {SPLIT}",
                f"--engine embedded --steps 2 {FEW}",
                300,
            ),
        ),
        packs=("serve", "smollm2-1", "smollm2-2"),
        modules=(*SERVING, "gguf"),
    ),
    "correctness": Stage(
        "later",
        450,
        (
            Step("doctor", ("-m", "bapo_megatron", "doctor"), needs=(), limit_s=120),
            BUILD,
            Step("tests", (*GPU_TESTS, "--deselect", "tests/gpu/test_sglang_nccl.py"), dry=GPU_TESTS),
            Step("kernels", (*PYTEST, "tests/unit/test_logprobs_triton.py"), needs=("GPU", "Triton")),
            logprobs("7b", dry=True),
            logprobs("1.5b"),
            logprobs("32b-tp8"),
        ),
        modules=TRAINING,
    ),
    "te": Stage(
        "later",
        200,
        (
            INSTALL,
            Step("attention", ("-c", _ATTENTION), ENGINE, rows="attention.json"),
            Step("tests", (*PYTEST, *LAYER_TESTS), ENGINE),
        ),
        modules=TRAINING,
    ),
    "bits": Stage(
        "later",
        200,
        (
            updates("1.5b", "--model 1.5b --turns 3 --variants te 'te tensorwise' local"),
            updates("replay", "--model 30b-a3b-3l --turns 3 --variants te 'te replay'", ENGINE),
            updates("transfers", "--model 1.5b --transfers --variants"),
            updates("deterministic", "--model 1.5b --turns 3 --deterministic --variants te", ENGINE, rows="1.5b.json"),
        ),
        modules=TRAINING,
    ),
    "train": Stage("later", 60, (two_steps(),), modules=TRAINING),
    "two-gpus": Stage(
        "later",
        120,
        (Step("sglang", (*PYTEST, "tests/gpu/test_sglang_nccl.py"), needs=("GPU", "second GPU", "SGLang")),),
        modules=TRAINING,
    ),
}


@dataclass
class Machine:
    """The machine and what it offers. An answer is the reason why something is missing, or "" if it is available."""

    facts: dict[str, Any]
    answers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def ask(cls) -> "Machine":
        said, problem = run_python(_FACTS)
        return cls({"problem": f"torch does not answer: {problem}"} if problem else json.loads(said))

    def missing(self, needs: Sequence[str]) -> str:
        """Return the first thing missing, in one line."""
        checks: dict[str, Callable[[], str]] = {
            "GPU": self._gpu,
            "second GPU": lambda: "" if self.facts["num_gpus"] > 1 else "two GPUs are needed, but there is only one",
            "CUDA toolkit": self._toolkit,
            "source": lambda: "" if source(TE_WHEELS) else f"no transformer_engine_torch-*.tar.gz in {TE_WHEELS}",
            "ninja": lambda: "" if shutil.which("ninja") else "no ninja, and one compiler would take 20 minutes",
            "built": built_problem,
            "Transformer Engine": self._transformer_engine,
            "linear attention": lambda: run_python("import fla.ops.gated_delta_rule")[1],
            "Triton": lambda: run_python("import triton")[1],
            "SGLang": lambda: run_python("import sglang")[1],
        }
        for need in needs:
            if need not in self.answers or need == "Transformer Engine":
                self.answers[need] = checks[need]()
            if self.answers[need]:
                return self.answers[need]
        return ""

    def _gpu(self) -> str:
        if "problem" in self.facts:
            return str(self.facts["problem"])
        if not self.facts["num_gpus"]:
            cuda = self.facts["cuda"]
            return f"no GPU: torch {self.facts['torch']}, " + (f"for CUDA {cuda}, sees none" if cuda else "is for CPUs")
        chip = software.check_chip(self.facts["capability"])
        return chip.what if chip.verdict == "error" else ""

    def _toolkit(self) -> str:
        return toolkit_problem(self.facts["cuda"])

    def _transformer_engine(self) -> str:
        finding = software.check_transformer_engine(self.facts, needed=False)
        return "" if finding.verdict == "ok" else f"Transformer Engine {finding.what}"


def toolkit_problem(cuda: str) -> str:
    """Return why nvcc, which builds Transformer Engine, does not fit torch's CUDA (such as "13.0"), or ""."""
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc", path=str(Path(home, "bin")) if home else None)
    if nvcc is None:
        return f"no nvcc in {'CUDA_HOME/bin' if home else 'PATH'}"
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=LEAST_S)
    found = re.search(r"release (\d+\.\d+)", done.stdout)
    version = found[1] if found else "unknown"
    same = version.split(".")[0] == cuda.split(".")[0]
    return "" if same else f"{nvcc} belongs to CUDA {version}, but torch to CUDA {cuda}"


def is_building() -> bool:
    if not BUILD_LOCK.exists():
        return False
    with BUILD_LOCK.open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def built_problem(wait_s: float = 0) -> str:
    """Wait for the compiler; return why there is no wheel, or ""."""
    deadline = time.monotonic() + wait_s
    while is_building():
        if time.monotonic() >= deadline:
            return "the compiler still runs: start the stage again when it is done"
        time.sleep(1)
    log, again = BUILT / "build.log", "scripts/gpu_session.sh d starts it again"
    if not BUILT.exists():
        return "Transformer Engine is not compiled: the step `build` of the stage `d` does that"
    if not BUILD_CODE.exists():
        return f"the build died: {log}; {again}"
    code = BUILD_CODE.read_text().strip()
    return "" if code == "0" else f"the build failed with exit code {code}: {log}; {again}"


def start_build() -> None:
    """Start the compiler in its own session, so that it continues after this stage."""
    include = "nvidia.cudnn.__path__[0] + '/include:' + nvidia.nccl.__path__[0] + '/include'"
    headers, _ = run_python(f"import nvidia.cudnn, nvidia.nccl; print({include})")
    variables = {
        "NVTE_FRAMEWORK": "pytorch",
        "NVTE_PYTORCH_FORCE_BUILD": "TRUE",
        "MAX_JOBS": str(max(1, (os.cpu_count() or 1) // 2)),
        "CPLUS_INCLUDE_PATH": headers,
        "PY": sys.executable,
        "SOURCE": str(source(TE_WHEELS)),
        "BUILT": str(BUILT),
        "BUILD_CODE": str(BUILD_CODE),
    }
    shutil.rmtree(BUILT, ignore_errors=True)
    BUILT.mkdir()
    BUILD_CODE.unlink(missing_ok=True)
    with BUILD_LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command, inherited = ["bash", "-c", _BUILD], (lock.fileno(),)
        subprocess.Popen(command, env=os.environ | variables, pass_fds=inherited, start_new_session=True)


def install_command() -> tuple[str, ...]:
    wheels = sorted(map(str, [*TE_WHEELS.glob("transformer_engine*.whl"), *BUILT.glob("*.whl")]))
    return ("-m", "pip", "install", "--no-deps", "--upgrade", "--target", os.environ["OFFLINE"], *wheels)


def run_step(step: Step, command: tuple[str, ...], log: Path, limit_s: float) -> dict[str, Any]:
    """Run one command in its own process group, which ends with it; append its output to the log.

    Lines of JSON are printed immediately, and kept in the folder OUT: a call that is cut off has lost none.
    """
    start_s = time.monotonic()
    if command[0] == "benchmarks/gpu_step.py":
        command = (*command, "--seconds", f"{limit_s - 20:.0f}")
    if step.rows is not None and Path(step.rows).parent.name:
        shutil.rmtree((FOLDER / step.rows).parent, ignore_errors=True)  # a run of that name would be resumed
    elif step.rows is not None and step.rows.endswith(".jsonl"):
        (FOLDER / step.rows).unlink(missing_ok=True)
    with log.open("a") as output:
        print(f"== {step.name}: python {' '.join(command)}", file=output, flush=True)
        process = subprocess.Popen(
            [sys.executable, *command],
            env=os.environ | step.variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        reader = threading.Thread(target=pass_on, args=(process, step.name, log.stem, output), daemon=True)
        reader.start()
        try:
            code = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            code = UNFINISHED
        finally:
            with contextlib.suppress(ProcessLookupError):  # it took too long, has left children, or there was a Ctrl-C
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            reader.join(DRAIN_S)  # longer only if a child in a session of its own holds the pipe
    lines = log.read_text(errors="replace").strip().splitlines()
    state = {0: "done", UNFINISHED: "unfinished"}.get(code, "failed")
    outcome: dict[str, Any] = {
        "state": state,
        "seconds": round(time.monotonic() - start_s, 1),
        "line": lines[-1][:LINE_CHARS],
    }
    if step.rows is None or not (file := FOLDER / step.rows).exists():
        return outcome
    if file.suffix == ".jsonl":
        outcome["rows"] = [json.loads(line) for line in file.read_text().splitlines()]
    else:
        outcome["rows"] = json.loads(file.read_text())
    return outcome


def pass_on(process: subprocess.Popen[bytes], step: str, stage: str, log: TextIO) -> None:
    """Write a step's output to the log, and its lines of JSON also to standard output and to OUT/STAGE.jsonl."""
    assert process.stdout is not None
    for raw in process.stdout:
        text = raw.decode(errors="replace").rstrip("\n")
        with contextlib.suppress(ValueError):  # the step was too late, and its log is closed
            print(text, file=log, flush=True)
        if text.startswith("{"):
            print(f"{step}: {text}", flush=True)
            if out := os.environ.get("OUT"):
                with Path(out, f"{stage}.jsonl").open("a") as lines:
                    print(json.dumps({"step": step, "line": text}), file=lines)


def prepare(stage: Stage, *, is_dry: bool) -> str:
    """Put a stage's packs on the path, and import what it imports; return why it cannot start, in one line, or "".

    A pack may be missing where its packages are installed otherwise. NCCL's has none.
    """
    if is_dry:
        return ""
    problems = {name: problem for name in stage.packs if (problem := install_pack(name))}
    for modules in stage.modules:
        if failure := run_python(f"import {modules}", timeout_s=IMPORT_S)[1]:
            return "; ".join([*problems.values(), f"cannot import {modules}: {failure}"])
    return problems.get("nccl", "")


def install_pack(name: str) -> str:
    """Put a pack on the path; return why that is impossible, in one line, or ""."""
    try:
        gpu_packing.install([name])
    except (gpu_packing.PackError, subprocess.SubprocessError) as error:
        return str(error)
    return ""


def losses_in(rows: Any) -> dict[str, list[dict[str, float]]]:
    """Return the updates of each variant, or the steps of a run, in the form of a losses file."""
    if isinstance(rows, dict):
        return {name: row["losses"] for name, row in rows.items() if "losses" in row}
    steps = [{"step": row["step"]} | {name: row[metric] for name, (metric, *_) in LOSSES.items()} for row in rows]
    return {"train demo": steps}


def differences(found: dict[str, Any], last: dict[str, Any]) -> list[str]:
    """Return a line for each number that is too far from the last session's, in the updates that both have."""
    lines = []
    for name in found.keys() & last.keys():
        for mine, theirs in zip(found[name], last[name], strict=False):
            for field_name, (_, relative, absolute) in LOSSES.items():
                a, b = mine[field_name], theirs[field_name]
                if not (math.isclose(a, b, rel_tol=relative, abs_tol=absolute) or (math.isnan(a) and math.isnan(b))):
                    lines.append(f"{name}, step {mine['step']}: {field_name} {a:.6g}, {b:.6g} in the last session")
    return sorted(lines)


def compare_losses(outcome: dict[str, Any], about: dict[str, Any], gpu: str) -> None:
    """Add a step's losses to this session's file, and compare them with the last session's on such a GPU."""
    if not (found := losses_in(outcome["rows"])):
        return
    file = f"losses-{re.sub('[^a-z0-9]+', '-', gpu.lower())}.json"
    mine, last = FOLDER / file, LAST / file
    kept = json.loads(mine.read_text())["losses"] if mine.exists() else {}
    write_atomically(mine, json.dumps(about | {"losses": kept | found}, indent=1) + "\n")
    if not last.exists():
        outcome["line"] += "; no earlier losses"
        return
    earlier = json.loads(last.read_text())
    if lines := differences(found, earlier["losses"]):
        outcome |= {"state": "failed", "line": lines[0], "differences": lines}
    else:
        outcome["line"] += f"; losses as on {earlier['date']}"


def run_stage(name: str, *, is_dry: bool, machine: Machine) -> int:
    """Run the steps of a stage that are not done; return the exit code."""
    path, log, deadline = FOLDER / f"{name}.json", FOLDER / f"{name}.log", time.monotonic() + STAGE_S
    stage = STAGES[name]
    kept = json.loads(path.read_text()) if path.exists() else {}
    steps = kept.get("steps", {}) if kept.get("is_dry") == is_dry else {}
    print(f"== stage {name}, about {stage.seconds} s", flush=True)

    def keep(step: Step, outcome: dict[str, Any]) -> None:
        versions = {package: software.installed_version(package) for package in PACKAGES}
        about = {"date": time.strftime("%Y-%m-%d %H:%M"), "machine": machine.facts, "versions": versions}
        if step.has_losses and "rows" in outcome:
            compare_losses(outcome, about, machine.facts.get("gpu", "cpu"))
        steps[step.name] = {"date": about["date"]} | outcome
        print(f"{step.name}: {outcome['state']}, {outcome['line']}", flush=True)
        whole = {"stage": name, "is_dry": is_dry} | about | {"steps": steps}
        write_atomically(path, json.dumps(whole, indent=1) + "\n")
        copy_out(path, log)

    if reason := prepare(stage, is_dry=is_dry):
        print(f"imports: missing, {reason}", flush=True)
        return NOT_READY
    for step in stage.steps:
        if steps.get(step.name, {}).get("state") == "done":
            print(f"{step.name}: done before", flush=True)
        else:
            keep(step, outcome_of(step, log, deadline, is_dry=is_dry, machine=machine))
    for step in stage.steps:
        if steps[step.name]["state"] == "running":
            problem = built_problem(wait_s=deadline - time.monotonic())
            state = "unfinished" if is_building() else "failed" if problem else "done"
            keep(step, {"state": state, "line": problem or f"compiled: {BUILT}"})
    states = {step["state"] for step in steps.values()}
    return 1 if "failed" in states else UNFINISHED if "unfinished" in states else 0


def copy_out(*files: Path) -> None:
    """Copy what a stage has written so far to the folder OUT."""
    for file in (*files, *FOLDER.glob("losses-*.json"), *FOLDER.glob("engine-*.log")):
        if "OUT" in os.environ and file.exists():
            shutil.copy(file, os.environ["OUT"])


def outcome_of(step: Step, log: Path, deadline: float, *, is_dry: bool, machine: Machine) -> dict[str, Any]:
    """Run a step, or say why this machine cannot."""
    if is_dry and step.dry is not None:
        return run_step(step, step.dry, log, deadline - time.monotonic())
    if reason := machine.missing(step.needs):
        return {"state": "missing", "line": reason}
    for name in () if is_dry else step.packs:
        if reason := install_pack(name):
            return {"state": "missing", "line": reason}
    if is_dry:
        return {"state": "left out", "line": "it has no tiny form"}
    if step.name == "build":
        if not is_building() and built_problem():
            start_build()
        return {"state": "running", "line": f"compiling, with its output in {BUILT}/build.log"}
    if step.is_timed and is_building():
        problem = built_problem(wait_s=deadline - time.monotonic() - LEAST_S)
        if is_building():
            return {"state": "unfinished", "line": problem}
    left_s = deadline - time.monotonic()
    if left_s < LEAST_S:
        return {"state": "unfinished", "line": "no time left in this call: start the stage again"}
    command = install_command() if step.name == "install" else step.command
    return run_step(step, command, log, min(left_s, step.limit_s))


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu_session.sh", description=__doc__)
    parser.add_argument("stage", nargs="+", choices=[*STAGES, "all"])
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, on a CPU")
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    machine = Machine.ask()
    names = list(STAGES) if "all" in options.stage else options.stage
    codes = [run_stage(name, is_dry=options.dry_run, machine=machine) for name in names]
    return 1 if 1 in codes else max(codes)


if __name__ == "__main__":
    sys.exit(main())
