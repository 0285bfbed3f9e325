"""Runs whose right and wrong answers are drawn, and pages taken apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import torch

from polyclinic.evaluation.summary import PartScores
from polyclinic.reporting.html.render import to_html
from polyclinic.reporting.report import build_report
from polyclinic.reporting.report_data import Method, ReportData, Run, read_report_data
from polyclinic.storage.predictions import save_predictions
from polyclinic.storage.run_folder import RunFolder
from tests.small import tiny
from tests.summaries import make_headline, make_scores, make_summary

VOID = ("img", "meta", "br", "link")


def report_page(folders: Sequence[Path], with_images: bool = False) -> str:
    """The HTML report of these folders."""
    return to_html(build_report(read_report_data(folders, with_images)))


def run_of(folder: Path, right: Mapping[str, Sequence[bool]], seed: int = 0, per_patient: int = 1) -> Run:
    """A run of two classes that has just these test images right; every so many are of one patient."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for site, answers in right.items():
        hit = torch.tensor(answers, dtype=torch.float64)
        labels = torch.arange(len(hit)) % 2
        of_truth = 0.2 + 0.6 * hit
        rows = torch.stack([1 - of_truth, of_truth], dim=1)
        rows[labels == 0] = rows[labels == 0].flip(1)
        patients = torch.arange(len(hit)) // per_patient
        found[site] = {"global|test": {"probabilities": rows, "labels": labels, "patients": patients}}
    files = RunFolder(folder)
    save_predictions(files.predictions_file, found, None)
    every = [answer for answers in right.values() for answer in answers]
    scores = {site: {"global": {"test": _score(answers)}} for site, answers in right.items()}
    headline = make_headline(n=len(every), accuracy=float(np.mean(every)))
    files.write_summary(make_summary(headline, scores, name=folder.parent.name, seed=seed, rounds=1))
    return Run(files.read_summary(), tiny(seed=seed), files)


def _score(answers: Sequence[bool]) -> PartScores:
    return make_scores(n=len(answers), accuracy=float(np.mean(answers)))


def method_of(name: str, folder: Path, *runs: Mapping[str, Sequence[bool]], per_patient: int = 1) -> Method:
    """A method with a run for each seed."""
    made = (run_of(folder / name / str(seed), right, seed, per_patient) for seed, right in enumerate(runs))
    return Method(name, tuple(made))


def data_of(*methods: Method) -> ReportData:
    return ReportData("drawn", "", methods)


class Page(HTMLParser):
    """A page's elements, in order, each with its attributes, the elements around it, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], tuple[str, ...]]] = []
        self.texts: list[list[str]] = []
        self.open: list[int] = []
        self.feed(text)
        assert not self.open, "an element is not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        around = tuple(self.elements[number][0] for number in self.open)
        self.elements.append((tag, dict(attrs), around))
        self.texts.append([])
        if tag not in VOID:
            self.open.append(len(self.elements) - 1)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.elements[self.open[-1]][0] == tag, f"</{tag}> closes <{self.elements[self.open[-1]][0]}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        for number in self.open:
            self.texts[number].append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes, _ in self.elements if name == tag]

    def text(self, tag: str, **attributes: str) -> str:
        """Of the first such element."""
        for (name, given, _), words in zip(self.elements, self.texts, strict=True):
            if name == tag and all(given.get(key) == value for key, value in attributes.items()):
                return "".join(words)
        raise AssertionError(f"there is no <{tag}> with {attributes}")

    def sections(self) -> list[str]:
        return [str(attributes["id"]) for attributes in self.all("section")]
