"""`bapo branch`: what a new run keeps of a checkpoint, what it says, and what stays as it was."""

import dataclasses
import json
import os
import shlex
import shutil
import signal
from pathlib import Path

import pytest

from bapo_megatron import branch as branching
from bapo_megatron import cli
from bapo_megatron.branch import plan_branch
from bapo_megatron.checkpoint.store import CheckpointStore
from bapo_megatron.config.changing import cost_of_change
from bapo_megatron.config.load import as_override, dump_config, load_config, parse_override
from bapo_megatron.config.paths import schema
from bapo_megatron.config.schema import CheckpointConfig
from bapo_megatron.config.schema_loss import ClipBoundConfig
from bapo_megatron.errors import ConfigError, UserError
from bapo_megatron.monitor import alarms
from bapo_megatron.monitor.alarms import RULES, AlarmLog, Rule
from bapo_megatron.report.page import _facts
from bapo_megatron.runs.history import read_history
from bapo_megatron.runs.inputs import record_inputs
from bapo_megatron.runs.resuming import check_resumable
from tests.unit.branched import STEP, assert_follows, digest, make_parent, make_parents, outcome


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_parent(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def copy(parent: Path, tmp_path: Path) -> Path:
    """Return a copy of the parent, to change."""
    return shutil.copytree(parent, tmp_path / "parent")


def facts(run: Path, *settings: str, name: str = "other", step: int | None = None) -> dict[str, str]:
    return dict(plan_branch(run, Path(name), settings, step).facts)


def test_a_branch_is_a_run_of_its_own_and_its_parent_stays(parent: Path) -> None:
    before = digest(parent)
    branch = plan_branch(parent, Path("slower"), ["optimizer.lr=1e-4"])
    told = dict(branch.facts)
    assert told["changes"] == "optimizer.lr: 0.0003 -> 0.0001"
    assert told["leaves"] == "nothing"
    assert told["note"] == "the next learning rate is 0.0001; the parent's was 0.0003"
    assert not branch.path.exists(), "it is told before anything is written"
    branch.write()
    assert_follows(parent, branch)
    assert digest(parent) == before
    run = read_history(branch.path)
    assert [row["step"] for row in run.rows] == list(range(1, STEP + 1)), "later steps are the parent's own"
    assert run.parent is not None
    assert (run.parent.run, run.parent.step) == (str(parent), STEP)
    remark = ("Branch of", f"parent, step {STEP}", "optimizer.lr: 0.0003 -> 0.0001")
    assert remark in _facts(run)
    with pytest.raises(ConfigError, match="cannot resume"):
        check_resumable(branch.path, dump_config(load_config([parent / "config.toml"])))


def test_a_branch_outlives_its_parent(copy: Path) -> None:
    branch = plan_branch(copy, Path("heir"), [])
    branch.write()
    shutil.rmtree(copy)
    store = CheckpointStore(branch.path / "checkpoints", CheckpointConfig(), run_id=branch.state["run"])
    assert store.read(branch.path / "checkpoints" / f"step-{STEP:06d}")["step"] == STEP


def test_files_are_copied_where_there_are_no_links(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    branch = plan_branch(parent, Path("copied"), [])
    branch.write()
    assert_follows(parent, branch)


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        (["rollout.temperature=0.5"], "because of rollout.temperature"),
        (["run.seed=5"], "the prompts' position in data, because of run.seed"),
        (["bapo.rho0=0.4"], "the table behind the bounds of earlier updates, because of bapo.rho0"),
        (["loss.kl_coef=0.2"], "the adapted KL coefficient, because of loss.kl_coef"),
        pytest.param(["reward.kind=text"], "which are judged again, because of reward.kind", marks=pytest.mark.slow),
        pytest.param(["reward.kind=text"], "the running statistics of rewards", marks=pytest.mark.slow),
        pytest.param(
            ["environment.kind=calculator", "environment.max_answer_tokens=8"],
            "because of environment.kind",
            marks=pytest.mark.slow,
        ),
        (["rollout.max_response_tokens=5", "rollout.tokens_per_round=none"], "because of rollout.max_response_tokens"),
    ],
)
def test_what_cannot_follow_is_named_with_its_reason(parent: Path, settings: list[str], left: str) -> None:
    assert left in facts(parent, *settings)["leaves"]


