"""Write the figures of docs/recipes.md: an example plan, and the needs of each model on each cluster that fits it.

python scripts/write_recipes_page.py
"""

from pathlib import Path

from bapo_megatron.config.load import load_config, shipped_configs
from bapo_megatron.config.plan import summarize
from bapo_megatron.config.schema import Config
from bapo_megatron.hf.shape import model_shape
from bapo_megatron.preflight.known import GIB, planned_config
from bapo_megatron.preflight.plan import make_plan
from bapo_megatron.preflight.report import amount, explain

# Files merged between the model's and the cluster's.
ALGORITHMS = {
    "GRPO": ("algorithms/grpo",),
    "BAPO": ("algorithms/bapo",),
    "BAPO, partial rollout": ("algorithms/bapo", "algorithms/partial-rollout"),
}
RESPONSE_SHARE = 4  # average responses are this many times shorter than the maximum
PAGE = Path(__file__).parents[1] / "docs" / "recipes.md"
EXAMPLE = ("recipes/r1-distill-qwen-7b-32k", "algorithms/bapo", "clusters/4x8-h100")
EXAMPLE_TOKENS = 8000


def combinations() -> list[tuple[str, str]]:
    """List the (model, cluster) names. A 32B model and its servers need more than one node."""
    shipped = sorted(shipped_configs())
    models = [name for name in shipped if name.startswith("recipes/")]
    clusters = [name for name in shipped if name.startswith("clusters/")]
    clusters.sort(key=lambda name: int(name.removeprefix("clusters/").split("x")[0]))
    return [(m, c) for m in models for c in clusters if not ("32b" in m and c.startswith("clusters/1x"))]


def planned(model: str, algorithm: str, cluster: str) -> Config:
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
    configs = [planned(model, algorithm, cluster) for algorithm in ALGORITHMS]
    plans = []
    for config in configs:
        response_tokens = config.rollout.max_response_tokens // RESPONSE_SHARE
        plans.append(make_plan(config, model_shape(planned_config(config.model.path)), response_tokens))
    p, plan = configs[0].parallel, plans[0]
    peak = max(each.trainer.total for each in plans)
    assert all(each.server and each.rollout for each in plans)
    return [
        model.removeprefix("recipes/"),
        cluster.removeprefix("clusters/"),
        f"{p.tensor} x {p.pipeline} x {p.data}",
        f"{peak / GIB:.1f} of {plan.gpu_memory_gib:.1f}",
        f"{plan.server.kv_tokens / 1e6:.1f}M" if plan.server else "",
        f"{plan.sync_bytes / 1e9:.0f} GB, {amount(plan.sync.expected)}",
        *(f"{amount(each.train.expected)}, {amount(each.rollout.expected)}" for each in plans if each.rollout),
    ]


def example() -> str:
    """Return the example's `bapo plan` output as an indented block."""
    config = load_config(EXAMPLE)
    text, _ = explain(config, EXAMPLE_TOKENS)
    command = f"$ bapo plan {' '.join(EXAMPLE)} --response-tokens {EXAMPLE_TOKENS}"
    return "\n".join(f"    {line}" for line in [command, *summarize(config).splitlines(), *text.splitlines()])


def filled_page(text: str) -> str:
    """Fill the example and the table into the page."""
    return _fill(_fill(text, "plan", example()), "table", table())


def _fill(text: str, name: str, content: str) -> str:
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n{content}\n{end}{after}"


if __name__ == "__main__":
    PAGE.write_text(filled_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
