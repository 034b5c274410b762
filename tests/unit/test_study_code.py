"""The code of a study: which commit it is, when it is none, and the worktree in which it runs."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bapo_megatron.cli import main
from bapo_megatron.errors import ConfigError, UserError
from studies import code, run
from studies.rows import RowFile
from studies.study import load_study
from tests.unit.test_reproduce import MINIMAL
from tests.unit.test_study_rows import make_row

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=Me", "-c", "user.email=me@example.com", "-c", "init.defaultBranch=main")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a checkout with the places of this one, and make it the checkout of the studies."""
    root = tmp_path / "repo"
    for name in ("bapo_megatron/a.py", "patches/b.py", "configs/c.toml", "studies/run.py", "studies/code.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x = 1\n")
    (root / "studies" / "base.toml").touch()
    (root / "studies" / "mine.toml").write_text(MINIMAL)
    git(root.parent, "init", "--quiet", str(root))
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "first")
    for name in ("GIT_DIR", "GIT_WORK_TREE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(code, "ROOT", root)
    monkeypatch.setattr(run, "ROOT", root)
    monkeypatch.setattr(run, "shipped_studies", lambda: {"mine": root / "studies" / "mine.toml"})
    monkeypatch.setattr(run, "load_study", lambda name: load_study(str(root / "studies" / f"{Path(name).stem}.toml")))
    monkeypatch.chdir(tmp_path)
    code.code_here.cache_clear()
    yield root
    code.code_here.cache_clear()


def code_now() -> str:
    code.code_here.cache_clear()
    return code.code_here()


@pytest.mark.parametrize("file", ["bapo_megatron/a.py", "bapo_megatron/new.py", "patches/b.py", "studies/base.toml"])
def test_code_that_is_not_committed_has_a_digest(repo: Path, file: str) -> None:
    commit = git(repo, "rev-parse", "HEAD")
    assert code_now() == commit
    assert code.is_commit(commit)
    names = {commit}
    for text in ("x = 2\n", "x = 3\n"):
        (repo / file).write_text(text)
        assert code.uncommitted() == f"{file}: not committed"
        assert not code.is_commit(code_now())
        names.add(code_now())
    assert len(names) == 3
    git(repo, "add", "--all")
    git(repo, "commit", "--quiet", "--message", "second")
    assert code_now() == git(repo, "rev-parse", "HEAD") != commit


@pytest.mark.parametrize("file", ["studies/mine.toml", "studies/results/mine.jsonl", "docs/page.md", "plugin.py"])
def test_other_files_are_no_code(repo: Path, file: str) -> None:
    commit = code_now()
    (repo / file).parent.mkdir(exist_ok=True)
    (repo / file).write_text("changed")
    assert code_now() == commit


def test_a_folder_without_git(repo: Path) -> None:
    for file in sorted((repo / ".git").rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    (repo / ".git").rmdir()
    assert code.uncommitted() == "this folder is not a git checkout"
    assert not code.is_commit(code_now())


def test_a_checkout_that_git_cannot_read_is_not_called_committed(repo: Path) -> None:
    (repo / ".git" / "index").write_bytes(b"damaged")
    assert code.uncommitted() == "git status failed in this checkout"
    assert not code.is_commit(code_now())


def test_a_worktree_keeps_the_code_and_the_tag_keeps_the_commit(repo: Path, tmp_path: Path) -> None:
    (repo / "models").mkdir()
    commit = code_now()
    place = code.worktree(commit, tmp_path / "code")
    (repo / "bapo_megatron" / "a.py").write_text("x = 2\n")
    git(repo, "commit", "--quiet", "--all", "--amend", "--message", "other")  # no branch has the first commit
    assert place == code.worktree(commit, tmp_path / "code")
    assert (place / "bapo_megatron" / "a.py").read_text() == "x = 1\n"
    assert (place / "bapo_megatron_patches" / "b.py").is_file()
    assert (place / "models").resolve() == repo / "models"
    assert git(repo, "tag", "--points-at", commit) == f"study-{commit[:12]}"
    subprocess.run(["rm", "-r", str(place)], check=True)
    assert (code.worktree(commit, tmp_path / "code") / "bapo_megatron" / "a.py").read_text() == "x = 1\n"
    (place / "bapo_megatron" / "a.py").write_text("x = 3\n")
    with pytest.raises(UserError, match=rf"{place} is no longer the code of commit {commit[:12]}; delete the folder"):
        code.worktree(commit, tmp_path / "code")


def test_a_commit_without_worktrees(repo: Path, tmp_path: Path) -> None:
    git(repo, "rm", "--quiet", "studies/code.py")
    git(repo, "commit", "--quiet", "--message", "old")
    with pytest.raises(ConfigError, match=r"commit \w{12} is too old for --at; check it out, and use its own"):
        code.worktree(code_now(), tmp_path / "code")


class BecameError(Exception):
    """What this process would have become."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        super().__init__(command)
        self.command, self.environment, self.folder = command, environment, Path.cwd()


def become(monkeypatch: pytest.MonkeyPatch, *names: str, at: str | None = None) -> BecameError:
    """Return what `bapo reproduce` becomes."""

    def execve(file: str, command: list[str], environment: dict[str, str]) -> None:
        raise BecameError(command, environment)

    monkeypatch.setattr(os, "execve", execve)
    folder = Path.cwd()
    try:
        with pytest.raises(BecameError) as became:
            run.reproduce(run.Options(names, False, Path("out"), Path("runs"), 3, 60.0, in_place=False, at=at))
    finally:
        os.chdir(folder)
    return became.value


def test_a_new_study_has_the_code_of_head(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    became, commit = become(monkeypatch, "mine"), code_now()
    place = tmp_path / "runs" / "code" / commit[:12]
    options = [
        "--output",
        str(tmp_path / "out"),
        "--runs",
        str(tmp_path / "runs"),
        "--jobs",
        "3",
        "--timeout-s",
        "60.0",
    ]
    start = [sys.executable, "-P", "-m", "bapo_megatron", "reproduce"]
    assert became.command == [*start, "mine", "--in-place", *options]
    assert became.environment["PYTHONPATH"].split(os.pathsep)[0] == str(place)
    assert became.folder == tmp_path, "a folder elsewhere stays"
    (repo / "deep").mkdir()
    monkeypatch.chdir(repo / "deep")
    became = become(monkeypatch, "../studies/mine.toml")
    assert became.folder == repo / "deep" / "runs" / "code" / commit[:12] / "deep"
    assert became.command[5] == str(repo / "deep" / "../studies/mine.toml")
    (repo / "bapo_megatron" / "a.py").write_text("x = 2\n")
    with pytest.raises(ConfigError, match=r"^bapo_megatron/a.py: not committed; commit it, .* or add --in-place$"):
        become(monkeypatch, "mine")


def test_a_study_that_has_begun_keeps_its_code(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, file = code_now(), RowFile(tmp_path / "out" / "mine.jsonl")
    file.begin(first)  # a kill before the first row
    (repo / "bapo_megatron" / "a.py").write_text("x = 2\n")
    assert str(tmp_path / "runs" / "code" / first[:12]) in become(monkeypatch, "mine").environment["PYTHONPATH"]
    assert "as in that commit" not in capsys.readouterr().out
    (repo / "studies" / "mine.toml").write_text(MINIMAL.replace("[3, 1]", "[3, 1, 2]"))
    become(monkeypatch, "mine")
    assert f"mine: as in that commit; to use it as it is in this checkout, give {repo}" in capsys.readouterr().out
    git(repo, "commit", "--quiet", "--all", "--message", "second")
    second = code_now()
    file.add(make_row("narrow", 3, code=first))
    became = become(monkeypatch, "mine", at="HEAD")
    assert str(tmp_path / "runs" / "code" / second[:12]) in became.environment["PYTHONPATH"]
    run.reproduce(run.Options((), False, tmp_path / "out", tmp_path / "runs", 2, 60.0))
    assert f"5 of 6 runs to do, about 2 min 30 s (code {first[:12]})" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("its_code", "at", "message"),
    [
        ("files-12", None, "mine has begun with code that was not committed; add --in-place, or begin"),
        ("d" * 40, None, r"this clone has no commit d{40}; fetch it \(`git fetch --tags`, with --unshallow"),
        ("d" * 40, "no-such-tag", "this clone has no commit no-such-tag; fetch it"),
    ],
)
def test_code_that_is_gone(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, its_code: str, at: str | None, message: str
) -> None:
    RowFile(tmp_path / "out" / "mine.jsonl").add(make_row(code=its_code))
    with pytest.raises(ConfigError, match=message):
        become(monkeypatch, "mine", at=at)
    assert not (tmp_path / "runs").exists()


def test_studies_of_different_commits(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = code_now()
    RowFile(tmp_path / "out" / "mine.jsonl").add(make_row(code=first))
    (repo / "studies" / "later.toml").write_text(MINIMAL)
    (repo / "bapo_megatron" / "a.py").write_text("x = 2\n")
    git(repo, "add", "--all")
    git(repo, "commit", "--quiet", "--message", "second")
    second = code_now()
    each = rf"\(mine {first[:12]}, later.toml {second[:12]}\)"
    with pytest.raises(ConfigError, match=f"belong to different commits {each}; give one at a time, or --at HEAD"):
        become(monkeypatch, "mine", "later.toml")
    every = {name: repo / "studies" / f"{name}.toml" for name in ("mine", "later")}
    monkeypatch.setattr(run, "shipped_studies", lambda: every)
    assert become(monkeypatch, "all", at=first).command[5] == "all"
    assert f"later: left out, commit {first[:12]} does not have it" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=rf"commit {first[:12]} has no study later; give its file, or --at HEAD"):
        become(monkeypatch, "later", at=first)


def test_two_ways_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    for other in ("--in-place", "--quick"):
        assert main(["reproduce", "staleness", "--at", "HEAD", other]) == 2
        assert "--in-place and --quick with this checkout; choose one" in capsys.readouterr().err
