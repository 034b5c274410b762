"""Mark every test in this folder `gpu`, and skip it if there is no CUDA device."""

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: scripts/gpu_tests.sh")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(no_gpu)
