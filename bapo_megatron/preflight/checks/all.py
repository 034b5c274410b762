"""All checks of settings against each other and the model. Each message has numbers and a working alternative."""

from collections.abc import Collection

from bapo_megatron.config.base import Violation
from bapo_megatron.hf.facts import ModelFacts
from bapo_megatron.learner.fit import check_critic_model, check_frozen, check_top_k
from bapo_megatron.learner.precision import Machine, check_precision
from bapo_megatron.preflight.checks.data import check_data
from bapo_megatron.preflight.checks.environment import check_environment
from bapo_megatron.preflight.checks.eval import check_eval
from bapo_megatron.preflight.checks.idle import idle_settings
from bapo_megatron.preflight.checks.layout import check_batch, check_gpu_count, check_layout, check_sync
from bapo_megatron.preflight.checks.learning import (
    check_advantage,
    check_centering,
    check_critic,
    check_kl,
    check_loss,
    check_positions,
    check_schedule,
    check_share,
    check_teacher,
    check_units,
)
from bapo_megatron.preflight.checks.model import check_dtype, check_policy, check_sharing_too, precision_warnings
from bapo_megatron.preflight.checks.monitor import check_monitor
from bapo_megatron.preflight.checks.placement import check_sharing
from bapo_megatron.preflight.checks.reward import check_reward
from bapo_megatron.preflight.checks.rollout import check_cut, check_rollout, check_servers, check_shared_cores
from bapo_megatron.resolved import Resolved


def check_settings(
    run: Resolved,
    *,
    reference: ModelFacts | None = None,
    critic: ModelFacts | None = None,
    num_gpus: int = 0,
    starts_here: bool = False,
    machine: Machine | None = None,
    given: Collection[str] | None = None,
) -> list[Violation]:
    """Find all violations across sections, layout first.

    Args:
        run: without its model, the model's own limits are not checked.
        reference: the model of `loss.reference_path`, if the KL term has one.
        critic: the model of `critic.path`, if there is a critic with weights of its own.
        num_gpus: GPUs of this machine that a run may use; 0 means a run on CPUs.
        starts_here: whether the run starts on this machine, which must then have the GPUs that the run needs.
        machine: its facts for FP8 and linear attention; None leaves them unchecked.
        given: settings to warn of if they have no effect; None means all.
    """
    config, model = run.config, run.model
    shape = None if model is None or model.problems else model.shape
    found = [
        *check_layout(config),
        *check_gpu_count(run, num_gpus, starts_here=starts_here),
        *check_sharing(run, has_gpu=num_gpus > 0 or not starts_here),
        *check_batch(config),
        *check_rollout(config),
        *check_shared_cores(run, num_gpus),
        *check_servers(run),
        *check_cut(run),
        *check_data(config),
        *check_reward(config),
        *check_environment(config, None if model is None else model.hf_config),
        *check_eval(run),
        *check_loss(config),
        *check_share(config),
        *check_units(config, given),
        *check_kl(config),
        *check_schedule(config, given),
        *check_advantage(config),
        *check_critic(config),
        *check_centering(config, None if model is None or model.problems else model.shape.vocab_size),
        *check_teacher(config),
        *check_sync(config),
        *check_monitor(config),
        *idle_settings(run, given),
        *check_precision(config, shape=shape, machine=machine),
        *precision_warnings(run, num_gpus),
    ]
    if model is not None:
        found += check_policy(run)
        frozen = [
            ("loss.reference_path", config.loss.reference_path, reference),
            *((setting, path, run.teachers.get(path)) for setting, path in config.teacher.paths.items()),
        ]
        for setting, path, scorer in (*frozen, ("critic.path", config.critic.path, critic)):
            if scorer is not None and path is not None:
                found += check_positions(config, setting, path, scorer)
        for setting, path, scorer in frozen:
            if scorer is not None:
                found += check_frozen(config, setting, path, scorer, model, machine)
                if shape is not None and not scorer.problems and run.shares_prompts:
                    found += check_sharing_too(setting, path, scorer.shape)
        if shape is not None:
            found += check_top_k(config.teacher.top_k, config.parallel.tensor, shape)
        if critic is not None:
            found += check_critic_model(config, critic, model)
    return [*found, *check_dtype(config, num_gpus, starts_here=starts_here)]
