"""The site's page on plans: an example, the best splits, and what each shipped model needs on each cluster."""

import functools
import itertools

from bapo_megatron.config.load import load_config, shipped_configs
from bapo_megatron.config.schema import Config
from bapo_megatron.machine.gpus import GIB
from bapo_megatron.preflight.explain import explain_best, explain_plan, outline, time_text
from bapo_megatron.preflight.plan import RunPlan, make_plan, planned
from bapo_megatron.preflight.suggest import best_split, smallest_cluster

# Files merged between the model's file and the cluster's file.
ALGORITHMS = {
    "GRPO": ("algorithms/grpo",),
    "BAPO": ("algorithms/bapo",),
    "BAPO, partial rollout": ("algorithms/bapo", "algorithms/partial-rollout"),
    "BAPO, LoRA": ("algorithms/bapo", "algorithms/lora"),
}
SHORT = "gsm8k"
"""Part of the names of models whose responses are shorter than a round of partial rollouts."""
EVERY_SIZE = tuple(f"{nodes}x8-{gpu}" for nodes in (1, 4, 16) for gpu in ("h100", "h200"))
CLUSTERS = {
    "0.5b": ("1x1-rtx4090", "1x1-h100"),
    "1.5b": ("1x1-rtx4090", "1x1-h100"),
    "3b-gsm8k": ("1x1-rtx4090-turns", "1x1-h100-turns"),
    "7b-8k": ("1x1-h100", *EVERY_SIZE, "1x8-h100-split", "1x8-h100-turns"),
    "14b-8k": ("1x1-h100-turns", "1x8-h100-turns", *EVERY_SIZE[2:]),
    "32b-8k": ("1x8-h100-split", *EVERY_SIZE[2:]),
    "32b": EVERY_SIZE[2:],
    "30b-a3b": ("1x8-h200-30b-a3b", "2x8-h200", "4x8-h100", "4x8-h200"),
    "35b-a3b": ("1x8-h200-turns", "2x8-h200"),
    "3.5-9b": EVERY_SIZE[:2],
    "3.5-27b": ("2x8-h200", "4x8-h100", "4x8-h200"),
    "235b-a22b": ("16x8-h200-wide", "32x8-h100", "32x8-h200"),
}
"""The clusters of models that do not suit all, by a part of the model's name."""
SMALLEST = {
    "1.5b": "1x1-rtx4090",
    "3b-gsm8k": "1x1-rtx4090-turns",
    "7b-8k": "1x1-h100",
    "14b-8k": "1x1-h100-turns",
    "32b-8k": "1x8-h100-split",
}
"""Clusters that hold a model's adapters with their state, but not its own."""
RESPONSE_SHARE = 4  # the maximum response is this many times longer than the average
EXAMPLE = ("recipes/r1-distill-qwen-7b-32k", "algorithms/bapo", "clusters/4x8-h100")
EXAMPLE_TOKENS = 8000
BEST = ("recipes/r1-distill-qwen-7b-8k", "algorithms/bapo", "clusters/4x8-h100")
# Models in the table of best splits, and the workload for all of them.
SIZES = {
    "1.5B": "models/DeepSeek-R1-Distill-Qwen-1.5B",
    "7B": "models/DeepSeek-R1-Distill-Qwen-7B",
    "32B": "models/Qwen3-32B",
    "70B": "models/Llama-3.3-70B-Instruct",
}
NODES = (1, 2, 8, 16)
WORKLOAD = (
    "model.dtype=bfloat16",
    "data.max_prompt_tokens=1024",
    "rollout.max_response_tokens=8192",
    "train.max_tokens_per_microbatch=16384",
    "sync.bucket_mib=512",
)


_PAGE = """\
# Plans

What `bapo plan` says of the shipped [recipes](recipes.md), on the clusters that suit each model's size. All figures are
estimates: rooflines from data sheets, at assumed shares of the peak rates. None has been measured on GPUs.

## A plan

{example}

## A best split

{best_example}

## Best splits

H100 nodes (8 x 80 GB) and BAPO, with 64 prompts x 8 samples per step, prompts of up to 1024 tokens and responses of up
to 8192, all of full length. TP, PP, CP and DP are the ranks of `parallel.tensor`, `pipeline`, `context` and `data`.

{best_splits}

## Every combination

Expected times of a step for responses of a quarter of the allowed length, and memory at full length. EP is
`parallel.expert`. On `1x1-*`, `*-split` and `*-turns`, servers and trainer share GPUs ([one card](one-card.md)).

{table}
"""


@functools.cache  # `mkdocs serve` asks at each change of a page, and the best splits take half a minute
def plans_page() -> str:
    """Return the page as Markdown."""
    return _PAGE.format(example=example(), best_example=best_example(), best_splits=best_splits(), table=table())


