"""All figures of the report, in their order: the designed ones, and plain ones for the other declared panels."""

from collections import defaultdict
from dataclasses import replace

from bapo_megatron.metrics import METRICS
from bapo_megatron.report.figures import Scale, XAxis
from bapo_megatron.report.panels import Curve, Panel
from bapo_megatron.report.quantities import (
    balance,
    best_of_group,
    bin_centres,
    by_probability,
    clipped_part,
    interior,
    kl_target,
    measured_entropy_change,
    predicted_entropy_change,
    rho_target,
    saturated_not_inert,
    search_ranges,
    share_of,
    stage_time,
)

_TOKEN_CLASSES = ("positive_low", "negative_high", "positive_high", "negative_low")
_STAGES = ("rollout", "critic", "score", "train", "sync", "eval", "other")
_PROBABILITY = XAxis("probability of the token", margin=0.05, whole=False)


FIGURES = (
    Panel(
        "Learning",
        "Reward",
        "mean reward",
        (Curve("mean reward", "reward/mean", row="mean reward", smooth=True),),
        "Should rise. With rewards of 0 and 1 this is the pass rate of the sampled responses.",
    ),
    Panel(
        "Learning",
        "Evaluation",
        "mean reward",
        (
            Curve(
                "mean reward, 95 % interval",
                "eval/reward",
                row="mean reward",
                standard_error="eval/reward_stderr",
            ),
            Curve("best of a group", "eval/best_of_group", best_of_group),
        ),
        "Reward on separate prompts: the purpose of training. Differences within the intervals, which are over prompts "
        "and not over seeds, are noise.",
        needs="eval.interval_steps",
        how_to_compare="Reward on separate prompts: the purpose of training. The outcome table has a run's last value "
        "with its standard error over prompts: differences below two of these are noise.",
    ),
    Panel(
        "Learning",
        "Entropy",
        "nats per token",
        (Curve("entropy", "loss/entropy", row="nats per token"),),
        "A slow fall is learning; a fall to near zero early on means that the policy stopped exploring.",
        scale=Scale(from_zero=True),
    ),
    Panel(
        "Learning",
        "Response length",
        "tokens",
        (
            Curve("mean", "rollout/response_tokens_mean", row="mean, tokens"),
            Curve("longest", "rollout/response_tokens_max"),
            Curve("cut off (right)", "rollout/truncated_share", percent=True, row="cut off, %", on_right=True),
        ),
        "A steady rise without reward often means rambling. Cut-off responses have reached the length limit.",
        right_label="cut-off responses, %",
        scale=Scale(from_zero=True),
    ),
    Panel(
        "The update",
        "Gradient norm",
        "global norm",
        (
            Curve("mean of the step", "optimizer/grad_norm", row="global norm"),
            Curve("largest", "optimizer/grad_norm_max"),
        ),
        "Before clipping. Should stay in one range: growing spikes precede a collapse.",
        scale=Scale(from_zero=True, log_if_wide=True),
    ),
    Panel(
        "The update",
        "Clip fraction",
        "% of trained tokens",
        (
            Curve("over the upper bound", "loss/clip_high_share", percent=True, row="over upper, %"),
            Curve("under the lower bound", "loss/clip_low_share", percent=True, row="under lower, %"),
        ),
        "Positive tokens over the upper bound and negative ones under the lower bound carry no gradient. "
        "Near zero, the choice of bounds does not matter.",
        scale=Scale(from_zero=True),
    ),
    Panel(
        "The update",
        "Clipping by token class",
        "clipped, % of the class",
        tuple(
            Curve(
                name.replace("_", ", "),
                f"entropy_rule/{name}_clipped",
                clipped_part(name),
                row=f"{name.replace('_', ', ')}, %" if name.endswith("low") else "",
            )
            for name in _TOKEN_CLASSES
        ),
        "Sign of the advantage, and probability above (high) or below (low) the typical one. Improbable tokens reach a "
        "bound first; clipped positive ones are lost exploration.",
        scale=Scale(from_zero=True),
    ),
    Panel(
        "The update",
        "Ratio and entropy by probability",
        "|log ratio|, nats",
        (
            Curve("|log ratio|", "", by_probability("abs_log_ratio"), row="|log ratio|, nats"),
            Curve("entropy (right)", "", by_probability("entropy"), row="entropy, nats", on_right=True),
        ),
        "Means over the run's tokens in ten bins of their probability: how far ratios move, and how open the policy "
        "is there. Bounds act first where tokens move furthest.",
        right_label="entropy, nats",
        scale=Scale(from_zero=True),
        over=_PROBABILITY,
        places=bin_centres,
        needs="monitor.token_profile",
    ),
    Panel(
        "The update",
        "Clipping by probability",
        "clipped, % of the bin",
        (
            Curve("over the upper bound", "", by_probability("clip_high_share"), percent=True, row="over upper, %"),
            Curve("under the lower bound", "", by_probability("clip_low_share"), percent=True, row="under lower, %"),
        ),
        "Clipped part of the run's tokens in each bin. Much more over the upper bound on the left than on the right: "
        "the bound keeps rare tokens rare.",
        scale=Scale(from_zero=True),
        over=_PROBABILITY,
        places=bin_centres,
        needs="monitor.token_profile",
    ),
    Panel(
        "The update",
        "Positive tokens",
        "share",
        (
            Curve(
                "of the loss",
                "loss/positive_mass",
                share_of("loss/positive_mass", "loss/negative_mass"),
                row="of the loss",
            ),
            Curve(
                "of the tokens",
                "loss/positive_token_share",
                share_of("loss/positive_token_share", "loss/negative_token_share"),
                row="of the tokens",
            ),
        ),
        "Tokens with a positive advantage; the rest to 1 are negative ones. Far under a half, the policy mostly learns "
        "from its failures.",
        levels=balance,
    ),
    Panel(
        "The update",
        "Distance to the sampling policy",
        "KL divergence, nats",
        (
            Curve("KL divergence", "loss/approx_kl", row="KL divergence, nats"),
            Curve("largest ratio (right)", "loss/ratio_max", row="largest ratio", on_right=True),
        ),
        "Grows with reuse and age. Above 0.1 nats: fewer passes over a batch, or a lower learning rate.",
        right_label="probability ratio",
    ),
    Panel(
        "The update",
        "Distance to the reference",
        "KL divergence, nats",
        (
            Curve("KL divergence", "loss/kl_reference", row="KL divergence, nats"),
            Curve("coefficient (right)", "loss/kl_coef", row="coefficient", on_right=True),
        ),
        "A steady rise is learning, a jump is drift; with a target it settles there.",
        right_label="weight in the loss",
        levels=kl_target,
        scale=Scale(from_zero=True),
        needs="loss.kl_coef",
    ),
    Panel(
        "Balance and clipping",
        "Clip bounds",
        "probability ratio",
        (
            Curve("upper bound", "bapo/high", row="upper bound, ratio"),
            Curve("lower bound", "bapo/low", row="lower bound, ratio"),
        ),
        "Means over a step's updates, in the ranges that the search may use. Always at the bottom of both: plain fixed "
        "clipping; always at the top: the target is out of reach.",
        levels=search_ranges,
        how_to_compare="Means over a step's updates; constant without a search. Always at the bottom of both ranges: "
        "plain fixed clipping; always at the top: the target is out of reach.",
    ),
    Panel(
        "Balance and clipping",
        "Search outcome",
        "share of updates",
        (
            Curve("at the start (inert)", "bapo/inert_share"),
            Curve("inside the ranges", "", interior),
            Curve("at the limits (saturated)", "bapo/saturated_share", saturated_not_inert),
        ),
        "Only updates inside the ranges have bounds that were adapted to them; the others are fixed clipping at the "
        "start, or at the end, of the ranges.",
        stacked=True,
        needs="loss.name = bapo",
    ),
    Panel(
        "Balance and clipping",
        "Positive contribution ρ",
        "contribution ρ",
        (Curve("ρ", "bapo/positive_share", row="contribution ρ"),),
        "Contribution of positive tokens at the bounds in use, by the reading in bapo.contribution. Above the target, "
        "bounds stay at their start; below it, they are at their limits.",
        levels=rho_target,
        needs="loss.name = bapo",
    ),
    Panel(
        "Balance and clipping",
        "Entropy-Clip Rule",
        "-Cov(log π, A X), nats",
        (
            Curve("predicted", "entropy_rule/covariance", predicted_entropy_change, row="predicted, nats"),
            Curve("measured (right)", "loss/entropy", measured_entropy_change, row="measured, nats", on_right=True),
        ),
        "Means of the last 10 steps. Above zero, entropy is pushed up, below it down: the change that a step's tokens "
        "predict, to first order and up to the step size, and until the next step. Compare signs and trends.",
        right_label="change to the next step, nats",
        scale=Scale(around_zero=True),
    ),
    Panel(
        "Balance and clipping",
        "Token classes",
        "share of trained tokens",
        tuple(Curve(name.replace("_", ", "), f"entropy_rule/{name}") for name in _TOKEN_CLASSES),
        "Sign of the advantage, and probability above or below the typical one. The first two raise entropy, the other "
        "two lower it; the rest to 1 has no advantage.",
        stacked=True,
    ),
    Panel(
        "Sampling",
        "Staleness",
        "age, updates",
        (
            Curve("mean", "staleness/mean", row="mean age, updates"),
            Curve("oldest", "staleness/max", row="oldest, updates"),
        ),
        "Updates between sampling a token and training on it. Growth without end means that sampling outruns training.",
        scale=Scale(from_zero=True),
    ),
    Panel(
        "Sampling",
        "Partial rollout",
        "resumed tokens, %",
        (
            Curve("resumed tokens", "rollout/resumed_token_share", percent=True, row="resumed tokens, %"),
            Curve("set aside (right)", "ledger/partial", row="set aside", on_right=True),
        ),
        "Tokens that were sampled in a later step than their response began, and responses that wait to be resumed. "
        "A growing number: the rounds are too short.",
        right_label="unfinished responses",
        scale=Scale(from_zero=True),
    ),
    Panel(
        "Sampling",
        "Engine against trainer",
        "|Δ log-prob|, nats",
        (
            Curve("mean", "mismatch/logprob_mean", row="mean |Δ|, nats"),
            Curve("99th percentile", "mismatch/logprob_p99"),
            Curve("largest", "mismatch/logprob_max"),
        ),
        "Log-probs that the engine reported against the trainer's at the same weights. Around 1e-6 with float32; a "
        "jump points to a faulty weight update.",
        scale=Scale(log_if_wide=True),
    ),
    Panel(
        "Critic",
        "Critic",
        "explained variance",
        (
            Curve("explained variance", "critic/explained_variance", row="explained variance"),
            Curve("loss (right)", "critic/loss", row="loss", on_right=True),
        ),
        "0: the critic knows nothing yet; 1: it knows the outcome; below 0 it is worse than a constant. Should rise, "
        "then stay.",
        right_label="value loss",
        needs="advantage.kind = gae or n_step",
    ),
    Panel(
        "Speed",
        "Throughput",
        "tokens per second",
        (
            Curve("sampled", "rollout/tokens_per_s", row="sampled, tokens/s"),
            Curve("trained", "train/tokens_per_s", row="trained, tokens/s"),
        ),
        "Sampled tokens per second of the whole step, trained ones per second of scoring and training. A drop at "
        "constant response length points at the machine.",
        scale=Scale(from_zero=True),
    ),
    Panel(
        "Speed",
        "Time per step",
        "seconds",
        tuple(Curve(stage, f"time/{stage}_s", stage_time(stage)) for stage in _STAGES),
        "The thickest layer is the bottleneck.",
        stacked=True,
        how_to_compare="The longest part of a bar is the bottleneck. Other work on the machine counts, too.",
    ),
)


def _with_declared(figures: tuple[Panel, ...]) -> tuple[Panel, ...]:
    """Draw each metric that declares a panel: added to the figure of that name, or in a plain figure of its own."""
    drawn = {curve.metric for panel in figures for curve in panel.curves}
    missing: dict[str, list[str]] = defaultdict(list)
    for metric in METRICS.values():
        if metric.panel and metric.key not in drawn:
            missing[metric.panel].append(metric.key)
    panels = [
        replace(panel, curves=(*panel.curves, *_plain_curves(missing.pop(f"{panel.section} / {panel.title}", []))))
        for panel in figures
    ]
    for name, keys in missing.items():
        section, title = name.split(" / ")
        how_to_read = " ".join(f"{key}: {METRICS[key].meaning} {METRICS[key].advice}".strip() for key in keys)
        panels.append(Panel(section, title, METRICS[keys[0]].unit, _plain_curves(keys), how_to_read))
    sections = list(dict.fromkeys(panel.section for panel in panels))
    return tuple(sorted(panels, key=lambda panel: sections.index(panel.section)))


def _plain_curves(keys: list[str]) -> tuple[Curve, ...]:
    return tuple(Curve(key, key, row=key) for key in keys)


PANELS = _with_declared(FIGURES)
