"""Studies as files, and what is computed from the metrics of their runs."""

import contextlib
import csv
import io
import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from bapo_megatron.assets import demo_model_path
from bapo_megatron.cli import main
from bapo_megatron.config.load import load_config
from bapo_megatron.errors import ConfigError, UserError
from bapo_megatron.resolved import resolve
from bapo_megatron.resolved.placement import Placement
from bapo_megatron.runtime.files import JsonlWriter
from studies import bfloat16, pool
from studies.page import write
from studies.pool import is_finished, row_of, run_path
from studies.results import DERIVED, StudyResult, gather, value
from studies.rows import Row
from studies.run import Options, reproduce
from studies.study import Run, Study, load_study, plan_runs, shipped_studies
from studies.turn_ages import ages_by_turn

MINIMAL = """
title = "A title"
figure = "Figure 0"
question = "Why?"
seeds = [3, 1]
settings = { loss = { name = "grpo" }, train = { num_steps = 4 } }
compare = [["wide", "narrow"]]
[[variants]]
name = "narrow"
[[variants]]
name = "wide"
settings = { loss = { clip_high = 2.0 } }
[[plots]]
metric = "reward/mean"
[[plots]]
metric = "clip_share"
[quick]
seeds = [7]
variants = ["wide"]
settings = { train = { num_steps = 2 } }
"""


def study_from(tmp_path: Path, text: str = MINIMAL) -> Study:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return load_study(str(path))


@pytest.mark.parametrize("name", shipped_studies())
def test_a_shipped_study_is_whole(name: str, tmp_path: Path) -> None:
    study = load_study(name)
    full, quick = (plan_runs(study, quick=q, runs_dir=tmp_path) for q in (False, True))
    assert len(full) == len(study.seeds) * len(study.variants)
    assert 0 < len(quick) < len(full) or study.seeds == (0,)
    assert all(q.config.train.num_steps <= 3 for q in quick)
    if study.compare and study.needs is None:
        assert len(study.seeds) >= 3


def test_the_shipped_configuration_of_smollm2_repeats_a_run_of_its_study(tmp_path: Path) -> None:
    """It has another layout, and the book-keeping of a single run."""
    ours = load_config(["smollm2_135m"], []).model_dump(exclude={"run", "parallel", "checkpoint", "monitor"})
    runs = plan_runs(load_study("smollm2"), quick=False, runs_dir=tmp_path)
    (run,) = [r for r in runs if (r.variant, r.seed) == ("BAPO", 0)]
    assert run.config.model_dump(include=set(ours)) == ours


def test_variants_over_settings_over_base(tmp_path: Path) -> None:
    runs = plan_runs(study_from(tmp_path), quick=False, runs_dir=tmp_path / "runs")
    assert [(r.variant, r.seed) for r in runs] == [("narrow", 3), ("wide", 3), ("narrow", 1), ("wide", 1)]
    assert [r.config.loss.clip_high for r in runs] == [1.2, 2.0, 1.2, 2.0]
    assert all(r.config.loss.name == "grpo" and r.config.model.path == "study" for r in runs)
    (quick,) = plan_runs(study_from(tmp_path), quick=True, runs_dir=tmp_path / "runs")
    assert (quick.variant, quick.seed, quick.config.train.num_steps) == ("wide", 7, 2)


def test_each_variant_is_run_and_compared_in_each_regime(tmp_path: Path) -> None:
    regimes = """
[[regimes]]
name = "K = 4"
settings = { train = { minibatches_per_step = 4 } }
[[regimes]]
name = "K = 2"
settings = { train = { minibatches_per_step = 2 }, loss = { clip_low = 0.7 } }
"""
    study = study_from(tmp_path, MINIMAL.replace("[[plots]]", regimes + "[[plots]]", 1))
    assert [v.name for v in study.variants] == ["narrow, K = 4", "wide, K = 4", "narrow, K = 2", "wide, K = 2"]
    assert study.compare == tuple((f"wide, {r}", f"narrow, {r}") for r in ("K = 4", "K = 2"))
    assert study.quick.variants == ("wide, K = 4", "wide, K = 2")
    runs = plan_runs(study, quick=False, runs_dir=tmp_path)[:4]
    found = [(r.config.train.minibatches_per_step, r.config.loss.clip_low, r.config.loss.clip_high) for r in runs]
    assert found == [(4, 0.8, 1.2), (4, 0.8, 2.0), (2, 0.7, 1.2), (2, 0.7, 2.0)]
    with pytest.raises(ConfigError, match="two regimes have the same name"):
        study_from(tmp_path, MINIMAL.replace("[[plots]]", regimes.replace("K = 2", "K = 4") + "[[plots]]", 1))


