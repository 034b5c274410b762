"""What commands say about missing things: an engine, models and prompts of a job, pages of a checkout."""

import importlib.metadata
import os
import subprocess
from pathlib import Path

import pytest
from bapo_megatron_patches import megatron_core

from bapo_megatron import assets
from bapo_megatron.assets import resolve_model_path
from bapo_megatron.cli import main
from bapo_megatron.errors import CheckpointError
from bapo_megatron.preflight import software_checks
from bapo_megatron.runtime.files import located
from tests.hang import HANG_S

ROOT = Path(__file__).parents[2]
RECIPE = ["recipes/qwen3-32b-64k", "algorithms/bapo", "clusters/16x8-h100"]


@pytest.fixture
def without_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version

    def missing(name: str) -> str:
        if name == "sglang":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)


@pytest.mark.usefixtures("without_sglang")
def test_check_refuses_an_engine_that_is_not_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "demo", "rollout.engine=sglang"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith('bapo: rollout.engine="sglang" needs SGLang, which is not installed in ')
    assert main(["check", *RECIPE]) == 0, "the cluster has its own environment"


@pytest.mark.parametrize(
    ("found", "what"), [("0.17.0", "0.17.0 was not tried; 0.16.1 and 0.19.2 were"), (None, "is not installed")]
)
def test_check_refuses_a_megatron_that_was_not_tried(
    found: str | None, what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(software_checks, "installed_version", {"megatron-core": found}.get)
    mend = f"pip install megatron-core=={megatron_core.ADVISED}"
    assert main(["check", "demo"]) == 2
    assert capsys.readouterr().err == f"bapo: megatron-core {what}; {mend}\n"
    assert software_checks.check_megatron(has_gpu=False).verdict == "error"
    assert main(["check", *RECIPE]) == 0, "the cluster has its own environment"


def test_a_dry_run_warns_of_what_is_not_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["slurm", *RECIPE, "--dry-run"]) == 0
    told = capsys.readouterr()
    assert told.out.startswith(
        "#!/usr/bin/env bash\n# qwen3-32b-64k: 64 trainer ranks on 8 nodes, 16 sglang servers on 8"
    )
    model, data = told.err.splitlines()
    assert model.startswith(
        "bapo: warning: model.path=models/Qwen3-32B-64k is not on this machine; `bapo slurm` refuses"
    )
    assert "hf download Qwen/Qwen3-32B --local-dir models/Qwen3-32B-64k" in model
    assert data.startswith("bapo: warning: data.path=data/skywork_or1_math.jsonl is not on this machine; ")
    assert main(["slurm", *RECIPE]) == 2
    refused = capsys.readouterr().err
    assert "hf download Qwen/Qwen3-32B --local-dir models/Qwen3-32B-64k" in refused
    assert len(refused.splitlines()) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["docs/data.md", "docs/start.md", "scripts/install_sglang_cpu.sh"])
def test_pages_and_scripts_are_named_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(ROOT)
    assert located(f"see {name}; then") == f"see {name}; then"
    monkeypatch.chdir(tmp_path)
    assert located(f"see {name}; then") == f"see {ROOT / name}; then"
    assert located(f"see {name}; then", checkout=tmp_path) == f"see {name} of the source; then", "from a wheel"
    for other in (f"/home/me/{name}", f"my-{name}", "docs/", "scripts"):
        assert located(other, checkout=tmp_path) == other


def test_help_names_pages_by_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["help", "plan"]) == 0
    assert str(ROOT / "docs" / "recipes.md") in capsys.readouterr().out


def test_a_wheel_offers_no_script_for_smollm2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assets, "CHECKOUT", tmp_path)
    with pytest.raises(
        CheckpointError, match="make it with `hf download HuggingFaceTB/SmolLM2-135M-Instruct --local-dir"
    ):
        resolve_model_path(str(tmp_path / "SmolLM2-135M-Instruct"))
    with pytest.raises(CheckpointError, match="give a local folder"):
        resolve_model_path(str(tmp_path / "SmolLM2"))


@pytest.mark.parametrize("script", ["quickstart.sh", "test.sh", "debian13.sh"])
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_a_script_explains_itself_and_installs_nothing(tmp_path: Path, script: str, option: str) -> None:
    environment = os.environ | {"VENV": str(tmp_path / "venv"), "PYTHON": "/no/such/python"}
    command = [str(ROOT / "scripts" / script), option]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"scripts/{script}" in done.stdout
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "no command was given; for example:"),
        (["true"], "debootstrap was not found" if os.geteuid() == 0 else "only root can"),
    ],
)
def test_debian13_says_what_it_lacks(arguments: list[str], problem: str, tmp_path: Path) -> None:
    (tmp_path / "dirname").symlink_to("/usr/bin/dirname")
    environment = {"PATH": str(tmp_path), "BAPO_DEBIAN13": str(tmp_path / "debian13")}
    command = ["/bin/bash", str(ROOT / "scripts" / "debian13.sh"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, env=environment, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {problem}")
    assert not (tmp_path / "debian13").exists()
