"""Studies with real training runs: forked, resumed, failing, and one point of the committed results."""

import csv
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from pydantic import BaseModel

from bapo_megatron.cli import main
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import UserError
from bapo_megatron.runs.steps import read_metrics
from studies.pool import is_finished, run_path, train_all
from studies.rows import RowFile
from studies.study import Run, load_study, plan_runs
from tests.hang import HANG_S, PATIENT

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "studies" / "results"

STUDY = """
title = "Two short runs"
figure = "none"
question = "Do they run?"
seeds = [0]
compare = [["BAPO", "GRPO"]]
[settings]
rollout = { prompts_per_step = 4, startup_timeout_s = 3600, request_timeout_s = 3600, hang_timeout_s = 7200 }
sync = { timeout_s = 3600 }
parallel = { timeout_s = 14400 }
reward = { timeout_s = 3600 }
train = { num_steps = 2, minibatches_per_step = 2 }
eval = { num_prompts = 8 }
[[variants]]
name = "GRPO"
settings = { loss = { name = "grpo" } }
[[variants]]
name = "BAPO"
[[plots]]
metric = "reward/mean"
"""


def patient(config: Config) -> Config:
    """Replace a study's deadlines by deadlines that no busy machine misses."""
    sections: dict[str, BaseModel] = {}
    for name, _, value in (setting.partition("=") for setting in PATIENT):
        section, field = name.split(".")
        before = sections.get(section, getattr(config, section))
        sections[section] = before.model_copy(update={field: float(value)})
    return config.model_copy(update=sections)


def train(runs: Sequence[Run]) -> None:
    train_all([r.config for r in runs], num_jobs=2, timeout_s=HANG_S, tell=lambda *_: None)


def own_children() -> set[int]:
    """Return the ids of trainers and engines, without the fork server and the resource tracker."""
    servers = [p for p in psutil.Process().children() if "forkserver" in " ".join(p.cmdline())]
    return {child.pid for server in servers for child in server.children(recursive=True)}


def test_the_verb_trains_writes_and_does_not_repeat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One of its two runs has an engine in other arithmetic."""
    bfloat16 = 'loss = { name = "grpo" }, rollout = { engine = "studies.bfloat16:KIND" }'
    (tmp_path / "short.toml").write_text(STUDY.replace('loss = { name = "grpo" }', bfloat16))
    command = ["reproduce", str(tmp_path / "short.toml"), "--runs", str(tmp_path / "runs"), "--jobs", "2", "--in-place"]
    assert main(command) == 0
    assert "2 of 2 runs to do" in (said := capsys.readouterr().out)
    assert "[2/2, about 0.0 s left]" in said
    assert own_children() == set()
    results = tmp_path / "runs" / "results"
    rows = list(csv.DictReader((results / "short.csv").open()))
    passed, mismatch = ([row for row in rows if row["figure"] == figure] for figure in ("pass rate", "mismatch"))
    assert [row["variant"] for row in passed] == ["GRPO", "BAPO"]
    assert all(0 <= float(row["mean"]) <= 1 for row in passed)
    assert float(mismatch[0]["mean"]) > 1e-4 > 1e-5 > float(mismatch[1]["mean"]) > 0
    assert (results / "short.svg").is_file()

    assert main(command) == 0
    assert "0 of 2 runs to do" in capsys.readouterr().out


CRASH = """
import os, signal, time
from pathlib import Path
from bapo_megatron.algorithms.advantages import ESTIMATORS

NUM_GROUPS = {num_groups}
seen = 0


def advantage(group):
    global seen
    seen += 1
    if Path("crash").exists() and seen == NUM_GROUPS:  # in the third step: the second is saved
        while not (study := Path("crash").read_text()):
            time.sleep(0.01)
        os.kill(int(study), signal.SIGKILL)
        time.sleep(3600)  # the study's end is this process's
    return ESTIMATORS["grpo"].function(group)