def test_the_bfloat16_engine_starts_in_place_of_the_embedded_one(tmp_path: Path) -> None:
    config = load_config(["moe_demo"], ["rollout.engine=studies.bfloat16:KIND"])
    (spec,) = bfloat16.engine_specs(
        resolve(config, demo_model_path()), [tmp_path / "log"], [30000], Placement(num_servers=1).on()
    )
    assert spec.command[1:4] == ["-P", "-m", "studies.bfloat16"]
    found = subprocess.run([*spec.command[:4], "--help"], env=os.environ | spec.environment, cwd=tmp_path)
    assert found.returncode == 0, "it starts in any folder"
    assert spec.command[-2:] == ["--port", "30000"]


def test_equal_settings_are_one_run_and_others_are_not(tmp_path: Path) -> None:
    here = plan_runs(study_from(tmp_path), quick=False, runs_dir=tmp_path / "a")
    renamed = MINIMAL.replace('"narrow"', '"thin"')
    there = plan_runs(study_from(tmp_path, renamed), quick=False, runs_dir=tmp_path / "b")
    assert [r.config.run.name for r in here] == [r.config.run.name for r in there]
    assert len({r.config.run.name for r in here}) == 4  # what else makes two runs the same: test_run_identity.py


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("[[variants]]", "[[variants"), "is not TOML"),
        (('figure = "Figure 0"', ""), "figure: Field required"),
        (("seeds = [3, 1]", "seeds = []"), "seeds: Tuple should have at least 1 item"),
        (('"narrow"]', '"slim"]'), "there is no variant 'slim'"),
        (('name = "wide"', 'name = "narrow"'), "two variants have the same name"),
        (('title = "A title"', 'title = "A title"\nseed = 1'), "seed: Extra inputs are not permitted"),
    ],
)
def test_a_study_that_is_not_right(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        study_from(tmp_path, MINIMAL.replace(*change))
    assert "mine.toml" in str(error.value)


def test_settings_that_do_not_exist_name_their_variant(tmp_path: Path) -> None:
    study = study_from(tmp_path, MINIMAL.replace("clip_high = 2.0", "clip_hihg = 2.0"))
    with pytest.raises(ConfigError, match=r"loss.clip_hihg \(variant 'wide'\); did you mean loss.clip_high"):
        plan_runs(study, quick=False, runs_dir=tmp_path)


def options(tmp_path: Path, *names: str) -> Options:
    return Options(names, False, tmp_path / "out", tmp_path / "runs", 1, 60.0)


def test_nothing_starts_where_one_study_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no study 'figure_99'; give a TOML file, all, or one of: .*staleness"):
        reproduce(options(tmp_path, "staleness", "figure_99"))
    (tmp_path / "big.toml").write_text('needs = "no/such/folder"\n' + MINIMAL)
    with pytest.raises(ConfigError, match="study big needs the folder no/such/folder"):
        reproduce(options(tmp_path, str(tmp_path / "big.toml")))
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").write_text("a file")
    with pytest.raises(UserError, match="/out: File exists; give another --output"):
        reproduce(options(tmp_path, "staleness"))
    assert not (tmp_path / "runs").exists()


def test_without_matplotlib_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["reproduce", "staleness"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("bapo: the studies need matplotlib, which is not installed; run pip install ")
    assert said.endswith("[studies]'\n")


def test_without_a_name_the_studies_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reproduce(options(tmp_path))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(shipped_studies())
    assert len({len(line) - len(line.split(maxsplit=1)[1]) for line in lines}) == 1, "their questions are one column"


def row(step: int, reward: float, clipped: float) -> dict[str, float | None]:
    metrics = {"reward/mean": reward, "loss/clip_high_share": clipped, "loss/clip_low_share": 2 * clipped}
    return {"step": step, "version": 10 * step, **metrics, "bapo/low": None}


def finish(run: Run, rows: Sequence[Mapping[str, float | None]], *, torch: str = "2.0", **environment: object) -> None:
    """Leave files as if the run had been trained."""
    folder = run_path(run.config)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    packages = {"bapo-megatron": "0.9", "torch": torch, "megatron-core": "0.1", "transformers": "5.0"}
    facts = {"time": "2025-03-01T12:00:00+00:00", "num_cores": 2, "processor": "Test", "packages": packages}
    (folder / "environment.json").write_text(json.dumps(facts | environment))


def rows_of(study: Study, runs: Sequence[Run]) -> list[Row]:
    return [row_of(run, [plot.metric for plot in study.plots]) for run in runs]


def result_of(study: Study, runs: Sequence[Run]) -> StudyResult:
    return gather(study, rows_of(study, runs))


def write_page(tmp_path: Path, study: Study, runs: Sequence[Run]) -> str:
    folder, rows = tmp_path / "out", rows_of(study, runs)
    write("mine", study, rows, gather(study, rows), folder=folder, command="bapo reproduce mine")
    return (folder / "mine.md").read_text()


def test_results_are_those_of_numpy(tmp_path: Path) -> None:
    study = study_from(tmp_path)
    runs = plan_runs(study, quick=False, runs_dir=tmp_path / "runs")
    rng = np.random.default_rng(0)
    rewards, clipped = rng.random((4, 4)), rng.random((4, 4))
    evaluated = rng.random(4)
    for i, run in enumerate(runs):
        rows = [row(step + 1, rewards[i, step], clipped[i, step]) for step in range(4)]
        rows[-1]["eval/reward"] = evaluated[i]
        finish(run, rows[:-1])
        assert not is_finished(run.config)
        finish(run, rows)
        assert is_finished(run.config)

    result = result_of(study, runs)
    narrow, wide = result.variants
    assert result.seeds == [3, 1]
    assert wide.curves["reward/mean"].mean == pytest.approx(rewards[[1, 3]].mean(0))
    assert wide.curves["reward/mean"].low == pytest.approx(rewards[[1, 3]].min(0))
    assert wide.curves["clip_share"].high == pytest.approx(3 * clipped[[1, 3]].max(0))
    assert wide.curves["reward/mean"].x == [10, 20, 30, 40]
    assert narrow.finals["pass rate"].mean == pytest.approx(evaluated[[0, 2]].mean())
    assert narrow.finals["pass rate"].std == pytest.approx(evaluated[[0, 2]].std(ddof=1))
    assert narrow.finals["reward at the end"].by_seed == pytest.approx(rewards[[0, 2], 3]), "seed 3, then seed 1"
    assert narrow.finals["clipped"].mean == pytest.approx(3 * clipped[[0, 2]].mean())
    assert "c_low" not in narrow.finals, "it was never a number"
    (comparison,) = result.comparisons
    differences = evaluated[[1, 3]] - evaluated[[0, 2]]
    assert comparison.difference == pytest.approx(differences.mean())
    assert comparison.standard_error == pytest.approx(differences.std(ddof=1) / math.sqrt(2))
    assert comparison.num_higher == (differences > 0).sum()
    assert (
        comparison.p
        == comparison.holm_p
        == pytest.approx(1 - 2 * math.atan(abs(comparison.difference) / comparison.standard_error) / math.pi)
    )

    page = write_page(tmp_path, study, runs)
    assert f"| wide | narrow | {differences.mean():+.3f} ±" in page
    assert "bapo reproduce mine" in page
    assert "seeds 3, 1" in page
    table = list(csv.DictReader((tmp_path / "out" / "mine.csv").open()))
    curve = [r for r in table if (r["variant"], r["figure"]) == ("wide", "reward/mean")]
    assert [float(r["x"]) for r in curve] == [10, 20, 30, 40]
    assert [float(r["mean"]) for r in curve] == pytest.approx(rewards[[1, 3]].mean(0), rel=1e-8)
    (final,) = [r for r in table if (r["variant"], r["figure"]) == ("narrow", "pass rate")]
    assert final["x"] == ""
    assert [float(final[seed]) for seed in ("seed 3", "seed 1")] == pytest.approx(evaluated[[0, 2]], rel=1e-8)
    drawn = (tmp_path / "out" / "mine.svg").read_text()
    assert drawn.startswith("<?xml")
    write_page(tmp_path, study, runs)
    assert (tmp_path / "out" / "mine.svg").read_text() == drawn, "the same figures give the same file"


def test_a_page_says_when_and_with_what_its_runs_were_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "code_here", lambda: "1234567890abcdef")
    study = study_from(tmp_path)
    runs = plan_runs(study, quick=False, runs_dir=tmp_path / "runs")
    for run in runs:
        finish(run, [row(4, 0.5, 0.1) | {"eval/reward": 0.5}], time="2025-03-01T23:00:00+00:00", num_cores=3)
    assert "2025-03-01, 3 cores of Test; seeds 3, 1; code `1234567890ab`; torch 2.0, megatron" in write_page(
        tmp_path, study, runs
    )
    finish(runs[1], [row(4, 0.5, 0.1)], time="2025-02-27T00:00:00+00:00", torch="1.9")
    page = write_page(tmp_path, study, runs)
    assert "2025-02-27 to 2025-03-01, 2 cores of Test; 3 cores of Test; seeds" in page
    assert "torch 1.9 and 2.0" in page
    monkeypatch.setattr(pool, "code_here", lambda: "files-1234")
    assert "; code not committed; torch" in write_page(tmp_path, study, runs)


def test_a_page_that_cannot_be_drawn_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = study_from(tmp_path)
    runs = plan_runs(study, quick=False, runs_dir=tmp_path / "runs")
    for run in runs:
        finish(run, [row(4, 0.5, 0.1) | {"eval/reward": 0.5}])
    write_page(tmp_path, study, runs)
    before = {file.name: file.read_text() for file in (tmp_path / "out").iterdir()}
    assert set(before) == {"mine.csv", "mine.md", "mine.svg"}

    def half(_: object, target: Path | io.StringIO, **__: object) -> None:
        if isinstance(target, Path):
            target.write_text("<svg")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("studies.page.Figure.savefig", half)
    finish(runs[0], [row(4, 0.25, 0.1) | {"eval/reward": 0.75}])
    with pytest.raises(OSError, match="No space"):
        write_page(tmp_path, study, runs)
    assert {file.name: file.read_text() for file in (tmp_path / "out").iterdir()} == before


def test_ages_are_means_over_the_policys_tokens_of_each_turn(tmp_path: Path) -> None:
    with contextlib.closing(JsonlWriter(tmp_path / "metrics.jsonl")) as writer:
        for step in (1, 2, 3):
            writer.write({"step": step, "version": 2 * step})
    given = {"by": "environment", "num_tokens": 9}
    first = [{"version": 0, "num_tokens": 3}, {"version": 2, "num_tokens": 1}]
    with contextlib.closing(JsonlWriter(tmp_path / "samples.jsonl")) as writer:
        writer.write({"step": 1, "segments": [{"version": 0, "num_tokens": 4}]})
        writer.write({"step": 3, "segments": [*first, given, {"version": 4, "num_tokens": 2}]})
    assert ages_by_turn(tmp_path) == {1: ((4 * 0 + 3 * 4 + 1 * 2) / 8, 8), 2: (0.0, 2)}


@pytest.mark.parametrize("typed", ["sub/mine.toml", "./sub/my study.toml", "staleness"])
def test_a_page_names_the_study_as_the_user_did(typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    if typed != "staleness":
        Path(typed).write_text(MINIMAL)
    for run in plan_runs(load_study(typed), quick=False, runs_dir=tmp_path / "runs"):
        finish(run, [row(run.config.train.num_steps, 0.5, 0.1) | {"eval/reward": 0.5}])
    reproduce(options(tmp_path, typed))
    page = tmp_path / "out" / f"{Path(typed).stem}.md"
    assert f"`{shlex.join(['bapo', 'reproduce', typed])}`" in page.read_text()


def test_skipped_updates_do_not_count_in_the_median(tmp_path: Path) -> None:
    study = study_from(tmp_path, MINIMAL.replace("seeds = [3, 1]", "seeds = [3]"))
    runs = plan_runs(study, quick=False, runs_dir=tmp_path / "runs")
    norms = {"narrow": [4.0, None, 1.0, 2.0], "wide": [None] * 4}  # None means that all updates were skipped
    for run in runs:
        rows = [row(i + 1, 0.5, 0.1) | {"optimizer/grad_norm": norm} for i, norm in enumerate(norms[run.variant])]
        finish(run, rows)
    narrow, wide = result_of(study, runs).variants
    assert narrow.finals["gradient norm, median"].mean == 2.0
    assert "gradient norm, median" not in wide.finals


def test_a_variant_without_headline_is_not_compared(tmp_path: Path) -> None:
    study = study_from(tmp_path)
    runs = plan_runs(study, quick=False, runs_dir=tmp_path / "runs")
    for run in runs:
        finish(run, [row(4, 0.5, 0.1)])
    assert result_of(study, runs).comparisons == []


def test_one_bin_of_the_profile_can_be_plotted(tmp_path: Path) -> None:
    study = study_from(tmp_path, MINIMAL.replace('"clip_share"', '"profile/p00_share"'))
    runs = plan_runs(study, quick=False, runs_dir=tmp_path / "runs")
    for run in runs:
        finish(run, [row(4, 0.5, 0.1) | {"profile/p00_share": 0.1}])
    write_page(tmp_path, study, runs)
    drawn = (tmp_path / "out" / "mine.svg").read_text()
    assert "profile/p00_share [share]" in drawn
    assert "optimizer updates" in drawn
    assert "probability of the token" not in drawn


def test_a_metric_that_is_never_positive_can_be_plotted_logarithmically(tmp_path: Path) -> None:
    study = study_from(tmp_path, MINIMAL.replace('"clip_share"', '"optimizer/grad_norm"\nlog = true'))
    runs = plan_runs(study, quick=False, runs_dir=tmp_path / "runs")
    for run in runs:
        finish(run, [row(4, 0.5, 0.1)])
    write_page(tmp_path, study, runs)
    assert "optimizer/grad_norm [norm]" in (tmp_path / "out" / "mine.svg").read_text()


def test_a_curve_of_evaluations_has_the_steps_that_were_evaluated(tmp_path: Path) -> None:
    study = study_from(tmp_path, MINIMAL.replace('"clip_share"', '"eval/reward"'))
    runs = plan_runs(study, quick=False, runs_dir=tmp_path / "runs")
    for run in runs:
        evaluated = {step: {"eval/reward": step / 8 + run.seed} for step in (2, 4)}
        finish(run, [row(step, 0.5, 0.1) | evaluated.get(step, {}) for step in range(1, 5)])
    curve = result_of(study, runs).variants[0].curves["eval/reward"]
    seeds = [run.seed for run in runs]
    assert curve.x == [20, 40]
    assert curve.low == [0.25 + min(seeds), 0.5 + min(seeds)]
    assert curve.high == [0.25 + max(seeds), 0.5 + max(seeds)]


@pytest.mark.parametrize("other", ["", '[[plots]]\nmetric = "clip_share"\n'])
def test_differences_are_drawn_with_their_errors(other: str, tmp_path: Path) -> None:
    text = MINIMAL.replace('[[plots]]\nmetric = "clip_share"\n', other).replace('"reward/mean"', '"comparisons"')
    study = study_from(tmp_path, text)
    runs = plan_runs(study, quick=False, runs_dir=tmp_path / "runs")
    for run in runs:
        finish(run, [row(4, 0.5, 0.1) | {"eval/reward": 0.1 * run.seed * (run.variant == "wide")}])
    page = write_page(tmp_path, study, runs)
    drawn = (tmp_path / "out" / "mine.svg").read_text()
    assert "wide against narrow" in drawn
    assert "difference in pass rate" in drawn
    assert "bars reach 2 standard errors" in page
    assert ("Lines are means" in page) == bool(other)


def test_each_seed_is_drawn_and_any_final_figure_compared(tmp_path: Path) -> None:
    text = 'headline = "reward at the end"\n' + MINIMAL.replace('"clip_share"', '"clip_share"\nseeds = true')
    study = study_from(tmp_path, text)
    runs = plan_runs(study, quick=False, runs_dir=tmp_path / "runs")
    for run in runs:
        finish(run, [row(step, 0.5 + run.seed / 8 * (run.variant == "wide"), 0.1) for step in range(1, 5)])
    assert "Differences in reward at the end" in (page := write_page(tmp_path, study, runs))
    assert "Thin lines are single seeds." in page
    (comparison,) = result_of(study, runs).comparisons
    assert comparison.difference == 0.25
    (tmp_path / "typo.toml").write_text('headline = "pass raet"\n' + MINIMAL)
    with pytest.raises(ConfigError, match=r'headline: there is no final figure "pass raet"; did you mean pass rate\?'):
        reproduce(options(tmp_path, str(tmp_path / "typo.toml")))


def test_derived_metrics() -> None:
    assert value({"loss/positive_mass": 1.0, "loss/negative_mass": 3.0}, "positive_mass_share") == 0.25
    assert math.isnan(value({"loss/positive_mass": 0.0, "loss/negative_mass": 0.0}, "positive_mass_share"))
    assert all(math.isnan(value({}, metric)) for metric in DERIVED)


def test_the_pass_rate_is_of_the_unnamed_set_or_the_only_named_one() -> None:
    assert value({"eval/reward": 0.5, "eval/sums/reward": 0.25}, "pass_rate") == 0.5
    assert value({"eval/sums/reward": 0.25, "eval/sums/reward_stderr": 0.1}, "pass_rate") == 0.25
    assert math.isnan(value({"eval/sums/reward": 0.25, "eval/maths/reward": 0.1}, "pass_rate"))


def test_a_profile_is_weighted_with_its_tokens(tmp_path: Path) -> None:
    text = MINIMAL.replace('metric = "clip_share"', 'metric = "profile"').replace("seeds = [3, 1]", "seeds = [3]")
    study = study_from(tmp_path, text)
    runs = plan_runs(study, quick=False, runs_dir=tmp_path / "runs")
    rng = np.random.default_rng(1)
    shares, entropies = rng.random((2, 4, 10)), rng.random((2, 4, 10))
    shares[:, :, 3] = 0.0
    shares[:, 1, 5], entropies[:, 1, 5] = 0.0, np.nan
    for i, run in enumerate(runs):
        rows = []
        for step in range(4):
            bins = {f"profile/p{b}0_share": shares[i, step, b] for b in range(10)}
            bins |= {f"profile/p{b}0_entropy": entropies[i, step, b] for b in range(10)}
            clean = {name: None if np.isnan(v) else v for name, v in bins.items()}
            rows.append(row(step + 1, 0.5, 0.1) | clean | {"eval/reward": 0.5})
        run_path(run.config).mkdir(parents=True)
        finish(run, rows)
    profile = result_of(study, runs).variants[0].curves
    weights = np.where(np.isnan(entropies[0]), 0, shares[0])
    expected = (weights * np.nan_to_num(entropies[0])).sum(0) / np.where(weights.sum(0) > 0, weights.sum(0), np.nan)
    assert profile["profile/entropy"].mean == pytest.approx(expected, nan_ok=True)
    assert profile["profile/share"].mean == pytest.approx(shares[0].mean(0))
    assert profile["profile/share"].x == pytest.approx(np.arange(10) / 10 + 0.05)
