"""Claims: closed forms of Student's t and of F, other libraries' figures, and what chance alone may decide."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats

from polyclinic import run
from polyclinic.core.errors import RecipeError
from polyclinic.core.rng import Stream
from polyclinic.core.types import Part
from polyclinic.evaluation import claims
from polyclinic.evaluation.claims import CLAIM_METRICS, Claim, format_verdict
from polyclinic.evaluation.comparison import metric_value, pair_by_seed
from polyclinic.evaluation.metrics import METRICS
from polyclinic.evaluation.summary import PartScores, RunSummary, generalisation_gap
from polyclinic.evaluation.task import confusion_of
from polyclinic.reporting.formatting import format_p_value
from polyclinic.reporting.render_markdown import render_table
from polyclinic.reporting.sections.tests import claims_overview
from tests.small import SITES, WEIGHTS, tiny
from tests.summaries import make_headline, make_summary

T_TWO_DEGREES = 4.302653
"""Student's 97.5 % quantile with two degrees of freedom, from a table."""


def runs(values: Sequence[float | None], seeds: Sequence[int] | None = None) -> list[RunSummary]:
    """Summaries of finished runs with this accuracy."""
    pairs = zip(range(len(values)) if seeds is None else seeds, values, strict=True)
    return [make_summary(make_headline(accuracy=found), seed=seed) for seed, found in pairs]


def claim(test: str, methods: Sequence[str] = ("A", "B"), **others: Any) -> Claim:
    return Claim.model_validate({"claim": "A and B", "test": test, "methods": list(methods), **others})


def one(test: str, *values: Sequence[float | None], **others: Any) -> claims.ClaimResult:
    """A single claim on methods A, B, C … with these figures."""
    results = {name: runs(found) for name, found in zip("ABCDEFG", values, strict=False)}
    (found,) = claims.evaluate_claims([claim(test, list(results), **others)], results)
    return found


def differing(mean: float, sd: float) -> tuple[list[float], list[float]]:
    """Two methods on three seeds, whose differences have this mean and standard deviation."""
    base = [0.5, 0.7, 0.6]
    return [b + mean + step * sd for b, step in zip(base, (-1, 0, 1), strict=True)], base


def with_p(p: float, sign: int = 1) -> tuple[list[float], list[float]]:
    """Two methods on three seeds with this p-value: with two degrees of freedom p = 1 − |t| / √(2 + t²)."""
    t = (1 - p) * math.sqrt(2 / (1 - (1 - p) ** 2))
    return differing(sign * t * 0.01 / math.sqrt(3), 0.01)


def draws(*names: str | int, size: int | tuple[int, ...]) -> Any:
    return np.random.default_rng(Stream(7).child(*names).integer()).normal(0.8, 0.05, size)


@pytest.mark.parametrize("n", [2, 3, 5, 20])
def test_higher_is_the_paired_t_test_of_scipy(n: int) -> None:
    a, b = draws("paired", n, size=(2, n))
    assert one("higher", a, b).p == pytest.approx(scipy.stats.ttest_rel(a, b).pvalue, rel=1e-12)
    assert one("lower", a, b).p == one("higher", a, b).p


def test_the_paired_p_value_by_hand() -> None:
    """With one degree of freedom t is Cauchy's, with two its distribution is algebraic: no library is needed."""
    t = statistics.mean([0.03, 0.01]) / (statistics.stdev([0.03, 0.01]) / math.sqrt(2))
    assert one("higher", [0.53, 0.61], [0.5, 0.6]).p == pytest.approx(1 - 2 / math.pi * math.atan(t))
    for p in (0.9, 0.2, 0.05, 0.003):
        assert one("higher", *with_p(p)).p == pytest.approx(p)


def test_a_tie_counts_among_the_tests() -> None:
    results = dict(zip("ABCD", map(runs, (*SAME, *with_p(0.03))), strict=True))
    tie, other = claims.evaluate_claims([claim("higher"), claim("higher", ["C", "D"])], results)
    assert (tie.p, tie.corrected) == (1, 1)
    assert other.corrected == pytest.approx(2 * 0.03)


def test_the_interval_is_students() -> None:
    half = T_TWO_DEGREES * 0.02 / math.sqrt(3)
    found = one("higher", *differing(0.04, 0.02))
    assert found.effect == f"+0.040 [{0.04 - half:+.3f}, {0.04 + half:+.3f}]"
    assert found.figures == pytest.approx((0.64, 0.6))


