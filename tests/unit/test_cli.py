"""The command line as a user meets it: a process, its output and its exit code."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from bapo_megatron import __version__, cli

CONFIG = """
[bapo]
rho_0 = 0.4
[train]
num_steps = "many"
[loss]
name = "ppo"
"""


def bapo(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bapo_megatron", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd, check=False)


def test_check_names_three_mistakes_in_one_answer(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    done = bapo("check", "run.toml", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert sorted(done.stderr.splitlines()) == [
        'bapo: loss.name must be "bapo", "grpo", "sft" or a path like "my_module:my_name", got "ppo" (run.toml)',
        "bapo: no such setting: bapo.rho_0 (run.toml); did you mean bapo.rho0?",
        'bapo: train.num_steps must be a whole number, got "many" (run.toml)',
    ]


def test_check_names_three_impossible_combinations(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["check", "demo", "parallel.tensor=3", "parallel.num_ranks=5", "train.minibatches_per_step=7"])
    lines = capsys.readouterr().err.splitlines()
    assert code == 2
    assert len(lines) == 3
    assert all(any(word in line for line in lines) for word in ("num_ranks=5", "minibatches_per_step=7", "heads"))


def test_check_summarizes_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "demo"]) == 0
    assert "ranks = tensor 2" in capsys.readouterr().out


def test_an_override_may_be_longer_than_a_file_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "demo", f"rollout.urls={[f'http://10.0.0.{i}:30000' for i in range(20)]}"]) == 0
    assert cli.main(["check", "x" * 300]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_a_missing_model_is_told_with_the_other_violations(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "demo", "model.path=nowhere", "data.source=jsonl"]) == 2
    error = capsys.readouterr().err
    assert "model.path = 'nowhere'" in error
    assert "needs data.path" in error


def test_interrupt_exits_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(options: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_check", interrupted)
    assert cli.main(["check", "demo"]) == 130
    assert capsys.readouterr().err == "bapo: interrupted\n"


def test_report_of_a_missing_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "said"), [("version", f"bapo-megatron {__version__}"), ("--help", "usage: bapo")])
def test_help_and_version_do_not_import_torch(command: str, said: str) -> None:
    code = """
        import atexit, sys
        from bapo_megatron.cli import main
        atexit.register(lambda: print("torch" in sys.modules))
        sys.exit(main(sys.argv[1:]))
    """
    arguments = [sys.executable, "-c", textwrap.dedent(code), command]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith(said)
    assert done.stdout.endswith("\nFalse\n")
