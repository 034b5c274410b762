"""Every layout against one process, and with experts or linear attention against transformers, measured.

scripts/layouts_page.py shows the figures of layouts.json.

python -m tests.integration.layouts        measures, and writes layouts.json
"""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from bapo_megatron.buffer.packing import one_minibatch
from bapo_megatron.config.schema import Config
from bapo_megatron.learner.bounds import BoundsFinder
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.resolved import resolve
from bapo_megatron.types import Batch, ClipBounds
from tests.distributed import HANG_S, run_distributed
from tests.integration.learner_reference import (
    ADAM_EPS,
    HYBRID,
    HYBRID_MIXTURE,
    MIXTURE,
    SEARCH,
    TEMPERATURE,
    forest_batch,
    literal_bounds,
    literal_loss,
    load_float64,
    random_batch,
    reference_update,
    save_random_model,
)

NUM_UPDATES = 3
# Query and key norms, and a separate output layer; biases and tied embeddings. Each with the target of the search for
# bounds, chosen so that its outcome lies inside the range and differs between updates.
FAMILIES = {"qwen3": 0.3, "qwen2": 0.4}
LOSS_LIMIT, GRADIENT_LIMIT = 1e-6, 1e-5
LR = 3e-4
CLIP_GRAD = 0.05  # far below the norms of these gradients, so that every update is clipped
RESULTS = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class Layout:
    """One row of the table."""

    title: str
    parallel: dict[str, Any] = field(default_factory=dict)  # settings of [parallel]
    distributed: bool = False
    recompute: bool = False
    max_tokens: int = 40
    schedule: str = "auto"
    share_prompts: bool = False

    @property
    def num_processes(self) -> int:
        product = 1
        for name in ("tensor", "pipeline", "context", "data"):
            product *= self.parallel.get(name, 1)
        return product

    def config(self, rho0: float = SEARCH.rho0) -> Config:
        return Config.model_validate(
            {
                "parallel": {"timeout_s": HANG_S, **self.parallel},
                "rollout": {"temperature": TEMPERATURE},
                "optimizer": {"lr": LR, "eps": ADAM_EPS, "clip_grad": CLIP_GRAD, "distributed": self.distributed},
                "bapo": {**SEARCH.model_dump(), "rho0": rho0},
                "train": {
                    "logprob_chunk_tokens": 13,
                    "recompute": self.recompute,
                    "max_tokens_per_microbatch": self.max_tokens,
                    "schedule": self.schedule,
                    "share_prompts": self.share_prompts,
                },
            }
        )


TP, SP, PP, VPP = (
    {"tensor": 2},
    {"tensor": 2, "sequence": True},
    {"pipeline": 2},
    {"pipeline": 2, "virtual_pipeline": 2},
)
CP, DP = {"context": 2}, {"data": 2}
LAYOUTS = (
    Layout("one process"),
    Layout("one process, other micro-batches", max_tokens=90),
    Layout("recompute", recompute=True),
    Layout("TP2", TP),
    Layout("TP2 + SP", SP),
    Layout("PP2", PP),
    Layout("PP2 x VPP2", VPP),
    Layout("CP2", CP),
    Layout("DP2", DP),
    Layout("DP2, distributed optimizer", DP, distributed=True),
    Layout("CP2, distributed optimizer, recompute", CP, distributed=True, recompute=True),
    Layout("TP2 x PP2", TP | PP),
    Layout("TP2 + SP x PP2 x VPP2, recompute", SP | VPP, recompute=True),
    Layout("TP2 + SP x CP2", SP | CP),
    Layout("PP2 x VPP2 x CP2, distributed optimizer", VPP | CP, distributed=True),
    Layout("CP2 x DP2, distributed optimizer", CP | DP, distributed=True),
    Layout("CP4", {"context": 4}),
    Layout("TP2 + SP x DP2, distributed optimizer", SP | DP, distributed=True),
    Layout("TP2 x PP2 x CP2", TP | PP | CP),
    Layout("TP2 + SP x PP2 x VPP2 x CP2, distributed optimizer, recompute", SP | VPP | CP, True, True),
    Layout("TP2 + SP x PP2 x DP2, distributed optimizer", SP | PP | DP, distributed=True),
)


