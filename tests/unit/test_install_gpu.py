"""scripts/install_gpu.sh, with a Python that only notes what it is asked for; and which versions a machine gets."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.distributed import HANG_S
from tests.pinned import requirements

ROOT = Path(__file__).parents[2]
PINS = ROOT / "requirements" / "gpu.txt"
PYTHON = """#!/usr/bin/env bash
case "$*" in
    *"version_info < (3, 12)"*) exit "${TOO_OLD:-0}" ;;
    *torch.version.cuda*) [[ "$TORCH_CUDA" != missing ]] && echo "$TORCH_CUDA" ;;
    *nvidia.cudnn*) echo /site/nvidia/cudnn ;;
    *nvidia.nccl*) echo /site/nvidia/nccl ;;
    *"-m pip"*) echo "${NVTE_FRAMEWORK:-} ${CPLUS_INCLUDE_PATH:-} | $*" >>"$NOTES" ;;
    *sysconfig*) exit "${NO_HEADERS:-0}" ;;
    *transformer_engine*) exit "${BROKEN:-0}" ;;
    --version) echo "Python 3.11.2" ;;
esac
"""
NVCC = "#!/usr/bin/env bash\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n"
SMI = "#!/usr/bin/env bash\n{}\n"


@dataclass(frozen=True)
class Machine:
    """A machine of which every program is a stand-in."""

    folder: Path

    def run(self, command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "VENV": str(self.folder / "venv"),
            "CUDA_HOME": str(self.folder / "cuda"),
            "NOTES": str(self.folder / "notes"),
            "TORCH_CUDA": "13.0",
        }
        return subprocess.run(
            ["bash", "-c", command],
            cwd=ROOT,
            env=environment | variables,
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )

    @property
    def installations(self) -> list[tuple[str, str]]:
        """The variables and the arguments of each `pip install`, the constraints left out."""
        notes = self.folder / "notes"
        lines = notes.read_text().splitlines() if notes.exists() else []
        said = "-m pip install --disable-pip-version-check --constraint"
        pairs = [line.split(" | ", 1) for line in lines]
        assert all(arguments.startswith(f"{said} {PINS} ") for _, arguments in pairs), lines
        return [(variables.strip(), arguments.removeprefix(f"{said} {PINS} ")) for variables, arguments in pairs]

    def program(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.program("venv/bin/python", PYTHON)
    made.program("cuda/bin/nvcc", NVCC)
    made.program("bin/cc", "#!/bin/sh\n")
    return made


def test_each_step_has_the_pins_and_what_is_compiled_sees_the_installed_torch(machine: Machine) -> None:
    done = machine.run("scripts/install_gpu.sh")
    assert done.returncode == 0, done.stderr
    first, tools, engine, apex, wheel, checkout = machine.installations
    assert first == ("", "torch megatron-core transformers sglang")
    assert tools[1] == "setuptools wheel pybind11 ninja"
    cuda = machine.folder / "cuda"
    assert engine[0] == f"pytorch /site/nvidia/cudnn/include:/site/nvidia/nccl/include:{cuda}/include/cccl"
    assert engine[1] == "--no-build-isolation transformer-engine[pytorch]"
    assert re.fullmatch(
        r"--no-build-isolation --no-deps apex @ git\+https://github.com/NVIDIA/apex@[0-9a-f]{40}", apex[1]
    )
    assert wheel == ("", "setuptools wheel")
    assert checkout == ("", f"--no-build-isolation --editable {ROOT}[train,parquet,datasets] nvidia-ml-py")


@pytest.mark.parametrize(("step", "number"), [("packages", 1), ("compiled", 3), ("checkout", 2)])
def test_the_image_runs_the_steps_one_by_one(machine: Machine, step: str, number: int) -> None:
    assert machine.run(f"scripts/install_gpu.sh {step}").returncode == 0
    assert len(machine.installations) == number
    assert f"\nRUN scripts/install_gpu.sh {step}\n" in (ROOT / "docker" / "Dockerfile.gpu").read_text()


@pytest.mark.parametrize(
    ("step", "variables", "message"),
    [
        ("all", {"TOO_OLD": "1"}, "Python 3.11.2 is too old: requirements/gpu.txt has the versions for Python 3.12"),
        ("compiled", {"TORCH_CUDA": "missing"}, "torch is missing; run: scripts/install_gpu.sh packages"),
        ("compiled", {"TORCH_CUDA": ""}, "this torch was built without CUDA; run: scripts/install_gpu.sh packages"),
        ("compiled", {"TORCH_CUDA": "13.2"}, "torch was built with CUDA 13.2, and nvcc is of CUDA 13.0; set CUDA_HOME"),
        ("compiled", {"CUDA_HOME": "/none"}, "nvcc was not found; install the CUDA toolkit 13.0 and set CUDA_HOME"),
        ("compiled", {"NO_HEADERS": "1"}, "a C++ compiler and Python's headers are needed (apt install"),
        ("engine", {}, "scripts/install_gpu.sh packages, compiled or checkout; without a word, all three; got engine"),
    ],
)
def test_what_is_missing_is_one_line_before_anything_is_compiled(
    machine: Machine, step: str, variables: dict[str, str], message: str
) -> None:
    done = machine.run(f"scripts/install_gpu.sh {step}", **variables)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {message}")
    assert len(done.stderr.splitlines()) == 1
    assert machine.installations == []


def test_a_transformer_engine_that_does_not_load_is_an_error(machine: Machine) -> None:
    done = machine.run("scripts/install_gpu.sh compiled", BROKEN="1")
    assert (done.returncode, done.stderr) == (2, "error: Transformer Engine was compiled but cannot be imported\n")


@pytest.mark.parametrize(
    ("driver", "variables", "stack"),
    [
        ("echo 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)'", {}, "gpu"),
        ("echo 'No devices found.'", {}, "cpu"),
        ("exit 9", {}, "cpu"),
        ("echo 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)'", {"BAPO_STACK": "cpu"}, "cpu"),
        ("exit 9", {"BAPO_STACK": "gpu"}, "gpu"),
    ],
)
def test_a_machine_with_a_gpu_gets_the_torch_that_sglang_pins(
    machine: Machine, driver: str, variables: dict[str, str], stack: str
) -> None:
    machine.program("bin/nvidia-smi", SMI.format(driver))
    done = machine.run("source scripts/common.sh && pins", **variables)
    assert done.stdout == f"{ROOT}/requirements/{stack}.txt\n"


def test_another_stack_is_refused(machine: Machine) -> None:
    done = machine.run("scripts/quickstart.sh", BAPO_STACK="cuda")
    assert (done.returncode, done.stderr) == (2, "error: BAPO_STACK must be cpu or gpu, got cuda\n")


@pytest.mark.slow
def test_the_packages_of_a_gpu_machine_fit_together(tmp_path: Path) -> None:
    """pip finds versions for all of them, for Python 3.12, as scripts/install_gpu.sh asks for them.

    Transformer Engine's torch part and apex are left out, which have no wheels.
    """
    lines = [Requirement(line) for line in PINS.read_text().splitlines() if line and not line.startswith(("#", "apex"))]
    held = [r for r in lines if r.marker is None or r.marker.evaluate({"python_version": "3.12"})]
    constraints, report = tmp_path / "constraints.txt", tmp_path / "report.json"
    constraints.write_text("".join(f"{r.name}{r.specifier}\n" for r in held))
    ours = {r.name for group in ("core", "parquet", "sglang-needs") for r in requirements(group)}
    (engine,) = (r for r in held if r.name == "transformer-engine")
    wanted = [*sorted({"torch", "sglang", *ours}), "nvidia-ml-py", str(engine), f"{engine.name}-cu13{engine.specifier}"]
    target = ["--python-version=3.12", "--implementation=cp", "--only-binary=:all:", f"--target={tmp_path / 'site'}"]
    platforms = ["manylinux1", "manylinux2010", "manylinux2014", *(f"manylinux_2_{minor}" for minor in range(5, 35))]
    target += [f"--platform={name}_x86_64" for name in [*platforms, "linux"]] + ["--platform=any"]
    # pip would compare Requires-Python with this interpreter; it looks for files that fit Python 3.12 even so.
    options = ["--dry-run", "--ignore-installed", "--ignore-requires-python", "--quiet", f"--report={report}"]
    command = [sys.executable, "-m", "pip", "install", *options, *target, f"--constraint={constraints}", *wanted]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    if done.returncode and "CI" not in os.environ:
        pytest.skip(f"pip cannot resolve them, perhaps for want of a network: {done.stderr.strip()[-500:]}")
    assert done.returncode == 0, done.stderr
    found = {
        canonicalize_name(one["metadata"]["name"]): one["metadata"]["version"]
        for one in json.loads(report.read_text())["install"]
    }
    for pin in held:
        assert pin.name not in found or pin.specifier.contains(found[pin.name]), (pin, found[pin.name])
    assert {"torch", "megatron-core", "sglang", "transformer-engine-cu13", "nvidia-cuda-nvcc"} <= found.keys()
