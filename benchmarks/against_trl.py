"""Whole steps and the start against TRL's GRPOTrainer, and overlapped steps against synchronous ones.

    TRL_PYTHON=.../bin/python python -m benchmarks.against_trl [--quick]

TRL_PYTHON is the interpreter of an environment with torch, transformers and TRL (default: this interpreter). Both sides
do the demo's work with all cores, in float32: per step, 16 prompts x 8 responses of at most 48 tokens, and two updates
of 64 responses, each scored before training. Responses are sampled in one piece, because TRL has no partial rollouts.
A learning rate of 1e-9 keeps the lengths constant. Each command is one measurement: seconds until its first step is
done, and seconds per 1000 trained tokens in the steps after it.

Further rows have longer prompts, filled up in front, and half as many steps. Both sides then compute 64 responses of an
update together.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from benchmarks.side_by_side import DisagreementError, LeftOut, Rows, Turns, main

if TYPE_CHECKING:
    from bapo_megatron.prompts.base import Question

NUM_RESPONSES, RESPONSE_TOKENS, LR = 128, 48, 1e-9
PROMPT_TOKENS = (16, 256, 1024)
IN_ONE_PIECE = f"rollout.tokens_per_round={RESPONSE_TOKENS}"
TIMEOUT_S = 900.0
TRL = "TRL's GRPOTrainer"
ONCE, COPIES = "each prompt once", "a copy for each response"


@dataclass(frozen=True, slots=True)
class Measured:
    """One command. `per_1000_s` counts trained response tokens, in all steps except the first."""

    start_s: float
    per_1000_s: float


@dataclass(frozen=True, slots=True)
class Task:
    """What both sides train."""

    model: Path
    prompts: list[str]
    settings: tuple[str, ...]  # of `demo`, for ours
    num_steps: int

    @classmethod
    def of_demo(cls) -> Self:
        from bapo_megatron.assets import demo_model_path  # TRL's environment does not have the package

        return cls(demo_model_path(), [one.text for one in _questions(16 * 6)], (), num_steps=6)

    @classmethod
    def with_prompts_of(cls, num_tokens: int, folder: Path) -> Self:
        """Fill prompts up to a length with a sum; write them and a model that takes them to a folder."""
        from bapo_megatron.assets import demo_model_path

        questions, model, file = _questions(16 * 3), folder / f"model-{num_tokens}", folder / f"{num_tokens}.jsonl"
        texts = [("1+" * num_tokens)[: num_tokens - len(one.text)] + one.text for one in questions]
        lines = [{"prompt": text, "answer": one.answer} for text, one in zip(texts, questions, strict=True)]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        shutil.copytree(demo_model_path(), model)
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
        length = num_tokens + RESPONSE_TOKENS
        settings: tuple[str, ...] = (f"model.path={model}", "data.source=jsonl", f"data.path={file}", "data.options={}")
        settings += (f"data.max_prompt_tokens={num_tokens}", f"train.max_tokens_per_microbatch={64 * length}")
        return cls(model, texts, settings, num_steps=3)


def _questions(number: int) -> "list[Question]":
    from bapo_megatron.config.load import load_config
    from bapo_megatron.prompts import build_source

    source = build_source(load_config(["demo"], []))
    return [source[i] for i in range(number)]


def ours(folder: Path, task: Task, *settings: str) -> Measured:
    """Train on one rank."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        metrics = Path(name) / "run" / "metrics.jsonl"
        command = [sys.executable, "-m", "bapo_megatron", "train", "demo", f"run.dir={name}", "run.name=run"]
        command += [f"train.num_steps={task.num_steps}", f"optimizer.lr={LR}", "parallel.tensor=1", IN_ONE_PIECE]
        start_s = first_line([*command, *task.settings, *settings], metrics)
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [(row["rollout/num_samples"], row["train/tokens"], row["time/step_s"]) for row in rows]
    return measured(start_s, steps, task.num_steps)


