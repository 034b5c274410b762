"""Programs against their tests, and what the sandbox keeps them from doing. With real processes."""

import contextlib
import json
import os
import platform
import resource
import select
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import bapo_megatron.rewards.code as code_module
from bapo_megatron.config.load import load_config
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import UserError
from bapo_megatron.rewards import RewardScorer, worker_pool
from bapo_megatron.rewards.code import CodeJudge, last_program, same_output
from bapo_megatron.rewards.refusals import Refusals
from bapo_megatron.rewards.scratch import delete_abandoned, delete_folder, scratch_folder
from bapo_megatron.types import Prompt
from tests.hang import HANG_S
from tests.unit.test_sandbox_attacks import MACHINE_CODE, has_32_bit_calls

NEXT = {"tests": "assert f(1) == 2\nassert f(-1) == 0"}
SUM = {"cases": [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "4\n5", "stdout": "9"}]}


@pytest.fixture(scope="module")
def judge() -> CodeJudge:
    return CodeJudge(HANG_S)


def respond(program: str) -> str:
    return f"Here it is:\n```python\n{textwrap.dedent(program)}\n```\nDone."


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\na\n```", "a\n"),
        ("```python\na\n```\n or rather\n```py\nb\nc\n```\n", "b\nc\n"),
        ("```Python3 \r\na\r\n```", "a\r\n"),
        ("  ```python\n  a\n  ```", "a\n"),
        ("1. So:\n   ```python\n   def f(x):\n       return x\n\n   ```\n", "def f(x):\n    return x\n\n"),
        ("\t```python\r\n\tif a:\r\n\t\tb\r\n\t```", "if a:\r\n\tb\r\n"),
        ("  ```python\n\n  x = '''\nfar left\n    in'''\n  ```", "\nx = '''\nfar left\n  in'''\n"),
        ("  ```python\ndef f(x):\n return x\n  ```", "def f(x):\n return x\n"),  # only the fence is indented
        ("  ```python\n\n  ```", "\n"),
        ("```\na\n```", None),
        ("```bash\na\n```", None),
        ("```python\nx = '```'\n```", "x = '```'\n"),
        ("```python\ncut off", None),
        ("```python\na\n```\n```python\ncut off", "a\n"),
        ("", None),
    ],
)
def test_the_last_closed_python_block_counts(response: str, program: str | None) -> None:
    assert last_program(response) == program


def test_output_is_compared_but_for_trailing_blanks() -> None:
    assert same_output("1 \n2\n\n", "1\n2")
    assert not same_output("1\n\n2", "1\n2")
    assert not same_output(" 1", "1")


@pytest.mark.parametrize(
    ("program", "reward"),
    [
        ("def f(x): return x + 1", 1.0),
        ("def f(x): return x + 2", 0.0),
        ("def f(x): return 2", 0.0),  # passes the first test only
        ("def f(x:", 0.0),
        ("raise ValueError", 0.0),
        ("def f(x): raise SystemExit(0)", 0.0),
        ("import sys; sys.exit(0)", 0.0),
        ("import os; os._exit(0)", 0.0),
        ("import atexit, os; atexit.register(os._exit, 0); 1 / 0", 0.0),
        ("import os\ndef f(x): os.write(3, b'passed'); os._exit(0)", 0.0),
        ("import ctypes; ctypes.string_at(0)", 0.0),
        ("x = bytearray(1 << 34)", 0.0),
        ("import os\nwhile True: print('x' * 100000)", 0.0),
        ("def f(x): return x + 1\nif __name__ == '__main__': input()", 1.0),
        ("from dataclasses import dataclass\n@dataclass\nclass A: x: int\ndef f(x): return A(x).x + 1", 1.0),
        ("import numpy\ndef f(x): return int(numpy.array([x, 1]).sum())", 1.0),
        ("import asyncio\nasync def g(x): return x + 1\ndef f(x): return asyncio.run(g(x))", 1.0),
        (
            "from concurrent.futures import ThreadPoolExecutor\n"
            "def f(x): return ThreadPoolExecutor(2).submit(lambda: x + 1).result()",
            1.0,
        ),
    ],
)
def test_programs_with_tests(judge: CodeJudge, program: str, reward: float) -> None:
    assert judge.judge(NEXT, respond(program)) == reward


