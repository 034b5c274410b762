"""The recipes of docs/cookbook.md, from top to bottom in one folder, with the files that the page shows."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from bapo_megatron import cli
from tests.hang import HANG_S, PATIENT

PAGE = (Path(__file__).parents[2] / "docs" / "cookbook.md").read_text(encoding="utf-8")
SHORTER = {  # the lengths of runs, and what the page derives from them
    "num_steps = 30": "num_steps = 2",
    "train.num_steps=30": "train.num_steps=2",
    "train.num_steps=31": "train.num_steps=3",
    "train.num_steps=35": "train.num_steps=4",
    "train.num_steps=9": "train.num_steps=2",
    ".step == 31": ".step == 3",
    "-n 8 --limit 32": "-n 2 --limit 4",
}
TYPED = re.compile(r"(?:bapo|for|jq|python) ")


def files(page: str) -> dict[str, str]:
    """Return the files that a page shows, each named at the end of the paragraph before it."""
    return dict(re.findall(r"`(\w+\.(?:py|toml))`[^`\n]*:\n\n```\w+\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))


def write_files(page: str) -> None:
    """Write a page's files into the working folder."""
    for name, text in files(page).items():
        Path(name).write_text(text)


def scripts(page: str) -> list[str]:
    """Return the indented blocks of a page that a user types, with each command on one line."""
    blocks = re.findall(r"(?:^    .+\n)+", re.sub(r"(?ms)^```.*?^```$", "", page), re.MULTILINE)
    plain = [re.sub(r"(?m)^    ", "", block).replace("\\\n", "") for block in blocks]
    return [block for block in plain if TYPED.match(block)]


@pytest.fixture(autouse=True)
def _in_a_folder_with_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    write_files(PAGE)


def test_each_run_of_the_page_passes_its_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(files(PAGE)) == {"short.py", "short.toml", "plot.py"}
    assert all(text in PAGE for text in SHORTER)
    (make_file,) = (script for script in scripts(PAGE) if "> sums.jsonl" in script)
    subprocess.run(["bash", "-euc", make_file], check=True)
    assert len(Path("sums.jsonl").read_text().splitlines()) == 36
    given = [line for script in scripts(PAGE) for line in script.splitlines() if line.startswith("bapo train demo")]
    assert len(given) == 4
    for command in given:
        arguments = shlex.split(command, comments=True)[2:]
        assert cli.main(["check", *arguments, f"reward.timeout_s={HANG_S}"]) == 0, capsys.readouterr().err


@pytest.mark.slow
def test_the_recipes_from_top_to_bottom(tmp_path: Path) -> None:
    page = PAGE
    for long, short in SHORTER.items():
        page = page.replace(long, short)
    write_files(page)
    for script in scripts(page):
        if not shutil.which("jq"):
            script = re.sub(r"(?m)^jq .*\n", "", script)
        script = re.sub(r"(?m)^( *bapo (?:train|eval) [^#\n]*)", rf"\1 {' '.join(PATIENT)} ", script)
        done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, timeout=HANG_S, check=False)
        assert done.returncode == 0, f"{script}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert (tmp_path / "runs" / "comparison.html").exists()
    assert (tmp_path / "tokens.svg").exists()
    assert len((tmp_path / "runs" / "plain" / "samples.jsonl").read_text().splitlines()) == 2 + 2 + 128
