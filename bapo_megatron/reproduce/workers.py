"""What a forked process of a study does: serve an embedded engine, or train with one rank.

The fork server (pool.py) imports this once, with all that both need, so that a run starts without importing anything.
"""

from __future__ import annotations

import os
from pathlib import Path

import bapo_megatron.monitor.record
import bapo_megatron.stopping
import bapo_megatron.train  # noqa: F401  run_rank imports these late
from bapo_megatron.config.load import dump_config
from bapo_megatron.config.schema import Config
from bapo_megatron.launch.trainer import exit_with_parent, redirect_output, run_rank
from bapo_megatron.monitor.rundir import RunDir
from bapo_megatron.rollout.embedded import server


def serve(arguments: list[str], log: Path) -> None:
    """An embedded engine, until SIGTERM."""
    exit_with_parent()
    redirect_output(log)
    server.main(arguments)


def train(config: Config, url: str) -> None:
    """The training loop of `bapo train`, as its only rank; the process ends with the exit code of `run_rank`."""
    os.setpgid(0, 0)  # judge processes are in it, and end with it
    with RunDir.open(config, config_text=dump_config(config)) as run_dir:
        redirect_output(run_dir.log_path("trainer", 0))
        code = run_rank(run_dir, [url])
    os._exit(code)
