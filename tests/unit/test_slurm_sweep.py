"""The tasks of a job array: checked as the job will load them, and refused where one script cannot serve them."""

import json
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from bapo_megatron.cli import main
from bapo_megatron.config.load import dump_config, load_config, load_tables
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import ConfigError
from bapo_megatron.preflight.check import violations_of
from bapo_megatron.slurm import submit
from bapo_megatron.slurm.submit import check_job, make_job

TWO_NODES = ("cluster.nodes=2", "parallel.data=2", "rollout.num_servers=2")


def sweep(*lines: str) -> str:
    return f"slurm.sweep={json.dumps(lines)}"


def configured(*settings: str) -> Config:
    return load_config(["demo"], ["run.name=job", *settings])


def told(config: Config, *, here: bool | None = None) -> list[str]:
    """Return all errors that `bapo slurm` tells."""
    found = violations_of(config, elsewhere=True, here=here, job=lambda config: check_job(config, here=here))
    return [v.message for v in found if v.severity == "error"]


def loaded_by_the_job(job: submit.Job, folder: Path, index: int) -> Config:
    """As a process of task `index` loads it: the written settings, and those that the script gives."""
    (line,) = [line for line in job.script.splitlines() if line.startswith(f"    {index}) settings=(")]
    settings = shlex.split(line.removeprefix(f"    {index}) settings=(").removesuffix(") ;;"))
    file = folder / "config.toml"
    file.write_text(job.config_text)
    return load_config([file], settings)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train.minibatches_per_step=7", "train.minibatches_per_step=7 does not divide"),
        ("rollout.tokens_per_round=100000", "rollout.tokens_per_round=100000 is more than rollout.max_response_tokens"),
        ("loss.name=bapo loss.clip_high=1.1", 'loss.clip_high is not a setting of loss.name="bapo"'),
        ("bapo.low.start=0.8", "bapo.low.start must not be above stop (0.7), got 0.8"),
        ("model.path=/nowhere", "there is no folder /nowhere"),
        ("optimizer.rl=1", "no such setting: optimizer.rl"),
        ("optimizer.lr='1", "No closing quotation"),
        ("run.name=mine", "the run of this task is job-1; leave run.name out"),
    ],
)
def test_a_task_that_cannot_run_is_named(line: str, said: str) -> None:
    """Its settings are those of the job with its own over them: bapo.low.stop is the job's."""
    (message,) = told(configured("bapo.low.start=0.5", "bapo.low.stop=0.7", sweep("optimizer.lr=1e-4", line)))
    assert message.startswith(f"slurm.sweep[1] = {line!r}: ")
    assert said in message


def test_all_tasks_are_told_at_once() -> None:
    of_job, *of_tasks = told(
        configured("slurm.rollout_nodes=1", sweep("run.nmae=x loss.name=q", "optimizer.lr=1e-4", "data.nmae=x"))
    )
    assert of_job.startswith("slurm.rollout_nodes=1 leaves none")
    assert [message.partition(" = ")[0] for message in of_tasks] == ["slurm.sweep[0]"] * 2 + ["slurm.sweep[2]"]


def test_a_task_that_would_mend_the_job_is_not_compared_with_it() -> None:
    """The job has no placement."""
    (message,) = told(configured("slurm.rollout_nodes=1", "parallel.data=1", sweep("cluster.nodes=2")))
    assert message.startswith("slurm.rollout_nodes=1 leaves none")


def test_what_is_wrong_with_the_job_is_told_with_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    lines = sweep("optimizer.rl=1", "optimizer.lr=1e-4")
    settings = ("optimizer.lr=-1", "train.minibatches_per_step=7", "slurm.runtime=pyxis", lines)
    assert main(["slurm", "--dry-run", "demo", *settings]) == 2
    told = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in told] == [
        "optimizer.lr",
        "train.minibatches_per_step=7",
        'slurm.runtime="pyxis"',
        "slurm.sweep[0]",
    ]


def test_warnings_about_several_nodes_are_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    layout = ("cluster.gpu=h100", "cluster.nodes=2", "parallel.data=4", "rollout.num_servers=2", "model.dtype=bfloat16")
    assert main(["slurm", "--dry-run", "demo", "rollout.engine=sglang", *layout]) == 0
    told = capsys.readouterr().err.splitlines()
    assert any("are idle" in line for line in told)
    assert len(set(told)) == len(told)


def test_a_task_is_valid_with_the_settings_of_its_job(tmp_path: Path) -> None:
    """bapo.low.start=0.95 is above the default of bapo.low.stop, and below the job's."""
    job = make_job(
        configured("bapo.low.stop=0.97", sweep("bapo.low.start=0.95", "data.source=programs data.max_prompt_tokens=32"))
    )
    first, second = (loaded_by_the_job(job, tmp_path, i) for i in (0, 1))
    assert (first.bapo.low.start, first.bapo.low.stop, first.run.name) == (0.95, 0.97, "job-0")
    assert second.data.options == {}, "they are of the job's prompt source"