@pytest.mark.parametrize(
    ("program", "reward"),
    [
        ("print(sum(map(int, open(0).read().split())))", 1.0),
        (
            "import sys\ndef main(): print(sum(map(int, sys.stdin.read().split())))\nif __name__ == '__main__': main()",
            1.0,
        ),
        ("import sys\nprint(sum(map(int, sys.stdin.read().split())))\nsys.exit(0)", 1.0),
        ("import sys\nprint(sum(map(int, sys.stdin.read().split())))\nsys.exit(1)", 0.0),
        ("a, b = map(int, input().split())\nprint(a + b)", 0.0),  # not all cases are on one line
        ("print(3)", 0.0),
        ("import sys; sys.exit(0)", 0.0),
        ("import os; os.lseek(0, 0, 0); d = os.read(0, 10**6); print(sum(map(int, d.split())))", 1.0),  # no job there
    ],
)
def test_programs_with_cases(judge: CodeJudge, program: str, reward: float) -> None:
    assert judge.judge(SUM, respond(program)) == reward


def test_a_verdict_does_not_depend_on_how_many_files_the_judge_has_open() -> None:
    """The sandbox moves descriptors whose numbers the judge chooses; it needs number 64 itself."""
    program = respond("def f(x): return x + 1")
    script = f"""
        import os
        from bapo_megatron.rewards.code import CodeJudge
        for lowest_free in range(50, 70):
            while os.open(os.devnull, os.O_RDONLY) < lowest_free - 1: pass
            print(lowest_free, float(CodeJudge({HANG_S}).judge({NEXT!r}, {program!r})))
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=HANG_S)
    assert done.stdout.splitlines() == [f"{lowest_free} 1.0" for lowest_free in range(50, 70)]


def test_no_program_is_no_pass_and_both_kinds_of_tests_count(judge: CodeJudge) -> None:
    both = {"tests": "assert f(1) == 2", "cases": [{"stdin": "", "stdout": "hello"}]}
    assert judge.judge(both, "I do not know") == 0.0
    assert judge.judge(both, respond("def f(x): return x + 1\nprint('hello')")) == 1.0
    assert judge.judge(both, respond("def f(x): return x + 1\nprint('bye')")) == 0.0


def test_a_program_is_run_once_for_the_same_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    judge, runs = CodeJudge(HANG_S), []
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **options: (runs.append(args), start(*args, **options))[1])
    right, wrong = respond("def f(x): return x + 1"), respond("def f(x): return x")
    before = {"tests": "assert f(1) == 0"}
    for _ in range(2):
        assert [judge.judge(a, r) for a in (NEXT, before) for r in (right, wrong)] == [1.0, 0.0, 0.0, 0.0]
    assert len(runs) == 4
    monkeypatch.setattr(code_module, "MAX_VERDICTS_KEPT", 4)
    assert judge.judge(NEXT, respond("def f(x): return 1 + x")) == 1.0
    assert judge.judge(NEXT, right) == 1.0
    assert len(runs) == 6, "the memory is bounded"


def test_an_indented_program_runs(judge: CodeJudge) -> None:
    program = respond("def f(x):\n    y = x\n    return y + 1")
    assert judge.judge(NEXT, "- " + textwrap.indent(program, "  ")) == 1.0


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("assert True", "has neither tests nor cases"),
        ({}, "has neither"),
        ({"test": "assert True"}, "has neither .* not {'test': 'assert True'}"),
        ({"tests": ""}, "not Python text"),
        ({"tests": 1}, "not Python text"),
        ({"cases": []}, "has no cases"),
        ({"cases": [{"stdin": "1"}]}, 'not a list of {"stdin": text, "stdout": text}'),
        ({"cases": {"stdin": "1", "stdout": "1"}}, "not a list of"),
        ({"tests": "assert True", "cases": 3}, "not a list of"),
        ({"tests": "assert True", "cases": [{"stdin": 1, "stdout": "1"}]}, "not a list of"),
    ],
)
def test_an_answer_without_tests_is_an_error_of_the_data(judge: CodeJudge, answer: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        judge.judge(answer, "no program, but the answer is told all the same")


def test_an_absent_column_is_no_case(judge: CodeJudge) -> None:
    assert judge.judge({**NEXT, "cases": None}, respond("def f(x): return x + 1")) == 1.0  # as in Parquet


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(1000)",
        "import signal\nfor s in set(signal.Signals) - {9, 19}: signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
        "try:\n  while True: pass\nexcept BaseException: pass\nwhile True: pass",
    ],
)
def test_a_program_that_does_not_end_is_ended(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_module, "MORE_CPU_S", int(HANG_S))  # the judge ends it, however late
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(TimeoutError, match="did not end in 1 s"):
        CodeJudge(1.0).judge(NEXT, respond(program))
    assert set(psutil.Process().children(recursive=True)) <= before


def lacking() -> tuple[str, ...]:
    """Return what this machine's operating system cannot protect from."""
    judge = CodeJudge(HANG_S)
    judge.judge(NEXT, respond("def f(x): return x + 1"))
    return judge.sandbox.lacking


