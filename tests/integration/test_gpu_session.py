"""The prepared GPU session on a machine without a GPU: its dry run, and what it reports as missing."""

import json
import os
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any

import gpu_session
import pytest
import torch

from tests.distributed import HANG_S

ROOT = Path(__file__).parents[2]
HOPPER = {"torch": "2.14.1", "cuda": "13.0", "num_gpus": 1, "capability": [9, 0]}


def session(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `scripts/gpu_session.sh` with a package index and a hub that cannot be reached."""
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HF_ENDPOINT", "PIP_INDEX_URL"), "http://127.0.0.1:9")
    variables = {
        "BAPO_SESSION": f"{folder}/session",
        "OFFLINE": f"{folder}/links",
        "OUT": str(folder),
        "VENV": sys.prefix,
    }
    return subprocess.run(
        [ROOT / "scripts" / "gpu_session.sh", *arguments],
        env={**os.environ, **nowhere, **variables, "BAPO_WHEELS": str(folder)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def states(folder: Path, stage: str) -> dict[str, str]:
    return {name: step["state"] for name, step in json.loads((folder / f"{stage}.json").read_text())["steps"].items()}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")
def test_the_dry_run_needs_neither_gpu_nor_network_and_goes_on_where_it_ended(tmp_path: Path) -> None:
    done = session(tmp_path, "--dry-run", "all")
    assert done.returncode == 0, done.stdout + done.stderr
    assert states(tmp_path, "correctness") == {
        "doctor": "left out",
        "build": "missing",
        "tests": "done",
        "kernels": "missing",
        "logprobs-7b": "done",
        "logprobs-1.5b": "missing",
        "logprobs-32b-tp8": "missing",
    }
    assert states(tmp_path, "speed") == {"1.5b": "done", "7b-half": "missing", "profile": "missing"}
    assert states(tmp_path, "te").keys() == {"install", "attention", "tests"}
    assert states(tmp_path, "two-gpus") == {"sglang": "missing"}
    assert "build: missing, no GPU: torch" in done.stdout
    rows = json.loads((tmp_path / "speed.json").read_text())["steps"]["1.5b"]["rows"]
    measured = {name.rpartition(", ")[2]: row for name, row in rows.items()}
    assert measured["local"]["seconds"]["median"] > 0
    assert "needs a GPU" in measured["te"]["missing"]
    assert measured["transfers"]["weights_gib"] > 0
    assert all((tmp_path / f"{stage}.log").exists() for stage in ("correctness", "speed"))

    again = session(tmp_path, "--dry-run", "correctness")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "tests: done before" in again.stdout
    assert "logprobs-7b: done before" in again.stdout


@pytest.mark.parametrize(
    ("facts", "needs", "reason"),
    [
        ({"problem": "torch does not answer: boom"}, ("GPU",), "torch does not answer: boom"),
        ({"torch": "2.13.0+cpu", "cuda": None, "num_gpus": 0}, ("GPU",), "no GPU: torch 2.13.0+cpu, is for CPUs"),
        (
            {"torch": "2.14.1", "cuda": "13.0", "num_gpus": 0},
            ("GPU",),
            "no GPU: torch 2.14.1, for CUDA 13.0, sees none",
        ),
        (HOPPER | {"capability": [7, 5]}, ("GPU",), "compute capability 7.5 is too old: bfloat16 needs 8.0 (Ampere)"),
        (HOPPER, ("GPU", "CUDA toolkit"), "{nvcc} belongs to CUDA 12.8, but torch to CUDA 13.0"),
        (HOPPER, ("GPU", "second GPU"), "two GPUs are needed, but there is only one"),
        (HOPPER, ("GPU", "source"), "no transformer_engine_torch-*.tar.gz in BAPO_WHEELS={wheels}"),
        (
            HOPPER,
            ("GPU", "built"),
            "Transformer Engine is not compiled: the step `build` of the stage `correctness` does that",
        ),
        (HOPPER, ("GPU",), ""),
    ],
)
def test_what_is_missing_is_one_line(
    facts: dict[str, Any], needs: tuple[str, ...], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V12.8.93'\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(gpu_session, "WHEELS", tmp_path)
    monkeypatch.setattr(gpu_session, "BUILD_CODE", tmp_path / "build.code")
    found = gpu_session.Machine(facts).missing(needs)
    assert found == reason.format(nvcc=nvcc, wheels=tmp_path)
    assert len(found.splitlines()) <= 1


def test_a_machine_without_transformer_engine_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_session, "FOLDER", tmp_path)
    monkeypatch.setattr(gpu_session.software, "installed_version", lambda name: None)
    monkeypatch.setattr(gpu_session, "BUILD_CODE", tmp_path / "build.code")
    monkeypatch.setattr(
        gpu_session, "STAGES", {"te": (*gpu_session.STAGES["te"], gpu_session.Step("last", ("-c", "print('here')")))}
    )
    code = gpu_session.run_stage("te", is_dry=False, machine=gpu_session.Machine(HOPPER))
    steps = json.loads((tmp_path / "te.json").read_text())["steps"]
    assert code == 0
    assert steps["attention"]["line"] == "Transformer Engine is not installed: no FP8"
    assert (steps["last"]["state"], steps["last"]["line"]) == ("done", "here")


def test_a_step_that_fails_or_is_late_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_session, "FOLDER", tmp_path)
    slow, broken = "import time; print('begun', flush=True); time.sleep(1e6)", "raise SystemExit('wrong values')"
    wait = subprocess.Popen.wait

    def until_it_has_begun(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout != 2:
            return wait(process, timeout)
        deadline = time.monotonic() + HANG_S
        while "begun" not in (tmp_path / "mine.log").read_text().splitlines():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", until_it_has_begun)
    steps = (
        gpu_session.Step("broken", ("-c", broken), needs=()),
        gpu_session.Step("late", ("-c", slow), needs=(), limit_s=2),
    )
    monkeypatch.setattr(gpu_session, "STAGES", {"mine": steps})
    assert gpu_session.run_stage("mine", is_dry=False, machine=gpu_session.Machine({})) == 1
    found = json.loads((tmp_path / "mine.json").read_text())["steps"]
    assert (found["broken"]["state"], found["broken"]["line"]) == ("failed", "wrong values")
    assert (found["late"]["state"], found["late"]["line"]) == ("unfinished", "begun")


def test_the_offline_script_installs_nothing(tmp_path: Path) -> None:
    """scripts/gpu_tests.sh and gpu_session.sh begin like this: links make the checkout importable, metadata too."""
    code = (
        "import importlib.metadata as m, bapo_megatron, bapo_megatron_patches, bapo_megatron_configs, carried;"
        "print(bapo_megatron_patches.__path__[0], m.requires('bapo-megatron')[0])"
    )
    with zipfile.ZipFile(tmp_path / "carried-1-py3-none-any.whl", "w") as wheel:
        about = "carried-1.dist-info"
        wheel.writestr("carried.py", "")
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: carried\nVersion: 1\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    script = f'source {ROOT}/scripts/common.sh; ROOT="$1"; use_offline; cd /; "$PY" -c "$2"'
    copy = tmp_path / "checkout"
    copy.mkdir()
    for name in ("bapo_megatron", "patches", "configs", "requirements", "setup.py", "README.md", "pyproject.toml"):
        (copy / name).symlink_to(ROOT / name)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script, "bash", str(copy), code],
        env={**os.environ, "VENV": sys.prefix, "BAPO_WHEELS": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert str(copy / ".bapo-offline" / "bapo_megatron_patches") in done.stdout
    assert "torch>=" in done.stdout


def test_a_wrong_stage_is_refused(tmp_path: Path) -> None:
    done = session(tmp_path, "nothing")
    assert done.returncode == 2
    assert "invalid choice: 'nothing'" in done.stderr


@pytest.mark.slow
def test_what_is_compiled_can_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A one-file source stands in for Transformer Engine's torch part: compiled in the background, then installed."""
    name = "transformer_engine_torch"
    for variable, folder in (("WHEELS", "wheels"), ("FOLDER", "."), ("BUILT", "built"), ("BUILD_CODE", "build.code")):
        monkeypatch.setattr(gpu_session, variable, tmp_path / folder)
    monkeypatch.setenv("OFFLINE", str(tmp_path / "links"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    source = tmp_path / f"{name}-2.11.0"
    source.mkdir()
    (source / "setup.py").write_text(f"from setuptools import setup; setup(name='{name}', py_modules=['{name}'])")
    (source / f"{name}.py").write_text("ANSWER = 42")
    (tmp_path / "wheels").mkdir()
    with tarfile.open(tmp_path / "wheels" / f"{source.name}.tar.gz", "w:gz") as archive:
        archive.add(source, source.name)
    gpu_session.start_build()
    assert gpu_session.built_problem(wait_s=HANG_S) == ""
    subprocess.run([sys.executable, *gpu_session.install_command()], check=True, capture_output=True, timeout=HANG_S)
    assert (tmp_path / "links" / f"{name}.py").read_text() == "ANSWER = 42"

    (tmp_path / "wheels" / f"{source.name}.tar.gz").write_bytes(b"torn")
    gpu_session.start_build()
    assert gpu_session.built_problem(wait_s=HANG_S) == f"the build failed: {tmp_path}/built/build.log"
