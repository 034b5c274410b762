"""`bapo check` calls a user's loss once; the last line of a dead rank's log."""

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from bapo_megatron.cli import main
from bapo_megatron.monitor.stall import last_words
from tests.hang import HANG_S

Checked = Callable[..., tuple[int, str]]

GOOD = "-(inputs.log_probs_R * inputs.batch.advantages_R).where(inputs.batch.mask_R, 0.0)"
LOSSES = {
    "typo": "def loss(inputs, options):\n    return inputs.plain(-inputs.logprob)\n",
    "helper": """
        def helper(x):
            return x.reshape(7)

        def loss(inputs, options):
            return inputs.plain(helper(inputs.log_probs_R))
        """,
    "scalar": "def loss(inputs, options):\n    return -inputs.log_probs_R.sum()\n",
    "short": "def loss(inputs, options):\n    return inputs.plain(-inputs.log_probs_R[:3])\n",
    "constant": "def loss(inputs, options):\n    return inputs.plain(inputs.batch.advantages_R)\n",
    "nan": "def loss(inputs, options):\n    return inputs.plain(inputs.bounds.low * inputs.log_probs_R)\n",
    "options": f"def loss(inputs, options):\n    return inputs.plain({GOOD} * options['scale'])\n",
    "good": f"def loss(inputs, options):\n    return inputs.plain({GOOD})\n",
    "one": f"def loss(inputs):\n    return inputs.plain({GOOD})\n",
    "metric": f"""
        from bapo_megatron.config.losses import Loss
        from bapo_megatron.metrics import Metric

        def function(inputs, options):
            return inputs.plain({GOOD})

        loss = Loss(function, metrics=(Metric("loss/cut", "share", "Cut.", tokens="mean", of="cut_R"),))
        """,
}


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Checked:
    monkeypatch.syspath_prepend(tmp_path)

    def check(name: str, *settings: str) -> tuple[int, str]:
        (tmp_path / f"loss_{name}.py").write_text(textwrap.dedent(LOSSES[name]))
        code = main(["check", "demo", f"loss.name=loss_{name}:loss", *settings])
        return code, capsys.readouterr().err

    return check


@pytest.mark.parametrize(
    ("name", "answers"),
    [
        (
            "typo",
            ["'LossInputs' object has no attribute 'logprob'", "loss_typo.py:2: return inputs.plain(-inputs.logprob)"],
        ),
        ("helper", ["RuntimeError: shape '[7]' is invalid", "loss_helper.py:3: return x.reshape(7)"]),
        ("scalar", ["returned a Tensor of shape []", "`return inputs.plain(loss_R)`", "loss_scalar.py:1)"]),
        ("short", ["returned a loss_R of [3]", "not of [4]"]),
        ("constant", ["does not depend on inputs.log_probs_R"]),
        ("options", ["KeyError: 'scale'", "loss_options.py:2: "]),
        ("metric", ["returned a TokenLoss without cut_R, which loss/cut needs"]),
    ],
)
def test_a_mistake_is_named_with_its_line(checked: Checked, name: str, answers: list[str]) -> None:
    code, error = checked(name)
    assert code == 2
    assert len(error.splitlines()) == 1
    assert all(answer in error for answer in answers), error


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("good", []),
        ("good", ["loss.search_bounds=true"]),
        ("good", ["loss.kl_coef=0.1"]),
        ("one", []),
        ("options", ["loss.options.scale=2.0"]),
    ],
)
def test_a_loss_without_a_mistake_passes(checked: Checked, name: str, settings: list[str]) -> None:
    assert checked(name, *settings) == (0, "")


def test_a_loss_that_is_nan_is_a_warning(checked: Checked) -> None:
    code, error = checked("nan")
    assert code == 0
    assert error.startswith('bapo: warning: loss.name="loss_nan:loss" is [nan, nan, nan, nan] on a made-up micro-batch')


def test_options_of_a_function_without_any_are_refused(checked: Checked) -> None:
    code, error = checked("one", "loss.options.scale=2.0")
    assert code == 2
    assert "it has no parameter for loss.options" in error


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (
            'starting\nTraceback (most recent call last):\n  File "a.py"\nValueError: no\nlater warning\n',
            "ValueError: no",
        ),
        (
            "Traceback (most recent call last):\n  x\nKeyError: 1\n\nDuring handling ...\n\n"
            "Traceback (most recent call last):\n  y\nmy.Error: 2\n",
            "my.Error: 2",
        ),
        ("Fatal Python error: Segmentation fault\n\n", "Fatal Python error: Segmentation fault"),
        ("Traceback (most recent call last):\n  cut off", "  cut off".strip()),
        ("it is full\n2026-11-26 21:11:07,512 INFO megatron.core: Detected Megatron Core, using FSDP.\n", "it is full"),
        ("it is full\n[INFO|a.py:3] 2026 >> ready\na.py:7: UserWarning: old\n  warn(\n", "a.py:7: UserWarning: old"),
        ("INFO: 1 ready\nDEBUG:b:2\n", ""),
        ("the word INFORMATION stays\n", "the word INFORMATION stays"),
        ("x" * 80 + " INFO\n", "x" * 80 + " INFO"),
        ("", ""),
        (None, ""),
    ],
)
def test_the_last_words_of_a_rank(tmp_path: Path, log: str | None, words: str) -> None:
    if log is not None:
        (tmp_path / "trainer-1.log").write_text(log)
    assert last_words(tmp_path / "trainer-1.log") == words


def test_a_rank_that_fails_tells_why_on_the_terminal(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.unit.launched", str(tmp_path), "failing"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, cwd=root, check=False)
    assert done.returncode == 1
    ended, words, *_, saved, _ = done.stderr.splitlines()[-5:]
    assert saved == "bapo: nothing is saved yet; the next start begins at step 1"
    assert ended.startswith("bapo: trainer rank 0 ended with exit code 1; its log: ")
    assert words == r"bapo: it ends with: RuntimeError: no such\tthing"
