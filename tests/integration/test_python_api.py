"""Train and evaluate from Python, as a notebook does: inside a running event loop, and from a thread."""

import asyncio
from pathlib import Path

import pytest

import bapo_megatron
from bapo_megatron.errors import ConfigError, UserError
from tests.hang import PATIENT

SETTINGS = (
    "parallel.tensor=1",
    "train.num_steps=1",
    "rollout.prompts_per_step=2",
    "rollout.samples_per_prompt=2",
    "rollout.groups_in_flight=2",
    *PATIENT,
)


@pytest.mark.slow
def test_train_and_evaluate_inside_an_event_loop(tmp_path: Path) -> None:
    async def cell() -> tuple[bapo_megatron.Run, float]:
        config = bapo_megatron.load_config("demo", f"run.dir={tmp_path}", *SETTINGS)
        run = bapo_megatron.run(config)
        result = bapo_megatron.evaluate(run.path, samples=1, limit=2, output=tmp_path / "eval")
        return run, len(result.problems)

    run, num_problems = asyncio.run(cell())
    (metrics,) = run.metrics()
    assert 0 <= metrics["reward/mean"] <= 1
    assert (run.path / "report.html").is_file()
    assert num_problems == 2
    resumed = asyncio.run(
        asyncio.to_thread(bapo_megatron.run, "demo", f"run.dir={tmp_path}", *SETTINGS, "train.num_steps=2")
    )
    before, _ = resumed.metrics()
    assert before["reward/mean"] == metrics["reward/mean"]


def test_mistakes_raise_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean optimizer\.lr"):
        bapo_megatron.run("demo", "lr=3")
    with pytest.raises(ConfigError, match=r"one by one, such as .*, not a list; unpack a list with \*"):
        bapo_megatron.load_config("demo", ["lr=3"])  # type: ignore[arg-type]
    config = bapo_megatron.load_config("demo", f"run.dir={tmp_path}")
    with pytest.raises(UserError, match="one loaded configuration"):
        bapo_megatron.run(config, "train.num_steps=3")
    with pytest.raises(UserError, match="neither a Hugging Face folder"):
        bapo_megatron.evaluate(tmp_path, output=tmp_path / "eval")
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = bapo_megatron.trian
    assert not (tmp_path / "demo").exists()
