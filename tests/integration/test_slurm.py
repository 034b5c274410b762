"""A real SLURM with three nodes on this machine: whatever happens to a job, the demo ends as if left alone."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from bapo_megatron.config.load import load_config
from bapo_megatron.engines import processes
from bapo_megatron.runs.folder import RunDir
from bapo_megatron.runtime.files import read_jsonl
from bapo_megatron.slurm.submit import make_job
from bapo_megatron.sync.folder import weights_folder
from tests import debian
from tests.distributed import HANG_S
from tests.integration.gates import Gates
from tests.integration.killable import SMALL
from tests.integration.slurm_cluster import PACKAGES, PROGRAMS, Cluster
from tests.integration.test_kill_resume import assert_same, checkpoint_of, metrics_of
from tests.integration.test_supervisor import is_alive
from tests.slurm_kinds import KINDS, settings_of

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parents[2] / "scripts"
NUM_STEPS = 5
SETTINGS = (*SMALL, f"train.num_steps={NUM_STEPS}", "rollout.num_servers=2")
TWO_NODES = ("cluster.nodes=2", "slurm.interface=lo", "slurm.time_limit=01:00:00")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if os.geteuid() != 0:
        pytest.skip("SLURM's daemons need root here")
    debian.require(PROGRAMS, PACKAGES)
    with Cluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started


@pytest.fixture(scope="module")
def alone(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Path]]:
    """Start the run without SLURM, undisturbed; return a function that waits for its end and returns its folder."""
    folder = tmp_path_factory.mktemp("alone")
    command = ("train", "demo", f"run.dir={folder}", "run.name=run", *SETTINGS)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(bapo, cluster, *command)

        def wait() -> Path:
            assert done.result(HANG_S).returncode == 0, done.result().stderr
            return folder / "run"

        yield wait


def bapo(cluster: Cluster, *arguments: str, gates: Gates | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bapo_megatron", *arguments],
        env=cluster.environment | (gates.environment if gates else {}),
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def num_saved(run: Path) -> int:
    latest = run / "checkpoints" / "latest"
    return int(latest.read_text().removeprefix("step-")) if latest.exists() else 0


def listening_addresses(job: str) -> set[str]:
    """Return the addresses at which a job's ranks and engines listen, by the kernel's table."""
    addresses = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has just ended, or is not ours
            is_ours = any(word.startswith("bapo_megatron") for word in process.cmdline()[:4])  # python -P -m MODULE
            if is_ours and process.environ().get("SLURM_JOB_ID") == job:
                sockets = process.net_connections(kind="tcp")
                addresses |= {s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN}
    return addresses


def ranks_of(cluster: Cluster, job: str, node: str) -> list[psutil.Process]:
    return cluster.processes(job, node, "bapo_megatron.slurm.node", "trainer")


def wait_for(condition: Callable[[], bool], what: str, cluster: Cluster, run: Path) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        if time.monotonic() > deadline:
            logs = [*run.glob("slurm/*.log"), *run.glob("logs/*/*.log")]
            said = "\n".join(f"== {log}\n{log.read_text()[-2000:]}" for log in logs)
            raise AssertionError(f"waited until {what}\n{said}\n{cluster.logs()}")
        time.sleep(0.1)


def submitted(cluster: Cluster, run: Path, *settings: str, gates: Gates) -> str:
    """Submit the demo on two nodes and return the job's id."""
    settings = (f"run.dir={run.parent}", f"run.name={run.name}", *SETTINGS, *TWO_NODES, *settings)
    told = bapo(cluster, "slurm", "demo", *settings, "--submit", gates=gates)
    assert told.returncode == 0, told.stderr
    (job,) = [line.split()[1] for line in told.stdout.splitlines() if line.startswith("submitted")]
    return job


