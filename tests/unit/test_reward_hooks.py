"""User judges: found by dotted path, kept from harming each other or the trainer. With real processes."""

import contextlib
import math
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from bapo_megatron.config.schema import Config
from bapo_megatron.errors import UserError
from bapo_megatron.preflight.checks.all import check_settings
from bapo_megatron.resolved import resolve
from bapo_megatron.rewards import RewardScorer, worker_pool
from bapo_megatron.rewards.verdicts import JudgeSpec, as_reply, fields_of
from bapo_megatron.rewards.worker_pool import Worker, WorkerLost, WorkerPool
from bapo_megatron.types import Prompt
from tests.distributed import HANG_S
from tests.unit.reward_hooks import NUM_BESIDE_A_CRASH, NUM_TOGETHER

HERE = Path(__file__).parent
Process = subprocess.Popen  # `started` replaces that name


@pytest.fixture(autouse=True)
def hooks_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]))


@pytest.fixture(autouse=True)
def deadlines_are_for_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("START_TIMEOUT_S", "GRACE_S", "END_TIMEOUT_S"):
        monkeypatch.setattr(worker_pool, name, HANG_S)


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Return the pipe through which judges speak to the test."""
    os.mkfifo(tmp_path / "said")
    reader = os.open(tmp_path / "said", os.O_RDONLY | os.O_NONBLOCK)
    monkeypatch.setenv("SAID", str(tmp_path / "said"))
    yield reader
    os.close(reader)


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that records which responses were judged before."""
    (tmp_path / "seen").mkdir()
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    return tmp_path / "seen"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Return the judge processes that a test starts."""
    processes, start = [], subprocess.Popen

    def popen(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        processes.append(start(*args, **options))
        return processes[-1]

    monkeypatch.setattr(worker_pool.subprocess, "Popen", popen)
    return processes


def read_line(reader: int) -> str:
    """Return the next line of any judge; "" once all that have spoken are dead."""
    line = b""
    while not line.endswith(b"\n"):
        assert select.select([reader], [], [], HANG_S)[0], "no judge says anything"
        if not (byte := os.read(reader, 1)):
            break
        line += byte
    return line.decode().strip()


def strike_only(response: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a short deadline for this response, which is never answered; the others do not suffer from a busy machine."""
    ask = Worker.ask

    async def ask_with(worker: Worker, fields: dict[str, Any], limit_s: float) -> dict[str, Any]:
        return await ask(worker, fields, 0.5 if fields["response"] == response else limit_s)

    monkeypatch.setattr(Worker, "ask", ask_with)


@contextlib.contextmanager
def scorer_of(function: str, **reward: Any) -> Iterator[RewardScorer]:
    before = judges()
    config = {"reward": {"kind": f"reward_hooks:{function}", "timeout_s": HANG_S, **reward}}
    with RewardScorer(Config.model_validate(config)) as scorer:
        yield scorer
    assert judges() <= before, "a judge process outlives its scorer"


def judges() -> set[psutil.Process]:
    return {p for p in psutil.Process().children(recursive=True) if is_judge(p)}


