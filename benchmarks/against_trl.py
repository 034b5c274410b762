"""Whole steps and the start against TRL's GRPOTrainer, and overlapped steps against synchronous ones.

    TRL_PYTHON=.../bin/python python -m benchmarks.against_trl [--quick]

TRL_PYTHON is the interpreter of an environment with torch, transformers and TRL (default: this interpreter). Both sides
do the demo's work with all cores, in float32: per step, 16 prompts x 8 responses of at most 48 tokens, and two updates
of 64 responses, each scored before training. Responses are sampled in one piece, because TRL has no partial rollouts.
A learning rate of 1e-9 keeps the lengths constant. Each command is one measurement: seconds until its first step is
done, and seconds per 1000 trained tokens in the steps after it.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.side_by_side import DisagreementError, LeftOut, Rows, Turns, main

NUM_STEPS, NUM_RESPONSES, LR = 6, 128, 1e-9
IN_ONE_PIECE = "rollout.tokens_per_round=48"
TIMEOUT_S = 900.0
TRL = "TRL's GRPOTrainer"


@dataclass(frozen=True, slots=True)
class Measured:
    """One command. `per_1000_s` counts trained response tokens, in all steps except the first."""

    start_s: float
    per_1000_s: float


def ours(folder: Path, *settings: str) -> Measured:
    """Train the demo on one rank."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        metrics = Path(name) / "run" / "metrics.jsonl"
        command = [sys.executable, "-m", "bapo_megatron", "train", "demo", f"run.dir={name}", "run.name=run"]
        command += [f"train.num_steps={NUM_STEPS}", f"optimizer.lr={LR}", "parallel.tensor=1", IN_ONE_PIECE, *settings]
        start_s = first_line(command, metrics)
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return measured(start_s, [(row["rollout/num_samples"], row["train/tokens"], row["time/step_s"]) for row in rows])


def theirs(folder: Path) -> Measured:
    """Train the same task with TRL, in TRL's environment."""
    from bapo_megatron.assets import demo_model_path
    from bapo_megatron.config.load import load_config
    from bapo_megatron.prompts import build_source

    source = build_source(load_config(["demo"], []))
    with tempfile.TemporaryDirectory(dir=folder) as name:
        prompts, steps = Path(name) / "prompts.json", Path(name) / "steps.jsonl"
        prompts.write_text(json.dumps([source[i].text for i in range(16 * NUM_STEPS)]))
        arguments = ["trl", str(demo_model_path()), str(prompts), str(steps)]
        start_s = first_line([trl_python(), "-m", "benchmarks.against_trl", *arguments], steps)
        rows = [json.loads(line) for line in steps.read_text().splitlines()]
    return measured(start_s, [(row["responses"], row["tokens"], row["s"]) for row in rows])


def measured(start_s: float, steps: Sequence[tuple[float, float, float]]) -> Measured:
    """Summarize the (responses, trained tokens, seconds) of each step."""
    if [responses for responses, _, _ in steps] != [NUM_RESPONSES] * NUM_STEPS:
        raise DisagreementError(f"expected {NUM_STEPS} steps of {NUM_RESPONSES} responses, not {steps}")
    return Measured(start_s, 1000 * sum(s for _, _, s in steps[1:]) / sum(tokens for _, tokens, _ in steps[1:]))


def first_line(command: Sequence[str], file: Path) -> float:
    """Run a command to its end with all cores; return the seconds until its file had a first line."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    began_s, first_s = time.monotonic(), None
    with tempfile.TemporaryFile("w+") as output:
        running = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            while running.poll() is None:
                if first_s is None and file.exists() and file.stat().st_size:
                    first_s = time.monotonic() - began_s
                if time.monotonic() - began_s > TIMEOUT_S:
                    raise TimeoutError(f"{command[:4]} took more than {TIMEOUT_S:g} s")
                time.sleep(0.02)
        finally:
            running.kill()
            running.wait()
        if running.returncode or first_s is None:
            output.seek(0)
            raise RuntimeError(f"{command[:4]} ended with exit code {running.returncode}:\n{output.read()[-2000:]}")
    return first_s


def trl_python() -> str:
    return os.environ.get("TRL_PYTHON", sys.executable)


def rows(quick: bool) -> Rows:
    """Compare the three commands, which take turns."""
    ways: dict[str, Callable[[Path], Measured]] = {
        "synchronous": ours,
        "overlapped": lambda folder: ours(folder, "rollout.overlap=true", "rollout.max_staleness=5"),
    }
    if "TRL_PYTHON" in os.environ or importlib.util.find_spec("trl"):
        ways[TRL] = theirs
    else:
        yield LeftOut(TRL, "set TRL_PYTHON to the interpreter of an environment with torch, transformers and TRL")
    load_before = os.getloadavg()[0]
    found: dict[str, list[Measured]] = {name: [] for name in ways}
    order = list(ways)
    with tempfile.TemporaryDirectory(prefix="against-trl-") as name:
        for _ in range(1 if quick else 5):
            for way in order:
                found[way].append(ways[way](Path(name)))
            order.reverse()
    loads = load_before, os.getloadavg()[0]
    starts = Turns({way: [each.start_s for each in turns] for way, turns in found.items()}, *loads)
    steps = Turns({way: [each.per_1000_s for each in turns] for way, turns in found.items()}, *loads)
    if TRL in ways:
        yield steps.row("1000 trained tokens, whole steps", TRL, unit="s")
        yield starts.row("command to the end of the first step", TRL, unit="s")
    yield steps.row("1000 trained tokens, overlapped steps", "synchronous", ours="overlapped", unit="s")


def train_with_trl(model: str, prompts: str, output: str) -> None:
    """Train with TRL; write a line for each step, which has two updates."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    lengths: list[int] = []
    ended_s = time.perf_counter()

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths.extend(map(len, completion_ids))
        return [float(len(ids) % 2) for ids in completion_ids]

    class Steps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            nonlocal ended_s
            if state.global_step % 2 == 0:
                now_s = time.perf_counter()
                line = {"responses": len(lengths), "tokens": sum(lengths), "s": now_s - ended_s}
                ended_s = now_s
                lengths.clear()
                with open(output, "a") as file:
                    file.write(json.dumps(line) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=64,
            gradient_accumulation_steps=1,
            steps_per_generation=2,
            num_generations=8,
            max_completion_length=48,
            learning_rate=LR,
            max_steps=2 * NUM_STEPS,
            temperature=1.0,
            beta=0.0,
            report_to=[],
            save_strategy="no",
            logging_steps=1000,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in json.loads(Path(prompts).read_text())]),
            processing_class=tokenizer,
            callbacks=[Steps()],
        )
        trainer.train()


if __name__ == "__main__":
    if sys.argv[1:2] == ["trl"]:
        train_with_trl(*sys.argv[2:])
    else:
        main(__doc__, rows)
