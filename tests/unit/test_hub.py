"""Models by their Hugging Face hub names: downloaded, pinned, or refused with the command to run."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bapo_megatron.assets import demo_model_path
from bapo_megatron.assets.hub import is_hub_name
from bapo_megatron.engines.processes import reserved_ports
from tests.distributed import HANG_S
from tests.unit.fake_hub import NAME, FakeHub

PINNED = """
from bapo_megatron.config.load import dump_config, load_config
from bapo_megatron.runs.folder import RunDir
from bapo_megatron.runs.resuming import with_pins
named = ("teacher.path_by_source.a", "loss.reference_path", "model.path")
config = with_pins(load_config(["demo"], [*(f"{setting}=acme/tiny" for setting in named), "run.name=demo"]))
with RunDir.open(config):
    print(config.model.path)
"""
REFUSED = """
from bapo_megatron.assets import resolve_model_path
from bapo_megatron.errors import CheckpointError
for path in ("acme/none", "acme/gated", "acme/tiny@v9"):
    try:
        resolve_model_path(path)
    except CheckpointError as error:
        print(error)
"""


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    hub = FakeHub(demo_model_path())
    with hub.serving():
        yield hub


def run(command: list[str], folder: Path, **environment: str) -> tuple[int, str, str]:
    root = str(Path(__file__).parents[2])
    cleared = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        cwd=folder,
        env=cleared | {"HF_HOME": str(folder / "hf"), "PYTHONPATH": root} | environment,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def check(folder: Path, path: str, **environment: str) -> tuple[int, str]:
    command = ["-m", "bapo_megatron", "check", "demo", f"model.path={path}"]
    code, _, error = run(command, folder, **environment)
    return code, error


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    for name in ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen3-0.6B@v1"):
        assert is_hub_name(name)
    for path in ("demo", "models/Qwen3-32B", "mine/model", "./Qwen/Qwen3", "/a/b", "a/b/c", "../a", "~/a", "a/b@c d"):
        assert not is_hub_name(path)


def test_check_downloads_no_weights(hub: FakeHub, tmp_path: Path) -> None:
    assert check(tmp_path, NAME, HF_ENDPOINT=hub.url)[0] == 0
    assert not any("safetensors" in request for request in hub.requests)


def test_a_run_keeps_its_commit(hub: FakeHub, tmp_path: Path) -> None:
    code, first, progress = run(["-c", PINNED], tmp_path, HF_ENDPOINT=hub.url)
    assert (code, first) == (0, f"{NAME}@{'a' * 40}\n"), progress
    assert "100%" in progress
    written = (tmp_path / "runs" / "demo" / "config.toml").read_text()
    assert written.count(f'= "{NAME}@{"a" * 40}"') == 3, "the policy's, the reference's and the teacher's"
    hub.commit = "b" * 40
    assert run(["-c", PINNED], tmp_path, HF_ENDPOINT=hub.url)[1] == first  # resumed
    assert run(["-c", PINNED], tmp_path, HF_HUB_OFFLINE="1")[1] == first
    other_run = PINNED.replace("name=demo", "name=other")
    other = run(["-c", other_run], tmp_path, HF_ENDPOINT=hub.url)
    assert other[1] == f"{NAME}@{'b' * 40}\n", other[2]


@pytest.mark.slow
def test_refusals_say_what_to_do(hub: FakeHub, tmp_path: Path) -> None:
    command = "`hf download acme/tiny --local-dir models/tiny`, and set model.path=models/tiny"
    code, error = check(tmp_path, NAME, HF_HUB_OFFLINE="1")
    assert code == 2
    assert "HF_HUB_OFFLINE is set" in error
    assert command in error
    with reserved_ports(1) as (port,):  # nothing listens there
        code, error = check(tmp_path, NAME, HF_ENDPOINT=f"http://127.0.0.1:{port}")
    assert (code, command in error) == (2, True), error
    assert error.count("\n") == 1
    code, output, error = run(["-c", REFUSED], tmp_path, HF_ENDPOINT=hub.url)
    assert code == 0, error
    for line, message in zip(
        output.splitlines(),
        (
            "model.path = 'acme/none': the Hugging Face hub has no such model",
            "model.path = 'acme/gated': its owner grants access to it",
            "model.path = 'acme/tiny@v9': the model has no revision v9",
        ),
        strict=True,
    ):
        assert line.startswith(message)
    del hub.files["config.json"]
    assert "config.json is missing" in check(tmp_path, NAME, HF_ENDPOINT=hub.url)[1]
