"""50 cases of the campaign of hostile requests and calls; docs/security.md has what came of thousands."""

import pytest

from tests.attacks.hostile import KINDS
from tests.attacks.hostile_samples import of_agents, of_tools

pytestmark = pytest.mark.slow


def test_hostile_requests_and_calls_cost_nobody_else_anything() -> None:
    requests = of_agents(seed=1, count=25)
    assert {*requests["outcomes"]} == {*KINDS, "words of the policy"}
    assert requests["honest samples"] == requests["hostile samples"] > 0
    turns = of_tools(seed=1, count=25)
    assert turns["honest samples"] > 0
    assert turns["hostile samples"] > 0
