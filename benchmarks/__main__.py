"""All comparisons in one command.

    python -m benchmarks [--quick] [ROW ...] [--output FILE.json] [--page docs/performance.md]

A row is a script in this folder, which runs in its own process. --quick takes about ten minutes on two cores.
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

from benchmarks.side_by_side import TABLE_HEAD, Row

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
    "replies": "replies",
    "checkpoint": "checkpoint",
    "start-up": "start_up",
    "against-trl": "against_trl",
}
PACKAGES = ("torch", "megatron-core", "transformers", "trl", "verl")
BEGIN, END = "<!-- python -m benchmarks --page: begin -->", "<!-- end -->"
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


def page_part(result: dict[str, Any]) -> str:
    """Format a run as the marked part of a page."""
    names = ", ".join(f"{package} {number}" for package, number in result["versions"].items())
    host = result["machine"]
    command = "python -m benchmarks --quick" if result["quick"] else "python -m benchmarks"
    parts = [
        f"`{command}`, {result['date'][:10]}: {host['cpu']}, {host['cores']} cores, one thread per process; {names}."
    ]
    for name in dict.fromkeys(row["row"] for row in result["rows"]):
        fields = [{k: v for k, v in row.items() if k != "row"} for row in result["rows"] if row["row"] == name]
        parts.append("\n".join([f"### {name}", "", TABLE_HEAD, *(str(Row(**each)) for each in fields)]))
    missing = [f"- {x['row']}, {x['case']}: {x['reason']}." for x in result["left_out"]]
    if missing:
        parts.append("\n".join(["### Left out", "", *missing]))
    return "\n\n".join(parts)


def write_page(page: Path, part: str) -> None:
    """Replace the text between the page's marks."""
    head, _, rest = page.read_text().partition(BEGIN)
    _, _, tail = rest.partition(END)
    page.write_text(f"{head}{BEGIN}\n\n{part}\n\n{END}{tail}")


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 1 if a row failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"default: all of {', '.join(ROWS)}")
    parser.add_argument("--quick", action="store_true", help="small cases and few turns")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="file for the results")
    parser.add_argument("--page", type=Path, metavar="FILE.md", help="page whose marked part the table replaces")
    args = parser.parse_args(argv)
    unknown = [name for name in args.rows if name not in ROWS]
    if unknown:
        print(f"error: there is no row {', '.join(unknown)}; the rows are {', '.join(ROWS)}", file=sys.stderr)
        return 2
    if args.page and BEGIN not in args.page.read_text():
        print(f"error: {args.page} has no line {BEGIN}", file=sys.stderr)
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
    if args.page:
        write_page(args.page, page_part(result))
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
