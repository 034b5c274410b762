"""The command line as a user meets it: a process, its output and its exit code."""

import io
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import bapo_megatron
from bapo_megatron import cli, verbs
from bapo_megatron.assets import demo_model_path
from bapo_megatron.config.schema import Config
from bapo_megatron.runtime import program
from bapo_megatron.version import __version__
from tests.distributed import HANG_S
from tests.loss_names import EVERY_LOSS

BAPO = f"{sys.executable} -m bapo_megatron"
CONFIG = """
[bapo]
rho_0 = 0.4
[train]
num_steps = "many"
[loss]
name = "dqn"
[rollout]
max_response_tokens = 64
[data]
max_prompt_tokens = 64
"""


def bapo(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bapo_megatron", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, cwd=cwd, check=False)


def test_check_names_three_mistakes_in_one_answer(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    done = bapo("check", "run.toml", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert sorted(done.stderr.splitlines()) == [
        f'bapo: loss.name must be {EVERY_LOSS} or a path like "my_module:my_name", got "dqn" (run.toml)',
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
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bapo_megatron.preflight.check.load_checked", interrupted)
    assert cli.main(["check", "demo"]) == 130
    assert capsys.readouterr().err == "bapo: interrupted\n"


def test_report_of_a_missing_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err


def test_metrics_that_cannot_be_read_are_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").mkdir()  # as unreadable as another user's file, even for root
    assert cli.main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"bapo: cannot read {tmp_path}/metrics.jsonl: Is a directory; make it readable, or read a copy\n"
    )


def test_text_that_the_terminal_has_no_letters_for_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr(verbs, "__version__", "\xfc 0.5 \xb1 0.1 f\udcfc.toml")
    cli.main(["version"])
    assert written.getvalue() == b"bapo-megatron \\xfc 0.5 \\xb1 0.1 f\xfc.toml\n"


def test_bapo_alone_says_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    said = capsys.readouterr()
    told = [line.split()[1] for line in said.out.splitlines() if line.startswith("  bapo ")]
    assert told == ["demo", "init", "check", "train", "report"]  # the promise: these, in the order of first use
    assert said.err == ""


def test_printed_commands_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = tmp_path / ".venv" / "bin", tmp_path / "other"
    for folder in (mine, other):
        folder.mkdir(parents=True)
        (folder / "bapo").touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(mine / "python"))
    monkeypatch.setenv("PATH", f"{mine}:{other}")
    assert program() == ["bapo"]
    for path in (f"{other}:{mine}", str(tmp_path)):
        monkeypatch.setenv("PATH", path)
        assert program() == [str(mine / "bapo")]
    monkeypatch.chdir(tmp_path)
    assert program() == ["./.venv/bin/bapo"]
    (mine / "bapo").unlink()
    assert program() == [str(mine / "python"), "-m", "bapo_megatron"]


def test_demos_of_the_same_second_have_names_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda *_: "20261123-152523")
    names = set()
    for process in (41, 42):
        monkeypatch.setattr("os.getpid", lambda process=process: process)
        monkeypatch.setattr("bapo_megatron.local.train_command", lambda told, began_s: names.add(told[1]) or 1)
        assert cli.main(["demo"]) == 1
    assert names == {"run.name=demo-20261123-152523-41", "run.name=demo-20261123-152523-42"}


def test_evaluations_of_the_same_second_have_folders_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[Path] = []

    def evaluate(config: Config, checkpoint: Path, output: Path, **_: Any) -> Any:
        folders.append(output)
        return SimpleNamespace(table=str)

    monkeypatch.setattr("time.strftime", lambda *_: "20261123-152523")
    monkeypatch.setattr("bapo_megatron.evaluation.run.evaluate", evaluate)
    for process in (41, 42):
        monkeypatch.setattr("os.getpid", lambda process=process: process)
        assert cli.main(["eval", "demo"]) == 0
        bapo_megatron.evaluate("demo")
    assert folders == [Path(f"evals/20261123-152523-{process}") for process in (41, 41, 42, 42)]


@pytest.mark.parametrize(("arguments", "code"), [([], 0), ([], 2), (["train.num_steps=2"], 0), (["loss.name=grpo"], 0)])
def test_only_the_whole_demo_says_what_it_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int
) -> None:
    monkeypatch.setattr("bapo_megatron.local.train_command", lambda told, began_s: code)
    assert cli.main(["demo", *arguments]) == code
    assert ("That was the whole loop" in capsys.readouterr().out) == (not arguments and code == 0)


