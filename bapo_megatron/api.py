"""The public interface: load a configuration, train, evaluate. The command line does the same with the same arguments.

Everything runs in its own processes and may be called from any thread, also in a notebook: it does not use the caller's
event loop. A user's mistake raises `bapo_megatron.errors.UserError`, if possible before anything starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bapo_megatron.errors import ConfigError, UserError
from bapo_megatron.runtime.files import read_jsonl

if TYPE_CHECKING:
    from bapo_megatron.config.schema import Config
    from bapo_megatron.evaluation.results import Evaluation


@dataclass(frozen=True, slots=True)
class Run:
    """A finished training run.

    Example: `run("demo", "train.num_steps=20").metrics()[-1]["reward/mean"]`
    """

    config: Config
    path: Path
    """Its folder, with report.html, checkpoints and logs."""

    def metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of every step so far, under the names in `bapo help metrics`."""
        return read_jsonl(self.path / "metrics.jsonl")


def load_config(*arguments: str | Path) -> Config:
    """Load and check a configuration, as `bapo check` does.

    Args:
        arguments: TOML files or names of shipped configurations, merged in order, and settings such as
            "optimizer.lr=3e-4".

    Raises:
        ConfigError: lists every problem, one per line.
    """
    from bapo_megatron.preflight.check import load_checked

    for argument in arguments:
        if not isinstance(argument, str | Path):
            kind = type(argument).__name__
            raise ConfigError(
                f'load_config takes files and settings one by one, such as load_config("demo", "optimizer.lr=3e-4"), '
                f"not a {kind}; unpack a list with *"
            )
    return load_checked([str(argument) for argument in arguments])


def run(*arguments: Config | str | Path) -> Run:
    """Train on this machine, as `bapo train` does, and return after the last step. Repeating a run.name resumes it.

    Args:
        arguments: the arguments of `load_config`, or one loaded configuration.

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
        arguments: as for `load_config`; they are merged over the settings of the checkpoint's run.
        data: JSONL or Parquet file of problems; None means the problems of [data].
        samples: responses to each problem.
        limit: number of problems; None means the whole file.
        output: new folder for result.json and responses.jsonl; None means evals/<date>-<time>-<process>.

    Raises:
        UserError: checkpoint, problems, judge or engines do not fit together, or `output` is not empty.
    """
    from bapo_megatron.config.load import split_arguments
    from bapo_megatron.evaluation.run import eval_config, new_folder
    from bapo_megatron.evaluation.run import evaluate as evaluated

    files, overrides = split_arguments([str(argument) for argument in arguments])
    config = eval_config(Path(checkpoint), files, overrides, None if data is None else Path(data), samples)
    folder = Path(output) if output is not None else new_folder()
    return evaluated(config, Path(checkpoint), folder, limit=limit)
