"""Studies that `bapo reproduce` refuses before it trains anything, and runs whose folder it cannot use."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bapo_megatron.config.load import dump_config
from bapo_megatron.errors import ConfigError, UserError
from bapo_megatron.runs.folder import RunDir
from studies.checks import problems_of
from studies.pool import run_path, train_all
from studies.run import Options, reproduce
from studies.study import load_study, plan_runs, shipped_studies
from tests.distributed import HANG_S

GOOD = """
title = "A title"
figure = "Figure 0"
question = "Why?"
seeds = [0, 1]
compare = [["wide", "narrow"]]
settings = { train = { num_steps = 1 } }
[[variants]]
name = "narrow"
[[variants]]
name = "wide"
settings = { loss = { name = "grpo", clip_high = 2.0 } }
[[plots]]
metric = "reward/mean"
"""
WITH_GYM = ("domains", "headroom", "long_run")  # their words
SETTINGS = "settings = { train = { num_steps = 1 } }"


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the working directory of a command that must not train or write."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "out").exists()


def run_all(*names: str) -> None:
    reproduce(Options(names, False, Path("out"), Path("runs"), 1, 60.0))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            '"reward/mean"',
            '"reward/meen"',
            r'study mine: plots.0.metric: there is no metric "reward/meen"; did you mean reward/mean',
        ),
        ('"reward/mean"', '"zzz"', r'no metric "zzz"; see `bapo help metrics`, or clip_share, '),
        ('"reward/mean"', '"profile"', r"study mine, variant 'narrow': .*needs monitor.token_profile = true"),
        (
            SETTINGS,
            'settings = { eval = { interval_steps = "none" } }',
            r"study mine, variant 'narrow': compare uses the pass rate, .* set eval.interval_steps",
        ),
        (
            SETTINGS,
            'settings = { rollout = { engine = "sglang" } }',
            r"study mine, variant 'narrow': rollout.engine is 'sglang'",
        ),
        (SETTINGS, "settings = { rollout = { num_servers = 2 } }", r"rollout.num_servers is 2; each run .* has 1"),
        ("clip_high = 2.0 }", "clip_high = 2.0 }, parallel = { data = 2 }", r"variant 'wide': parallel.data is 2"),
        (SETTINGS, "settings = { parallel = { num_ranks = 2 } }", r"parallel.data is 2"),
        (SETTINGS, "settings = { parallel = { tensor = 3 } }", r"parallel.tensor is 3"),
        (SETTINGS, 'settings = { model = { path = "no/model" } }', r"variant 'wide': model.path = 'no/model'"),
        (SETTINGS, 'settings = { data = { source = "jsonl", path = "no.jsonl" } }', r"data.path: there is nothing at "),
        ("seeds = [0, 1]", "seeds = [1, 1]", r"mine.toml: study: .*the same seed twice in \[1, 1\]"),
        (SETTINGS, f"{SETTINGS}\nquick = {{ seeds = [] }}", r"quick.seeds: Tuple should have at least 1 item"),
    ],
)
def test_a_mistake_is_told_before_training(refused: Path, old: str, new: str, message: str) -> None:
    assert old in GOOD
    (refused / "mine.toml").write_text(GOOD.replace(old, new))
    with pytest.raises(ConfigError, match=message) as error:
        run_all("mine.toml")
    lines = str(error.value).splitlines()
    assert len(lines) == len(set(lines)), "once each, not for every seed"


def test_a_study_without_comparison_needs_no_evaluation(tmp_path: Path) -> None:
    text = GOOD.replace('compare = [["wide", "narrow"]]', "").replace(
        SETTINGS, 'settings = { eval = { interval_steps = "none" } }'
    )
    (tmp_path / "mine.toml").write_text(text)
    study = load_study(str(tmp_path / "mine.toml"))
    assert problems_of("mine", study, plan_runs(study, quick=False, runs_dir=tmp_path)) == []


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.gym, pytest.mark.slow] if name in WITH_GYM else ())
        for name in shipped_studies()
        if load_study(name).needs is None
    ],
)
def test_the_shipped_studies_pass(name: str, tmp_path: Path) -> None:
    study = load_study(name)
    for quick in (False, True):
        assert problems_of(name, study, plan_runs(study, quick=quick, runs_dir=tmp_path)) == []


def test_the_problems_of_all_studies_are_told_at_once(refused: Path) -> None:
    (refused / "one.toml").write_text(GOOD.replace("reward/mean", "reward/meen"))
    (refused / "two.toml").write_text(GOOD.replace(SETTINGS, "settings = { parallel = { data = 2 } }"))
    with pytest.raises(ConfigError) as error:
        run_all("one.toml", "two.toml")
    assert "study one: plots.0.metric" in str(error.value)
    assert "study two, variant 'wide': parallel.data" in str(error.value)


def test_a_plot_of_comparisons_needs_some(refused: Path) -> None:
    text = GOOD.replace('"reward/mean"', '"comparisons"').replace('compare = [["wide", "narrow"]]', "")
    (refused / "mine.toml").write_text(text)
    with pytest.raises(ConfigError, match='study mine: plots: "comparisons" has nothing to show without compare'):
        run_all("mine.toml")


@pytest.mark.parametrize("twin", ["other/mine.toml", "staleness.toml"])
def test_two_studies_of_one_name(refused: Path, twin: str) -> None:
    (refused / "other").mkdir()
    for file in ("mine.toml", twin):
        (refused / file).write_text(GOOD)
    first = "mine.toml" if "mine" in twin else "staleness"
    with pytest.raises(ConfigError, match=rf"{first} and {twin} would both write out/{Path(first).stem}.md"):
        run_all(first, twin)


def test_a_run_folder_of_other_settings_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(GOOD)
    config = plan_runs(load_study(str(tmp_path / "mine.toml")), quick=False, runs_dir=tmp_path / "runs")[1].config
    folder = run_path(config)
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(dump_config(config).replace("clip_high = 2.0", "clip_high = 1.3"))
    (folder / "metrics.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(ConfigError, match=r"cannot resume the run .*\n.*loss.clip_high: 1.3 -> 2.0"):
        train_all([config], num_jobs=1, timeout_s=HANG_S, tell=lambda *_: None)


def test_a_run_that_another_process_trains_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(GOOD)
    config = plan_runs(load_study(str(tmp_path / "mine.toml")), quick=False, runs_dir=tmp_path / "runs")[0].config
    with (
        RunDir.open(config),
        pytest.raises(UserError, match=r"the run .* is in use by process"),
    ):
        train_all([config], num_jobs=1, timeout_s=HANG_S, tell=lambda *_: None)
