"""Fixtures for the integration tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.integration.killable import Engine


@pytest.fixture(scope="module")
def forked_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Start an engine for a test file's runs (forked.py), one after the other: each first pushes its weights."""
    from tests.integration.killable import Engine

    engine = Engine(tmp_path_factory.mktemp("engine"))
    yield engine
    engine.kill()
