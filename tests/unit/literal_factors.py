"""The factor f of each policy gradient -f A log pi, token by token in plain floats, from the formulas of its source."""

import math
from collections.abc import Callable, Sequence
from typing import Any

Floats = Sequence[float]


def reinforce(config: Any, advantage: float, new: Floats, old: Floats) -> list[float]:
    return [1.0] * len(new)


def vespo(config: Any, advantage: float, new: Floats, old: Floats) -> list[float]:
    """Follow `get_gamma_weights` of TRL 1.9's grpo_trainer.py."""
    total = sum(min(max(math.log(p / q), -20.0), 20.0) for p, q in zip(new, old, strict=True))
    w = min(max(math.exp(total), 1e-8), math.exp(20.0))
    k, rate = config.k_positive, config.lambda_positive
    if advantage < 0:
        k, rate = config.k_negative, config.lambda_negative
    return [math.exp(rate) * w**k * math.exp(-rate * w)] * len(new)


def ipo(config: Any, advantage: float, new: Floats, old: Floats) -> list[float]:
    """Follow `IPOLoss` of prime-rl's trainer/rl/loss.py, September 2026."""
    pairs = zip(new, old, strict=True)
    return [0.0 if abs(p - q) > config.max_change else min(p / q, config.max_ratio) for p, q in pairs]


def dppo_tv(config: Any, advantage: float, new: Floats, old: Floats) -> list[float]:
    """Follow `compute_policy_loss_dppo_tv` of verl's core_algos.py."""
    factors = []
    for p, q in zip(new, old, strict=True):
        is_valid = p - q <= config.max_rise if advantage > 0 else p - q >= -config.max_fall
        factors.append(min(p / q, config.max_ratio) * is_valid)
    return factors


def dppo_kl(config: Any, advantage: float, new: Floats, old: Floats) -> list[float]:
    """Follow `compute_policy_loss_dppo_kl` of verl's core_algos.py."""
    factors = []
    for p, q in zip(new, old, strict=True):
        kl = q * (math.log(q) - math.log(p)) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
        is_valid = kl <= config.max_rise or p <= q if advantage > 0 else kl <= config.max_fall or p >= q
        factors.append(min(p / q, config.max_ratio) * is_valid)
    return factors


def bernoulli_kl(p: float, q: float) -> float:
    p, q = (min(max(x, 1e-6), 1 - 1e-6) for x in (p, q))
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def kpop(config: Any, advantage: float, new: Floats, old: Floats) -> list[float]:
    """Follow `kpop_loss_fn` of prime-rl #3283."""
    pairs = zip(new, old, strict=True)
    return [p / q if max(bernoulli_kl(p, q), bernoulli_kl(q, p)) <= config.max_kl else 0.0 for p, q in pairs]


def sao(config: Any, advantage: float, new: Floats, old: Floats) -> list[float]:
    """Follow Eq. 3 of arXiv 2607.07508."""
    return [p / q if config.clip_low < p / q < config.clip_high else 0.0 for p, q in zip(new, old, strict=True)]


def flash_reinforce(config: Any, advantage: float, new: Floats, old: Floats) -> list[float]:
    """Follow `PolicyLoss` of OpenRLHF's loss.py, level seq, gating binary_kl, mode mask (#1339)."""
    mean = sum(bernoulli_kl(q, p) for p, q in zip(new, old, strict=True)) / len(new)
    return [p / q if mean <= config.max_mean_kl else 0.0 for p, q in zip(new, old, strict=True)]


def topr(config: Any, advantage: float, new: Floats, old: Floats) -> list[float]:
    """Follow the gradient of arXiv 2503.14286, verl #6986 for the geometric mean, and `TOPRPolicyLossFn` of Trinity-RFT
    for tokens."""
    ratios = [p / q for p, q in zip(new, old, strict=True)]
    if config.taper_level != "token":
        power = 1 / len(new) if config.taper_level == "geometric" else 1.0
        ratios = [math.prod(ratios) ** power] * len(new)
    return [1.0 if advantage > 0 else min(ratio, 1.0) for ratio in ratios]


def dro(config: Any, advantage: float, new: Floats, old: Floats) -> list[float]:
    """Follow `compute_policy_loss_dro` of verl 0.9.1's core_algos.py; `penalty_of` has its penalty."""
    return [1.0] * len(new)


Factors = Callable[[Any, float, Floats, Floats], list[float]]
FACTORS: dict[str, Factors] = {
    factors.__name__: factors
    for factors in (reinforce, vespo, ipo, dppo_tv, dppo_kl, kpop, sao, flash_reinforce, topr, dro)
}


def penalty_of(config: Any) -> float:
    """Return the weight of (log r)^2 in a token's loss."""
    return float(config.beta / 2 if config.name == "dro" else getattr(config, "kl_tau", 0.0))
