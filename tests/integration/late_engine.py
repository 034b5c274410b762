"""An embedded engine that is not healthy before its launcher has asked NUM_POLLS times.

It then notes in `ranks-<port>.json`, next to its log, which trainer ranks its launcher has started, and becomes the
engine on the same port: rollout.engine="tests.integration.late_engine:KIND".
"""

import dataclasses
import http.server
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from bapo_megatron.config.engines import EngineKind
from bapo_megatron.engines.start import embedded_specs
from bapo_megatron.engines.supervisor import EngineSpec
from bapo_megatron.resolved import Resolved
from bapo_megatron.resolved.placement import NodeShare

NUM_POLLS = 3
KIND = EngineKind("late engine", specs="tests.integration.late_engine:engine_specs", cuts=True)


def engine_specs(run: Resolved, logs: Sequence[Path], ports: Sequence[int], here: NodeShare) -> list[EngineSpec]:
    """Describe embedded engines that start late."""
    return [
        dataclasses.replace(
            spec, command=[sys.executable, __file__, str(port), str(log.parent / f"ranks-{port}.json"), *spec.command]
        )
        for spec, log, port in zip(embedded_specs(run, logs, ports, here), logs, ports, strict=True)
    ]


def main(port: int, report: Path, command: Sequence[str]) -> None:
    class Unhealthy(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(503)

    with http.server.HTTPServer(("127.0.0.1", port), Unhealthy) as server:
        for _ in range(NUM_POLLS):
            server.handle_request()
    lines = [" ".join(child.cmdline()) for child in psutil.Process(os.getppid()).children(recursive=True)]
    report.write_text(json.dumps([line for line in lines if "bapo_megatron.trainer" in line]))
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