def test_a_critic_that_is_added_begins_anew_and_one_that_goes_is_left(parent: Path) -> None:
    first = plan_branch(parent, Path("critical"), ["advantage.kind=gae"])
    assert any("the critic begins anew, from demo" in note for note in first.notes)
    first.write()
    assert first.state["begin_anew"] == ["critic"]
    assert "critic" not in " ".join(plan_branch(first.path, Path("uncritical"), ["advantage.kind=grpo"]).notes)


def test_a_new_loss_has_its_own_settings_and_a_preset_its_values(parent: Path) -> None:
    config = plan_branch(parent, Path("other"), ["loss.name=gspo", "bapo.preset=paper", "bapo.scope=exact"]).config
    fresh = load_config(["demo"], ["loss.name=gspo", "loss.kl_coef=0.1", "loss.kl_target=0.01"])
    assert config.loss == fresh.loss
    assert (config.bapo.rho0, config.bapo.contribution, config.bapo.scope) == (0.4, "surrogate", "exact")


def test_a_preset_brings_its_scope_and_takes_it_along(parent: Path) -> None:
    exact = plan_branch(parent, Path("exact"), ["bapo.scope=exact"])
    exact.write()
    wide = plan_branch(exact.path, Path("wide"), ["bapo.preset=wide"])
    assert wide.config.bapo == ClipBoundConfig(preset="wide")
    wide.write()
    assert plan_branch(wide.path, Path("searching"), ["bapo.preset=default"]).config.bapo == ClipBoundConfig()
    own = plan_branch(parent, Path("own"), ["bapo.rho0=0.4", "bapo.scope=lagged"])
    own.write()
    kept = plan_branch(own.path, Path("kept"), ["bapo.preset=official"]).config.bapo
    assert (kept.rho0, kept.scope, kept.contribution) == (0.4, "lagged", "official")


@pytest.mark.parametrize(
    ("settings", "step", "why"),
    [
        (["model.path=moe"], None, "model.path cannot change in a branch, which would lose the weights"),
        (["optimizer.lr"], None, "is not of the form"),
        (["optimizer.lrr=1"], None, "did you mean optimizer.lr?"),
        (["run.name=x"], None, "run.name follows from the branch's folder"),
        (["train.num_steps=4"], None, "is after 4 steps, and train.num_steps is 4: set it to more"),
        ([], 3, "has no checkpoint after 3 steps; it has: 4"),
        (["rollout.engine=recorded"], None, "recorded_from"),
    ],
)
def test_what_no_branch_can_follow_is_refused(parent: Path, settings: list[str], step: int | None, why: str) -> None:
    before = sorted(parent.parent.iterdir())
    with pytest.raises(UserError, match=why):
        plan_branch(parent, Path("none"), settings, step)
    assert sorted(parent.parent.iterdir()) == before


def test_all_that_is_wrong_is_said_at_once(parent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["optimizer.lrr=1", "optimizer.lr", "run.name=x", "loss.kl_coef=high", "model.path=moe"]
    wrong += ["train.num_steps=2", "--step", "4"]
    before = sorted(parent.parent.iterdir())
    assert cli.main(["branch", str(parent), "parent", *wrong]) == 2
    text = capsys.readouterr().err
    for part in (
        "parent exists: give the branch another name",
        "is after 4 steps, and train.num_steps is 2",
        "run.name follows from the branch's folder",
        "model.path cannot change in a branch",
        "override 'optimizer.lr' is not of the form",
        "did you mean optimizer.lr?",
        "loss.kl_coef must be a number",
    ):
        assert text.count(part) == 1, part
    assert cli.main(["branch", str(parent.with_name("parnt")), "parent", "optimizer.lrr=1"]) == 2
    exists, missing, setting = capsys.readouterr().err.splitlines()
    assert "exists" in exists
    assert missing.endswith(f"there is no run at {parent.with_name('parnt')}; did you mean {parent}?")
    assert setting.endswith("did you mean optimizer.lr?")
    assert sorted(parent.parent.iterdir()) == before


def test_a_torn_checkpoint_and_an_existing_name_are_refused(copy: Path) -> None:
    with pytest.raises(UserError, match="exists: give the branch another name"):
        plan_branch(copy, Path("parent"), [])
    (weights,) = (copy / "checkpoints" / f"step-{STEP:06d}" / "learner").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"torn.*branch from another checkpoint with --step"):
        plan_branch(copy, Path("torn"), [])


