"""Trainer and one engine on the same device: push, sample, score the sample and update, three times.

    python benchmarks/one_gpu_exchange.py --output exchange.jsonl                      SGLang and trainer on one GPU
    python benchmarks/one_gpu_exchange.py --engine embedded --output exchange.jsonl    on a CPU
    python benchmarks/one_gpu_exchange.py "sglang.extra={mem_fraction_static=0.3}"     settings of the run

Weights go through files in memory (/dev/shm), because NCCL refuses two ranks on one GPU by default. Each version is one
line of JSON, printed and appended to --output immediately:

    {"version": 1, "tokens": 512, "mean_abs": 0.004, "p99": 0.02, "max": 0.05, "moved": 0.3, "tokens_per_s": 800.0}

mean_abs, p99 and max are |trainer - engine| in nats over the sampled tokens. "moved" is the mean change of the
trainer's log-probs in the update that follows: an engine with its old weights would be off by about that in the next
line. "ok": the tokens have this version, the engine confirmed the checksum of every weight, and mean_abs is within the
tolerance. On a GPU, GiB of memory follow: the trainer's peak, its plan without the context of CUDA, and what
both use there. Exit code: 0; 1 if the engine fails or a line is not ok.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bapo_megatron.resolved import Resolved, resolve
from bapo_megatron.resolved.placement import Placement
from bapo_megatron.runtime.environment import trainer_variables

os.environ |= trainer_variables({})  # before torch is imported

import torch
from torch import Tensor

from bapo_megatron.assets import demo_model_path
from bapo_megatron.buffer.packing import one_minibatch
from bapo_megatron.config.load import load_config
from bapo_megatron.engines.base import Engine, GenerateRequest, GenerateResult
from bapo_megatron.engines.connected import ConnectedEngines
from bapo_megatron.engines.start import running_engines
from bapo_megatron.errors import EngineError, UserError
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.machine.gpus import GIB
from bapo_megatron.machine.memory import trainer_memory
from bapo_megatron.sync import open_channel
from bapo_megatron.types import Batch, ClipBounds

KEY = "a-key-of-this-script"
BOUNDS = ClipBounds(low=0.5, high=2.0, positive_share=0.5, saturated=False, num_moves=0)
PROMPT_TOKENS = 8
NUM_PUSHES = 3
ANSWER_S = 120.0
TOLERANCE_NATS = {"bfloat16": 0.03, "float32": 1e-4}  # each computes with its own kernels


def exchange(
    engine_name: str, model: Path, num_prompts: int, num_tokens: int, logs: Path, settings: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield a line for the start, and one for each version."""
    on_gpu = torch.cuda.is_available()
    lengths = (f"data.max_prompt_tokens={PROMPT_TOKENS}", f"rollout.max_response_tokens={num_tokens}")
    base = (f"rollout.engine={engine_name}", "optimizer.lr=1e-3", *lengths)
    config = load_config([], [*base, f"model.dtype={'bfloat16' if on_gpu else 'float32'}", *settings])
    began_s = time.monotonic()
    run = resolve(config, model)
    learner = MegatronLearner(run)
    learner_s, began_s = time.monotonic() - began_s, time.monotonic()
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="exchange-") as memory,
        running_engines(run, logs, Placement(num_servers=1).on(), KEY) as urls,
    ):
        yield {
            "device": torch.cuda.get_device_name() if on_gpu else "cpu",
            "torch": torch.__version__,
            "engine": engine_name,
            "serving": serving_line(logs),
            "learner_s": round(learner_s, 1),
            "engine_s": round(time.monotonic() - began_s, 1),
        }
        engines = ConnectedEngines.connect(config.rollout, run.engine, urls, learner.shape.vocab_size, KEY)
        channel = open_channel(
            config.sync,
            (engines.pool, engines.loop.submit),
            channel="disk",
            folder=Path(memory, "weights"),
            hf_path=learner.hf_path,
        )
        channel.connect(learner.weights())
        generator = torch.Generator().manual_seed(0)
        for _ in range(NUM_PUSHES):
            stats = channel.push(learner.weights())
            (engine,) = engines.pool.live()
            began_s = time.monotonic()
            asked = ask(engine, generator, num_prompts, num_tokens, learner.shape.vocab_size)
            prompts, replies = engines.loop.run(asked, ANSWER_S)
            sample_s = time.monotonic() - began_s
            version = learner.version
            is_right = {span.version for reply in replies for span in reply.spans} == {version} and stats.is_whole
            found = learn(learner, batch_of(prompts, replies, version))
            yield {
                "version": version,
                "ok": is_right and found["mean_abs"] <= TOLERANCE_NATS[config.model.dtype],
                **found,
                "tokens_per_s": round(found["tokens"] / sample_s, 1),
                **{name: round(value, 4) for name, value in stats.metrics().items()},
                **(memory_of(run) if on_gpu else {}),
            }
        channel.close()
        engines.close()


