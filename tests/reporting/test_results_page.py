"""The report: which sections there are, when there are none, and figures worked out by hand."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats

from polyclinic.evaluation.claims import Claim
from polyclinic.evaluation.comparison import Comparison, Runs, metric_value, summarise_methods
from polyclinic.evaluation.summary import PartScores, RunSummary
from polyclinic.experiments.compare import compare
from polyclinic.experiments.reproduce import reproduce, write_page
from polyclinic.reporting.render_markdown import to_markdown
from polyclinic.reporting.report import build_results_page
from polyclinic.reporting.sections.methods import WORTH
from polyclinic.reporting.sections.sites import MOST_SITES
from tests.small import SITES, tiny

METHODS = {
    "Often": {},
    "Once": {"rounds": 1, "training.epochs": 2},
    "Local": {"algorithm": "local"},
    "Centralised": {"algorithm": "centralised"},
}
CLAIMS = [
    Claim(claim="averaging often helps", test="higher", methods=["Often", "Once"], paper="+0.1"),
    Claim(claim="it costs more", test="higher", methods=["Often", "Once"], metric="megabytes"),
    Claim(claim="both are alike", test="equal", methods=["Often", "Once"], margin=0.5),
]
TITLES = {
    "claims": "## The paper's claims, tested",
    "sites": "**Accuracy at each site (mean ± standard deviation over seeds; median)**",
    "gap": "**Accuracy on training and validation images (mean ± standard deviation over seeds)**",
    "bytes": "### Accuracy gained by the extra megabytes of Often",
    "against": "**Accuracy against Often**",
}
SECTIONS = [
    "## Comparison of methods",
    "## Against Often, seed by seed",
    "## Errors by class",
    "## The paper's claims, tested",
    "## Site by site",
    "## Train–validation gap",
    "## Accuracy against cost",
    "## Learning curves",
    "## The sites and how they differ",
]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    return compare([tiny(methods=METHODS, evaluate__bootstrap=0)], 3, tmp_path_factory.mktemp("report"))


def markdown(comparison: Comparison) -> str:
    return to_markdown(build_results_page(comparison), "x-")


def of(results: Mapping[str, Runs], **others: Any) -> Comparison:
    return Comparison("x", tuple(summarise_methods(results)), results, None, **others)


def changed(comparison: Comparison, change: Callable[[RunSummary], dict[str, Any]]) -> Comparison:
    """The same runs with these fields changed."""
    results = {name: [run.model_copy(update=change(run)) for run in runs] for name, runs in comparison.results.items()}
    return of(results)


def scores_at(run: RunSummary, site: str) -> PartScores:
    found = run.headline_at(site)
    assert found is not None
    return found


def sections(text: str) -> list[str]:
    return re.findall("^## .*$", text, re.MULTILINE)


def table(text: str, title: str) -> dict[str, list[str]]:
    """The rows of a section's table by their first cell."""
    block = text.split(f"{title}\n\n", 1)[1].split("\n\n", 1)[0]
    found = [line.strip("| ").split(" | ") for line in block.splitlines()]
    return {cells[0]: cells[1:] for cells in [found[0], *found[2:]]}


