"""The README's commands, each exactly as written, in a new clone with its own environment."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from bapo_megatron.assets import demo_model_path
from tests.hang import HANG_S, PATIENT

ROOT = Path(__file__).parents[2]
HUB_NAME = "Qwen/Qwen2.5-0.5B-Instruct"
SHORTER = {  # arguments added to those commands that train or sample
    "scripts/quickstart.sh": "train.num_steps=2 rollout.prompts_per_step=4 rollout.samples_per_prompt=4",
    "bapo train": "train.num_steps=2 rollout.prompts_per_step=4 rollout.samples_per_prompt=4",
    "bapo check": "train.num_steps=2 rollout.prompts_per_step=4 rollout.samples_per_prompt=4",
}
ELSEWHERE = ("scripts/test.sh", "source ")  # this test runs in the first; the second sets the environment's PATH


def commands() -> list[str]:
    """Return the indented lines of the README that a user types, without comments."""
    lines = re.findall(r"(?m)^    ((?:bapo|scripts/|source )[^#\n]*)", (ROOT / "README.md").read_text())
    return [line.strip() for line in lines]


@pytest.mark.slow
def test_every_command_of_the_readme(tmp_path: Path) -> None:
    clone, venv = tmp_path / "clone", tmp_path / "venv"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True, timeout=HANG_S)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=HANG_S)
    packages = venv / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (packages / "packages_of_the_tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    rows = [{"prompt": f"{a}+{b}=", "answer": (a + b) % 10} for a in range(4) for b in range(4)]
    (clone / "math.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = os.environ | {"PATH": f"{venv}/bin:{os.environ['PATH']}", "VENV": str(venv), "OMP_NUM_THREADS": "1"}
    environment.pop("VIRTUAL_ENV", None)

    given = commands()
    assert len(given) >= 12
    for command in given:
        if command.startswith(ELSEWHERE):
            continue
        added = next((text for start, text in SHORTER.items() if command.startswith(start)), "")
        patient = " ".join(PATIENT) if added else ""
        done = subprocess.run(
            ["bash", "-c", f"{command.replace(HUB_NAME, str(demo_model_path()))} {added} {patient}"],
            cwd=clone,
            env=environment,
            input="3+4=\n",
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        if command.startswith("scripts/quickstart.sh"):
            assert shutil.which("bapo", path=environment["PATH"]) == str(venv / "bin" / "bapo")
    assert (clone / "runs" / "mine" / "report.html").exists()
    assert any((clone / "exported").glob("*.safetensors"))