"""
LEARNED = ("version", "loss/", "bapo/", "optimizer/", "mismatch/", "staleness/", "reward/mean", "reward/std", "eval/")


def outcome(run: Path) -> tuple[list[dict[str, float]], list[bytes]]:
    """Return what a run has learned: its metrics without clocks, and the files of its last weights."""
    rows = read_metrics(run / "metrics.jsonl")
    weights = sorted((run / "checkpoints" / f"step-{len(rows):06d}").rglob("*.safetensors"))
    assert weights
    return (
        [{name: v for name, v in row.items() if name.startswith(LEARNED) and not math.isnan(v)} for row in rows],
        [file.read_bytes() for file in weights],
    )


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_an_interrupted_study_continues_equal_to_an_uninterrupted_one(tmp_path: Path) -> None:
    """It is killed in the middle of a run, its code breaks meanwhile, and its last row is cut in the middle."""
    root, here, runs = tmp_path / "repo", tmp_path / "here", tmp_path / "runs"
    here.mkdir()
    for name in ("bapo_megatron", "patches", "configs", "studies"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for command in (
        ["init", "-q"],
        ["add", "-A"],
        ["-c", "user.name=Me", "-c", "user.email=a@b.c", "commit", "-qm", "1"],
    ):
        subprocess.run(["git", "-C", str(root), *command], check=True)
    text = STUDY.replace("num_steps = 2", "num_steps = 4") + "[quick]\n"
    (here / "short.toml").write_text(
        text.replace('loss = { name = "grpo" }', 'advantage = { kind = "crash:advantage" }')
    )
    (here / "crash.py").write_text(CRASH.format(num_groups=2 * 4 + 2))
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])

    def start(runs: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-P", "-m", "bapo_megatron", "reproduce", "short.toml", "--jobs", "1"]
        environment = os.environ | {"PYTHONPATH": path}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen([*command, "--runs", str(runs)], cwd=here, env=environment, **pipes)  # type: ignore[call-overload, no-any-return]

    def finish(runs: Path) -> str:
        study = start(runs)
        said = str(study.communicate(timeout=HANG_S)[0])
        assert study.returncode == 0, said
        return said

    finish(tmp_path / "whole")
    (here / "crash").touch()
    study = start(runs)
    (here / "crash").write_text(str(study.pid))
    study.communicate(timeout=HANG_S)
    assert study.returncode == -signal.SIGKILL
    (here / "crash").unlink()
    (commit,) = {place.name for place in (runs / "code").iterdir()}
    assert "0 of 2 runs to do" not in (said := finish(runs))
    assert "2 of 2 runs to do, 1 of them begun" in said

    file = runs / "results" / "short.jsonl"
    (root / "bapo_megatron" / "train.py").write_text("raise SystemExit('the next version is not ready')\n")
    for is_kept in (True, False):  # the folder of the run whose row is cut
        rows = file.read_bytes()
        file.write_bytes(rows[: rows.rindex(b'"curves"')])
        last = json.loads(rows.splitlines()[-1])
        if not is_kept:
            shutil.rmtree(runs / last["run"])
        said = finish(runs)
        assert f"commit {commit}: code, and all files" in said
        assert ("0 of 2 runs to do" in said) == is_kept
    ours, theirs = (
        {
            name: row.model_dump(exclude={"time", "seconds"})
            for name, row in RowFile(of / "results" / "short.jsonl").read().items()
        }
        for of in (runs, tmp_path / "whole")
    )
    assert len(ours) == 2
    assert ours == theirs
    for name in ours:
        assert outcome(runs / name) == outcome(tmp_path / "whole" / name)
    pages = [(of / "results" / "short.svg").read_bytes() for of in (runs, tmp_path / "whole")]
    assert pages[0] == pages[1]


def test_a_run_that_fails_ends_the_others_and_names_its_log(tmp_path: Path) -> None:
    failing = STUDY.replace('name = "BAPO"', 'name = "BAPO"\nsettings = { reward = { kind = "no_such_module:judge" } }')
    (tmp_path / "failing.toml").write_text(failing)
    runs = plan_runs(load_study(str(tmp_path / "failing.toml")), quick=False, runs_dir=tmp_path / "runs")
    with pytest.raises(UserError, match=r"ended with exit code 2: .*no_such_module.*trainer-0.log"):
        train(runs)
    assert own_children() == set()


BREAKS = """
import math
from bapo_megatron.config.losses import Loss


def broken(inputs, options):
    return inputs.plain(inputs.log_probs_R * (math.nan if inputs.batch.versions_R.max() > 0 else 0))


