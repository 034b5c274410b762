"""How a trainer rank and a server divide a GPU: the plan's table, what each is told, and SGLang's own arithmetic."""

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

from bapo_megatron.config.load import load_config
from bapo_megatron.engines import sglang
from bapo_megatron.hf.shape import model_shape
from bapo_megatron.machine.gpus import FULL, GIB, GPUS
from bapo_megatron.machine.memory import fullest_rank, rank_memories
from bapo_megatron.machine.parameters import model_parameters
from bapo_megatron.machine.server_memory import static_bytes_for
from bapo_megatron.machine.shared_gpu import (
    CONTEXT_BYTES,
    GRAPHS_BYTES,
    SharedGPU,
    limit_rank,
    shared_gpu,
    this_share,
)
from bapo_megatron.preflight.inputs import server_arguments
from bapo_megatron.preflight.known_models import KNOWN_MODELS
from bapo_megatron.preflight.plan import check_memory, make_plan, with_choices
from bapo_megatron.resolved import Resolved, resolve
from bapo_megatron.resolved.placement import ServerPart
from tests.hang import HANG_S
from tests.resolving import shaped

WORKLOAD = (
    "rollout.engine=sglang",
    "rollout.placement=split",
    "model.dtype=bfloat16",
    "data.max_prompt_tokens=1024",
    "rollout.max_response_tokens=4096",
    "rollout.prompts_per_step=32",
    "train.max_tokens_per_microbatch=8192",
)
"""256 responses of up to 5120 tokens with their prompts, in packs of 8192."""