def test_of_several_methods_it_is_the_one_way_analysis_of_variance() -> None:
    """Means 2, 3, 6 within which everything has variance 1: F = 13, and with two degrees of freedom above it
    p = (1 + 2F / 6)^(−6 / 2)."""
    found = one("effect", [0.1, 0.2, 0.3], [0.2, 0.3, 0.4], [0.5, 0.6, 0.7])
    assert found.p == pytest.approx((1 + 13 / 3) ** -3)
    assert found.effect == "range 0.400, F = 13.00"
    groups = [draws("anova", size=4), draws("anova", 2, size=6), draws("anova", 3, size=3)]
    assert one("no effect", *groups).p == pytest.approx(scipy.stats.f_oneway(*groups).pvalue, rel=1e-12)


def test_of_two_methods_it_is_welchs_t_test() -> None:
    a, b = draws("welch", size=4), draws("welch", 2, size=7)
    assert one("effect", a, b).p == pytest.approx(scipy.stats.ttest_ind(a, b, equal_var=False).pvalue, rel=1e-12)
    found = one("effect", [0.1, 0.2, 0.3], [0.5, 0.6, 0.7])
    t = 0.4 / math.sqrt(0.01 / 3 + 0.01 / 3)
    tail = 3 / 8 * t / math.sqrt(1 + t**2 / 4) * (1 - t**2 / (12 * (1 + t**2 / 4)))  # four degrees of freedom
    assert found.p == pytest.approx(1 - 2 * tail)
    assert found.effect.startswith("-0.400 [")
    assert found.effect.endswith(f", t = {-t:.2f}")


def test_holms_correction_of_a_textbook() -> None:
    """p = 0.01, 0.04, 0.03, 0.005 become 0.03, 0.06, 0.06, 0.02; what has no p-value does not count."""
    results, said = {"X": runs([0.5, 0.6]), "Y": runs([0.5, 0.6])}, [claim("equal", ["X", "Y"])]
    for number, p in enumerate((0.01, 0.04, 0.03, 0.005)):
        names = [f"A{number}", f"B{number}"]
        results |= dict(zip(names, map(runs, with_p(p)), strict=True))
        said += [claim("higher", names), claim("higher", [names[0], "never run"])]
    found = [t for t in claims.evaluate_claims(said, results) if not math.isnan(t.p)]
    assert [t.p for t in found] == pytest.approx([0.01, 0.04, 0.03, 0.005])
    assert [t.corrected for t in found] == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert [t.verdict for t in found] == ["supported", "suggested", "suggested", "supported"]


SURE, UNSURE, SAME = with_p(0.01), with_p(0.2), ([0.5, 0.7, 0.6], [0.5, 0.7, 0.6])
FIXED = [0.5] * 3, [0.4] * 3
"""No seed makes a difference: so it is with bytes."""
APART = [0.1, 0.11, 0.12], [0.5, 0.51, 0.52]
TABLE: list[tuple[str, tuple[list[float], list[float]], str]] = [
    ("higher", SURE, "supported"),
    ("higher", SURE[::-1], "contradicted"),
    ("higher", UNSURE, "not decided"),
    ("higher", SAME, "not decided"),
    ("higher", FIXED, "supported"),
    ("lower", SURE, "contradicted"),
    ("lower", SURE[::-1], "supported"),
    ("lower", UNSURE, "not decided"),
    ("lower", SAME, "not decided"),
    ("lower", FIXED, "contradicted"),
    ("equal", SAME, "supported"),
    ("equal", FIXED, "contradicted"),
    ("equal", FIXED[::-1], "contradicted"),
    ("effect", APART, "supported"),
    ("effect", UNSURE, "not decided"),
    ("effect", SAME, "not decided"),
    ("effect", FIXED, "supported"),
    ("effect", ([0.5] * 3, [0.5] * 3), "not decided"),
    ("no effect", APART, "contradicted"),
    ("no effect", UNSURE, "no effect seen"),
    ("no effect", FIXED, "contradicted"),
    ("no effect", ([0.5] * 3, [0.5] * 3), "no effect seen"),
]


