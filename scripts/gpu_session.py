"""The stages of scripts/gpu_session.sh, which sets the environment: their steps, what each needs, and its outcome."""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bapo_megatron.preflight import software_checks as software
from bapo_megatron.runtime.files import write_atomically

STAGE_S = 570.0
LEAST_S = 60.0  # do not start a step with less time left
LINE_CHARS = 200
UNFINISHED = 75
FOLDER = Path(os.environ.get("BAPO_SESSION", "gpu-session"))
WHEELS = Path(os.environ.get("BAPO_WHEELS", "/nonexistent"))
BUILT = FOLDER / "built"  # Transformer Engine's torch part, compiled here
BUILD_CODE = FOLDER / "build.code"  # exit code of the compiler, once it is done
PYTEST = ("-m", "pytest", "-rs", "-p", "no:cacheprovider")
LENGTHS = (2048, 16_384, 65_536)
PACKAGES = ("torch", "triton", "megatron-core", "transformer-engine", "sglang", "flash-attn")

_FACTS = "import json; from bapo_megatron.preflight.group import torch_facts; print(json.dumps(torch_facts()))"
_ATTENTION = f"""
from bapo_megatron.preflight.software_checks import check_attention
for length in {LENGTHS}:
    print(check_attention({{}}, 28, 4, 128, length, False), flush=True)
"""
_BUILD = """
mkdir -p "$BUILT" && rm -f "$BUILD_CODE"
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


def updates(model: str, *extra: str, name: str, dry: tuple[str, ...] | None = None) -> Step:
    base = ("benchmarks/gpu_step.py", "--output", str(FOLDER / f"{name}.json"))
    tiny = None if dry is None else (*base, "--model", "tiny", "--tokens", "256", "--length", "64", *dry)
    return Step(name, (*base, "--model", model, *extra), dry=tiny, rows=f"{name}.json", is_timed=True)


GPU_TESTS = (*PYTEST, "-m", "gpu", "tests/gpu")
STAGES: dict[str, tuple[Step, ...]] = {
    "correctness": (
        Step("doctor", ("-m", "bapo_megatron", "doctor"), needs=(), limit_s=120),
        Step("build", (), needs=("GPU", "CUDA toolkit", "source")),
        Step("tests", (*GPU_TESTS, "--deselect", "tests/gpu/test_sglang_nccl.py"), dry=GPU_TESTS),
        Step("kernels", (*PYTEST, "tests/unit/test_logprobs_triton.py"), needs=("GPU", "Triton")),
        logprobs("7b", dry=True),
        logprobs("1.5b"),
        logprobs("32b-tp8"),
    ),
    "te": (
        Step("install", (), needs=("GPU", "built")),
        Step("attention", ("-c", _ATTENTION), needs=("GPU", "Transformer Engine")),
        Step(
            "tests",
            (*PYTEST, "tests/gpu/test_precision_gpu.py", "tests/gpu/test_train_gpu.py"),
            ("GPU", "Transformer Engine"),
        ),
    ),
    "speed": (
        updates("1.5b", "--transfers", name="1.5b", dry=("--turns", "1", "--transfers", "--variants", "local", "te")),
        updates("7b-half", name="7b-half"),
        updates("7b-half", "--variants", "te", "local", "--turns", "1", "--profile", name="profile"),
    ),
    "two-gpus": (Step("sglang", (*PYTEST, "tests/gpu/test_sglang_nccl.py"), needs=("GPU", "second GPU", "SGLang")),),
}


@dataclass
class Machine:
    """The machine and what it offers. An answer is the reason why something is missing, or "" if it is available."""

    facts: dict[str, Any]
    answers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def ask(cls) -> "Machine":
        said, problem = software.run_python(_FACTS)
        return cls({"problem": f"torch does not answer: {problem}"} if problem else json.loads(said))

    def missing(self, needs: Sequence[str]) -> str:
        """Return the first thing missing, in one line."""
        checks: dict[str, Callable[[], str]] = {
            "GPU": self._gpu,
            "second GPU": lambda: "" if self.facts["num_gpus"] > 1 else "two GPUs are needed, but there is only one",
            "CUDA toolkit": self._toolkit,
            "source": lambda: "" if source() else f"no transformer_engine_torch-*.tar.gz in BAPO_WHEELS={WHEELS}",
            "built": lambda: built_problem(wait_s=0),
            "Transformer Engine": self._transformer_engine,
            "Triton": lambda: software.run_python("import triton")[1],
            "SGLang": lambda: software.run_python("import sglang")[1],
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


def source() -> Path | None:
    return next(iter(sorted(WHEELS.glob("transformer_engine_torch-*.tar.gz"))), None)


def built_problem(wait_s: float) -> str:
    """Wait for the compiler; return why there is no wheel, or ""."""
    deadline = time.monotonic() + wait_s
    while not BUILD_CODE.exists():
        if time.monotonic() >= deadline:
            return "Transformer Engine is not compiled: the step `build` of the stage `correctness` does that"
        time.sleep(1)
    return "" if BUILD_CODE.read_text().strip() == "0" else f"the build failed: {BUILT}/build.log"


def start_build() -> None:
    """Start the compiler in its own session, so that it continues after this stage."""
    cudnn, _ = software.run_python("import nvidia.cudnn; print(nvidia.cudnn.__path__[0])")
    variables = {
        "NVTE_FRAMEWORK": "pytorch",
        "NVTE_PYTORCH_FORCE_BUILD": "TRUE",
        "MAX_JOBS": str(max(1, (os.cpu_count() or 1) // 2)),
        "CPLUS_INCLUDE_PATH": f"{cudnn}/include",
        "PY": sys.executable,
        "SOURCE": str(source()),
        "BUILT": str(BUILT),
        "BUILD_CODE": str(BUILD_CODE),
    }
    BUILD_CODE.unlink(missing_ok=True)
    subprocess.Popen(["bash", "-c", _BUILD], env=os.environ | variables, start_new_session=True)


def install_command() -> tuple[str, ...]:
    wheels = sorted(map(str, [*WHEELS.glob("transformer_engine*.whl"), *BUILT.glob("*.whl")]))
    return ("-m", "pip", "install", "--no-deps", "--upgrade", "--target", os.environ["OFFLINE"], *wheels)


def run_step(step: Step, command: tuple[str, ...], log: Path, limit_s: float) -> dict[str, Any]:
    """Run one command, and append its output to the log."""
    start_s = time.monotonic()
    if command[0] == "benchmarks/gpu_step.py":
        command = (*command, "--seconds", f"{limit_s - 20:.0f}")
    with log.open("a") as output:
        print(f"== {step.name}: python {' '.join(command)}", file=output, flush=True)
        process = subprocess.Popen(
            [sys.executable, *command], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            code = UNFINISHED
        finally:
            if process.poll() is None:  # it took too long, or the user pressed Ctrl-C
                os.killpg(process.pid, signal.SIGKILL)  # including its children
                process.wait()
    lines = log.read_text(errors="replace").strip().splitlines()
    state = {0: "done", UNFINISHED: "unfinished"}.get(code, "failed")
    outcome: dict[str, Any] = {
        "state": state,
        "seconds": round(time.monotonic() - start_s, 1),
        "line": lines[-1][:LINE_CHARS],
    }
    rows = FOLDER / step.rows if step.rows else None
    return outcome | ({"rows": json.loads(rows.read_text())} if rows is not None and rows.exists() else {})


def run_stage(name: str, *, is_dry: bool, machine: Machine) -> int:
    """Run the steps of a stage that are not done; return the exit code."""
    path, log, deadline = FOLDER / f"{name}.json", FOLDER / f"{name}.log", time.monotonic() + STAGE_S
    kept = json.loads(path.read_text()) if path.exists() else {}
    steps = kept.get("steps", {}) if kept.get("is_dry") == is_dry else {}
    print(f"== stage {name}", flush=True)
    for step in STAGES[name]:
        if steps.get(step.name, {}).get("state") == "done":
            print(f"{step.name}: done before", flush=True)
            continue
        steps[step.name] = outcome_of(step, log, deadline, is_dry=is_dry, machine=machine)
        shown = steps[step.name]
        print(f"{step.name}: {shown['state']}, {shown['line']}", flush=True)
        versions = {name: software.installed_version(name) for name in PACKAGES}
        whole = {"stage": name, "is_dry": is_dry, "date": time.strftime("%Y-%m-%d %H:%M"), "versions": versions}
        whole |= {"machine": machine.facts}
        write_atomically(path, json.dumps(whole | {"steps": steps}, indent=1) + "\n")
    for file in (path, log):
        if "OUT" in os.environ and file.exists():
            shutil.copy(file, os.environ["OUT"])
    states = {step["state"] for step in steps.values()}
    return 1 if "failed" in states else UNFINISHED if "unfinished" in states else 0


def outcome_of(step: Step, log: Path, deadline: float, *, is_dry: bool, machine: Machine) -> dict[str, Any]:
    """Run a step, or say why this machine cannot."""
    if is_dry and step.dry is not None:
        return run_step(step, step.dry, log, deadline - time.monotonic())
    if reason := machine.missing(step.needs):
        return {"state": "missing", "line": reason}
    if is_dry:
        return {"state": "left out", "line": "it has no tiny form"}
    if step.name == "build":
        start_build()
        return {"state": "done", "line": f"compiling, with its output in {BUILT}/build.log"}
    if step.is_timed and (BUILT / "build.log").exists():
        built_problem(wait_s=deadline - time.monotonic() - LEAST_S)
        if not BUILD_CODE.exists():
            return {"state": "unfinished", "line": "the compiler still runs: start the stage again when it is done"}
    left_s = deadline - time.monotonic()
    if left_s < LEAST_S:
        return {"state": "unfinished", "line": "no time left in this call: start the stage again"}
    command = install_command() if step.name == "install" else step.command
    return run_step(step, command, log, min(left_s, step.limit_s))


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu_session.sh", description=__doc__)
    parser.add_argument("stage", choices=[*STAGES, "all"])
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, on a CPU")
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    machine = Machine.ask()
    names = list(STAGES) if options.stage == "all" else [options.stage]
    codes = [run_stage(name, is_dry=options.dry_run, machine=machine) for name in names]
    return 1 if 1 in codes else max(codes)


if __name__ == "__main__":
    sys.exit(main())
