"""One machine: start the engines, start the trainer ranks with torchrun's launcher, end what was started.

bapo train -> run() -> engine processes (if asked for), under a supervisor
                    -> torchrun -> worker.py on every rank
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bapo_megatron.assets import resolve_model_path
from bapo_megatron.config.load import dump_config
from bapo_megatron.config.plan import num_ranks
from bapo_megatron.config.schema import Config
from bapo_megatron.engines.processes import EngineShare
from bapo_megatron.engines.start import running_engines
from bapo_megatron.errors import UserError
from bapo_megatron.monitor.rundir import RunDir
from bapo_megatron.report.page import write_report
from bapo_megatron.runtime.ranks import num_cores


def run(config: Config) -> int:
    """Train on this machine until the configured number of steps.

    Returns:
        0, or the exit code of the trainer that failed first (2 for an error that the user can mend).
    """
    model_path = resolve_model_path(config.model.path)
    with RunDir.open(config, config_text=dump_config(config)) as run_dir:
        with _engines(config, model_path, run_dir.log_dir) as urls:
            code = _train(config, run_dir, urls)
        if code == 0 and config.monitor.report:
            print(f"report     {write_report(run_dir.path)}")
        return code


def _train(config: Config, run_dir: RunDir, urls: Sequence[str]) -> int:
    """Run worker.py under torchrun's elastic launcher, without restarts."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    ranks = num_ranks(config)
    threads = config.parallel.threads_per_rank or max(1, num_cores() // ranks)
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
    arguments = ["-m", "bapo_megatron.worker", "--run-dir", str(run_dir.path)]
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
def _engines(config: Config, model_path: Path, log_dir: Path) -> Iterator[list[str]]:
    """URLs of the engines. Those that we start are looked after until the block ends, and end with this process."""
    r = config.rollout
    if not r.num_started:
        yield list(r.urls)
        return
    share = EngineShare(count=r.num_servers, first_gpu=num_ranks(config))
    with running_engines(config, model_path, log_dir, share) as urls:
        yield urls
