"""`bapo check` reads what a run will read, and reports everything in one answer."""

import gzip
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bapo_megatron import cli
from bapo_megatron.assets import demo_model_path
from bapo_megatron.config.load import load_config, read_config
from bapo_megatron.errors import escaped, install_command
from bapo_megatron.preflight import inputs
from bapo_megatron.preflight.checks.monitor import check_monitor
from bapo_megatron.resolved import resolve
from bapo_megatron.rollout.annotators import with_rows
from bapo_megatron.rollout.recorded import write_groups
from bapo_megatron.runs.folder import RunDir
from bapo_megatron.tokens import TEACHER_LOGPROBS, TEACHER_VERSIONS
from bapo_megatron.types import Ended, Group, Prompt, Sample, Segment
from tests.distributed import HANG_S

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": "3"}]


def write_rows(file: Path, rows: Sequence[object] = ROWS) -> str:
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(file)


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """Return the errors and warnings of `bapo check demo`."""
    code = cli.main(["check", "demo", *arguments])
    lines = [line.removeprefix("bapo: ") for line in capsys.readouterr().err.splitlines()]
    assert code == (2 if any(not line.startswith("warning: ") for line in lines) else 0)
    return lines


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        (None, ["data.path: there is no file", "prompts.jsonl"]),
        ([], ["prompts.jsonl: the file has no prompts"]),
        (["{"], ["prompts.jsonl:1: not JSON"]),
        ([{"prompt": "1+1="}], ["prompts.jsonl:1: field 'answer' is missing"]),
        (
            [*ROWS, {"prompt": "1" * 60, "answer": "1"}],
            ["prompts.jsonl:3: the prompt has 60 tokens, more than", "= 16"],
        ),
    ],
)
def test_the_file_of_prompts_is_read(
    rows: list[object] | None, parts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    if rows is not None:
        write_rows(file, rows)
    (line,) = answer(capsys, "data.source=jsonl", f"data.path={file}", "rollout.prompts_per_step=2")
    for part in parts:
        assert part in line


def test_a_folder_is_no_file_of_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = answer(capsys, "data.source=jsonl", f"data.path={tmp_path}")
    assert line.startswith(f"data.path: cannot read {tmp_path}: ")


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        pytest.param(
            ["data.source=reasoning_gym", "data.dataset=nope"],
            "data.dataset = 'nope' is not one of",
            marks=pytest.mark.gym,
        ),
        (["data.options={min_terms=9,max_terms=2}"], "max_terms (2) is smaller than min_terms (9)"),
        (["data.max_prompt_tokens=4"], "tokens, more than data.max_prompt_tokens = 4"),
        (["data.system_prompt=Hi"], "set data.chat_template=true"),
        (
            ["eval.interval_steps=5", "data.source=jsonl", "data.path=ROWS", "eval.path=/nope",
             "rollout.prompts_per_step=2"],
            "eval.path: there is no",
        ),
        (['data.sources=[{name="a",path="/nope"},{name="b",path="ROWS"}]'], "data.sources.a.path: there is no file"),
        (['data.sources=[{name="a",options={max_term=9}}]'], "data.sources.a: data.options of the source chains: "),
        (
            ['data.sources=[{name="a"},{name="b",path="ROWS"}]'],
            "leads data.sources.a to 'chains', data.sources.b to 'math'; set reward.kind to a function of yours",
        ),
        (["eval.interval_steps=5", 'eval.sets=[{name="a",path="/nope"}]'], "eval.sets.a.path: there is no file /nope"),
        (
            ["eval.interval_steps=5", 'eval.sets=[{name="a"},{name="b",options={min_terms=60,max_terms=60}}]'],
            "chains item 0: the prompt has 120 tokens, more than data.max_prompt_tokens = 16",
        ),
        pytest.param(
            ["eval.interval_steps=5", 'eval.sets=[{name="a",source="reasoning_gym",dataset="nope"}]'],
            "eval.sets.a: data.dataset = 'nope' is not one of",
            marks=pytest.mark.gym,
        ),
        (["rollout.engine=recorded", "rollout.recorded_from=/nope"], "rollout.recorded_from: there is no folder /nope"),
        (["advantage.kind=gae", "critic.path=/nope"], "critic.path = '/nope': there is no folder /nope"),
        (["loss.kl_coef=0.1", "loss.reference_path=/nope"], "loss.reference_path = '/nope': there is no folder"),
        (
            ["advantage.kind=teacher", "loss.name=grpo", "teacher.path=/nope"],
            "teacher.path = '/nope': there is no folder /nope",
        ),
        (
            ["advantage.kind=teacher", "loss.name=grpo", "teacher.path=tool"],
            "teacher.path='tool': its tokenizer is another one: token 3 is '0' there, and ' ' in the policy's",
        ),
        (
            ["loss.name=grpo", 'data.sources=[{name="a",source="chains"}]', 'teacher.path_by_source={a="demo"}'],
            "warning: teacher.path_by_source.a='demo' is the model that the run starts from",
        ),
        (
            ["loss.name=grpo", 'teacher.urls=["http://127.0.0.1:9"]'],
            "teacher.urls: http://127.0.0.1:9/server_info: ClientConnectorError",
        ),
        (["loss.name=grpo", 'teacher.urls=["http://x:1"]', "teacher.api_key=/nope"], "teacher.api_key=/nope: No such"),
        (
            ["loss.name=grpo", 'teacher.urls=["http://x:1"]', "teacher.path=study"],
            "teacher.path names a teacher, as teacher.urls does",
        ),
        (["loss.name=grpo", "teacher.hint={solution}"], "teacher.hint must hold {prompt} and more words"),
        (["loss.name=grpo", "teacher.hint={prompt} {"], "teacher.hint must have its braces in pairs: write one that"),
        (["loss.name=grpo", "teacher.hint={prompt}{answer[x]}"], "teacher.hint does not fit the answer of chains"),
        (
            ["reward.kind=none"],
            'reward.kind="none" gives no reward, and advantage.kind="grpo" learns from rewards; name a judge, or set',
        ),
        (["advantage.kind=teacher"], 'advantage.kind="teacher" needs teacher.path, the model to learn from'),
        (["megatron.extra={bogus=1}"], "megatron.extra.bogus is not a setting of the installed TransformerConfig"),
        (["megatron.extra={num_layer=1}"], "did you mean megatron.extra.num_layers?"),
        (["rollout.engine=sglang", "sglang.extra={mem_fraction=0.5}"], "did you mean sglang.extra.mem_fraction_stati"),
        (["bapo.low={start=0.6,stop=0.9,step=0.000000001}"], "bapo.low.step must cut the range into at most 1000"),
        (["parallel.tensor=99999999999999999999"], "parallel.tensor must be at most 65536, got 99999999999999999999"),
        (["parallel.tensor=65536", "parallel.data=65536"], "ranks, and there may be 1048576 at most"),
        (["cluster.gpu_memory_gib=1e300"], "cluster.gpu_memory_gib must be at most 100000, got 1e+300"),
        (["cluster.gpus_per_node=1000000000"], "cluster.gpus_per_node must be at most 256, got 1000000000"),
        (["sync.bucket_mib=1e308"], "sync.bucket_mib must be at most 1e+06, got 1e+308"),
        ([f"model.path={'x' * 300}"], "model.path must be a path of at most 4095 bytes, and 255 between two slashes"),
        (["model.path=~nobody-here/x"], "model.path must be a path: Could not determine home directory"),
    ],
)  # fmt: skip
def test_one_line_for(settings: list[str], part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write_rows(tmp_path / "prompts.jsonl")
    (line,) = answer(capsys, *(text.replace("ROWS", rows) for text in settings))
    assert part in line


@pytest.mark.parametrize(
    ("settings", "start"),
    [
        (["data.source=reasoning_gym", "data.dataset=basic_arithmetic"], "data.source"),
        (
            ["eval.interval_steps=5", 'eval.sets=[{name="a",source="reasoning_gym",dataset="chain_sum"}]'],
            "eval.sets.a: ",
        ),
    ],
)
def test_a_missing_reasoning_gym_tells_the_command(
    settings: list[str], start: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("reasoning_gym", "reasoning_gym.factory"):
        monkeypatch.setitem(sys.modules, name, None)
    (line,) = answer(capsys, *settings)
    assert line.startswith(start)
    assert f"run `{install_command('gym')}`, which compiles one package, pycosat, and so needs a C" in line


@pytest.mark.parametrize(
    "settings",
    [
        ["data.source=jsonl", "data.path=FILE"],
        ["eval.interval_steps=5", 'eval.sets=[{name="a",path="FILE"}]'],
    ],
)
def test_a_missing_pyarrow_tells_the_command(
    settings: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "prompts.parquet"
    file.write_bytes(b"PAR1")
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    (line,) = answer(capsys, *(text.replace("FILE", str(file)) for text in settings))
    assert line.startswith(f"{file}: reading Parquet needs pyarrow, ")
    assert f"run `{install_command('parquet')}`, or convert the file" in line


@pytest.mark.parametrize("kind", ["math", "text"])
@pytest.mark.parametrize(
    ("answer_", "problem"),
    [([3, 5], "[3, 5] is a list of 2"), ([], "[] is a list of 0"), ({"value": 8}, "{'value': 8} is an object")],
)
def test_an_answer_that_is_not_one_is_refused_with_its_row(
    kind: str, answer_: object, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [*ROWS, {"prompt": "1+3=", "answer": ["4"]}, {"prompt": "1+4=", "answer": answer_}]
    settings = ["data.source=jsonl", f"reward.kind={kind}", "rollout.prompts_per_step=2"]
    file = write_rows(tmp_path / "prompts.jsonl", rows)
    (line,) = answer(capsys, *settings, f"data.path={file}")
    assert f"{file}:4: the answer {problem}, and the judges math and text compare with one answer" in line
    assert not answer(capsys, *settings, f"data.path={write_rows(tmp_path / 'good.jsonl', rows[2:3] * 2)}")


def test_a_recording_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with gzip.open(tmp_path / "step-000001.jsonl.gz", "wt") as file:
        file.write("not JSON\n")
    (line,) = answer(capsys, "rollout.engine=recorded", f"rollout.recorded_from={tmp_path}", "train.num_steps=1")
    assert "step-000001.jsonl.gz, line 1 cannot be read" in line


@pytest.mark.parametrize("has_config", [True, False])
def test_a_recording_with_longer_responses_is_refused(
    has_config: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If its run had a higher limit, in whichever step the response is; otherwise in the first and the last one."""
    folder, prompt = tmp_path / "rollouts", Prompt(7, (1, 2), "", "", "")
    for step, num_tokens in ((1, 3), (2, 9), (3, 4)):
        tokens = Segment.sampled(0, 0, (3,) * num_tokens, [-1.0] * num_tokens)
        write_groups(folder, step, [Group(prompt, (Sample.of("7.0", prompt, (tokens,), Ended("stop", 1.0)),))])
    if has_config:
        (tmp_path / "config.toml").write_text("[rollout]\nmax_response_tokens = 9\n")
    replay = ["rollout.engine=recorded", f"rollout.recorded_from={folder}", "rollout.tokens_per_round=4"]
    num_steps = f"train.num_steps={3 if has_config else 2}"
    (line,) = answer(capsys, *replay, "rollout.max_response_tokens=8", num_steps)
    told = f"{folder}/step-000002.jsonl.gz, line 1: a response of prompt 7 has 9 tokens, more than "
    assert told + "rollout.max_response_tokens=8; set it to what the samples were recorded with" in line
    assert not answer(capsys, *replay, "rollout.max_response_tokens=9", "train.num_steps=3")


def test_a_recording_without_what_a_served_teacher_adds_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A replay would learn nothing from it. A sample may lack scores, because its teacher has failed."""
    prompt, tokens = Prompt(7, (1, 2), "", "", ""), Segment.sampled(0, 0, (3,), [-1.0])
    plain = Sample.of("7.0", prompt, (tokens,), Ended("stop", 1.0))
    scored = with_rows(plain, {TEACHER_LOGPROBS: np.array([-1.0], "float32"), TEACHER_VERSIONS: np.array([-1])})
    replay = ["rollout.engine=recorded", f"rollout.recorded_from={tmp_path}", "train.num_steps=1", "loss.name=grpo"]
    served = 'teacher.urls=["http://127.0.0.1:1"]'
    write_groups(tmp_path, 1, [Group(prompt, (plain,))])
    (line,) = answer(capsys, *replay, served)
    told = "the samples have no teacher_logprobs or teacher_versions, which teacher.urls adds to samples as they end"
    assert told in line
    assert not answer(capsys, *replay)
    write_groups(tmp_path, 1, [Group(prompt, (plain, replace(scored, sample_id="7.1")))])
    assert not answer(capsys, *replay, served)


JUDGES = {
    "raises": ("def judge(response):\n    raise RuntimeError('boom')", "RuntimeError('boom')"),
    "nothing": ("def judge(response):\n    pass", "TypeError"),
    "text": ("def judge(response):\n    return 'good'", "a judge returns a number"),
    "table": ("def judge(response):\n    return {'score': 1.0}", "parts that reward.weights does not name: 'score'"),
    "zero": ("def judge(response):\n    return 0.0", "gives 0 to the answer of chains item 0 itself; if it expects"),
    "offers": (
        "def sample_response(prompt):\n    return prompt[50]\ndef judge(response):\n    return 1.0",
        "IndexError",
    ),
    "sleeps": ("import signal\ndef judge(response):\n    signal.pause()", "no verdict in 1 s"),
    "prints": ("print('seen')\ndef judge(response):\n    print('seen')\n    return 0.0", "gives 0 to the answer"),
    "exits": (
        "class Odd(BaseException):\n    pass\nraise Odd('on purpose')",
        "before its judge was built; it printed last: judge_exits.Odd: on purpose",
    ),
    "signature": ("def judge(reply):\n    return 1.0", "it asks for reply"),
}


@pytest.mark.parametrize("name", JUDGES)
def test_the_judge_is_called_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    text, part = JUDGES[name]
    (tmp_path / f"judge_{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (line,) = answer(capfd, f"reward.kind=judge_{name}:judge", f"reward.timeout_s={1 if name == 'sleeps' else HANG_S}")
    assert f"judge_{name}:judge" in line
    assert part in line
    assert line.startswith("warning: ") == (name in ("raises", "sleeps", "zero", "offers", "prints")), (
        "another form is not a mistake"
    )


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ("environment.kind=calculator environment.stop_tokens=[',','=']", ""),
        ("environment.kind=sudoku", 'a path like "my_module:my_name" or "replay:my_module:my_name", got "sudoku"'),
        ("environment.kind=no_module:step", 'kind="no_module:step": importing no_module failed: ModuleNotFoundError'),
        ("environment.kind=tests.unit.step_functions:no_step", "does not fit turn, state and environment.options"),
        ("environment.kind=replay:tests.unit.step_functions:Game environment.options.most=5", ""),
        ("environment.kind=replay:sudoku", "importing replay failed: ModuleNotFoundError"),
        ("environment.kind=replay:no_module:Game", 'kind="replay:no_module:Game": importing no_module failed'),
        (
            "environment.kind=replay:tests.unit.step_functions:NoStep",
            "of type NoStep, which has no step",
        ),
        ("environment.kind=guess environment.options.max_gueses=3", "unexpected keyword argument 'max_gueses'"),
        ("environment.kind=guess environment.stop_tokens=['1','+2']", "stop_tokens: '+2' is 2 tokens of the model's"),
    ],
)
def test_the_environment_is_started_and_its_stop_tokens_are_found(
    settings: str, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = answer(capsys, "environment.max_answer_tokens=9", *settings.split())
    assert len(lines) == bool(part)
    assert all(part in line for line in lines)


SHOWN = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
TEMPLATE = "{% for m in messages %}{{ m.content ~ eos_token }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "settings", "part"),
    [
        (SHOWN + TEMPLATE, "environment.options.tools=['calculator','python']", ""),
        (TEMPLATE, "environment.options.tools=['calculator'] environment.options.in_prompt=true", ""),
        (
            SHOWN + TEMPLATE,
            "data.chat_template=false environment.options.tools=['calculator']",
            "chat_template=true; set it",
        ),
        (SHOWN + TEMPLATE, "", 'options of environment.kind = "tools": tools is a list of names'),
        (
            SHOWN + TEMPLATE,
            "environment.options.tools=['tests.unit.tool_functions:no_hint']",
            'tools="tests.unit.tool_functions:no_hint": its parameter query has no type hint',
        ),
        (
            SHOWN + "{% for m in messages if m.role != 'tool' %}{{ m.content ~ eos_token }}{% endfor %}",
            "environment.options.tools=['calculator']",
            "does not show 'tool' messages after a turn; set environment.options.role = \"user\"",
        ),
        (
            SHOWN + TEMPLATE,
            "environment.options.tools=['calculator'] reward.kind=no_module:judge",
            'reward.kind="no_module:judge": importing no_module failed',
        ),
    ],
)
def test_tools_and_their_judge_are_read_and_tried_on_the_chat_template(
    template: str, settings: str, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(demo_model_path(), tmp_path, dirs_exist_ok=True)
    told = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told | {"chat_template": template}))
    kind = (f"model.path={tmp_path}", "environment.kind=tools", "data.chat_template=true", "data.max_prompt_tokens=400")
    lines = answer(capsys, *kind, "environment.max_answer_tokens=9", *settings.split())
    assert len(lines) == bool(part), lines
    assert all(part in line for line in lines)


@pytest.mark.parametrize("offer", ["def sample_response(answer):\n    return json.dumps({'answer': answer})\n", ""])
def test_a_judge_that_expects_another_form_may_offer_one(
    offer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"json_judge_{len(offer)}"
    judge = "def judge(answer, response):\n    return float(json.loads(response)['answer'] == answer)\n"
    (tmp_path / f"{name}.py").write_text(f"import json\n{offer}{judge}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    lines = answer(capsys, f"reward.kind={name}:judge", f"reward.timeout_s={HANG_S}")
    if offer:
        assert lines == []
    else:
        (line,) = lines
        assert line.startswith("warning: ")
        assert line.endswith("let its module offer one: def sample_response(answer) -> str")


@pytest.mark.parametrize(
    ("reference", "settings", "said"),
    [
        (
            "Paris",
            [],
            "prompts.jsonl:1 itself (must it be in \\boxed{}?); let the prompts ask for that, or set reward.kind",
        ),
        ("Paris", ["reward.kind=text"], None),
        ("8", [], None),
    ],
)
def test_a_reference_that_its_own_judge_gives_0_is_told(
    reference: str, settings: list[str], said: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "1+1=", "answer": reference}] * 16)
    lines = answer(capsys, "data.source=jsonl", f"data.path={path}", f"reward.timeout_s={HANG_S}", *settings)
    assert len(lines) == (said is not None)
    assert all(str(said) in line for line in lines)


@pytest.mark.parametrize(
    ("row", "settings", "part"),
    [
        ({"prompt": [{"role": "user", "content": "1"}, {"role": "user", "content": "2"}]}, [], "is a conversation; "),
        ({"prompt": [{"role": "system", "content": "1"}, {"role": "user", "content": "2"}]},
         ["data.on_bad_prompt=skip"], "is a conversation; the model has no chat template"),
        ({"prompt": "1+1=", "tools": [{"type": "function", "function": {"name": "f"}}]}, [], "has tools; the model"),
        ({"prompt": "1" * 17}, [], "prompts.jsonl:3001: the prompt has 17 tokens, more than"),
    ],
)  # fmt: skip
def test_a_row_that_training_would_refuse_is_told_wherever_it_stands(
    row: dict[str, object], settings: list[str], part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_rows(tmp_path / "prompts.jsonl", [*(ROWS * 1500), {**row, "answer": "1"}])
    (line,) = answer(capsys, "data.source=jsonl", f"data.path={path}", *settings)
    assert part in line


def test_a_limit_that_cuts_every_answer_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "1+1=", "answer": text} for text in ("1234", 12345)] * 8)
    for limit, part in ((3, "the shortest answer has 4 tokens, and rollout.max_response_tokens=3 cuts"), (4, None)):
        settings = [f"rollout.max_response_tokens={limit}", "rollout.tokens_per_round=none"]
        lines = answer(capsys, "data.source=jsonl", f"data.path={path}", *settings)
        assert len(lines) == (part is not None)
        assert all(str(part) in line for line in lines)
    (line,) = answer(capsys, "rollout.max_response_tokens=1", "rollout.tokens_per_round=none")
    assert "cuts every response after its first token" in line


def test_an_earlier_run_that_cannot_be_resumed_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = [f"run.dir={tmp_path}", "run.name=mine"]
    with RunDir.open(load_config(["demo"], where)) as run_dir:
        run_dir.metrics_path.write_text('{"step": 1}\n')
        (line,) = answer(capsys, *where)
        assert line.startswith("warning: the run ")
        assert "is in use by process" in line
    assert answer(capsys, *where) == []
    assert any("optimizer.lr: 0.0003 -> 0.001" in line for line in answer_of_error(capsys, *where, "optimizer.lr=1e-3"))


def answer_of_error(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert cli.main(["check", "demo", *arguments]) == 2
    return capsys.readouterr().err.splitlines()


def test_fewer_prompts_than_a_step_takes_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = answer(capsys, "data.source=jsonl", f"data.path={write_rows(tmp_path / 'prompts.jsonl')}")
    assert line.startswith("warning: rollout.prompts_per_step=16 is more than the 2 prompts of ")
    assert line.endswith("set rollout.prompts_per_step=2, or add prompts")


def test_a_file_of_prompts_is_no_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_rows(tmp_path / "prompts.jsonl")
    assert cli.main(["eval", "demo", path]) == 2
    assert f"in `bapo eval` give it as --data {path}" in capsys.readouterr().err


def test_a_judge_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = answer(capsys, "reward.kind=nomod:f")
    assert "importing nomod failed: ModuleNotFoundError" in line


def test_the_tasks_of_a_sweep_read_each_thing_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    build = inputs.build_source
    monkeypatch.setattr(
        inputs, "build_source", lambda config, *table: read.append(config.data.source) or build(config, *table)
    )
    memory: inputs.Memory = {}
    for settings in (["optimizer.lr=1"], ["optimizer.lr=2"], ["data.size=5"]):
        inputs.read_inputs(resolve(load_config(["demo"], settings)), None, memory, here=True)
    assert read == ["chains", "chains"]


def test_all_stages_answer_at_once_and_blame_the_right_source(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["parallel.tensor=3", "train.minibatches_per_step=7", "bapo.rho0=1.4", "bapo.rho_0=2", "optimizer.lr=fast"]
    lines = answer(capsys, *wrong, "data.options={min_terms=9,max_terms=2}", "nonsense=")
    assert [line.split(" ")[0] for line in lines] == [
        "no", "optimizer.lr", "no", "bapo.rho0", "train.minibatches_per_step=7", "parallel.tensor=3", "data.options",
    ]  # fmt: skip
    assert lines[3].endswith("got 1.4 (override bapo.rho0=1.4)")


def test_an_engine_without_urls_hides_neither_the_missing_file_nor_the_judge(
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = ["rollout.engine=attach", "data.source=jsonl", "data.path=/nope.jsonl", "reward.kind=nomod:judge"]
    lines = answer(capsys, *settings)
    assert [line.split(" ")[0] for line in lines] == [
        'rollout.engine="attach"', "data.path:", 'reward.kind="nomod:judge":',
    ]  # fmt: skip


def test_a_judge_of_programs_without_tests_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = answer(capsys, "reward.kind=code")
    assert "needs prompts with tests" in line


def test_what_only_follows_from_another_mistake_is_not_told() -> None:
    reading = read_config([], ["loss.name=ppo", "loss.clip_high=1.3", "bapo.contribution=x", "bapo.rho0=1.4"])
    assert [v.settings for v in reading.violations] == [("loss.name",), ("bapo.contribution",)]
    assert {"loss", "bapo.contribution"} <= reading.unread
    assert reading.config.loss.name == "bapo"


def test_the_first_given_of_two_settings_that_contradict_each_other_is_blamed() -> None:
    (violation,) = read_config([], ["bapo.preset=official", "bapo.contribution=gradient"]).violations
    assert violation.settings == ("bapo.rho0", "bapo.contribution", "bapo.preset")
    assert violation.message.startswith("bapo.rho0 must be below 1")
    assert violation.message.endswith("(override bapo.contribution=gradient)")


def test_control_characters_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    lines = answer(capsys, "run.x\x1b[31m\ny=1", "model.path=a\0b", "rollout.engine=\u202e")
    assert len(lines) == 3
    assert all(line.isprintable() for line in lines)
    assert escaped("a\n\x1b\ud800 é 😀") == "a\\n\\x1b\\ud800 é 😀"


def test_only_the_users_own_settings_are_told_to_have_no_effect(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = ["check", "recipes/octothinker-3b-8k", "algorithms/grpo", "clusters/1x8-h100"]
    assert (cli.main(recipe), capsys.readouterr().err) == (0, ""), "its [bapo] is for algorithms/bapo"
    assert cli.main([*recipe, "bapo.order=low_first"]) == 0
    assert capsys.readouterr().err == (
        'bapo: warning: bapo.order="low_first" has no effect without loss.name="bapo"; set that, or leave it out\n'
    )


def test_each_setting_without_effect_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    lines = answer(capsys, "loss.name=grpo", "bapo.rho0=0.3", "loss.reference_path=x", "eval.path=nope.jsonl")
    assert [line.split("=")[0] for line in lines] == [
        "warning: bapo.rho0", "warning: loss.reference_path", "warning: eval.path",
    ]  # fmt: skip


def test_wandb_needs_a_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = load_config(["demo"], ['monitor.sinks=["wandb"]'])
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr("bapo_megatron.preflight.checks.monitor.find_spec", lambda name: name)
    (violation,) = check_monitor(config)
    assert "there is no key for Weights & Biases; run `wandb login`" in violation.message
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret")
    assert list(check_monitor(config)) == []
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example")
    assert len(list(check_monitor(config))) == 1
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert list(check_monitor(config)) == []


def test_upstream_names_are_read_from_their_sources() -> None:
    assert {"num_layers", "moe_router_topk", "tensor_model_parallel_size"} <= inputs.transformer_settings()
    assert {"mem_fraction_static", "attention_backend", "tp_size"} <= inputs.server_arguments()


def test_every_file_of_sources_and_sets_is_read_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each kind of judge also scores a first sample, from training and from an evaluation set."""
    good, bad = write_rows(tmp_path / "good.jsonl"), write_rows(tmp_path / "bad.jsonl", [*ROWS, "{"])
    mixed = f'data.sources=[{{name="a",path="{good}"}},{{name="b",path="{bad}"}}]'
    sets = f'eval.sets=[{{name="c"}},{{name="d",path="{bad}"}},{{name="e",path="{good}"}}]'
    lines = answer(capsys, mixed, "eval.interval_steps=5", sets)
    assert [line.split(": ")[0] for line in lines] == [f"{bad}:3", f"{bad}:3"]
    assert answer(capsys, mixed.replace(bad, good), "eval.interval_steps=5", sets.replace(bad, good)) == []


@pytest.mark.parametrize("is_known_family", [False, True])
def test_no_code_of_a_model_folder_is_run_or_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_known_family: bool
) -> None:
    """A user who would answer "y" to every question is asked none."""
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or "y")
    folder = tmp_path / "evil"
    shutil.copytree(demo_model_path(), folder)
    (folder / "evil.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.C", "AutoTokenizer": ["evil.T", "evil.T"]}
    if not is_known_family:
        config["model_type"] = "evil"
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    del tokenizer["tokenizer_class"]  # so that the model's configuration is looked at
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    lines = answer(capsys, f"model.path={folder}")
    assert not (tmp_path / "ran").exists()
    assert asked == []
    if not is_known_family:
        (line,) = lines
        assert line.startswith("model_type 'evil' is not supported")


@pytest.mark.parametrize("num_bad", [0, 1, 2, 3])
def test_rows_that_a_run_will_skip_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], num_bad: int
) -> None:
    rows = [{"prompt": "1+" * 20 + "1=" if i < num_bad else "1+1=", "answer": "2"} for i in range(3)]
    path = write_rows(tmp_path / "x.jsonl", rows)
    skipping = ("data.on_bad_prompt=skip", "rollout.prompts_per_step=1", "rollout.groups_in_flight=1")
    told = answer(capsys, "data.source=jsonl", f"data.path={path}", *skipping)
    if num_bad == 0:
        assert not told
        return
    (line,) = told
    first = f"{path}:1: the prompt has 42 tokens, more than data.max_prompt_tokens = 16"
    what = f"{path}: {num_bad} of 3 prompts read are left out, as data.on_bad_prompt asks; the first: {first}"
    assert (what if num_bad < 3 else "correct them or data.max_prompt_tokens: all would be left out") in line
    assert first in line
    assert ("warning" in line) == (num_bad < 3)


@pytest.mark.parametrize(
    ("config", "size", "part"),
    [
        ({}, 100, "copy or download the file again"),
        ({"intermediate_size": 64}, None, "model.layers.0.mlp.gate_proj.weight (model.safetensors) is [512, 128]"),
        ({"quantization_config": {"quant_method": "fp8"}}, None, "dequantise the checkpoint first"),
    ],
)
def test_weights_that_do_not_fit_are_told_before_a_run(
    config: dict[str, object], size: int | None, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(demo_model_path(), folder, copy_function=shutil.copyfile)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    if size is not None:
        os.truncate(folder / "model.safetensors", size)
    for settings in (
        [f"model.path={folder}"],
        [f"loss.reference_path={folder}", "loss.kl_coef=0.1"],
        [f"critic.path={folder}", "advantage.kind=gae"],
    ):
        (line,) = [line for line in answer(capsys, *settings) if not line.startswith("warning: ")]
        assert part in line
        assert str(folder) in line or "config.json" in line