def is_judge(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and "bapo_megatron.rewards.worker" in process.cmdline()[:4]
    except psutil.NoSuchProcess:  # gone meanwhile, or a zombie
        return False


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

    def test_a_judge_that_cannot_be_built_has_ended(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[subprocess.Popen[bytes]]
    ) -> None:
        """This holds even if it does not end by itself."""
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
        (tmp_path / "stubborn_hooks.py").write_text(
            "import os, signal\nos._exit = lambda code: signal.pause()\n1 / 0\n"
        )
        with pytest.raises(UserError, match="ZeroDivisionError"):
            RewardScorer(Config.model_validate({"reward": {"kind": "stubborn_hooks:judge"}}))
        assert [process.returncode for process in started] == [-signal.SIGKILL]

    @pytest.mark.parametrize("kind", ["maths", "my_module", "my_module:", ":f", "my-module:f", "a:b:c", ""])
    def test_other_names_are_refused_by_the_configuration(self, kind: str) -> None:
        with pytest.raises(ValidationError, match=r'must be "auto", .* or a path like'):
            Config.model_validate({"reward": {"kind": kind}})

    @pytest.mark.parametrize(("function", "reward"), [("instance", 3.0), ("instance.method", 3.0), ("part", 6.0)])
    def test_anything_callable_will_do(self, function: str, reward: float) -> None:
        with scorer_of(function) as scorer:
            assert scorer.score(items("3")) == [reward]

    def test_its_process_starts_without_torch(self) -> None:
        """Importing torch takes seconds at each start of a judge."""
        with scorer_of("with_torch") as scorer:
            assert scorer.score(items("")) == [0.0]

    def test_the_trainer_does_not_import_it(self) -> None:
        with scorer_of("plain") as scorer:
            assert scorer.score(items("answer")) == [7.0]
        assert "reward_hooks" not in sys.modules


class TestPlain:
    def test_each_failure_costs_its_own_sample(self, monkeypatch: pytest.MonkeyPatch) -> None:
        raising = ("raise", "leave", "nan", "text", "nothing", "memory bomb")
        dying = ("exit", "segfault", "leave a child behind", "exit without an error")
        bad = [*raising, *dying, "hang"]
        mixed = [text for i, text in enumerate(bad) for text in (str(i), text)]
        strike_only("hang", monkeypatch)
        with scorer_of("plain") as scorer:
            assert scorer.score(items(*mixed)) == [x for i in range(len(bad)) for x in (float(i), 0.0)]
            assert (scorer.num_errors, scorer.num_timeouts) == (len(raising) + len(dying), 1)
            metrics = scorer.metrics()
            assert metrics["reward/judged"] == len(mixed)
            assert metrics["reward/pending"] == 0
            assert metrics["reward/wait_s"] > 0
            assert scorer.metrics()["reward/wait_s"] == 0, "the mean covers the time since the last call"

    def test_processes_that_die_while_they_are_idle_cost_no_verdict(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A process with several threads takes a moment to die, in which it looks alive."""
        ask, idle = Worker.ask, set()

        async def ask_with(worker: Worker, fields: dict[str, Any], limit_s: float) -> dict[str, Any]:
            if fields["response"] == "3" and worker in idle:
                worker.kill()
                raise WorkerLost("it died before it was asked")
            idle.add(worker)
            return await ask(worker, fields, limit_s)

        monkeypatch.setattr(Worker, "ask", ask_with)
        with scorer_of("plain", concurrency=2) as scorer:
            assert scorer.score(items("1", "2")) == [1.0, 2.0]
            assert len(idle) == 2
            assert scorer.score(items("3")) == [3.0]

    def test_close_waits_for_a_process_that_has_just_been_killed(
        self, monkeypatch: pytest.MonkeyPatch, started: list[subprocess.Popen[bytes]]
    ) -> None:
        """Here the kernel kills it only when someone waits for its end."""
        put_off: list[subprocess.Popen[bytes]] = []
        terminate, ended = Process.terminate, Worker.ended

        async def ended_late(worker: Worker) -> None:
            worker.kill()
            while put_off:
                terminate(put_off.pop())
            await ended(worker)

        monkeypatch.setattr(Process, "terminate", lambda process: put_off.append(process))
        monkeypatch.setattr(Worker, "ended", ended_late)
        strike_only("hang", monkeypatch)
        with scorer_of("plain") as scorer:
            assert scorer.score(items("hang")) == [0.0]
        assert [process.returncode for process in started] == [-signal.SIGKILL]

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
    def test_a_judge_that_is_killed_ended_by_its_signal(self, said: int, number: signal.Signals) -> None:
        with scorer_of("plain") as scorer, ThreadPoolExecutor(1) as caller:
            judging = caller.submit(scorer.verdicts, items("wait to be killed"))
            with open(os.environ["SAID"], "w"):  # keeps the pipe open when a judge ends
                for _ in range(2):
                    os.kill(int(read_line(said)), number)
            (verdict,) = judging.result(HANG_S)
        assert (verdict.end.reward, verdict.end.problem) == (0.0, "error")
        assert verdict.end.message == f"its process died, twice: it ended with code -{number:d}"

    def test_what_it_leaves_running_ends_with_it(self, said: int) -> None:
        with scorer_of("plain") as scorer:
            assert scorer.score(items("leave a child behind")) == [0.0]
        assert [read_line(said) for _ in range(3)] == ["one", "one", ""], "judged twice, and both children have ended"

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

    def test_callers_in_many_threads_keep_their_verdicts_while_processes_are_killed(
        self, said: int, seen: Path
    ) -> None:
        """One process per caller is killed while it judges; at the end, all of them are killed while idle."""
        parts = [[100 * caller + i for i in range(100)] for caller in range(12)]
        responses = [[f"{x}: wait to be killed" if x % 100 == 50 else str(x) for x in part] for part in parts]

        def kill_each() -> None:
            with open(os.environ["SAID"], "w"):  # keeps the pipe open when a judge ends
                for _ in parts:
                    os.kill(int(read_line(said)), signal.SIGKILL)

        with scorer_of("killed_once", concurrency=4) as scorer, ThreadPoolExecutor(7) as threads:
            killing = threads.submit(kill_each)
            found = list(threads.map(lambda part: scorer.score(items(*part)), responses, timeout=HANG_S))
            killing.result(HANG_S)
            assert found == [[float(x) for x in part] for part in parts]
            assert len(list(seen.iterdir())) == 12
            for process in (idle := judges()):
                process.kill()
            assert idle
            wait_until_none(judges)
            assert scorer.score(items("1", "2")) == [1.0, 2.0]
            assert scorer.num_judged == 1202
            assert (scorer.num_errors, scorer.num_timeouts) == (0, 0)

    def test_close_ends_a_call_that_waits(self, said: int) -> None:
        with scorer_of("plain") as scorer, ThreadPoolExecutor(1) as caller:
            waiting = caller.submit(scorer.score, items("hang"))
            read_line(said)
            assert scorer.metrics()["reward/pending"] == 1
            scorer.close()
            with pytest.raises(RuntimeError, match="closed"):
                waiting.result(timeout=HANG_S)

    def test_close_ends_a_call_that_arrives_meanwhile(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The call has found the pool open; then another thread closes it, or tries to."""
        submit = worker_pool.asyncio.run_coroutine_threadsafe
        at_the_gate = threading.Event()

        class Gate:
            """A lock that reports when a thread must wait for it."""

            def __init__(self) -> None:
                self._lock = threading.Lock()

            def __enter__(self) -> None:
                if not self._lock.acquire(blocking=False):
                    at_the_gate.set()
                    self._lock.acquire()

            def __exit__(self, *_: object) -> None:
                self._lock.release()

        config = Config.model_validate({"reward": {"kind": "reward_hooks:plain", "timeout_s": HANG_S}})
        pool = WorkerPool(JudgeSpec.of(config), concurrency=None)
        with contextlib.closing(pool), ThreadPoolExecutor(2) as threads:

            def close_first(coroutine: Any, loop: Any) -> Future[Any]:
                monkeypatch.setattr(worker_pool.asyncio, "run_coroutine_threadsafe", submit)
                closing = threads.submit(pool.close)
                closing.add_done_callback(lambda _: at_the_gate.set())
                assert at_the_gate.wait(HANG_S)
                return submit(coroutine, loop)

            monkeypatch.setattr(pool, "gate", Gate())
            monkeypatch.setattr(worker_pool.asyncio, "run_coroutine_threadsafe", close_first)
            waiting = threads.submit(pool.judge, [fields_of(*item) for item in items("hang")])
            with pytest.raises(RuntimeError, match="closed"):
                waiting.result(timeout=HANG_S)
        assert not judges()

    def test_judges_end_with_a_trainer_that_is_killed(self, said: int) -> None:
        program = f"""
            from bapo_megatron.config.schema import Config
            from bapo_megatron.rewards import RewardScorer, worker_pool
            from bapo_megatron.types import Prompt
            if __name__ == "__main__":
                worker_pool.START_TIMEOUT_S = {HANG_S}
                reward = {{"kind": "reward_hooks:plain", "timeout_s": {HANG_S}}}
                scorer = RewardScorer(Config.model_validate({{"reward": reward}}))
                scorer.score([(Prompt(0, (1,), "", "", "test"), "hang")])
        """
        with subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)]) as trainer:
            judge = read_line(said)
            assert judge in [str(process.pid) for process in psutil.Process(trainer.pid).children(recursive=True)]
            trainer.kill()
        assert read_line(said) == "", "it has ended, and closed the pipe"