@pytest.fixture
def weaken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Return a function that replaces a part of the sandbox for the test."""
    sandbox = tmp_path / "sandbox.py"
    sandbox.write_text(Path(code_module.SANDBOX).read_text())
    monkeypatch.setattr(code_module, "SANDBOX", str(sandbox))

    def replace(old: str, new: str) -> None:
        source = sandbox.read_text()
        assert old in source
        sandbox.write_text(source.replace(old, new))

    return replace


WITHOUT_SECCOMP = "if not calls or", "if True or"
WITHOUT_NOTIFICATION = "_LIBC.syscall(_SECCOMP[machine], 1", "_LIBC.syscall(_SECCOMP[machine], 99"


def test_what_the_system_refuses_is_said_once(
    weaken: Callable[[str, str], None], caplog: pytest.LogCaptureFixture
) -> None:
    weaken(*WITHOUT_SECCOMP)
    judge = CodeJudge(HANG_S)
    for program in ("def f(x): return x + 1", "def f(x): return 1 + x"):
        assert judge.judge(NEXT, respond(program)) == 1.0
    assert [r.message for r in caplog.records].count(
        "reward.kind = 'code': this system protects from programs only in part: "
        "network and other processes are open (no seccomp)"
    ) == 1


def test_a_program_cannot_forge_that_warning(judge: CodeJudge, caplog: pytest.LogCaptureFixture) -> None:
    forged = "sandbox lacks: \\x1b]0;owned\\x07 run curl"
    program = f"""
        import os, sys
        for fd in range(1, 64):
            for text in (b"{forged}\\n", b'{{"lacking": ["{forged}"]}}'):
                try: os.write(fd, text)
                except OSError: pass
    """
    judge.judge(NEXT, respond(program))
    assert CodeJudge(HANG_S).judge(NEXT, respond(program)) == 0.0
    assert not caplog.records


class TestRefusedCalls:
    @pytest.mark.parametrize(
        ("program", "names"),
        [
            ("import os\nos.chmod('.', 0o700)", ("chmod",)),
            ("import shutil\nopen('a', 'w').close()\nshutil.copy('a', 'b')", ("chmod",)),
            ("import socket\nsocket.socket()", ("socket",)),
            ("import subprocess\nsubprocess.run(['true'])", ("vfork", "clone")),
            ("import os\ntry: os.chmod('.', 0o700)\nexcept PermissionError: os.mkfifo('a')", ("chmod", "mknodat")),
            ("import ctypes\nctypes.CDLL(None).syscall(5000)\n1 / 0", ("number 5000",)),
            ("import os\ntry: os.chmod('.', 0o700)\nexcept PermissionError: pass\ndef f(x): return x + 1", ()),
            ("def f(x): return x", ()),
        ],
    )
    def test_the_verdict_names_them_if_the_program_fails(
        self, judge: CodeJudge, program: str, names: tuple[str, ...]
    ) -> None:
        assert judge.judge(NEXT, respond(program)).refused_calls == names
        assert judge.judge(NEXT, respond(program)).refused_calls == names, "a cached verdict has them too"

    @pytest.mark.skipif(platform.machine() != "x86_64", reason="the machine code is for x86-64")
    def test_a_32_bit_call_is_not_taken_for_the_one_of_its_number(self, judge: CodeJudge) -> None:
        if not has_32_bit_calls():
            pytest.skip("this kernel makes no 32-bit calls")
        program = f"import ctypes, mmap\n{MACHINE_CODE}\nint80(90, 0)"  # chmod has this number among 64-bit calls
        assert judge.judge(NEXT, respond(program)).refused_calls == ("32-bit number 90",)

    def test_so_does_the_error_of_a_program_that_did_not_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        program = """
            import os
            try: os.chmod(".", 0o700)
            except PermissionError: open("made", "w").close()
            while True: pass
        """

        def is_over(folder: str, *_: object, **__: object) -> bool:
            if Path(folder, "made").exists():
                raise TimeoutError("as at the deadline")
            return False

        monkeypatch.setattr(code_module, "exceeds", is_over)
        with pytest.raises(TimeoutError) as error:
            CodeJudge(HANG_S).judge(NEXT, respond(program))
        assert error.value.refused_calls == ("chmod",)

    def test_a_loop_of_them_neither_ends_the_judge_nor_keeps_it_from_its_watch(self, judge: CodeJudge) -> None:
        program = """
            import ctypes, threading
            libc = ctypes.CDLL(None)
            for i in range(10): open(str(i), "wb").write(bytes(8 << 20))
            def loop():
                while True: libc.syscall(5000)
            for _ in range(4): threading.Thread(target=loop).start()
        """
        assert judge.judge(NEXT, respond(program)) == 0.0

    def test_they_fail_without_notification_too(
        self, weaken: Callable[[str, str], None], caplog: pytest.LogCaptureFixture
    ) -> None:
        weaken(*WITHOUT_NOTIFICATION)
        judge = CodeJudge(HANG_S)
        program = """
            import ctypes, errno, os
            for call in (lambda: os.chmod('.', 0o700), lambda: os.fork()):
                try: call()
                except PermissionError: pass
                else: raise SystemExit(1)
            libc = ctypes.CDLL(None, use_errno=True)
            assert libc.syscall(5000) == -1 and ctypes.get_errno() == errno.ENOSYS
            def f(x): return x + 1
        """
        assert judge.judge(NEXT, respond(program)) == 1.0
        assert "refused system calls go unnamed" in caplog.text

    def test_a_signal_to_the_judge_does_not_end_the_answers(self) -> None:
        """Linux answers POLLERR if a signal arrives while it waits for the lock of the calls."""
        ours, theirs = socket.socketpair()
        listener, caller = os.pipe()
        poller = select.poll()
        with contextlib.closing(Refusals(ours, platform.machine(), {})) as refusals, theirs:
            socket.send_fds(theirs, [b'{"lacking": []}'], [listener])
            refusals.register(poller)
            [(report, event)] = poller.poll()
            refusals.on_event(report, event, poller)
            os.write(caller, b"x")
            [(calls, _)] = poller.poll()
            refusals.on_event(calls, select.POLLERR, poller)
            assert poller.poll(0) == [(calls, select.POLLIN)]
            refusals.on_event(calls, select.POLLHUP, poller)
            assert poller.poll(0) == []
        os.close(listener)
        os.close(caller)

    def test_a_call_can_be_allowed(self) -> None:
        program = respond("import os\nos.mkdir('a')\nos.chmod('a', 0o700)\ndef f(x): return x + 1")
        assert CodeJudge(HANG_S, ["chmod"]).judge(NEXT, program) == 1.0
        assert CodeJudge(HANG_S, ["fchmodat"]).judge(NEXT, program).refused_calls == ("chmod",)

    @pytest.mark.parametrize(
        ("names", "message"),
        [
            (["chmdo"], 'reward.allowed_calls.*"chmdo" is not a system call; did you mean chmod'),
            (["xyzzy"], '"xyzzy" is not a system call; `man 2 syscalls` lists them'),
        ],
    )
    def test_an_unknown_name_is_an_error(self, names: list[str], message: str) -> None:
        with pytest.raises(UserError, match=message):
            load_config([], [f"reward.allowed_calls={json.dumps(names)}"])


@pytest.mark.skipif(bool(lacking()), reason=f"this system lacks {lacking()}")
class TestProtection:
    """Each program passes only if its attempt is refused, or stays inside."""

    def passes(self, judge: CodeJudge, program: str) -> bool:
        return judge.judge(NEXT, respond(textwrap.dedent(program) + "\ndef f(x): return x + 1")) == 1.0

    def refused(self, judge: CodeJudge, setup: str, attempt: str) -> bool:
        program = (
            f"import os, signal, subprocess, socket, resource\n{setup}\ntry: {attempt}\nexcept PermissionError: pass"
        )
        return self.passes(judge, f"{program}\nelse: raise SystemExit('it was allowed')")

    def test_a_fork_bomb_starts_nothing(self, judge: CodeJudge) -> None:
        assert judge.judge(NEXT, respond("import os\nwhile True: os.fork()")) == 0.0
        assert self.refused(judge, "", "os.fork()")
        assert self.refused(judge, "", "subprocess.run(['true'])")
        assert self.refused(judge, "", "os.execv('/bin/true', ['true'])")

    def test_no_signal_reaches_another_process(self, judge: CodeJudge) -> None:
        assert self.refused(judge, "", f"os.kill({os.getpid()}, 0)")
        assert self.refused(judge, "", "os.kill(-1, 0)")
        assert self.refused(judge, "", f"signal.pidfd_send_signal(os.pidfd_open({os.getpid()}), 0)")
        assert self.passes(judge, "import os; os.kill(os.getpid(), 0)")

    def test_there_is_no_network(self, judge: CodeJudge) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            assert self.refused(judge, "", f"socket.create_connection(('127.0.0.1', {server.getsockname()[1]}))")

    def test_files_elsewhere_cannot_be_changed(self, judge: CodeJudge, tmp_path: Path) -> None:
        file = tmp_path / "precious"
        file.write_text("data")
        os.chmod(tmp_path, 0o777)
        path = repr(str(file))
        assert self.refused(judge, "", f"open({path}, 'w')")
        assert self.refused(judge, "", f"open({path}, 'a')")
        assert self.refused(judge, "", f"os.truncate({path}, 0)")
        assert self.refused(judge, "", f"os.remove({path})")
        assert self.refused(judge, "", f"os.chmod({path}, 0o777)")
        assert self.refused(judge, "", f"os.utime({path})")
        assert self.refused(judge, "", f"open({path} + '2', 'x')")
        assert self.refused(judge, "", f"os.mkdir({path} + '2')")
        assert self.passes(judge, f"assert open({path}).read() == 'data'")
        assert file.read_text() == "data"
        assert [p.name for p in tmp_path.iterdir()] == ["precious"]

    def test_its_own_folder_is_writable_bounded_and_removed(self, judge: CodeJudge, tmp_path: Path) -> None:
        assert self.passes(
            judge,
            """
            import os, tempfile
            os.makedirs("a/b")
            open("a/b/c", "w").write("x")
            os.rename("a/b/c", "a/d")
            assert open("a/d").read() == "x"
            tempfile.NamedTemporaryFile().write(b"x")
            open(os.devnull, "w").write("x")
            try: open("big", "wb").write(bytes(17 << 20))
            except OSError: pass
            assert os.path.getsize("big") <= 16 << 20
            """,
        )

    def test_limits_cannot_be_raised(self, judge: CodeJudge) -> None:
        limit = "(resource.RLIM_INFINITY, resource.RLIM_INFINITY)"
        program = f"""
            import resource
            for name in ("AS", "CPU", "FSIZE", "NOFILE"):
                try: resource.setrlimit(getattr(resource, "RLIMIT_" + name), {limit})
                except (ValueError, PermissionError): pass
                else: raise SystemExit(name)
        """
        assert self.passes(judge, program)

    def test_the_environment_is_not_handed_on(self, judge: CodeJudge, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SECRET_TOKEN", "x")
        assert self.passes(judge, "import os; assert 'SECRET_TOKEN' not in os.environ")


def code_scorer(timeout_s: float) -> RewardScorer:
    config = {"reward": {"kind": "code", "timeout_s": timeout_s}, "data": {"source": "jsonl", "path": "p.jsonl"}}
    return RewardScorer(Config.model_validate(config))


@pytest.fixture(scope="module")
def scorer() -> Iterator[RewardScorer]:
    with code_scorer(HANG_S) as scorer:
        yield scorer


def prompts_for(programs: list[str]) -> list[tuple[Prompt, str]]:
    return [(Prompt(i, (1,), "?", NEXT, "test"), respond(program)) for i, program in enumerate(programs)]


def test_the_scorer_runs_programs_and_counts(scorer: RewardScorer) -> None:
    programs = ["def f(x): return x + 1", "def f(x): return x", "import os; os._exit(0)"]
    assert scorer.score(prompts_for(programs)) == [1.0, 0.0, 0.0]
    assert (scorer.num_timeouts, scorer.num_errors, scorer.num_refused) == (0, 0, 0)


def test_a_program_that_does_not_end_costs_no_judge_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "GRACE_S", HANG_S)
    with code_scorer(1.0) as scorer:
        processes = set(psutil.Process().children())
        assert scorer.score(prompts_for(["import signal\nsignal.pause()"])) == [0.0]
        assert (scorer.num_timeouts, scorer.num_errors) == (1, 0)
        assert processes <= set(psutil.Process().children())


def test_refused_calls_are_counted_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    programs = [f"import os, socket\nos.chmod('.', {mode})" for mode in (1, 2)] + ["import socket\nsocket.socket()"]
    with code_scorer(HANG_S) as scorer:
        verdicts = [scorer.verdicts([item])[0] for item in prompts_for([*programs, "def f(x): return x + 1"])]
        metrics = scorer.metrics()
    assert [verdict.refused_calls for verdict in verdicts] == [("chmod",), ("chmod",), ("socket",), ()]
    assert [verdict.end.problem for verdict in verdicts] == [None] * 4
    assert verdicts[2].end.message == "the sandbox refused the program socket"
    assert metrics["reward/refused_calls"] == 3
    told = [record.message for record in caplog.records]
    assert [text.split(";")[0] for text in told] == [
        f"reward: the sandbox refused {name} to the program of a response to prompt {prompt}, which failed"
        for name, prompt in (("chmod", 0), ("socket", 2))
    ]


@pytest.mark.parametrize("other", ["text", "waiting_judge:judge"])
def test_refused_calls_count_with_other_judges_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    (tmp_path / "waiting_judge.py").write_text("async def judge(response): return 0.0, 'so so'")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    reward = {"judges": {"passes": "code", "other": other}, "timeout_s": HANG_S}
    programs = [
        "import os\nos.chmod('.', 1)\ndef f(x): return x",
        "import os\nos.chmod('.', 1)",
        "def f(x): return x + 1",
    ]
    data = {"source": "jsonl", "path": "p.jsonl"}
    with RewardScorer(Config.model_validate({"reward": reward, "data": data})) as scorer:
        verdicts = scorer.verdicts(prompts_for(programs))
        metrics = scorer.metrics()
    assert [verdict.refused_calls for verdict in verdicts] == [("chmod",), ("chmod",), ()]
    assert [verdict.end.parts["passes"] for verdict in verdicts] == [0.0, 0.0, 1.0]
    assert metrics["reward/refused_calls"] == 2


def test_a_setting_allows_a_call() -> None:
    config = Config.model_validate(
        {
            "reward": {"kind": "code", "timeout_s": HANG_S, "allowed_calls": ["chmod"]},
            "data": {"source": "jsonl", "path": "p.jsonl"},
        }
    )
    program = "import os\nos.mkdir('a')\nos.chmod('a', 0o700)\ndef f(x): return x + 1"
    with RewardScorer(config) as scorer:
        assert scorer.score(prompts_for([program])) == [1.0]


def test_an_answer_of_the_wrong_shape_ends_the_run(scorer: RewardScorer) -> None:
    mistyped = Prompt(9, (1,), "?", {"test": "assert f(1) == 2"}, "test")
    with pytest.raises(UserError, match=r"reward\.kind = 'code': an answer has neither tests nor cases; it must be"):
        scorer.score([(mistyped, respond("def f(x): return x + 1"))])


def test_a_judge_process_that_was_spoilt_is_replaced(scorer: RewardScorer) -> None:
    """Lowered limits of a judge process must not cost honest responses their reward."""
    items = [(Prompt(0, (1,), "?", NEXT, "test"), respond(f"def f(x): return x + 1 + {i} - {i}")) for i in range(6)]
    before = scorer.num_errors
    for child in psutil.Process().children(recursive=True):
        if "bapo_megatron.rewards.worker" in child.cmdline():
            resource.prlimit(child.pid, resource.RLIMIT_NOFILE, (3, 3))
    assert scorer.score(items) == [1.0] * 6
    assert scorer.num_errors == before


class TestProcessesThatAreKilled:
    """SIGKILL of a judge, as by the OOM killer or with its rank, leaves no program and no folder for long."""

    @pytest.fixture(params=["sleeps", "clears its death signal"])
    def orphan(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[psutil.Process]:
        """A program whose judge was killed while it ran. Its folders are below tmp_path."""
        attempt = "ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)" if request.param != "sleeps" else "pass"
        program = f"""
            import ctypes, os, signal
            {attempt}
            open("pid.part", "w").write(str(os.getpid()))
            os.rename("pid.part", "pid")
            while True: signal.pause()
        """
        call = f"CodeJudge({HANG_S}).judge({NEXT!r}, {respond(program)!r})"
        script = f"from bapo_megatron.rewards.code import CodeJudge; {call}"
        with subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"TMPDIR": str(tmp_path)}) as judge:
            found = waited_for(lambda: list(tmp_path.glob("bapo-program-*/files/pid")))
            orphan = psutil.Process(int(found[0].read_text()))
            judge.kill()
        yield orphan
        with contextlib.suppress(psutil.NoSuchProcess):
            orphan.kill()

    def test_a_program_ends_with_its_judge(self, orphan: psutil.Process) -> None:
        waited_for(lambda: not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE)

    def test_the_next_pool_deletes_what_was_left(
        self, orphan: psutil.Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        waited_for(lambda: not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        assert len(list(tmp_path.iterdir())) == 1
        with code_scorer(HANG_S):
            (left,) = tmp_path.iterdir()
            assert left.name.startswith("bapo-rewards-")
        assert not list(tmp_path.iterdir())


def waited_for(condition: Callable[[], Any]) -> Any:
    """Wait until a condition holds, and return its value; only a hang fails."""
    deadline_s = time.monotonic() + HANG_S
    while not (found := condition()):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    return found


class TestAbandonedFolders:
    def test_one_whose_process_lives_stays(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        with scratch_folder("bapo-rewards-") as folder:
            Path(folder, "file").touch()
            delete_abandoned(str(tmp_path), "bapo-rewards-")
            assert Path(folder, "file").exists()
        assert not list(tmp_path.iterdir())

    def test_only_folders_with_a_lock_file_and_the_prefix_go(self, tmp_path: Path) -> None:
        elsewhere = tmp_path / "elsewhere"
        for folder in (elsewhere, tmp_path / "bapo-rewards-abandoned", tmp_path / "bapo-other-abandoned"):
            folder.mkdir()
            (folder / "lock").touch()
        (tmp_path / "bapo-rewards-starting").mkdir()
        (tmp_path / "bapo-rewards-link").symlink_to(elsewhere)
        (tmp_path / "bapo-rewards-file").touch()
        (tmp_path / "bapo-rewards-pipe").mkdir()
        os.mkfifo(tmp_path / "bapo-rewards-pipe" / "unlocked")
        (tmp_path / "bapo-rewards-linked").mkdir()
        (tmp_path / "bapo-rewards-linked" / "lock").symlink_to(elsewhere / "lock")
        before = {path.name for path in tmp_path.iterdir()}
        delete_abandoned(str(tmp_path), "bapo-rewards-", "bapo-program-")
        assert before - {path.name for path in tmp_path.iterdir()} == {"bapo-rewards-abandoned"}
        assert (elsewhere / "lock").exists()

    @pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
    def test_those_of_other_users_stay(self, tmp_path: Path) -> None:
        folder = tmp_path / "bapo-rewards-theirs"
        folder.mkdir()
        (folder / "lock").touch()
        os.chown(folder, 65534, 65534)
        delete_abandoned(str(tmp_path), "bapo-rewards-")
        assert folder.exists()

    def test_a_folder_is_never_seen_with_a_lock_file_that_is_not_locked(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another pool starts after each step of making a folder."""
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        for name in ("open", "rename", "mkdir"):
            real = getattr(os, name)

            def step(*args: Any, real: Callable[..., Any] = real, **kwargs: Any) -> Any:
                delete_abandoned(str(tmp_path), "bapo-rewards-") if "unlocked" in str(args) else None
                return real(*args, **kwargs)

            with monkeypatch.context() as patch:
                patch.setattr(os, name, step)
                with scratch_folder("bapo-rewards-") as folder:
                    delete_abandoned(str(tmp_path), "bapo-rewards-")
                    assert Path(folder).is_dir()


def test_a_folder_is_deleted_however_deep(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    build = "import os\nfor i in range(3000): os.mkdir('deep'); open('file', 'w'); os.chdir('deep')"
    subprocess.run([sys.executable, "-c", build], cwd=top, check=True, timeout=HANG_S)
    (top / "rightless").mkdir(0)
    (top / "loop").symlink_to(top)
    (top / "outside").symlink_to(tmp_path)
    delete_folder(str(top))
    assert list(tmp_path.iterdir()) == []
    delete_folder(str(top))  # deleting nothing is not an error
