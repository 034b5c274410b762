"""The ledger's conservation law, and that it notices wrong books."""

import pytest

from bapo_megatron.rollout.ledger import Ledger, LedgerError
from bapo_megatron.types import NeedsEnvironment, NeedsTokens, Prompt, Sample, Segment, TurnEnd

PROMPT = Prompt(0, (1, 2), "3+5=", "1", "chains")


def sample(sample_id: str, num_tokens: int, turn_end: TurnEnd | None = None) -> Sample:
    segments = (Segment.sampled(0, 0, (3,) * num_tokens, (-0.5,) * num_tokens),) if num_tokens else ()
    return Sample.of(sample_id, PROMPT, segments, NeedsEnvironment(turn_end) if turn_end else NeedsTokens())


def test_a_sample_goes_its_way() -> None:
    ledger = Ledger()
    ledger.admit("a")
    ledger.start("a")
    ledger.stop(sample("a", 5))
    ledger.check([sample("a", 5)])
    assert ledger.counts()["partial"] == 1
    ledger.start("a")
    ledger.stop(sample("a", 9, "stop"))
    ledger.check([sample("a", 9, "stop")])
    ledger.train("a")
    ledger.check([])
    assert ledger.num_tokens == {"generated": 9, "trained": 9}


def test_an_aborted_request_without_tokens_is_queued_again() -> None:
    ledger = Ledger()
    ledger.admit("a")
    ledger.start("a")
    ledger.stop(sample("a", 0))
    assert ledger.counts()["queued"] == 1
    ledger.check([sample("a", 0)])


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ([], "samples lost: \\['a'\\]"),
        ([("a", 5), ("a", 5)], "buffered twice"),
        ([("a", 5), ("b", 0)], "without an entry: \\['b'\\]"),
        ([("a", 4)], "5 tokens generated, but 0 trained \\+ 4 buffered"),
    ],
)
def test_wrong_books_are_noticed(held: list[tuple[str, int]], message: str) -> None:
    ledger = Ledger()
    ledger.admit("a")
    ledger.start("a")
    ledger.stop(sample("a", 5))
    with pytest.raises(LedgerError, match=message):
        ledger.check([sample(*h) for h in held])


def test_moves_that_make_no_sense_are_refused() -> None:
    ledger = Ledger()
    ledger.admit("a")
    with pytest.raises(LedgerError, match="admitted twice"):
        ledger.admit("a")
    with pytest.raises(LedgerError, match="is queued, not finished"):
        ledger.train("a")
    ledger.start("a")
    with pytest.raises(LedgerError, match="cannot go from running to running"):
        ledger.start("a")
    ledger.stop(sample("a", 3, "stop"))
    with pytest.raises(LedgerError, match="cannot go from finished to running"):
        ledger.start("a")
    ledger.train("a")
    with pytest.raises(LedgerError, match="not here"):
        ledger.train("a")
    with pytest.raises(LedgerError, match="cannot be dropped"):
        ledger.drop("a", "stale")


def test_a_response_cannot_shrink() -> None:
    ledger = Ledger()
    ledger.admit("a")
    ledger.start("a")
    ledger.stop(sample("a", 5))
    ledger.start("a")
    with pytest.raises(LedgerError, match="shrank by 2 tokens"):
        ledger.stop(sample("a", 3))


def test_state_survives_a_restart_and_running_samples_are_queued_again() -> None:
    ledger = Ledger()
    for sample_id in "abc":
        ledger.admit(sample_id)
    ledger.start("a")
    ledger.stop(sample("a", 5))
    ledger.start("a")  # running, with 5 tokens from an earlier round
    ledger.start("b")  # running, without any
    restored = Ledger()
    restored.load_state_dict(ledger.state_dict())
    assert restored.counts() == {"queued": 2, "running": 0, "partial": 1, "finished": 0, "trained": 0, "dropped": 0}
    restored.check([sample("a", 5), sample("b", 0), sample("c", 0)])
