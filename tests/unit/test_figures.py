"""Figures: what is drawn, with what looks."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from bapo_megatron.report.figures import Plot, Series, compared, mean_and_range, moving_average
from bapo_megatron.report.gallery import PANELS
from bapo_megatron.report.panels import Panel
from bapo_megatron.report.quantities import by_probability
from bapo_megatron.report.style import css_variables, look
from bapo_megatron.runs.history import History, read_history
from tests.unit.run_folders import CONFIG, make_run, steps

# Severe protanopia, deuteranopia and tritanopia on linear RGB (Machado, Oliveira and Fernandes 2009).
COLOUR_VISION = np.array(
    [
        np.eye(3),
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
    ]
)
XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
CARDS = {False: "#ffffff", True: "#1b212b"}  # background, by whether the page is dark


def linear_rgb(colour: str) -> np.ndarray:
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    x, y, z = np.cbrt(XYZ @ np.clip(rgb, 0, 1) / [0.95047, 1, 1.08883])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def contrast(a: str, b: str) -> float:
    dark, light = sorted(float(XYZ[1] @ linear_rgb(colour)) for colour in (a, b))
    return (light + 0.05) / (dark + 0.05)


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
    x, series = compared({"a": [points([np.nan])], "b": [points([1, 2]), points([3, 4])], "c": [points([0, 9])]})
    assert [line.label for line in series] == ["b", "c"]
    assert [line.look for line in series] == [look(1), look(2)]
    assert x.tolist() == [1, 2]
    assert series[0].y.tolist() == [2, 3]
    assert series[0].low is not None
    assert series[0].high is not None
    assert (series[0].low.tolist(), series[0].high.tolist()) == ([1, 2], [3, 4])
    assert series[1].low is None
    data = Plot(x, tuple(series), "y").data()
    assert [line["colour"] for line in data["series"]] == ["--series-2", "--series-3"]


def test_curves_are_averaged_per_seed_before_their_mean() -> None:
    _, (line,) = compared({"a": [points([0, 2, 4]), points([1, 1, 1])]}, window=2)
    assert line.y.tolist() == [0.5, 1, 2]


def test_equal_lines_do_not_hide_each_other() -> None:
    same, other = [0.1, 0.5, 0.4], [0.1, 0.5, 0.6]
    _, (a, b, c) = compared({"a": [points(same)], "b": [points(other)], "c": [points(same)]})
    assert a.width > b.width == c.width
    _, series = compared({str(i): [points(same)] for i in range(26)})
    widths = [line.width for line in series]
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] < widths[-2] < widths[0] < 12


def test_all_lines_differ_in_colour_or_dashes_and_neighbours_in_both() -> None:
    looks = [look(i) for i in range(49)]
    assert len(set(looks)) == 49
    assert all(a.colour != b.colour and a.dashes != b.dashes for a, b in itertools.pairwise(looks))


@pytest.mark.parametrize("dark", [False, True])
def test_colours_can_be_told_apart_with_any_colour_vision_and_from_the_page(dark: bool) -> None:
    colours = list(css_variables(dark=dark).values())
    assert len(colours) == 7
    for a, b in itertools.combinations(colours, 2):
        distances = [np.linalg.norm(lab(m @ linear_rgb(a)) - lab(m @ linear_rgb(b))) for m in COLOUR_VISION]
        assert min(distances) > 8, (a, b)
    assert min(contrast(colour, CARDS[dark]) for colour in colours) >= 3


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> History:
    return read_history(make_run(tmp_path_factory.mktemp("runs") / "run", steps(600)))


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> History:
    return read_history(make_run(tmp_path_factory.mktemp("runs") / "short", steps(11)))


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_every_axis_of_a_figure_has_a_label(panel: Panel, run: History) -> None:
    plot = panel.plot(run)
    assert plot is not None
    assert plot.y_label
    assert plot.over.label
    assert bool(plot.right_label) == any(series.on_right for series in plot.series)


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_every_axis_of_a_comparison_has_a_label(panel: Panel, run: History, short_run: History) -> None:
    groups = {"A": [run, short_run], "B": [short_run], "C": [run]}
    if panel.stacked:
        means = panel.means(groups)
        assert means
        assert all(np.isfinite(values).all() and len(values) == 3 for values in means.values())
        return
    plots = panel.compare(groups)
    assert plots
    assert all(plot.y_label and plot.over.label for plot in plots)
    assert not any(series.on_right for plot in plots for series in plot.series)


@pytest.mark.parametrize(
    ("series", "text"),
    [
        (Series("line", look(0), np.array([1.0, 0.51249])), "0.5125"),
        (Series("gap at the end", look(0), np.array([1.0, np.nan])), "-"),
        (Series("joined over the gap", look(0), np.array([1.0, np.nan]), joined=True), "1"),
        (Series("joined, empty", look(0), np.array([np.nan, np.nan]), joined=True), "-"),
        (Series("band alone", look(0), np.full(2, np.nan), np.zeros(2), np.ones(2)), ""),
        (Series("interval", look(0), np.full(2, 0.5), np.full(2, 0.4), np.full(2, 0.6128)), "0.5 [0.4, 0.613]"),
    ],
    ids=lambda value: value.label if isinstance(value, Series) else "",
)
def test_the_legend_has_the_value_at_the_last_step(series: Series, text: str) -> None:
    assert series.latest == text
    (told,) = Plot(np.array([1.0, 2.0]), (series,), "y").data()["series"]
    assert told["latest"] == text


def test_means_by_probability_weigh_all_tokens_alike(tmp_path: Path) -> None:
    rows = [
        {"step": 1, "train/tokens": 10, "profile/p00_share": 0.5, "profile/p00_entropy": 1.0},
        {"step": 2, "train/tokens": 30, "profile/p00_share": 0.5, "profile/p00_entropy": 2.0},
        {"step": 3, "train/tokens": 30, "profile/p00_share": 0.0, "profile/p00_entropy": np.nan},
    ]
    values = by_probability("entropy")(read_history(make_run(tmp_path / "run", rows)))
    assert values[0] == pytest.approx((5 * 1 + 15 * 2) / 20)
    assert np.isnan(values[1:]).all()


def test_a_figure_without_a_value_is_not_drawn(tmp_path: Path) -> None:
    empty = read_history(make_run(tmp_path / "run", [{"step": 1}]))
    assert all(panel.plot(empty) is None for panel in PANELS)
    assert not any(panel.compare({"A": [empty]}) for panel in PANELS)
    assert not any(panel.means({"A": [empty]}) for panel in PANELS)


@pytest.mark.parametrize("score", [0.0, 1.0])
def test_an_evaluation_at_its_limit_has_an_open_interval(tmp_path: Path, score: float) -> None:
    rows = [{"step": 1, "eval/reward": score, "eval/reward_stderr": 0.0, "eval/num_samples": 16}]
    run = read_history(make_run(tmp_path / "run", rows, CONFIG + "[eval]\nsamples_per_prompt = 2\n"))
    (panel,) = (panel for panel in PANELS if panel.title == "Evaluation")
    plot = panel.plot(run)
    assert plot is not None
    series = plot.series[0]
    assert series.low is not None
    assert series.high is not None
    edges = (series.low[0], series.high[0])
    assert edges == pytest.approx((0.676, 1.0) if score else (0.0, 0.324), abs=1e-3)
