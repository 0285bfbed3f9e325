"""What a model is, for whoever gets it: data, figures at every site, calibration, privacy, use, origin, limits.

After M. Mitchell et al.: "Model Cards for Model Reporting", FAT* 2019. It holds figures of sites, never of patients. Of
a private run whose noise was drawn from the seed it keeps the seed back, and all from which the seed could be found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from polyclinic.analysis.predict import ModelCatalogue, RunModel
from polyclinic.evaluation.calibration import Calibration, Uncalibrated
from polyclinic.evaluation.comparison import format_decimal, markdown_row, nan_if_none
from polyclinic.evaluation.summary import describe_test_images
from polyclinic.reporting.privacy_statement import write_privacy_page

FEW = 30
"""Test images of a site; figures of fewer are hardly more than a hint."""
USE = """\
**Intended:** research: comparing methods, studying how models carry over between hospitals, planning a trial; by people
who can judge an image themselves.

**Not intended:** diagnosis, screening, triage, or any decision about a patient. This is **not a medical device**: it
has no CE mark and no clearance by any authority, and nobody has tried it in care. It is not for images of another kind,
body part or population than those below, nor for images prepared in another way."""
PRIVATE_SEED = "kept back: noise was drawn from it, and whoever knows it can take the noise away"


def render_model_card(
    run: ModelCatalogue,
    model: RunModel,
    calibration: Calibration | Uncalibrated,
    sums: Mapping[str, str],
    alone: Mapping[str, Any] | None = None,
) -> str:
    """As Markdown; `sums`: SHA-256 of the files beside it; `alone`: a run in which every site trained by itself."""
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
    body = [block for heading, blocks in sections.items() for block in (f"## {heading}", *blocks)]
    return (
        "\n\n".join([f"# Model card: {_escape_text(run.summary['name'])}, {_escape_text(model.description)}", *body])
        + "\n"
    )


def _escape_text(text: object) -> str:
    """On one line, and without what Markdown or a browser would take for a sign of its own."""
    told = " ".join(str(text).split()).replace("<", "&lt;")
    return "".join(f"\\{letter}" if letter in "\\`*_[]|#" else letter for letter in told)


def _render_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join([markdown_row(head), "|" + "---|" * len(head), *map(markdown_row, lines)])


def _describe_model(run: ModelCatalogue, model: RunModel) -> Iterator[str]:
    section, prepared = model.sections[0], run.preprocessing.preparation
    several = f" ({len(model.networks)} of them; their probabilities are averaged)" if len(model.networks) > 1 else ""
    size = sum(parameter.numel() for network in model.networks for parameter in network.parameters())
    colour = "grey" if prepared.channels == 1 else "colour"
    classes = ", ".join(_escape_text(name) for name in run.classes)
    yield (
        f"A classifier of images into {len(run.classes)} classes ({classes}): {section.name}{several}, {size:,} "
        f"parameters, for {colour} images of {prepared.size} × {prepared.size} pixels. It is the "
        f"{_escape_text(model.description)} of a federated run of {_escape_text(run.summary['algorithm'])} over "
        f"{len(run.summary['hospitals'])} sites, by polyclinic {run.summary['versions'].get('polyclinic', '')}."
    )
    yield "`preprocessing.json` says what an image must go through first; without it the figures below do not hold."


def _describe_data(run: ModelCatalogue, model: RunModel) -> Iterator[str]:
    private = run.summary.get("privacy") is not None
    yield f"Data set: {_escape_text(run.summary['data'])}. Images by site; those this model is for are marked ✓."
    lines = []
    for site in run.summary["hospitals"]:
        classes = ", ".join(f"{_escape_text(name)} {count}" for name, count in site["classes"].items())
        counts = [str(site[part]) for part in ("train", "validation", "test")]
        mark = "✓" if site["site"] in model.sites else ""
        lines.append([_escape_text(site["site"]), mark, *counts, "kept back" if private or not classes else classes])
    yield _render_table(["site", "", "train", "validation", "test", "classes"], lines)
    if private:
        yield "How many images of each class a site has is outside the run's privacy claim, and so not told."


def _render_metrics(run: ModelCatalogue, model: RunModel) -> Iterator[str]:
    found = {site: run.summary["sites"].get(site, {}).get(model.key, {}) for site in model.sites}
    part = "test" if any("test" in each for each in found.values()) else "validation"
    lines = [[_escape_text(site), *_metric_cells(each[part])] for site, each in found.items() if part in each]
    together = run.summary["merged"].get(model.key, {}).get(part)
    if together and len(model.sites) == len(run.summary["hospitals"]):
        lines.append(["all together", *_metric_cells(together)])
    lines += _render_held_out(run, model)
    if not lines:
        yield "No figure of this model is known: sites keep back what would be needed."
        return
    yield f"On {part} images, with bootstrap intervals (95 %) over patients where predictions were at hand:"
    yield _render_table(["site", "images", "accuracy", "balanced accuracy", "AUC", "calibration error (ECE)"], lines)
    best = run.summary["headline"]
    yield f"The run is judged by its {_escape_text(best.get('of', best['model']))} model, on {_escape_text(describe_test_images(best))}."
    if model.site is not None:
        yield f"At other sites than {_escape_text(model.site)} this model was not tried for this card."


def _render_held_out(run: ModelCatalogue, model: RunModel) -> Iterator[list[str]]:
    """On images that belong to no site, where it is this model that was tried on them."""
    apart, best = run.summary["merged"].get("held-out", {}).get("test"), ("student", "ensemble")
    whose = next((name for name in best if name in run.summary["merged"]), "global")
    if apart and model.name == whose:
        yield ["held-out, of no site", *_metric_cells(apart)]
    if public := (run.summary.get("public") or {}).get(model.name):
        yield ["public, of no site", *_metric_cells(public)]


def _metric_cells(figures: Mapping[str, Any]) -> list[str]:
    told = [_format_metric(figures, name) for name in ("accuracy", "balanced_accuracy", "auc")]
    return [str(figures["n"]), *told, format_decimal(nan_if_none(figures.get("ece")))]


def _format_metric(figures: Mapping[str, Any], name: str) -> str:
    low, high = (figures.get("intervals") or {}).get(name, (None, None))
    interval = "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
    return format_decimal(nan_if_none(figures.get(name))) + interval


def _compare_with_local(run: ModelCatalogue, model: RunModel, alone: Mapping[str, Any] | None) -> Iterator[str]:
    if alone is None:
        yield "Not known: no run in which every site trains by itself was given (`polyclinic export --alone DIR`)."
        return
    lines = []
    for site, ours, theirs in _paired_metrics(run, model, alone):
        change = ours["accuracy"] - theirs["accuracy"]
        verdict = "worse off here" if change < 0 else "as good" if change == 0 else "better off here"
        cells = [_format_metric(theirs, "accuracy"), _format_metric(ours, "accuracy"), f"{change:+.3f}", verdict]
        lines.append([_escape_text(site), str(ours["n"]), *cells])
    yield _render_table(["site", "test images", "accuracy alone", "accuracy of this model", "difference", ""], lines)
    yield "One run against one: differences were not tested, and within the intervals they may be chance."


def _paired_metrics(
    run: ModelCatalogue, model: RunModel, alone: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """Both figures of each site that has them."""
    for site in model.sites:
        ours = run.summary["sites"].get(site, {}).get(model.key, {}).get("test")
        theirs = alone["sites"].get(site, {}).get("personal", {}).get("test")
        if ours and theirs:
            yield site, ours, theirs


def _describe_calibration(run: ModelCatalogue, found: Calibration | Uncalibrated) -> str:
    if isinstance(found, Uncalibrated):
        return f"**Uncalibrated**: {found.reason}. Its probabilities may be far too sure; do not read them as chances."
    told = [
        f"Temperature scaling (Guo et al. 2017): logits are divided by {found.temperature:.4g}, fitted on "
        f"{found.images} validation images, whose calibration error (ECE, 15 bins) went from {found.ece[0]:.3f} to "
        f"{found.ece[1]:.3f}."
    ]
    if found.test_ece is not None:
        before, after = found.test_ece
        told.append(f"On {found.test_images} test images, not used for it: {before:.3f} before, {after:.3f} after.")
    told.append("It holds where images are like those; at a new site, or with another share of ill people, check it.")
    if run.summary.get("privacy"):
        told.append("This one number was computed from validation images as they are, outside the privacy claim.")
    return " ".join(told)


def _render_privacy(run: ModelCatalogue, model: RunModel) -> str:
    """The run's own page, one level deeper."""
    told = write_privacy_page({**run.summary, "name": ""}).split("\n", 1)[1].strip().replace("\n## ", "\n### ")
    if model.site is not None:
        told += (
            f"\n\nThis is the personal model of {_escape_text(model.site)}: it was made from that site's images more than "
            "from any other's, and may tell about them. Whether it may leave the site is the site's to say."
        )
    return told


