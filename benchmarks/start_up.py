"""From the command to the end of the first step: `bapo demo` against one plain program with transformers.

    python -m benchmarks.start_up [--quick]

The plain program does what any trainer must: it imports torch and transformers, loads the demo model, samples 128
responses in its own process with `generate`, and makes one update with torch's AdamW. `bapo demo` also starts two ranks
with Megatron-Core and an engine, forms their groups, pushes weights, and writes metrics, a checkpoint and a report.
Both must report one step of 128 responses. Times are seconds of the whole command.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.side_by_side import Rows, main, same, take_turns

NUM_PROMPTS, NUM_SAMPLES, PROMPT_TOKENS, RESPONSE_TOKENS = 16, 8, 12, 48
TIMEOUT_S = 600.0
PLAIN = "a plain program with transformers"


def first_step(folder: Path) -> int:
    """Run the demo for one step; return its number of responses."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        command = [sys.executable, "-m", "bapo_megatron", "demo", "run.name=first", "train.num_steps=1"]
        subprocess.run([*command, f"run.dir={name}"], check=True, capture_output=True, timeout=TIMEOUT_S)
        (step,) = (Path(name) / "first" / "metrics.jsonl").read_text().splitlines()
    return int(json.loads(step)["rollout/num_samples"])


def plain_first_step() -> int:
    command = [sys.executable, "-m", "benchmarks.start_up", "plain"]
    run = subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
    return int(run.stdout.split()[-1])


def plain_program() -> None:
    """Sample and make one policy-gradient update; print the number of responses."""
    import torch
    from transformers import AutoModelForCausalLM

    from bapo_megatron.assets import demo_model_path

    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, model.config.vocab_size, (NUM_PROMPTS, PROMPT_TOKENS), generator=generator)
    ids = prompts.repeat_interleave(NUM_SAMPLES, 0)
    ids = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, max_new_tokens=RESPONSE_TOKENS)
    logprobs = model(ids[:, :-1]).logits[:, PROMPT_TOKENS - 1 :].log_softmax(-1)
    taken = logprobs.gather(-1, ids[:, PROMPT_TOKENS:, None])[..., 0]
    advantages = torch.randn(len(ids), 1, generator=generator)
    (-advantages * taken).mean().backward()
    optimizer.step()
    print(len(ids))


def rows(quick: bool) -> Rows:
    """Compare the two commands."""
    with tempfile.TemporaryDirectory(prefix="start-up-") as name:
        ways: dict[str, Callable[[], int]] = {"bapo demo": partial(first_step, Path(name)), PLAIN: plain_first_step}
        turns = take_turns(ways, 2 if quick else 5, agree=same(), clock=time.perf_counter, warm_up=False)
    yield turns.row("command to the end of the first step", PLAIN, unit="s")


if __name__ == "__main__":
    if sys.argv[1:] == ["plain"]:
        plain_program()
    else:
        main(__doc__, rows)