def test_a_run_over_two_nodes_is_requeued_and_loses_nothing(
    cluster: Cluster, alone: Callable[[], Path], tmp_path: Path
) -> None:
    run = tmp_path / "two"
    gates = Gates(tmp_path / "gates", 2, 4)
    job = submitted(cluster, run, gates=gates)

    def is_running() -> bool:
        return cluster.job(job)["JobState"] not in ("COMPLETED", "FAILED", "CANCELLED")

    # Taken off its nodes in its second step, as by preemption.
    gates.wait(2, is_running, cluster.logs)
    ranks = [rank for node in ("n1", "n2") for rank in ranks_of(cluster, job, node)]
    assert len(ranks) == 2
    cluster.run("scontrol", "requeue", job)
    wait_for(lambda: cluster.job(job)["Restarts"] == "1", "the job was requeued", cluster, run)
    wait_for(lambda: not any(map(is_alive, ranks)), "its ranks had ended", cluster, run)  # they could come to gate 4
    gates.open(2)

    # Told to stop in its fourth step, as before its time limit: it saves, and queues itself again.
    gates.wait(4, is_running, cluster.logs)
    assert num_saved(run) == 3
    assert listening_addresses(job) == {"127.0.0.1"}, "slurm.interface is lo"
    cluster.run("scancel", "--batch", "--signal=TERM", job)
    wait_for((run / "slurm" / f"job-{job}-1" / "stop").exists, "the job was told to stop", cluster, run)
    gates.open(4)
    wait_for(lambda: cluster.job(job)["Restarts"] == "2", "the job has requeued itself", cluster, run)
    assert (run / "slurm" / f"job-{job}-1" / "stopped").exists()

    wait_for(lambda: cluster.job(job)["JobState"] == "COMPLETED", "the job was done", cluster, run)
    assert len(list((run / "logs").glob("attempt-*"))) == 3
    log = (run / "slurm" / f"job-{job}.log").read_text()
    assert "bapo: stopped, and saved" in log
    assert log.count("resuming") == 2
    for attempt in (1, 2, 3):
        names = {path.name for path in (run / "logs" / f"attempt-{attempt}").glob("*.log")}
        assert {"trainer-0.log", "trainer-1.log", "engine-0.log", "engine-1.log"} <= names
        told = [
            json.loads((run / "slurm" / f"job-{job}-{attempt - 1}" / f"engines-{i}.json").read_text()) for i in (0, 1)
        ]
        assert [len(facts["urls"]) for facts in told] == [1, 1]

    # Bit for bit the same run as without SLURM, undisturbed, on the same machine.
    assert len(read_jsonl(run / "metrics.jsonl")) == NUM_STEPS
    assert_same(run, alone(), NUM_STEPS)


def test_ranks_start_again_in_the_job_after_a_rank_and_a_whole_node_have_died(
    cluster: Cluster, alone: Callable[[], Path], tmp_path: Path
) -> None:
    run = tmp_path / "restarted"
    gates = Gates(tmp_path / "gates", 2, 3, 4)
    job = submitted(cluster, run, "run.max_restarts=3", "slurm.spare_nodes=1", gates=gates)

    def complaints() -> str:
        logs = [*run.glob("slurm/*.log"), *run.glob("logs/*/*.log")]
        return "\n".join(f"== {log}\n{log.read_text()[-2000:]}" for log in logs) + cluster.logs()

    def is_running() -> bool:
        return cluster.job(job)["JobState"] in ("PENDING", "RUNNING")

    def engines(node: str) -> list[psutil.Process]:
        return cluster.processes(job, node, "bapo_megatron.engines.embedded")

    gates.wait(2, is_running, complaints)
    first = {node: engines(node) for node in ("n1", "n2")}
    assert [len(found) for found in first.values()] == [1, 1]
    (rank,) = ranks_of(cluster, job, "n2")
    rank.kill()
    gates.open(2)

    gates.wait(3, is_running, complaints)
    assert {node: engines(node) for node in ("n1", "n2")} == first, "the same processes"
    assert cluster.processes(job, "n3") == []
    with cluster.failing("n2", job):
        gates.open(3)
        gates.wait(4, is_running, complaints)
        assert engines("n1") == first["n1"]
        assert len(ranks_of(cluster, job, "n3")) == 1
        gates.open(4)
        wait_for(lambda: cluster.job(job)["JobState"] == "COMPLETED", "the job was done", cluster, run)
    assert len(list((run / "logs").glob("attempt-*"))) == 3
    log = (run / "slurm" / f"job-{job}.log").read_text()
    assert "it starts again on n1 n2\n" in log
    assert "it starts again on n1 n3\n" in log
    assert "restart 1 of 3 in 1 s" in log
    assert not (run / "slurm" / f"job-{job}-0" / "key").exists()
    rows = read_jsonl(run / "metrics.jsonl")
    assert [row["run/restarts"] for row in rows] == [0, 1, 2, 2, 2]
    assert [row["step"] for row in rows if "run/recovery_s" in row] == [2, 3]

    # Bit for bit while there are two engines; then one has other batches, and other last digits of log-probs.
    expected = alone()
    assert metrics_of(run)[:2] == metrics_of(expected)[:2]
    for step in (1, 2):
        assert checkpoint_of(run, step) == checkpoint_of(expected, step)
    assert read_jsonl(run / "samples.jsonl") == read_jsonl(expected / "samples.jsonl")
    for row, other in zip(rows, read_jsonl(expected / "metrics.jsonl"), strict=True):
        for name in ("loss/policy", "optimizer/grad_norm", "bapo/positive_share"):
            assert row[name] == pytest.approx(other[name], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_trainer_and_engines_share_the_nodes(
    cluster: Cluster, alone: Callable[[], Path], tmp_path: Path, num_nodes: int
) -> None:
    """On one node, the folder for weights is in memory; on two, it is on the disk that they share."""
    run, folder = tmp_path / "split", tmp_path / "weights"
    folders = [f"sync.folder={folder}"] if num_nodes == 2 else []
    settings = (f"cluster.nodes={num_nodes}", "rollout.placement=split", *folders)
    job = submitted(cluster, run, *settings, gates=Gates(tmp_path / "gates"))
    wait_for(lambda: cluster.job(job)["JobState"] == "COMPLETED", "the job was done", cluster, run)
    assert_same(run, alone(), NUM_STEPS)
    kept = weights_folder(load_config([run / "config.toml"], []), RunDir.attach(run)).parent
    assert kept.parent == (folder if folders else Path("/dev/shm"))
    assert not kept.exists()


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_every_kind_of_job_is_accepted_by_sbatch(kind: tuple[str, str, str], cluster: Cluster, tmp_path: Path) -> None:
    job = make_job(load_config(["demo"], settings_of(kind, tmp_path)))
    job.write()
    cluster.run("sbatch", "--test-only", str(job.script_path))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (('slurm.options=["--partition=nowhere"]',), "invalid partition specified: nowhere"),
        (
            ('slurm.options=["--partition=closed", "--account=strangers"]',),
            "Invalid account or account/partition combination",
        ),
    ],
)
def test_what_sbatch_refuses_is_told_in_its_own_words(
    settings: tuple[str, ...], said: str, cluster: Cluster, tmp_path: Path
) -> None:
    refused = bapo(cluster, "slurm", "demo", f"run.dir={tmp_path}", *SETTINGS, *TWO_NODES, *settings, "--submit")
    assert refused.returncode == 2
    assert said in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.quick
