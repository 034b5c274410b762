"""Simulations of settings that others have published, next to their figures.

    python -m benchmarks.anchors

1. Megatron-RL's two laws (NVIDIA/Megatron-LM, megatron/rl/README.md), for samples that are replaced one by one and
   trained group by group, with lag L: utilisation = 1 / tau(submitted unit) and mean age of the first token =
   tau(group) / tau(sample) x (1 + L), with tau(unit) = E[longest response of a unit] / E[response].
2. marin's table of wall-clock times by staleness allowance (marin-community/marin #8955, 2026-09-15): a mixture of
   67B parameters, 32 H100 train and 8 sample, 100 updates. The decoding speed and the time of an update are not
   published: they are fitted to the first row and the last one, so that the three rows between them are predictions.
"""

import statistics
from dataclasses import dataclass

from bapo_megatron.config.schema import RolloutConfig
from bapo_megatron.simulate.found import mean_of
from bapo_megatron.simulate.run import Simulated, simulate
from bapo_megatron.simulate.world import LogNormal, World

ENOUGH = 10**6
LAGS = (0, 1, 2, 4)
SPREAD = 0.9
GROUP, PROMPTS = 8, 16


def law(lag: int) -> tuple[float, float, float]:
    """Return the simulated age of the first token in steps, the law's, and the servers' utilisation."""
    lengths = LogNormal.with_mean(60.0, SPREAD, 400, seed=0)
    slots = (1 + lag) * PROMPTS * GROUP
    rollout = RolloutConfig(
        prompts_per_step=PROMPTS,
        samples_per_prompt=GROUP,
        max_response_tokens=400,
        groups_in_flight=(1 + lag) * PROMPTS,
        max_concurrent_requests=slots,
        overlap=True,
        max_staleness=ENOUGH,
    )
    world = World(rollout, 1, lambda num, context: 0.01, lengths, lambda num: 1e-6, 0.0, max_running=slots)
    found = simulate(world, 60, 20)
    drawn = [[lengths(f"{i}.{k}") for k in range(GROUP)] for i in range(4000)]
    tau = statistics.fmean(map(max, drawn)) / statistics.fmean(map(statistics.fmean, drawn))
    return mean_of(found.first_ages), tau * (1 + lag), 1 - found.servers_idle


@dataclass(frozen=True)
class Table:
    """One column of marin's table, in seconds for 100 updates."""

    name: str
    seconds: tuple[float, ...]  # by staleness allowance
    push_s: float  # in each update
    num_workers: int  # groups that are sampled at the same time


MARIN = (
    Table("main", (8524, 5583, 5093, 4913, 4301), 20.9, 64),
    Table("branch", (6235, 4360, 3544, 3142, 2942), 3.3, 192),
)
PARTS = 4  # a slice of a quarter
NUM_FITS = 12


def update(table: Table, allowance: int, token_s: float, train_s: float) -> Simulated:
    """Simulate updates of 128 prompts x 4 responses with at most 4,096 tokens, 1,000 on average.

    The mean and the spread come from an earlier run of theirs (#8936), of whose responses 17 % reached 2,048 tokens.
    """
    rollout = RolloutConfig(
        prompts_per_step=128 // PARTS,
        samples_per_prompt=4,
        max_response_tokens=4096,
        groups_in_flight=table.num_workers // PARTS,
        max_concurrent_requests=ENOUGH,
        overlap=True,
        max_staleness=allowance,
        request_timeout_s=1e6,
    )
    lengths = LogNormal.with_mean(1000.0, SPREAD, 4096, seed=0)
    world = World(
        rollout,
        1,
        lambda num, context: token_s,
        lengths,
        lambda num: train_s,
        table.push_s,
        unit=32,
        max_running=ENOUGH,
    )
    return simulate(world, 20, 6)


def fitted(table: Table) -> tuple[float, float]:
    """Return the seconds of a decode step and of training with which the first and the last row come out."""
    token_s, train_s = 0.01, 15.0
    for _ in range(NUM_FITS):
        ends = [update(table, allowance, token_s, train_s).seconds / 20 for allowance in (0, 4)]
        token_s *= (table.seconds[0] / 100 - train_s - table.push_s) / (ends[0] - train_s - table.push_s)
        train_s = max(1.0, train_s * table.seconds[-1] / 100 / ends[1])
    return token_s, train_s


def main() -> None:
    """Print both tables."""
    print("lag   age of the first token: simulated   law   difference   utilisation (law: 1.00)")
    for lag in LAGS:
        age, expected, utilisation = law(lag)
        print(f"{lag:>3} {age:>35.2f} {expected:>5.2f} {age / expected - 1:>+11.0%} {utilisation:>14.2f}")
    for table in MARIN:
        token_s, train_s = fitted(table)
        print(f"marin {table.name}: fitted {1000 * token_s:.1f} ms a decode step, {train_s:.1f} s of training")
        for allowance, published in enumerate(table.seconds):
            found = update(table, allowance, token_s, train_s)
            seconds = 100 * found.seconds / len(found.steps_s)
            print(
                f"{allowance:>3} published {published:>6.0f} s, simulated {seconds:>6.0f} "
                f"{seconds / published - 1:>+5.0%}; age {mean_of(found.ages):.2f}, at most {max(found.ages)}; trainer "
                f"idle {found.trainer_idle:.0%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
