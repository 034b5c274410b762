"""Start one machine's share of a run's engines, under a supervisor."""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from bapo_megatron.config.engines import ENGINE_SPECS, engine_kind, startup_limit_s
from bapo_megatron.config.schema import Config
from bapo_megatron.engines import processes
from bapo_megatron.engines.processes import EngineShare
from bapo_megatron.engines.supervisor import EngineSpec, StartedEngines, supervised
from bapo_megatron.runtime import num_cores, python_module


@contextlib.contextmanager
def running_engines(
    config: Config, model_path: Path, log_dir: Path, share: EngineShare, key: str
) -> Iterator[list[str]]:
    """Yield the URLs of engines as `started_engines` does, once they are healthy. Raises UserError, EngineError."""
    with started_engines(config, model_path, log_dir, share, key) as engines:
        engines.wait()
        yield engines.urls


@contextlib.contextmanager
def started_engines(
    config: Config, model_path: Path, log_dir: Path, share: EngineShare, key: str
) -> Iterator[StartedEngines]:
    """Yield a run's engines: the ones at rollout.urls, or this machine's share, which this starts.

    Started engines are supervised until the block ends, and end with this process. They answer only clients that send
    `key`.
    """
    r = config.rollout
    kind = engine_kind(r.engine)
    if kind.specs is None:
        yield StartedEngines(list(r.urls))
        return
    make_specs = ENGINE_SPECS.load(kind.specs)
    logs = [log_dir / f"engine-{share.first + i}.log" for i in range(share.count)]
    with (
        processes.reserved_ports(share.count, share.host) as ports,
        supervised(
            [dataclasses.replace(spec, key=key) for spec in make_specs(config, model_path, logs, ports, share)],
            startup_timeout_s=startup_limit_s(r),
            max_restarts=r.max_restarts,
            hang_timeout_s=r.hang_timeout_s,
            tell=lambda text: tell_user(text, log_dir / "supervisor.log"),
        ) as engines,
    ):
        yield engines


def embedded_specs(
    config: Config, model_path: Path, logs: Sequence[Path], ports: Sequence[int], share: EngineShare
) -> list[EngineSpec]:
    """Describe embedded engines. Each starts with the weights of `model_path`, as version "default" until a push."""
    r = config.rollout
    _, threads = config.divide_cores(num_cores(), share.num_ranks, share.count)
    context = config.longest_sequence
    command = [
        *python_module("bapo_megatron.engines.embedded"),
        *("--model-path", str(model_path)),
        *("--family", config.model.family),
        *("--host", share.host),
        *("--max-context", str(context)),
        *("--max-running", str(r.max_concurrent_requests)),
        *("--threads", str(threads)),
        *("--dtype", config.model.dtype),
        *("--update-timeout-s", str(config.sync.timeout_s)),
        "--exit-with-parent",
    ]
    variables = processes.loopback_variables() if share.host == processes.LOOPBACK else {}
    return [
        EngineSpec(f"http://{share.host}:{port}", [*command, "--port", str(port)], log, variables)
        for log, port in zip(logs, ports, strict=True)
    ]


def tell_user(text: str, log: Path) -> None:
    """Print and log; a full disk or a closed terminal must not end a supervisor's thread."""
    with contextlib.suppress(OSError):
        print(f"bapo: {text}", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError), log.open("a") as lines:
        lines.write(f"{datetime.now(UTC).isoformat(timespec='seconds')} {text}\n")