def test_the_thin_script_submits_from_a_node(cluster: Cluster, tmp_path: Path) -> None:
    settings = (f"run.dir={tmp_path}", "run.name=held", *SETTINGS, *TWO_NODES, 'slurm.options=["--hold"]')
    log = tmp_path / "log"
    cluster.run("sbatch", "--wait", f"--output={log}", str(SCRIPTS / "submit.sbatch"), "demo", *settings)
    (job,) = [line.split()[1] for line in log.read_text().splitlines() if line.startswith("submitted")]
    assert cluster.job(job)["NumNodes"] == "2-2"
    assert cluster.job(job)["TimeLimit"] == "01:00:00"
    cluster.run("scancel", job)


def test_the_doctors_of_all_nodes_meet_and_tell_of_a_port_in_use(cluster: Cluster, tmp_path: Path) -> None:
    log = tmp_path / "log"

    def examine(num_nodes: int, port: int, *arguments: str) -> int:
        options = ["--wait", f"--output={log}", f"--nodes={num_nodes}"]
        command = ["sbatch", *options, str(SCRIPTS / "doctor.sbatch"), *arguments]
        environment = cluster.environment | {"BAPO_DOCTOR_PORT": str(port)}
        return subprocess.run(command, env=environment, capture_output=True, timeout=HANG_S, check=False).returncode

    with processes.reserved_ports(1, "0.0.0.0") as (free,):
        code = examine(2, free, "demo", f"run.dir={tmp_path}")
    assert code == 0, log.read_text()
    assert "4 processes: all-reduce" in log.read_text()
    assert "1: ready for CPU runs" in log.read_text()
    with socket.create_server(("0.0.0.0", 0)) as holder:
        assert examine(1, holder.getsockname()[1]) == 1
    assert "Address already in use" in log.read_text()


def test_a_job_that_cannot_begin_says_so_in_its_log(cluster: Cluster, tmp_path: Path) -> None:
    """Some errors show only on the nodes; with a chain, they also end the jobs behind it."""
    settings = (*SETTINGS, "cluster.nodes=2", "slurm.interface=ib7", "slurm.chain=2", 'slurm.options=["--no-requeue"]')
    done = bapo(cluster, "slurm", "demo", f"run.dir={tmp_path}", "run.name=lost", *settings, "--submit")
    assert done.returncode == 0, done.stderr
    first, second = next(line.split()[1:] for line in done.stdout.splitlines() if line.startswith("submitted"))
    assert f"afternotok:{first}" in cluster.job(second)["Dependency"]
    run = tmp_path / "lost"
    wait_for(lambda: cluster.job(first)["JobState"] == "FAILED", "the job has failed", cluster, run)
    log = (run / "slurm" / f"job-{first}.log").read_text()
    assert "trainer rank 0 on " in log
    assert "slurm.interface=ib7 has no IPv4 address on this node" in log
    assert "Traceback" not in log
    cluster.run("scancel", second)
