"""The report of a comparison, as Markdown."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from polyclinic.evaluation import claims
from polyclinic.evaluation.comparison import (
    SHOWN,
    Comparison,
    Runs,
    format_decimal,
    format_estimate,
    format_traffic,
    markdown_row,
    mean_of_known,
    metric_value,
)
from polyclinic.evaluation.metrics import METRICS
from polyclinic.evaluation.statistics import compare_paired, correct_bonferroni, correct_holm
from polyclinic.reporting.markdown.privacy import privacy_sections
from polyclinic.reporting.markdown.server import server_sections

FEWEST_SEEDS = 3
"""With fewer, a paired test says nothing."""
MOST_HOSPITALS = 10
TITLES = {"accuracy": "Accuracy", "balanced_accuracy": "Balanced accuracy", "auc": "AUC", "pr_auc": "PR-AUC"}
TESTED = ("difference [95 %]", "d", "p (Wilcoxon)", "p (paired t-test)")
WORTH = 0.99
"""Below this share of the first method's bytes a method is said to send less."""


def markdown(comparison: Comparison) -> str:
    """The report of a comparison: table, notes, hospitals, pictures, versions."""
    first = next(iter(comparison.results.values()))[0]
    out = comparison.folder
    drawn = ("curves.png", "forgetting.png", "auc.png")
    pictures = [name for name in drawn if out is not None and (out / name).exists()]
    versions = ", ".join(f"{name} {number}" for name, number in first["versions"].items())
    text = [
        f"# {comparison.title}",
        comparison.about,
        f"{first['data']} data, {_sizes(first['model'])}. Figures on {comparison.judged_on} together; in brackets the "
        f"95 % interval over {comparison.interval_description}.",
        "\n".join(_table(comparison)),
        "\n".join(_differences(comparison)),
        " ".join(_notes(comparison)),
        *server_sections(comparison),
        *privacy_sections(comparison),
        *_claims(comparison),
        *_pairs(comparison),
        *_by_hospital(comparison),
        *_gaps(comparison),
        *_costs(comparison),
        "## Hospitals (first seed)",
        "\n".join(_hospitals(first["hospitals"])),
        *(f"![{name.removesuffix('.png')}]({name})" for name in pictures),
        f"Versions: {versions}.",
    ]
    return "\n\n".join(block for block in text if block) + "\n"


def _sizes(model: Mapping[str, Any]) -> str:
    """The network, or each cluster's."""
    return ", ".join(
        f"{f'cluster {cluster}: ' if cluster else ''}{one['name']} ({one['parameters']:,} parameters, "
        f"{one['flops_per_step'] / 1e9:.2g} GFLOP a training step)"
        for cluster, one in (model.get("clusters") or {"": model}).items()
    )


def _table(comparison: Comparison) -> Iterator[str]:
    head = ["method", "rounds", "accuracy", "balanced accuracy", "AUC", "worst-served hospital (AUC)", "drift"]
    head += ["MB sent", "s", *(["paper"] if comparison.paper else [])]
    yield markdown_row(head)
    yield "|" + "---|" * len(head)
    for line in comparison.lines:
        cells = [line.name, str(comparison.results[line.name][0]["rounds"])]
        cells += [format_estimate(line.figures[metric]) for metric in SHOWN]
        cells += [
            f"{line.worst_site} {format_decimal(line.worst_auc)}",
            format_decimal(line.drift, 2),
            format_traffic(line),
        ]
        cells += [f"{line.seconds:.1f}", *([comparison.paper.get(line.name, "–")] if comparison.paper else [])]
        yield markdown_row(cells)


