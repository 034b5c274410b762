"""A folder's config.json means to engines and learner what transformers says that it means."""

import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch

from bapo_megatron.config.schema import Config
from bapo_megatron.engines.sglang import model_overrides
from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.shape import load_hf_config, model_shape, rotary_frequencies
from bapo_megatron.resolved import resolve
from tests.distributed import in_new_process, run_distributed
from tests.model_folders import compare_in_rank, written

NUM_CASES = 50
NUM_TOKENS = 48


@pytest.mark.slow
def test_engine_and_learner_compute_what_transformers_does_or_refuse(tmp_path: Path) -> None:
    """docs/measured/models.toml has the counts of 2,000 such folders."""
    run_distributed(compare_in_rank, 1, tmp_path / "model", NUM_CASES, tmp_path / "counts")
    counts = json.loads((tmp_path / "counts").read_text())
    assert counts["equal"] > NUM_CASES / 3
    assert counts["refused alone"] < NUM_CASES / 5


def sglang_rotations(root: Path, num_cases: int) -> list[str]:
    """Return where SGLang would rotate by other angles than transformers; run in a process that ran nothing else."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    from bapo_megatron_patches.sglang import apply_cpu_compat

    apply_cpu_compat()
    from sglang.srt.layers.rotary_embedding import get_rope
    from sglang.srt.utils.hf_transformers import get_config, get_hf_text_config
    from sglang.srt.utils.hf_transformers.common import get_rope_config

    wrong, compared = [], 0
    for number in range(num_cases):
        folder = root / str(number)  # SGLang caches what it read
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(written(number)))
        try:
            shape = model_shape(load_hf_config(folder), folder)
        except CheckpointError:
            continue
        if shape.activation != "silu":
            continue  # SGLang's classes have no other
        told = json.loads(json.dumps(model_overrides(resolve(Config(), folder))))
        theirs = get_hf_text_config(get_config(str(folder), trust_remote_code=False, model_override_args=told))
        theta, scaling = get_rope_config(theirs)
        rotary = get_rope(
            shape.head_dim,
            rotary_dim=shape.head_dim,
            max_position=theirs.max_position_embeddings,
            base=theta,
            rope_scaling=scaling,
            partial_rotary_factor=getattr(theirs, "partial_rotary_factor", 1.0),
        )
        cos_sin = rotary.cos_sin_cache[:NUM_TOKENS].float()
        frequencies, factor = rotary_frequencies(shape)
        angles = torch.outer(torch.arange(len(cos_sin)).float(), frequencies)
        expected = torch.cat((angles.cos() * factor, angles.sin() * factor), -1)
        compared += 1
        if cos_sin.shape != expected.shape or not torch.allclose(cos_sin, expected, rtol=0, atol=1e-5):
            wrong.append(f"case {number}: {json.dumps(written(number))}, told {told}")
    assert compared > num_cases / 4
    return wrong


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="scripts/install_sglang_cpu.sh installs it")
def test_sglang_rotates_as_transformers_does(tmp_path: Path) -> None:
    assert in_new_process(sglang_rotations, tmp_path, 200) == []
