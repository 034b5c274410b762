"""The staleness bound, kept by admission: no group begins that could not be trained in time, so none is dropped.

A step trains `groups_per_step` groups with `updates_per_step` optimizer updates, so the last update of a step that
begins at weight version V trains a token of version v at age V + updates_per_step - 1 - v. The bound is on that age.

A group's *slack* is the number of later steps that could still train it: 0 means now or never, below 0 is too late. The
groups that are not trained yet can all be trained in time if, for every h, at most (h + 1) x groups_per_step of them
have a slack of h or less: the condition of earliest-deadline-first scheduling with equal jobs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bapo_megatron.types import Group


@dataclass(frozen=True, slots=True)
class StalenessBound:
    """A bound on the age of trained tokens.

    Example: with max_age = 3 and 2 updates a step, a token is trained in the step that sampled it (age 0, then 1) or
    in the next one (age 2, then 3): its slack is 1 at first.
    """

    max_age: int | None  # optimizer updates; None: no bound
    updates_per_step: int
    groups_per_step: int

    def slack(self, oldest_version: int, version: int) -> float:
        """Return how many later steps could train a token of `oldest_version` if the next step begins at `version`."""
        if self.max_age is None:
            return float("inf")
        return (self.max_age + 1 - self.updates_per_step - (version - oldest_version)) // self.updates_per_step

    def capacity(self, version: int, next_version: int) -> float:
        """Return the limit of untrained groups when one begins with weights of `version`.

        `next_version` is the learner's version when the next batch is taken: the same before a step's batch is taken,
        `updates_per_step` more while the step trains and sampling goes on.
        """
        return self.groups_per_step * (self.slack(version, next_version) + 1)

    def choose(self, finished: Sequence[Group], active: Sequence[float], version: int) -> list[Group] | None:
        """Return the groups to train now, stalest first; None if the step has to wait for others to finish.

        It waits for unfinished groups, here the slacks of these, only if training now would make one of them too old.
        """
        if len(finished) < self.groups_per_step:
            return None
        by_slack = sorted(finished, key=lambda group: self.slack_of(group, version))
        chosen, others = by_slack[: self.groups_per_step], by_slack[self.groups_per_step :]
        slacks = sorted(s for s in (*(self.slack_of(g, version) for g in others), *active) if s >= 0)
        # The i-th most urgent of those left is trained i // groups_per_step steps after the next one, at best.
        in_time = all(slack >= 1 + i // self.groups_per_step for i, slack in enumerate(slacks))
        least_urgent = self.slack_of(chosen[-1], version)
        waiting_helps = any(0 <= slack < least_urgent for slack in active)
        return chosen if in_time or not waiting_helps else None

    def is_stale(self, group: Group, version: int) -> bool:
        """Return whether the group can no longer be trained within the bound."""
        return self.slack_of(group, version) < 0

    def slack_of(self, group: Group, version: int) -> float:
        """Return the slack of the group's oldest token, or of a token sampled now if it has none."""
        versions = [v for s in group.samples if (v := s.oldest_version) is not None]
        return self.slack(min(versions, default=version), version)