def _hospitals(hospitals: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield markdown_row(["hospital", "train", "validation", "test", "classes"])
    yield "|" + "---|" * 5
    for site in hospitals:
        counts = ", ".join(f"{name} {count}" for name, count in site["classes"].items())
        yield markdown_row([site["site"], str(site["train"]), str(site["validation"]), str(site["test"]), counts])


def _claims(comparison: Comparison) -> list[str]:
    found = claims.evaluate_claims(comparison.claims, comparison.results)
    if not found:
        return []
    tests = sum(not math.isnan(one.p) for one in found)
    note = (
        "higher, lower: paired t-test over seeds; equal: the 95 % interval lies within the margin; effect: one-way "
        "ANOVA, or Welch's t-test for two. "
        f"Supported, contradicted: p < {claims.LEVEL:g} also after Holm's correction for the {tests} p-values of "
        'this table; suggested: only before it. "Not decided" is no proof of the opposite.'
    )
    return ["## The paper's claims, tested", "\n".join(claims.claims_table(found)), note]


def _pairs(comparison: Comparison) -> list[str]:
    """After an analysis of variance: which of its methods differ."""
    sections = []
    for claim in comparison.claims:
        if claim.test not in ("effect", "no effect") or len(claim.methods) < 3:
            continue
        runs = {name: comparison.results[name] for name in claim.methods if name in comparison.results}
        values = {
            f"{a} − {b}": claims.pair_by_seed(runs[a], runs[b], claim.metric, claim.site)
            for a, b in itertools.combinations(runs, 2)
        }
        body, _ = _tests(values, correct_bonferroni)
        if body:
            title = f'## The pairs behind "{claim.claim}" ({TITLES.get(claim.metric, claim.metric)}, seed by seed)'
            sections += [title, "\n".join([markdown_row(["pair", *TESTED, "p (Bonferroni)"]), "|" + "---|" * 6, *body])]
    return sections


def _tests(
    values: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    correct: Callable[[Sequence[float]], Sequence[float]],
) -> tuple[list[str], int]:
    """A row for each paired test, of those with seeds enough, and how many p-values were corrected together."""
    found = {name: compare_paired(*both) for name, both in values.items() if len(both[0]) >= FEWEST_SEEDS}
    corrected = correct([test.p for test in found.values() if not math.isnan(test.p)])
    known = iter(corrected)
    rows = [
        markdown_row(
            [
                name,
                f"{test.difference:+.3f} [{test.low:+.3f}, {test.high:+.3f}]",
                "–" if math.isnan(test.cohens_d) else f"{test.cohens_d:+.1f}",
                claims.format_p_value(test.wilcoxon_p),
                claims.format_p_value(test.p),
                claims.format_p_value(math.nan if math.isnan(test.p) else next(known)),
            ]
        )
        for name, test in found.items()
    ]
    return rows, len(corrected)


def _by_hospital(comparison: Comparison) -> list[str]:
    """Accuracy, and what claims are about, at each hospital of the first method, where they are few."""
    first = next(iter(comparison.results.values()))[0]
    sites = list(first["sites"])
    if not 2 <= len(sites) <= MOST_HOSPITALS:
        return []
    sections = []
    for metric in dict.fromkeys(["accuracy", *(c.metric for c in comparison.claims if c.metric in METRICS)]):
        body = [
            markdown_row([name, *(_at_hospital(runs, metric, site) for site in sites)])
            for name, runs in comparison.results.items()
        ]
        title = f"## {TITLES.get(metric, metric)} at each hospital (mean ± standard deviation over seeds; median)"
        sections += [title, "\n".join([markdown_row(["method", *sites]), "|" + "---|" * (1 + len(sites)), *body])]
    return sections


def _at_hospital(runs: Runs, metric: str, site: str) -> str:
    median = np.median([metric_value(run, metric, site) for run in runs])
    return claims.format_mean_and_std(runs, metric, site) + (
        f"; {median:.3f}" if len(runs) > 1 and not np.isnan(median) else ""
    )


def _gaps(comparison: Comparison) -> list[str]:
    """How much better a model is on what it has seen."""
    known = {n: r for n, r in comparison.results.items() if not math.isnan(metric_value(r[0], "gap"))}
    if not known:
        return []
    head = [markdown_row(["method", "accuracy, training − validation images"]), "|---|---|"]
    body = [markdown_row([name, claims.format_mean_and_std(runs, "gap")]) for name, runs in known.items()]
    return ["## Train–validation gap (mean ± standard deviation over seeds)", "\n".join([*head, *body])]


def _costs(comparison: Comparison) -> list[str]:
    """What the first method's extra megabytes bought, against every method that sends less."""
    first, *others = comparison.lines
    cheaper = [o for o in others if not o.pools_images and o.megabytes < WORTH * first.megabytes]
    if not cheaper or first.pools_images:
        return []
    head = ["against", f"MB that {first.name} sends more", "times", "accuracy gained", "per GB"]
    body = [markdown_row(head), "|" + "---|" * 5]
    for line in cheaper:
        ours, theirs = (comparison.results[name] for name in (first.name, line.name))
        mine, other = map(mean_of_known, claims.pair_by_seed(ours, theirs, "megabytes"))
        gained, lost = map(mean_of_known, claims.pair_by_seed(ours, theirs, "accuracy"))
        more, gain, times = mine - other, gained - lost, mine / other if other else math.nan
        cells = [f"{more:,.1f}", f"{format_decimal(times, 1)} ×", f"{gain:+.3f}", f"{gain / more * 1000:+.4f}"]
        body.append(markdown_row([line.name, *cells]))
    note = (
        "Bytes are measured on the wire, both ways, the weights of the final evaluation included, which the usual "
        "reckoning (2 × sites × rounds × model size) leaves out."
    )
    return [f"## What the megabytes of {first.name} buy", "\n".join(body), note]


def _differences(comparison: Comparison) -> list[str]:
    """Seed by seed against the first method: an interval of its own says little about a difference."""
    first, *others = comparison.lines
    values = {
        line.name: claims.pair_by_seed(comparison.results[line.name], comparison.results[first.name], "accuracy")
        for line in others
    }
    rows, corrected = _tests(values, correct_holm)
    if not rows:
        return []
    head = markdown_row([f"accuracy against {first.name}, seed by seed", *TESTED, "p (Holm)"])
    note = (
        "d: Cohen's, of pairs. Of n seeds Wilcoxon's p is never below 2^(1 − n), 0.062 of five. Holm: corrected for "
        f"the {corrected} p-values of this table."
    )
    return [head, "|" + "---|" * 6, *rows, "", note]


def _notes(comparison: Comparison) -> list[str]:
    notes = [f"{failure}." for failure in comparison.failures]
    notes += [
        f"{line.name}: {line.lost} updates of hospitals were refused or lost." for line in comparison.lines if line.lost
    ]
    if len({line.seeds for line in comparison.lines}) > 1:
        notes.append(f"Seeds: {', '.join(f'{line.name} {line.seeds}' for line in comparison.lines)}.")
    notes.append(f"Figures are of {comparison.judged_by}.")
    notes += ["Drift is the mean distance ‖w_k − w‖₂ that a hospital's weights travel in one round."]
    if pooled := [line.name for line in comparison.lines if line.pools_images]:
        notes.append(f"{', '.join(pooled)}: all images in one place, which hospitals may not do; a yardstick.")
    told = {name: runs[0].get("remarks") or () for name, runs in comparison.results.items()}
    notes += [f"{name}: {remark}." for name, found in told.items() for remark in found]
    if any(r["headline"]["model"] in ("personal", "transfer") for runs in comparison.results.values() for r in runs):
        notes.append(
            "Where several models are judged together, their AUC also tells how classes are spread over sites."
        )
    if len({line.judged_on for line in comparison.lines}) > 1:
        notes += [f"{line.name} is judged on {line.judged_on}." for line in comparison.lines]
    if not any(run.get("privacy") for runs in comparison.results.values() for run in runs):
        notes.append("Nothing here is private in the sense of a guarantee: no privacy plan was in the recipe.")
    return notes