@pytest.mark.parametrize(("test", "values", "verdict"), TABLE)
def test_verdicts(test: str, values: tuple[list[float], list[float]], verdict: str) -> None:
    assert format_verdict(one(test, *values)) == verdict


@pytest.mark.parametrize(
    ("test", "values", "verdict"),
    [
        ("higher", with_p(0.03), "suggested"),
        ("higher", with_p(0.03, -1), "suggested against"),
        ("lower", with_p(0.03), "suggested against"),
        ("effect", ([0.1, 0.2, 0.3], [0.35, 0.45, 0.55]), "suggested"),
        ("no effect", ([0.1, 0.2, 0.3], [0.35, 0.45, 0.55]), "suggested against"),
    ],
)
def test_what_does_not_outlive_the_correction_is_only_suggested(
    test: str, values: tuple[list[float], list[float]], verdict: str
) -> None:
    results = dict(zip("ABCD", map(runs, (*values, *UNSURE)), strict=True))
    first, _ = claims.evaluate_claims([claim(test), claim("higher", ["C", "D"])], results)
    assert (first.p < 0.05 < first.corrected, first.verdict) == (True, verdict)
    (alone,) = claims.evaluate_claims([claim(test)], results)
    assert alone.verdict == {"suggested": "supported", "suggested against": "contradicted"}[verdict]


@pytest.mark.parametrize("test", ["higher", "lower", "equal", "effect", "no effect"])
def test_what_cannot_be_tested_is_not_decided(test: str) -> None:
    undefined = one(test, [0.5, None, 0.6], [0.5, 0.4, 0.3])
    single = one(test, [0.9], [0.1])
    for found in (undefined, single):
        assert (format_verdict(found), found.effect) == ("not decided", "–")
        assert math.isnan(found.p)
        assert math.isnan(found.corrected)
    assert single.figures == (0.9, 0.1)
    assert undefined.figures == pytest.approx((0.55, 0.4))


@pytest.mark.parametrize("test", ["higher", "lower", "equal", "effect", "no effect"])
def test_a_method_that_was_not_run(test: str) -> None:
    (found,) = claims.evaluate_claims([claim(test)], {"A": runs([0.1, 0.2])})
    assert (found.verdict, found.figures) == ("not run", ())


@pytest.mark.parametrize(
    ("mean", "sd", "verdict"),
    [
        (0.0, 0.001, "supported"),
        (0.015, 0.001, "supported"),
        (0.025, 0.001, "contradicted"),
        (0.1, 0.001, "contradicted"),
        (-0.1, 0.001, "contradicted"),
        (0.02, 0.01, "not decided"),
        (0.0, 0.1, "not decided"),
    ],
)
def test_equal_means_that_the_interval_lies_within_the_margin(mean: float, sd: float, verdict: str) -> None:
    half, margin = T_TWO_DEGREES * sd / math.sqrt(3), 0.02
    inside, outside = abs(mean) + half <= margin, abs(mean) - half > margin
    assert verdict == ("supported" if inside else "contradicted" if outside else "not decided")
    found = one("equal", *differing(mean, sd), margin=margin)
    assert found.verdict == verdict
    assert found.effect.endswith("margin ±0.02")


def test_chance_alone_is_seldom_believed() -> None:
    """Two hundred papers with ten claims each, none of them true."""
    families, size = 200, 10
    names = [f"{side}{number}" for number in range(size) for side in "AB"]
    said = [claim("higher", names[2 * number : 2 * number + 2]) for number in range(size)]
    wrong, hinted, against = 0, 0, 0
    for family in range(families):
        values = draws("null", family, size=(2 * size, 5))
        found = claims.evaluate_claims(said, {name: runs(v) for name, v in zip(names, values, strict=True)})
        wrong += any(t.verdict in ("supported", "contradicted") for t in found)
        hinted += sum(t.verdict in ("supported", "suggested") for t in found)
        against += sum(t.verdict in ("contradicted", "suggested against") for t in found)
    assert wrong <= scipy.stats.binom.ppf(0.999, families, 0.05)
    few, many = scipy.stats.binom.ppf([0.001, 0.999], families * size, 0.025)
    assert few <= hinted <= many
    assert few <= against <= many


