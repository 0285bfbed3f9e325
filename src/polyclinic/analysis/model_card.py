"""What a model is, for whoever gets it: data, figures at every site, calibration, privacy, use, origin, limits.

After M. Mitchell et al.: "Model Cards for Model Reporting", FAT* 2019. It holds figures of sites, never of patients. Of
a private run whose noise was drawn from the seed it keeps the seed back, and all from which the seed could be found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from polyclinic.analysis.predict import Model, ModelCatalogue
from polyclinic.evaluation.calibration import Calibration, Uncalibrated
from polyclinic.evaluation.comparison import decimal, number, row
from polyclinic.evaluation.summary import judged_on
from polyclinic.reporting.privacy_statement import page

FEW = 30
"""Test images of a site; figures of fewer are hardly more than a hint."""
USE = """\
**Intended:** research: comparing methods, studying how models carry over between hospitals, planning a trial; by people
who can judge an image themselves.

**Not intended:** diagnosis, screening, triage, or any decision about a patient. This is **not a medical device**: it
has no CE mark and no clearance by any authority, and nobody has tried it in care. It is not for images of another kind,
body part or population than those below, nor for images prepared in another way."""
PRIVATE_SEED = "kept back: noise was drawn from it, and whoever knows it can take the noise away"


def card(
    run: ModelCatalogue,
    model: Model,
    calibration: Calibration | Uncalibrated,
    sums: Mapping[str, str],
    alone: Mapping[str, Any] | None = None,
) -> str:
    """As Markdown; `sums`: SHA-256 of the files beside it; `alone`: a run in which every site trained by itself."""
    sections = {
        "What it is": _what(run, model),
        "Intended use": [USE],
        "Data": _data(run, model),
        "How good it is": _figures(run, model),
        "Against training alone": _against(run, model, alone),
        "Calibration": [_calibration(run, calibration)],
        "Privacy": [_privacy(run, model)],
        "How it was trained": _origin(run),
        "Limits": ["\n".join(f"- {line}" for line in _limits(run, model, calibration, alone))],
        "Files": [_table(["file", "SHA-256"], [[name, f"`{digest}`"] for name, digest in sums.items()])],
    }
    body = [block for heading, blocks in sections.items() for block in (f"## {heading}", *blocks)]
    return "\n\n".join([f"# Model card: {_plain(run.summary['name'])}, {_plain(model.told)}", *body]) + "\n"


def _plain(text: object) -> str:
    """On one line, and without what Markdown or a browser would take for a sign of its own."""
    told = " ".join(str(text).split()).replace("<", "&lt;")
    return "".join(f"\\{letter}" if letter in "\\`*_[]|#" else letter for letter in told)


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join([row(head), "|" + "---|" * len(head), *map(row, lines)])


def _what(run: ModelCatalogue, model: Model) -> Iterator[str]:
    section, prepared = model.sections[0], run.preprocessing.preparation
    several = f" ({len(model.networks)} of them; their probabilities are averaged)" if len(model.networks) > 1 else ""
    size = sum(parameter.numel() for network in model.networks for parameter in network.parameters())
    colour = "grey" if prepared.channels == 1 else "colour"
    classes = ", ".join(_plain(name) for name in run.classes)
    yield (
        f"A classifier of images into {len(run.classes)} classes ({classes}): {section.name}{several}, {size:,} "
        f"parameters, for {colour} images of {prepared.size} × {prepared.size} pixels. It is the "
        f"{_plain(model.told)} of a federated run of {_plain(run.summary['algorithm'])} over "
        f"{len(run.summary['hospitals'])} sites, by polyclinic {run.summary['versions'].get('polyclinic', '')}."
    )
    yield "`preprocessing.json` says what an image must go through first; without it the figures below do not hold."


def _data(run: ModelCatalogue, model: Model) -> Iterator[str]:
    private = run.summary.get("privacy") is not None
    yield f"Data set: {_plain(run.summary['data'])}. Images by site; those this model is for are marked ✓."
    lines = []
    for site in run.summary["hospitals"]:
        classes = ", ".join(f"{_plain(name)} {count}" for name, count in site["classes"].items())
        counts = [str(site[part]) for part in ("train", "validation", "test")]
        mark = "✓" if site["site"] in model.sites else ""
        lines.append([_plain(site["site"]), mark, *counts, "kept back" if private or not classes else classes])
    yield _table(["site", "", "train", "validation", "test", "classes"], lines)
    if private:
        yield "How many images of each class a site has is outside the run's privacy claim, and so not told."


def _figures(run: ModelCatalogue, model: Model) -> Iterator[str]:
    found = {site: run.summary["sites"].get(site, {}).get(model.key, {}) for site in model.sites}
    part = "test" if any("test" in each for each in found.values()) else "validation"
    lines = [[_plain(site), *_cells(each[part])] for site, each in found.items() if part in each]
    together = run.summary["merged"].get(model.key, {}).get(part)
    if together and len(model.sites) == len(run.summary["hospitals"]):
        lines.append(["all together", *_cells(together)])
    lines += _elsewhere(run, model)
    if not lines:
        yield "No figure of this model is known: sites keep back what would be needed."
        return
    yield f"On {part} images, with bootstrap intervals (95 %) over patients where predictions were at hand:"
    yield _table(["site", "images", "accuracy", "balanced accuracy", "AUC", "calibration error (ECE)"], lines)
    best = run.summary["headline"]
    yield f"The run is judged by its {_plain(best.get('of', best['model']))} model, on {_plain(judged_on(best))}."
    if model.site is not None:
        yield f"At other sites than {_plain(model.site)} this model was not tried for this card."


def _elsewhere(run: ModelCatalogue, model: Model) -> Iterator[list[str]]:
    """On images that belong to no site, where it is this model that was tried on them."""
    apart, best = run.summary["merged"].get("held-out", {}).get("test"), ("student", "ensemble")
    whose = next((name for name in best if name in run.summary["merged"]), "global")
    if apart and model.name == whose:
        yield ["held-out, of no site", *_cells(apart)]
    if public := (run.summary.get("public") or {}).get(model.name):
        yield ["public, of no site", *_cells(public)]


def _cells(figures: Mapping[str, Any]) -> list[str]:
    told = [_figure(figures, name) for name in ("accuracy", "balanced_accuracy", "auc")]
    return [str(figures["n"]), *told, decimal(number(figures.get("ece")))]


def _figure(figures: Mapping[str, Any], name: str) -> str:
    low, high = (figures.get("intervals") or {}).get(name, (None, None))
    interval = "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
    return decimal(number(figures.get(name))) + interval


def _against(run: ModelCatalogue, model: Model, alone: Mapping[str, Any] | None) -> Iterator[str]:
    if alone is None:
        yield "Not known: no run in which every site trains by itself was given (`polyclinic export --alone DIR`)."
        return
    lines = []
    for site, ours, theirs in _pairs(run, model, alone):
        change = ours["accuracy"] - theirs["accuracy"]
        verdict = "worse off here" if change < 0 else "as good" if change == 0 else "better off here"
        cells = [_figure(theirs, "accuracy"), _figure(ours, "accuracy"), f"{change:+.3f}", verdict]
        lines.append([_plain(site), str(ours["n"]), *cells])
    yield _table(["site", "test images", "accuracy alone", "accuracy of this model", "difference", ""], lines)
    yield "One run against one: differences were not tested, and within the intervals they may be chance."


def _pairs(
    run: ModelCatalogue, model: Model, alone: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """Both figures of each site that has them."""
    for site in model.sites:
        ours = run.summary["sites"].get(site, {}).get(model.key, {}).get("test")
        theirs = alone["sites"].get(site, {}).get("personal", {}).get("test")
        if ours and theirs:
            yield site, ours, theirs


def _calibration(run: ModelCatalogue, found: Calibration | Uncalibrated) -> str:
    if isinstance(found, Uncalibrated):
        return f"**Uncalibrated**: {found.why}. Its probabilities may be far too sure; do not read them as chances."
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


def _privacy(run: ModelCatalogue, model: Model) -> str:
    """The run's own page, one level deeper."""
    told = page({**run.summary, "name": ""}).split("\n", 1)[1].strip().replace("\n## ", "\n### ")
    if model.site is not None:
        told += (
            f"\n\nThis is the personal model of {_plain(model.site)}: it was made from that site's images more than "
            "from any other's, and may tell about them. Whether it may leave the site is the site's to say."
        )
    return told


