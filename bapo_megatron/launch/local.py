"""One machine: start the engines, start the trainer ranks with torchrun's launcher, end what was started.

bapo train -> run() -> engine processes (if asked for), under a supervisor
                    -> torchrun -> launch/trainer.py on every rank
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from bapo_megatron.assets import resolve_model_path
from bapo_megatron.config.load import dump_config
from bapo_megatron.config.plan import num_ranks
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import UserError
from bapo_megatron.launch import processes, sglang
from bapo_megatron.launch.supervisor import EngineSpec, supervised
from bapo_megatron.monitor.report import write_report
from bapo_megatron.monitor.rundir import RunDir


def run(config: Config) -> int:
    """Train on this machine until the configured number of steps.

    Returns:
        0, or the exit code of the trainer that failed first (2 for an error that the user can mend).
    """
    model_path = resolve_model_path(config.model.path)
    with RunDir.open(config, config_text=dump_config(config)) as run_dir:
        with engines(config, model_path, run_dir.log_dir, num_trainer_gpus=num_ranks(config)) as urls:
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
def engines(config: Config, model_path: Path, log_dir: Path, *, num_trainer_gpus: int) -> Iterator[list[str]]:
    """URLs of the engines. Those that we start are looked after until the block ends, and end with this process.

    Args:
        num_trainer_gpus: how many visible GPUs are not theirs: the first ones.
    """
    r = config.rollout
    if r.engine in ("attach", "recorded"):
        yield list(r.urls)
        return
    logs = [log_dir / f"engine-{i}.log" for i in range(r.num_servers)]
    with (
        processes.reserved_ports(r.num_servers) as ports,
        supervised(
            sglang.engine_specs(config, model_path, logs, ports, num_trainer_gpus)
            if r.engine == "sglang"
            else _embedded_specs(config, model_path, logs, ports),
            startup_timeout_s=r.startup_timeout_s,
            max_restarts=r.max_restarts,
            hang_timeout_s=r.hang_timeout_s,
            tell=lambda text: _tell(text, log_dir / "supervisor.log"),
        ) as urls,
    ):
        yield urls


def _embedded_specs(config: Config, model_path: Path, logs: Sequence[Path], ports: Sequence[int]) -> list[EngineSpec]:
    """Each start holds the weights of `model_path`, as version "default": only a push gives a server a number."""
    r = config.rollout
    threads = r.engine_threads or max(1, (os.cpu_count() or 1) // r.num_servers)
    context = r.engine_max_context or config.data.max_prompt_tokens + r.max_response_tokens
    command = [
        *(sys.executable, "-m", "bapo_megatron.rollout.embedded"),
        *("--model-path", str(model_path)),
        *("--host", processes.LOOPBACK),
        *("--max-context", str(context)),
        *("--max-running", str(r.max_concurrent_requests)),
        *("--threads", str(threads)),
        *("--dtype", config.model.dtype),
        *("--update-timeout-s", str(config.sync.timeout_s)),
        "--exit-with-parent",
    ]
    return [
        EngineSpec(f"http://{processes.LOOPBACK}:{port}", [*command, "--port", str(port)], log)
        for log, port in zip(logs, ports, strict=True)
    ]


def _tell(text: str, log: Path) -> None:
    print(f"bapo: {text}", file=sys.stderr, flush=True)
    with log.open("a") as lines:
        lines.write(f"{datetime.now(UTC).isoformat(timespec='seconds')} {text}\n")
