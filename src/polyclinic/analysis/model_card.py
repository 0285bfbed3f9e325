"""Renders a model card as Markdown: data, metrics at every site, calibration, privacy, intended use, origin and limits.

After M. Mitchell et al.: "Model Cards for Model Reporting", FAT* 2019. The card describes sites, never patients.
`export.py` writes the card last, beside the model's other files.
"""

from collections.abc import Iterator, Mapping, Sequence

from polyclinic.analysis.predict import ModelCatalogue, RunModel
from polyclinic.core import ENSEMBLE, HELD_OUT, STUDENT, Part
from polyclinic.evaluation.calibration import Calibration, Uncalibrated
from polyclinic.evaluation.summary import PartScores, RunSummary
from polyclinic.reporting.formatting import format_number
from polyclinic.reporting.privacy_statement import write_privacy_page

FEW_IMAGES = 30
"""Of a site's test part: metrics on fewer images are only a hint."""
METRICS = {"accuracy": "accuracy", "balanced_accuracy": "balanced accuracy", "auc": "AUC"}
USE = """\
**Intended:** research: comparing methods, studying how models carry over between hospitals, planning a trial; by people
who can judge an image themselves.

**Not intended:** diagnosis, screening, triage, or any decision about a patient. This is **not a medical device**: it
has no CE mark and no clearance by any authority, and nobody has tried it in care. It is not for images of another kind,
body part or population than those below, nor for images prepared in another way."""


def render_model_card(
    run: ModelCatalogue,
    model: RunModel,
    calibration: Calibration | Uncalibrated,
    sums: Mapping[str, str],
    alone: RunSummary | None = None,
) -> str:
    """Render the card as Markdown.

    Args:
        run: The finished run.
        model: The model of it that is exported.
        calibration: Its temperature, or why it has none.
        sums: The SHA-256 of each file beside the card.
        alone: The summary of a run in which each of the same sites trained by itself.
    """
    sections = {
        "What it is": _describe_model(run, model),
        "Intended use": [USE],
        "Data": _describe_data(run, model),
        "How good it is": _render_metrics(run, model),
        "Against training alone": _compare_with_local(run, model, alone),
        "Calibration": [_describe_calibration(run, calibration)],
        "Privacy": [_render_privacy(run, model)],
        "How it was trained": _describe_origin(run),
        "Limits": ["\n".join(f"- {line}" for line in _describe_limits(run, model, calibration, alone))],
        "Files": [_render_table(["file", "SHA-256"], [[name, f"`{digest}`"] for name, digest in sums.items()])],
    }
    title = f"# Model card: {_escape_text(run.summary.name)}, {_escape_text(model.description)}"
    body = [block for heading, blocks in sections.items() for block in (f"## {heading}", *blocks)]
    return "\n\n".join([title, *body]) + "\n"


def _escape_text(text: object) -> str:
    """Return the text on one line, with the special characters of Markdown and HTML escaped."""
    line = " ".join(str(text).split()).replace("<", "&lt;")
    return "".join(f"\\{letter}" if letter in "\\`*_[]|#" else letter for letter in line)


