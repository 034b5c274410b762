"""The prepared GPU session on a machine without a GPU: its dry run, and what it reports as missing."""

import hashlib
import importlib.util
import io
import json
import math
import os
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gpu_packing
import gpu_session
import pytest
import torch

from bapo_megatron.config.load import load_config
from bapo_megatron.preflight import packages
from tests.distributed import HANG_S
from tests.packs import wheel, write_pack

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
        "BAPO_STAGE_S": str(HANG_S),
    }
    return subprocess.run(
        [ROOT / "scripts" / "gpu_session.sh", *arguments],
        env={**os.environ, **nowhere, **variables, "BAPO_PACKS": str(folder)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def states(folder: Path, stage: str) -> dict[str, str]:
    return {name: step["state"] for name, step in json.loads((folder / f"{stage}.json").read_text())["steps"].items()}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a session in this process."""
    monkeypatch.setattr(gpu_session, "FOLDER", tmp_path)
    monkeypatch.setattr(gpu_session, "TE_WHEELS", tmp_path / "wheels")
    monkeypatch.setattr(gpu_packing, "FOLDER", tmp_path / "packs")
    monkeypatch.delenv("OUT", raising=False)
    for variable, name in (("LAST", "last"), ("BUILT", "built"), ("BUILD_CODE", "code"), ("BUILD_LOCK", "lock")):
        monkeypatch.setattr(gpu_session, variable, tmp_path / name)
    monkeypatch.setenv("OFFLINE", str(tmp_path / "links"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return tmp_path


def run(steps: Sequence[gpu_session.Step], monkeypatch: pytest.MonkeyPatch) -> tuple[int, dict[str, Any]]:
    """Run steps as the stage `mine`; return its exit code and outcomes."""
    monkeypatch.setattr(gpu_session, "STAGES", {"mine": gpu_session.Stage("later", 1, tuple(steps))})
    code = gpu_session.run_stage("mine", is_dry=False, machine=gpu_session.Machine(HOPPER))
    return code, json.loads((gpu_session.FOLDER / "mine.json").read_text())["steps"]


OF_7B = ("tensorwise", "chunk 4096", "triton")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")
def test_the_dry_run_needs_neither_gpu_nor_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its losses file equals itself as the last session's; another number in that one is a failure, by name."""
    done = session(tmp_path, "--dry-run", "te", "e", "bits", "two-gpus")
    assert done.returncode == 0, done.stdout + done.stderr
    assert states(tmp_path, "te") == dict.fromkeys(("install", "attention", "tests"), "missing")
    assert states(tmp_path, "e") == {"one-by-one": "done", "grouped": "done", "fused": "missing"}
    assert states(tmp_path, "bits") == dict.fromkeys(("1.5b", "replay", "transfers", "deterministic"), "done")
    assert "install: missing, no GPU: torch" in done.stdout
    whole = json.loads((tmp_path / "bits.json").read_text())
    assert whole["versions"]["torch"] == whole["machine"]["torch"] == torch.__version__
    steps = whole["steps"]
    rows = {name: {key.split(", ", 2)[2]: row for key, row in step["rows"].items()} for name, step in steps.items()}
    assert rows["1.5b"]["local"]["seconds"]["median"] > 0
    assert "needs a GPU" in rows["1.5b"]["local tensorwise"]["missing"]
    assert rows["replay"].keys() == {"local", "local replay"}
    assert rows["transfers"]["transfers"]["weights_gib"] > 0
    repeated = rows["deterministic"]["local, deterministic"]
    assert repeated["num_equal_gradients"] > 20
    assert repeated["price"] > -1
    assert all((tmp_path / f"{stage}.log").exists() for stage in ("e", "bits"))

    losses = json.loads((tmp_path / "losses-cpu.json").read_text())
    assert [row["step"] for row in losses["losses"]["tiny, 256 tokens of 64, local"]] == [1, 2, 3, 4]
    for name in ("FOLDER", "LAST"):
        monkeypatch.setattr(gpu_session, name, tmp_path / name)
        (tmp_path / name).mkdir()
    last = tmp_path / "LAST" / "losses-cpu.json"
    last.write_text(json.dumps(losses))
    outcome = dict(steps["1.5b"])
    gpu_session.compare_losses(outcome, {}, "cpu")
    assert outcome["state"] == "done"
    losses["losses"]["tiny, 256 tokens of 64, local"][2]["grad_norm"] *= 1.03
    last.write_text(json.dumps(losses))
    gpu_session.compare_losses(outcome, {}, "cpu")
    assert outcome["state"] == "failed"
    assert outcome["line"].startswith("tiny, 256 tokens of 64, local, step 3: grad_norm ")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="a step of stage a serves with SGLang")
def test_the_dry_run_of_a_trainer_and_an_engine_on_one_device(tmp_path: Path) -> None:
    """The second step of a with SGLang, if it is installed. Each line of a result is passed on."""
    stages = ("a", "b", "turns")
    done = session(tmp_path, "--dry-run", *stages)
    assert done.returncode == 0, done.stdout + done.stderr
    of_a, of_b, of_turns = (json.loads((tmp_path / f"{stage}.json").read_text())["steps"] for stage in stages)
    steps = of_a | of_b | of_turns
    for name in ("serve", "graphs", "kernels"):
        start, *versions = steps[name]["rows"]
        assert (start["device"], [row["version"] for row in versions]) == ("cpu", [0, 1, 2])
        assert all(row["ok"] and row["moved"] > 100 * row["mean_abs"] for row in versions)
    assert steps["graphs"]["rows"][0]["engine"] == "sglang"
    for name in ("learn", "turns"):
        *_, last = steps[name]["rows"]
        assert (last["ok"], last["steps"]) == (True, 2)
    assert last["turns/to_device_s"] > 0
    passed_on = [json.loads(line) for one in stages for line in (tmp_path / f"{one}.jsonl").read_text().splitlines()]
    assert len(passed_on) == 4 + 4 + 4 + 2 + 2
    assert all(f"{line['step']}: {line['line']}" in done.stdout for line in passed_on)


LOSSES = {"step": 1, "loss": -0.25, "low": 0.8, "high": 1.2, "grad_norm": 0.7}


@pytest.mark.parametrize(
    ("field", "value", "is_near"),
    [
        ("loss", -0.2515, True),
        ("loss", -0.253, False),
        ("loss", math.nan, False),
        ("low", 0.81, False),
        ("high", 1.25, False),
        ("grad_norm", 0.71, True),
        ("grad_norm", 0.68, False),
    ],
)
def test_losses_near_the_last_sessions_are_the_same(field: str, value: float, is_near: bool) -> None:
    mine, last = {"te": [LOSSES, LOSSES | {"step": 2, field: value}]}, {"te": [LOSSES, LOSSES | {"step": 2}], "x": []}
    lines = gpu_session.differences(mine, last)
    told = f"te, step 2: {field} {value:.6g}, {LOSSES[field]:.6g} in the last session"
    assert lines == ([] if is_near else [told])
    assert gpu_session.differences(mine, mine) == []


def test_a_run_is_compared_by_its_metrics(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step writes what a run writes; of an earlier attempt of the same name nothing may be left."""
    metrics = {"step": 1} | {metric: LOSSES[name] for name, (metric, *_) in gpu_session.LOSSES.items()}
    made = folder / "train"
    code = f"import os; os.mkdir({str(made)!r}); open('{made}/metrics.jsonl', 'w').write({json.dumps(metrics)!r})"
    train = gpu_session.Step("train", ("-c", code), needs=(), rows="train/metrics.jsonl", has_losses=True)
    assert run([train], monkeypatch)[0] == 0
    kept = json.loads((folder / "losses-cpu.json").read_text())
    assert kept["losses"] == {"train demo": [LOSSES]}
    kept["losses"]["train demo"][0]["high"] = 1.3
    (folder / "last").mkdir()
    (folder / "last" / "losses-cpu.json").write_text(json.dumps(kept))
    (folder / "mine.json").unlink()
    _, steps = run([train], monkeypatch)
    assert steps["train"]["state"] == "failed"
    assert steps["train"]["line"] == "train demo, step 1: high 1.2, 1.3 in the last session"


def test_the_stages_fit_their_loans() -> None:
    """Each is one call of eight minutes; a loan is a quarter of an hour, of which a machine's start takes a minute."""
    stages = gpu_session.STAGES
    loans = {loan: [name for name, stage in stages.items() if stage.loan == loan] for loan in ("first", "second")}
    in_order = [*loans["first"], *loans["second"]]
    assert [*stages][: len(in_order)] == in_order, "in order of value"
    assert all(sum(stages[name].seconds for name in names) <= 14 * 60 for names in loans.values())
    assert max(gpu_session.STAGE_S, *(stage.seconds for stage in stages.values())) <= 8 * 60
    users = [user for stage in stages.values() for user in (stage, *stage.steps)]
    assert {pack for user in users for pack in user.packs} == set(gpu_packing.PACKS)
    header = (ROOT / "scripts" / "gpu_session.sh").read_text()
    told = re.findall(r"^#   scripts/gpu_session\.sh ([\w-]+) +(first|second|later): ", header, flags=re.MULTILINE)
    assert dict(told) == {name: stage.loan for name, stage in stages.items()}


WITHOUT_TINY_FORM = ("build", "install", "attention", "model", "doctor", "fused", "logprobs-1.5b", "logprobs-32b-tp8")


@pytest.mark.parametrize(
    "step", [pytest.param(s, id=f"{name}-{s.name}") for name, stage in gpu_session.STAGES.items() for s in stage.steps]
)
def test_every_command_can_be_run(step: gpu_session.Step) -> None:
    """Its script, its tests and its options exist, and its settings are ones that a run has."""
    for command in (step.command, *([step.dry] if step.dry is not None else [])):
        files = [word for word in command if re.fullmatch(r"(benchmarks|tests|scripts)/[\w/]+(\.py)?", word)]
        assert [file for file in files if not (ROOT / file).exists()] == []
        settings = [word for word in command if re.match(r"[a-z]+\.[a-z_.]+=", word)]
        load_config(["smollm2_135m" if "smollm2_135m" in command else "demo"], settings)
        if command and command[0].startswith("benchmarks/"):
            source = (ROOT / command[0]).read_text()
            is_alone = "sys.path.append(str(ROOT))" not in source  # a script finds only its own folder and packages
            assert not (is_alone and re.search(r"^(from|import) (tests|benchmarks|scripts)\b", source, re.MULTILINE))
            options = [word for word in command if word.startswith("--")]
            assert [option for option in options if f'"{option}"' not in source] == []
    assert step.dry is not None or step.name in WITHOUT_TINY_FORM or "pytest" in step.command
    assert step.limit_s <= gpu_session.STAGE_S


def test_a_missing_package_ends_the_session_before_it_starts(tmp_path: Path) -> None:
    """The source of Transformer Engine's torch part needs packages of its own."""
    about = b"Metadata-Version: 2.1\nRequires-Dist: nosuch-package>=2\nRequires-Dist: transformer_engine_cu12==2.11.0\n"
    member = tarfile.TarInfo("transformer_engine_torch-2.11.0/PKG-INFO")
    member.size = len(about)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        archive.addfile(member, io.BytesIO(about))
    write_pack(tmp_path / "te", {"transformer_engine_torch-2.11.0.tar.gz": buffer.getvalue()})
    done = session(tmp_path, "--dry-run", "all")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert re.match(r"imports: \d+ of \d+ packages are missing: .*\bnosuch-package\b", line)
    assert f"run `scripts/gpu_session.sh pack serve`, and copy {tmp_path} here" in line
    assert not (tmp_path / "session").exists()


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({}, "error: pack fla is incomplete: fla.whl has 2 of 3 bytes; run "),
        ({"python": "3.99"}, "/fla has pack fla for Python 3.99 and torch "),
        ({"torch": "1.0"}, " and torch 1.0, but this needs pack fla for Python "),
    ],
)
def test_a_pack_that_cannot_be_used_ends_the_session_before_it_starts(
    tmp_path: Path, other: dict[str, str], told: str
) -> None:
    write_pack(tmp_path / "fla", {"fla.whl": b"abc"}, **other)
    (tmp_path / "fla" / "fla.whl").write_bytes(b"ab")
    done = session(tmp_path, "--dry-run", "all")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert told in line
    assert not (tmp_path / "session").exists()