class TestParts:
    WEIGHTS = {"correct": 1.0, "format": -0.5}  # noqa: RUF012

    def test_parts_are_weighed_and_kept_with_the_reason(self) -> None:
        with scorer_of("in_parts", weights=self.WEIGHTS) as scorer:
            right, wrong, *failed = scorer.verdicts(items("7", "12", "no format", "a number", "half a part"))
        assert (right.end.reward, dict(right.end.parts), right.end.message) == (
            0.5,
            {"correct": 1.0, "format": 1.0},
            "I read 7",
        )
        assert (wrong.end.reward, dict(wrong.end.parts)) == (-1.0, {"correct": 0.0, "format": 2.0})
        assert [(verdict.end.reward, verdict.end.problem, verdict.is_misfit) for verdict in failed] == [
            (0.0, "error", True)
        ] * 3
        assert "'format' is missing in {'correct': 1.0}" in failed[0].end.message
        assert "a judge returns the parts 'correct', 'format' by name, not 1.0" in failed[1].end.message
        assert "a judge returns a number, not str: 'good'" in failed[2].end.message

    def test_parts_without_weights_fail_their_response_only(self) -> None:
        with scorer_of("plain") as scorer:
            table, good = scorer.verdicts(items("table", "1"))
        assert (table.end.reward, table.end.problem, table.is_misfit, good.end.reward) == (0.0, "error", True, 1.0)
        assert "set reward.weights = {reward = 1.0}" in table.end.message
        with scorer_of("in_parts", weights={"correct": 2.0}) as scorer:
            assert "does not name: 'format'" in scorer.verdicts(items("7"))[0].end.message

    @given(st.dictionaries(st.text(), st.floats() | st.text(), min_size=1), st.integers(1, 3000))
    def test_no_names_that_a_response_chooses_end_the_run(self, parts: dict[str, Any], times: int) -> None:
        with pytest.raises(TypeError) as caught:
            as_reply({name * times: part for name, part in parts.items()}, {"of the user": 1.0})
        assert len(str(caught.value)) < 3000, "a character may take ten as an escape"

    @pytest.mark.parametrize("other", ["reasoned", "waits"])
    def test_several_judges_add_up(self, other: str) -> None:
        judges = {"correct": "text", "other": f"reward_hooks:{other}"}
        config = {"reward": {"judges": judges, "weights": {"correct": 4.0}, "timeout_s": HANG_S}}
        with RewardScorer(Config.model_validate(config)) as scorer:
            right, wrong = scorer.verdicts(items("7", "8"))
        of_other, reason = (0.5, "other: so so") if other == "reasoned" else (2.0, "")
        assert (right.end.reward, dict(right.end.parts)) == (4 + of_other, {"correct": 1.0, "other": of_other})
        assert (wrong.end.reward, wrong.end.message) == (of_other, reason)

    @pytest.mark.parametrize(
        ("reward", "message"),
        [
            ({"kind": "math", "judges": {"a": "text"}}, 'reward.kind="math" names a judge besides reward.judges'),
            ({"judges": {"a": "text"}, "weights": {"b": 1}}, "reward.weights.b is not a part of reward.judges (a)"),
            ({"kind": "text", "weights": {"b": 1}}, 'reward.weights names parts, and reward.kind="text" returns a'),
        ],
    )
    def test_settings_that_contradict_each_other(self, reward: dict[str, Any], message: str) -> None:
        assert message in " ".join(
            v.message for v in check_settings(resolve(Config.model_validate({"reward": reward})))
        )

    @given(st.dictionaries(st.sampled_from("abc"), st.tuples(*[st.floats(-1e6, 1e6)] * 2), min_size=1))
    def test_the_reward_is_the_weighted_sum(self, parts: dict[str, tuple[float, float]]) -> None:
        reply = as_reply({name: part for name, (part, _) in parts.items()}, {n: w for n, (_, w) in parts.items()})
        assert reply["reward"] == math.fsum(part * weight for part, weight in parts.values())


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
            ("plain", "block", r"no verdict in 0\.5 s in plain \(.*/reward_hooks.py, line \d+\)$"),
            ("networked", "wait", r'reward_hooks.py", line \d+, in networked\n'),
        ],
    )
    def test_all_first_verdicts_failing_ends_the_run(self, function: str, text: str, said: str) -> None:
        config = {
            "reward": {"kind": f"reward_hooks:{function}", "timeout_s": 0.5 if text in ("block", "wait") else HANG_S}
        }
        config["rollout"] = {"prompts_per_step": 1, "samples_per_prompt": 4}
        with RewardScorer(Config.model_validate(config)) as scorer:
            assert scorer.score(items(text, text)) == [0.0, 0.0], "not yet as many as in the first step"
            with pytest.raises(UserError, match=r"failed on all of the first 4 responses.*\n") as caught:
                scorer.score(items(text, text))
        assert re.search(said, str(caught.value)), str(caught.value)
        assert "rewards/worker.py" not in str(caught.value)

    def test_one_verdict_is_enough_to_go_on_and_the_share_is_of_the_step(self) -> None:
        reward = {"kind": "reward_hooks:plain", "timeout_s": HANG_S}
        rollout = {"prompts_per_step": 1, "samples_per_prompt": 4}
        config = Config.model_validate({"reward": reward, "rollout": rollout})
        with RewardScorer(config) as scorer:
            scorer.score(items("raise", "nothing", "raise", "1"))
            assert scorer.metrics()["reward/failed_share"] == 0.75
            assert scorer.recent_failure is not None
            assert re.fullmatch(
                r"RuntimeError\('on purpose'\) \(reward_hooks.py, line \d+\)", scorer.recent_failure.end.message
            )
            scorer.score(items("raise", "nothing", "text", "raise"))
            assert scorer.metrics()["reward/failed_share"] == 1.0, "the first batch is over"
            scorer.score(items("1"))
            assert scorer.metrics()["reward/failed_share"] == 0.0
            assert scorer.recent_failure is None


