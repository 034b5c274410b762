"""One machine: start the engines, start the trainer ranks with torchrun's launcher, end what was started.

bapo train -> run() -> embedded engine processes (if asked for) -> torchrun -> launch/trainer.py on every rank
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bapo_megatron.assets import resolve_model_path
from bapo_megatron.config.load import dump_config
from bapo_megatron.config.plan import num_ranks
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import EngineError, UserError
from bapo_megatron.monitor.report import write_report
from bapo_megatron.monitor.rundir import RunDir


def run(config: Config) -> int:
    """Train on this machine until the configured number of steps.

    Returns:
        0, or the exit code of the trainer that failed first (2 for an error that the user can mend).
    """
    model_path = resolve_model_path(config.model.path)
    with RunDir.open(config, config_text=dump_config(config)) as run_dir:
        if config.rollout.engine == "attach":
            code = _train(config, run_dir, config.rollout.urls)
        else:
            with _embedded_engines(config, model_path, run_dir.log_dir) as urls:
                code = _train(config, run_dir, urls)
        if code == 0 and config.monitor.report:
            print(f"report     {write_report(run_dir.path)}")
        return code


def _train(config: Config, run_dir: RunDir, urls: Sequence[str]) -> int:
    """Run launch/trainer.py under torchrun's elastic launcher, without restarts."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    ranks = num_ranks(config)
    threads = config.parallel.threads_per_rank or max(1, (os.cpu_count() or 1) // ranks)
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=config.run.name,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.2,
        logs_specs=DefaultLogsSpecs(log_dir=str(run_dir.log_dir / "torchrun")),
    )
    arguments = ["-m", "bapo_megatron.launch.trainer", "--run-dir", str(run_dir.path)]
    for url in urls:
        arguments += ["--engine-url", url]
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        elastic_launch(launch, sys.executable)(*arguments)
    except ChildFailedError as error:
        _raise_user_errors(run_dir)
        rank, first = error.get_first_failure()
        print(
            f"bapo: trainer rank {rank} ended with exit code {first.exitcode}; "
            f"its log: {run_dir.log_path('trainer', rank)}",
            file=sys.stderr,
        )
        return first.exitcode if first.exitcode > 0 else 1
    except SignalException as stopped:  # the launcher turns signals into this, and has ended the ranks
        if stopped.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + stopped.sigval) from None
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
    return 0


def _raise_user_errors(run_dir: RunDir) -> None:
    """What the ranks left for the user; a failure of one rank is usually followed by lost connections of the others."""
    messages = [path.read_text() for path in sorted(run_dir.log_dir.glob("error-*.txt"))]
    if messages:
        raise UserError("\n".join(dict.fromkeys(messages)))


@contextlib.contextmanager
def _embedded_engines(config: Config, model_path: Path, log_dir: Path) -> Iterator[list[str]]:
    """Embedded engines on free loopback ports; they end with the block, or with this process."""
    processes: list[subprocess.Popen[bytes]] = []
    ready = [log_dir / f"engine-{i}.ready" for i in range(config.rollout.num_servers)]
    try:
        for i, ready_file in enumerate(ready):
            ready_file.unlink(missing_ok=True)
            log = (log_dir / f"engine-{i}.log").open("wb")
            # The engine ends when its standard input closes, so that even kill -9 of this process leaves none behind.
            processes.append(
                subprocess.Popen(
                    _engine_command(config, model_path, ready_file),
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C is for this process, which ends the trainer ranks first
                )
            )
            log.close()
        urls = [_wait_ready(p, f, config) for p, f in zip(processes, ready, strict=True)]
        try:
            yield urls
        except UserError as error:
            ended = [(p.returncode, f.with_suffix(".log")) for p, f in zip(processes, ready, strict=True) if p.poll()]
            notes = [f"a rollout engine ended with exit code {code}; its log: {log}" for code, log in ended]
            raise UserError("\n".join([str(error), *notes])) from error
    finally:
        for process in processes:
            if process.stdin:
                process.stdin.close()
        for process in processes:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=10)


def _engine_command(config: Config, model_path: Path, ready_file: Path) -> list[str]:
    r = config.rollout
    threads = r.engine_threads or max(1, (os.cpu_count() or 1) // r.num_servers)
    context = r.engine_max_context or config.data.max_prompt_tokens + r.max_response_tokens
    return [
        *(sys.executable, "-m", "bapo_megatron.rollout.embedded"),
        *("--model-path", str(model_path)),
        *("--host", "127.0.0.1", "--port", "0"),
        *("--max-context", str(context)),
        *("--max-running", str(r.max_concurrent_requests)),
        *("--threads", str(threads)),
        *("--dtype", config.model.dtype),
        *("--ready-file", str(ready_file)),
        "--exit-with-parent",
    ]


def _wait_ready(process: subprocess.Popen[bytes], ready_file: Path, config: Config) -> str:
    """The engine's URL, once it is healthy.

    Raises:
        EngineError: it ended, or was not healthy in time; names its log.
    """
    log = ready_file.with_suffix(".log")
    deadline = time.monotonic() + config.rollout.startup_timeout_s
    while not ready_file.exists():
        if process.poll() is not None:
            if process.returncode == 2:
                raise UserError(f"the rollout engine refused to start: {_last_line(log)} (log: {log})")
            raise EngineError(f"the rollout engine ended with exit code {process.returncode}; its log: {log}")
        if time.monotonic() > deadline:
            raise EngineError(
                f"the rollout engine was not healthy after rollout.startup_timeout_s = "
                f"{config.rollout.startup_timeout_s:g} s; its log: {log}"
            )
        time.sleep(0.05)
    ready = json.loads(ready_file.read_text())
    return f"http://{ready['host']}:{ready['port']}"


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"
