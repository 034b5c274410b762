"""The wheel holds all that it needs: it works from a folder that knows nothing of the checkout."""

import os
import re
import subprocess
import sys
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.hang import HANG_S, PATIENT

ROOT = Path(__file__).parents[2]
PROBE = """
import bapo_megatron, bapo_megatron_patches.megatron_core, bapo_megatron_patches.sglang.v0_5_23, bapo_megatron_configs
from importlib import resources
from bapo_megatron.assets import resolve_model_path
print(bapo_megatron.__file__)
print(bapo_megatron_patches.__file__)
print(resolve_model_path("demo"))
print(resolve_model_path("moe"))
print(*(str(f) for f in resources.files("bapo_megatron_configs").iterdir() if f.name == "demo.toml"))
print(*(str(f) for f in resources.files("bapo_megatron.report").iterdir() if f.name.endswith(".jinja")))
print(*(str(f) for f in resources.files("bapo_megatron").iterdir() if f.name == "metrics.toml"))
print(*(str(f) for f in resources.files("bapo_megatron.config").iterdir() if f.name == "system_calls.txt"))
print(*(str(f) for f in resources.files("bapo_megatron.report").iterdir() if f.name == "gallery.toml"))
print(*(str(f) for f in resources.files("bapo_megatron.report").iterdir() if f.name == "page.js"))
print(*(str(f) for f in (resources.files("bapo_megatron.report") / "uplot").iterdir() if f.name == "LICENSE"))
"""


def run(*command: str, cwd: Path, **environment: str) -> str:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | environment
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_wheel_works_outside_the_checkout(tmp_path: Path) -> None:
    source, dist, target, elsewhere = (tmp_path / name for name in ("source", "dist", "target", "elsewhere"))
    _copy_checkout(source)
    elsewhere.mkdir()
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(dist), str(source), cwd=tmp_path)
    (wheel,) = dist.glob("bapo_megatron-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA"))
    links = re.findall(r"]\(([^)]*)\)", metadata)
    assert links
    assert all(link.startswith("https://") for link in links), "a package's page has no files to link to"
    run(*pip, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel), cwd=tmp_path)

    lines = run(sys.executable, "-c", PROBE, cwd=elsewhere, PYTHONPATH=str(target)).splitlines()
    assert len(lines) == PROBE.count("print(")
    assert all(line.startswith(str(target)) for line in lines), lines
    summary = run(sys.executable, "-m", "bapo_megatron", "check", "demo", cwd=elsewhere, PYTHONPATH=str(target))
    assert "tensor 2" in summary
    recipe = ("recipes/qwen3-32b-64k", "algorithms/bapo", "clusters/16x8-h200")
    plan = run(sys.executable, "-m", "bapo_megatron", "check", *recipe, cwd=elsewhere, PYTHONPATH=str(target))
    assert "64 GPUs for the trainer" in plan
    command = [sys.executable, "-m", "bapo_megatron", "reproduce", "staleness"]
    env = os.environ | {"PYTHONPATH": str(target)}
    refused = subprocess.run(command, cwd=elsewhere, env=env, stderr=subprocess.PIPE, text=True, timeout=HANG_S)
    assert refused.returncode == 2
    assert "the studies are not installed: they are the folder studies/ of the source" in refused.stderr

    # In an environment with only the extra "train": `pip install "bapo-megatron[train]"`.
    (target / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({_beyond_train()}))")
    shorter = ("train.num_steps=1", "rollout.prompts_per_step=4", "run.dir=runs", *PATIENT)
    done = run(sys.executable, "-m", "bapo_megatron", "demo", *shorter, cwd=elsewhere, PYTHONPATH=str(target))
    assert re.search(r"(?m)^time +\d", done), done
    (report,) = elsewhere.glob("runs/**/report.html")
    assert report.stat().st_size > 100_000


def _beyond_train() -> list[str]:
    """Return the modules of packages that the other extras bring."""
    locked = {
        file.stem: set(re.findall(r"(?m)^([\w.-]+)==", file.read_text())) for file in ROOT.glob("requirements/*.lock")
    }
    others = set().union(*locked.values()) - locked["train"]
    found = packages_distributions().items()
    modules = [module for module, names in found if {re.sub(r"[-_.]+", "-", name).lower() for name in names} <= others]
    assert {"reasoning_gym", "wandb", "sglang"} & set(modules), modules
    return modules


def _copy_checkout(target: Path) -> None:
    """Copy what packaging reads, without build folders, so that the test leaves nothing in the checkout."""
    import shutil

    target.mkdir()
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, target)
    for name in ("bapo_megatron", "patches", "configs"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