def wait_until_none(find: Any) -> None:
    deadline_s = time.monotonic() + HANG_S
    while found := find():
        assert time.monotonic() < deadline_s, found
        time.sleep(0.01)


class TestAsync:
    def test_many_are_judged_at_once(self) -> None:
        with scorer_of("together") as scorer:
            assert scorer.score(items(*map(str, range(NUM_TOGETHER)))) == [float(i) for i in range(NUM_TOGETHER)]
            assert len(judges()) == 1

    def test_concurrency_bounds_how_many(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ask, asked, most = Worker.ask, 0, 0

        async def counted(worker: Worker, fields: dict[str, Any], limit_s: float) -> dict[str, Any]:
            nonlocal asked, most
            asked += 1
            most = max(most, asked)
            try:
                return await ask(worker, fields, limit_s)
            finally:
                asked -= 1

        monkeypatch.setattr(Worker, "ask", counted)
        with scorer_of("networked", concurrency=2) as scorer:
            assert scorer.score(items(*"1234")) == [1.0, 2.0, 3.0, 4.0]
        assert most == 2

    def test_each_has_its_own_deadline(self) -> None:
        with scorer_of("networked", timeout_s=0.5) as scorer:
            assert scorer.score(items("wait", "1", "raise", "wait", "2", "nan")) == [0.0, 1.0, 0.0, 0.0, 2.0, 0.0]
            assert (scorer.num_timeouts, scorer.num_errors) == (2, 2)
            assert len(judges()) == 1, "a deadline that the judge meets costs no process"

    def test_a_crash_costs_its_own_sample_only(self, seen: Path) -> None:
        with scorer_of("beside_a_crash") as scorer:
            texts = ("1", "exit", "2", "segfault", "3")
            assert len(texts) == NUM_BESIDE_A_CRASH
            assert scorer.score(items(*texts)) == [1.0, 0.0, 2.0, 0.0, 3.0]
            assert (scorer.num_errors, scorer.num_timeouts) == (2, 0)
            (seen / "4").touch()
            assert scorer.score(items("4")) == [4.0]

    def test_blocking_the_event_loop_costs_its_own_sample_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        strike_only("block", monkeypatch)
        with scorer_of("networked") as scorer:
            assert scorer.score(items("1", "block", "2")) == [1.0, 0.0, 2.0]
            assert (scorer.num_errors, scorer.num_timeouts) == (0, 1)