def serving_line(logs: Path) -> str | None:
    """Return the line in which an SGLang server on a GPU says what it computes with."""
    lines = (logs / "engine-0.log").read_text(errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.startswith("SGLang serves")), None)


async def ask(
    engine: Engine, generator: torch.Generator, num_prompts: int, num_tokens: int, vocab_size: int
) -> tuple[list[tuple[int, ...]], list[GenerateResult]]:
    """Sample one response to each of a few random prompts; raise the error of one that fails."""
    token_ids = torch.randint(5, vocab_size, (num_prompts, PROMPT_TOKENS), generator=generator).tolist()
    prompts = [tuple(ids) for ids in token_ids]
    requests = [GenerateRequest(f"ask-{i}", prompt, num_tokens, 1.0, (), seed=i) for i, prompt in enumerate(prompts)]
    replies: list[GenerateResult] = []
    for reply in await engine.generate_many(requests):
        if not isinstance(reply, GenerateResult):
            raise reply
        replies.append(reply)
    return prompts, replies


def batch_of(prompts: Sequence[tuple[int, ...]], replies: Sequence[GenerateResult], version: int) -> Batch:
    """Lay prompts and responses out in one batch, with advantages of both signs."""
    tokens = [torch.tensor([*prompt, *reply.token_ids]) for prompt, reply in zip(prompts, replies, strict=True)]
    lens_S = torch.tensor([len(ids_T) for ids_T in tokens])
    mask_T = torch.cat([torch.arange(len(ids_T)) >= PROMPT_TOKENS for ids_T in tokens])
    behaviour = [torch.tensor([0.0] * PROMPT_TOKENS + list(reply.behaviour_logprobs)) for reply in replies]
    advantages_S = torch.where(torch.arange(len(replies)) % 2 == 0, 1.0, -0.5)
    return Batch(
        token_ids_T=torch.cat(tokens),
        seq_lens_S=lens_S,
        sampled_T=mask_T,
        advantages_T=mask_T * torch.repeat_interleave(advantages_S, lens_S),
        behaviour_logprobs_T=torch.cat(behaviour),
        versions_T=torch.where(mask_T, version, -1),
        mask_T=mask_T,
    )


def learn(learner: MegatronLearner, batch: Batch) -> dict[str, Any]:
    """Compare the engine's log-probs with the trainer's, and update on the batch."""
    minibatch = one_minibatch(batch, max_tokens=len(batch.token_ids_T) + 64, share=learner.share)
    (micro_batch,) = minibatch.micro_batches

    def scores() -> Tensor:
        (scores_R,) = learner.log_probs(minibatch)
        return scores_R.float().cpu()

    before_R = scores()
    engine_R = batch.behaviour_logprobs_T[micro_batch.batch_rows_R.cpu()]
    difference_R = (before_R - engine_R).abs()
    result = learner.step(minibatch, BOUNDS)
    return {
        "tokens": int(batch.mask_T.sum()),
        "mean_abs": float(difference_R.mean()),
        "p99": float(difference_R.quantile(0.99)),
        "max": float(difference_R.max()),
        "moved": float((scores() - before_R).abs().mean()),
        "grad_norm": result.metrics["optimizer/grad_norm"],
    }


def memory_of(run: Resolved) -> dict[str, float]:
    """Return the trainer's peak, its plan, and what both processes use of the GPU, in GiB."""
    free, total = torch.cuda.mem_get_info()
    plan = trainer_memory(run, gpu_bytes=total)
    found = {
        "trainer_peak_gib": torch.cuda.max_memory_allocated(),
        "trainer_plan_gib": plan.total - plan.context,
        "used_gib": total - free,
    }
    return {name: round(num_bytes / GIB, 3) for name, num_bytes in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("sglang", "embedded"), default="sglang")
    parser.add_argument("--model", type=Path, default=demo_model_path(), metavar="FOLDER")
    parser.add_argument("--prompts", type=int, default=32, dest="num_prompts")
    parser.add_argument("--tokens", type=int, default=64, dest="num_tokens", help="of each response, at most")
    parser.add_argument("--output", type=Path, metavar="FILE.jsonl")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="for the engine's log (default: a temporary one)")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    o = parser.parse_args()
    logs = o.logs or Path(tempfile.mkdtemp(prefix="exchange-"))
    is_good = True
    try:
        for line in exchange(o.engine, o.model, o.num_prompts, o.num_tokens, logs, o.settings):
            is_good = is_good and line.get("ok", True)
            text = json.dumps(line)
            print(text, flush=True)
            if o.output is not None:
                with o.output.open("a") as file:
                    print(text, file=file)
    except (EngineError, UserError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