EP, EP4 = {"expert": 2}, {"expert": 4}
EXPERT_LAYOUTS = (
    Layout("one process"),
    Layout("recompute, interleaved", recompute=True, schedule="interleaved"),
    Layout("DP2, distributed optimizer", DP, distributed=True),
    Layout("EP2", DP | EP, schedule="interleaved"),
    Layout("EP2, forwards first", DP | EP, schedule="forwards_first"),
    Layout("EP2, distributed optimizer, overlapped", DP | EP | {"overlap_communication": True}, distributed=True),
    Layout("EP2, distributed optimizer, recompute", DP | EP, distributed=True, recompute=True),
    Layout("TP2 + SP, experts split by TP", SP),
    Layout("TP2 + SP x EP2", SP | EP),
    Layout("CP2 x EP2", CP | EP),
    Layout("PP2, 3 + 1 layers", PP | {"last_stage_layers": 1}),
    Layout("EP4", {"data": 4} | EP4),
    Layout("DP2 x EP2, distributed optimizer", {"data": 4} | EP, distributed=True),
    Layout("TP4 + SP x EP2", {"tensor": 4, "sequence": True} | EP),
    Layout("TP2 + SP x DP2 x EP4, distributed optimizer", SP | DP | EP4, distributed=True),
    Layout("CP2 x DP2 x EP4, recompute", CP | DP | EP4, recompute=True),
    Layout("PP2 x EP2", PP | DP | EP),
    Layout("PP2 x VPP2 x EP2, distributed optimizer", VPP | DP | EP, distributed=True),
    Layout("TP2 + SP x PP2 x EP2, recompute", SP | PP | EP, recompute=True),
)
HYBRID_LAYOUTS: tuple[Layout, ...] = (
    Layout("one process"),
    Layout("one process, one pack", max_tokens=400),
    Layout("recompute", recompute=True),
    Layout("TP2", TP),
    Layout("TP2, one pack", TP, max_tokens=400),
    Layout("TP2 + SP", SP),
    Layout("PP2", PP),
    Layout("PP2 x VPP2", VPP),
    Layout("DP2", DP),
    Layout("DP2, distributed optimizer", DP, distributed=True),
    Layout("TP2 x PP2", TP | PP),
    Layout("TP2 + SP x PP2 x VPP2, recompute", SP | VPP, recompute=True),
    Layout("TP2 x DP2, distributed optimizer, overlapped", TP | DP | {"overlap_communication": True}, True),
    Layout("TP2 + SP x PP2 x DP2, distributed optimizer", SP | PP | DP, distributed=True),
)
HYBRID_EXPERT_LAYOUTS: tuple[Layout, ...] = (
    Layout("one process"),
    Layout("one process, one pack, recompute", max_tokens=400, recompute=True),
    Layout("DP2, distributed optimizer", DP, distributed=True),
    Layout("EP2", DP | EP),
    Layout("EP2, distributed optimizer, recompute", DP | EP, distributed=True, recompute=True),
    Layout("TP2 + SP, experts split by TP", SP),
    Layout("TP2 + SP x EP2", SP | EP),
    Layout("PP2", PP),
    Layout("PP2 x VPP2", VPP),
    Layout("EP4", {"data": 4} | EP4),
    Layout("DP2 x EP2, distributed optimizer", {"data": 4} | EP, distributed=True),
    Layout("PP2 x VPP2 x EP2, distributed optimizer", VPP | DP | EP, distributed=True),
    Layout("TP2 + SP x PP2 x EP2, recompute", SP | PP | EP, recompute=True),
    Layout("TP2 + SP x DP2 x EP4, distributed optimizer", SP | DP | EP4, distributed=True),
)
# Packs of 147 and 74 tokens; or all in one
HYBRID_LAYOUTS, HYBRID_EXPERT_LAYOUTS = (
    tuple(replace(layout, max_tokens=max(layout.max_tokens, 150)) for layout in layouts)
    for layouts in (HYBRID_LAYOUTS, HYBRID_EXPERT_LAYOUTS)
)


