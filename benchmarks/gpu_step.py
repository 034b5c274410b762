"""One optimizer update of a learner at real sizes, with random weights: time, FLOPs, and memory next to the plan.

    python benchmarks/gpu_step.py --model 1.5b                       every variant at 16k tokens, about 20 s each
    python benchmarks/gpu_step.py --model 7b-half --variants local te --length 8192 --profile
    python benchmarks/gpu_step.py --variants te "te recompute" --tiny          on a CPU, in seconds, with our own layers
    python benchmarks/gpu_step.py --model 1.5b --variants --transfers    export, broadcast and snapshot of the weights
    python benchmarks/gpu_step.py --model 1.5b --variants te --deterministic    is an update repeated bit for bit?
    python benchmarks/gpu_step.py --model 7b-half --variants te --packs 8 --optimizer-peak

An update is --packs packed micro-batches of sequences of one length: forward, GRPO's loss, backward, Adam, in
MegatronLearner as a run builds it. Weights are filled on the device, from one seed; no checkpoint is read. Seconds are
medians, measured with CUDA events on a GPU and with the wall clock on a CPU. preflight/work.py computes the FLOPs: the
hardware's, which include recomputation, and the model's, which `perf/mfu` counts. Each is a share of the data sheet's
peak rate, and of the rate of one large product, measured first. machine/memory.py plans the memory, here without the
assumed context of CUDA and NCCL. A row also has each update's loss, bounds and gradient norm.

--optimizer-peak measures what the optimizer's step allocates on top of weights, gradients and moments, next to the
plan's `update`; on a CPU from the profiler's record of allocations.

--deterministic sets what `run.deterministic` sets, and makes the first update twice, whose gradients must have the same
bits. --output FILE keeps the rows, and skips variants whose rows it already has. --seconds ends in time, with exit code
75 if some variants are left. If this machine cannot run a variant, one line says so, and the others run; exit code 1
says that one failed.
"""

import argparse
import gc
import itertools
import json
import os
import re
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bapo_megatron.config.load import load_config
from bapo_megatron.learner import lean_import
from bapo_megatron.resolved import resolve
from bapo_megatron.runtime.environment import trainer_variables
from bapo_megatron.runtime.files import write_atomically

os.environ |= trainer_variables({}, deterministic="--deterministic" in sys.argv)  # before torch is imported

with lean_import():
    from megatron.core import parallel_state

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import ModuleList, Parameter

from bapo_megatron.buffer.packing import one_minibatch
from bapo_megatron.config.schema import Config
from bapo_megatron.engines.update_group import GroupBackend, UpdateGroup, host_store
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.shape import ModelShape
from bapo_megatron.hf.streams import routes
from bapo_megatron.learner import split_model
from bapo_megatron.learner.base import StepResult
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.learner.parallel import ParallelLayout, device, sum_in_fixed_order
from bapo_megatron.machine.gpus import GIB, device_peak_flops
from bapo_megatron.machine.memory import trainer_memory
from bapo_megatron.preflight.known_models import KNOWN_MODELS
from bapo_megatron.preflight.work import model_flops, step_flops
from bapo_megatron.resolved.step_tokens import StepTokens
from bapo_megatron.types import Batch, ClipBounds

UNFINISHED = 75
TRANSFERS = "transfers"
BUCKET_BYTES = 512 * 2**20
BOUNDS = ClipBounds(low=0.8, high=1.2, positive_share=0.5, saturated=False, num_moves=0)
NUM_OPERATORS = 20
SPREAD = 0.02  # standard deviation of random weights, as models are initialised

