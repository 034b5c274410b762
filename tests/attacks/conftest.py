"""Shared by the attack suite: count every outcome, and print the counts as a table."""

from collections.abc import Iterator

import pytest

from tests.outcomes import Outcomes


@pytest.fixture
def outcomes(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Iterator[Outcomes]:
    """Collect a test's outcomes; print them when it ends, and fail it if any of them must not happen."""
    found = Outcomes()
    yield found
    with capsys.disabled():
        print(f"\n{request.node.name}\n{found}")
    assert not found.failures, "\n".join(found.failures[:20])