def mean_and_sd(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"


def test_sections_come_in_order_and_claims_only_with_claims(compared: Comparison) -> None:
    with_claims = markdown(replace(compared, claims=CLAIMS))
    assert sections(with_claims) == SECTIONS
    assert sections(markdown(compared)) == [title for title in SECTIONS if "claims" not in title]
    assert "nan" not in with_claims.lower()


def test_claims_are_tested_on_the_runs(compared: Comparison) -> None:
    text = markdown(replace(compared, claims=CLAIMS))
    found = table(text, TITLES["claims"])
    often, once = ([metric_value(run, "accuracy") for run in compared.results[name]] for name in ("Often", "Once"))
    ours = f"Often {statistics.mean(often):.3f}, Once {statistics.mean(once):.3f}"
    p = scipy.stats.ttest_rel(often, once).pvalue if often != once else 1.0
    assert found["averaging often helps"][:2] == ["+0.1", ours]
    assert found["averaging often helps"][3] == ("< 0.001" if p < 0.001 else f"{p:.3f}")
    assert found["it costs more"][1].startswith("megabytes Often ")
    assert found["it costs more"][-1] == "**supported**"
    assert found["both are alike"][3:] == ["–", "–", "**supported**"]
    assert "Holm's correction for the 2 p-values of this table" in text, "the third claim has none"


def test_accuracy_at_each_hospital(compared: Comparison) -> None:
    found = table(markdown(compared), TITLES["sites"])
    assert found["method"] == list(SITES)
    for name, model in {"Often": "global", "Local": "personal", "Centralised": "global"}.items():
        runs = compared.results[name]
        assert found[name] == [
            f"{mean_and_sd(values)}; {statistics.median(values):.3f}"
            for values in ([run.sites[site][model]["test"].value("accuracy") for run in runs] for site in SITES)
        ]


def test_what_claims_are_about_is_told_of_each_hospital(compared: Comparison) -> None:
    about = [Claim(claim="it ranks better", test="higher", methods=["Often", "Once"], metric="auc")]
    text = markdown(replace(compared, claims=about))
    found = table(text, TITLES["sites"].replace("Accuracy", "AUC"))
    values = [run.sites[SITES[0]]["global"]["test"].value("auc") for run in compared.results["Often"]]
    assert found["Often"][0] == f"{mean_and_sd(values)}; {statistics.median(values):.3f}"


def test_after_an_analysis_of_variance_every_pair_is_tested(compared: Comparison) -> None:
    claim = Claim(claim="they differ", test="effect", methods=list(METHODS)[:3])
    text = markdown(replace(compared, claims=[claim]))
    found = table(text, '**The pairs behind "they differ" (Accuracy, seed by seed)**')
    pairs = list(itertools.combinations(claim.methods, 2))
    assert list(found)[1:] == [f"{a} − {b}" for a, b in pairs]
    for a, b in pairs:
        ours, theirs = ([metric_value(run, "accuracy") for run in compared.results[name]] for name in (a, b))
        p = scipy.stats.ttest_rel(ours, theirs).pvalue
        cells = found[f"{a} − {b}"]
        assert cells[3] == ("1.000" if np.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.3f}")
        tested = sum(found[f"{c} − {d}"][4] != "–" for c, d in pairs)
        assert cells[4] == ("–" if np.isnan(p) else "< 0.001" if tested * p < 0.001 else f"{min(1, tested * p):.3f}")


def test_a_hospital_that_a_method_does_not_have_is_left_open(compared: Comparison) -> None:
    results = dict(compared.results)
    results["Once"] = [run.model_copy(update={"sites": {SITES[0]: run.sites[SITES[0]]}}) for run in results["Once"]]
    assert table(markdown(of(results)), TITLES["sites"])["Once"][1:] == ["–", "–"]


@pytest.mark.parametrize(("count", "shown"), [(1, False), (2, True), (MOST_SITES, True), (MOST_SITES + 1, False)])
def test_hospitals_are_shown_singly_while_they_are_few(compared: Comparison, count: int, shown: bool) -> None:
    def with_sites(run: RunSummary) -> dict[str, Any]:
        return {"sites": {f"clinic {number}": run.sites[SITES[0]] for number in range(count)}}

    assert (TITLES["sites"] in markdown(changed(compared, with_sites))) == shown


def test_the_gap_between_training_and_validation_images(compared: Comparison) -> None:
    found = table(markdown(compared), TITLES["gap"])
    assert list(found)[1:] == list(METHODS)
    often = [
        run.merged["global"]["train"].value("accuracy") - run.merged["global"]["validation"].value("accuracy")
        for run in compared.results["Often"]
    ]
    assert found["Often"][2] == mean_and_sd(often)


def test_without_figures_on_training_images_there_is_no_gap(compared: Comparison) -> None:
    assert TITLES["gap"] not in markdown(changed(compared, lambda run: {"merged": {}}))
    results = dict(compared.results)
    results["Once"] = [run.model_copy(update={"merged": {}}) for run in results["Once"]]
    assert list(table(markdown(of(results)), TITLES["gap"]))[1:] == ["Often", "Local", "Centralised"]


def test_what_megabytes_buy_against_whoever_sends_less(compared: Comparison) -> None:
    found = table(markdown(compared), TITLES["bytes"])
    assert list(found)[1:] == ["Once", "Local"], "the images of centralised training are no megabytes of weights"
    line = {line.name: line for line in compared.lines}
    more = line["Often"].megabytes - line["Once"].megabytes
    gain = line["Often"].figures["accuracy"].mean - line["Once"].figures["accuracy"].mean
    times = line["Often"].megabytes / line["Once"].megabytes
    assert found["Once"] == [f"{more:,.1f}", f"{times:.1f} ×", f"{gain:+.3f}", f"{1000 * gain / more:+.4f}"]


def test_the_cheapest_and_the_pooled_buy_nothing(compared: Comparison) -> None:
    for name in ("Local", "Centralised"):
        results = {name: compared.results[name], **compared.results}
        assert "extra megabytes of" not in markdown(of(results))
    often = compared.results["Often"]
    nearly = []
    for run in often:
        cost = run.cost.model_copy(update={"bytes_up": int(run.cost.bytes_up * WORTH)})
        nearly.append(run.model_copy(update={"cost": cost}))
    assert "extra megabytes of" not in markdown(of({"Often": often, "Nearly": nearly})), "a hundredth is no saving"


def test_differences_need_three_seeds_in_common(compared: Comparison) -> None:
    often, once = compared.results["Often"], compared.results["Once"]
    head = TITLES["against"]
    assert head in markdown(of({"Often": often, "Once": once}))
    assert "p-values of this table" in markdown(of({"Often": often, "Once": once, "Local": once[:2]}))
    assert head not in markdown(of({"Often": often[:2], "Once": once[:2]}))
    assert head not in markdown(of({"Often": often}))
    other = [run.model_copy(update={"seed": run.seed + 2}) for run in once]
    assert head not in markdown(of({"Often": often, "Once": other})), "as many seeds, but not the same"


def test_differences_pair_equal_seeds_in_any_order(compared: Comparison) -> None:
    often, once = compared.results["Often"], compared.results["Once"]
    straight, turned = (markdown(of({"Often": often, "Once": runs})) for runs in (once, once[::-1]))
    rows = [[line for line in text.splitlines() if re.match(r"\| Once \| [+-]", line)] for text in (straight, turned)]
    assert rows[0] == rows[1] != []


def test_names_with_bars_break_no_table(compared: Comparison) -> None:
    def renamed(run: RunSummary) -> RunSummary:
        sites = {f"{site}|x": models for site, models in run.sites.items()}
        sizes = [size.model_copy(update={"site": f"{size.site}|x"}) for size in run.site_sizes]
        return run.model_copy(update={"sites": sites, "site_sizes": sizes})

    results = {f"{name}|1": [renamed(run) for run in runs] for name, runs in compared.results.items()}
    claims = [Claim(claim="x|y", test="higher", methods=["Often|1", "Once|1"], site="site-1|x", paper="1|2")]
    text = markdown(of(results, claims=claims, paper={"Often|1": "3|4"})).replace("\\|", "¦")
    blocks = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert len(blocks) == 8
    for block in blocks:
        assert len({line.count("|") for line in block.splitlines()}) == 1, block


def test_pictures_are_shown_where_they_lie(compared: Comparison) -> None:
    assert "](x-learning.svg)" in markdown(compared)
    assert "![" not in to_markdown(build_results_page(compared)), "charts are left out where nobody writes them"
    assert compared.folder is not None
    linked = re.findall(r"\]\((.*\.svg)\)", (compared.folder / "report.md").read_text())
    assert len(linked) > 5
    assert all((compared.folder / name).read_text().startswith("<svg xmlns=") for name in linked)


def test_one_seed_has_a_mean_and_no_spread(compared: Comparison) -> None:
    text = markdown(of({name: runs[:1] for name, runs in compared.results.items()}, claims=CLAIMS))
    assert all(re.fullmatch(r"0\.\d{3}", cell) for cell in table(text, "**Accuracy at each site**")["Often"])
    assert [cells[-1] for cells in list(table(text, TITLES["claims"]).values())[1:]] == ["**not decided**"] * 3
    assert "nan" not in text.lower()


PAPER = """name: small again
rounds: 1
data: {name: digits, partition: {by: iid, sites: 2}}
model: linear
algorithm: fedavg
evaluate: {bootstrap: 0}
methods: {FedAvg: {}, Local: {algorithm: local}}
claims: [{claim: sharing helps, test: higher, methods: [FedAvg, Local]}]
"""


def test_a_page_is_rebuilt_with_the_claims_the_recipe_makes_today(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "recipes" / "paper" / "quick.yaml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text(PAPER)
    monkeypatch.setattr("polyclinic.config.bundled.recipes_folder", lambda: tmp_path / "recipes")
    monkeypatch.setattr("polyclinic.experiments.reproduce.recipes_folder", lambda: tmp_path / "recipes")
    page, (ran,) = reproduce("paper", True, tmp_path / "out")
    text = page.read_text()
    assert "| sharing helps |" in text
    recipe.write_text(
        PAPER.replace("sharing helps", "sharing costs bytes").replace("higher,", "higher, metric: megabytes,")
    )
    _, (again,) = write_page("paper", True, tmp_path / "out")
    assert page.read_text() != text
    assert "| sharing costs bytes |" in page.read_text()
    assert "| sharing helps |" not in page.read_text()
    for metric, site in (("gap", None), ("gap", "site-1"), ("drift", None), ("megabytes", None), ("auc", "site-1")):
        kept, made = (metric_value(c.results["FedAvg"][0], metric, site) for c in (again, ran))
        assert kept == made
        assert math.isfinite(kept)
