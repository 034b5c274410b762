"""Words of policies, programs and servers on a terminal: nothing in them controls it, and nothing readable is lost."""

import contextlib
import io
import re
import subprocess
import sys
import unicodedata
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_megatron.engines.embedded import chat
from bapo_megatron.engines.embedded.text import TextModel
from bapo_megatron.errors import escaped_lines
from bapo_megatron.monitor.console import Console, Screen
from bapo_megatron.runtime.heartbeat import TRAINER, Heartbeat
from bapo_megatron.runtime.output import Output

ATTACKS = (
    "\x1b]0;owned\x07",  # the title
    "\x1b]52;c;ZWNobyBoYWNrZWQ=\x07",  # the clipboard
    "\x1b[2J\x1b[H",
    "\x9b2J",  # the same as one character
    "\x1bc",
    "\x1b]8;;http://evil\x1b\\here",
    "right\rwrong",
    "a\x08b\x7f",
    "\x1b[A\x1b[K",
    "\u202egnp.exe",
    "\0",
)
WORDS = st.lists(st.sampled_from(ATTACKS) | st.text(max_size=8), max_size=6).map("".join)
STYLES = re.compile(r"\x1b\[[0-9;]*m|\x1b\[\?25[lh]|\r?\x1b\[1?[AK]|\x1b\[2K|\r(?!\n)")  # what Rich writes itself


def controls(text: str) -> str:
    """Return the characters that control a terminal or reorder writing, except line breaks and tabs."""
    harmful = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    text = text.replace("\r\n", "\n")
    return "".join(c for c in text if (unicodedata.category(c) == "Cc" and c not in "\n\t") or c in harmful)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@given(WORDS)
def test_no_word_controls_a_terminal(words: str) -> None:
    stream = io.StringIO(newline="")
    output = Output(stream)
    print(words, file=cast(Any, output))
    output.writelines([words, "\n"])
    assert not controls(stream.getvalue())
    assert controls(escaped_lines(words, with_bars=True)).replace("\x1b", "").replace("\r", "") == ""


@given(st.text(st.characters(exclude_categories=("Cc", "Cf", "Cs")) | st.sampled_from("\n\t\u200d\u200c")))
def test_text_of_every_script_is_shown_as_it_is(words: str) -> None:
    assert escaped_lines(words) == escaped_lines(words, with_bars=True) == words
    assert escaped_lines(f"{words}\r\n") == f"{words}\r\n"


def test_a_progress_bar_is_redrawn_and_nothing_more() -> None:
    assert escaped_lines("\r50 %\x1b[A\x1b[2J\x1b[1A", with_bars=True) == "\r50 %\x1b[A\\x1b[2J\\x1b[1A"


@pytest.mark.parametrize("stream_type", [io.StringIO, Terminal])
@given(words=WORDS)
def test_neither_a_warning_nor_a_stage_controls_it(stream_type: type[io.StringIO], words: str) -> None:
    stream, heartbeat = stream_type(), Heartbeat()
    heartbeat.beat(TRAINER, words)
    with Console("auto", 1, stream=stream, heartbeat=heartbeat) as console:
        console.warn(words)
        console.note(words)
    screen = Screen(stream)
    screen.facts({"name": words})
    with screen.stage() as show:
        show(words)
    shown = stream.getvalue()
    assert not controls(STYLES.sub("", shown) if stream.isatty() else shown)


class ScriptedReply:
    """A reply whose text is the prompt's; the real one needs a model."""

    finish_reason = "stop"
    sequence = SimpleNamespace(output_ids=[])
    words = ""

    def __init__(self, *_: Any) -> None:
        pass

    async def pieces(self) -> AsyncIterator[str]:
        for character in self.words:  # codes are cut anywhere
            yield character


@pytest.mark.parametrize("words", ATTACKS)
def test_neither_the_model_nor_its_tools_control_it_in_a_chat(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "Reply", ScriptedReply)
    monkeypatch.setattr(ScriptedReply, "words", f"first\n\t{words}")
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    template = SimpleNamespace(ids=lambda *_, **__: ([], None))
    model = SimpleNamespace(
        tokenizer=SimpleNamespace(chat_template="x"), name="m", template=template, chat_stop_ids=(),
        room=lambda _: 1, encode_chat=lambda *_: [1], engine=SimpleNamespace(call=done),
    )  # fmt: skip
    tools = chat.ChatTools(lambda *_: ([{"role": "tool", "name": words, "content": words}], None), (), 1)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        chat.chat(cast(TextModel, model), temperature=1.0, system=None, tools=tools)
    said = output.getvalue()
    assert not controls(said)
    assert said.startswith("first\n\t")
    assert "[" in said


def done(*_: Any, **__: Any) -> Any:
    future: Any = chat.concurrent.futures.Future()
    future.set_result(None)
    return future


def test_a_traceback_does_not_control_it() -> None:
    code = f"""
import sys
from bapo_megatron import cli
def fail(*_): raise RuntimeError({"".join(ATTACKS)!r})
cli._main = fail
sys.exit(cli.main(["version"]))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert run.returncode == 1
    assert "RuntimeError: " in run.stderr.decode()
    assert not controls(run.stderr.decode())
