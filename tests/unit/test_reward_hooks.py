"""Judges of users: found by dotted path, kept from harming each other or the trainer. With real processes."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from pydantic import ValidationError

from bapo_megatron.config.schema import Config
from bapo_megatron.errors import UserError
from bapo_megatron.rewards import RewardScorer
from bapo_megatron.types import Prompt

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def hooks_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]))


@contextlib.contextmanager
def scorer_of(function: str, **reward: float) -> Iterator[RewardScorer]:
    before = judges()
    with RewardScorer(Config.model_validate({"reward": {"kind": f"reward_hooks:{function}", **reward}})) as scorer:
        yield scorer
    assert judges() == before, "a judge process outlives its scorer"


def judges() -> set[psutil.Process]:
    return {
        p
        for p in psutil.Process().children(recursive=True)
        if p.status() != psutil.STATUS_ZOMBIE and "bapo_megatron.rewards.worker" in p.cmdline()
    }


def items(*responses: str) -> list[tuple[Prompt, str]]:
    return [(Prompt(i, (1,), "a question", 7, "test"), response) for i, response in enumerate(responses)]


class TestStart:
    @pytest.mark.parametrize(
        ("kind", "message"),
        [
            ("nowhere_to_be_found:judge", "importing nowhere_to_be_found failed: ModuleNotFoundError"),
            ("reward_hooks:nothing_here", r"reward_hooks\.py has no nothing_here"),
            ("reward_hooks:NOT_CALLABLE", "of type int, which is not callable"),
            ("reward_hooks:wrong_parameter", r"it asks for reply. Expected: def judge\("),
            ("reward_hooks:positional", "it asks for response. Expected"),
            ("reward_hooks:no_response", "it does not ask for the response"),
        ],
    )
    def test_what_cannot_judge_is_told(self, kind: str, message: str) -> None:
        with pytest.raises(UserError, match=message):
            RewardScorer(Config.model_validate({"reward": {"kind": kind}}))

    def test_a_module_that_breaks_or_leaves_is_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
        for source, message in (("1 / 0", "ZeroDivisionError"), ("raise SystemExit(3)", "SystemExit: 3")):
            (tmp_path / "broken_hooks.py").write_text(source + "\n")
            with pytest.raises(UserError, match=f"importing broken_hooks failed: {message}"):
                RewardScorer(Config.model_validate({"reward": {"kind": "broken_hooks:judge"}}))

    @pytest.mark.parametrize("kind", ["maths", "my_module", "my_module:", ":f", "my-module:f", "a:b:c", ""])
    def test_other_names_are_refused_by_the_configuration(self, kind: str) -> None:
        with pytest.raises(ValidationError, match=r'must be "auto", .* or a path like'):
            Config.model_validate({"reward": {"kind": kind}})

    @pytest.mark.parametrize(("function", "reward"), [("instance", 3.0), ("instance.method", 3.0), ("part", 6.0)])
    def test_anything_callable_will_do(self, function: str, reward: float) -> None:
        with scorer_of(function) as scorer:
            assert scorer.score(items("3")) == [reward]

    def test_its_process_starts_without_torch(self) -> None:
        """Importing torch takes seconds, at each start of a judge."""
        with scorer_of("with_torch") as scorer:
            assert scorer.score(items("")) == [0.0]

    def test_the_trainer_does_not_import_it(self) -> None:
        with scorer_of("plain") as scorer:
            assert scorer.score(items("answer")) == [7.0]
        assert "reward_hooks" not in sys.modules


class TestPlain:
    def test_each_failure_costs_its_own_sample(self) -> None:
        raising = ("raise", "leave", "nan", "text", "nothing", "memory bomb")
        dying = ("exit", "segfault", "leave a child behind", "exit without an error")
        bad = [*raising, *dying, "hang"]
        mixed = [text for i, text in enumerate(bad) for text in (str(i), text)]
        with scorer_of("plain", timeout_s=8.0) as scorer:
            assert scorer.score(items(*mixed)) == [x for i in range(len(bad)) for x in (float(i), 0.0)]
            assert (scorer.num_errors, scorer.num_timeouts) == (len(raising) + len(dying), 1)
            metrics = scorer.metrics()
            assert metrics["reward/judged"] == len(mixed)
            assert metrics["reward/pending"] == 0
            assert metrics["reward/wait_s"] > 0
            assert scorer.metrics()["reward/wait_s"] == 0, "the mean is since the last call"

    def test_what_it_leaves_running_ends_with_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CHILDREN", str(tmp_path / "children"))
        with scorer_of("plain", timeout_s=60.0) as scorer:
            assert scorer.score(items("leave a child behind")) == [0.0]
        children = [int(pid) for pid in (tmp_path / "children").read_text().split()]
        assert len(children) == 2, "judged once more, as its process died"
        deadline_s = time.monotonic() + 60
        while any(is_alive(pid) for pid in children):
            assert time.monotonic() < deadline_s, "a child of a dead judge lives on"
            time.sleep(0.05)

    def test_bad_data_stops_the_run(self) -> None:
        with scorer_of("plain") as scorer, pytest.raises(UserError, match=r"^the data is wrong$"):
            scorer.score(items("1", "bad data"))

    def test_concurrency_bounds_the_processes(self) -> None:
        with scorer_of("plain", concurrency=3) as scorer:
            assert scorer.score(items(*map(str, range(50)))) == [float(i) for i in range(50)]
            assert 1 <= len(judges()) <= 3

    def test_memory_is_what_the_configuration_says(self) -> None:
        for memory_mib, reward in ((256, 0.0), (2048, 1.0)):
            with scorer_of("plain", process_memory_mib=memory_mib) as scorer:
                assert scorer.score(items("half a GiB")) == [reward]

    def test_callers_in_many_threads_keep_their_verdicts_while_processes_are_killed(self) -> None:
        done = threading.Event()
        num_killed = 0

        def kill_some() -> None:
            """Kill the oldest process, once some response was judged since the last kill: on a busy machine a process
            that is killed while it starts would be no fault of the pool's."""
            nonlocal num_killed
            num_seen = 0
            while not done.is_set():
                with contextlib.suppress(psutil.NoSuchProcess):
                    running = sorted(judges(), key=lambda process: process.create_time())
                    if running and scorer.num_judged > num_seen:
                        num_seen = scorer.num_judged
                        running[0].send_signal(signal.SIGKILL)
                        num_killed += 1
                time.sleep(0.5)

        with scorer_of("plain", concurrency=4) as scorer, ThreadPoolExecutor(6) as callers:
            killer = threading.Thread(target=kill_some)
            killer.start()
            try:
                parts = [[str(100 * caller + i) for i in range(100)] for caller in range(12)]
                found = list(callers.map(lambda part: scorer.score(items(*part)), parts, timeout=600))
            finally:
                done.set()
                killer.join()
            assert found == [[float(x) for x in part] for part in parts]
            assert num_killed
            assert scorer.num_judged == 1200
            assert (scorer.num_errors, scorer.num_timeouts) == (0, 0)

    def test_close_ends_a_call_that_waits(self) -> None:
        with scorer_of("plain", timeout_s=100.0) as scorer, ThreadPoolExecutor(1) as caller:
            waiting = caller.submit(scorer.score, items("hang"))
            while not scorer.metrics()["reward/pending"]:
                time.sleep(0.01)
            scorer.close()
            with pytest.raises(RuntimeError, match="closed"):
                waiting.result(timeout=60)

    def test_judges_end_with_a_trainer_that_is_killed(self) -> None:
        program = """
            import os
            from bapo_megatron.config.schema import Config
            from bapo_megatron.rewards import RewardScorer
            from bapo_megatron.types import Prompt
            if __name__ == "__main__":
                scorer = RewardScorer(Config.model_validate({"reward": {"kind": "reward_hooks:plain"}}))
                print("ready", flush=True)
                scorer.score([(Prompt(0, (1,), "", "", "test"), "hang")])
        """
        with subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE) as trainer:
            assert trainer.stdout is not None
            assert trainer.stdout.readline() == b"ready\n"
            (judge,) = psutil.Process(trainer.pid).children()
            before_s = judge.cpu_times().user
            while judge.cpu_times().user < before_s + 0.1:  # it hangs in a loop by then
                time.sleep(0.01)
            trainer.kill()
        _, alive = psutil.wait_procs([judge], timeout=60)
        assert not alive


