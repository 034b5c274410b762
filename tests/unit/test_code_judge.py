"""Programs against their tests, and what the sandbox keeps them from. With real processes."""

import os
import resource
import shutil
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import bapo_megatron.rewards.code as code_module
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import UserError
from bapo_megatron.rewards import RewardScorer
from bapo_megatron.rewards.code import CodeJudge, last_program, same_output
from bapo_megatron.rewards.scratch import delete_folder
from bapo_megatron.types import Prompt

NEXT = {"tests": "assert f(1) == 2\nassert f(-1) == 0"}
SUM = {"cases": [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "4\n5", "stdout": "9"}]}


@pytest.fixture(scope="module")
def judge() -> CodeJudge:
    return CodeJudge(timeout_s=20.0, memory_bytes=1 << 30)


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


def test_no_program_is_no_pass_and_both_kinds_of_tests_count(judge: CodeJudge) -> None:
    both = {"tests": "assert f(1) == 2", "cases": [{"stdin": "", "stdout": "hello"}]}
    assert judge.judge(both, "I do not know") == 0.0
    assert judge.judge(both, respond("def f(x): return x + 1\nprint('hello')")) == 1.0
    assert judge.judge(both, respond("def f(x): return x + 1\nprint('bye')")) == 0.0


def test_a_program_is_run_once_for_the_same_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    judge, runs = CodeJudge(timeout_s=20.0, memory_bytes=1 << 30), []
    run = judge._run
    monkeypatch.setattr(judge, "_run", lambda job, *args: (runs.append(job), run(job, *args))[1])
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
        ({"tests": ""}, "no Python text"),
        ({"tests": 1}, "no Python text"),
        ({"cases": []}, "has no cases"),
        ({"cases": [{"stdin": "1"}]}, 'no list of {"stdin": text, "stdout": text}'),
        ({"cases": {"stdin": "1", "stdout": "1"}}, "no list of"),
        ({"tests": "assert True", "cases": 3}, "no list of"),
        ({"tests": "assert True", "cases": [{"stdin": 1, "stdout": "1"}]}, "no list of"),
    ],
)
def test_an_answer_without_tests_is_an_error_of_the_data(judge: CodeJudge, answer: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        judge.judge(answer, "no program, but the answer is told all the same")


def test_an_absent_column_is_no_case(judge: CodeJudge) -> None:
    assert judge.judge({**NEXT, "cases": None}, respond("def f(x): return x + 1")) == 1.0  # as Parquet has it


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(1000)",
        "import signal\nfor s in set(signal.Signals) - {9, 19}: signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
        "try:\n  while True: pass\nexcept BaseException: pass\nwhile True: pass",
    ],
)
def test_a_program_that_does_not_end_is_ended(program: str) -> None:
    began_s = time.monotonic()
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(TimeoutError, match="did not end in 1 s"):
        CodeJudge(1.0, 1 << 30).judge(NEXT, respond(program))
    assert time.monotonic() - began_s < 60
    assert set(psutil.Process().children(recursive=True)) == before


def lacking() -> str:
    """What the operating system of this machine refuses to protect from."""
    script = "import sys; sys.path.insert(0, sys.argv[1]); import sandbox; print(sandbox.confine(1 << 30, 9, 1 << 20))"
    command = [sys.executable, "-c", script, str(Path(code_module.__file__).parent)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


def test_what_the_system_refuses_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sandbox = tmp_path / "sandbox.py"
    shutil.copy(Path(code_module._SANDBOX).with_name("system_calls.txt"), tmp_path)
    source = Path(code_module._SANDBOX).read_text()
    sandbox.write_text(source.replace("return _LIBC.prctl(_PR_SET_SECCOMP", "return False and _LIBC.prctl(0"))
    monkeypatch.setattr(code_module, "_SANDBOX", str(sandbox))
    judge = CodeJudge(20.0, 1 << 30)
    for program in ("def f(x): return x + 1", "def f(x): return 1 + x"):
        assert judge.judge(NEXT, respond(program)) == 1.0
    assert [r.message for r in caplog.records].count(
        "reward.kind = 'code': this system protects from programs only in part: "
        "network and other processes are open (no seccomp)"
    ) == 1


@pytest.mark.skipif(lacking() != "[]", reason=f"this system lacks {lacking()}")
class TestProtection:
    """Each program passes only if what it tries is refused, or stays inside."""

    def passes(self, judge: CodeJudge, program: str) -> bool:
        return judge.judge(NEXT, respond(textwrap.dedent(program) + "\ndef f(x): return x + 1")) == 1.0

    def refused(self, judge: CodeJudge, setup: str, attempt: str) -> bool:
        program = (
            f"import os, signal, subprocess, socket, resource\n{setup}\ntry: {attempt}\nexcept PermissionError: pass"
        )
        return self.passes(judge, f"{program}\nelse: raise SystemExit('it was allowed')")

    def test_a_fork_bomb_starts_nothing(self, judge: CodeJudge) -> None:
        before = len(psutil.pids())
        assert judge.judge(NEXT, respond("import os\nwhile True: os.fork()")) == 0.0
        assert len(psutil.pids()) < before + 50
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


@pytest.fixture(scope="module")
def scorer() -> Iterator[RewardScorer]:
    config = {"reward": {"kind": "code", "timeout_s": 3.0}, "data": {"source": "jsonl", "path": "p.jsonl"}}
    with RewardScorer(Config.model_validate(config)) as scorer:
        yield scorer


def test_the_scorer_runs_programs_and_counts(scorer: RewardScorer) -> None:
    programs = ["def f(x): return x + 1", "while True: pass", "def f(x): return x", "import os; os._exit(0)"]
    items = [(Prompt(i, (1,), "?", NEXT, "test"), respond(p)) for i, p in enumerate(programs)]
    processes = set(psutil.Process().children())
    assert scorer.score(items) == [1.0, 0.0, 0.0, 0.0]
    assert (scorer.num_timeouts, scorer.num_errors) == (1, 0)
    assert processes <= set(psutil.Process().children()), "a program that does not end costs no judge process"


def test_an_answer_of_the_wrong_shape_ends_the_run(scorer: RewardScorer) -> None:
    mistyped = Prompt(9, (1,), "?", {"test": "assert f(1) == 2"}, "test")
    with pytest.raises(UserError, match=r"reward\.kind = 'code': an answer has neither tests nor cases; it must be"):
        scorer.score([(mistyped, respond("def f(x): return x + 1"))])


def test_a_judge_process_that_was_spoilt_is_replaced(scorer: RewardScorer) -> None:
    """Lowered limits of its own must not cost honest responses their reward."""
    items = [(Prompt(0, (1,), "?", NEXT, "test"), respond(f"def f(x): return x + 1 + {i} - {i}")) for i in range(6)]
    before = scorer.num_errors
    for child in psutil.Process().children():
        if "bapo_megatron.rewards.worker" in child.cmdline():
            resource.prlimit(child.pid, resource.RLIMIT_NOFILE, (3, 3))
    assert scorer.score(items) == [1.0] * 6
    assert scorer.num_errors == before


def test_a_folder_is_deleted_however_deep(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    build = "import os\nfor i in range(3000): os.mkdir('deep'); open('file', 'w'); os.chdir('deep')"
    subprocess.run([sys.executable, "-c", build], cwd=top, check=True, timeout=60)
    (top / "rightless").mkdir(0)
    (top / "loop").symlink_to(top)
    (top / "outside").symlink_to(tmp_path)
    delete_folder(str(top))
    assert list(tmp_path.iterdir()) == []
    delete_folder(str(top))  # nothing to delete is no error
