"""Every layout against one process, and checkpoints that move between layouts."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from layouts_page import layouts_page, table
from megatron.core import parallel_state

from bapo_megatron.buffer.packing import one_minibatch
from bapo_megatron.checkpoint.store import CheckpointStore
from bapo_megatron.config.schema import CheckpointConfig
from bapo_megatron.learner.megatron import MegatronLearner
from tests.distributed import run_distributed
from tests.integration.layouts import (
    EXPERT_LAYOUTS,
    GRADIENT_LIMIT,
    LAYOUTS,
    LOSS_LIMIT,
    RESULTS,
    Difference,
    Layout,
    measure_all,
    rows,
)
from tests.integration.learner_reference import BOUNDS, MIXTURE, random_batch, save_random_model


def is_within_limits(d: Difference) -> bool:
    return d.loss <= LOSS_LIMIT and d.gradient <= GRADIENT_LIMIT and d.norm <= GRADIENT_LIMIT and d.same_bounds


@pytest.mark.slow
def test_every_layout_equals_one_process(tmp_path: Path) -> None:
    dense, with_experts = measure_all(tmp_path)
    print(table(rows(dense, LAYOUTS)), table(rows(with_experts, EXPERT_LAYOUTS)), sep="\n")
    far = [
        (title, d) for title, d in (*dense.items(), *with_experts.items()) if not all(map(is_within_limits, d.values()))
    ]
    assert not far


def test_the_result_file_has_these_layouts_within_their_limits() -> None:
    """Its figures are rounding errors of one machine; the rows, and that errors are small, hold everywhere."""
    result = json.loads(RESULTS.read_text(encoding="utf-8"))
    for name, layouts in (("rows", LAYOUTS[1:]), ("rows_with_experts", EXPERT_LAYOUTS)):
        shown = result[name]
        assert [(row["layout"], row["processes"]) for row in shown] == [(x.title, x.num_processes) for x in layouts]
        assert all(is_within_limits(Difference(**d)) for row in shown for d in row["models"].values())


def test_the_page_has_a_row_for_every_layout() -> None:
    text = layouts_page()
    assert [
        layout.title
        for layout in (*LAYOUTS[1:], *EXPERT_LAYOUTS)
        if f"\n| {layout.title} | {layout.num_processes} | " not in text
    ] == []
    assert "<!--" not in text, "a mark that was not filled"
    different = Difference(loss=0.25, gradient=1e-6, norm=0.0, same_bounds=False)
    *_, row = table(rows({"TP2": {"qwen3": different}}, LAYOUTS)).splitlines()
    assert row == "| TP2 | 2 | 2.5e-01 | 1.0e-06 | 0.0e+00 | DIFFERENT |"


def check_resumed(rank: int, world_size: int, root: Path, layout: Layout, load: int | None, save: int) -> None:
    """Go from checkpoint `load`, or from the start by two updates, to checkpoint `save`; then make one more update."""
    config = layout.config()
    learner = MegatronLearner(config, root / "model")
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