_QWEN2 = {"model_type": "qwen2", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 131_072}
_SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
_1_5B = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "vocab_size": 151_936}
_FEW_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
MODELS: dict[str, dict[str, Any]] = {
    "tiny": _QWEN2 | _SMALL | {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False},
    "tiny-experts": _QWEN2
    | _SMALL
    | _FEW_EXPERTS
    | {"model_type": "qwen3_moe", "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False},
    "1.5b": _QWEN2 | _1_5B | {"num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "7b-half": KNOWN_MODELS["Qwen2.5-Math-7B-64k"] | {"num_hidden_layers": 14},  # half of the layers, at full size
    "qwen3.5-9b-4l": KNOWN_MODELS["Qwen3.5-9B"]["text_config"] | {"num_hidden_layers": 4},  # four of 32 layers
    "30b-a3b-3l": KNOWN_MODELS["Qwen3-30B-A3B"] | {"num_hidden_layers": 3},  # three of 48 layers, all experts
}

GROUP = 8  # responses to a prompt, if they share it
_TE = ("model.implementation=transformer_engine",)
_LAYERS: dict[str, tuple[str, ...]] = {
    "local": ("model.implementation=local",),
    "te": _TE,
    "te tensorwise": (*_TE, "precision.fp8=hybrid", "precision.recipe=tensorwise"),
    "te blockwise": (*_TE, "precision.fp8=hybrid", "precision.recipe=blockwise"),
}
VARIANTS: dict[str, tuple[str, ...]] = {
    **_LAYERS,
    **{f"{name} recompute": (*settings, "train.recompute=true") for name, settings in _LAYERS.items()},
    "te chunk 256": (*_TE, "train.logprob_chunk_tokens=256"),
    "te chunk 4096": (*_TE, "train.logprob_chunk_tokens=4096"),
    "te triton": (*_TE, "train.logprob_backend=triton"),
    "te replay": (*_TE, "model.replay_routes=true"),
    "te shared prompts": (*_TE, "train.share_prompts=true", f"rollout.samples_per_prompt={GROUP}"),
    "te moe_permute_fusion true": (*_TE, "megatron.extra.moe_permute_fusion=true"),
    "te grouped": _TE,
    "te grouped moe_permute_fusion true": (*_TE, "megatron.extra.moe_permute_fusion=true"),
    **{
        f"te {field} {value}": (*_TE, f"megatron.extra.{field}={value}")
        for field in ("bias_activation_fusion", "apply_rope_fusion", "gradient_accumulation_fusion")
        for value in ("false", "true")
    },
}

# Transformer Engine reads this in each call; see docs/moe.md
GROUPED = {"NVTE_USE_CUTLASS_GROUPED_GEMM": "1"}

TINY = {"model": "tiny", "tokens": 256, "length": 64}


def make_config(
    settings: tuple[str, ...], tokens: StepTokens, num_packs: int = 1, *, deterministic: bool = False
) -> Config:
    sizes = (
        f"rollout.prompts_per_step={tokens.num_sequences}",
        "rollout.samples_per_prompt=1",
        f"data.max_prompt_tokens={tokens.prompt}",
        f"rollout.max_response_tokens={tokens.response}",
        f"train.max_tokens_per_microbatch={tokens.total // num_packs}",
        "loss.name=grpo",
        f"run.deterministic={str(deterministic).lower()}",
        f"model.dtype={'bfloat16' if torch.cuda.is_available() else 'float32'}",
    )
    return load_config([], [*sizes, *settings])


def make_batch(tokens: StepTokens, shape: ModelShape, config: Config) -> Batch:
    """Return random tokens, prompts that `GROUP` sequences share if the learner computes them once, and random experts
    for each token if the learner replays them."""
    vocab_size = shape.vocab_size
    generator = torch.Generator().manual_seed(0)
    lens_S = torch.full((tokens.num_sequences,), tokens.per_sequence)
    is_response_T = (torch.arange(tokens.per_sequence) >= tokens.prompt).repeat(tokens.num_sequences)
    of_each_S = torch.where(torch.arange(tokens.num_sequences) % 2 == 0, 1.0, -0.5)  # so that the loss is not near 0
    batch = Batch(
        token_ids_T=torch.randint(vocab_size, (tokens.total,), generator=generator),
        seq_lens_S=lens_S,
        sampled_T=is_response_T,
        advantages_T=of_each_S.repeat_interleave(lens_S) * is_response_T,
        behaviour_logprobs_T=-torch.log(torch.tensor(float(vocab_size))) * is_response_T,
        versions_T=torch.where(is_response_T, 0, -1),
        mask_T=is_response_T,
    )
    if config.train.share_prompts:
        prompt_S = torch.arange(tokens.num_sequences) // GROUP
        token_ids_ST = batch.token_ids_T.reshape(tokens.num_sequences, tokens.per_sequence)
        token_ids_ST[:, : tokens.prompt] = token_ids_ST[GROUP * prompt_S, : tokens.prompt]
        batch = replace(batch, prompt_S=prompt_S, shared_lens_S=torch.full_like(prompt_S, tokens.prompt))
    if not config.model.replay_routes:
        return batch
    assert shape.experts is not None, "learner/fit.py checks this"
    scores_TLC = torch.rand(tokens.total, shape.num_layers, shape.experts.num_experts, generator=generator)
    return batch.having(routes(shape), scores_TLC.topk(shape.experts.num_chosen).indices.to(torch.uint8))


@torch.no_grad()
def fill_at_random(
    model: ModuleList,
    shape: ModelShape,
    layout: ParallelLayout,
    path: Path,
    fill: Callable[[Parameter, Tensor], object] = Parameter.copy_,
) -> None:
    """Stand in for `load_weights`: fill matrices at random, the same in every learner, norms with 1, biases with 0."""
    generator = torch.Generator(device()).manual_seed(0)
    for name, parameter in model.named_parameters():
        values = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        if parameter.dim() > 1:
            values.normal_(0, SPREAD, generator=generator)
        else:
            values.fill_(0 if name.endswith("bias") else 1)
        fill(parameter, values)


@contextmanager
def learner_of(config: Config, hf_config: dict[str, Any]) -> Iterator[MegatronLearner]:
    with (
        tempfile.TemporaryDirectory(prefix="gpu-step-") as folder,
        patch.object(split_model, "load_weights", fill_at_random),
    ):
        Path(folder, "config.json").write_text(json.dumps(hf_config))
        try:
            yield MegatronLearner(resolve(config, folder))
        finally:
            if parallel_state.is_initialized():
                parallel_state.destroy_model_parallel()


def seconds_of(call: Callable[[], object]) -> float:
    """Measure one call, with CUDA events on a GPU and with the wall clock elsewhere."""
    if not torch.cuda.is_available():
        start_s = time.perf_counter()
        call()
        return time.perf_counter() - start_s
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def product_flops(dtype: str) -> float:
    """Measure the rate of one large product in FLOPs per second: 8192 x 8192 x 8192 on a GPU, 512 on a CPU."""
    size = 8192 if torch.cuda.is_available() else 512
    a = torch.randn(size, size, device=device()).to(getattr(torch, dtype))
    seconds = [seconds_of(lambda: a @ a) for _ in range(13)][3:]  # the first ones choose a kernel
    return 2 * size**3 / statistics.median(seconds)


def allocated_on_top(call: Callable[[], object]) -> int:
    """Return the bytes that a call allocates at its peak, on top of those in use before."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    found = profiler.profiler.kineto_results.events()
    events = sorted((e for e in found if e.name() == "[memory]"), key=lambda e: e.start_ns())
    return max(itertools.accumulate((e.nbytes() for e in events), initial=0))


def optimizer_peak(learner: MegatronLearner, update: Callable[[], None]) -> int:
    """Make an update; return what its optimizer's step allocates, after the backward pass has freed its memory."""
    step, found = learner.optimizer_step, []

    def watched(learning_rate: float) -> float:
        norms: list[float] = []
        found.append(allocated_on_top(lambda: norms.append(step(learning_rate))))
        return norms[0]

    with patch.object(learner, "optimizer_step", watched):
        update()
    return found[0]


def outside_torch() -> int:
    """Return the bytes of GPU memory that torch's allocator does not hold: context, kernels, NCCL's buffers."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def losses_of(results: list[StepResult]) -> list[dict[str, float]]:
    """Return what must be the same in the next session on such a machine, for each update."""
    return [
        {
            "step": step,
            "loss": result.metrics["loss/policy"],
            "low": result.found[0].low,
            "high": result.found[0].high,
            "grad_norm": result.metrics["optimizer/grad_norm"],
        }
        for step, result in enumerate(results, start=1)
    ]


def measure(
    config: Config, hf_config: dict[str, Any], tokens: StepTokens, options: argparse.Namespace
) -> dict[str, Any]:
    run = resolve(config, hf_config)
    shape = run.shape
    on_gpu = torch.cuda.is_available()
    results: list[StepResult] = []
    product_rate = product_flops(config.model.dtype)
    with learner_of(config, hf_config) as learner:
        batch = make_batch(tokens, shape, config)
        minibatch = one_minibatch(batch, max_tokens=config.train.max_tokens_per_microbatch, share=learner.share)
        assert len(minibatch.micro_batches) == options.packs or minibatch.counts.saved

        def update() -> None:
            results.append(learner.step(minibatch, BOUNDS))

        update()  # creates Adam's state and compiles kernels
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        seconds = [seconds_of(update) for _ in range(options.turns)]
        peak = torch.cuda.max_memory_allocated() if on_gpu else None
        outside = outside_torch() if on_gpu else None
        losses = losses_of(results)
        of_optimizer = optimizer_peak(learner, update) if options.optimizer_peak else None
        operators = slowest_operators(update) if options.profile else None
    median_s = statistics.median(seconds)
    counts = minibatch.counts
    computed = replace(tokens, num_copies_saved=counts.saved // tokens.prompt, saved=tokens.prompt)
    hardware, model = step_flops(run, computed, 0) / median_s, model_flops(run, computed) / median_s
    sheet_rate = device_peak_flops(config.model.dtype) if on_gpu else None
    plan = trainer_memory(run, gpu_bytes=torch.cuda.mem_get_info()[1] if on_gpu else None)
    return {
        "seconds": {"median": median_s, "least": min(seconds), "most": max(seconds)},
        "tokens_per_s": tokens.total / median_s,
        "tflops_per_s": hardware / 1e12,
        "model_tflops_per_s": model / 1e12,
        "sheet_tflops_per_s": sheet_rate / 1e12 if sheet_rate else None,
        "product_tflops_per_s": product_rate / 1e12,
        "share_of_peak": hardware / sheet_rate if sheet_rate else None,
        "share_of_product": hardware / product_rate,
        "mfu": model / sheet_rate if sheet_rate else None,
        "mfu_of_product": model / product_rate,
        "peak_gib": peak / GIB if peak else None,
        "outside_torch_gib": outside / GIB if outside else None,
        "plan_gib": (plan.total - plan.context) / GIB,
        "losses": losses,
        **(
            {}
            if of_optimizer is None
            else {"optimizer_mib": of_optimizer / 2**20, "plan_update_mib": plan.update / 2**20}
        ),
        **({"operators": operators} if operators else {}),
    }


def slowest_operators(update: Callable[[], object]) -> list[dict[str, Any]]:
    """Print and return the twenty operators that take longest."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        update()
    by = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    events = profile.key_averages()
    print(events.table(sort_by=by, row_limit=NUM_OPERATORS), flush=True)
    slowest = sorted(events, key=lambda event: getattr(event, by), reverse=True)[:NUM_OPERATORS]
    return [{"name": event.key, "calls": event.count, "ms": getattr(event, by) / 1e3} for event in slowest]


def compare_first_updates(config: Config, hf_config: dict[str, Any], tokens: StepTokens) -> dict[str, Any]:
    """Make the same first update twice; gradients with other bits are a failure."""
    found: list[dict[str, Tensor]] = []
    for _ in range(2):
        with learner_of(config, hf_config) as learner:
            batch = make_batch(tokens, learner.shape, config)
            max_tokens = config.train.max_tokens_per_microbatch
            learner.step(one_minibatch(batch, max_tokens=max_tokens, share=learner.share), BOUNDS)
            found.append({name: gradient.clone() for name, gradient in learner.named_gradients()})
    first, second = found
    different = [name for name, gradient in first.items() if not torch.equal(gradient, second[name])]
    if different:
        return {"failed": f"{len(different)} of {len(first)} gradients differ, the first is {different[0]}"}
    return {"num_equal_gradients": len(first)}


def measure_transfers(config: Config, hf_config: dict[str, Any], num_turns: int) -> dict[str, Any]:
    """Time exporting the weights, broadcasting them in a group of one rank, and copying them for a snapshot."""
    backend: GroupBackend = "nccl" if torch.cuda.is_available() else "gloo"
    bucket = torch.zeros(BUCKET_BYTES if torch.cuda.is_available() else 2**20, dtype=torch.uint8, device=device())
    with learner_of(config, hf_config) as learner:
        num_bytes = sum(tensor.nbytes for _, tensor in learner.weights().whole())
        export_s = [seconds_of(lambda: [None for _ in learner.weights().whole()]) for _ in range(num_turns)]
        group = UpdateGroup(
            "alone", store=host_store("127.0.0.1", 1, 60), rank=0, world_size=1, backend=backend, timeout_s=60
        )

        def broadcast() -> None:
            work = group.broadcast(bucket)
            while not work.is_completed():
                time.sleep(1e-4)
            work.wait()

        broadcast_s = [seconds_of(broadcast) for _ in range(num_turns + 1)][1:]
        group.abandon()
        with tempfile.TemporaryDirectory(prefix="gpu-step-") as folder:
            snapshot = learner.snapshot()
            detach_s = seconds_of(snapshot.detach)
            start_s = time.perf_counter()
            snapshot.write(Path(folder))
            write_s = time.perf_counter() - start_s
    return {
        "weights_gib": num_bytes / GIB,
        "export_gib_per_s": num_bytes / GIB / statistics.median(export_s),
        "broadcast_gib_per_s": bucket.nbytes / GIB / statistics.median(broadcast_s),
        "snapshot_detach_s": detach_s,
        "snapshot_write_s": write_s,
    }


class Rows:
    """Measured rows by name, saved to a file after each row."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.rows: dict[str, Any] = json.loads(path.read_text()) if path and path.exists() else {}

    def add(self, name: str, row: dict[str, Any]) -> None:
        self.rows[name] = row
        print(f"{name}: {json.dumps(row)}", flush=True)
        if self._path:
            write_atomically(self._path, json.dumps(self.rows, indent=1) + "\n")


def row_of(name: str, options: argparse.Namespace, tokens: StepTokens) -> dict[str, Any]:
    """Measure one variant, or say why this machine cannot run it."""
    hf_config, settings = MODELS[options.model], VARIANTS.get(name, _LAYERS["local"])
    if options.tiny:
        settings = tuple(_LAYERS["local"][0] if setting in _TE else setting for setting in settings)
    is_grouped = "grouped" in name
    if is_grouped and "num_experts" not in hf_config:
        return {"missing": "the model has no experts"}
    try:
        config = make_config((*settings, *options.settings), tokens, options.packs, deterministic=options.deterministic)
        if name == TRANSFERS:
            return measure_transfers(config, hf_config, options.turns)
        with patch.dict(os.environ, GROUPED if is_grouped else {}):
            row = measure(config, hf_config, tokens, options)
        return row | compare_first_updates(config, hf_config, tokens) if options.deterministic else row
    except ConfigError as error:
        return {"missing": str(error)}
    except Exception as error:  # any library may raise it, and the next variant may still run
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"}
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="1.5b")
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=[*VARIANTS], metavar="NAME")
    parser.add_argument("--tokens", type=int, default=16_384, help="tokens of the pack")
    parser.add_argument("--length", type=int, default=2048, help="tokens of each sequence, a quarter of them prompt")
    parser.add_argument("--packs", type=int, default=1, help="packs of an update; a run's updates have 8 to 64")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument(
        "--optimizer-peak", action="store_true", help="measure the memory of the optimizer's step alone"
    )
    parser.add_argument("--profile", action="store_true", help="print the operators that take longest")
    parser.add_argument("--transfers", action="store_true", help="also measure export, broadcast and snapshot")
    parser.add_argument("--deterministic", action="store_true", help="sum in a fixed order; make an update twice")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, and our layers for Transformer Engine's")
    parser.add_argument("--output", type=Path, help="file for the rows")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no variant that would end later")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings for every variant")
    options = parser.parse_intermixed_args()
    if options.packs < 1:
        parser.error(f"--packs={options.packs} must be at least 1")
    if options.tiny:
        has_experts = "num_experts" in MODELS[options.model]
        vars(options).update(TINY | ({"model": "tiny-experts"} if has_experts else {}))
    if options.deterministic:  # as a rank does
        sum_in_fixed_order()
    began_s, longest_s = time.monotonic(), 0.0
    prompt = options.length // 4
    tokens = StepTokens(max(1, options.tokens // options.length) * options.packs, prompt, options.length - prompt)
    kept, names = Rows(options.output), [*options.variants, *([TRANSFERS] if options.transfers else [])]
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{where}, torch {torch.__version__}, {options.model}, {tokens.total} tokens, sequences of {options.length}")
    modes = [f"{options.packs} packs"] if options.packs > 1 else []
    modes += [mode for mode in ("profile", "deterministic", "optimizer_peak") if getattr(options, mode)]
    rows = []
    for name in names:
        shown = re.sub(r"^te\b", "local", name) if options.tiny else name
        usual = f"{options.model}, {tokens.total} tokens of {options.length}, {shown}"
        key = ", ".join([usual, *modes])
        if key not in kept.rows or {"missing", "failed"} & kept.rows[key].keys():
            start_s = time.monotonic()
            if start_s - began_s + longest_s > options.seconds:
                print(f"no time left for {name} and those after it", flush=True)
                return UNFINISHED
            row = row_of(name, options, tokens)
            if options.deterministic and "seconds" in row and "seconds" in kept.rows.get(usual, {}):
                row["price"] = row["seconds"]["median"] / kept.rows[usual]["seconds"]["median"] - 1
            kept.add(key, row)
            longest_s = max(longest_s, time.monotonic() - start_s)
        rows.append(kept.rows[key])
    if dist.is_initialized():
        dist.destroy_process_group()
    counts = {state: sum(state in row for row in rows) for state in ("missing", "failed")}
    print(f"{len(rows) - sum(counts.values())} measured, {counts['missing']} missing, {counts['failed']} failed")
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
