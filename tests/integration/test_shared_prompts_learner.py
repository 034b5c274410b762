"""Packs that hold prompts once, in the learner: updates equal transformers' in float64, at any layout and split."""

from dataclasses import replace
from pathlib import Path

import pytest

from bapo_megatron.buffer.packing import Share, one_minibatch
from tests.integration.layouts import EXPERT_LAYOUTS, LAYOUTS, Table, measure_all
from tests.integration.learner_reference import MIXTURE, forest_batch
from tests.integration.test_layouts import is_within_limits

TITLES = (
    "one process",
    "one process, other micro-batches",
    "TP2 + SP",
    "PP2 x VPP2",
    "DP2, distributed optimizer",
    "EP2, forwards first",
)
"""Layouts for every run of the tests. All layouts without context parallelism passed once: 13, and 17 with experts."""


@pytest.mark.slow
def test_prompts_that_are_computed_once_change_no_update(tmp_path: Path) -> None:
    share = Share(shares_prompts=True)
    for max_tokens in (40, 90):
        assert one_minibatch(forest_batch(), max_tokens=max_tokens, share=share).counts.saved > 0
    dense, experts = (
        [replace(one, share_prompts=True) for one in layouts if one.title in TITLES]
        for layouts in (LAYOUTS, EXPERT_LAYOUTS)
    )
    tables = (
        Table("dense", dense, {"qwen3": 0.38}, with_prompts=True),
        Table("experts", experts, {MIXTURE: 0.35}, with_prompts=True),
    )
    for differences in measure_all(tmp_path, tables).values():
        for title, by_family in differences.items():
            assert all(map(is_within_limits, by_family.values())), (title, by_family)
