"""The public interface: load a configuration, train, evaluate. The command line does the same with the same arguments.

Everything runs in processes of its own and is called from the main thread or any other, in a notebook too: no event
loop of the caller is used. A mistake of the user raises `bapo_megatron.errors.UserError`, before anything starts where
possible.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bapo_megatron.errors import UserError
from bapo_megatron.runtime.files import read_jsonl

if TYPE_CHECKING:
    from bapo_megatron.config.schema import Config
    from bapo_megatron.evaluation.results import Evaluation


@dataclass(frozen=True, slots=True)
class Run:
    """A run that has trained.

    Example: `run("demo", "train.num_steps=20").metrics()[-1]["reward/mean"]`
    """

    config: Config
    path: Path
    """Its folder, with report.html, checkpoints and logs."""

    def metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of every step so far, by the names of docs/metrics.md."""
        return read_jsonl(self.path / "metrics.jsonl")


def load_config(*arguments: str | Path) -> Config:
    """Load and check a configuration, as `bapo check` does.

    Args:
        arguments: TOML files or names of shipped configurations, merged in order, and settings such as
            "optimizer.lr=3e-4".

    Raises:
        ConfigError: lists every problem, one a line.
    """
    from bapo_megatron.preflight.check import load_checked

    return load_checked([str(argument) for argument in arguments])


def run(*arguments: Config | str | Path) -> Run:
    """Train on this machine, as `bapo train` does; the same run.name again resumes. Returns after the last step.

    Args:
        arguments: those of `load_config`, or one loaded configuration.

    Raises:
        UserError: a mistake in the configuration, the data, the judge or the model.
        RuntimeError: a trainer rank failed; names its exit code and the logs.
    """
    from bapo_megatron import local
    from bapo_megatron.config.schema import Config

    given = [argument for argument in arguments if isinstance(argument, Config)]
    texts = [argument for argument in arguments if not isinstance(argument, Config)]
    if given and len(arguments) > 1:
        raise UserError("run takes one loaded configuration, or the arguments of load_config")
    config = given[0] if given else load_config(*texts)
    path = Path(config.run.dir) / config.run.name
    if code := local.train_locally(config):
        raise RuntimeError(f"training ended with exit code {code}; logs: {path / 'logs'}")
    return Run(config, path)


def evaluate(
    checkpoint: str | Path,
    *arguments: str | Path,
    data: str | Path | None = None,
    samples: int = 16,
    limit: int | None = None,
    output: str | Path | None = None,
) -> Evaluation:
    """Evaluate a checkpoint on problems, as `bapo eval` does.

    Args:
        checkpoint: a run, a training checkpoint, a Hugging Face folder, a hub name or "demo".
        arguments: as for `load_config`; they come after the settings of the checkpoint's run.
        data: JSONL or Parquet file of problems; None: those of [data].
        samples: responses to each problem.
        limit: number of problems; None: all of a file.
        output: new folder for result.json and responses.jsonl; None: evals/<date>-<time>.

    Raises:
        UserError: checkpoint, problems, judge or engines do not fit together, or `output` is not empty.
    """
    from bapo_megatron.config.load import split_arguments
    from bapo_megatron.evaluation.run import eval_config
    from bapo_megatron.evaluation.run import evaluate as evaluated

    files, overrides = split_arguments([str(argument) for argument in arguments])
    config = eval_config(Path(checkpoint), files, overrides, None if data is None else Path(data), samples)
    folder = Path(output) if output is not None else Path("evals") / time.strftime("%Y%m%d-%H%M%S")
    return evaluated(config, Path(checkpoint), folder, limit=limit)