LOSS = Loss(broken)
"""


@pytest.mark.slow
def test_a_run_that_ends_itself_is_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loss becomes nan after the first step, and is skipped until the guard ends the run."""
    failing = STUDY.replace("num_steps = 2", "num_steps = 30").replace(
        'name = "BAPO"', 'name = "BAPO"\nsettings = { loss = { name = "breaks:LOSS" } }'
    )
    (tmp_path / "failing.toml").write_text(failing)
    (tmp_path / "breaks.py").write_text(BREAKS)
    monkeypatch.chdir(tmp_path)
    command = ["reproduce", "failing.toml", "--runs", "runs", "--jobs", "1", "--in-place"]
    for said in ("2 of 2 runs to do", "0 of 2 runs to do"):
        assert main(command) == 0
        assert said in capsys.readouterr().out
    page = (tmp_path / "runs" / "results" / "failing.md").read_text()
    assert "| BAPO (1 of 1 seed failed) |" in page
    assert "- BAPO, seed 0: the last 20 updates were skipped because their gradient was not finite" in page
    rows = RowFile(tmp_path / "runs" / "results" / "failing.jsonl").read().values()
    assert [(row.variant, row.failure is None, len(row.curves["reward/mean"].x)) for row in rows] == [
        ("GRPO", True, 30),
        ("BAPO", False, 10),
    ]


def test_a_run_has_a_deadline(tmp_path: Path) -> None:
    (tmp_path / "long.toml").write_text(STUDY.replace("num_steps = 2", "num_steps = 1_000_000"))
    runs = plan_runs(load_study(str(tmp_path / "long.toml")), quick=False, runs_dir=tmp_path / "runs")
    with pytest.raises(UserError, match=r"did not finish in time; see its log: .*trainer-0.log"):
        train_all([r.config for r in runs], num_jobs=1, timeout_s=0.5, tell=lambda *_: None)
    assert own_children() == set()
    assert not any(is_finished(r.config) for r in runs)


@pytest.mark.slow
def test_nothing_outlives_a_study_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "long.toml").write_text(STUDY.replace("num_steps = 2", "num_steps = 1_000_000"))
    command = [sys.executable, "-m", "bapo_megatron", "reproduce", str(tmp_path / "long.toml"), "--in-place"]
    with (tmp_path / "log").open("w") as log:
        study = subprocess.Popen([*command, "--runs", str(tmp_path / "runs")], stdout=log, stderr=log)
    try:
        wait_for(lambda: len(list(tmp_path.glob("runs/*/metrics.jsonl"))) == 2, "both runs train", tmp_path / "log")
        family = psutil.Process(study.pid).children(recursive=True)
        assert len(family) >= 4
    finally:
        study.kill()
        study.wait()
    gone, alive = psutil.wait_procs(family, timeout=HANG_S)
    assert alive == []
    assert gone


def wait_for(is_true: Callable[[], bool], what: str, log: Path) -> None:
    deadline = time.monotonic() + HANG_S
    while not is_true():
        assert time.monotonic() < deadline, f"not in time: {what}\n{log.read_text()}"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("stale_rivals", "BAPO, K = 16"),
        ("regimes", "BAPO, baseline 0.4, K = 16"),
        ("rivals_offpolicy", "GSPO, K = 16"),
    ],
)
def test_a_committed_point_comes_out_again(name: str, variant: str, tmp_path: Path) -> None:
    """In pass rate and entropy, seed 0 is within three standard deviations over seeds."""
    with (COMMITTED / f"{name}.csv").open() as table:
        finals = {row["figure"]: row for row in csv.DictReader(table) if row["variant"] == variant and not row["x"]}
    runs = plan_runs(load_study(name), quick=False, runs_dir=tmp_path)
    (run,) = [replace(r, config=patient(r.config)) for r in runs if (r.variant, r.seed) == (variant, 0)]
    train([run])
    rows = read_metrics(run_path(run.config) / "metrics.jsonl")
    for metric, figure in (("eval/reward", "pass rate"), ("loss/entropy", "entropy at the end")):
        by_seed = [float(finals[figure][f"seed {seed}"]) for seed in range(5)]
        assert abs(rows[-1][metric] - statistics.fmean(by_seed)) < 3 * statistics.stdev(by_seed)