@dataclass(frozen=True)
class Table:
    """The layouts of some models, and what each is compared with."""

    name: str  # in layouts.json
    layouts: Sequence[Layout]
    families: dict[str, float]  # with the target of the search for bounds
    seq_lens: Sequence[int] | None = None  # see `random_batch`
    with_transformers: bool = True  # instead of the first layout
    with_prompts: bool = False  # that several sequences share

    @property
    def batch(self) -> Batch:
        return forest_batch() if self.with_prompts else random_batch(seq_lens=self.seq_lens)


TABLES = (
    Table("rows", LAYOUTS, FAMILIES, with_transformers=False),
    Table("rows_with_experts", EXPERT_LAYOUTS, {MIXTURE: 0.25}),
    Table("rows_with_linear_attention", HYBRID_LAYOUTS, {HYBRID: 0.35}, (70, 1, 3, 130, 17)),
    Table("rows_with_both", HYBRID_EXPERT_LAYOUTS, {HYBRID_MIXTURE: 0.35}, (70, 1, 3, 130, 17)),
)


def measure(rank: int, world_size: int, root: Path, tables: Sequence[Table]) -> None:
    """Save what NUM_UPDATES updates of every layout with `world_size` processes give, one file per model."""
    for table in tables:
        for number, layout in enumerate(table.layouts):
            if layout.num_processes == world_size:
                for family, rho0 in table.families.items():
                    result = updates(layout.config(rho0), root / family, table.batch)
                    if rank == 0:
                        torch.save(result, root / f"{family}-{number}.pt")


def updates(config: Config, model: Path, batch: Batch) -> dict[str, list[Any]]:
    """Return what NUM_UPDATES updates give, with tensors on the CPU; all ranks call it together."""
    learner = MegatronLearner(resolve(config, model))
    finder = BoundsFinder(config, learner)
    minibatch = one_minibatch(batch, max_tokens=config.train.max_tokens_per_microbatch, share=learner.share)
    result: dict[str, list[Any]] = {"losses": [], "norms": [], "gradients": [], "bounds": []}
    for _ in range(NUM_UPDATES):
        bounds = finder.find(minibatch)
        mine = torch.tensor([bounds.low, bounds.high, bounds.num_moves], dtype=torch.float64)
        of_all = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(of_all, mine)
        metrics = learner.step(minibatch, bounds).metrics
        result["losses"].append(metrics["loss/policy"])
        result["norms"].append(metrics["optimizer/grad_norm"])
        result["gradients"].append(
            {name: gradient.to("cpu", copy=True) for name, gradient in learner.named_gradients()}
        )
        result["bounds"].append([tuple(bounds.tolist()) for bounds in of_all])
    parallel_state.destroy_model_parallel()
    return result


def _transformers_updates(folder: Path, rho0: float, batch: Batch) -> dict[str, list[Any]]:
    """Return the same updates as transformers makes them, in float64, one sequence at a time, with literal formulas."""
    model, search = load_float64(folder), SEARCH.model_copy(update={"rho0": rho0})
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=ADAM_EPS, weight_decay=0.0)
    result: dict[str, list[Any]] = {"losses": [], "norms": [], "gradients": [], "bounds": []}

    def loss_of(log_probs_T: Tensor, batch: Batch) -> Tensor:
        low, high, share = literal_bounds(log_probs_T.detach(), batch, search)
        num_moves = search.low.points.index(low) + search.high.points.index(high)
        result["bounds"].append([(low, high, num_moves)])
        return literal_loss(log_probs_T, batch, ClipBounds(low, high, share, saturated=False, num_moves=num_moves))

    for _ in range(NUM_UPDATES):
        update = reference_update(model, batch, loss_of=loss_of)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD)
        optimizer.step()
        scale = min(1.0, CLIP_GRAD / (update.grad_norm + 1e-6))
        result["losses"].append(update.loss)
        result["norms"].append(update.grad_norm)
        result["gradients"].append({name: (g * scale).float() for name, g in update.gradients.items()})
    return result


