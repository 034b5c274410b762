"""The folder of a run: what it keeps, when it may be resumed, and who may write to it."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bapo_megatron.config.load import dump_config, load_config
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import ConfigError, UserError
from bapo_megatron.runs import folder, provenance
from bapo_megatron.runs.folder import RunDir
from bapo_megatron.runs.resuming import different_settings
from tests.distributed import HANG_S

CONFIG = """
[run]
name = "demo"
[bapo]
rho0 = 0.4
[bapo.low]
start = 0.6
[train]
num_steps = 10
[rollout]
request_timeout_s = 300.0
"""


def finish_a_step(run: RunDir) -> None:
    run.metrics_path.write_text('{"step": 1}\n')


def test_a_new_run_records_what_was_run(tmp_path: Path) -> None:
    with RunDir.open_path(tmp_path / "runs" / "demo", CONFIG) as run:
        assert run.attempt == 1
        assert run.config_path.read_text() == CONFIG
        environment = json.loads((run.path / "environment.json").read_text())
        assert environment["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
        assert environment["packages"]["torch"]
        assert environment["num_cores"] >= 1
        assert (run.path / "command.txt").read_text().strip()
        assert run.checkpoints_dir.is_dir()
        assert run.log_path("trainer", 3) == run.path / "logs" / "attempt-1" / "trainer-3.log"


def test_the_same_settings_resume_as_the_next_attempt(tmp_path: Path) -> None:
    for attempt in (1, 2, 3):
        with RunDir.open_path(tmp_path / "demo", CONFIG) as run:
            finish_a_step(run)
            assert run.attempt == attempt
            assert run.log_dir.is_dir()
    assert RunDir.attach(tmp_path / "demo").attempt == 3
    assert run.metrics_path.read_text() == '{"step": 1}\n'


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("num_steps = 10", "num_steps = 20"),
        ("300.0", "60.0"),
        ("[rollout]", '[data]\non_bad_prompt = "skip"\n[rollout]'),
        ('name = "demo"', 'name = "demo"\ndir = "elsewhere"'),
        ("[rollout]", "[rollout]\nmax_concurrent_requests = 7\nmax_restarts = 5"),
    ],
)
def test_harmless_settings_may_change(tmp_path: Path, old: str, new: str) -> None:
    with RunDir.open_path(tmp_path / "demo", CONFIG) as run:
        finish_a_step(run)
    changed = CONFIG.replace(old, new)
    assert changed != CONFIG
    with RunDir.open_path(tmp_path / "demo", changed) as run:
        assert run.config_path.read_text() == changed
        assert (run.path / "logs" / "attempt-1" / "config.toml").read_text() == CONFIG


def test_other_settings_are_refused_by_name_and_nothing_changes(tmp_path: Path) -> None:
    with RunDir.open_path(tmp_path / "demo", CONFIG) as run:
        finish_a_step(run)
    changed = CONFIG.replace("0.4", "0.5").replace("start = 0.6", "start = 0.7").replace("= 10", "= 20")
    with pytest.raises(ConfigError) as caught:
        RunDir.open_path(tmp_path / "demo", changed)
    message = str(caught.value)
    assert "bapo.rho0: 0.4 -> 0.5" in message
    assert "bapo.low.start: 0.6 -> 0.7" in message
    assert "num_steps" not in message
    assert run.config_path.read_text() == CONFIG
    assert not (run.path / "logs" / "attempt-2").exists()
    RunDir.open_path(tmp_path / "demo", CONFIG).close()  # the refused attempt released the lock


def test_a_checkpoint_alone_is_enough_to_refuse(tmp_path: Path) -> None:
    with RunDir.open_path(tmp_path / "demo", CONFIG) as run:
        (run.checkpoints_dir / "step-5").mkdir()
    with pytest.raises(ConfigError, match="rho0"):
        RunDir.open_path(tmp_path / "demo", CONFIG.replace("0.4", "0.5"))


def test_a_run_that_never_finished_a_step_may_start_over_with_other_settings(tmp_path: Path) -> None:
    RunDir.open_path(tmp_path / "demo", CONFIG).close()
    with RunDir.open_path(tmp_path / "demo", CONFIG.replace("0.4", "0.5")) as run:
        assert run.attempt == 2


def save(run: RunDir, step: int) -> None:
    folder = run.checkpoints_dir / f"step-{step:06d}"
    folder.mkdir()
    (folder / "state.json").write_text("{}")
    (run.checkpoints_dir / "latest").write_text(folder.name)


def test_a_finished_run_is_left_as_it_is_and_fewer_steps_are_refused(tmp_path: Path) -> None:
    with RunDir.open_path(tmp_path / "demo", CONFIG) as run:
        assert not run.is_finished
        assert run.state == "starting"
        save(run, 10)
    with RunDir.open_path(tmp_path / "demo", CONFIG) as again:
        assert again.is_finished
        assert (again.attempt, again.num_steps_saved()) == (1, 10)
    with pytest.raises(
        ConfigError, match=r"it has done 10 steps, and train.num_steps is 9\. Set train.num_steps to 10"
    ):
        RunDir.open_path(tmp_path / "demo", CONFIG.replace("num_steps = 10", "num_steps = 9"))
    assert run.config_path.read_text() == CONFIG
    assert [path.name for path in (tmp_path / "demo" / "logs").iterdir()] == ["attempt-1"]
    with RunDir.open_path(tmp_path / "demo", CONFIG.replace("num_steps = 10", "num_steps = 11")) as more:
        assert (more.is_finished, more.attempt) == (False, 2)


def test_steps_after_the_last_checkpoint_are_repeated_so_they_are_not_done(tmp_path: Path) -> None:
    with RunDir.open_path(tmp_path / "demo", CONFIG) as run:
        run.metrics_path.write_text('{"step": 10}\n')
        save(run, 5)
    with RunDir.open_path(tmp_path / "demo", CONFIG) as again:
        assert not again.is_finished


def test_a_finished_run_that_never_saved_is_finished(tmp_path: Path) -> None:
    with RunDir.open_path(tmp_path / "demo", CONFIG) as run:
        run.metrics_path.write_text('{"step": 10}\n')
    with RunDir.open_path(tmp_path / "demo", CONFIG) as again:
        assert again.is_finished


def test_a_second_process_is_told_who_holds_the_run_until_that_one_ends(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from bapo_megatron.runs.folder import RunDir\n"
        "run = RunDir.open_path(Path(sys.argv[1]), sys.argv[2]); print('ready', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "demo"), CONFIG],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        with pytest.raises(UserError, match=rf"in use by process {holder.pid} on "):
            RunDir.open_path(tmp_path / "demo", CONFIG)
        config = load_config(["demo"], [f"run.dir={tmp_path}", "run.name=demo"])
        with pytest.raises(UserError, match=rf"in use by process {holder.pid} on "):
            RunDir.preview(config)  # the other settings of a run of that name do not matter yet
    finally:
        holder.kill()  # a crash must release the lock too
        holder.communicate(timeout=HANG_S)
    with RunDir.open_path(tmp_path / "demo", CONFIG) as run:
        assert run.attempt == 2


def test_a_file_system_without_locks_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(folder.fcntl, "flock", unsupported)
    with RunDir.open_path(tmp_path / "demo", CONFIG) as run:
        assert run.attempt == 1
    assert "cannot lock" in caplog.text


def test_attaching_to_a_run_that_does_not_exist_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run at"):
        RunDir.attach(tmp_path / "nothing")


def test_a_run_directory_that_cannot_be_created_says_so(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(UserError, match=r"set run\.dir"):
        RunDir.open_path(tmp_path / "runs" / "demo", CONFIG)


def test_git_state_holds_commit_and_bounded_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "GIT_TIMEOUT_S", HANG_S)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)  # not the settings of whoever runs the tests

    def git(*args: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ["git", "-C", str(tmp_path), *identity, *args]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=HANG_S).stdout

    assert provenance.git_state(tmp_path) == (None, "")
    git("init", "-q")
    (tmp_path / "code.py").write_text("x = 1\n")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    (tmp_path / "code.py").write_text("x = 2\n")
    commit, diff = provenance.git_state(tmp_path)
    assert commit == git("rev-parse", "HEAD").strip()
    assert "+x = 2" in diff
    monkeypatch.setattr(provenance, "MAX_DIFF_BYTES", 50)
    _, diff = provenance.git_state(tmp_path)
    assert len(diff) < 120
    assert "[cut: the whole diff has" in diff


def test_differences_name_nested_and_unset_settings() -> None:
    old, new = "[a]\nx = 1\n[a.b]\ny = [1, 2]\n", "[a]\nz = true\n[a.b]\ny = [1, 3]\n"
    assert different_settings(old, new) == {"a.b.y": ([1, 2], [1, 3]), "a.x": (1, None), "a.z": (None, True)}


def test_a_run_from_before_a_setting_existed_resumes_at_its_default(tmp_path: Path) -> None:
    def config(*settings: str) -> Config:
        return load_config(["demo"], [f"run.dir={tmp_path}", "run.name=old", *settings])

    older = "".join(
        line
        for line in dump_config(config()).splitlines(keepends=True)
        if not line.startswith(("smoothing_updates", "order ="))
    )
    with RunDir.open_path(tmp_path / "old", older) as run:
        run.metrics_path.write_text('{"step": 1}\n')
    with (
        pytest.raises(ConfigError, match=r"bapo\.smoothing_updates: unset -> 3"),
        RunDir.open(config("bapo.smoothing_updates=3")),
    ):
        pass
    with RunDir.open(config()) as run:
        assert run.attempt == 2
