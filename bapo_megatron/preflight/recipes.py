"""The table of docs/recipes.md: what each shipped model needs on each cluster that it fits.

python -m bapo_megatron.preflight.recipes        plans, and writes the table into the page
"""

from __future__ import annotations

from pathlib import Path

from bapo_megatron.config.load import load_config, shipped_configs
from bapo_megatron.config.schema import Config
from bapo_megatron.preflight.gpus import GIB
from bapo_megatron.preflight.known_models import planned_shape
from bapo_megatron.preflight.plan import make_plan
from bapo_megatron.preflight.report import amount

# Files that are merged between that of the model and that of the cluster.
ALGORITHMS = {
    "GRPO": ("algorithms/grpo",),
    "BAPO": ("algorithms/bapo",),
    "BAPO, partial rollout": ("algorithms/bapo", "algorithms/partial-rollout"),
}
RESPONSE_SHARE = 4  # times are for responses that are this many times shorter than allowed, on average
PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
BEGIN, END = "<!-- table -->", "<!-- end of table -->"


def combinations() -> list[tuple[str, str]]:
    """(model, cluster), by name. A 32B model and its servers need more than one node."""
    shipped = sorted(shipped_configs())
    models = [name for name in shipped if name.startswith("models/")]
    clusters = [name for name in shipped if name.startswith("clusters/")]
    clusters.sort(key=lambda name: int(name.removeprefix("clusters/").split("x")[0]))
    return [(m, c) for m in models for c in clusters if not ("32b" in m and c.startswith("clusters/1x"))]


def planned(model: str, algorithm: str, cluster: str) -> Config:
    """The configuration of one cell."""
    return load_config([model, *ALGORITHMS[algorithm], cluster])


def table() -> str:
    """Markdown."""
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
        plans.append(make_plan(config, planned_shape(config.model.path), response_tokens))
    p, plan = configs[0].parallel, plans[0]
    peak = max(each.trainer.total for each in plans)
    assert all(each.server and each.rollout for each in plans)
    return [
        model.removeprefix("models/"),
        cluster.removeprefix("clusters/"),
        f"{p.tensor} x {p.pipeline} x {p.data}",
        f"{peak / GIB:.1f} of {plan.gpu_memory_gib:.1f}",
        f"{plan.server.kv_tokens / 1e6:.1f}M" if plan.server else "",
        f"{plan.sync_bytes / 1e9:.0f} GB, {amount(plan.sync.expected)}",
        *(f"{amount(each.train.expected)}, {amount(each.rollout.expected)}" for each in plans if each.rollout),
    ]


def filled_page(text: str) -> str:
    """The page with the table in its place."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(filled_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
