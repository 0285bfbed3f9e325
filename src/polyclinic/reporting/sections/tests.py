"""Statistical tests: every pair of methods, every method against the first, and the paper's claims."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from polyclinic.core import SiteId
from polyclinic.evaluation.claims import ClaimResult, evaluate_claims, format_verdict
from polyclinic.evaluation.comparison import MIN_SEEDS, UNTESTED, PairwiseTest, metric_value
from polyclinic.evaluation.statistics import LEVEL, correct_bonferroni, correct_holm, one_way_anova
from polyclinic.reporting.blocks import Block, Cell, Folded, Paragraph, Questions, Section, Table
from polyclinic.reporting.formatting import format_interval, format_number, format_p_value, format_points, format_signed
from polyclinic.reporting.report_data import ReportData

PAIRED_HEAD = ("difference [95 %]", "d", "p (Wilcoxon)", "p (paired t-test)")
MARKS: Mapping[int, Literal["", "better", "worse"]] = {1: "better", 0: "", -1: "worse"}
QUESTION: Questions = {"Statistician": "Is it more than chance?"}


def tests_section(data: ReportData) -> Section | None:
    """Every pair of methods, corrected together."""
    if data.is_single:
        return None
    known = [pair for pair in data.pairs if not math.isnan(pair.p)]
    title = "Statistical tests between methods"
    if not known:
        return Section("tests", title, [Paragraph(f"No pair of methods can be tested: {UNTESTED}.")], QUESTION)
    blocks: list[Block] = [_difference_matrix(data), Paragraph(_describe_tests(known), "note")]
    blocks += [Paragraph(words) for words in _describe_anova(data)]
    blocks.append(Folded("Every pair with its interval and tests", [_pair_table(known)]))
    return Section("tests", title, blocks, QUESTION)


def _describe_anova(data: ReportData) -> Iterator[str]:
    """A one-way analysis of variance over three methods or more with three seeds each."""
    values = [[metric_value(run, data.main_metric) for run in method.summaries] for method in data.methods]
    if len(values) > 2 and min(map(len, values)) >= MIN_SEEDS and any(np.ptp(found) > 0 for found in values):
        statistic, p = one_way_anova(values)
        shown = format_p_value(p) if p < 0.001 else f"= {format_p_value(p)}"
        yield f"One-way ANOVA over all methods: F = {statistic:.2f}, p {shown}."


def _describe_tests(known: Sequence[PairwiseTest]) -> str:
    seeds = any("seeds" in pair.over for pair in known)
    test = (
        "Paired t-tests over seeds (Wilcoxon's signed-rank tests beside them in the list below)"
        if seeds
        else "Each patient's difference in images right, its sign flipped at random (two-sided), first seed"
    )
    only = "" if seeds else " One seed: this says how sure we are of these trained models, not of training again."
    return (
        f"Accuracy of the row minus that of the column, in percentage points. {test}; ▲ higher, ▼ lower beyond chance: "
        f"p < {LEVEL:g} after Holm's correction for all {len(known)} pairs. No mark: not decided, which is no proof "
        f"that two are alike.{only}"
    )


def difference_cell(test: PairwiseTest) -> Cell:
    """A difference in percentage points, marked only where its test found it."""
    return Cell(format_points(test.difference), mark=MARKS[test.verdict])


def _difference_matrix(data: ReportData) -> Table:
    found = {(pair.a, pair.b): pair for pair in data.pairs}
    found |= {(pair.b, pair.a): replace(pair, difference=-pair.difference) for pair in data.pairs}
    names = [method.name for method in data.methods]
    rows = [[a, *(difference_cell(found[a, b]) if (a, b) in found else "" for b in names)] for a in names]
    return Table("Differences in accuracy, percentage points", ["row − column", *names], rows)


def _pair_table(known: Sequence[PairwiseTest]) -> Table:
    seeds = any("seeds" in pair.over for pair in known)
    more = ["Wilcoxon p", "effect d"] if seeds else []
    rows = [
        [
            f"{pair.a} − {pair.b}",
            *difference_cells(pair),
            *([format_p_value(pair.wilcoxon_p), format_number(pair.cohens_d, 2)] if seeds else []),
            pair.over,
        ]
        for pair in known
    ]
    return Table(
        "Pairs of methods, percentage points of accuracy",
        ["pair", "difference", "95 % interval", "p", "p (Holm)", *more, "over"],
        rows,
    )


def difference_cells(pair: PairwiseTest) -> list[str]:
    """The difference, its interval, p, and p after Holm's correction."""
    return [
        format_points(pair.difference),
        format_interval(pair.low, pair.high, format_points),
        format_p_value(pair.p),
        format_p_value(pair.corrected_p),
    ]


