"""Start one machine's share of a run's engines, under a supervisor."""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from bapo_megatron.config.engines import ENGINE_SPECS
from bapo_megatron.engines import processes
from bapo_megatron.engines.supervisor import EngineSpec, StartedEngines, supervised
from bapo_megatron.resolved import Resolved
from bapo_megatron.resolved.placement import NodeShare
from bapo_megatron.runtime import LOOPBACK, num_cores, python_module


@contextlib.contextmanager
def running_engines(
    run: Resolved, log_dir: Path, here: NodeShare, key: str, turn_file: Path | None = None
) -> Iterator[list[str]]:
    """Yield the URLs of engines as `started_engines` does, once they are healthy. Raises UserError, EngineError."""
    with started_engines(run, log_dir, here, key, turn_file) as engines:
        engines.wait()
        yield engines.urls


@contextlib.contextmanager
def started_engines(
    run: Resolved, log_dir: Path, here: NodeShare, key: str, turn_file: Path | None = None
) -> Iterator[StartedEngines]:
    """Yield a run's engines: the ones at rollout.urls, or this machine's share, which this starts.

    Started engines are supervised until the block ends, and end with this process. They answer only clients that send
    `key`.
    """
    r = run.config.rollout
    if run.engine.specs is None:
        yield StartedEngines(list(r.urls))
        return
    make_specs = ENGINE_SPECS.load(run.engine.specs)
    logs = [log_dir / f"engine-{number}.log" for number in here.servers]
    with (
        processes.reserved_ports(len(here.servers), here.host) as ports,
        supervised(
            [dataclasses.replace(spec, key=key) for spec in make_specs(run, logs, ports, here)],
            startup_timeout_s=run.engine.startup_limit_s(r.startup_timeout_s),
            max_restarts=r.max_restarts,
            hang_timeout_s=r.hang_timeout_s,
            turn_file=turn_file if run.config.takes_turns else None,
            tell=lambda text: tell_user(text, log_dir / "supervisor.log"),
        ) as engines,
    ):
        yield engines


def embedded_specs(run: Resolved, logs: Sequence[Path], ports: Sequence[int], here: NodeShare) -> list[EngineSpec]:
    """Describe embedded engines. Each starts with the model's own weights, as version "default" until a push."""
    config, r = run.config, run.config.rollout
    _, threads = config.divide_cores(num_cores(), here.num_ranks, len(here.servers))
    context = config.longest_sequence
    command = [
        *python_module("bapo_megatron.engines.embedded"),
        *("--model-path", str(run.folder)),
        *("--family", config.model.family),
        *("--host", here.host),
        *("--max-context", str(context)),
        *("--max-running", str(r.max_concurrent_requests)),
        *("--threads", str(threads)),
        *("--dtype", config.model.dtype),
        *("--update-timeout-s", str(config.sync.timeout_s)),
        "--exit-with-parent",
    ]
    variables = processes.loopback_variables() if here.host == LOOPBACK else {}
    return [
        EngineSpec(f"http://{here.host}:{port}", [*command, "--port", str(port)], log, variables)
        for log, port in zip(logs, ports, strict=True)
    ]


def tell_user(text: str, log: Path) -> None:
    """Print and log; a full disk or a closed terminal must not end a supervisor's thread."""
    with contextlib.suppress(OSError):
        print(f"bapo: {text}", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError), log.open("a") as lines:
        lines.write(f"{datetime.now(UTC).isoformat(timespec='seconds')} {text}\n")
