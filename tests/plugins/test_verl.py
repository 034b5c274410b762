"""Our loss in an environment that holds verl from the package index, on 1 and 2 ranks; and verl's own functions."""

import json
from pathlib import Path

import pytest

from tests.plugins import same_as_verl
from tests.plugins.environments import ROOT, Environment, make_environment

RUN = str(ROOT / "tests" / "plugins" / "verl_run.py")
FUNCTIONS_RUN = str(ROOT / "tests" / "plugins" / "verl_functions_run.py")
RECORDED = ROOT / "tests" / "plugins" / "recorded" / "verl.json"
BARE = [  # verl asks for an older transformers, and for packages that a loss does not import
    "verl==0.9.1",
    "tensordict==0.10.0",
    "torchdata",
    "importlib_metadata",
    "zipp",
    "pyvers",
    "ray==2.60.0",
    "msgpack",
    "protobuf",
    "hydra-core==1.3.8",
    "omegaconf==2.4.0",
    "antlr4-python3-runtime==4.9.3",
    "codetiming",
    "accelerate",
    "datasets",
    "multiprocess",
    "pandas",
    "python-dateutil",
    "six",
]
LINKED = ["torch", "transformers", "pyarrow", "xxhash", "dill", "psutil", "pydantic", "orjson", "cloudpickle"]
LINKED += ["pillow", "requests", "jsonschema"]


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return make_environment(tmp_path_factory.mktemp("verl") / "env", wheel, linked=LINKED, bare=BARE)


@pytest.mark.slow
def test_one_rank(environment: Environment, tmp_path: Path) -> None:
    assert "megatron" not in environment.log.replace("bapo_megatron", "").replace("bapo-megatron", "")
    environment.run(environment.python, RUN, "out.json", "300", cwd=tmp_path)
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["version"] == "0.9.1"
    assert result["is_found"], "verl loads the plugin through its entry point"
    assert result["microbatch"]["equal"] == 300
    assert result["microbatch"]["bounds"] > 10
    for scope in ("lagged", "smoothed"):
        assert result[scope]["equal"] == 20
        assert result[scope]["bounds"] > 1
    assert result["ppo_loss"]
    parts = (
        'scope="exact" is not possible here, choose from lagged, smoothed, microbatch, fixed',
        "rho_0: Extra inputs are not permitted",
        "every ratio is 1 and no bound acts; set ppo_mini_batch_size (now 256) below data.train_batch_size (256)",
        "trained tokens, which the engine did not score",
    )
    for said, part in zip(result["refusals"], parts, strict=True):
        assert said.startswith("BAPO in verl 0.9.1: ")
        assert part in said
        assert ". What works, tried with verl 0.9.1: loss_agg_mode token-mean" in said


@pytest.mark.slow
def test_two_ranks(environment: Environment, tmp_path: Path) -> None:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    environment.run(environment.python, *launch, RUN, "out.json", "60", cwd=tmp_path)
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["microbatch"]["equal"] == 60
    assert result["microbatch"]["all_reduces"] == 60, "one per micro-batch"
    assert all(result[scope]["equal"] == 20 for scope in ("lagged", "smoothed"))


@pytest.mark.slow
def test_its_losses_and_advantages_are_ours(environment: Environment, tmp_path: Path) -> None:
    environment.run(environment.python, FUNCTIONS_RUN, "out.json", "400", cwd=tmp_path)
    same_as_verl.check(json.loads((tmp_path / "out.json").read_text()))


def test_its_recorded_losses_and_advantages_are_ours() -> None:
    same_as_verl.check(json.loads(RECORDED.read_text()))
