"""A whole run whose trainer and engine share one device: `bapo train`, attached to a server that this starts.

    python benchmarks/one_gpu_learn.py --steps 30 --output learn.jsonl                     SGLang and trainer on one GPU
    python benchmarks/one_gpu_learn.py --steps 4 --engine embedded --output learn.jsonl    on a CPU
    python benchmarks/one_gpu_learn.py --config smollm2_135m KEY=VALUE                       another run

It needs nothing of the product that attached servers do not need: `rollout.engine="attach"` and `sync.channel="disk"`,
with the run's folder in memory (/dev/shm). Lines of JSON, printed and appended to --output: the server's start,
every ten steps, and at the end {"steps": 30, "first_third": 0.4, "last_third": 0.6, "mismatch": 0.004, "step_s": 1.9}
with rewards, the mean |trainer - engine| in nats, and medians. On a GPU, GiB of memory as the driver counts them, for
all processes: with the server alone, and the most in the run, next to the trainer's plan. Exit code: 0; 1 if the run
failed.
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
from bapo_megatron.engines.start import running_engines
from bapo_megatron.errors import EngineError, UserError
from bapo_megatron.machine.gpus import GIB
from bapo_megatron.machine.memory import trainer_memory
from bapo_megatron.preflight.software_checks import read_driver
from bapo_megatron.resolved import resolve
from bapo_megatron.resolved.placement import Placement
from bapo_megatron.runtime.files import read_jsonl

KEY = "a-key-of-this-script"
EVERY_STEPS = 10
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
    }


def learn(engine: str, config_name: str, settings: Sequence[str], steps: int, logs: Path, lines: Lines) -> int:
    """Start the server, train, and put lines; return the exit code."""
    total, _ = gpu_bytes()
    on_gpu = total is not None
    layout = (f"model.dtype={'bfloat16' if on_gpu else 'float32'}", "parallel.tensor=1", f"train.num_steps={steps}")
    settings = [*layout, "monitor.progress=lines", *settings]
    config = load_config([config_name], [*settings, f"rollout.engine={engine}"])
    model = resolve_model_path(config.model.path)
    of_run = [one for one in settings if not one.startswith("sglang.")]
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="learn-") as memory:
        key = Path(memory, "key")
        key.touch(mode=0o600)
        key.write_text(KEY)
        began_s = time.monotonic()
        with running_engines(resolve(config, model), logs, Placement(num_servers=1).on(), KEY) as urls:
            _, server = gpu_bytes()
            lines.put({"engine": engine, "engine_s": round(time.monotonic() - began_s, 1)} | in_gib(server_gib=server))
            attached = ("rollout.engine=attach", f"rollout.urls={json.dumps(urls)}", f"rollout.api_key={key}")
            folder = ("sync.channel=disk", f"run.dir={memory}", "run.name=run")
            command = [sys.executable, "-m", "bapo_megatron", "train", config_name, *of_run, *attached, *folder]
            process = subprocess.Popen(command)
            peak, told, metrics = server, 0, Path(memory, "run", "metrics.jsonl")
            try:
                while process.poll() is None:
                    time.sleep(POLL_S)
                    peak = None if peak is None else max(peak, gpu_bytes()[1] or 0)
                    rows = read_jsonl(metrics) if metrics.exists() else []
                    if len(rows) // EVERY_STEPS > told and len(rows) < steps:
                        told = len(rows) // EVERY_STEPS
                        lines.put(summary(rows))
            finally:
                end(process)
        rows = read_jsonl(metrics) if metrics.exists() else []
        plan = trainer_memory(resolve(config, model), gpu_bytes=total).total if on_gpu else None
        is_done = process.returncode == 0 and len(rows) == steps
        found = summary(rows) if rows else {"steps": 0}
        lines.put({"ok": is_done} | found | in_gib(peak_gib=peak, trainer_plan_gib=plan))
    return 0 if is_done else 1


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
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="for the engine's log (default: a temporary one)")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="of the run, and [sglang.extra] of the server")
    o = parser.parse_args()
    logs = o.logs or Path(tempfile.mkdtemp(prefix="learn-"))
    try:
        return learn(o.engine, o.config, o.settings, o.steps, logs, Lines(o.output))
    except (EngineError, UserError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
