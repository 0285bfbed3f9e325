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
from polyclinic.experiments.compare import compare
from polyclinic.experiments.reproduce import reproduce, write_page
from polyclinic.reporting.markdown.comparison import MOST_HOSPITALS, WORTH, markdown
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
SECTIONS = {
    "claims": "## The paper's claims, tested",
    "hospitals": "## Accuracy at each hospital (mean ± standard deviation over seeds; median)",
    "gap": "## Train–validation gap (mean ± standard deviation over seeds)",
    "bytes": "## What the megabytes of Often buy",
    "sizes": "## Hospitals (first seed)",
}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    return compare([tiny(methods=METHODS, evaluate__bootstrap=0)], 3, tmp_path_factory.mktemp("report"))


def of(results: Mapping[str, Runs], **others: Any) -> Comparison:
    return Comparison("x", tuple(summarise_methods(results)), results, None, **others)


def changed(comparison: Comparison, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Comparison:
    return of({name: [change(dict(run)) for run in runs] for name, runs in comparison.results.items()})


def sections(text: str) -> list[str]:
    return re.findall("^##.*$", text, re.MULTILINE)


def table(text: str, title: str) -> dict[str, list[str]]:
    """The rows of a section's table by their first cell."""
    block = text.split(f"{title}\n\n", 1)[1].split("\n\n", 1)[0]
    found = [line.strip("| ").split(" | ") for line in block.splitlines()]
    return {cells[0]: cells[1:] for cells in [found[0], *found[2:]]}


def mean_and_sd(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"


def test_sections_come_in_order_and_claims_only_with_claims(compared: Comparison) -> None:
    with_claims = markdown(replace(compared, claims=CLAIMS))
    assert sections(with_claims) == list(SECTIONS.values())
    assert sections(markdown(compared)) == list(SECTIONS.values())[1:]
    assert "nan" not in with_claims.lower()


def test_claims_are_tested_on_the_runs(compared: Comparison) -> None:
    text = markdown(replace(compared, claims=CLAIMS))
    found = table(text, SECTIONS["claims"])
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
    found = table(markdown(compared), SECTIONS["hospitals"])
    assert found["method"] == list(SITES)
    for name, model in {"Often": "global", "Local": "personal", "Centralised": "global"}.items():
        runs = compared.results[name]
        assert found[name] == [
            f"{mean_and_sd(values)}; {statistics.median(values):.3f}"
            for values in ([run["sites"][site][model]["test"]["accuracy"] for run in runs] for site in SITES)
        ]


def test_what_claims_are_about_is_told_of_each_hospital(compared: Comparison) -> None:
    about = [Claim(claim="it ranks better", test="higher", methods=["Often", "Once"], metric="auc")]
    text = markdown(replace(compared, claims=about))
    found = table(text, SECTIONS["hospitals"].replace("Accuracy", "AUC"))
    values = [run["sites"][SITES[0]]["global"]["test"]["auc"] for run in compared.results["Often"]]
    assert found["Often"][0] == f"{mean_and_sd(values)}; {statistics.median(values):.3f}"


def test_after_an_analysis_of_variance_every_pair_is_tested(compared: Comparison) -> None:
    claim = Claim(claim="they differ", test="effect", methods=list(METHODS)[:3])
    text = markdown(replace(compared, claims=[claim]))
    found = table(text, '## The pairs behind "they differ" (Accuracy, seed by seed)')
    pairs = list(itertools.combinations(claim.methods, 2))
    assert list(found)[1:] == [f"{a} − {b}" for a, b in pairs]
    for a, b in pairs:
        ours, theirs = ([metric_value(run, "accuracy") for run in compared.results[name]] for name in (a, b))
        p = scipy.stats.ttest_rel(ours, theirs).pvalue
        cells = found[f"{a} − {b}"]
        assert cells[3] == ("–" if np.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.3f}")
        tested = sum(table_p != "–" for table_p in (found[f"{c} − {d}"][3] for c, d in pairs))
        assert cells[4] == ("–" if np.isnan(p) else "< 0.001" if tested * p < 0.001 else f"{min(1, tested * p):.3f}")


def test_a_hospital_that_a_method_does_not_have_is_left_open(compared: Comparison) -> None:
    results = dict(compared.results)
    results["Once"] = [{**run, "sites": {SITES[0]: run["sites"][SITES[0]]}} for run in results["Once"]]
    assert table(markdown(of(results)), SECTIONS["hospitals"])["Once"][1:] == ["–", "–"]


@pytest.mark.parametrize(
    ("count", "shown"), [(1, False), (2, True), (MOST_HOSPITALS, True), (MOST_HOSPITALS + 1, False)]
)
def test_hospitals_are_shown_singly_while_they_are_few(compared: Comparison, count: int, shown: bool) -> None:
    def with_sites(run: dict[str, Any]) -> dict[str, Any]:
        return run | {"sites": {f"clinic {number}": run["sites"][SITES[0]] for number in range(count)}}

    assert (SECTIONS["hospitals"] in markdown(changed(compared, with_sites))) == shown


def test_the_gap_between_training_and_validation_images(compared: Comparison) -> None:
    found = table(markdown(compared), SECTIONS["gap"])
    assert list(found)[1:] == list(METHODS)
    often = [
        run["merged"]["global"]["train"]["accuracy"] - run["merged"]["global"]["validation"]["accuracy"]
        for run in compared.results["Often"]
    ]
    assert found["Often"] == [mean_and_sd(often)]


def test_without_figures_on_training_images_there_is_no_gap(compared: Comparison) -> None:
    assert SECTIONS["gap"] not in markdown(changed(compared, lambda run: run | {"merged": {}}))
    results = dict(compared.results)
    results["Once"] = [{**run, "merged": {}} for run in results["Once"]]
    assert list(table(markdown(of(results)), SECTIONS["gap"]))[1:] == ["Often", "Local", "Centralised"]


def test_what_megabytes_buy_against_whoever_sends_less(compared: Comparison) -> None:
    found = table(markdown(compared), SECTIONS["bytes"])
    assert list(found)[1:] == ["Once", "Local"], "the images of centralised training are no megabytes of weights"
    line = {line.name: line for line in compared.lines}
    more = line["Often"].megabytes - line["Once"].megabytes
    gain = line["Often"].figures["accuracy"].mean - line["Once"].figures["accuracy"].mean
    times = line["Often"].megabytes / line["Once"].megabytes
    assert found["Once"] == [f"{more:,.1f}", f"{times:.1f} ×", f"{gain:+.3f}", f"{1000 * gain / more:+.4f}"]


def test_the_cheapest_and_the_pooled_buy_nothing(compared: Comparison) -> None:
    for name in ("Local", "Centralised"):
        results = {name: compared.results[name], **compared.results}
        assert "## What the megabytes" not in markdown(of(results))
    often = compared.results["Often"]
    nearly = [{**run, "cost": {**run["cost"], "bytes_up": run["cost"]["bytes_up"] * WORTH}} for run in often]
    assert "## What the megabytes" not in markdown(of({"Often": often, "Nearly": nearly})), "a hundredth is no saving"


def test_differences_need_three_seeds_in_common(compared: Comparison) -> None:
    often, once = compared.results["Often"], compared.results["Once"]
    head = "| accuracy against Often, seed by seed |"
    assert head in markdown(of({"Often": often, "Once": once}))
    assert "p-values of this table" in markdown(of({"Often": often, "Once": once, "Local": once[:2]}))
    assert head not in markdown(of({"Often": often[:2], "Once": once[:2]}))
    assert head not in markdown(of({"Often": often}))
    other = [{**run, "seed": run["seed"] + 2} for run in once]
    assert head not in markdown(of({"Often": often, "Once": other})), "as many seeds, but not the same"


def test_differences_pair_equal_seeds_in_any_order(compared: Comparison) -> None:
    often, once = compared.results["Often"], compared.results["Once"]
    straight, turned = (markdown(of({"Often": often, "Once": runs})) for runs in (once, once[::-1]))
    rows = [[line for line in text.splitlines() if re.match(r"\| Once \| [+-]", line)] for text in (straight, turned)]
    assert rows[0] == rows[1] != []


def test_names_with_bars_break_no_table(compared: Comparison) -> None:
    def renamed(run: dict[str, Any]) -> dict[str, Any]:
        sites = {f"{site}|x": models for site, models in run["sites"].items()}
        return run | {"sites": sites, "hospitals": [{**h, "site": f"{h['site']}|x"} for h in run["hospitals"]]}

    results = {f"{name}|1": [renamed(dict(run)) for run in runs] for name, runs in compared.results.items()}
    claims = [Claim(claim="x|y", test="higher", methods=["Often|1", "Once|1"], site="site-1|x", paper="1|2")]
    text = markdown(of(results, claims=claims, paper={"Often|1": "3|4"})).replace("\\|", "¦")
    blocks = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert len(blocks) == 7
    for block in blocks:
        assert len({line.count("|") for line in block.splitlines()}) == 1, block


def test_pictures_are_shown_where_they_lie(compared: Comparison) -> None:
    assert "![curves](curves.png)" in markdown(compared)
    assert "![" not in markdown(replace(compared, folder=None))


def test_one_seed_has_a_mean_and_no_spread(compared: Comparison) -> None:
    text = markdown(of({name: runs[:1] for name, runs in compared.results.items()}, claims=CLAIMS))
    assert all(re.fullmatch(r"0\.\d{3}", cell) for cell in table(text, SECTIONS["hospitals"])["Often"])
    assert [cells[-1] for cells in list(table(text, SECTIONS["claims"]).values())[1:]] == ["**not decided**"] * 3
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
    monkeypatch.setattr("polyclinic.config.recipe.recipes_folder", lambda: tmp_path / "recipes")
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
