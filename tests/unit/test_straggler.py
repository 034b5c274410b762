"""Slow ranks."""

from bapo_megatron.runtime.straggler import LocalTime, StragglerAlarm, straggler_metrics


def test_the_slowest_rank_is_compared_with_the_median() -> None:
    found = straggler_metrics([1.0, 1.2, 3.0, 1.0])
    assert found == {
        "straggler/ratio": 3.0,
        "straggler/rank": 2.0,
        "straggler/slowest_s": 3.0,
        "straggler/median_s": 1.0,
    }
    assert straggler_metrics([1.0, 2.0])["straggler/ratio"] == 2
    assert straggler_metrics([1.0]) == straggler_metrics([0.0, 0.0]) == {}


def test_only_a_rank_that_stays_slow_is_told_and_once() -> None:
    alarm = StragglerAlarm()
    slow, fast, other = straggler_metrics([1, 1, 2]), straggler_metrics([1, 1, 1.1]), straggler_metrics([2, 1, 1])
    steps = [slow, other, slow, fast, other, slow, slow, slow, fast, fast, fast, fast, fast, slow, slow, slow]
    told = [alarm.observe(step) is not None for step in steps]
    assert [i for i, t in enumerate(told) if t] == [6, 15], "3 of 5 at the seventh, and again after five fast ones"
    assert alarm.observe({}) is None
    again = StragglerAlarm()
    warning = [again.observe(slow) for _ in range(3)][-1]
    assert warning is not None
    assert "trainer rank 2 is slow: its own passes take 2.00 s, 2.0 times the median rank's (1.00 s)" in warning


def test_local_time_leaves_out_what_comes_between() -> None:
    moments = iter([10.0, 13.0, 20.0, 21.5])
    clock = LocalTime(clock=lambda: next(moments))
    for _ in range(2):
        with clock.running():
            pass
    assert clock.take() == 3.0 + 1.5
    assert clock.take() == 0
