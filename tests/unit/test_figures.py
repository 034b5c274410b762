"""Figures: what is drawn, and that nothing of it hides anything else."""

import itertools

import numpy as np
from matplotlib.figure import Figure

from bapo_megatron.monitor.figures import draw_curves, mean_and_range, moving_average
from bapo_megatron.monitor.style import look


def points(y: list[float], first: int = 1) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(first, first + len(y), dtype=float), np.array(y)


def test_moving_average_skips_what_is_not_finite() -> None:
    values = np.array([1.0, np.nan, 3.0, 5.0, np.nan])
    assert moving_average(values, window=2).tolist() == [1.0, 1.0, 3.0, 4.0, 5.0]
    assert np.isnan(moving_average(np.array([np.nan, 2.0]), window=2)).tolist() == [True, False]


def test_mean_and_range_cover_the_steps_that_all_seeds_reached() -> None:
    seeds = [points([1, 2, 3, 4]), points([5, np.nan, 5], first=2), points([np.nan, np.nan])]
    x, mean, low, high = mean_and_range(seeds)
    assert x.tolist() == [2, 3, 4]
    assert mean.tolist() == [3.5, 3, 4.5]
    assert low.tolist() == [2, 3, 4]
    assert high.tolist() == [5, 3, 5]


def test_nothing_is_left_of_seeds_without_common_steps_or_values() -> None:
    assert [len(part) for part in mean_and_range([points([1.0]), points([1.0], first=2)])] == [0] * 4
    assert [len(part) for part in mean_and_range([points([np.nan])])] == [0] * 4
    assert [len(part) for part in mean_and_range([])] == [0] * 4


def test_curves_keep_their_looks_where_another_one_is_missing() -> None:
    axes = Figure().add_subplot()
    lines = draw_curves(axes, {"a": [points([np.nan])], "b": [points([1, 2]), points([3, 4])], "c": [points([0, 9])]})
    assert [line.get_label() for line in lines] == ["b", "c"]
    assert [line.get_color() for line in lines] == [look(1).colour, look(2).colour]
    assert lines[0].get_ydata().tolist() == [2, 3]
    (band,) = axes.collections
    assert {(1, 1), (1, 3), (2, 2), (2, 4)} <= {tuple(vertex) for vertex in band.get_paths()[0].vertices}


def test_curves_are_averaged_per_seed_before_their_mean() -> None:
    axes = Figure().add_subplot()
    (line,) = draw_curves(axes, {"a": [points([0, 2, 4]), points([1, 1, 1])]}, window=2)
    assert line.get_ydata().tolist() == [0.5, 1, 2]


def test_all_lines_differ_in_colour_or_dashes_and_neighbours_in_both() -> None:
    looks = [look(i) for i in range(49)]
    assert len(set(looks)) == 49
    assert all(a.colour != b.colour and a.dashes != b.dashes for a, b in itertools.pairwise(looks))
