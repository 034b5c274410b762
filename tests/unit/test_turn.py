"""The lock that says whose turn it is to take the memory of shared GPUs."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from bapo_megatron.errors import UserError
from bapo_megatron.runtime import turn as turn_module
from bapo_megatron.runtime.turn import Turn
from tests.distributed import HANG_S

HOLDER = """
import sys
from pathlib import Path
from bapo_megatron.runtime.turn import Turn
turn = Turn(Path(sys.argv[1]))
assert turn.take(shared=sys.argv[2] == "shared", is_over=lambda: False)
print("held", flush=True)
sys.stdin.read()
"""


def at_once() -> bool:
    """Wait for nobody."""
    return True


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / ".turn"


@pytest.fixture
def turns(file: Path) -> Iterator[list[Turn]]:
    found = [Turn(file) for _ in range(3)]
    yield found
    for turn in found:
        turn.give()


def test_servers_share_it_and_the_trainer_holds_it_alone(turns: list[Turn]) -> None:
    trainer, first, second = turns
    assert first.take(shared=True, is_over=at_once)
    assert second.take(shared=True, is_over=at_once)
    assert not trainer.take(shared=False, is_over=at_once)
    first.give()
    assert not trainer.take(shared=False, is_over=at_once), "the second one is still starting"
    second.give()
    assert trainer.take(shared=False, is_over=at_once)
    assert not first.take(shared=True, is_over=at_once)
    assert not second.take(shared=False, is_over=at_once)
    assert [turn.is_held for turn in turns] == [True, False, False]
    trainer.give()
    assert second.take(shared=False, is_over=at_once)


def test_taking_or_giving_it_again_changes_nothing(turns: list[Turn]) -> None:
    trainer, server, _ = turns
    trainer.give()
    for _ in range(2):
        assert trainer.take(shared=False, is_over=at_once)
    trainer.give()
    assert server.take(shared=True, is_over=at_once), "given once, however often it was taken"
    trainer.give()
    assert not trainer.take(shared=False, is_over=at_once)


def test_it_is_asked_again_until_it_is_given_or_all_is_over(turns: list[Turn], monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, server, other = turns
    waits: list[float] = []

    def give_at_the_third(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            server.give()

    monkeypatch.setattr(turn_module, "time", types.SimpleNamespace(sleep=give_at_the_third))
    assert server.take(shared=True, is_over=at_once)
    assert trainer.take(shared=False, is_over=lambda: False)
    assert len(waits) == 3
    waits.clear()
    assert not other.take(shared=True, is_over=lambda: len(waits) == 2)
    assert len(waits) == 2


@pytest.mark.parametrize("how", ["shared", "alone"])
def test_a_holder_that_dies_gives_it(file: Path, turns: list[Turn], how: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(file), how], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert not turns[0].take(shared=False, is_over=at_once)
        taking = threading.Thread(target=turns[0].take, kwargs={"shared": False, "is_over": lambda: False})
        taking.start()
        holder.kill()
        taking.join(HANG_S)
        assert turns[0].is_held


def test_a_forked_child_does_not_keep_it(turns: list[Turn], monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that does not start a program has a duplicate of each open file."""
    trainer, server, _ = turns
    duplicates: list[int] = []
    lock = fcntl.flock

    def lock_and_fork(file: TextIO, how: int) -> None:
        lock(file, how)
        duplicates.append(os.dup(file.fileno()))

    with monkeypatch.context() as forking:
        forking.setattr(fcntl, "flock", lock_and_fork)
        assert trainer.take(shared=False, is_over=at_once)
    try:
        trainer.give()
        assert server.take(shared=True, is_over=at_once)
    finally:
        for duplicate in duplicates:
            os.close(duplicate)


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot open .*gone/\.turn: No such file or directory; set run\.dir"):
        Turn(tmp_path / "gone" / ".turn").take(shared=False, is_over=at_once)


def test_a_file_system_without_locks_stops_nobody(
    turns: list[Turn], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    for turn in turns:
        assert turn.take(shared=False, is_over=at_once)
        turn.give()
    assert "this file system cannot lock" in caplog.text
