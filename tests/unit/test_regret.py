"""Regret over regimes against a literal computation, and its bootstrap against a known spread."""

import math
import random
from pathlib import Path

import pytest

from studies.page import write
from studies.regret import regrets
from studies.results import gather
from studies.study import Study
from tests.unit.test_study_rows import PAGE, make_row

METHODS, REGIMES = ("a", "b", "c"), ("easy", "hard")


def table(num_seeds: int, seed: int = 0) -> dict[tuple[str, str], list[float | None]]:
    rng = random.Random(seed)
    return {(m, g): [rng.random() for _ in range(num_seeds)] for g in REGIMES for m in METHODS}


def test_regret_is_the_distance_from_the_best_of_each_regime() -> None:
    scores = table(5)
    scores["b", "hard"][2] = None
    found, (difference,) = regrets(scores, [("a", "b")])
    means = {cell: sum(score or 0.0 for score in of_cell) / 5 for cell, of_cell in scores.items()}
    for regret in found:
        literal = {g: max(means[m, g] for m in METHODS) - means[regret.method, g] for g in REGIMES}
        assert regret.by_regime == pytest.approx(literal)
        assert regret.mean == pytest.approx(sum(literal.values()) / 2)
        assert regret.low <= regret.mean <= regret.high
    by_name = {regret.method: regret.mean for regret in found}
    assert difference.difference == pytest.approx(by_name["a"] - by_name["b"])
    assert regrets(scores, [("a", "b")]) == (found, [difference]), "the resamples are always the same"


def test_the_error_of_a_difference_is_the_error_of_a_mean() -> None:
    """The best cancels: for two methods and one regime, it is std / sqrt(S), with divisor S."""
    rng = random.Random(1)
    ours, theirs = ([rng.random() for _ in range(16)] for _ in range(2))
    _, (difference,) = regrets({("a", "g"): ours, ("b", "g"): theirs}, [("a", "b")])
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    mean = sum(differences) / 16
    error = math.sqrt(sum((d - mean) ** 2 for d in differences) / 16 / 16)
    assert difference.difference == pytest.approx(-mean)
    assert difference.standard_error == pytest.approx(error, rel=0.05)


def test_seeds_that_all_methods_share_add_no_error() -> None:
    """A seed with hard problems lowers all scores equally."""
    hardness = [0.1 * seed for seed in range(6)]
    scores = {(m, g): [1.0 - h - 0.1 * i for h in hardness] for g in REGIMES for i, m in enumerate(METHODS)}
    found, differences = regrets(scores, [("a", "c")])
    assert [x for r in found for x in (r.mean, r.low, r.high)] == pytest.approx(
        [0.1 * i for i in range(3) for _ in "xxx"]
    )
    assert differences[0].standard_error == pytest.approx(0.0, abs=1e-12)


def test_the_page_has_the_regret_of_each_variant_over_the_regimes(tmp_path: Path) -> None:
    study = Study.model_validate(
        PAGE
        | {
            "seeds": [0, 1],
            "variants": [{"name": m} for m in METHODS],
            "regimes": [{"name": g} for g in REGIMES],
            "compare": [("a", "b")],
            "regret": True,
        }
    ).in_regimes()
    scores = table(2)
    rows = [
        make_row(variant.name, seed, **{"pass rate": scores[variant.cell][seed] or 0.0})
        for seed in (0, 1)
        for variant in study.variants
        if variant.cell
    ]
    result = gather(study, rows)
    assert result.regrets == regrets(scores, [("a", "b")])[0]
    write("mine", study, rows, result, folder=tmp_path, command="bapo reproduce mine")
    page, best = (tmp_path / "mine.md").read_text(), min(result.regrets, key=lambda regret: regret.mean)
    assert f"| {best.method} | {best.mean:.3f} | {best.low:.3f} to {best.high:.3f} |" in page
    assert f"- a minus b: {result.regret_differences[0].difference:+.3f} ±" in page
    assert f"\na,regret,,{result.regrets[0].mean:.9g}," in (tmp_path / "mine.csv").read_text()
    with pytest.raises(ValueError, match="regret compares variants over regimes, and there are no regimes"):
        Study.model_validate(PAGE | {"seeds": [0], "variants": [{"name": "a"}], "regret": True})
