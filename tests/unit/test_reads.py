"""The settings that a computation reads are noted, whichever way it reads them, and its values stay the same."""

from collections.abc import Callable
from typing import Any

import pytest

from bapo_megatron.assets import demo_model_path
from bapo_megatron.config.load import load_config
from bapo_megatron.hf.shape import load_hf_config
from bapo_megatron.preflight import plan
from bapo_megatron.preflight.checks.layout import RANKS
from bapo_megatron.preflight.reads import reads
from bapo_megatron.resolved import Resolved, resolve

ON_A_GPU = ("demo", "model.dtype=bfloat16", "rollout.engine=sglang", "cluster.gpu=h100", "cluster.gpus_per_node=8")


def planned(*overrides: str) -> Resolved:
    return resolve(load_config(ON_A_GPU[:1], [*ON_A_GPU[1:], *overrides]), load_hf_config(demo_model_path()))


@pytest.mark.parametrize(
    ("compute", "settings"),
    [
        (lambda run: run.config, ""),
        (lambda run: run.config.train, ""),
        (lambda run: run.config.train.num_steps, "train.num_steps"),
        (lambda run: run.config.parallel.size, " ".join(sorted(RANKS))),
        (lambda run: run.config.parallel.stage_sizes(8), "parallel.last_stage_layers parallel.pipeline"),
        (lambda run: run.config.bapo.high.points, "bapo.high.start bapo.high.step bapo.high.stop"),
        (lambda run: [one.name for one in run.config.eval.sets], "eval.sets"),
        (lambda run: run.config.sglang.extra.get("port"), "sglang.extra"),
        (lambda run: run.config.loss.clips, "loss.name"),
        (lambda run: run.engine.on_gpus, "rollout.engine"),
        (lambda run: run.shape, "lora.rank model.family model.path"),
        (lambda run: run.changed(run.config).config.run.seed, "run.seed"),
    ],
)
def test_a_read_is_noted(compute: Callable[[Resolved], Any], settings: str) -> None:
    run = planned('eval.sets=[{name="held"}]')
    assert reads(run, compute) == tuple(settings.split())


def test_a_changed_copy_notes_too() -> None:
    def compute(run: Resolved) -> int:
        train = run.config.train.model_copy(update={"num_steps": 3})
        return run.changed(run.config.model_copy(update={"train": train})).config.train.num_steps

    assert reads(planned(), compute) == ("train.num_steps",)


def test_the_remedy_comes_first_and_once() -> None:
    read = reads(planned(), lambda run: run.config.parallel.size, first=("run.dir", "parallel.data"))
    assert read == ("run.dir", "parallel.data", "parallel.context", "parallel.pipeline", "parallel.tensor")


def test_noting_changes_neither_the_values_nor_the_run() -> None:
    run, noted = planned(), []
    before = run.config.model_dump_json()
    reads(run, lambda run: noted.append(plan.make_plan(run)))
    assert noted == [plan.make_plan(run)]
    assert run.config.model_dump_json() == before
    assert "Noting" not in {type(run).__name__, type(run.config).__name__, type(run.config.train).__name__}


def test_a_violation_names_a_setting_as_soon_as_its_computation_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    run, fullest_rank = planned("cluster.gpu_memory_gib=1"), plan.fullest_rank

    def reading_more(run: Resolved, gpu_bytes: int) -> Any:
        assert run.config.monitor.samples_per_step >= 0
        return fullest_rank(run, gpu_bytes)

    (before,) = (v for v in plan.check_memory(run) if "trainer" in v.problem)
    monkeypatch.setattr(plan, "fullest_rank", reading_more)
    (after,) = (v for v in plan.check_memory(run) if "trainer" in v.problem)
    assert {*after.settings} - {*before.settings} == {"monitor.samples_per_step"}
    assert before.settings[: len(RANKS)] == after.settings[: len(RANKS)] == RANKS