_QWEN2_5 = {  # hidden, feed-forward, layers, heads, key-value heads, words, tied
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "3B": (2048, 11008, 36, 16, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
    "14B": (5120, 13824, 48, 40, 8, 152064, False),
}


def qwen(size: str) -> dict[str, Any]:
    """Return the config.json of a Qwen2.5 of this size, or of a known model."""
    if size in KNOWN_MODELS:
        return KNOWN_MODELS[size]
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes = dict(zip((*names, "vocab_size", "tie_word_embeddings"), _QWEN2_5[size], strict=True))
    return sizes | {"model_type": "qwen2", "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 32768}


ONE = "1:1x1"
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {  # the trainer's split and servers x GPUs: GPUs, settings
    ONE: (1, ()),
    "tp2,dp4:8x1": (8, ("parallel.tensor=2", "parallel.data=4", "rollout.num_servers=8")),
    "tp4,dp2:8x1": (8, ("parallel.tensor=4", "parallel.data=2", "rollout.num_servers=8")),
    "tp4,dp2:2x4": (
        8,
        ("parallel.tensor=4", "parallel.data=2", "rollout.num_servers=2", "rollout.server_tensor_parallel=4"),
    ),
}


def planned(gpu: str, size: str, layout: str, folder: Path) -> Resolved:
    """Return a run with the plan's choices, and with the config.json of its model in a folder."""
    (folder / "config.json").write_text(json.dumps(qwen(size)))
    num_gpus, split = LAYOUTS[layout]
    if num_gpus > 1:
        split = (*split, "parallel.sequence=true", "optimizer.distributed=true")
    cluster = [f"cluster.gpu={gpu}", f"cluster.gpus_per_node={num_gpus}"]
    return with_choices(resolve(load_config([], [*WORKLOAD, *cluster, *split]), folder))


# Trainer: what its plan takes, and what it may take. Server: all that it takes. GiB. The share is the trainer's cap.
# The last five columns are SGLang's mem_fraction_static, max_total_tokens, cuda_graph_max_bs_decode,
# chunked_prefill_size and max_mamba_cache_size.
FITTING = """
gpu     model      layout      recompute trainer may    server share  fraction tokens  graphs prefill states
rtx4090 0.5B       1:1x1       all       16.55   16.77  5.56   0.5689 0.954    63295   256    2048    -
l40s    0.5B       1:1x1       7         19.65   22.14  20.04  0.4221 0.972    1310720 256    8192    -
h100    0.5B       1:1x1       none      25.46   55.11  20.04  0.6537 0.985    1310720 256    8192    -
h100    1.5B       1:1x1       all       40.30   42.32  32.83  0.4920 0.977    945459  256    8192    -
h200    0.5B       1:1x1       none      25.46   112.77 20.04  0.7823 0.992    1310720 256    8192    -
h200    1.5B       1:1x1       none      51.80   90.23  42.58  0.6211 0.987    1310720 256    8192    -
h200    3B         1:1x1       21        69.28   76.94  55.87  0.5260 0.984    1310720 256    8192    -
h100    7B         tp2,dp4:8x1 23        41.80   45.76  29.39  0.5355 0.954    163840  256    8192    -
h100    14B        tp4,dp2:2x4 all       56.38   58.16  16.99  0.6923 0.979    121820  256    8192    -
h100    Qwen3.5-9B tp4,dp2:2x4 none      44.20   49.80  25.35  0.5866 0.974    1119613 256    8192    640
"""
# GiB. Trainer: weights with their state, context, a step. Server: weights, one response, the rest. The last two columns
# are the size of a model that would fit, in billions of parameters, and what makes this one fit: LoRA, turns, or both.
REFUSED = """
gpu     model need  have  trainer state context step server weights response rest smaller helps
rtx4090 1.5B  42.4  22.3  35.1    25.9  3.4     5.8  7.3    2.9     0.1      4.3  0.6     lora
rtx4090 3B    77.3  22.3  66.7    51.7  3.4     11.6 10.6   5.7     0.2      4.7  0.6     both
rtx4090 7B    179.6 22.3  159.5   127.7 3.4     28.4 20.1   14.2    0.3      5.6  0.5     -
l40s    1.5B  43.7  42.2  35.9    25.9  3.4     6.7  7.7    2.9     0.1      4.7  1.4     turns,lora
l40s    3B    77.8  42.2  66.7    51.7  3.4     11.6 11.0   5.7     0.2      5.1  1.4     lora
l40s    7B    180.4 42.2  159.5   127.7 3.4     28.4 20.9   14.2    0.3      6.5  1.4     both
h100    3B    77.8  75.1  66.7    51.7  3.4     11.6 11.0   5.7     0.2      5.1  2.9     turns,lora
h100    7B    180.4 75.1  159.5   127.7 3.4     28.4 20.9   14.2    0.3      6.5  2.9     lora
h200    7B    180.4 132.8 159.5   127.7 3.4     28.4 20.9   14.2    0.3      6.5  5.4     lora
"""


def rows(table: str) -> Iterator[dict[str, str]]:
    names, *lines = (line.split() for line in table.strip().splitlines())
    for line in lines:
        yield dict(zip(names, line, strict=True))


CHANGES: dict[str, tuple[str, ...]] = {
    "turns": ("rollout.placement=turns",),
    "lora": ("lora.rank=16",),
    "both": ("rollout.placement=turns", "lora.rank=16"),
}
ADVICE = {
    "turns": 'set rollout.placement="turns" to give each side the memory while it works',
    "lora": "set lora.rank=16 to train adapters alone",
    "both": 'set lora.rank=16 to train adapters alone and rollout.placement="turns"',
}


def with_settings(run: Resolved, settings: Sequence[str]) -> Resolved:
    """Return a run with other settings, before the plan's choices, which depend on them."""
    config = load_config([], [*WORKLOAD, f"cluster.gpu={run.config.cluster.gpu}", "cluster.gpus_per_node=1", *settings])
    return run.changed(config)


def test_every_case_is_in_a_table() -> None:
    alone = [row for row in (*rows(FITTING), *rows(REFUSED)) if row.get("layout", ONE) == ONE]
    cards, sizes = ("rtx4090", "l40s", "h100", "h200"), ("0.5B", "1.5B", "3B", "7B")
    assert sorted((row["gpu"], row["model"]) for row in alone) == sorted(itertools.product(cards, sizes))


@pytest.mark.parametrize("row", rows(FITTING), ids=lambda row: f"{row['gpu']}-{row['model']}")
def test_a_split_that_fits(row: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = planned(row["gpu"], row["model"], row["layout"], tmp_path)
    shared = this_share(run)
    assert shared is not None
    assert shared.fits
    assert shared.trainer.total <= shared.trainer_bytes
    assert shared.trainer_bytes + shared.server_bytes <= 0.95 * GPUS[row["gpu"]].memory_gib * GIB
    t = run.config.train
    assert str(t.recompute_layers or "all" if t.recompute else "none") == row["recompute"]
    found = (shared.trainer.total, shared.trainer_bytes, shared.server_bytes)
    assert [f"{num_bytes / GIB:.2f}" for num_bytes in found] == [row[name] for name in ("trainer", "may", "server")]

    here = run.placement.on()
    alone, told = (sglang.command(run, one, 0, 1234, has_gpu=True) for one in (here, replace(here, part=shared.part)))
    assert told[: len(alone)] == alone
    assert " ".join(told[len(alone) :]) == (
        f"--mem-fraction-static {row['fraction']} --max-total-tokens {row['tokens']} "
        f"--cuda-graph-max-bs-decode {row['graphs']} --chunked-prefill-size {row['prefill']}"
        + (f" --max-mamba-cache-size {row['states']}" if row["states"] != "-" else "")
    )
    visible = [str(number) for number in range(8)]
    for number, gpus in enumerate(here.gpus):
        without, variables = (
            sglang.environment(run.config, one, number, visible) for one in (here, replace(here, part=shared.part))
        )
        assert variables == without | {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false"}
        assert variables["CUDA_VISIBLE_DEVICES"] == ",".join(map(str, gpus))

    caps: list[tuple[float, int]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, gpu: caps.append((share, gpu)))
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    limit_rank(run, 3)
    ((cap, gpu),) = caps
    assert (f"{cap:.4f}", gpu) == (row["share"], 3)


@pytest.mark.parametrize("row", rows(REFUSED), ids=lambda row: f"{row['gpu']}-{row['model']}")
def test_a_split_that_cannot_fit_says_what_each_part_needs(row: dict[str, str], tmp_path: Path) -> None:
    run = planned(row["gpu"], row["model"], ONE, tmp_path)
    (found,) = check_memory(run)
    helps = [name for name, settings in CHANGES.items() if check_memory(with_settings(run, settings)) == []]
    shown = [name for name in helps if name != "both" or helps == ["both"]]
    assert ",".join(shown) == row["helps"].replace("-", "")
    advice = "".join(f"{ADVICE[name]}, " for name in shown)
    assert found.severity == "error"
    assert found.settings[0] == "rollout.placement"
    memory = f"{GPUS[row['gpu']].memory_gib:.1f}"
    assert found.message == (
        f'rollout.placement="split": a trainer rank and a server need {row["need"]} GiB of each GPU, and 95% of its '
        f"{memory} is {row['have']}: the trainer {row['trainer']} (weights and their state {row['state']}, context "
        f"{row['context']}, a step {row['step']}), the server {row['server']} (weights {row['weights']}, one response "
        f"{row['response']}, graphs, work and context {row['rest']}); {advice}use a model of at most about "
        f"{row['smaller']} "
        "billion parameters with this layout, split the model over more GPUs (parallel.tensor and "
        'rollout.server_tensor_parallel), or set rollout.placement="separate", which needs more GPUs; `bapo plan` '
        "shows its parts, and with --best finds a split of the GPUs that fits, or the smallest cluster"
    )
    assert not make_plan(run).fits
    assert 1e9 * float(row["smaller"]) < model_parameters(run.shape)


MODELS = {
    **{size: model_shape(qwen(size)) for size in _QWEN2_5},
    **{name: model_shape(KNOWN_MODELS[name]) for name in ("Qwen3.5-9B", "Qwen3-30B-A3B")},
    "tiny": model_shape(qwen("0.5B") | {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64,
                                        "num_attention_heads": 2, "vocab_size": 64}),
}  # fmt: skip
HYBRID = "Qwen3.5-9B"


@st.composite
def runs(draw: st.DrawFn) -> tuple[Resolved, float]:
    """Draw a run whose trainer and servers share GPUs, and the memory of one."""
    model = draw(st.sampled_from([*MODELS, HYBRID, "0.5B", "1.5B"]))
    tensor = draw(st.sampled_from([1, 2, 4] if model not in ("0.5B", "1.5B", "3B", "tiny") else [1, 2]))
    data = draw(st.sampled_from([1, 2, 8]))
    width = draw(st.sampled_from([1, 2, 4] if model not in ("0.5B", "1.5B", "3B", "tiny") else [1, 2]))
    settings = [
        f"model.dtype={draw(st.sampled_from(['bfloat16', 'bfloat16', 'float32']))}",
        f"parallel.tensor={tensor}",
        f"parallel.sequence={str(tensor > 1).lower()}",
        f"parallel.data={data}",
        f"parallel.pipeline={draw(st.sampled_from([1, 1, 2])) if model != 'tiny' else 1}",
        f"optimizer.distributed={str(data > 1).lower()}",
        f"train.recompute={draw(st.sampled_from(['true', 'true', 'false']))}",
        f"rollout.server_tensor_parallel={width}",
        f"rollout.num_servers={max(1, tensor * data // width)}",
        f"rollout.max_concurrent_requests={draw(st.integers(1, 2000))}",
        f"rollout.prompts_per_step={draw(st.integers(1, 256))}",
        f"rollout.max_response_tokens={draw(st.integers(16, 32_768))}",
        f"data.max_prompt_tokens={draw(st.integers(16, 4096))}",
        f"train.max_tokens_per_microbatch={draw(st.integers(32, 40_000))}",
    ]
    config = load_config([], ["rollout.engine=sglang", "rollout.placement=split", *settings])
    return shaped(config, MODELS[model]), draw(st.floats(4, 288))


def taking_turns(run: Resolved) -> Resolved:
    rollout = run.config.rollout.model_copy(update={"placement": "turns"})
    return run.changed(run.config.model_copy(update={"rollout": rollout}))


@given(runs(), st.none() | st.floats(1, 1.4))
def test_in_turns_each_phase_fits_and_more_fits_than_in_a_split(
    drawn: tuple[Resolved, float], room: float | None
) -> None:
    """Also where a GPU has just room for the trainer."""
    run, memory_gib = drawn
    if room is not None:
        memory_gib = room * fullest_rank(run, int(memory_gib * GIB)).total / GIB / FULL
    shared, split = shared_gpu(taking_turns(run), memory_gib), shared_gpu(run, memory_gib)
    trainer, server, rest, part = shared.trainer, shared.server, shared.rest, shared.part
    event(f"turns fit: {shared.fits}, a split fits: {split.fits}")
    have = FULL * shared.gpu_bytes
    sums = {phase: sum(both) for phase, both in shared.phases.items()}
    assert list(sums) == ["training", "pushing", "sampling"]
    ranks = rank_memories(run, shared.gpu_bytes)
    buckets = [one.context + one.weights + one.sync for one in ranks]
    assert sums["pushing"] == max(buckets) + CONTEXT_BYTES + server.weights, "rank 0 has buckets, the last one logits"
    assert sums["training"] == trainer.total + CONTEXT_BYTES
    assert sums["sampling"] <= have or server.kv_cache <= 0, "the caches get no more than there is"
    assert shared.fits == (server.concurrency > 0 and all(one <= have for one in sums.values()))
    assert split.fits <= shared.fits
    assert split.trainer == trainer, "recomputation is given here"
    assert shared.bytes_without_caches <= max(sums.values())
    if not shared.fits:
        return
    assert server.concurrency >= split.server.concurrency
    assert trainer.total <= shared.trainer_bytes
    assert shared.trainer_bytes + CONTEXT_BYTES <= have
    assert trainer.total - trainer.context <= shared.trainer_share * shared.gpu_bytes + 1

    first = shared.gpu_bytes - CONTEXT_BYTES  # the ranks wait until servers are healthy
    assert shared.pusher is not None
    resting = first - shared.pusher.context  # started again while the rank rests
    for before in (first, resting):
        cache = cache_of(shared, before, before, sized_after_graphs=False)
        assert cache.tokens == part.kv_tokens
        assert cache.free >= rest.work, "a forward pass has room"


# GiB in each phase, tokens in the server's caches, host memory, and what moves down and up in a step.
TURNS = """
gpu     model      lora layout      recompute training pushing sampling tokens  host   down  up
h100    3B         no   1:1x1       21        71.18    17.96   59.27    1310720 40.24  40.24 40.24
h100    14B        yes  1:1x1       22        70.92    65.20   75.14    202358  28.41  0.90  28.41
rtx4090 3B         yes  1:1x1       28        20.78    18.60   22.32    248334  6.14   0.39  6.14
l40s    1.5B       no   1:1x1       18        39.87    11.92   42.18    1168286 20.13  20.13 20.13
h100    7B         no   tp2,dp4:8x1 none      58.36    30.64   32.79    163840  141.86 17.73 17.73
h100    14B        no   tp4,dp2:8x1 none      64.33    45.49   68.09    163840  220.11 27.51 27.51
h100    Qwen3.5-9B no   tp4,dp2:2x4 none      46.10    21.22   28.75    1119613 133.43 16.68 16.68
"""


def turns_of(row: dict[str, str], folder: Path) -> Resolved:
    (folder / "config.json").write_text(json.dumps(qwen(row["model"])))
    num_gpus, layout = LAYOUTS[row["layout"]]
    settings = [*WORKLOAD, *CHANGES["both" if row["lora"] == "yes" else "turns"], *layout]
    if num_gpus > 1:
        settings += ["parallel.sequence=true", "optimizer.distributed=true"]
    cluster = [f"cluster.gpu={row['gpu']}", f"cluster.gpus_per_node={num_gpus}"]
    return with_choices(resolve(load_config([], [*settings, *cluster]), folder))


def figures(run: Resolved) -> list[str]:
    """Return the last columns of a line of the table."""
    plan, t = make_plan(run), run.config.train
    assert plan.shared is not None
    recomputed = str(t.recompute_layers or "all" if t.recompute else "none")
    sums = [f"{sum(both) / GIB:.2f}" for both in plan.shared.phases.values()]
    moved = [f"{num_bytes / GIB:.2f}" for num_bytes in (plan.host_bytes, plan.down_bytes, plan.up_bytes)]
    return [recomputed, *sums, str(plan.shared.part.kv_tokens), *moved]


@pytest.mark.parametrize("row", rows(TURNS), ids=lambda row: f"{row['gpu']}-{row['model']}")
def test_turns_that_fit(row: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = turns_of(row, tmp_path)
    shared = this_share(run)
    assert shared is not None
    assert shared.fits
    assert figures(run) == list(row.values())[4:]
    caps: list[float] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, gpu: caps.append(share))
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    limit_rank(run, 0)
    assert caps == [shared.trainer_share]
    told = sglang.command(run, replace(run.placement.on(), part=shared.part), 0, 1234, has_gpu=True)
    assert "--enable-memory-saver" in told
    assert told[told.index("--max-total-tokens") + 1] == row["tokens"]


@dataclass(frozen=True)
class Cache:
    """What a server allocates at its start, by SGLang 0.5.23's own rule."""

    tokens: int
    free: int  # bytes, once weights, caches and graphs are there


def cache_of(shared: SharedGPU, before: int, later: int, *, sized_after_graphs: bool) -> Cache:
    """Simulate the start of a server that finds `before` bytes free once its context is there.

    Meanwhile the trainer may take memory: of the bytes, only `later` are left.

    Source (sglang/srt): distributed/bootstrap.py, measure_pre_model_load_memory; mem_cache/kv_cache_configurator.py,
    _profile_available_bytes, _handle_max_mamba_cache (states and a spare one) and _apply_token_constraints. With
    SGLANG_ENABLE_POST_CAPTURE_KV_SIZING, which is off by default, the keys' part is measured again after graphs:
    model_executor/model_runner_components/kv_pool_runtime.py, compute_post_capture_kv_resize.
    """
    part, server = shared.part, shared.server
    slack = before * (1 - part.mem_fraction)
    states = (part.num_states + 1) * server.state_bytes if part.num_states else 0
    left = later - server.weights - states
    room = left - slack - (GRAPHS_BYTES if sized_after_graphs else 0)
    tokens = min(int(room) // server.kv_bytes_per_token, part.kv_tokens)
    return Cache(tokens, int(left) - tokens * server.kv_bytes_per_token - GRAPHS_BYTES)


@given(runs())
def test_the_parts_of_a_gpu_never_exceed_it_and_every_start_gives_the_same_cache(drawn: tuple[Resolved, float]) -> None:
    run, memory_gib = drawn
    shared = shared_gpu(run, memory_gib)
    trainer, server, rest, part = shared.trainer, shared.server, shared.rest, shared.part
    event(f"fits: {shared.fits}, states: {server.state_bytes > 0}")
    assert 0 <= shared.trainer_share < 1
    assert min(server.weights, server.state_cache, server.kv_tokens, part.num_states, rest.work) >= 0
    assert 1 <= part.max_batch <= run.config.rollout.max_concurrent_requests
    room = FULL * shared.gpu_bytes - trainer.total - rest.total - static_bytes_for(run, 1)
    assert shared.fits == (room >= 0) or abs(room) < 2, "it fits if a single response does"
    if not shared.fits:
        return
    assert 0 < part.mem_fraction < 1
    assert shared.trainer_bytes + shared.server_bytes <= FULL * shared.gpu_bytes
    assert trainer.total <= shared.trainer_bytes
    assert trainer.total - trainer.context <= shared.trainer_share * shared.gpu_bytes + 1
    assert server.concurrency * run.config.longest_sequence <= part.kv_tokens

    first = shared.gpu_bytes - CONTEXT_BYTES  # the ranks wait until servers are healthy
    restarted = first - shared.trainer_bytes
    crowded = shared.server_bytes - CONTEXT_BYTES  # the twentieth that the plan leaves is lost, too
    for before, later in itertools.combinations_with_replacement((first, restarted, crowded), 2):
        cache = cache_of(shared, before, later, sized_after_graphs=False)
        assert cache.tokens == part.kv_tokens
        assert cache.free >= rest.work, "a forward pass has room"
        if part.mem_fraction < 0.999 and not server.state_bytes:
            assert cache_of(shared, before, later, sized_after_graphs=True).tokens == part.kv_tokens


def told_of_a_part(folder: Path) -> tuple[ServerPart, list[str]]:
    """Return the part of a server for a model with states, and its command line."""
    run = planned("h100", HYBRID, "tp4,dp2:2x4", folder)
    shared = this_share(run)
    assert shared is not None
    return shared.part, sglang.command(run, replace(run.placement.on(), part=shared.part), 0, 1234, has_gpu=True)


@pytest.mark.skipif(not server_arguments(), reason="SGLang is not installed")
def test_sglang_has_every_argument(tmp_path: Path) -> None:
    names = {word[2:].replace("-", "_") for word in told_of_a_part(tmp_path)[1] if word.startswith("--")}
    assert {"cuda_graph_max_bs_decode", "max_mamba_cache_size"} <= names <= server_arguments()


_PARSED = """
import argparse, json, sys
from bapo_megatron_patches.sglang import apply_cpu_compat
apply_cpu_compat()
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
print(json.dumps(vars(parser.parse_args(sys.argv[1:])), default=str))
"""


@pytest.mark.slow
def test_sglang_reads_the_arguments_as_they_are_meant(tmp_path: Path) -> None:
    """argparse takes the beginning of an option for the whole, or refuses it as ambiguous."""
    part, told = told_of_a_part(tmp_path)
    arguments = told[told.index("--model-path") :]
    done = subprocess.run(
        [sys.executable, "-c", _PARSED, *arguments], capture_output=True, text=True, timeout=HANG_S, check=True
    )
    read = json.loads(done.stdout.splitlines()[-1])
    assert {name: read[name] for name in told_of(part)} == told_of(part)


def told_of(part: ServerPart) -> dict[str, float]:
    return {
        "mem_fraction_static": part.mem_fraction,
        "max_total_tokens": part.kv_tokens,
        "cuda_graph_max_bs_decode": part.max_batch,
        "chunked_prefill_size": part.prefill_tokens,
        "max_mamba_cache_size": part.num_states,
    }