def test_the_packing_list_is_setup_py_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_packing, "TE_WHEELS", Path("/nonexistent"))
    listed = {gpu_packing.name_of(text) for text in gpu_packing.needs()}
    declared = {gpu_packing.name_of(r.name) for r in packages.requirements("train")}
    assert declared | {"hypothesis", "pytest"} == listed
    absent, num_asked = gpu_packing.missing(["pytest", "nosuch-package"])
    assert absent == ["nosuch-package"]
    assert num_asked > 3, "what pytest needs is asked for, too"


def test_packing_downloads_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip sees a stand-in of torch, whose version of CUDA the source of Transformer Engine's torch part asks for."""
    calls = []

    def download(folder: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        calls.append(arguments)
        if gpu_packing.TORCH_PART in arguments:
            code = "import torch.utils.cpp_extension; print(torch.version.cuda)"
            done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
            assert done.stdout == "13.0\n", done.stderr

    monkeypatch.setattr(gpu_packing, "download", download)
    gpu_packing.fetch(gpu_packing.PACKS["te"], "3.12", {"ninja", "nvidia-ml-py", "setuptools"}, tmp_path)
    source, wheels = calls
    assert source[-1] == "transformer-engine-torch==2.11.0"
    assert "3.12" in wheels
    assert wheels[wheels.index("--no-deps") + 1 :] == (
        "transformer-engine==2.11.0",
        "transformer-engine-cu13==2.11.0",
        "wheel",
    )


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
        (HOPPER, ("GPU", "source"), "no transformer_engine_torch-*.tar.gz in {wheels}"),
        (
            HOPPER,
            ("GPU", "built"),
            "Transformer Engine is not compiled: the step `build` of the stage `d` does that",
        ),
        (HOPPER, ("GPU", "ninja"), "no ninja, and one compiler would take 20 minutes"),
        (HOPPER, ("GPU",), ""),
    ],
)
def test_what_is_missing_is_one_line(
    facts: dict[str, Any], needs: tuple[str, ...], reason: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V12.8.93'\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(folder))
    monkeypatch.setenv("PATH", str(nvcc.parent))
    found = gpu_session.Machine(facts).missing(needs)
    assert found == reason.format(nvcc=nvcc, wheels=folder / "wheels")
    assert len(found.splitlines()) <= 1


def test_a_machine_without_transformer_engine_continues(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_session.software, "installed_version", lambda name: None)
    last = gpu_session.Step("last", ("-c", "print('here')"))
    code, steps = run((*gpu_session.STAGES["te"].steps, last), monkeypatch)
    assert code == 0
    assert steps["attention"]["line"] == "Transformer Engine is not installed: no FP8"
    assert (steps["last"]["state"], steps["last"]["line"]) == ("done", "here")


def test_a_step_that_fails_or_is_late_is_told_apart(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow, broken = "import time; print('begun', flush=True); time.sleep(1e6)", "raise SystemExit('wrong values')"
    wait = subprocess.Popen.wait

    def until_it_has_begun(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout != 2:
            return wait(process, timeout)
        deadline = time.monotonic() + HANG_S
        while "begun" not in (folder / "mine.log").read_text().splitlines():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", until_it_has_begun)
    steps = (
        gpu_session.Step("good", ("-c", "pass"), needs=()),
        gpu_session.Step("broken", ("-c", broken), needs=()),
        gpu_session.Step("late", ("-c", slow), needs=(), limit_s=2),
    )
    code, found = run(steps, monkeypatch)
    assert code == 1
    assert (found["broken"]["state"], found["broken"]["line"]) == ("failed", "wrong values")
    assert (found["late"]["state"], found["late"]["line"]) == ("unfinished", "begun")
    capsys.readouterr()
    run(steps[:2], monkeypatch)
    assert capsys.readouterr().out.splitlines()[1:] == ["good: done before", "broken: failed, wrong values"]


def test_the_offline_script_installs_nothing(tmp_path: Path) -> None:
    """scripts/gpu_tests.sh and gpu_session.sh begin like this: links make the checkout importable, metadata too."""
    code = (
        "import importlib.metadata as m, bapo_megatron, bapo_megatron_patches, bapo_megatron_configs, carried;"
        "print(bapo_megatron_patches.__path__[0], m.requires('bapo-megatron')[0])"
    )
    carried = wheel(tmp_path, "carried", "1", {"carried.py": b""})
    write_pack(tmp_path / "fla", {carried.name: carried.read_bytes()})
    script = f'source {ROOT}/scripts/common.sh; ROOT="$1"; use_offline serve fla; cd /; "$PY" -c "$2"'
    copy = tmp_path / "checkout"
    copy.mkdir()
    for name in (
        "bapo_megatron",
        "patches",
        "configs",
        "requirements",
        "setup.py",
        "README.md",
        "pyproject.toml",
        "scripts",
    ):
        (copy / name).symlink_to(ROOT / name)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script, "bash", str(copy), code],
        env={**os.environ, "VENV": sys.prefix, "BAPO_PACKS": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert str(copy / ".bapo-offline" / "bapo_megatron_patches") in done.stdout
    assert "torch>=" in done.stdout


def pack(folder: Path, name: str, **change: Any) -> Path:
    """Write a pack for this Python and torch, with one file that installs nothing."""
    here = {"python": ".".join(map(str, sys.version_info[:2])), "torch": torch.__version__.partition("+")[0]}
    content = b"of a pack"
    files = {"note.txt": {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}}
    made = folder / "packs" / name
    made.mkdir(parents=True)
    (made / "note.txt").write_bytes(content)
    (made / "pack.json").write_text(json.dumps({"name": name, "files": files} | here | change))
    return made


def stage_of(monkeypatch: pytest.MonkeyPatch, *steps: gpu_session.Step, **options: Any) -> int:
    monkeypatch.setattr(gpu_session, "STAGES", {"mine": gpu_session.Stage("later", 1, steps, **options)})
    return gpu_session.run_stage("mine", is_dry=False, machine=gpu_session.Machine(HOPPER))


GOOD = gpu_session.Step("good", ("-c", "print('here')"), needs=())


def test_a_stage_without_its_modules_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It names the pack, and what the import said. A pack that is installed otherwise is not needed."""
    absent = {"packs": ("serve",), "modules": ("json", "nosuch_module")}
    assert stage_of(monkeypatch, GOOD, **absent) == gpu_session.NOT_READY
    _, told = capsys.readouterr().out.splitlines()
    assert told.startswith("imports: missing, pack serve is missing: no ")
    assert told.endswith("cannot import nosuch_module: ModuleNotFoundError: No module named 'nosuch_module'")
    assert stage_of(monkeypatch, GOOD, packs=("serve",), modules=("json",)) == 0
    assert "good: done, here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"python": "3.9"}, "Python 3.9"),
        ({"torch": "2.0.0"}, "torch 2.0.0"),
        ({"files": {"lost.whl": {"bytes": 3, "sha256": "0"}}}, "lost.whl is missing"),
        ({"files": None}, "pack.json cannot be read"),
        ({"files": {"note.txt": {"bytes": 9, "sha256": "0" * 64}}}, "note.txt"),
    ],
)
def test_a_pack_that_cannot_be_used_stops_what_needs_it(
    change: dict[str, Any], told: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Incomplete, damaged, or for another machine: a line before anything starts; only a step, if only it needs it."""
    pack(folder, "nccl", **change)
    assert stage_of(monkeypatch, GOOD, packs=("nccl",)) == gpu_session.NOT_READY
    _, line = capsys.readouterr().out.splitlines()
    assert line.startswith("imports: missing, ")
    assert told in line
    alone = gpu_session.Step("alone", ("-c", "raise SystemExit('started')"), needs=(), packs=("nccl",))
    assert stage_of(monkeypatch, alone, GOOD) == 0
    _, line, good = capsys.readouterr().out.splitlines()
    assert line.startswith("alone: missing, ")
    assert told in line
    assert good == "good: done, here"


def test_results_are_passed_on_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step that is killed has lost none of its lines; its children die with it."""
    monkeypatch.setenv("OUT", str(folder / "out"))
    (folder / "out").mkdir()
    os.mkfifo(folder / "gate")
    opened = os.open(folder / "gate", os.O_RDWR)
    code = f"""if True:
        import json, subprocess
        print(json.dumps({{"pid": subprocess.Popen(["sleep", "1000"]).pid}}), flush=True)
        open("{folder}/gate").read()"""
    late = gpu_session.Step("late", ("-c", code), needs=(), limit_s=HANG_S)
    wait = subprocess.Popen.wait

    def until_it_has_told(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout != HANG_S:
            return wait(process, timeout)
        deadline = time.monotonic() + HANG_S
        while not (folder / "out" / "mine.jsonl").exists() or not (folder / "out" / "mine.jsonl").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(gpu_session, "STAGE_S", 2 * HANG_S)
    monkeypatch.setattr(subprocess.Popen, "wait", until_it_has_told)
    assert stage_of(monkeypatch, late, GOOD) == gpu_session.UNFINISHED
    os.close(opened)
    (told,) = (json.loads(line) for line in (folder / "out" / "mine.jsonl").read_text().splitlines())
    assert told["step"] == "late"
    assert f"late: {told['line']}" in capsys.readouterr().out.splitlines()
    pid = json.loads(told["line"])["pid"]
    deadline = time.monotonic() + HANG_S
    while Path(f"/proc/{pid}/status").exists() and "Z (zombie)" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < deadline, "the child lives on"
        time.sleep(0.02)


def test_a_wrong_stage_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_session.sh", "nothing"])
    with pytest.raises(SystemExit, match="2"):
        gpu_session.main()
    assert "invalid choice: 'nothing'" in capsys.readouterr().err


BUILD = gpu_session.Step("build", (), needs=())


@pytest.mark.slow
def test_a_build_that_failed_starts_anew_and_is_done_only_when_it_succeeded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A one-file source stands in for Transformer Engine's torch part: compiled in the background, then installed."""
    name = "transformer_engine_torch"
    archive, source = folder / "wheels" / f"{name}-2.11.0.tar.gz", folder / f"{name}-2.11.0"
    for made in (archive.parent, source):
        made.mkdir()
    archive.write_bytes(b"torn")
    code, steps = run([BUILD], monkeypatch)
    assert (code, steps["build"]["state"]) == (1, "failed")
    assert steps["build"]["line"].startswith(f"the build failed with exit code 2: {folder}/built/build.log; ")

    (source / "setup.py").write_text(f"from setuptools import setup; setup(name='{name}', py_modules=['{name}'])")
    (source / f"{name}.py").write_text("ANSWER = 42")
    with tarfile.open(archive, "w:gz") as files:
        files.add(source, source.name)
    code, steps = run([BUILD], monkeypatch)
    assert (code, steps["build"]["state"]) == (0, "done"), (folder / "built" / "build.log").read_text()
    subprocess.run([sys.executable, *gpu_session.install_command()], check=True, capture_output=True, timeout=HANG_S)
    assert (folder / "links" / f"{name}.py").read_text() == "ANSWER = 42"


def test_a_build_that_died_starts_anew_and_one_that_runs_does_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_session, "_BUILD", "kill -9 $$")
    code, steps = run([BUILD], monkeypatch)
    assert (code, steps["build"]["state"]) == (1, "failed")
    assert steps["build"]["line"].startswith(f"the build died: {folder}/built/build.log; ")

    gate = folder / "gate"
    os.mkfifo(gate)
    opened = os.open(gate, os.O_RDWR)  # waits for no reader
    monkeypatch.setattr(gpu_session, "_BUILD", f'echo >>{folder}/starts; read <{gate}; echo 0 >"$BUILD_CODE"')
    monkeypatch.setattr(gpu_session, "STAGE_S", -1)
    try:
        for _ in range(2):
            code, steps = run([BUILD, gpu_session.Step("timed", (), needs=(), is_timed=True)], monkeypatch)
            still = ("unfinished", "the compiler still runs: start the stage again when it is done")
            assert code == gpu_session.UNFINISHED
            assert [(step["state"], step["line"]) for step in steps.values()] == [still, still]
    finally:
        os.write(opened, b"\n")
    monkeypatch.setattr(gpu_session, "STAGE_S", HANG_S)
    _, steps = run([BUILD], monkeypatch)
    os.close(opened)
    assert steps["build"]["state"] == "done"
    assert (folder / "starts").read_text() == "\n", "started once"