def _render_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table. Characters that would end a cell or a row are escaped or left out."""
    rows = (" | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) for cells in (head, *lines))
    first, *others = (f"| {row} |" for row in rows)
    return "\n".join([first, "|" + "---|" * len(head), *others])


def _describe_model(run: ModelCatalogue, model: RunModel) -> Iterator[str]:
    section, prepared, summary = model.sections[0], run.preprocessing.preparation, run.summary
    several = f" ({len(model.networks)} of them; their probabilities are averaged)" if len(model.networks) > 1 else ""
    size = sum(parameter.numel() for network in model.networks for parameter in network.parameters())
    colour = "grey" if prepared.channels == 1 else "colour"
    classes = ", ".join(_escape_text(name) for name in run.classes)
    yield (
        f"A classifier of images into {len(run.classes)} classes ({classes}): {section.name}{several}, {size:,} "
        f"parameters, for {colour} images of {prepared.size} × {prepared.size} pixels. It is the "
        f"{_escape_text(model.description)} of a federated run of {_escape_text(summary.algorithm)} over "
        f"{len(summary.site_sizes)} sites, by polyclinic {summary.versions.get('polyclinic', '')}."
    )
    yield "`preprocessing.json` describes how an image must be prepared; otherwise the figures below do not hold."


def _describe_data(run: ModelCatalogue, model: RunModel) -> Iterator[str]:
    private = run.summary.privacy is not None
    yield f"Data set: {_escape_text(run.summary.data)}. Images by site; those this model is for are marked ✓."
    lines = [
        [
            _escape_text(site.site),
            "✓" if site.site in model.sites else "",
            *map(str, (site.train, site.validation, site.test)),
            ", ".join(f"{_escape_text(name)} {n}" for name, n in site.classes.items() if not private) or "withheld",
        ]
        for site in run.summary.site_sizes
    ]
    yield _render_table(["site", "", "train", "validation", "test", "classes"], lines)
    if private:
        yield "How many images of each class a site has is not covered by the run's privacy guarantee, and is withheld."


def _render_metrics(run: ModelCatalogue, model: RunModel) -> Iterator[str]:
    summary = run.summary
    by_site = {site: summary.sites.get(site, {}).get(model.key, {}) for site in model.sites}
    part: Part = "test" if any("test" in scores for scores in by_site.values()) else "validation"
    lines = [[_escape_text(site), *_metric_cells(scores[part])] for site, scores in by_site.items() if part in scores]
    merged = summary.merged.get(model.key, {}).get(part)
    means = " (AUC and ECE: means of sites)" if summary.pooled_from == "scores" else ""
    if merged and len(model.sites) == len(summary.site_sizes):
        lines.append([f"all together{means}", *_metric_cells(merged)])
    held_out = summary.merged.get(HELD_OUT, {}).get("test")
    if held_out and model.name == next((name for name in (STUDENT, ENSEMBLE) if name in summary.merged), "global"):
        lines.append(["held-out, of no site", *_metric_cells(held_out)])
    if public := summary.public.get(model.name):
        lines.append(["public, of no site", *_metric_cells(public)])
    if not lines:
        yield "No figure of this model is known: its figures stayed at the sites."
        return
    yield f"On {part} images, with bootstrap intervals (95 %) over patients where predictions are known:"
    yield _render_table(["site", "images", *METRICS.values(), "calibration error (ECE)"], lines)
    best = summary.headline
    yield f"The run is judged by its {_escape_text(best.of or best.model)} model, on {_escape_text(best.images)}."
    if model.site is not None:
        yield f"This model was not tested at sites other than {_escape_text(model.site)} for this card."


def _metric_cells(scores: PartScores) -> list[str]:
    return [str(scores.n), *(_format_metric(scores, name) for name in METRICS), format_number(scores.value("ece"))]


def _format_metric(scores: PartScores, name: str) -> str:
    metric = scores[name]
    interval = "" if metric.low is None or metric.high is None else f" [{metric.low:.3f}, {metric.high:.3f}]"
    return format_number(scores.value(name)) + interval


def _compare_with_local(run: ModelCatalogue, model: RunModel, alone: RunSummary | None) -> Iterator[str]:
    if alone is None:
        yield "Not known: no run in which every site trains by itself was given (`polyclinic export --alone DIR`)."
        return
    lines = []
    for site, ours, theirs in _paired_scores(run, model, alone):
        change = ours.value("accuracy") - theirs.value("accuracy")
        verdict = "as good" if change == 0 else "worse off here" if change < 0 else "better off here"
        lines.append(
            [
                _escape_text(site),
                str(ours.n),
                _format_metric(theirs, "accuracy"),
                _format_metric(ours, "accuracy"),
                f"{change:+.3f}",
                verdict,
            ]
        )
    yield _render_table(["site", "test images", "accuracy alone", "accuracy of this model", "difference", ""], lines)
    yield "One run against one: differences were not tested, and within the intervals they may be chance."


def _paired_scores(
    run: ModelCatalogue, model: RunModel, alone: RunSummary
) -> Iterator[tuple[str, PartScores, PartScores]]:
    """Yield the test scores of this model and of the site's own, at each site that has both."""
    for site in model.sites:
        ours = run.summary.sites.get(site, {}).get(model.key, {}).get("test")
        theirs = alone.sites.get(site, {}).get("personal", {}).get("test")
        if ours and theirs:
            yield site, ours, theirs


