"""The staleness bound, kept by admission: no group begins that could not be trained in time, so none is dropped.

A step trains `groups_per_step` groups with `updates_per_step` optimizer updates, so the last update of a step that
begins at weight version V trains a token of version v at age V + updates_per_step - 1 - v. The bound is on that age.

A group's *slack* is the number of later steps that could still train it: 0 means now or never, below 0 is too late.
All untrained groups can be trained in time if, for every h, at most (h + 1) x groups_per_step of them have a slack of h
or less: the condition of earliest-deadline-first scheduling with equal jobs.

All questions are answered from the groups' versions, and few of them are looked at one by one: the cost does not
grow with the number of groups.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import merge

Cohort = dict[int, int]
"""Groups whose oldest tokens have the same version: their prompt ids, and their places in the order of arrival."""


class Ages:
    """Groups (as prompt ids) by the version of their oldest token, or None if they have no tokens."""

    def __init__(self) -> None:
        self.cohorts: dict[int | None, Cohort] = {}  # by version; none is empty
        self._versions: dict[int, int | None] = {}  # by prompt id
        self._num_put = 0

    def __len__(self) -> int:
        return len(self._versions)

    def __getitem__(self, prompt_id: int) -> int | None:
        return self._versions[prompt_id]

    def put(self, prompt_id: int, version: int | None) -> None:
        """Add a group, or record that its oldest token now has another version."""
        if prompt_id in self._versions:
            if self._versions[prompt_id] == version:
                return
            self.remove(prompt_id)
        self._versions[prompt_id] = version
        self.cohorts.setdefault(version, {})[prompt_id] = self._num_put
        self._num_put += 1

    def remove(self, prompt_id: int) -> None:
        """Forget a group."""
        version = self._versions.pop(prompt_id)
        del self.cohorts[version][prompt_id]
        if not self.cohorts[version]:
            del self.cohorts[version]


@dataclass(frozen=True, slots=True)
class StalenessBound:
    """A bound on the age of trained tokens.

    Example: with max_age = 3 and 2 updates per step, a token is trained in the step that sampled it (age 0, then 1) or
    in the next one (age 2, then 3): its initial slack is 1.
    """

    max_age: int | None  # optimizer updates; None means no bound
    updates_per_step: int
    groups_per_step: int

    def slack(self, oldest_version: int | None, version: int) -> float:
        """Return how many later steps could train a token of `oldest_version` if the next step begins at `version`.

        None means a token sampled now.
        """
        if self.max_age is None:
            return float("inf")
        age = version - _known(oldest_version, version)
        return (self.max_age + 1 - self.updates_per_step - age) // self.updates_per_step

    def oldest_with(self, slack: float, version: int) -> float:
        """Return the oldest version whose tokens have at least this slack if the next step begins at `version`."""
        if self.max_age is None:
            return float("-inf")
        return version + self.updates_per_step * (slack + 1) - 1 - self.max_age

    def stale(self, ages: Ages, version: int) -> list[int]:
        """Return the groups whose slack is below 0."""
        limit = self.oldest_with(0, version)
        return [i for v, cohort in ages.cohorts.items() if _known(v, version) < limit for i in cohort]

    def urgent(self, ages: Ages, version: int) -> list[int]:
        """Return the groups whose slack is 0."""
        if self.max_age is None:
            return []
        first = int(self.oldest_with(0, version))
        versions: list[int | None] = [*range(first, first + self.updates_per_step)]
        versions += [None] * (version in versions)
        return [prompt_id for v in versions for prompt_id in ages.cohorts.get(v, ())]

    def capacity(self, version: int, next_version: int) -> float:
        """Return the most groups that may be untrained when one begins with weights of `version`.

        `next_version` is the learner's version when the next batch is taken: the same before a step's batch is taken,
        `updates_per_step` more if sampling continues while the step trains.
        """
        return self.groups_per_step * (self.slack(version, next_version) + 1)

    def choose(self, finished: Ages, active: Ages, version: int) -> list[int] | None:
        """Return the groups to train now, stalest first, or None if the step has to wait for others to finish.

        It waits for unfinished groups, which are in `active`, only if training now would make one of them too old.
        Groups with the same slack are trained in the order in which they finished.
        """
        if len(finished) < self.groups_per_step:
            return None
        by_slack = self._by_slack(finished, version)
        num_left, num_missing, least_urgent = Counter[float](), self.groups_per_step, 0.0
        for slack, cohorts in by_slack.items():
            num_chosen = min(num_missing, _num(cohorts))
            num_left[slack] += _num(cohorts) - num_chosen
            num_missing -= num_chosen
            least_urgent = slack if num_chosen else least_urgent
        begin, end = self.oldest_with(0, version), self.oldest_with(least_urgent, version)
        if any(begin <= _known(v, version) < end for v in active.cohorts):  # waiting helps
            for slack, cohorts in self._by_slack(active, version).items():
                num_left[slack] += _num(cohorts)
            if not self._are_in_time(num_left):
                return None
        in_order = (prompt_id for cohorts in by_slack.values() for prompt_id in _in_order(cohorts))
        return list(itertools.islice(in_order, self.groups_per_step))

    def _by_slack(self, ages: Ages, version: int) -> dict[float, list[Cohort]]:
        """Return the groups by their slack, the most urgent first."""
        found: dict[float, list[Cohort]] = {}
        for oldest, cohort in ages.cohorts.items():
            found.setdefault(self.slack(oldest, version), []).append(cohort)
        return dict(sorted(found.items()))

    def _are_in_time(self, num_left: Counter[float]) -> bool:
        """Return whether the groups left by a step can be trained after it; `num_left` counts them by slack."""
        num_so_far = 0
        for slack, num in sorted((slack, num) for slack, num in num_left.items() if slack >= 0):
            num_so_far += num
            if num_so_far > slack * self.groups_per_step:
                return False
        return True


def _known(oldest_version: int | None, version: int) -> int:
    """Return the version of a group's oldest token; a group without tokens samples its first now, at `version`."""
    return version if oldest_version is None else oldest_version


def _num(cohorts: list[Cohort]) -> int:
    return sum(map(len, cohorts))


def _in_order(cohorts: list[Cohort]) -> Iterator[int]:
    """Yield the prompt ids of cohorts in the order of arrival."""
    for _, prompt_id in merge(*(((place, prompt_id) for prompt_id, place in cohort.items()) for cohort in cohorts)):
        yield prompt_id
