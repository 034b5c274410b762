"""Soak test: a long run of the demo under seeded random faults, sampled every few seconds and judged at the end.

    plan_faults(seed) -> Soak: launch, sample, strike, resume -> samples.csv, outcome.json -> soak_verdict.py

Sampling overlaps training with bounded staleness, two engines, and judges in their own processes. Faults kill, stop or
hang an engine, kill a judge, and end the run in three ways, after which the same command resumes it. Faults that end
the run come in its first half, and no fault comes in its last fifth, so that processes of each kind live long.

    python -m benchmarks.soak FOLDER [--num-steps 2000] [--faults-per-kind 4] [--seed 0] [key=value ...]
"""

import argparse
import contextlib
import csv
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path

import psutil

from benchmarks.soak_verdict import (
    ENDING_RUN,
    ENGINE_HUNG,
    ENGINE_KILLED,
    ENGINE_STOPPED,
    JUDGE_KILLED,
    RUN_NAME,
    TERMINATED,
    Fault,
    Outcome,
    Sample,
    write_verdict,
)

SAMPLE_INTERVAL_S = 5.0
POLL_S = 0.2
STUCK_TIMEOUT_S = 600.0  # longest time without a new step
ORPHAN_TIMEOUT_S = 30.0  # longest time by which a process may outlive the launcher
STOP_S = (2.0, 10.0)
MARK = "BAPO_SOAK"  # environment variable of every process of the run, even if it has lost its parent

SETTINGS = (
    "rollout.overlap=true",
    "rollout.max_staleness=8",
    "rollout.num_servers=2",
    "rollout.engine_threads=1",
    "rollout.max_restarts=1000",
    "rollout.startup_timeout_s=900",
    "rollout.hang_timeout_s=20",
    "rollout.request_timeout_s=60",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "rollout.groups_in_flight=6",
    "rollout.max_response_tokens=32",
    "data.options={min_terms=2,max_terms=4}",
    "reward.kind='bapo_megatron.rewards.answers:judge_chain'",
    "reward.concurrency=2",
    "parallel.threads_per_rank=1",
    "sync.timeout_s=30",
    "checkpoint.interval_steps=10",
    "monitor.progress=lines",
)
"""Changes to the demo: overlap, two engines, judge processes, and small batches of short responses, for speed."""

WITHIN_RUN = (ENGINE_KILLED, ENGINE_STOPPED, ENGINE_HUNG, JUDGE_KILLED)


@dataclass(frozen=True, slots=True)
class Strike:
    """A planned fault. Example: Strike("engine killed", 120)"""

    kind: str
    step: int


