"""`BAPOTrainer` in an environment that holds TRL from the package index: real training on 1 and 2 ranks."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.environments import ROOT, Environment, make_environment

RUN = str(ROOT / "tests" / "plugins" / "trl_run.py")
PAGE = ROOT / "docs" / "plugins.md"


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    linked = ["torch", "transformers", "pyarrow", "jinja2", "xxhash", "dill", "psutil", "pydantic"]
    folder = tmp_path_factory.mktemp("trl") / "env"
    return make_environment(folder, wheel, linked=linked, packages=["trl==1.16.0"])


def check_cases(result: dict[str, Any], num_ranks: int, num_updates: int = 5) -> int:
    """Return the number of micro-batches, all of which were equal."""
    for case in result["cases"]:
        _, accumulation, _ = case["case"]
        assert case["num_micro_batches"] == num_ranks * accumulation * num_updates, case
        assert case["num_equal_bounds"] == num_updates, case
        assert case["num_bounds"] > 1, case
        assert case["logged"], case
        assert case["all_reduces"] == num_updates, "one per update"
        assert case["loss_error"] < 1e-6, case
        assert case["gradient_error"] < 1e-6, case
    return sum(case["num_micro_batches"] for case in result["cases"])


@pytest.mark.slow
def test_the_environment_has_nothing_of_the_framework(environment: Environment, tmp_path: Path) -> None:
    assert "trl-1.16.0" in environment.log
    assert "megatron" not in environment.log.replace("bapo_megatron", "").replace("bapo-megatron", "")
    assert not environment.distributions(tmp_path) & {"megatron-core", "sglang", "aiohttp", "matplotlib", "math-verify"}


@pytest.mark.slow
def test_one_rank(environment: Environment, tmp_path: Path) -> None:
    environment.run(environment.python, RUN, "out.json", cwd=tmp_path)
    result = json.loads((tmp_path / "out.json").read_text())
    assert check_cases(result, num_ranks=1) == 40
    assert result["resumes"]
    parts = (
        "loss_type='cispo' does not fit, choose from 'dapo', 'dr_grpo', 'grpo', 'bnpo'; importance_sampling_level=",
        "every ratio is 1 and no bound acts; set steps_per_generation (now 1)",
        'scope="exact" needs gradient_accumulation_steps to divide steps_per_generation x num_iterations',
        "top_entropy_quantile=0.2 does not fit, choose from 1.0",
        'scope="microbatch" is not possible here, choose from exact, lagged, smoothed, fixed',
    )
    for said, part in zip(result["refusals"], parts, strict=True):
        assert said.startswith("BAPO in TRL 1.16.0: ")
        assert part in said
        assert ". What works, tried with TRL 1.16: GRPOConfig with loss_type dapo" in said


@pytest.mark.slow
def test_two_ranks(environment: Environment, tmp_path: Path) -> None:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    environment.run(environment.python, *launch, RUN, "out.json", cwd=tmp_path)
    assert check_cases(json.loads((tmp_path / "out.json").read_text()), num_ranks=2) == 60


@pytest.mark.slow
def test_the_lines_of_the_page_train_ten_steps(environment: Environment, tmp_path: Path) -> None:
    (lines,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    printed = environment.run(environment.python, "-c", lines, cwd=tmp_path)
    assert printed.count("'bapo/high'") == 10
