"""Several runs side by side: what is said about them, and what is refused."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from bapo_megatron.cli import main
from bapo_megatron.errors import UserError
from bapo_megatron.report.compare import MAX_GROUPS, OUTCOMES, compare, outcome_names, outcomes
from bapo_megatron.report.gallery import PANELS, with_named
from bapo_megatron.report.page import write_comparison, write_report
from bapo_megatron.runs.history import read_history
from tests.unit.page import NUM_SCRIPTS, Page, check_self_contained
from tests.unit.run_folders import CONFIG, make_run, steps


def with_settings(**settings: object) -> str:
    """Return CONFIG with changes such as run_seed=1."""
    text = CONFIG
    for name, value in settings.items():
        section, key = name.split("_", 1)
        text = re.sub(rf"(?m)^{key} = .*\n", "", text).replace(
            f"[{section}]\n", f"[{section}]\n{key} = {json.dumps(value)}\n"
        )
    return text


def make(folder: Path, num_steps: int = 2, **settings: object) -> Path:
    return make_run(
        folder, [{"step": i, "reward/mean": i / 10} for i in range(1, num_steps + 1)], with_settings(**settings)
    )


def environment(run: Path, **facts: object) -> None:
    known: Mapping[str, object] = {"time": "2026-11-21T00:00:00", "host": "here", "packages": {"torch": "2.13.0"}}
    (run / "environment.json").write_text(json.dumps({**known, **facts}))


def names(paths: Sequence[Path]) -> list[tuple[str, str, int]]:
    return [(g.key, g.name, len(g.runs)) for g in compare(paths).groups]


def test_a_comparison_is_one_page_with_every_figure(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / f"{loss}-{seed}", steps(12), with_settings(loss_name=loss, run_seed=seed))
        for loss in ("bapo", "grpo")
        for seed in (0, 1)
    ]
    path = write_comparison(runs)
    assert path == tmp_path / "comparison.html"
    html = path.read_text(encoding="utf-8")
    page = Page(html)
    check_self_contained(html, page)
    assert "The curves need JavaScript" in page.text
    assert page.outputs
    assert all(page.outputs), "the latest value of each curve"
    assert html.count('class="card figure"') == len(PANELS)
    for panel in PANELS:
        assert panel.title in page.text
    for text in ("4 runs compared", "A bapo (2 seeds)", "B grpo (2 seeds)", "loss.name", *OUTCOMES):
        assert text in page.text
    match = re.search(r'<script type="application/json" id="metrics">(.*?)</script>', html, re.DOTALL)
    assert match is not None
    assert list(json.loads(match.group(1))) == ["bapo-0", "bapo-1", "grpo-0", "grpo-1"]


def test_runs_that_differ_by_seed_only_share_a_line(tmp_path: Path) -> None:
    runs = [
        make(tmp_path / "grpo-seed0", loss_name="grpo"),
        make(tmp_path / "bapo-s0"),
        make(tmp_path / "grpo-seed1", loss_name="grpo", run_seed=1),
        make(tmp_path / "other", run_seed=2),
        make(tmp_path / "rho", bapo_rho0=0.4),
    ]
    assert names(runs) == [("A", "grpo", 2), ("B", "bapo-s0, other", 2), ("C", "rho", 1)]
    differences = dict(compare(runs).differences)
    assert differences == {
        "bapo.rho0": ["0.45", "0.45", "0.4"],
        "loss.name": ["grpo", "bapo", "bapo"],
        "run.seed": ["0, 1", "0, 2", "0"],
    }


def test_a_run_with_the_same_seed_again_is_no_further_seed(tmp_path: Path) -> None:
    comparison = compare([make(tmp_path / "a"), make(tmp_path / "b")])
    assert [len(group.runs) for group in comparison.groups] == [1, 1]
    assert comparison.differences == []
    assert comparison.notes[-1] == "a and b have equal settings, including the seed."


def test_settings_code_packages_and_machines_that_differ_are_listed(tmp_path: Path) -> None:
    a, b = make(tmp_path / "a"), make(tmp_path / "b", bapo_rho0=0.4, loss_dual_clip=3.0)
    environment(a, git_commit="c" * 40, host="one")
    environment(b, git_commit="c" * 40, host="two", packages={"torch": "2.13.0", "sglang": "0.5.23"})
    (b / "git.diff").write_text("+x\n")
    comparison = compare([a, b])
    assert "The runs used different code: see “What differs”." in comparison.notes
    rows = dict(comparison.differences)
    ours, theirs = rows.pop("code: uncommitted changes")
    assert ours == "none"
    assert theirs.startswith("yes (")
    assert rows == {
        "bapo.rho0": ["0.45", "0.4"],
        "loss.dual_clip": ["unset", "3.0"],
        "package: sglang": ["unset", "0.5.23"],
        "machine: host": ["one", "two"],
    }


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"model_path": "other"}, "model.path"),
        ({"data_source": "jsonl"}, "data.source"),
        ({"reward_clip": 1.0}, "reward"),
    ],
)
def test_another_task_is_a_warning(tmp_path: Path, settings: dict[str, object], named: str) -> None:
    config = with_settings(**settings) if "reward_clip" not in settings else CONFIG + "[reward]\nclip = 1.0\n"
    other = make_run(tmp_path / "b", [{"step": 1, "reward/mean": 0.1}], config)
    comparison = compare([make(tmp_path / "a"), other])
    assert len(comparison.warnings) == 1
    assert named in comparison.warnings[0]
    assert "not comparable" in comparison.warnings[0]
    html = write_comparison([tmp_path / "a", other]).read_text()
    assert "Not comparable." in Page(html).text


def test_other_differences_are_no_warning(tmp_path: Path) -> None:
    assert compare([make(tmp_path / "a"), make(tmp_path / "b", bapo_rho0=0.1)]).warnings == []


def test_unfinished_empty_and_unlike_runs_are_told(tmp_path: Path) -> None:
    long, short = make(tmp_path / "long-0", 50), make(tmp_path / "long-1", 7, run_seed=1)
    empty = make(tmp_path / "empty", 0)
    bare = make_run(tmp_path / "bare", [{"step": 1, "reward/mean": 0.0}])
    (bare / "config.toml").unlink()
    comparison = compare([long, short, empty, bare])
    assert [group.name for group in comparison.groups] == ["long", "bare"]
    assert comparison.notes == [
        "empty has not finished a step and is left out.",
        "bare kept no config.toml: its settings are unknown.",
        "long-1 is not finished: 7 of 50 steps.",
        "The runs have different lengths: compare curves at equal steps, not final values.",
        "long: its mean is drawn up to the last step that all seeds have reached.",
    ]
    text = Page(write_comparison([long, short, empty, bare]).read_text()).text
    assert all(note in text for note in comparison.notes)
    assert "Not recorded: Evaluation (eval.interval_steps), Entropy" in text


def test_outcomes_are_means_over_seeds_with_their_range(tmp_path: Path) -> None:
    rows = [{"step": i, "reward/mean": r, "time/step_s": 30.0} for i, r in enumerate((0.1, 0.3, 0.5, 0.7), start=1)]
    a = make_run(tmp_path / "a", rows)
    b = make_run(
        tmp_path / "b", [row | {"reward/mean": row["reward/mean"] + 0.2} for row in rows], with_settings(run_seed=1)
    )
    (group,) = compare([a, b]).groups
    cells = dict(zip(OUTCOMES, outcomes(group.runs), strict=True))
    assert cells["steps"] == ("4", "")
    assert cells["reward, first"] == ("0.30", "0.20 to 0.40")
    assert cells["reward, last"] == ("0.70", "0.60 to 0.80")
    assert cells["entropy, last"] == ("-", "")
    assert cells["wall time"] == ("2 min 00 s", "")
    text = Page(write_comparison([a, b]).read_text()).text
    assert "Each run by itself" in text
    assert "0.60 to 0.80" in text


def test_equal_names_in_other_folders_are_told_apart(tmp_path: Path) -> None:
    runs = [make(tmp_path / "x" / "demo"), make(tmp_path / "y" / "demo", bapo_rho0=0.1), make(tmp_path / "z")]
    assert [group.name for group in compare(runs).groups] == ["x/demo", "y/demo", "z"]


def test_all_folders_that_cannot_be_compared_are_named_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(tmp_path / "run")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    given = [run, tmp_path / "folder", tmp_path / "file", tmp_path / "missing", tmp_path / "folder" / ".." / "run"]
    assert main(["report", *map(str, given)]) == 2
    message = capsys.readouterr().err
    for text in ("folder is not the folder of a run", "file is a file", "missing does not exist", "run is given twice"):
        assert text in message
    assert "Traceback" not in message
    assert not (tmp_path / "comparison.html").exists()


def test_runs_without_any_step_or_with_too_many_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none of these runs has finished a step yet: a, b"):
        compare([make(tmp_path / "a", 0), make(tmp_path / "b", 0)])
    many = [make(tmp_path / f"many-{i}", 1, bapo_rho0=i / 100) for i in range(MAX_GROUPS + 1)]
    with pytest.raises(UserError, match=f"at most {MAX_GROUPS} settings"):
        compare(many)
    assert len(compare(many[:-1]).groups) == MAX_GROUPS


def test_names_and_settings_cannot_become_markup(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    a, b = make(tmp_path / "<b>a", model_path=evil), make(tmp_path / "b")
    html = write_comparison([a, b]).read_text()
    page = Page(html)
    assert page.tags.count("script") == NUM_SCRIPTS
    assert "b" not in page.open
    assert evil in page.text


def test_the_command_writes_where_it_is_told_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [make(tmp_path / "a"), make(tmp_path / "b", run_seed=1)]
    assert main(["report", *map(str, runs), "--output", str(tmp_path / "here.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'here.html'}\n"
    assert "2 runs compared" in (tmp_path / "here.html").read_text()
    assert main(["report", str(runs[0])]) == 0
    assert (runs[0] / "report.html").exists()


def test_the_evaluation_of_a_run_has_its_standard_error(tmp_path: Path) -> None:
    rows = [{"step": 1, "eval/reward": 0.5, "eval/reward_stderr": 0.1}, {"step": 2, "reward/mean": 0.0}]
    (group,) = compare([make_run(tmp_path / "a", rows)]).groups
    assert dict(zip(OUTCOMES, outcomes(group.runs), strict=True))["evaluation, last"] == ("0.50", "± 0.10")


LISTS = """
[[eval.sets]]
name = "aime"
samples_per_prompt = 2
[[eval.sets]]
name = "gsm"
samples_per_prompt = 1
[[data.sources]]
name = "easy"
[[data.sources]]
name = "hard"
"""


def test_named_sets_and_mixed_sources_have_figures_and_outcomes(tmp_path: Path) -> None:
    row = {"step": 2, "reward/mean": 0.5, "data/easy/reward": 0.75, "data/hard/reward": 0.25}
    for name, reward in (("aime", 0.25), ("gsm", 1.0)):
        row |= {f"eval/{name}/reward": reward, f"eval/{name}/best_of_group": 1.0, f"eval/{name}/num_samples": 8.0}
        row |= {f"eval/{name}/reward_stderr": 0.0 if name == "gsm" else 0.1}
    run = make_run(tmp_path / "a", [{"step": 1, "reward/mean": 0.25}, row], CONFIG + LISTS)
    plain = make(tmp_path / "b", data_source="chains")
    history = read_history(run)
    panels = with_named(PANELS, [history])
    assert [p.title for p in panels if p.title not in {q.title for q in PANELS}] == [
        "Reward by source", "Prompts by source", "Evaluation: aime", "Evaluation: gsm",
    ]  # fmt: skip
    assert "Evaluation" not in [p.title for p in panels], "every set has a name"
    assert "Evaluation" in [p.title for p in with_named(PANELS, [history, read_history(plain)])]
    assert with_named(PANELS, [read_history(plain)]) == PANELS

    aime, gsm = (panel.plot(history) for panel in panels if panel.title.startswith("Evaluation"))
    assert aime is not None
    assert gsm is not None
    assert [line.label for line in aime.series] == ["mean reward, 95 % interval", "best of a group"]
    (line,) = gsm.series  # with single responses, the best is the mean
    assert line.low is not None
    assert line.low[1] == pytest.approx(0.676, abs=1e-3), "8 of 8 prompts are right: Wilson's interval"

    comparison = compare([run, plain])
    assert any("evaluated differently: eval.sets differ" in warning for warning in comparison.warnings)
    cells = dict(zip(outcome_names(["aime", "gsm"]), outcomes([history], ["aime", "gsm"]), strict=True))
    assert cells["aime, last"] == ("0.25", "± 0.10")
    assert cells["gsm, last"] == ("1.00", "± 0.00")
    text = Page(write_comparison([run, plain]).read_text()).text
    assert all(part in text for part in ("aime, last", "gsm, last", "Evaluation: aime", "Reward by source"))
    text = Page(write_report(run).read_text()).text
    assert all(part in text for part in ("Evaluation: aime", "Evaluation: gsm", "Reward by source"))