def plan_faults(num_steps: int, per_kind: int, seed: int) -> list[Strike]:
    """Draw the steps of all faults."""
    rng = random.Random(seed)
    within = [Strike(kind, rng.randrange(1, num_steps * 4 // 5)) for kind in WITHIN_RUN for _ in range(per_kind)]
    ending = [Strike(kind, rng.randrange(1, num_steps // 2)) for kind in ENDING_RUN for _ in range((per_kind + 1) // 2)]
    return sorted(within + ending, key=lambda strike: strike.step)


class Soak:
    """One soak, from the first launch to the last step. Writes samples.csv and faults.jsonl."""

    def __init__(self, folder: Path, num_steps: int, strikes: Sequence[Strike], settings: Sequence[str], seed: int):
        self.folder = folder
        self.run_dir = folder / RUN_NAME
        self.faults: list[Fault] = []
        self._num_steps = num_steps
        self._strikes = list(strikes)
        self._rng = random.Random(seed)
        self._mark = f"{os.getpid()}-{time.time_ns()}"
        self._command = [sys.executable, "-m", "bapo_megatron", "train", "demo", f"run.dir={folder}"]
        self._command += [f"run.name={RUN_NAME}", f"train.num_steps={num_steps}", *SETTINGS, *settings]
        self._began_s = time.monotonic()
        self._attempt = 0
        self._to_continue: list[tuple[float, psutil.Process]] = []
        self._orphans: list[str] = []

    def run(self) -> None:
        """Train to the last step, whatever happens. Raises RuntimeError if the run does not recover."""
        with (self.folder / "samples.csv").open("w", newline="", buffering=1) as file:
            self._samples = csv.writer(file)
            self._samples.writerow(field.name for field in fields(Sample))
            while True:
                code = self._attempt_until_end()
                self._collect_orphans()
                self._write_outcome()
                if code == 0:
                    return
                if not self._struck_by_fault():
                    raise RuntimeError(f"attempt {self._attempt} ended by itself with exit code {code}")
                self.faults[-1].exit_code = code

    def _attempt_until_end(self) -> int:
        self._attempt += 1
        with (self.folder / "output.log").open("ab") as output:
            launcher = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | {MARK: self._mark},
                start_new_session=True,
            )
        if self.faults:
            self.faults[-1].resumed_after_step = latest_checkpoint(self.run_dir)
        try:
            return self._watch(psutil.Process(launcher.pid), launcher)
        finally:
            if launcher.poll() is None:
                launcher.terminate()
                launcher.wait(60)

    def _watch(self, root: psutil.Process, launcher: subprocess.Popen[bytes]) -> int:
        sample_at = progress_at = time.monotonic()
        step = self._step()
        while (code := launcher.poll()) is None:
            now = time.monotonic()
            if (reached := self._step()) != step:
                step, progress_at = reached, now
            if now - progress_at > STUCK_TIMEOUT_S:
                raise RuntimeError(f"no step after {step} for {STUCK_TIMEOUT_S:g} s")
            if now >= sample_at:
                self._sample(root, step)
                sample_at = now + SAMPLE_INTERVAL_S
            self._continue_stopped(now)
            if self.faults and self.faults[-1].recovered_after_s is None:
                if step > self.faults[-1].step:
                    self.faults[-1].recovered_after_s = round(self._elapsed_s() - self.faults[-1].elapsed_s, 1)
                    self._write_outcome()
            elif self._strikes and step >= self._strikes[0].step and not self._to_continue:
                self.strike(root, step)
            time.sleep(POLL_S)
        return code

    def strike(self, root: psutil.Process, step: int) -> None:
        """Apply the next fault to a process of its kind, once one works."""
        kind = self._strikes[0].kind
        victims = [
            (role, process) for role, process in processes_by_role(root) if role.split("-")[0] == kind.split()[0]
        ]
        if not victims:
            return
        self._sample(root, step)  # record all processes now, in case the next sample is late
        role, victim = self._rng.choice(victims)
        number = {ENGINE_STOPPED: signal.SIGSTOP, ENGINE_HUNG: signal.SIGSTOP, TERMINATED: signal.SIGTERM}
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.send_signal(number.get(kind, signal.SIGKILL))
            if kind == ENGINE_STOPPED:
                self._to_continue.append((time.monotonic() + self._rng.uniform(*STOP_S), victim))
            self._strikes.pop(0)
            self.faults.append(Fault(kind, step, round(self._elapsed_s(), 1), role))
            print(f"{self._elapsed_s():7.0f} s  step {step:4d}  {kind}: {role}, process {victim.pid}", flush=True)

    def _continue_stopped(self, now: float) -> None:
        for due_at, process in list(self._to_continue):
            if now >= due_at:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGCONT)
                self._to_continue.remove((due_at, process))

    def _struck_by_fault(self) -> bool:
        fault = self.faults[-1] if self.faults else None
        return fault is not None and fault.kind in ENDING_RUN and fault.exit_code is None

    def _collect_orphans(self) -> None:
        """Wait for all processes of the ended attempt; note and kill any that remain."""
        self._to_continue.clear()
        deadline = time.monotonic() + ORPHAN_TIMEOUT_S
        while (left := marked_processes(self._mark)) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._orphans.append(f"attempt {self._attempt}: {' '.join(process.cmdline())}")
                process.kill()

    def _sample(self, root: psutil.Process, step: int) -> None:
        load = round(os.getloadavg()[0], 2)
        taken = [
            Sample(round(self._elapsed_s(), 1), self._attempt, step, role, process.pid, *usage, 1, 0, load)
            for role, process in processes_by_role(root)
            if (usage := usage_of(process)) is not None
        ]
        for sample in taken:
            self._samples.writerow(astuple(sample))
        self._samples.writerow(
            astuple(
                Sample(
                    elapsed_s=round(self._elapsed_s(), 1),
                    attempt=self._attempt,
                    step=step,
                    role="run",
                    pid=root.pid,
                    rss_bytes=sum(s.rss_bytes for s in taken),
                    descriptors=sum(s.descriptors for s in taken),
                    threads=sum(s.threads for s in taken),
                    cpu_s=round(sum(s.cpu_s for s in taken), 2),
                    num_processes=len(taken),
                    run_dir_bytes=folder_bytes(self.run_dir),
                    load=load,
                )
            )
        )

    def _write_outcome(self) -> None:
        outcome = Outcome(
            num_steps=self._num_steps,
            num_planned=len(self._strikes) + len(self.faults),
            num_attempts=self._attempt,
            elapsed_s=round(self._elapsed_s(), 1),
            orphans=self._orphans,
            faults=self.faults,
        )
        (self.folder / "outcome.json").write_text(json.dumps(asdict(outcome), indent=1) + "\n")

    def _step(self) -> int:
        """Return the last recorded step."""
        try:
            with (self.run_dir / "metrics.jsonl").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 20_000))
                found = re.findall(rb'^\{"step": (\d+)', file.read(), re.MULTILINE)
        except FileNotFoundError:
            return 0
        return int(found[-1]) if found else 0

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began_s


def processes_by_role(root: psutil.Process) -> Iterator[tuple[str, psutil.Process]]:
    """Yield the live processes of a run: launcher, rank-<i>, engine, judge, or other."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    yield role_of(process, root), process


def role_of(process: psutil.Process, root: psutil.Process) -> str:
    """Return a process's role in the run, judging by its command line."""
    command = " ".join(process.cmdline())
    if process == root:
        return "launcher"
    if "bapo_megatron.trainer" in command:
        return f"rank-{process.environ().get('RANK', '?')}"
    if "engines.embedded" in command:
        return "engine"
    return "judge" if "rewards.worker" in command else "other"


def usage_of(process: psutil.Process) -> tuple[int, int, int, float] | None:
    """Return resident bytes, open descriptors, threads and CPU seconds, or None if the process has ended."""
    try:
        with process.oneshot():
            cpu = process.cpu_times()
            threads, descriptors = process.num_threads(), process.num_fds()
            return process.memory_info().rss, descriptors, threads, round(cpu.user + cpu.system, 2)
    except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
        return None


def marked_processes(mark: str) -> list[psutil.Process]:
    """Return the processes on this machine that carry the run's mark, with or without a parent."""
    found = []
    psutil.process_iter.cache_clear()  # it would return an earlier process that had the same id
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def folder_bytes(folder: Path) -> int:
    """Return the number of bytes in all files below a folder, while other processes write and delete there."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(path, name)).st_size
    return total


def latest_checkpoint(run_dir: Path) -> int:
    """Return the step of the latest complete checkpoint, or 0 if there is none."""
    latest = run_dir / "checkpoints" / "latest"
    return int(latest.read_text().removeprefix("step-")) if latest.exists() else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a soak test and judge it. Returns 0 if every check holds, and 1 if not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--num-steps", type=int, default=2000)
    parser.add_argument("--faults-per-kind", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("settings", nargs="*", help="more settings for the run, as key=value")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    strikes = plan_faults(options.num_steps, options.faults_per_kind, options.seed)
    Soak(options.folder, options.num_steps, strikes, options.settings, options.seed).run()
    return write_verdict(options.folder)


if __name__ == "__main__":
    sys.exit(main())