def _origin(run: ModelCatalogue) -> Iterator[str]:
    recipe, summary = run.recipe, run.summary
    training, hidden = recipe.training, _seed_is_secret(run)
    options = ", ".join(f"{key} {value}" for key, value in recipe.algorithm.options.items())
    budget = f"epochs: {training.epochs}" if training.epochs else f"steps: {training.steps}"
    lines = [
        ["algorithm", _plain(summary["algorithm"] + (f" ({options})" if options else ""))],
        ["rounds", str(summary["rounds"]) + (", stopped early" if summary.get("stopped_early") else "")],
        ["at a site, each round", f"{budget}; batches of {training.batch or f'1/{training.batches} of its images'}"],
        ["optimiser", f"{training.optimiser.name}, learning rate {training.optimiser.lr:g}"],
        ["augmentation", "yes" if training.augment else "no"],
        ["first weights", "drawn from the seed" if recipe.model.weights is None else "pretrained"],
        ["seed", PRIVATE_SEED if hidden else str(summary["seed"])],
        ["SHA-256 of the run's state", f"`{summary['sha256']}`"],
        ["versions", ", ".join(f"{name} {version}" for name, version in summary["versions"].items())],
    ]
    yield _table(["", ""], lines)


def _seed_is_secret(run: ModelCatalogue) -> bool:
    return (run.summary.get("privacy") or {}).get("randomness") == "seed"


def _limits(
    run: ModelCatalogue, model: Model, calibration: Calibration | Uncalibrated, alone: Mapping[str, Any] | None
) -> Iterator[str]:
    yield "Figures are of these sites' images. At other hospitals, machines and populations they may be much worse."
    small = [site for site in run.summary["hospitals"] if site["test"] < FEW and site["site"] in model.sites]
    if small:
        named = ", ".join(f"{_plain(site['site'])} ({site['test']})" for site in small)
        yield f"Sites with fewer than {FEW} test images, whose figures are hardly more than a hint: {named}."
    worse = [site for site, ours, theirs in _pairs(run, model, alone or {"sites": {}}) if _is_worse(ours, theirs)]
    if worse:
        yield f"Worse off than when training alone: {', '.join(map(_plain, worse))}."
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