def combinations() -> list[tuple[str, str]]:
    """List the (model, cluster) names: each model on the clusters that suit its size."""
    shipped = sorted(shipped_configs())
    models = [name for name in shipped if name.startswith("recipes/")]
    return [(m, f"clusters/{cluster}") for m in models for cluster in _clusters(m)]


def _clusters(model: str) -> tuple[str, ...]:
    return next((clusters for size, clusters in CLUSTERS.items() if size in model), EVERY_SIZE)


def algorithms(model: str, cluster: str) -> list[str]:
    """List the algorithms that suit a model on a cluster."""
    needs_lora = any(size in model and cluster == f"clusters/{small}" for size, small in SMALLEST.items())
    names = [name for name in ALGORITHMS if ("LoRA" in name) == needs_lora]
    return [name for name in names if not (SHORT in model and "partial" in name)]


def cell(model: str, algorithm: str, cluster: str) -> Config:
    """Load the configuration of one cell."""
    return load_config([model, *ALGORITHMS[algorithm], cluster])


def table() -> str:
    """Return the table as Markdown."""
    times = " | ".join(f"{name}: train, rollout" for name in ALGORITHMS)
    lines = [
        f"| model | cluster | TP x PP x DP | GiB of a trainer GPU | KV tokens of a server | sync | {times} |",
        "|---|---|---|---|---|---|" + "---|" * len(ALGORITHMS),
    ]
    for model, cluster in combinations():
        lines.append("| " + " | ".join(_cells(model, cluster)) + " |")
    return "\n".join(lines)


def _cells(model: str, cluster: str) -> list[str]:
    configs = {algorithm: cell(model, algorithm, cluster) for algorithm in algorithms(model, cluster)}
    plans = {}
    for algorithm, config in configs.items():
        response_tokens = config.rollout.max_response_tokens // RESPONSE_SHARE
        plans[algorithm] = make_plan(planned(config), response_tokens)
    algorithm, config = next(iter(configs.items()))
    p, plan = config.parallel, plans[algorithm]
    peak = max(each.trainer.total for each in plans.values())
    return [
        model.removeprefix("recipes/"),
        cluster.removeprefix("clusters/"),
        f"{p.tensor} x {p.pipeline} x {p.data}" + (f", EP {p.expert}" if p.expert > 1 else ""),
        f"{peak / GIB:.1f} of {plan.gpu_memory_gib:.1f}",
        f"{plan.server.kv_tokens / 1e6:.1f}M" if plan.server else "",
        f"{plan.sync_bytes / 1e9:.0f} GB, {time_text(plan.sync.expected)}",
        *(_times(plans.get(algorithm)) for algorithm in ALGORITHMS),
    ]


def _times(plan: RunPlan | None) -> str:
    if plan is None:
        return "-"
    assert plan.rollout
    return f"{time_text(plan.train.expected)}, {time_text(plan.rollout.expected)}"


def best_splits() -> str:
    """Return the table of the best splits as Markdown."""
    lines = [
        "| model | nodes | trainer: GPUs = TP x PP x CP x DP | recompute | GiB of a trainer GPU | servers: number x TP "
        "| train, rollout | a step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for size, nodes in itertools.product(SIZES, NODES):
        lines.append(f"| {size} | {nodes} | {' | '.join(_split_cells(SIZES[size], nodes))} |")
    return "\n".join(lines)


def _split_cells(model: str, nodes: int) -> list[str]:
    settings = [f"model.path={model}", f"cluster.nodes={nodes}", *WORKLOAD]
    config = load_config(["algorithms/bapo", "clusters/1x8-h100"], settings)
    run = planned(config)
    best = best_split(run)
    if best is None:
        return [f"none fits: {smallest_cluster(run)} nodes do", *[""] * 5]
    p, r, plan = best.run.config.parallel, best.run.config.rollout, best.plan
    assert plan.rollout
    return [
        f"{p.size} = {p.tensor} x {p.pipeline} x {p.context} x {p.data}",
        "on" if best.run.config.train.recompute else "off",
        f"{plan.trainer.total / GIB:.1f} of {plan.gpu_memory_gib:.1f}",
        f"{r.num_servers} x {r.server_tensor_parallel}",
        f"{time_text(plan.train.expected)}, {time_text(plan.rollout.expected)}",
        time_text(best.balance.step_s),
    ]


def example() -> str:
    """Return the example's `bapo plan` output as an indented block."""
    run = planned(load_config(EXAMPLE))
    plan = explain_plan(run, EXAMPLE_TOKENS)
    command = f"$ bapo plan {' '.join(EXAMPLE)} --response-tokens {EXAMPLE_TOKENS}"
    return _indented(command, f"{plan.verdict}\n\n{outline(run)}\n{plan.needs}")


def best_example() -> str:
    """Return the output of `bapo plan --best` as an indented block."""
    text, _ = explain_best(planned(load_config(BEST)))
    return _indented(f"$ bapo plan --best {' '.join(BEST)} -o best.toml", f"{text}\nwritten to best.toml")


def _indented(command: str, text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in [command, *text.splitlines()])
