"""Warnings of FP8 and kernels: probably not what is meant. What cannot be done, learner/precision.py refuses."""

from collections.abc import Iterator

from bapo_megatron.config.base import Violation, warning
from bapo_megatron.config.engines import engine_kind, num_started
from bapo_megatron.config.schema import Config


def precision_warnings(config: Config, num_gpus: int) -> Iterator[Violation]:
    """Warn of FP8 settings, and of a backend of log-probs.

    Args:
        num_gpus: that a run may use.
    """
    p, r = config.precision, config.rollout
    if not num_gpus and p.uses_fp8:
        yield warning(
            ("precision.fp8", "precision.recipe", "cluster.gpu"),
            f'precision.fp8="{p.fp8}" needs a GPU, and none is visible here: whether GPU, CUDA and Transformer Engine '
            f'are fit for precision.recipe="{p.recipe}" is checked where the run starts',
        )
    if p.uses_fp8 and num_started(r) and not engine_kind(r.engine).on_gpus:
        yield warning(
            ("rollout.engine", "precision.fp8"),
            f'precision.fp8="{p.fp8}" with rollout.engine="{r.engine}": that engine samples on a CPU, from bfloat16 '
            "weights",
            'set rollout.engine="sglang"',
        )
    if p.uses_fp8 and p.recipe == "delayed":
        yield warning(
            ("precision.recipe", "precision.fp8"),
            'precision.recipe="delayed" learns its scales from training passes, from 1 on, and checkpoints lack them: '
            "log-probs before the first update of each start are coarse",
            'set precision.recipe="tensorwise"',
        )
    if not num_gpus and config.train.logprob_backend == "triton":
        yield warning(
            ("train.logprob_backend", "cluster.gpu"),
            'train.logprob_backend="triton" needs a GPU, and none is visible here',
            'set it to "auto"',
        )
