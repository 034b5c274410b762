"""Megatron's wrappers around a model that is trained: gradient buffers and Adam."""

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch.nn import Module, ModuleList

from bapo_megatron.config.schema import OptimizerConfig


def for_training(
    model: ModuleList, settings: TransformerConfig, optimizer: OptimizerConfig
) -> tuple[list[DistributedDataParallel], MegatronOptimizer]:
    """Wrap the model's chunks for Megatron's schedules and make their optimizer. Collective.

    `Schedule` sums the gradients over ranks after the last backward pass.
    """
    wrapped = [_wrap(chunk, settings, optimizer) for chunk in model]
    made = get_megatron_optimizer(
        _optimizer_config(settings, optimizer), wrapped, use_gloo_process_groups=torch.cuda.is_available()
    )
    return wrapped, made


def _wrap(chunk: Module, settings: TransformerConfig, optimizer: OptimizerConfig) -> DistributedDataParallel:
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        check_for_nan_in_grad=False,
        use_distributed_optimizer=optimizer.distributed,
        fp8_param_gather=settings.fp8_param,
    )
    return DistributedDataParallel(settings, ddp, Float16Module(settings, chunk) if settings.bf16 else chunk)


def _optimizer_config(settings: TransformerConfig, adam: OptimizerConfig) -> MegatronOptimizerConfig:
    return MegatronOptimizerConfig(
        optimizer="adam",
        lr=adam.lr,
        weight_decay=adam.weight_decay,
        adam_beta1=adam.beta1,
        adam_beta2=adam.beta2,
        adam_eps=adam.eps,
        clip_grad=adam.clip_grad,
        bf16=settings.bf16,
        params_dtype=settings.params_dtype,
        use_distributed_optimizer=adam.distributed,
        fp8_recipe=settings.fp8_recipe if settings.fp8 else None,
    )