def test_memory_is_checked_for_each_task() -> None:
    recipe = load_config(
        ["recipes/qwen3-32b-64k", "algorithms/bapo", "clusters/16x8-h200"],
        [sweep("optimizer.lr=1e-6", "train.max_tokens_per_microbatch=900000")],
    )
    (message,) = told(recipe)
    assert "slurm.sweep[1]" in message
    assert "a trainer rank needs" in message


def test_a_task_that_ran_before_has_the_time_of_its_own_steps(tmp_path: Path) -> None:
    metrics = tmp_path / "job-1" / "metrics.jsonl"
    metrics.parent.mkdir()
    metrics.write_text(json.dumps({"step": 1, "time/step_s": 200.0}) + "\n")
    limits = ("slurm.time_limit=01:00:00", "checkpoint.interval_steps=20")
    (message,) = told(configured(f"run.dir={tmp_path}", *limits, sweep("optimizer.lr=1e-4", "optimizer.lr=1e-5")))
    assert message.startswith("slurm.sweep[1] = ")
    assert "slurm.time_limit=01:00:00 is shorter than one" in message


def test_a_warning_is_told_of_the_task_that_brings_it() -> None:
    lines = ("checkpoint.interval_steps=none", "optimizer.lr=1e-4")
    (found,) = check_job(configured(sweep(*lines)))
    assert found.message.startswith("slurm.sweep[0] = ")
    (found,) = check_job(configured("checkpoint.interval_steps=none", sweep(*lines)))
    assert found.message.startswith("checkpoint.interval_steps ")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("parallel.data=4", "trainer ranks per node: 4 instead of 2"),
        ("rollout.num_servers=4", "engines per node: 2 instead of 1"),
        (
            "rollout.engine=recorded rollout.recorded_from=x",
            "engine nodes: 0 instead of 2, engines per node: 0 instead of 1",
        ),
        ("cluster.nodes=1", "nodes: 1 instead of 2, trainer nodes: 1 instead of 2"),
        ("cluster.gpu=h100", "GPUs per node: 8 instead of 0"),
        ("parallel.threads_per_rank=2", "parallel.threads_per_rank 2 instead of unset"),
        ("slurm.time_limit=01:00:00", "slurm.time_limit 01:00:00 instead of unset"),
        ("run.dir=elsewhere", "run.dir elsewhere instead of"),
    ],
)
def test_a_task_that_needs_another_script_is_to_be_submitted_on_its_own(line: str, said: str) -> None:
    (message,) = told(configured(*TWO_NODES, sweep(line)), here=False)
    assert message.startswith(f"slurm.sweep[0] = {line!r}: the tasks of a job share one script, and this one needs ")
    assert said in message
    assert message.endswith("; submit it on its own")


def test_a_task_that_reads_what_is_not_mounted_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / "prompts.jsonl"
    file.write_text('{"prompt": "1+1=", "answer": "2"}')
    container = ("slurm.runtime=apptainer", "slurm.container_image=docker://a/b:1")
    lines = sweep("optimizer.lr=1e-4", f"data.source=jsonl data.path={file}")
    (message,) = told(configured(*container, lines))
    assert message.startswith("slurm.sweep[1] = ")
    assert f"this one reads files in {tmp_path}/data; add that to" in message
    assert told(configured(*container, lines, f'slurm.container_mounts=["{tmp_path}"]')) == []
    assert told(configured(lines)) == []


def test_the_script_does_not_depend_on_what_a_task_may_change() -> None:
    """Each setting in turn: it is refused, or the script that it would have alone is that of the job."""
    job = configured()
    tables, script = {"job": tomllib.loads(dump_config(job))}, commands(job)
    refused, same = set(), set()
    for name, values in changes(job):
        for value in values:
            try:
                task = load_tables(tables, [f"{name}={value}"])
                differs = any(submit.unmet_needs(job, task))
            except (ConfigError, ZeroDivisionError):  # invalid, or without a placement
                continue
            assert task != job
            if differs:
                refused.add(name)
            else:
                same.add(name)
                assert commands(task) == script, f"{name}={value}"
            break
    assert len(same) > 100
    assert {"slurm.options", "parallel.data", "cluster.nodes", "run.dir"} <= refused


def changes(config: BaseModel, prefix: str = "") -> Iterator[tuple[str, list[str]]]:
    """Each setting, but for the name of the run, with values to try in its place."""
    for field in type(config).model_fields:
        name, value = f"{prefix}{field}", getattr(config, field)
        if isinstance(value, BaseModel):
            yield from changes(value, f"{name}.")
        elif isinstance(value, bool):
            yield name, [json.dumps(not value)]
        elif isinstance(value, int | float):
            yield name, [f"{2 * value + 1}", f"{value / 2 or 0.5}"]
        elif isinstance(value, str) and name != "run.name":
            yield name, ["another"]
        elif value is None:
            yield name, ["3", "other", "01:00:00", "h100"]
        elif isinstance(value, tuple):
            yield name, ['["--other"]']


def commands(config: Config) -> list[str]:
    """Return the commands of the job's script, with a fixed name for the file of settings."""
    job = make_job(config)
    script = job.script.replace(job.config_path.name, "config.toml")
    return [line for line in script.splitlines() if not line.startswith("# ")]
