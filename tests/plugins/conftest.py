"""Build one wheel of the checkout for all environments."""

from pathlib import Path

import pytest

from tests.plugins.environments import build_wheel


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))
