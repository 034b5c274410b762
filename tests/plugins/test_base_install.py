"""`pip install bapo-megatron` brings torch, pydantic, numpy, algorithms and plugins; the framework is an extra."""

from pathlib import Path

import pytest

from tests.plugins.environments import make_environment

PROBE = """
import sys, torch, pydantic
before = {name.partition(".")[0] for name in sys.modules} | set(sys.stdlib_module_names)
import bapo_megatron, bapo_megatron.plugins.host, bapo_megatron.plugins.slime, bapo_megatron.plugins.miles
from bapo_megatron.algorithms.bound_search import BoundSearch
from bapo_megatron.config.schema_loss import ClipBoundConfig
print(BoundSearch(ClipBoundConfig(), lambda table: table).bounds.high)
ours = {name.partition(".")[0] for name in sys.modules} - before
print(*sorted(name for name in ours if not name.startswith("_sysconfigdata")))
for host in ("trl", "verl"):
    try:
        __import__(f"bapo_megatron.plugins.{host}")
    except ModuleNotFoundError as error:
        print(error.name)
"""


@pytest.mark.slow
def test_the_base_installation_holds_torch_pydantic_and_numpy_only(wheel: Path, tmp_path: Path) -> None:
    environment = make_environment(tmp_path / "env", wheel, linked=["torch", "pydantic", "numpy"])
    assert "megatron-core" not in environment.log
    have = environment.distributions(tmp_path)
    assert {"torch", "pydantic", "numpy", "bapo-megatron"} <= have
    assert not have & {"megatron-core", "transformers", "aiohttp", "matplotlib", "rich", "trl", "verl"}

    high, ours, *missing = environment.run(environment.python, "-c", PROBE, cwd=tmp_path).splitlines()
    assert high == "1.2"
    assert set(ours.split()) <= {"annotated_types", "bapo_megatron", "pydantic", "typing_inspection"}
    assert missing == ["transformers", "verl"]

    assert environment.run("bapo", "--version", cwd=tmp_path).startswith("bapo-megatron ")
    for arguments in (["demo"], ["check", "demo"], ["train", "demo", "train.num_steps=1"]):
        done = environment.attempt("bapo", *arguments, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert line.startswith("bapo: the framework needs ")
        assert line.endswith("which is not installed; run pip install 'bapo-megatron[train]'")
