"""An oracle for reports: from made-up summaries whose figures all differ, every shown figure is worked out again."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np
import pytest
from pydantic import JsonValue
from scipy import stats

from polyclinic.core.rng import Stream
from polyclinic.core.types import Part
from polyclinic.evaluation.claims import Claim
from polyclinic.evaluation.statistics import correct_holm, sign_flip_p
from polyclinic.evaluation.summary import Cost, Headline, PartScores, RunSummary, SiteScores, SiteSizes
from polyclinic.reporting.blocks import Figure, Report
from polyclinic.reporting.html.render import to_html
from polyclinic.reporting.render_markdown import to_markdown
from polyclinic.reporting.report import build_report
from polyclinic.reporting.report_data import Method, ReportData, Run
from polyclinic.reporting.sections.provenance import reproduce_section
from polyclinic.storage.files import write_json
from polyclinic.storage.run_folder import RunFolder
from tests.summaries import make_headline, make_scores, make_summary

Tables = dict[str, dict[str, dict[str, str]]]
"""By caption, row and column."""
TRUE_NEGATIVES, FALSE_POSITIVES, FALSE_NEGATIVES, TRUE_POSITIVES = 41, 9, 7, 13
Bounds = tuple[float, float, float]
"""Value, low, high."""


class SiteFigures(NamedTuple):
    n: int
    accuracy: Bounds
    auc: Bounds
    recall: float
    ece: float


SITES = {
    "mill": SiteFigures(31, (0.71, 0.64, 0.79), (0.83, 0.75, 0.88), 0.62, 0.051),
    "abbey": SiteFigures(17, (0.58, 0.41, 0.69), (0.66, 0.55, 0.77), 0.47, 0.127),
    "wharf": SiteFigures(22, (0.92, 0.84, 0.97), (0.95, 0.90, 0.99), 0.88, 0.023),
}
"""Neither in the order of their accuracy nor of equal size."""
ACCURACY = {"Ours": [0.81, 0.84, 0.79, 0.86], "Theirs": [0.76, 0.75, 0.77, 0.74], "Alone": [0.71, 0.69, 0.55, 0.72]}


def scores_of(site: str) -> PartScores:
    n, accuracy, auc, recall, ece = SITES[site]
    return make_scores(
        n, accuracy=accuracy, auc=auc, recall=recall, ece=ece, balanced_accuracy=0.5 + n / 100, specificity=n / 64
    )


def sites_of(model: str = "global") -> dict[str, SiteScores]:
    part: Part = "test"
    return {site: {model: {part: scores_of(site)}} for site in SITES}


@pytest.fixture(scope="module")
def single() -> Report:
    confusion = [[TRUE_NEGATIVES, FALSE_POSITIVES], [FALSE_NEGATIVES, TRUE_POSITIVES]]
    bounds: dict[str, Bounds] = {
        "accuracy": (0.77, 0.68, 0.85),
        "auc": (0.86, 0.78, 0.91),
        "balanced_accuracy": (0.735, 0.62, 0.81),
    }
    scores = make_scores(70, {"confusion": confusion}, ece=0.064, **bounds)  # type: ignore[dict-item]
    headline = Headline(model="global", part="test", scores=scores)
    sizes = [
        SiteSizes(site="mill", train=120, validation=13, test=31, classes={"no": 90, "yes": 74}),
        SiteSizes(site="abbey", train=61, validation=8, test=17, classes={"no": 20, "yes": 66}),
        SiteSizes(site="wharf", train=83, validation=11, test=22, classes={"no": 77, "yes": 39}),
    ]
    cost = Cost(bytes_down=5_300_000, bytes_up=2_100_000, seconds=12.3, site_seconds=45.6)
    summary = make_summary(headline, sites_of(), site_sizes=sizes, cost=cost, rounds=6)
    return build_report(ReportData("Ours", "", (Method("Ours", (Run(summary),)),)))


def remote(folder: Path, confusion: list[list[int]] | None, pooled_from: str, scored: bool = True) -> ReportData:
    """A run between real sites, which tell no classes of their images; each has as many right."""
    details: dict[str, JsonValue] = {"confusion": confusion} if confusion else {}  # type: ignore[dict-item]
    scores = make_scores(40, details, accuracy=0.7 if scored else None)
    sizes = [SiteSizes(site=site, train=100 + n, validation=9, test=n) for site, (n, *_) in SITES.items()]
    sites: dict[str, SiteScores] = {
        site: {"global": {"test": make_scores(n, accuracy=(0.7 + n / 1e4, 0.6 - n / 1e3, 0.8 + n / 1e3))}}
        for site, (n, *_) in SITES.items()
    }
    summary = make_summary(
        Headline(model="global", part="test", scores=scores),
        sites if scored else {},
        site_sizes=sizes,
        pooled_from=pooled_from,
        **({} if scored else {"merged": {}}),
    )
    files = RunFolder(folder)
    write_json(files.result, summary.to_json())
    return ReportData("Ours", "", (Method("Ours", (Run(summary, None, files),)),), (files.path,))


def test_of_real_sites_nothing_is_told_that_is_not_known(tmp_path: Path) -> None:
    data = remote(tmp_path, [[20, 5], [5, 10]], "scores")
    report = build_report(data)
    sizes = tables_of_markdown(to_markdown(report))["Sites and their images"]
    assert sizes["abbey"] == {"train": "117", "validation": "9", "test": "17"}
    assert sizes["all"] == {"train": "370", "validation": "27", "test": "70"}
    assert said(report, "How many images of each class a site has is not known")
    blocks = next(section.blocks for section in report.sections if section.id == "sites")
    assert not [block for block in blocks if isinstance(block, Figure)]
    for wrong in ("Class shift", "class shift", "Classes at each site", "0 images", "Sites differ"):
        assert not any(wrong in text for text in sentences(report)), wrong
    assert said(report, "Sites do not differ: 70 of 100 test images are right at each of 3 sites.")


def test_a_run_between_real_sites_is_repeated_by_its_server(tmp_path: Path) -> None:
    again = reproduce_section(remote(tmp_path, None, "scores"))
    assert again is not None
    told = to_markdown(Report("again", "", "", [again]))
    assert f"polyclinic serve server.yaml {tmp_path}/recipe.yaml --out again" in told
    assert "polyclinic run" not in told
    assert "--data" not in told


@pytest.mark.parametrize(
    ("confusion", "pooled_from", "scored", "sentence"),
    [
        (
            [[20, 5], [5, 10]],
            "scores",
            True,
            "Numbers of images by site, and in confusion matrices down to single images; figures of test images "
            "without noise.",
        ),
        (None, "scores", True, "Numbers of images by site; figures of test images without noise."),
        (None, "nothing", False, "Numbers of images by site; no figure of test images."),
    ],
)
def test_a_report_confesses_what_it_holds(
    confusion: list[list[int]] | None, pooled_from: str, scored: bool, sentence: str, tmp_path: Path
) -> None:
    report = build_report(remote(tmp_path, confusion, pooled_from, scored))
    assert said(report, sentence)
    assert any("Confusion matrix" in text for text in sentences(report)) == (confusion is not None)


def test_a_simulation_confesses_classes_and_matrices(single: Report) -> None:
    assert said(single, "Numbers of images by site and class, and in confusion matrices down to single images;")
    assert tables_of_markdown(to_markdown(single))["Confusion matrix: all sites"]


def runs_of(name: str, algorithm: str) -> list[RunSummary]:
    runs = []
    for seed, accuracy in enumerate(ACCURACY[name]):
        cost = Cost(
            bytes_up=(seed + 1) * 1_000_000 * len(name), bytes_down=500_000 * len(name), seconds=10.0 * len(name)
        )
        headline = make_headline(n=70, accuracy=accuracy, auc=accuracy + 0.07, balanced_accuracy=accuracy - 0.04)
        scores = {
            site: make_scores(n=found.n, accuracy=accuracy - place / 10, auc=accuracy - place / 9)
            for place, (site, found) in enumerate(SITES.items())
        }
        sites: dict[str, SiteScores] = {site: {"global": {"test": one}} for site, one in scores.items()}
        drift = {site: 0.3 + len(name) / 10 for site in SITES}
        runs.append(make_summary(headline, sites, algorithm=algorithm, seed=seed, cost=cost, drift=drift))
    return runs


@pytest.fixture(scope="module")
def compared() -> Report:
    algorithms = {"Ours": "fedavg", "Theirs": "fedprox", "Alone": "local"}
    methods = [Method(name, tuple(map(Run, runs_of(name, each)))) for name, each in algorithms.items()]
    claims = [
        Claim(claim="ours is better", test="higher", methods=["Ours", "Theirs"]),
        Claim(claim="alone ranks better", test="higher", methods=["Alone", "Ours"], metric="auc", paper="+0.3"),
    ]
    return build_report(ReportData("compared", "", tuple(methods), claims=claims, paper={"Theirs": "0.77"}))


def tables_of_html(text: str) -> Tables:
    found: Tables = {}
    for caption, body in re.findall(r"<caption>(.*?)</caption>(.*?)</table>", text, re.DOTALL):
        rows = [
            [_plain(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL)]
            for row in re.findall(r"<tr>(.*?)</tr>", body, re.DOTALL)
        ]
        found[html.unescape(caption)] = _by_row(rows)
    return found


def _plain(cell: str) -> str:
    cell = re.sub(r'<span class="unseen">.*?</span>', "", cell)
    cell = re.sub(r"<small>(\S+) to (\S+)</small>", r" [\1, \2]", cell)
    cell = re.sub(r"<small>(.*?)</small>", r" (\1)", cell)
    return html.unescape(re.sub(r"<[^>]+>", "", re.sub(r"</?strong>", "**", cell)))


def tables_of_markdown(text: str) -> Tables:
    found: Tables = {}
    blocks = text.split("\n\n")
    for before, block in pairwise(blocks):
        if block.startswith("|"):
            rows = [[cell.strip() for cell in line.strip()[1:-1].split(" | ")] for line in block.splitlines()]
            found[before.strip("#* ")] = _by_row([rows[0], *rows[2:]])
    return found


def _by_row(rows: Sequence[Sequence[str]]) -> dict[str, dict[str, str]]:
    head, *body = rows
    return {row[0].strip("| "): dict(zip(head[1:], row[1:], strict=True)) for row in body}


def sentences(report: Report) -> tuple[str, str]:
    """The text of both renderings, without mark-up."""
    page = re.sub(r"<svg.*?</svg>", "", to_html(report), flags=re.DOTALL)
    return html.unescape(re.sub(r"<[^>]+>", "", page)), to_markdown(report)


def said(report: Report, sentence: str) -> bool:
    return all(sentence in text for text in sentences(report))


@pytest.mark.parametrize("name", ["single", "compared"])
def test_both_renderings_show_the_same_tables(name: str, request: pytest.FixtureRequest) -> None:
    report = request.getfixturevalue(name)
    page, markdown = tables_of_html(to_html(report)), tables_of_markdown(to_markdown(report))
    assert len(page) >= 6
    assert page == markdown


def test_sensitivity_is_of_the_positive_and_specificity_of_the_negative(single: Report) -> None:
    positives, negatives = TRUE_POSITIVES + FALSE_NEGATIVES, TRUE_NEGATIVES + FALSE_POSITIVES
    sensitivity, specificity = TRUE_POSITIVES / positives, TRUE_NEGATIVES / negatives
    assert said(
        single,
        f"Of {positives} images of yes it found {TRUE_POSITIVES} (sensitivity {sensitivity:.0%}); of {negatives} of no "
        f"it took {FALSE_POSITIVES} for yes (specificity {specificity:.0%}).",
    )


def test_the_lowest_and_the_highest_site_are_those(single: Report) -> None:
    values = {site: found.accuracy[0] for site, found in SITES.items()}
    low, high = min(values, key=lambda site: values[site]), max(values, key=lambda site: values[site])
    assert (low, high) == ("abbey", "wharf")
    assert said(
        single,
        "Sites differ: abbey has the lowest share right, 58 of 100 test images (95 % interval 41 to 69), and wharf the "
        "highest, 92 of 100 test images (95 % interval 84 to 97).",
    )
    assert said(single, "Ours was right on 77 of 100 test images (95 % interval 68 to 85) of 3 sites.")
    assert said(single, "7.4 MB were sent in 6 rounds")


def interval(found: Bounds) -> str:
    value, low, high = found
    assert low < value < high
    return f"{value:.3f} [{low:.3f}, {high:.3f}]"


def test_every_figure_of_a_site_is_its_own(single: Report) -> None:
    table = tables_of_markdown(to_markdown(single))["Figures at each site"]
    assert list(table) == list(SITES)
    for site, found in SITES.items():
        assert table[site] == {
            "test images": str(found.n),
            "accuracy [95 %]": interval(found.accuracy),
            "balanced accuracy [95 %]": f"{0.5 + found.n / 100:.3f}",
            "AUC [95 %]": interval(found.auc),
            "sensitivity": f"{found.recall:.3f}",
            "specificity": f"{found.n / 64:.3f}",
            "ECE": f"{found.ece:.3f}",
        }


def test_a_site_is_drawn_with_the_interval_of_its_accuracy(single: Report) -> None:
    wanted = "; ".join(
        f"{site} {100 * value:.0f} % ({100 * low:.0f} % to {100 * high:.0f} %)"
        for site, (value, low, high) in ((site, found.accuracy) for site, found in SITES.items())
    )
    assert f"Dots with intervals of accuracy: {wanted}." in to_html(single)
    assert f"Dots with intervals of accuracy: {wanted}." in to_markdown(single, "")
    blocks = next(section.blocks for section in single.sections if section.id == "by-site")
    (chart,) = (block for block in blocks if isinstance(block, Figure))
    whiskers = [
        [float(x) for x in re.findall(r"[ML]([\d.]+) ", shape)]
        for shape in map(str, chart.plot.drawn)
        if "whisker" in shape
    ]
    for drawn, found in zip(whiskers, SITES.values(), strict=True):
        assert drawn == pytest.approx([chart.plot.x_pixel(edge) for edge in found.accuracy[1:]], abs=0.06)


def test_sizes_classes_and_the_confusion_matrix_are_counted(single: Report) -> None:
    tables = tables_of_markdown(to_markdown(single))
    sizes = tables["Sites and their images"]
    assert sizes["abbey"] == {
        "train": "61",
        "validation": "8",
        "test": "17",
        "no": "20 (23 %)",
        "yes": "66 (77 %)",
        "class shift": "28 %",
    }
    assert sizes["all"]["train"] == "264"
    assert sizes["all"]["yes"] == "179 (49 %)"
    assert tables["Confusion matrix: all sites"] == {
        "is no": {"says no": "41 (82 %)", "says yes": "9 (18 %)"},
        "is yes": {"says no": "7 (35 %)", "says yes": "13 (65 %)"},
    }
    calibration = tables["Calibration"]
    assert {name: row["ECE"] for name, row in calibration.items()} == {
        "mill": "0.051",
        "abbey": "0.127",
        "wharf": "0.023",
        "all": "0.064",
    }
    assert calibration["abbey"]["images"] == "17"
    assert calibration["abbey"]["right"] == "58 %"


def test_the_table_of_methods_has_means_deviations_and_ordered_intervals(compared: Report) -> None:
    table = tables_of_markdown(to_markdown(compared))["All methods"]
    for name, values in ACCURACY.items():
        half = stats.t.ppf(0.975, 3) * stdev(values) / 2
        for column, shift in {"accuracy": 0.0, "balanced accuracy": -0.04, "AUC": 0.07}.items():
            mean = fmean(values) + shift
            low, high = max(0.0, mean - half), min(1.0, mean + half)
            assert low < high
            assert table[name][column] == f"{mean:.3f} ± {stdev(values):.3f} [{low:.3f}, {high:.3f}]"
        assert table[name]["worst-served site (AUC)"] == f"wharf {fmean(values) - 2 / 9:.3f}"
        assert table[name]["drift"] == f"{0.3 + len(name) / 10:.2f}"
        assert table[name]["MB sent"] == f"{(2.5 + 0.5) * len(name):.1f}"
        assert table[name]["s"] == f"{10 * len(name):.1f}"
        assert table[name]["paper"] == ("0.77" if name == "Theirs" else "–")


def p_value(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def paired(a: str, b: str) -> tuple[list[float], float, float]:
    differences = [x - y for x, y in zip(ACCURACY[a], ACCURACY[b], strict=True)]
    return differences, stats.ttest_rel(ACCURACY[a], ACCURACY[b]).pvalue, stats.wilcoxon(differences).pvalue


def test_each_p_stands_in_the_column_of_its_test(compared: Report) -> None:
    table = tables_of_markdown(to_markdown(compared))["Accuracy against Ours"]
    tests = {name: paired(name, "Ours") for name in ("Theirs", "Alone")}
    corrected = dict(zip(tests, correct_holm([p for _, p, _ in tests.values()]), strict=True))
    for name, (differences, p, ranked) in tests.items():
        mean, half = fmean(differences), stats.t.ppf(0.975, 3) * stdev(differences) / 2
        assert p_value(p) != p_value(ranked)
        assert table[name] == {
            "difference [95 %]": f"{mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}]",
            "d": f"{mean / stdev(differences):+.1f}",
            "p (Wilcoxon)": p_value(ranked),
            "p (paired t-test)": p_value(p),
            "p (Holm)": p_value(corrected[name]),
        }


def points(value: float) -> str:
    return f"{100 * value:+.1f}".replace("-", "−")


def test_every_pair_is_tested_once_and_marked_by_its_test(compared: Report) -> None:
    tables = tables_of_markdown(to_markdown(compared))
    pairs = [("Ours", "Theirs"), ("Ours", "Alone"), ("Theirs", "Alone")]
    tests = [paired(*pair) for pair in pairs]
    for pair, (differences, p, ranked), corrected in zip(
        pairs, tests, correct_holm([p for _, p, _ in tests]), strict=True
    ):
        row = tables["Pairs of methods, percentage points of accuracy"][" − ".join(pair)]
        low, high = re.fullmatch(r"(\S+) to (\S+)", row["95 % interval"]).groups()  # type: ignore[union-attr]
        assert float(low.replace("−", "-")) < float(high.replace("−", "-"))
        assert [row[name] for name in ("difference", "p", "p (Holm)", "Wilcoxon p")] == [
            points(fmean(differences)),
            *map(p_value, (p, corrected, ranked)),
        ]
        mark = {True: " ▲", False: ""}[corrected < 0.05]
        cells = tables["Differences in accuracy, percentage points"]
        assert cells[pair[0]][pair[1]] == points(fmean(differences)) + mark
        assert cells[pair[1]][pair[0]] == points(-fmean(differences)) + mark.replace("▲", "▼")


def test_gains_are_against_training_alone_at_that_site(compared: Report) -> None:
    table = tables_of_markdown(to_markdown(compared))["Accuracy against training alone"]
    for place, site in enumerate(SITES):
        alone = [value - place / 10 for value in ACCURACY["Alone"]]
        assert table[site]["Alone"] == f"{fmean(alone):.3f} ± {stdev(alone):.3f}"
        for name in ("Ours", "Theirs"):
            assert table[site][name].split()[0] == points(fmean(paired(name, "Alone")[0]))


def test_claims_are_decided_by_their_own_test(compared: Report) -> None:
    table = tables_of_markdown(to_markdown(compared))["The paper's claims, tested"]
    first, second = table["ours is better"], table["alone ranks better"]
    p, other = paired("Ours", "Theirs")[1], paired("Alone", "Ours")[1]
    corrected = correct_holm([p, other])
    assert (first["p"], first["p (Holm)"], first["our data"]) == (p_value(p), p_value(corrected[0]), "**supported**")
    assert (second["p"], second["p (Holm)"], second["paper"]) == (p_value(other), p_value(corrected[1]), "+0.3")
    assert second["our data"] == ("**contradicted**" if corrected[1] < 0.05 else "**suggested against**")
    assert first["ours"] == f"Ours {fmean(ACCURACY['Ours']):.3f}, Theirs {fmean(ACCURACY['Theirs']):.3f}"


def test_bytes_and_seconds_are_means_over_seeds(compared: Report) -> None:
    table: Mapping[str, Mapping[str, str]] = tables_of_markdown(to_markdown(compared))[
        "Communication and time (mean over seeds)"
    ]
    for name in ACCURACY:
        assert table[name]["MB up"] == f"{2.5 * len(name):.1f}"
        assert table[name]["MB down"] == f"{0.5 * len(name):.1f}"
        assert table[name]["wall-clock"] == f"{10.0 * len(name):.1f} s"


def test_a_drawn_p_is_never_zero() -> None:
    assert sign_flip_p(np.full(50, 2), Stream(1)) > 0