@dataclass(frozen=True)
class Difference:
    """The largest difference between one layout and the single process, or transformers, over all updates, for one
    model."""

    loss: float  # relative
    gradient: float  # |g - g1| / |g1| of a parameter, clipped gradients; the largest over parameters
    norm: float  # norm of the gradient before clipping; relative
    same_bounds: bool  # on every rank, in every update


def compare(got: dict[str, list[Any]], single: dict[str, list[Any]]) -> Difference:
    def relative(name: str) -> float:
        return max(abs(a - b) / abs(b) for a, b in zip(got[name], single[name], strict=True))

    def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
        assert a.keys() == b.keys()
        return max(float((a[name] - b[name]).norm() / b[name].norm()) for name in b)

    wanted = [bounds for (bounds,) in single["bounds"]]
    return Difference(
        relative("losses"),
        max(distance(a, b) for a, b in zip(got["gradients"], single["gradients"], strict=True)),
        relative("norms"),
        all(set(bounds) == {want} for bounds, want in zip(got["bounds"], wanted, strict=True)),
    )


Differences = dict[str, dict[str, Difference]]  # by title and model


def measure_all(root: Path, tables: Sequence[Table] = TABLES) -> dict[str, Differences]:
    """Return the differences of each table's layouts from what they are compared with; runs up to 8 processes."""
    for table in tables:
        for family in table.families:
            save_random_model(family, root / family)
    for world_size in sorted({layout.num_processes for table in tables for layout in table.layouts}):
        run_distributed(measure, world_size, root, tables)
    return {table.name: _differences(table, root) for table in tables}


def _differences(table: Table, root: Path) -> Differences:
    def load(family: str, number: int) -> dict[str, list[Any]]:
        return torch.load(root / f"{family}-{number}.pt", weights_only=True)

    singles = {
        family: _transformers_updates(root / family, rho0, table.batch) if table.with_transformers else load(family, 0)
        for family, rho0 in table.families.items()
    }
    for single in singles.values():
        assert min(single["norms"]) > 2 * CLIP_GRAD, f"clipping would not act on gradients of norm {single['norms']}"
        assert len({bounds for (bounds,) in single["bounds"]}) == NUM_UPDATES, "the bounds should move between updates"
    return {
        layout.title: {family: compare(load(family, number), single) for family, single in singles.items()}
        for number, layout in enumerate(table.layouts)
        if number > 0 or table.with_transformers
    }


def rows(differences: Differences, layouts: Sequence[Layout]) -> list[dict[str, Any]]:
    """Return rows of layouts.json, with two digits: more are noise."""

    def rounded(one: Difference) -> dict[str, Any]:
        return {name: value if name == "same_bounds" else float(f"{value:.1e}") for name, value in asdict(one).items()}

    processes = {layout.title: layout.num_processes for layout in layouts}
    return [
        {"layout": title, "processes": processes[title], "models": {f: rounded(d) for f, d in by_family.items()}}
        for title, by_family in differences.items()
    ]


def main() -> None:
    """Measure, and write the figures."""
    with tempfile.TemporaryDirectory() as folder:
        measured = measure_all(Path(folder))
    tables = {table.name: rows(measured[table.name], table.layouts) for table in TABLES}
    result = {"date": f"{datetime.now(UTC):%Y-%m-%d}", **tables}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