def against_first_section(data: ReportData) -> Section | None:
    """Every other method against the first, seed by seed: overlapping intervals say little about a difference."""
    first, *others = data.methods
    tests = _test_over_seeds(data, [(other.name, first.name, None) for other in others], data.main_metric, correct_holm)
    if not tests:
        return None
    rows = _paired_rows({test.a: test for test in tests})
    count = sum(not math.isnan(test.corrected_p) for test in tests)
    table = Table(f"{data.label(data.main_metric)} against {first.name}", ["method", *PAIRED_HEAD, "p (Holm)"], rows)
    return Section(
        "against-first",
        f"Against {first.name}, seed by seed",
        [
            table,
            Paragraph(
                "d: Cohen's, of pairs. Of n seeds Wilcoxon's p is never below 2^(1 − n), 0.062 of five. Holm: "
                f"corrected for the {count} p-values of this table.",
                "note",
            ),
        ],
        QUESTION,
    )


def _test_over_seeds(
    data: ReportData,
    pairs: Sequence[tuple[str, str, SiteId | None]],
    metric: str,
    correct: Callable[[Sequence[float]], Sequence[float]],
) -> list[PairwiseTest]:
    """Tests of the pairs with enough seeds. A pair whose seeds are all equal counts in no correction."""
    tests = {pair: data.comparison.compare_pair(*pair, metric=metric) for pair in pairs}
    tests = {pair: test for pair, test in tests.items() if "seeds" in test.over}
    differing = [pair for pair, test in tests.items() if test.low or test.high]
    tests |= dict(zip(differing, data.comparison.compare_pairs(differing, metric, correct), strict=True))
    return list(tests.values())


def _paired_rows(tests: Mapping[str, PairwiseTest]) -> list[list[str]]:
    return [
        [
            name,
            f"{test.difference:+.3f} [{test.low:+.3f}, {test.high:+.3f}]",
            format_signed(test.cohens_d, 1),
            format_p_value(test.wilcoxon_p),
            format_p_value(test.p),
            format_p_value(test.corrected_p),
        ]
        for name, test in tests.items()
    ]


def claims_section(data: ReportData) -> Section | None:
    """The paper's claims, and the pairs behind each analysis of variance."""
    if not (found := evaluate_claims(data.claims, data.comparison.results)):
        return None
    table = Table(
        "The paper's claims, tested",
        ["the paper's claim", "paper", "ours", "difference [95 %]", "p", "p (Holm)", "our data"],
        [_claim_row(result) for result in found],
    )
    count = sum(not math.isnan(result.p) for result in found)
    return Section(
        "claims",
        "The paper's claims, tested",
        [
            table,
            Paragraph(
                "higher, lower: paired t-test over seeds; equal: the 95 % interval lies within the margin; effect: "
                f"one-way ANOVA, or Welch's t-test for two. Supported, contradicted: p < {LEVEL:g} also after Holm's "
                f"correction for the {count} p-values of this table; suggested: only before it. "
                '"Not decided" is no proof of the opposite.',
                "note",
            ),
            *_pairs_behind(data),
        ],
        {"Statistician": "Do the paper's claims hold?"},
    )


def _claim_row(result: ClaimResult) -> list[str | Cell]:
    claim = result.claim
    metric = "" if claim.metric == "accuracy" else f"{claim.metric} "
    place = f"{claim.site}: " if claim.site else ""
    ours = ", ".join(f"{name} {format_number(v)}" for name, v in zip(claim.methods, result.figures, strict=False))
    shown = f"{place}{metric}{ours}" if ours else "–"
    p_values = [format_p_value(result.p), format_p_value(result.corrected)]
    return [claim.claim, claim.paper or "–", shown, result.effect, *p_values, Cell(format_verdict(result), strong=True)]


def _pairs_behind(data: ReportData) -> list[Block]:
    """After an analysis of variance: which of its methods differ."""
    blocks: list[Block] = []
    for claim in data.claims:
        names = [name for name in claim.methods if name in data.comparison.results]
        if claim.test not in ("effect", "no effect") or len(claim.methods) < 3:
            continue
        pairs = [(a, b, claim.site) for a, b in itertools.combinations(names, 2)]
        tests = _test_over_seeds(data, pairs, claim.metric, correct_bonferroni)
        if rows := _paired_rows({f"{test.a} − {test.b}": test for test in tests}):
            metric = data.label(claim.metric) if claim.metric in data.task.metric_names else claim.metric
            blocks.append(
                Table(
                    f'The pairs behind "{claim.claim}" ({metric}, seed by seed)',
                    ["pair", *PAIRED_HEAD, "p (Bonferroni)"],
                    rows,
                )
            )
    return blocks


def claims_overview(tables: Mapping[str, Sequence[ClaimResult]]) -> Table | None:
    """Every claim that is not about a single site, with its verdict in each table; None without claims."""
    sentences = dict.fromkeys(r.claim.claim for found in tables.values() for r in found if r.claim.site is None)
    if not sentences:
        return None
    verdicts = [{r.claim.claim: format_verdict(r) for r in found if r.claim.site is None} for found in tables.values()]
    rows = [[claim, *(found.get(claim, "–") for found in verdicts)] for claim in sentences]
    return Table("", ["the paper's claim", *tables], rows)