def theirs(folder: Path, task: Task) -> Measured:
    """Train the same task with TRL, in TRL's environment."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        prompts, steps = Path(name) / "prompts.json", Path(name) / "steps.jsonl"
        prompts.write_text(json.dumps(task.prompts))
        arguments = ["trl", str(task.model), str(prompts), str(steps), str(task.num_steps)]
        start_s = first_line([trl_python(), "-m", "benchmarks.against_trl", *arguments], steps)
        rows = [json.loads(line) for line in steps.read_text().splitlines()]
    return measured(start_s, [(row["responses"], row["tokens"], row["s"]) for row in rows], task.num_steps)


def measured(start_s: float, steps: Sequence[tuple[float, float, float]], num_steps: int) -> Measured:
    """Summarize the (responses, trained tokens, seconds) of each step."""
    if [responses for responses, _, _ in steps] != [NUM_RESPONSES] * num_steps:
        raise DisagreementError(f"expected {num_steps} steps of {NUM_RESPONSES} responses, not {steps}")
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
    demo = Task.of_demo()
    ways: dict[str, Callable[[Path], Measured]] = {
        "synchronous": lambda folder: ours(folder, demo),
        "overlapped": lambda folder: ours(folder, demo, "rollout.overlap=true", "rollout.max_staleness=5"),
    }
    if "TRL_PYTHON" in os.environ or importlib.util.find_spec("trl"):
        ways[TRL] = lambda folder: theirs(folder, demo)
    else:
        yield LeftOut(TRL, "set TRL_PYTHON to the interpreter of an environment with torch, transformers and TRL")
    with tempfile.TemporaryDirectory(prefix="against-trl-") as name:
        folder = Path(name)
        starts, steps = in_turns(ways, folder, 1 if quick else 5)
        if TRL in ways:
            yield steps.row("1000 trained tokens, whole steps", TRL, unit="s")
            yield starts.row("command to the end of the first step", TRL, unit="s")
        yield steps.row("1000 trained tokens, overlapped steps", "synchronous", ours="overlapped", unit="s")
        for num_tokens in PROMPT_TOKENS[:1] if quick else PROMPT_TOKENS:
            yield from with_prompts_of(num_tokens, folder, 1 if quick else 3, with_trl=TRL in ways)


def with_prompts_of(num_tokens: int, folder: Path, num_turns: int, *, with_trl: bool) -> Rows:
    """Compare whole steps with prompts of one length, which ours computes once for a group of responses or in copies.

    In each pass of an update, sequences are dealt by groups, so that all of a group are there.
    """
    task = Task.with_prompts_of(num_tokens, folder)
    ways: dict[str, Callable[[Path], Measured]] = {
        ONCE: lambda folder: ours(folder, task, "train.share_prompts=true", "train.deal=groups"),
        COPIES: lambda folder: ours(folder, task, "train.share_prompts=false", "train.deal=groups"),
    }
    if with_trl:
        ways[TRL] = lambda folder: theirs(folder, task)
    _, steps = in_turns(ways, folder, num_turns)
    for other in list(ways)[1:]:
        yield steps.row(f"1000 trained tokens, prompts of {num_tokens} tokens", other, unit="s")


def in_turns(ways: dict[str, Callable[[Path], Measured]], folder: Path, num_turns: int) -> tuple[Turns, Turns]:
    """Run the commands in turns; return their starts, and seconds per 1000 trained tokens."""
    load_before, order = os.getloadavg()[0], list(ways)
    found: dict[str, list[Measured]] = {name: [] for name in ways}
    for _ in range(num_turns):
        for way in order:
            found[way].append(ways[way](folder))
        order.reverse()
    loads = load_before, os.getloadavg()[0]
    starts = {way: [each.start_s for each in turns] for way, turns in found.items()}
    return Turns(starts, *loads), Turns({way: [e.per_1000_s for e in turns] for way, turns in found.items()}, *loads)


def train_with_trl(model: str, prompts: str, output: str, num_steps: str) -> None:
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
            max_completion_length=RESPONSE_TOKENS,
            learning_rate=LR,
            max_steps=2 * int(num_steps),
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