def test_seeds_are_paired_whatever_was_lost_on_the_way() -> None:
    a, b = runs([0.9, 0.1, 0.8, 0.6], [0, 1, 2, 3]), runs([0.7, 0.4, 0.65], [3, 0, 2])
    assert pair_by_seed(a, b, "accuracy") == ([0.9, 0.8, 0.6], [0.4, 0.65, 0.7])
    (found,) = claims.evaluate_claims([claim("higher")], {"A": a, "B": b})
    assert found.p == pytest.approx(scipy.stats.ttest_rel([0.9, 0.8, 0.6], [0.4, 0.65, 0.7]).pvalue)
    (unpaired,) = claims.evaluate_claims([claim("higher")], {"A": a, "B": runs([0.1, 0.2, 0.3], [1, 7, 8])})
    assert unpaired.verdict == "not decided", "they share one seed"


def test_chances_are_never_said_to_be_nought() -> None:
    assert [format_p_value(p) for p in (0.0, 1e-9, 0.0123, 1.0, math.nan)] == [
        "< 0.001",
        "< 0.001",
        "0.012",
        "1.000",
        "–",
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run") / "out"


@pytest.fixture(scope="module")
def summary(folder: Path) -> RunSummary:
    return run(tiny(), folder).summary


def hit_rate(scores: PartScores) -> float:
    table = np.array(confusion_of(scores))
    return float(np.trace(table) / table.sum())


def test_metrics_of_all_images_and_of_one_hospital(summary: RunSummary) -> None:
    assert metric_value(summary, "accuracy") == pytest.approx(hit_rate(summary.merged["global"]["test"]))
    for site in SITES:
        assert metric_value(summary, "accuracy", site) == pytest.approx(hit_rate(summary.sites[site]["global"]["test"]))
    assert all(math.isfinite(metric_value(summary, metric)) for metric in METRICS)
    assert math.isnan(metric_value(summary, "accuracy", "a hospital that is not there"))


def test_the_gap_is_that_of_the_hospitals_by_their_images(summary: RunSummary) -> None:
    def pooled(part: Part) -> float:
        found = [summary.sites[site]["global"][part] for site in SITES]
        return sum(row.value("accuracy") * row.n for row in found) / sum(row.n for row in found)

    assert metric_value(summary, "gap") == pytest.approx(pooled("train") - pooled("validation"))
    for site in SITES:
        assert metric_value(summary, "gap", site) == pytest.approx(
            generalisation_gap(summary.sites[site]["global"], "accuracy")
        )
    assert math.isnan(metric_value(summary, "gap", "a hospital that is not there"))


def test_drift_is_read_from_the_rounds(summary: RunSummary, folder: Path) -> None:
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    moved = {s: [e["drift"] for e in events if e["event"] == "train" and e["site"] == s] for s in SITES}
    assert {len(found) for found in moved.values()} == {2}
    for site in SITES:
        assert metric_value(summary, "drift", site) == pytest.approx(statistics.mean(moved[site]))
    everything = [distance for found in moved.values() for distance in found]
    assert metric_value(summary, "drift") == pytest.approx(statistics.mean(everything))
    assert math.isnan(metric_value(summary, "drift", "a hospital that is not there"))


def test_megabytes_and_seconds_are_read_from_the_ledger(summary: RunSummary, folder: Path) -> None:
    ledger = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    notes = [note for row in ledger for note in (row["sites"].values() if isinstance(row.get("sites"), dict) else ())]
    counted = sum(note.get("up", 0) + note.get("down", 0) for note in notes) / 1e6
    assert metric_value(summary, "megabytes") == pytest.approx(counted)
    reckoned = 2 * len(SITES) * 2 * WEIGHTS * 4 / 1e6
    assert counted > reckoned, "twice sites × rounds × weights, and what evaluations take"
    assert metric_value(summary, "seconds") == pytest.approx(sum(row.get("seconds", 0) for row in ledger))


def test_models_that_stay_at_home_are_judged_there() -> None:
    local, pooled = (run(tiny(algorithm=name)).summary for name in ("local", "centralised"))
    site = SITES[0]
    assert metric_value(local, "gap", site) == pytest.approx(
        generalisation_gap(local.sites[site]["personal"], "accuracy")
    )
    assert metric_value(local, "accuracy", site) == pytest.approx(hit_rate(local.sites[site]["personal"]["test"]))
    assert math.isnan(metric_value(pooled, "drift")), "in one place nothing drifts"
    (found,) = claims.evaluate_claims([claim("higher", metric="drift")], {"A": [local, local], "B": [pooled, pooled]})
    assert found.verdict == "not decided"


GOOD: dict[str, Any] = {"claim": "A is better", "test": "higher", "methods": ["FedAvg", "FedProx"]}
METHODS = {"FedAvg": {}, "FedProx": {"algorithm": "fedprox"}, "Local": {"algorithm": "local"}}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"methods": ["FedAvg", "FedProxx"]}, "claims: there is no method 'FedProxx' (did you mean 'FedProx'?)"),
        ({"methods": ["FedAvg"]}, "claims.0.methods is ['FedAvg'], but"),
        ({"methods": ["FedAvg", "FedAvg"]}, "a method cannot be compared with itself"),
        ({"methods": list(METHODS)}, "'higher' compares two methods; name two, or test for an effect"),
        ({"methods": list(METHODS), "test": "equal"}, "'equal' compares two methods"),
        ({"test": "bigger"}, "claims.0.test is 'bigger', but should be 'higher', 'lower'"),
        (
            {"metric": "acuracy"},
            "is 'acuracy', but there is no such metric (did you mean 'accuracy'?); there are: loss",
        ),
        ({"metric": "xyz"}, "claims.0.metric is 'xyz', but there is no such metric; there are: loss"),
        ({"metric": "megabytes", "site": "site-1"}, "megabytes are counted for whole runs; leave site out"),
        ({"metric": "seconds", "site": "site-1"}, "seconds are counted for whole runs; leave site out"),
        ({"margin": 0}, "claims.0.margin is 0"),
        ({"margin": math.inf}, "claims.0.margin is inf"),
        ({"metrc": "auc"}, "there is no key 'claims.metrc' (did you mean 'metric'?)"),
    ],
)
def test_a_claim_that_cannot_be_tested_is_refused_in_one_sentence(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(RecipeError) as caught:
        tiny(methods=METHODS, claims=[GOOD | changes])
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_figure_and_any_hospital_can_be_claimed() -> None:
    assert set(CLAIM_METRICS) == {
        *METRICS,
        "gap",
        "drift",
        "converged",
        "forgotten",
        "megabytes",
        "seconds",
        "site_classifier_accuracy",
    }
    said = [GOOD | {"metric": metric} for metric in CLAIM_METRICS] + [
        GOOD | {"site": "St. Mary's | North", "metric": "gap"}
    ]
    said.append(GOOD | {"test": "effect", "methods": list(METHODS)})
    assert len(tiny(methods=METHODS, claims=said, evaluate__forgetting=True).claims) == len(said)


def cells(line: str) -> list[str]:
    return line.replace("\\|", "¦").strip("| ").split(" | ")


def rows_of(tables: Mapping[str, Sequence[claims.ClaimResult]]) -> list[list[str]]:
    """The overview as Markdown, by cell."""
    found = claims_overview(tables)
    assert found is not None
    return [cells(line) for line in render_table(found).splitlines() if line.startswith("|") and "---" not in line]


def test_bars_and_line_ends_do_not_break_the_overview() -> None:
    text = {"claim": "a|b\nis   better", "paper": "1|2"}
    results = {"A|1": runs([0.1, 0.2]), "B": runs([0.1, 0.2])}
    found = claims.evaluate_claims([claim("higher", ["A|1", "B"], **text)], results)
    head, *body = rows_of({"x|y": found, "z": found[:1]})
    assert head == ["the paper's claim", "x¦y", "z"]
    assert body == [["a¦b is better", "not decided", "not decided"]]


def test_the_overview_has_every_claim_once_and_leaves_hospitals_to_the_tables() -> None:
    results = dict(zip("AB", map(runs, SURE), strict=True))
    says = [claim("higher").model_copy(update={"claim": text}) for text in ("first", "second")]
    nearby = claim("lower", site="site-1").model_copy(update={"claim": "first"})
    tables = {"S1": claims.evaluate_claims([*says, nearby], results), "S2": claims.evaluate_claims(says[1:], {})}
    assert rows_of(tables)[1:] == [
        ["first", "supported", "–"],
        ["second", "supported", "not run"],
    ]
    assert claims_overview({"S1": claims.evaluate_claims([nearby], results)}) is None
    assert claims_overview({}) is None