def _describe_origin(run: ModelCatalogue) -> Iterator[str]:
    recipe, summary = run.recipe, run.summary
    training, hidden = recipe.training, _is_seed_secret(run)
    options = ", ".join(f"{key} {value}" for key, value in recipe.algorithm.options.items())
    budget = f"epochs: {training.epochs}" if training.epochs else f"steps: {training.steps}"
    lines = [
        ["algorithm", _escape_text(summary["algorithm"] + (f" ({options})" if options else ""))],
        ["rounds", str(summary["rounds"]) + (", stopped early" if summary.get("stopped_early") else "")],
        ["at a site, each round", f"{budget}; batches of {training.batch or f'1/{training.batches} of its images'}"],
        ["optimiser", f"{training.optimiser.name}, learning rate {training.optimiser.lr:g}"],
        ["augmentation", "yes" if training.augment else "no"],
        ["first weights", "drawn from the seed" if recipe.model.weights is None else "pretrained"],
        ["seed", PRIVATE_SEED if hidden else str(summary["seed"])],
        ["SHA-256 of the run's state", f"`{summary['sha256']}`"],
        ["versions", ", ".join(f"{name} {version}" for name, version in summary["versions"].items())],
    ]
    yield _render_table(["", ""], lines)


def _is_seed_secret(run: ModelCatalogue) -> bool:
    return (run.summary.get("privacy") or {}).get("randomness") == "seed"


