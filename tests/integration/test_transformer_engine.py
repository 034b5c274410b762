"""The learner on Transformer Engine's own Python code, on CPUs: plain torch computes what its kernels would.

The code comes from its wheel, of the version in requirements/gpu.txt, when the tests first run. te_stand_ins.py has the
kernels' stand-ins, te_checks.py the checks. Each test prints how near the layers are to local ones.
"""

import contextlib
import importlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from tests.distributed import HANG_S, run_distributed
from tests.integration import te_stand_ins

REQUIREMENTS = Path(__file__).parents[2] / "requirements" / "gpu.txt"
FAMILIES = ("qwen3", "qwen2", "llama_biases", "gemma", "granite", "olmo2", "smollm3")


@pytest.fixture(scope="session")
def engine(pytestconfig: pytest.Config) -> Path:
    """Return a folder with Transformer Engine's Python code; without a network, skip, or fail in CI."""
    match = re.search(r"^(transformer-engine)==(\S+)", REQUIREMENTS.read_text(), re.MULTILINE)
    assert match is not None
    kept = pytestconfig.cache.mkdir(match[1])  # type: ignore[union-attr]
    folder = kept / match[2]
    if folder.exists():
        return folder
    with tempfile.TemporaryDirectory(dir=kept) as made:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", made, match[0]]
        result = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
        if result.returncode and "CI" not in os.environ:
            pytest.skip(f"{match[0]} cannot be downloaded: {result.stderr.strip().splitlines()[-1]}")
        assert result.returncode == 0, result.stderr
        (wheel,) = Path(made).glob("*.whl")
        te_stand_ins.unpack(wheel, Path(made, "code"))
        with contextlib.suppress(OSError):  # another worker was faster
            Path(made, "code").rename(folder)
    assert folder.exists()
    return folder


def run_check(rank: int, world_size: int, engine: Path, name: str, root: Path) -> None:
    """Run a check of te_checks.py, which imports Megatron, in a process that has Transformer Engine."""
    te_stand_ins.install(engine)
    getattr(importlib.import_module("tests.integration.te_checks"), name)(rank, world_size, root)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    from tests.integration.learner_reference import (
        ADAPTERS,
        HYBRID,
        HYBRID_MIXTURE,
        MIXTURE,
        save_adapters,
        save_random_model,
    )

    for family in (*FAMILIES, MIXTURE, HYBRID, HYBRID_MIXTURE):
        save_random_model(family, tmp_path / family)
    for family in FAMILIES:
        save_adapters(tmp_path / family, ADAPTERS, tmp_path / f"{family}-adapters")
    return tmp_path


def test_one_process(engine: Path, root: Path) -> None:
    run_distributed(run_check, 1, engine, "check_one_process", root, spawned=True)


@pytest.mark.slow
def test_layers_that_norm_scale_or_rotate_otherwise(engine: Path, root: Path) -> None:
    run_distributed(run_check, 1, engine, "check_other_layers", root, spawned=True)


@pytest.mark.slow
def test_two_processes(engine: Path, root: Path) -> None:
    run_distributed(run_check, 2, engine, "check_two_processes", root, spawned=True)


def test_what_context_parallelism_asks_of_a_pack() -> None:
    """Padded lengths are given if the pack is split, as TransformerEngine's context_parallel.py asserts."""
    from bapo_megatron.learner import packs

    class Group:
        def size(self) -> int:
            return 2

    cu_seqlens_S1 = torch.tensor([0, 8, 20], dtype=torch.int32)
    for group in (None, Group()):
        pack = packs.PackedSequences.for_transformer_engine(cu_seqlens_S1, group)  # type: ignore[arg-type]
        thd = pack.thd()
        assert (pack.qkv_format, thd.qkv_format, thd.max_seqlen_q) == ("sbhd", "thd", 12)
        assert (thd.cu_seqlens_q_padded is cu_seqlens_S1) == (group is not None)
        assert thd.cp_group is None