@pytest.mark.parametrize(("command", "said"), [("version", f"bapo-megatron {__version__}"), ("--help", "usage: bapo")])
def test_help_and_version_do_not_import_torch(command: str, said: str) -> None:
    code = """
        import atexit, sys
        from bapo_megatron.cli import main
        atexit.register(lambda: print("torch" in sys.modules))
        sys.exit(main(sys.argv[1:]))
    """
    arguments = [sys.executable, "-c", textwrap.dedent(code), command]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=HANG_S, check=True)
    assert done.stdout.startswith(said)
    assert done.stdout.endswith("\nFalse\n")


HEAVY = ("torch", "transformers", "megatron", "sglang", "numpy", "aiohttp", "tokenizers")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--version"], 0),
        (["--help"], 0),
        (["help", "train"], 0),
        (["help", "settings"], 0),
        (["help", "metrics"], 0),
        (["trian"], 2),
        (["train", "--lr", "3"], 2),
        (["check", "demo", "optimizer.l=1"], 2),
        (["check", "demo", "parallel.tensor=3"], 2),
        pytest.param(["check", "demo"], 0, marks=pytest.mark.skipif(torch.cuda.is_available(), reason="counts GPUs")),
    ],
)
def test_quick_answers_import_nothing_heavy(arguments: list[str], code: int) -> None:
    script = f"""
import sys
from bapo_megatron.cli import main
try:
    code = main({arguments!r})
except SystemExit as end:
    code = end.code or 0
print(code, [name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG_S, check=True)
    assert done.stdout.splitlines()[-1] == f"{code} []"


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("trian demo", "there is no verb 'trian'; did you mean train?"),
        ("xyzzy", "there is no verb 'xyzzy'; `bapo help` lists them"),
        ("help chekc", "there is no verb 'chekc'; did you mean check?"),
        ("help setings", "there is no verb 'setings'; did you mean settings?"),
        ("check", "give a configuration: a TOML file, or a shipped one such as demo"),
        ("eval", "the following arguments are required: CKPT; see `bapo eval --help`"),
        ("train --lr 3", "there is no option --lr; write the setting without dashes: optimizer.lr=3"),
        ("train demo --lr=3", "there is no option --lr; write the setting without dashes: optimizer.lr=3"),
        ("demo --train.num-steps 3", "there is no option --train.num-steps; write the setting without dashes: "
         "train.num_steps=3"),
        ("check demo --n-samples 4", "there is no option --n-samples; write the setting without dashes: "
         "rollout.samples_per_prompt=4"),
        ("train demo --epsilon 0.2", "there is no option --epsilon; did you mean loss.clip_low (a bound of the ratio, "
         "0.8 for 0.2)?"),
        ("train demo --lora_r=8", "there is no option --lora_r; write the setting without dashes: lora.rank=8"),
        ("check demo --use-tis", 'there is no option --use-tis; write the setting without dashes: '
         'loss.proximal="learner"'),
        ("check demo --xyzzy", "there is no option --xyzzy; see `bapo check --help`"),
        ("slurm demo --dryrun", "there is no option --dryrun; did you mean --dry-run?"),
        ("completion bsh", "argument shell: invalid choice: 'bsh' (choose from 'bash', 'zsh', 'fish'); "
         "see `bapo completion --help`"),
        ("check demo optimizer.lr 3e-4", "optimizer.lr needs a =: write optimizer.lr=3e-4"),
        ("check demo optimizer.lr", "optimizer.lr needs a =: write optimizer.lr=VALUE"),
        ("slurm demo --dry-run optimizer.lr", "optimizer.lr needs a =: write optimizer.lr=VALUE"),
        ("slurm demo --dry-run optimizer.lr=1 --xyzzy", "there is no option --xyzzy; see `bapo slurm --help`"),
        ("check demmo", "configuration demmo does not exist; did you mean demo?"),
        ("check demo model=Qwen/Qwen3", 'model is a table of settings, got "Qwen/Qwen3" (override model=Qwen/Qwen3); '
         "did you mean model.path?"),
        ("serve demo --port x", "argument --port: x is not a port, from 0 to 65535; see `bapo serve --help`"),
        ("serve demo --port 80000", "argument --port: 80000 is not a port, from 0 to 65535; see `bapo serve --help`"),
        ("report --serve x --port -1", "argument --port: -1 is not a port, from 0 to 65535; see `bapo report --help`"),
        ("chat nowhere", "there is nothing at nowhere; give a model, a run or a checkpoint"),
        ("chat demmo", "there is nothing at demmo; did you mean demo?"),
        ("reproduce routs", "there is no study 'routs'; did you mean routes?"),
        ("check demo optimizer.schedule=cosin", 'optimizer.schedule must be "constant", "linear" or "cosine", got '
         '"cosin" (override optimizer.schedule=cosin); did you mean "cosine"?'),
    ],
)  # fmt: skip
def test_each_slip_gets_one_line(capsys: pytest.CaptureFixture[str], command: str, answer: str) -> None:
    assert cli.main(command.split()) == 2
    unquoted = [text.replace("'", "") for text in (capsys.readouterr().err, f"bapo: {answer}\n")]
    assert unquoted[0] == unquoted[1], "newer Pythons print choices without quotes"


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("rollout.n", "rollout.samples_per_prompt"),
        ("model.name", "model.path"),
        ("bapo.target", "bapo.rho0"),
        ("lr", "optimizer.lr"),
        ("batch_size", "rollout.prompts_per_step (counts prompts)"),
        ("n_samples", "rollout.samples_per_prompt"),
        ("learning_rate", "optimizer.lr"),
        ("actor.lr", "optimizer.lr"),
        ("OPTIMIZER.LR", "optimizer.lr"),
        ("actor_rollout_ref.rollout.n", "rollout.samples_per_prompt"),
    ],
)
def test_names_of_other_frameworks(capsys: pytest.CaptureFixture[str], theirs: str, ours: str) -> None:
    assert cli.main(["check", "demo", f"{theirs}=1"]) == 2
    assert capsys.readouterr().err == (f"bapo: no such setting: {theirs} (override {theirs}=1); did you mean {ours}?\n")


def test_a_model_is_no_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(demo_model_path())
    assert cli.main(["check", folder]) == 2
    assert f"`bapo init {folder} DATA` writes one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "completions"),
    [
        ("bapo rep", {"report ", "reproduce "}),
        ("bapo slurm demo --d", {"--dry-run "}),
        ("bapo train optimizer.l", {"optimizer.lr="}),
        ("bapo train rollout.overlap=", {"rollout.overlap=true ", "rollout.overlap=false "}),
        ("bapo check clusters/4x", {"clusters/4x8-h100 ", "clusters/4x8-h200 "}),
    ],
)
def test_completion(tmp_path: Path, line: str, completions: set[str]) -> None:
    output = tmp_path / "completions"
    environment = os.environ | {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(output),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "COMP_TYPE": "9",
    }
    subprocess.run([sys.executable, "-m", "bapo_megatron"], env=environment, timeout=HANG_S, check=False)
    assert {found.strip() for found in output.read_text().split("\n")} == {wanted.strip() for wanted in completions}


def test_completion_of_each_shell(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert cli.main(["completion", shell]) == 0
        assert "bapo" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["plan recipes/qwen3-32b-64k algorithms/bapo clusters/16x8-h100", "--help"])
@pytest.mark.parametrize("unbuffered", ["", "1"])  # the pipe breaks at the end, or at the first line
def test_a_reader_that_leaves_ends_the_output_without_a_traceback(
    tmp_path: Path, command: str, unbuffered: str
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "bapo_megatron", *command.split()],
        cwd=tmp_path,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=HANG_S,
    )
    os.close(writer)
    assert (done.returncode % 256, done.stderr) == (141, "")


def test_the_studies_are_found_from_any_folder(tmp_path: Path) -> None:
    done = bapo("reproduce", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^staleness +Figure 2: ", done.stdout, re.MULTILINE)


def test_a_package_without_the_studies_says_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verbs, "CHECKOUT", tmp_path)
    assert cli.main(["reproduce", "staleness"]) == 2
    assert capsys.readouterr().err == (
        "bapo: the studies are not installed: they are the folder studies/ of the source; run `python -m bapo_megatron "
        "reproduce` in a clone of it, see docs/reproduction.md\n"
    )


VERBS = {
    "train": "train demo",
    "check": "check demo",
    "plan": "plan demo",
    "report": "report nowhere",
    "version": "version",
    "help": "--help",
}


def in_shell(command: str, where: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    script = command.replace("bapo", BAPO, 1)
    environment = os.environ | variables
    return subprocess.run(
        ["bash", "-c", script], cwd=where, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False
    )


@pytest.mark.parametrize("command", VERBS.values(), ids=VERBS)
def test_output_that_is_closed_is_one_error(tmp_path: Path, command: str) -> None:
    done = in_shell(f"bapo {command} >&-", tmp_path)
    assert done.returncode == 2
    assert done.stderr == "bapo: standard output is closed; redirect it to a file or to /dev/null\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("verb", ["train", "check", "help"])
def test_output_that_is_full_is_one_error(tmp_path: Path, verb: str, unbuffered: str) -> None:
    done = in_shell(f"bapo {VERBS[verb]} >/dev/full", tmp_path, PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("bapo: cannot write to standard output: No space left on device; redirect it")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["train", "check", "report"])
def test_a_working_folder_that_is_gone_is_one_error(tmp_path: Path, verb: str) -> None:
    (tmp_path / "gone").mkdir()
    done = in_shell(f"cd gone && rmdir ../gone && exec $BAPO {VERBS[verb]}", tmp_path, BAPO=BAPO)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if "shell-init" not in line]
    assert line == "bapo: the working folder is gone (No such file or directory); change to one that exists"
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("check demoo 2>&-", 2),
        ("check demoo 2>/dev/full", 2),
        ("check demo >&- 2>&-", 2),
        ("check demo 2>&-", 0),
        ("check demo <&-", 0),
    ],
)
def test_errors_that_nobody_can_read_leave_the_exit_code(tmp_path: Path, command: str, code: int) -> None:
    done = in_shell(f"bapo {command}", tmp_path)
    assert done.returncode == code
    assert done.stderr == ""
    assert ("ranks = tensor 2" in done.stdout) == (code == 0), "an error is not printed among the results either"


@pytest.mark.parametrize("verb", ["check", "train"])
def test_too_few_open_files_are_one_error(tmp_path: Path, verb: str) -> None:
    settings = f"reward.concurrency=5 run.dir={tmp_path}/runs"  # a base of 160, 4 per judge, 2 for each of two ranks
    done = in_shell(f"ulimit -n 64; bapo {verb} demo {settings}", tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    what = "bapo: a process may have 64 files open here (ulimit -Hn), and trainer rank 0 needs up to 184; "
    assert line.startswith(what + "raise that hard limit to 184: in /etc")
    assert list(tmp_path.iterdir()) == []


def test_a_soft_limit_of_open_files_is_raised(tmp_path: Path) -> None:
    assert in_shell("ulimit -Sn 64; bapo check demo reward.concurrency=5", tmp_path).returncode == 0
