"""All comparisons in one command.

    python -m benchmarks [--quick] [ROW ...] [--output FILE.json]

A row is a script in this folder, which runs in its own process. --quick takes about ten minutes on two cores.
The site's page on benchmarks shows benchmarks/results.json: --output renews it.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ROWS = {  # row -> script
    "clip-bounds": "clip_bounds",
    "logprobs": "logprobs",
    "packing": "packing",
    "train-step": "train_step",
    "scaling": "scaling",
    "weight-sync": "weight_sync",
    "rollout": "rollout",
    "scheduler": "scheduler",
    "slow-environment": "slow_environment",
    "replies": "replies",
    "checkpoint": "checkpoint",
    "start-up": "start_up",
    "against-trl": "against_trl",
}
PACKAGES = ("torch", "megatron-core", "transformers", "trl", "verl")
LIMIT_S = 4 * 3600.0


def measure(name: str, quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Run one row's script; return its rows, what it left out, and its failure, each with the name of the row."""
    found: dict[str, list[dict[str, Any]]] = {"rows": [], "left_out": [], "failed": []}
    script = ROWS[name]
    if not (ROOT / "benchmarks" / f"{script}.py").exists():
        reason = f"there is no benchmarks/{script}.py"
        print(f"{name}: left out, {reason}", flush=True)
        return found | {"left_out": [{"row": name, "case": "all", "reason": reason}]}
    print(f"\n## {name}\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        output, errors = Path(folder) / "rows.json", Path(folder) / "stderr.txt"
        command = [sys.executable, "-m", f"benchmarks.{script}", "--output", str(output)]
        code = run([*command, "--quick"] if quick else command, errors)
        for row in json.loads(output.read_text()) if output.exists() else []:
            found["left_out" if "reason" in row else "rows"].append({"row": name, **row})
        if code:
            lines = errors.read_text(errors="replace").strip().splitlines()
            found["failed"].append({"row": name, "error": lines[-1] if lines else f"exit code {code}"})
            print(*lines, f"{name}: failed", sep="\n", file=sys.stderr, flush=True)
    return found


def run(command: Sequence[str], errors: Path) -> int:
    """Run a script with one thread; return its exit code, and kill whatever it started when it ends."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *_python_path()])}
    with errors.open("wb") as file:
        script = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=file, start_new_session=True)
        try:
            return script.wait(LIMIT_S)
        finally:
            if script.poll() is None:
                os.killpg(script.pid, signal.SIGKILL)
                script.wait()


def _python_path() -> list[str]:
    return [path] if (path := os.environ.get("PYTHONPATH")) else []


def machine() -> dict[str, Any]:
    names = [x.split(":", 1)[1].strip() for x in _lines("/proc/cpuinfo") if x.startswith("model name")]
    cpu = names[0] if names else platform.processor() or platform.machine()
    return {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "system": platform.system()}


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 1 if a row failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"default: all of {', '.join(ROWS)}")
    parser.add_argument("--quick", action="store_true", help="small cases and few turns")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="file for the results")
    args = parser.parse_args(argv)
    unknown = [name for name in args.rows if name not in ROWS]
    if unknown:
        print(f"error: there is no row {', '.join(unknown)}; the rows are {', '.join(ROWS)}", file=sys.stderr)
        return 2
    start = time.monotonic()
    result: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "quick": args.quick,
        "machine": machine(),
        "versions": versions(),
        "seconds": 0.0,
        "rows": [],
        "left_out": [],
        "failed": [],
    }
    for name in args.rows or ROWS:
        for kind, found in measure(name, args.quick).items():
            result[kind] += found
        result["seconds"] = round(time.monotonic() - start, 1)
        if args.output:
            args.output.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