class TestOnlyFailures:
    @pytest.mark.parametrize(
        ("function", "text", "said"),
        [
            ("plain", "raise", r'File ".*/reward_hooks.py", line \d+, in act\n.*\nRuntimeError: on purpose$'),
            (
                "plain",
                "nothing",
                r'reward_hooks.py", line \d+, in plain\n.*\nTypeError: a judge returns a number, not None',
            ),
            ("plain", "text", r"reward_hooks.py.* in plain\n.*\nTypeError: a judge returns a number, not str: '1'$"),
            ("plain", "table", r"reward_hooks.py.* in plain\n.*\nTypeError: a judge returns a number, not dict: \{"),
            ("plain", "block", r"no verdict in 0\.5 s in plain \(.*/reward_hooks.py, line \d+\)$"),
            ("networked", "wait", r'reward_hooks.py", line \d+, in networked\n'),
        ],
    )
    def test_all_first_verdicts_failing_ends_the_run(self, function: str, text: str, said: str) -> None:
        config = {
            "reward": {"kind": f"reward_hooks:{function}", "timeout_s": 0.5 if text in ("block", "wait") else 60.0}
        }
        config["rollout"] = {"prompts_per_step": 1, "samples_per_prompt": 4}
        with RewardScorer(Config.model_validate(config)) as scorer:
            assert scorer.score(items(text, text)) == [0.0, 0.0], "not yet as many as the first step has"
            with pytest.raises(UserError, match=r"failed on all of the first 4 responses.*\n") as caught:
                scorer.score(items(text, text))
        assert re.search(said, str(caught.value)), str(caught.value)
        assert "rewards/worker.py" not in str(caught.value)

    def test_one_verdict_is_enough_to_go_on_and_the_share_is_of_the_step(self) -> None:
        rollout = {"prompts_per_step": 1, "samples_per_prompt": 4}
        config = Config.model_validate({"reward": {"kind": "reward_hooks:plain"}, "rollout": rollout})
        with RewardScorer(config) as scorer:
            scorer.score(items("raise", "nothing", "raise", "1"))
            assert scorer.metrics()["reward/failed_share"] == 0.75
            assert scorer.recent_failure is not None
            assert re.fullmatch(
                r"RuntimeError\('on purpose'\) \(reward_hooks.py, line \d+\)", scorer.recent_failure.message
            )
            scorer.score(items("raise", "nothing", "text", "raise"))
            assert scorer.metrics()["reward/failed_share"] == 1.0, "no first batch any more"
            scorer.score(items("1"))
            assert scorer.metrics()["reward/failed_share"] == 0.0
            assert scorer.recent_failure is None


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class TestAsync:
    def test_many_are_judged_at_once(self) -> None:
        with scorer_of("together", timeout_s=60.0) as scorer:
            assert scorer.score(items(*map(str, range(60)))) == [float(i) for i in range(60)]
            assert len(judges()) == 1

    def test_concurrency_bounds_how_many(self) -> None:
        with scorer_of("in_time", concurrency=2) as scorer:
            began_s = time.monotonic()
            scorer.score(items(*"1234"))
            assert time.monotonic() - began_s >= 2 * 0.3

    def test_each_has_its_own_deadline(self) -> None:
        with scorer_of("networked", timeout_s=2.0) as scorer:
            began_s = time.monotonic()
            assert scorer.score(items("wait", "1", "raise", "wait", "2", "nan")) == [0.0, 1.0, 0.0, 0.0, 2.0, 0.0]
            assert (scorer.num_timeouts, scorer.num_errors) == (2, 2)
            assert time.monotonic() - began_s < 60
            assert len(judges()) == 1, "a deadline that the judge keeps costs no process"

    def test_a_crash_costs_its_own_sample_only(self) -> None:
        with scorer_of("in_time") as scorer:
            assert scorer.score(items("1", "exit", "2", "segfault", "3")) == [1.0, 0.0, 2.0, 0.0, 3.0]
            assert (scorer.num_errors, scorer.num_timeouts) == (2, 0)
            assert scorer.score(items("4")) == [4.0]

    @pytest.mark.slow
    def test_blocking_the_event_loop_costs_its_own_sample_only(self) -> None:
        with scorer_of("in_time", timeout_s=1.0) as scorer:
            assert scorer.score(items("1", "block", "2")) == [1.0, 0.0, 2.0]
            assert (scorer.num_errors, scorer.num_timeouts) == (0, 1)