def _describe_calibration(run: ModelCatalogue, found: Calibration | Uncalibrated) -> str:
    if isinstance(found, Uncalibrated):
        return f"**Uncalibrated**: {found.reason}. Its probabilities may be far too sure; do not read them as chances."
    sentences = [
        f"Temperature scaling (Guo et al. 2017): logits are divided by {found.temperature:.4g}, fitted on "
        f"{found.images} validation images, whose calibration error (ECE, 15 bins) went from {found.ece[0]:.3f} to "
        f"{found.ece[1]:.3f}."
    ]
    if found.test_ece is not None:
        sentences.append(
            f"On {found.test_images} test images, not used for it: {found.test_ece[0]:.3f} before, "
            f"{found.test_ece[1]:.3f} after."
        )
    sentences.append(
        "It holds where images are like those; at a new site, or with another share of ill people, check it."
    )
    if run.summary.privacy is not None:
        sentences.append("It was computed from validation images without noise, outside the privacy claim.")
    return " ".join(sentences)


def _render_privacy(run: ModelCatalogue, model: RunModel) -> str:
    """Return the run's privacy page, its headings one level deeper."""
    _, _, text = write_privacy_page(run.summary.model_copy(update={"name": ""})).partition("\n")
    text = text.strip().replace("\n## ", "\n### ")
    if model.site is not None:
        text += (
            f"\n\nThis is the personal model of {_escape_text(model.site)}. It was made from that site's images more "
            "than from any other's, and may reveal something about them. The site decides whether it may leave."
        )
    return text


def _describe_origin(run: ModelCatalogue) -> Iterator[str]:
    recipe, summary, training = run.recipe, run.summary, run.recipe.training
    options = ", ".join(f"{key} {value}" for key, value in recipe.algorithm.options.items())
    budget = f"epochs: {training.epochs}" if training.epochs else f"steps: {training.steps}"
    lines = [
        ["algorithm", _escape_text(summary.algorithm + (f" ({options})" if options else ""))],
        ["rounds", str(summary.rounds) + (", stopped early" if summary.stopped_early else "")],
        ["at a site, each round", f"{budget}; batches of {training.batch or f'1/{training.batches} of its images'}"],
        ["optimiser", f"{training.optimiser.name}, learning rate {training.optimiser.lr:g}"],
        ["augmentation", "yes" if training.augment else "no"],
        ["first weights", "drawn from the seed" if recipe.model.weights is None else "pretrained"],
        ["seed", str(summary.seed)],
        ["SHA-256 of the run's state", f"`{summary.sha256}`"],
        ["versions", ", ".join(f"{name} {version}" for name, version in summary.versions.items())],
    ]
    yield _render_table(["", ""], lines)


def _describe_limits(
    run: ModelCatalogue, model: RunModel, calibration: Calibration | Uncalibrated, alone: RunSummary | None
) -> Iterator[str]:
    yield "Figures are of these sites' images. At other hospitals, machines and populations they may be much worse."
    small = [site for site in run.summary.site_sizes if site.test < FEW_IMAGES and site.site in model.sites]
    if small:
        names = ", ".join(f"{_escape_text(site.site)} ({site.test})" for site in small)
        yield f"Sites with fewer than {FEW_IMAGES} test images, whose figures are only a hint: {names}."
    if alone is None:
        yield "Whether some site would be better off training alone is not known."
    elif worse := [
        site
        for site, ours, theirs in _paired_scores(run, model, alone)
        if ours.value("accuracy") < theirs.value("accuracy")
    ]:
        yield f"Worse off than when training alone: {', '.join(map(_escape_text, worse))}."
    if isinstance(calibration, Uncalibrated):
        yield "Its probabilities are not calibrated."
    if run.summary.data == "phantom":
        yield "It was trained on simulated images (the phantom): it knows nothing of real ones."
    yield "It always names one of its classes, also for an image that shows none of them, or no body at all."
    yield "Differences between sexes, ages or skin colours were not examined: their labels were not used."