@pytest.mark.slow
def test_a_changed_file_of_prompts_counts_as_changed_prompts(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f'{{"prompt": "{i}+1=", "answer": "{i + 1}"}}\n' for i in range(1, 9)))
    run = make_parent(tmp_path, "data.source=jsonl", f"data.path={file}", "reward.kind=text")
    record_inputs(run / "inputs.json", branching._inputs(load_config([run / "config.toml"])))
    assert facts(run)["leaves"] == "nothing"
    file.write_text(file.read_text() + '{"prompt": "9+1=", "answer": "10"}\n')
    told = facts(run)
    assert "the prompts' position in data, because of data.path" in told["leaves"]
    assert f"data ({file}) has other contents than in parent" in told["note"]


@pytest.mark.parametrize("place", ["parent.json", "checkpoints"])
def test_a_crash_leaves_nothing_and_the_next_one_is_whole(
    parent: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> None:
        raise OSError(28, "No space left on device")

    branch = plan_branch(parent, Path(f"full-{place}"), [])
    with monkeypatch.context() as patched:
        patched.setattr(branching, "write_parent" if place == "parent.json" else "branch_checkpoint", crash)
        with pytest.raises(UserError, match="No space left"):
            branch.write()
    assert not [path for path in parent.parent.iterdir() if f"full-{place}" in path.name]
    branch.write()
    assert_follows(parent, branch)


def test_a_killed_branch_leaves_no_run_and_is_repeated(parent: Path) -> None:
    branch = plan_branch(parent, Path("killed"), [])
    if not (child := os.fork()):
        try:
            branching.branch_checkpoint = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            branch.write()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not branch.path.exists()
    branch.write()
    assert_follows(parent, branch)


def test_the_verb_says_what_it_keeps_and_how_to_go_on(parent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["branch", str(parent), "said", "--dry-run", "optimizer.lr=1e-4"]) == 0
    assert "optimizer.lr: 0.0003 -> 0.0001" in capsys.readouterr().out
    assert not parent.with_name("said").exists()
    assert cli.main(["branch", str(parent), "said", "--step", "4", "optimizer.lr=1e-4"]) == 0
    assert "train " in capsys.readouterr().out.splitlines()[-1]
    assert cli.main(["branch", str(parent), "said", "optimizer.lr=1e-4"]) == 2


def test_the_refusal_of_a_resume_prints_a_command_that_gives_these_settings(parent: Path) -> None:
    changes = ["optimizer.lr=1e-4", "train.num_steps=20", "bapo.rho0=0.4", "rollout.top_k=5", "eval.sets=[]"]
    wanted = load_config([parent / "config.toml"], changes)
    with pytest.raises(ConfigError) as caught:
        check_resumable(parent, dump_config(wanted))
    *_, command = str(caught.value).splitlines()
    words = shlex.split(command.partition(": ")[2])
    _, run, name, *settings = words[words.index("branch") :]
    made = plan_branch(Path(run), Path(name), settings).config
    assert made.model_copy(update={"run": wanted.run}) == wanted


def test_the_command_in_the_refusal_gives_a_finished_run_more_steps(copy: Path) -> None:
    config = load_config([copy / "config.toml"], [f"train.num_steps={STEP}"])
    (copy / "config.toml").write_text(dump_config(config))
    with pytest.raises(ConfigError) as caught:
        check_resumable(copy, dump_config(load_config([copy / "config.toml"], ["optimizer.lr=1e-4"])))
    words = shlex.split(str(caught.value).splitlines()[-1].partition(": ")[2])
    _, run, name, *settings = words[words.index("branch") :]
    config = plan_branch(Path(run), Path(name), settings).config
    assert (config.optimizer.lr, config.train.num_steps) == (1e-4, 2 * STEP)


@pytest.mark.parametrize("name", ["flat pass rate", "no entropy"])
def test_the_command_of_an_alarm_gives_a_finished_run_more_steps(
    copy: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config([copy / "config.toml"], [f"train.num_steps={STEP}"])
    (copy / "config.toml").write_text(dump_config(config))
    (rule,) = (rule for rule in RULES if rule.name == name)
    monkeypatch.setattr(alarms, "RULES", (dataclasses.replace(rule, saw=lambda steps: "seen"),))
    (alarm,) = AlarmLog([{"step": float(STEP)}], copy).raised
    if rule.from_before:  # there is no checkpoint before these steps
        assert "branch" not in alarm.change
        return
    words = shlex.split(alarm.change.partition("In a new run: ")[2])
    _, run, new, *settings = words[words.index("branch") :]
    assert plan_branch(Path(run), Path(new), settings).config.train.num_steps == 2 * STEP


def test_the_alarm_of_the_last_step_counts_its_checkpoint(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (rule,) = (rule for rule in RULES if rule.name == "flat pass rate")
    monkeypatch.setattr(alarms, "RULES", (dataclasses.replace(rule, saw=lambda steps: "seen"),))
    (alarm,) = AlarmLog([{"step": 9.0}], parent).raised  # of 9 steps, and not saved yet
    assert alarm.change.endswith("train.num_steps=18")
    (earlier,) = AlarmLog([{"step": 8.0}], parent).raised
    assert "num_steps" not in earlier.change


@pytest.mark.slow
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.tries], ids=lambda rule: rule.name)
def test_an_alarm_prints_a_command_that_a_branch_takes(
    parent: Path, rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = dataclasses.replace(rule, saw=lambda steps: "seen")
    monkeypatch.setattr(alarms, "RULES", (seen,))
    (alarm,) = AlarmLog([{"step": STEP + 1.0}], parent).raised
    words = shlex.split(alarm.change.partition("In a new run: ")[2])
    _, run, name, setting, *at = words[words.index("branch") :]
    assert at == (["--step", str(STEP)] if seen.from_before else [])
    found = facts(Path(run), setting, name=name, step=int(at[1]) if at else None)
    assert found["changes"].startswith(setting.partition("=")[0])
    (alone,) = AlarmLog([{"step": 1.0}]).raised
    assert "branch" not in alone.change


def test_every_setting_has_a_class() -> None:
    costs = {cost_of_change(".".join(path)) for path in schema() if len(path) > 1}
    assert {"resume", "branch", "new run"} < costs


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("optimizer.lr", 1e-06),
        ("loss.name", "grpo"),
        ("rollout.urls", ["http://a b", 'quo"te']),
        ("data.path", " odd name.jsonl"),
        ("data.path", '"quoted"'),
        ("reward.weights", {"a": 1.5, "b.c": -2}),
        ("rollout.overlap", True),
        ("rollout.top_k", None),
        ("slurm.sweep", ["optimizer.lr=1e-6 bapo.rho0=0.4"]),
    ],
)
def test_an_override_gives_its_value_back(setting: str, value: object) -> None:
    text = as_override(setting, value)
    assert text is not None
    assert parse_override(text) == (tuple(setting.split(".")), "none" if value is None else value)


def test_what_no_override_can_say_has_none() -> None:
    assert as_override("reward.weights.a.b", None) is None
    assert as_override("optimizer.lr", None) is None


@pytest.mark.slow
def test_generated_changes_are_followed_truly_or_refused(tmp_path: Path) -> None:
    parents = make_parents(tmp_path)
    found = [outcome(parents[seed % len(parents)], seed)[0] for seed in range(24)]
    assert set(found) == {"refused", "left parts", "kept all"}


def test_the_parents_record_is_read_back_or_is_one_error(copy: Path) -> None:
    (copy / "parent.json").write_text(json.dumps({"run": "a", "step": -1}))
    with pytest.raises(UserError, match=r"parent\.json is damaged; remove it"):
        read_history(copy)
