"""docs/one-card.md has the plans that the code makes."""

import re
from dataclasses import replace

import pytest
from write_one_card_page import CARDS, FULL_MODELS, PAGE, filled_page, shared_by

from bapo_megatron.machine.gpus import FULL
from bapo_megatron.machine.shared_gpu import SharedGPU


def test_the_plans_on_the_page_are_current() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == filled_page(text), "run: python scripts/write_one_card_page.py"


@pytest.mark.parametrize("model", FULL_MODELS)
@pytest.mark.parametrize("card", CARDS)
def test_no_verdict_depends_on_the_temporaries_of_adam(card: str, model: str) -> None:
    """The page says so next to the table."""
    shared = shared_by(card, model)
    assert shared.fits == fits_without_them(shared)


def test_3b_on_80_gb_would_fit_without_them() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("3B on 80 GB is near: ")[2].partition(".\n")[0]
    overrides = re.findall(r"`(\S+)`", text)
    assert len(overrides) == 3
    shared = shared_by("h100", "3B", *overrides)
    assert (shared.fits, fits_without_them(shared)) == (False, True)
    for number in range(3):
        fewer = [*overrides[:number], *overrides[number + 1 :]]
        assert not fits_without_them(shared_by("h100", "3B", *fewer)), "each of them is needed"


def fits_without_them(shared: SharedGPU) -> bool:
    """Return whether trainer and server fit, with one response, if an update needs no more memory than it keeps."""
    response = 1536 * shared.server.kv_bytes_per_token
    needs = replace(shared.trainer, update=0).total + shared.server.weights + shared.rest.total + response
    return needs <= FULL * shared.gpu_bytes
