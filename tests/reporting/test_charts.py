"""Laws of the pieces: escaping, ticks, ranges, intervals, bins, distances."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st
from markupsafe import Markup
from scipy import stats
from sklearn.metrics import auc

from polyclinic.evaluation.metrics import Predictions, measure
from polyclinic.evaluation.statistics import wilson_interval
from polyclinic.reporting.blocks import Bullets, Folded, Table
from polyclinic.reporting.charts import CostPoint, LineAxes, cost_scatter, line_chart
from polyclinic.reporting.formatting import format_names
from polyclinic.reporting.html.render import render_block
from polyclinic.reporting.html.svg import Plot, linear_ticks, log_ticks, padded_range, to_svg_file
from polyclinic.reporting.html.tags import tag
from polyclinic.reporting.sections.classification import calibration_bins, pr_points, roc_points, thin_points
from polyclinic.reporting.sections.sites import total_variation
from tests.reporting.drawn import Page

NASTY = "<script>alert(1)</script>\"'&<img src=x onerror=alert(1)>"


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1))
def test_whatever_a_name_is_it_comes_back_as_text(name: str) -> None:
    page = Page(tag("p", name, title=name))
    assert [element for element, *_ in page.elements] == ["p"]
    assert page.text("p") == name
    assert page.all("p")[0]["title"] == name


def test_names_stay_names_in_tables_lists_charts_and_files() -> None:
    chart = line_chart(
        NASTY, NASTY, {NASTY: [(0, 0.1, 0, 1), (1, 0.2, 0, 1)], "b": [(0, 0.1, 0, 1)]}, LineAxes(NASTY, NASTY), NASTY
    )
    points = [CostPoint(NASTY, 0.5, 0.4, 0.6, 1, True), CostPoint("b", 0.6, 0.5, 0.7, 2, True)]
    scatter = cost_scatter(NASTY, NASTY, points, NASTY, NASTY, NASTY)
    table = Table(NASTY, [NASTY, "b"], [[NASTY, NASTY]])
    found: list[str] = [
        render_block(block) for block in (table, Bullets((NASTY,)), chart, scatter, Folded(NASTY, [table]))
    ]
    found.append(to_svg_file(chart.plot, NASTY, NASTY, chart.legend))
    for markup in found:
        page = Page(markup)
        assert not {"script", "img"} & {element for element, *_ in page.elements}
        assert all("onerror" not in attributes for _, attributes, _ in page.elements)


def test_a_table_names_its_columns_and_rows_and_sets_numbers_to_the_right() -> None:
    rows = [["a", "1,200", "large"], ["b", "7", "small"]]
    page = Page(render_block(Table("sizes", ["site", "images", "about"], rows)))
    assert page.text("caption") == "sizes"
    assert [th["scope"] for th in page.all("th")] == ["col", "col", "col", "row", "row"]
    assert [td.get("class") for td in page.all("td")] == ["n", None, "n", None]


@given(st.floats(-1e4, 1e4), st.floats(1e-3, 1e4))
def test_ticks_are_round_lie_between_and_are_neither_few_nor_many(low: float, width: float) -> None:
    found = [value for value, _ in linear_ticks(low, low + width, 5)]
    assert 1 <= len(found) <= 6
    assert all(low - 1e-6 * width <= value <= low + width * (1 + 1e-6) + 1e-9 for value in found)
    if len(found) > 1:
        step = Fraction(found[1] - found[0]).limit_denominator(10**7)
        leading = float(step) / 10.0 ** math.floor(math.log10(float(step)) + 1e-9)
        assert min(abs(leading - wanted) for wanted in (1, 2, 5, 10)) < 1e-3


def test_whole_ticks_are_whole() -> None:
    assert [text for _, text in linear_ticks(0, 3, whole=True, show=lambda v: f"{v:g}")] == ["0", "1", "2", "3"]


def test_ticks_of_factors_lie_between() -> None:
    assert [value for value, _ in log_ticks(2, 400, str)] == [3, 10, 30, 100, 300]


def test_axes_reach_from_margin_to_margin() -> None:
    for log in (False, True):
        plot = Plot((1, 100), (0, 1), log=log)
        assert plot.x_pixel(1) == plot.left
        assert plot.x_pixel(100) == pytest.approx(plot.width - plot.right)
        assert plot.y_pixel(0) == plot.height - plot.bottom
        assert plot.y_pixel(1) == pytest.approx(plot.top)
    assert Plot((1, 100), (0, 1), log=True).x_pixel(10) == pytest.approx(
        (Plot((1, 100), (0, 1)).x_pixel(1) + Plot((1, 100), (0, 1)).x_pixel(100)) / 2
    )


@given(st.lists(st.floats(0, 1), min_size=1))
def test_a_range_holds_all_values_and_stays_within_bounds(values: list[float]) -> None:
    low, high = padded_range(values)
    assert 0 <= low <= min(values)
    assert max(values) <= high <= 1


@given(st.integers(1, 400), st.data())
def test_wilson_is_scipys(images: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, images))
    known = stats.binomtest(right, images).proportion_ci(method="wilson")
    assert wilson_interval(right / images, images) == pytest.approx((known.low, known.high), abs=1e-9)


def test_wilson_covers_what_it_should() -> None:
    rng = np.random.default_rng(1)
    drawn = rng.binomial(60, 0.8, size=4000) / 60
    covered = np.mean([low <= 0.8 <= high for low, high in (wilson_interval(float(share), 60) for share in drawn)])
    assert 0.93 <= covered <= 0.97


def drawn_predictions(classes: int, images: int = 300) -> Predictions:
    rng = np.random.default_rng(classes)
    rows = rng.dirichlet(np.ones(classes), images)
    labels = np.array([rng.choice(classes, p=row) for row in rows])
    return Predictions(rows, labels)


@pytest.mark.parametrize("classes", [2, 3, 8])
def test_bins_add_up_to_the_calibration_error_of_the_metrics(classes: int) -> None:
    found = drawn_predictions(classes)
    sides = calibration_bins(found)
    assert sum(side.count for side in sides) == len(found)
    error = sum(side.count * abs(side.confidence - side.right) for side in sides) / len(found)
    assert error == pytest.approx(measure(found.probabilities, found.labels)["ece"])


def test_curves_have_the_areas_of_the_metrics() -> None:
    found = drawn_predictions(2)
    scores, truth = found.probabilities[:, 1].astype(np.float64), found.labels == 1
    known = measure(found.probabilities, found.labels)
    x, y = zip(*roc_points(scores, truth), strict=True)
    assert auc(x, y) == pytest.approx(known["auc"])
    steps = pr_points(scores, truth)
    area = sum((b[0] - a[0]) * b[1] for a, b in pairwise(steps))
    assert area == pytest.approx(known["pr_auc"])


def test_thinning_keeps_order_and_both_ends() -> None:
    points = [(float(n), float(n)) for n in range(10_000)]
    kept = thin_points(points)
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert len(kept) < 200
    assert kept == sorted(set(kept))


def test_classes_apart_is_total_variation() -> None:
    assert total_variation([1, 0], [0, 1]) == 1
    assert total_variation([3, 1], [30, 10]) == 0
    assert total_variation([1, 1], [3, 1]) == pytest.approx(0.25)


def test_lists_of_names_read_as_sentences() -> None:
    assert [format_names(names) for names in (["a"], ["a", "b"], ["a", "b", "c"])] == ["a", "a and b", "a, b and c"]
    assert format_names(list("abcdefg"), 3) == "a, b, c and 4 more"


def test_markup_is_not_escaped_twice() -> None:
    assert tag("p", Markup("<b>x</b>")) == "<p><b>x</b></p>"