def _describe_limits(
    run: ModelCatalogue, model: RunModel, calibration: Calibration | Uncalibrated, alone: Mapping[str, Any] | None
) -> Iterator[str]:
    yield "Figures are of these sites' images. At other hospitals, machines and populations they may be much worse."
    small = [site for site in run.summary["hospitals"] if site["test"] < FEW and site["site"] in model.sites]
    if small:
        named = ", ".join(f"{_escape_text(site['site'])} ({site['test']})" for site in small)
        yield f"Sites with fewer than {FEW} test images, whose figures are hardly more than a hint: {named}."
    worse = [
        site for site, ours, theirs in _paired_metrics(run, model, alone or {"sites": {}}) if _is_worse(ours, theirs)
    ]
    if worse:
        yield f"Worse off than when training alone: {', '.join(map(_escape_text, worse))}."
    elif alone is None:
        yield "Whether some site would be better off training alone is not known."
    if isinstance(calibration, Uncalibrated):
        yield "Its probabilities are not calibrated."
    if run.summary["data"] == "phantom":
        yield "It was trained on drawn images (the phantom): it knows nothing of real ones."
    yield "It always names one of its classes, also for an image that shows none of them, or no body at all."
    yield "Nobody looked for differences between sexes, ages or skin colours: labels of these were not used."


def _is_worse(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    return bool(ours["accuracy"] < theirs["accuracy"])
