"""Every layout against one process, and checkpoints that move between layouts."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layouts_page import layouts_page, table
from megatron.core import parallel_state

from bapo_megatron.buffer.packing import one_minibatch
from bapo_megatron.checkpoint.store import CheckpointStore
from bapo_megatron.config.schema import CheckpointConfig
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.resolved import resolve
from tests.distributed import run_distributed
from tests.integration.layouts import (
    EXPERT_LAYOUTS,
    GRADIENT_LIMIT,
    HYBRID_EXPERT_LAYOUTS,
    HYBRID_LAYOUTS,
    LAYOUTS,
    LOSS_LIMIT,
    RESULTS,
    TABLES,
    Difference,
    Layout,
    measure_all,
    rows,
)
from tests.integration.learner_reference import BOUNDS, HYBRID, MIXTURE, random_batch, save_random_model


def is_within_limits(d: Difference) -> bool:
    return d.loss <= LOSS_LIMIT and d.gradient <= GRADIENT_LIMIT and d.norm <= GRADIENT_LIMIT and d.same_bounds


@pytest.mark.slow
def test_every_layout_equals_one_process(tmp_path: Path) -> None:
    measured = measure_all(tmp_path)
    print(*(table(rows(measured[one.name], one.layouts)) for one in TABLES), sep="\n")
    far = [
        (name, title, d)
        for name, differences in measured.items()
        for title, d in differences.items()
        if not all(map(is_within_limits, d.values()))
    ]
    assert not far


def test_the_result_file_has_these_layouts_within_their_limits() -> None:
    """Its figures are rounding errors of one machine; the rows, and that errors are small, hold everywhere."""
    result = json.loads(RESULTS.read_text(encoding="utf-8"))
    for one in TABLES:
        shown, layouts = result[one.name], one.layouts if one.with_transformers else one.layouts[1:]
        assert [(row["layout"], row["processes"]) for row in shown] == [(x.title, x.num_processes) for x in layouts]
        assert all(is_within_limits(Difference(**d)) for row in shown for d in row["models"].values())


def test_the_page_has_a_row_for_every_layout() -> None:
    text = layouts_page()
    assert [
        layout.title
        for layout in (*LAYOUTS[1:], *EXPERT_LAYOUTS, *HYBRID_LAYOUTS, *HYBRID_EXPERT_LAYOUTS)
        if f"\n| {layout.title} | {layout.num_processes} | " not in text
    ] == []
    assert "<!--" not in text, "a mark that was not filled"
    different = Difference(loss=0.25, gradient=1e-6, norm=0.0, same_bounds=False)
    *_, row = table(rows({"TP2": {"qwen3": different}}, LAYOUTS)).splitlines()
    assert row == "| TP2 | 2 | 2.5e-01 | 1.0e-06 | 0.0e+00 | DIFFERENT |"


def check_resumed(rank: int, world_size: int, root: Path, layout: Layout, load: int | None, save: int) -> None:
    """Go from checkpoint `load`, or from the start by two updates, to checkpoint `save`; then make one more update."""
    config = layout.config()
    learner = MegatronLearner(resolve(config, root / "model"))
    minibatch = one_minibatch(random_batch(), max_tokens=config.train.max_tokens_per_microbatch, share=learner.share)

    def losses(num_updates: int) -> list[float]:
        return [learner.step(minibatch, BOUNDS).metrics["loss/policy"] for _ in range(num_updates)]

    seen: dict[int, float] = {}  # loss of the update at each version
    if load is None:
        losses(2)
    else:
        CheckpointStore.load(root / f"step-{load:06d}", {"learner": learner})
        assert learner.version == load
        (seen[load],) = losses(1)
    assert learner.version == save
    CheckpointStore(root, CheckpointConfig(keep_last=9)).save(save, {"learner": learner}, None)
    (seen[save],) = losses(1)
    if rank == 0:
        (root / f"losses-{save}.json").write_text(json.dumps(seen))
    parallel_state.destroy_model_parallel()


@pytest.mark.slow
def test_checkpoints_move_between_layouts(tmp_path: Path) -> None:
    """TP2 x PP2 -> DP2 with a distributed optimizer -> TP2 x PP2 x VPP2 -> CP2: moves do not change the next loss."""
    save_random_model("qwen2", tmp_path / "model")
    four, two = {"tensor": 2, "pipeline": 2}, {"data": 2}
    chain: list[tuple[Layout, int | None, int]] = [
        (Layout("", four), None, 2),
        (Layout("", two, distributed=True), 2, 3),
        (Layout("", four | {"virtual_pipeline": 2, "sequence": True}, distributed=True), 3, 4),
        (Layout("", {"context": 2}), 4, 5),
    ]
    seen: list[dict[str, Any]] = []
    for layout, load, save in chain:
        run_distributed(check_resumed, layout.num_processes, tmp_path, layout, load, save)
        seen.append(json.loads((tmp_path / f"losses-{save}.json").read_text()))
    for before, after in pairwise(seen):
        (version,) = before.keys() & after.keys()
        assert after[version] == pytest.approx(before[version], rel=LOSS_LIMIT), f"the update at version {version}"
    values = [loss for step in seen for loss in step.values()]
    assert len({round(value, 5) for value in values}) == len(chain), "each update should change the loss"


@pytest.mark.slow
def test_checkpoints_with_linear_attention_move_between_layouts(tmp_path: Path) -> None:
    """TP2 without sequence parallelism -> PP2: the move does not change the next loss."""
    save_random_model(HYBRID, tmp_path / "model")
    run_distributed(check_resumed, 2, tmp_path, Layout("", {"tensor": 2}), None, 2)
    run_distributed(check_resumed, 2, tmp_path, Layout("", {"pipeline": 2}), 2, 3)
    first, second = (json.loads((tmp_path / f"losses-{step}.json").read_text()) for step in (2, 3))
    assert second["2"] == pytest.approx(first["2"], rel=LOSS_LIMIT)
    assert abs(second["3"] - second["2"]) > 1e-4, "an update should change the loss"


def check_replicas(rank: int, world_size: int, root: Path) -> None:
    """Make 50 updates; then compare every parameter that tensor ranks hold copies of, bit for bit."""
    config = Layout("", {"tensor": world_size}, max_tokens=400).config()
    learner = MegatronLearner(resolve(config, root / "model"))
    minibatch = one_minibatch(random_batch(), max_tokens=config.train.max_tokens_per_microbatch, share=learner.share)
    before = {name: parameter.clone() for name, parameter in learner.model.named_parameters()}
    for _ in range(50):
        learner.step(minibatch, BOUNDS)
    copied = {n: p.detach() for n, p in learner.model.named_parameters() if not p.tensor_model_parallel}
    assert sum("out_norm" in name for name in copied) == 2
    for name, parameter in copied.items():
        replicas = [torch.empty_like(parameter) for _ in range(world_size)]
        dist.all_gather(replicas, parameter)
        assert torch.equal(*replicas), name
        assert not torch.equal(parameter, before[name]), f"{name} was not trained"
    parallel_state.destroy_model_parallel()


@pytest.mark.slow
def test_replicas_stay_equal_without_sequence_parallelism(tmp_path: Path) -> None:
    save_random_model(HYBRID, tmp_path / "model")
    run_distributed(check_replicas, 2, tmp_path)


@pytest.mark.slow
def test_checkpoints_with_experts_move_between_layouts(tmp_path: Path) -> None:
    """DP4 x EP4 with a distributed optimizer -> TP2 x EP2: the move does not change the next loss."""
    save_random_model(MIXTURE, tmp_path / "model")
    before = Layout("", {"data": 4, "expert": 4}, distributed=True)
    after = Layout("", {"tensor": 2, "sequence": True, "expert": 2})
    run_distributed(check_resumed, 4, tmp_path, before, None, 2)
    run_distributed(check_resumed, 2, tmp_path, after, 2, 3)
    first, second = (json.loads((tmp_path / f"losses-{step}.json").read_text()) for step in (2, 3))
    assert second["2"] == pytest.approx(first["2"], rel=LOSS_LIMIT)
    assert abs(second["3"] - second["2"]) > 1e-4, "an update should change the loss"
