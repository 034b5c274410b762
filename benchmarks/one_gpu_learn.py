"""A whole run whose trainer and engine share one device: `bapo train` with `rollout.placement = "split"`.

    python benchmarks/one_gpu_learn.py --steps 30 --output learn.jsonl                     SGLang and trainer on one GPU
    python benchmarks/one_gpu_learn.py --steps 4 --engine embedded --output learn.jsonl    on a CPU
    python benchmarks/one_gpu_learn.py --config smollm2_135m KEY=VALUE                       another run
    python benchmarks/one_gpu_learn.py rollout.placement=turns                               each has it in its phase

Lines of JSON, printed and appended to --output: the server's start, every ten steps, and at the end
{"steps": 30, "first_third": 0.4, "last_third": 0.6, "mismatch": 0.004, "step_s": 1.9, "tokens_per_s": 5100} with
rewards, the mean |trainer - engine| in nats, and medians; also the seconds of turns and pushes. On a GPU, GiB of memory
as the driver counts them, for all processes: with the server alone, and the most in the run, next to the plan of both.
Exit code: 0; 1 if the run failed.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bapo_megatron.assets import resolve_model_path
from bapo_megatron.config.load import load_config
from bapo_megatron.machine.gpus import GIB
from bapo_megatron.machine.shared_gpu import this_share
from bapo_megatron.preflight.software_checks import read_driver
from bapo_megatron.resolved import resolve
from bapo_megatron.runtime.files import read_jsonl

EVERY_STEPS = 10
OF_TURNS = ("turns/to_host_s", "turns/servers_s", "turns/to_device_s", "sync/seconds")
POLL_S = 0.5
END_S = 30.0


class Lines:
    """Lines of JSON, on standard output and in a file."""

    def __init__(self, output: Path | None) -> None:
        self.output = output

    def put(self, line: dict[str, Any]) -> None:
        text = json.dumps(line)
        print(text, flush=True)
        if self.output is not None:
            with self.output.open("a") as file:
                print(text, file=file)


def gpu_bytes() -> tuple[int, int] | tuple[None, None]:
    """Return all bytes and the bytes in use of the first visible GPU; None without one."""
    driver = read_driver()
    return driver.gpus[driver.visible[0]][1:] if driver.visible else (None, None)


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what a run has shown so far."""
    rewards = [row["reward/mean"] for row in rows]
    third = max(1, len(rewards) // 3)
    return {
        "steps": len(rows),
        "first_third": statistics.fmean(rewards[:third]),
        "last_third": statistics.fmean(rewards[-third:]),
        "mismatch": statistics.median(row["mismatch/logprob_mean"] for row in rows),
        "step_s": statistics.median(row["time/step_s"] for row in rows),
        "tokens_per_s": round(statistics.median(row["rollout/tokens_per_s"] for row in rows)),
    } | {name: statistics.median(row[name] for row in rows) for name in rows[-1] if name in OF_TURNS}


def learn(engine: str, config_name: str, settings: Sequence[str], steps: int, lines: Lines) -> int:
    """Train, and put lines; return the exit code."""
    total, before = gpu_bytes()
    on_gpu = total is not None
    layout = (f"model.dtype={'bfloat16' if on_gpu else 'float32'}", "parallel.tensor=1", f"train.num_steps={steps}")
    settings = [*layout, f"rollout.engine={engine}", "rollout.placement=split", "monitor.progress=lines", *settings]
    with tempfile.TemporaryDirectory(prefix="learn-") as folder:
        command = [sys.executable, "-m", "bapo_megatron", "train", config_name, *settings]
        began_s, run = time.monotonic(), Path(folder, "run")
        process = subprocess.Popen([*command, f"run.dir={folder}", "run.name=run"])
        engine_s, server, peak, told, rows = None, before, before, 0, []
        try:
            while process.poll() is None:
                time.sleep(POLL_S)
                used = gpu_bytes()[1]
                if engine_s is None and [*run.glob("logs/*/trainer-0.log")]:  # a rank starts once the server is healthy
                    engine_s = round(time.monotonic() - began_s, 1)
                    lines.put({"engine": engine, "engine_s": engine_s} | in_gib(before_gib=before, server_gib=server))
                server = used if engine_s is None else server
                peak = None if used is None else max(peak or 0, used)
                rows = metrics_of(run)
                if len(rows) // EVERY_STEPS > told and len(rows) < steps:
                    told = len(rows) // EVERY_STEPS
                    lines.put(summary(rows))
        finally:
            end(process)
        rows = metrics_of(run)
        found: dict[str, Any] = summary(rows) if rows else {"steps": 0}
        if on_gpu and rows:
            config = load_config([run / "config.toml"], [])
            shared = this_share(resolve(config, resolve_model_path(config.model.path)))
            assert shared is not None
            planned = {"trainer_plan_gib": shared.trainer.total, "trainer_cap_gib": shared.trainer_bytes}
            found |= in_gib(peak_gib=peak, server_plan_gib=shared.server_bytes, **planned)
        is_done = process.returncode == 0 and len(rows) == steps
        lines.put({"ok": is_done} | found)
    return 0 if is_done else 1


def metrics_of(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    return read_jsonl(path) if path.exists() else []


def end(process: subprocess.Popen[bytes]) -> None:
    """End a run that has not ended by itself, with its ranks."""
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def in_gib(**num_bytes: int | None) -> dict[str, float]:
    return {name: round(number / GIB, 3) for name, number in num_bytes.items() if number is not None}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("sglang", "embedded"), default="sglang")
    parser.add_argument("--config", default="demo", metavar="NAME", help="a shipped run, or a file")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", type=Path, metavar="FILE.jsonl")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="of the run")
    o = parser.parse_args()
    return learn(o.engine, o.config, o.settings, o.steps, Lines(o.output))


if __name__ == "__main__":
    sys.exit(main())
