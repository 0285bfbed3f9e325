"""Where finished runs' networks look, for cases that say something: Grad-CAM.

R. R. Selvaraju et al.: "Grad-CAM: Visual Explanations from Deep Networks via Gradient-based Localization", ICCV 2017:

    (1)  α_k = (1/Z)·Σ_ij ∂y_c / ∂A_k,ij        y_c: the logit of class c; A_k: a map with Z places
    (2)  L_c = ReLU(Σ_k α_k·A_k)

A are the last maps, before pooling, with more than one place; `stage` asks for those of an earlier stage, which are
finer. Computed by captum's LayerGradCam: MONAI has Grad-CAM, too, but captum is a dependency already.

Cases are those of Fed-Align-CL (Jiménez-Sánchez et al. 2021, Figure 5): right by all runs, wrong by all, right by the
last run alone, wrong by the last run alone. Which of a group's images are shown is drawn, not picked. Of a single run:
right and wrong, most and least certain.

A map tells what raised the class' logit, in a blurred way. It is no proof that the network looks for the disease.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from polyclinic.core.contract import SiteId, Stream
from polyclinic.core.errors import DataError, RecipeError
from polyclinic.data.examples import Images, Selection
from polyclinic.data.patients import Indices
from polyclinic.evaluation.metrics import Floats
from polyclinic.models.classifier import Classifier
from polyclinic.models.split_point import chained_layers, count_stages, cut_after
from polyclinic.runs.finished_run import FinishedRun, check_same_images, run_names
from polyclinic.runs.sites import FederatedDataset
from polyclinic.training.fit import evaluation_batch_size

TRUTH, PREDICTION = "truth", "prediction"
MOST = 10
"""Cases of a group; the picture of more cannot be read."""
BINS = 64
IMAGES, PIXELS = 400, 4096
"""Of a site, and of an image, at most, that enter a histogram."""


@dataclass(frozen=True)
class SaliencyOptions:
    """How many cases, and which class is explained."""

    of: str = PREDICTION
    """truth: the class that the image has; prediction: the one that each run takes it for; else a class by its name."""
    cases: int = 3
    """Of every group."""
    stage: int | None = None
    """Whose maps are shown; None: the last ones."""


@dataclass(frozen=True, eq=False)
class TestPredictions:
    """All sites' test images, and what every run says of them."""

    site: Indices
    """The number of each image's site …"""
    row: Indices
    """… and the image's place among that site's test images."""
    truth: Indices
    probabilities: Floats
    """Runs × images × classes."""

    @property
    def predicted_classes(self) -> Indices:
        classes: Indices = self.probabilities.argmax(axis=-1)
        return classes

    @property
    def is_correct(self) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = self.predicted_classes == self.truth
        return found


@dataclass(frozen=True, eq=False)
class CaseGroup:
    """Images that the runs agree or differ about, and those of them that are shown."""

    name: str
    images: int
    shown: Indices
    """Places among the answers."""


@dataclass(frozen=True, eq=False)
class Saliency:
    """What one run makes of one case."""

    predicted: int
    probability: float
    """Of the class that is predicted."""
    explained: int
    map: Tensor
    """On the CPU, as fine as the network's maps: places down × places across; nothing is negative."""


@dataclass(frozen=True, eq=False)
class Case:
    group: str
    site: SiteId
    row: int
    """Its place among the site's test images: a number that tells nothing of the patient."""
    truth: int
    image: Tensor
    """Channels × height × width in [0, 1], on the CPU."""
    saliencies: tuple[Saliency, ...]
    """One for each run."""


@dataclass(frozen=True, eq=False)
class Explanation:
    names: tuple[str, ...]
    """Of the runs."""
    classes: tuple[str, ...]
    of: str
    accuracy: tuple[float, ...]
    """Of each run, on all test images of all sites."""
    images: int
    groups: tuple[CaseGroup, ...]
    cases: tuple[Case, ...]


def explain_runs(runs: Sequence[FinishedRun], options: SaliencyOptions, stream: Stream) -> Explanation:
    """The same cases in every run."""
    first = runs[0].dataset
    for past in runs[1:]:
        check_same_images(past, runs[0])
    if options.of not in (TRUTH, PREDICTION, *first.classes):
        raise RecipeError(
            f"--of is {options.of!r:.60}, which is no class; choose truth, prediction, or one of "
            f"{', '.join(first.classes[:12])}"
        )
    answers, names = predict_test_images(runs, options), run_names(runs)
    groups = group_by_agreement(answers, names, options.cases, stream)
    shown = np.concatenate([group.shown for group in groups])
    if not len(shown):
        raise DataError(
            "no test image is right by all runs, wrong by all, or right or wrong by the last alone; give fewer runs"
        )
    looks = zip(*(_explain_run(past, answers, number, shown, options) for number, past in enumerate(runs)), strict=True)
    called = [group.name for group in groups for _ in group.shown]
    cases = [
        _build_case(first, answers, at, group, seen)
        for at, group, seen in zip(shown.tolist(), called, looks, strict=True)
    ]
    accuracy = tuple(answers.is_correct.mean(axis=1).tolist())
    return Explanation(names, first.classes, options.of, accuracy, len(answers.truth), tuple(groups), tuple(cases))


def predict_test_images(runs: Sequence[FinishedRun], options: SaliencyOptions) -> TestPredictions:
    """What every run's network, at each site the one that the site computes with, says of the site's test images."""
    held = {name: site.test for name, site in runs[0].dataset.sites.items()}
    sizes = [len(examples) for examples in held.values()]
    if not sum(sizes):
        raise DataError(
            "no site has a test image, so there is no case to show; give runs whose data.split has a test part"
        )
    return TestPredictions(
        np.repeat(np.arange(len(sizes)), sizes),
        np.concatenate([np.arange(size) for size in sizes]),
        np.concatenate([examples.labels.cpu().numpy() for examples in held.values()]),
        np.stack([_predict_run(past, options) for past in runs]),
    )


@torch.no_grad()
def _predict_run(run: FinishedRun, options: SaliencyOptions) -> Floats:
    found = []
    for name, site in run.dataset.sites.items():
        if not len(site.test):
            continue
        network = run.site_network(name)[1]
        _check_explainable(network, run, name, options.stage)
        parts = torch.split(torch.arange(len(site.test)), evaluation_batch_size(run.device))
        found += [network(site.test.batch(rows)[0].to(run.device)).double().softmax(-1).cpu() for rows in parts]
    probabilities: Floats = torch.cat(found).numpy()
    if not np.isfinite(probabilities).all():
        raise DataError(f"the network of {run.folder} gives values that are not finite; train it anew")
    return probabilities


def _check_explainable(network: Classifier, run: FinishedRun, site: SiteId, stage: int | None) -> None:
    if not any(isinstance(module, nn.Conv2d) for module in network.modules()):
        raise RecipeError(
            f"the network of {run.folder} at {site} has no convolution, so there is no map to show; give runs of "
            "convolutional networks"
        )
    if stage is not None and not 1 <= stage <= count_stages(network):
        raise RecipeError(
            f"--stage is {stage}, but the network of {run.folder} has stages 1 to {count_stages(network)}"
        )


def group_by_agreement(answers: TestPredictions, names: Sequence[str], most: int, stream: Stream) -> list[CaseGroup]:
    """Every group, with up to `most` of its images, evenly over sites."""
    if len(names) == 1:
        return _order_by_certainty(answers, most)
    right, last = answers.is_correct, names[-1]
    others = right[:-1]
    masks = {
        "right by all": right.all(axis=0),
        "wrong by all": ~right.any(axis=0),
        f"right by {last} alone": right[-1] & ~others.any(axis=0),
        f"wrong by {last} alone": ~right[-1] & others.all(axis=0),
    }
    drawn = np.random.default_rng(stream.integer()).permutation(len(answers.truth))
    return [
        CaseGroup(name, int(mask.sum()), _select_evenly(drawn[mask[drawn]], answers.site, most))
        for name, mask in masks.items()
    ]


def _order_by_certainty(answers: TestPredictions, most: int) -> list[CaseGroup]:
    """The most certain are of the more certain half, so that nobody is shown among the least certain, too."""
    certain = np.argsort(-answers.probabilities[0].max(axis=-1), kind="stable")
    groups = []
    for name, mask in {"right": answers.is_correct[0], "wrong": ~answers.is_correct[0]}.items():
        members = certain[mask[certain]]
        more, less = np.split(members, [-(-len(members) // 2)])
        for told, half in (("most", more), ("least", less[::-1])):
            groups.append(CaseGroup(f"{name}, {told} certain", len(members), _select_evenly(half, answers.site, most)))
    return groups


def _select_evenly(order: Indices, site: Indices, most: int) -> Indices:
    """Every site's first image, as they come in `order`, then every site's second, …; shown site by site."""
    turn = np.zeros(len(order), dtype=np.int64)
    for number in np.unique(site[order]):
        here = site[order] == number
        turn[here] = np.arange(here.sum())
    taken = order[np.argsort(turn, kind="stable")[:most]]
    by_site: Indices = taken[np.argsort(site[taken], kind="stable")]
    return by_site


def _explain_run(
    run: FinishedRun, answers: TestPredictions, number: int, shown: Indices, options: SaliencyOptions
) -> list[Saliency]:
    """One run's look at every case that is shown."""
    predicted = answers.predicted_classes[number]
    explained = _classes_to_explain(answers, predicted, run.dataset.classes, options.of)
    maps: dict[int, Tensor] = {}
    for number, name in enumerate(run.dataset.sites):
        here = shown[answers.site[shown] == number]
        if len(here):
            images = run.dataset.sites[name].test.batch(torch.from_numpy(answers.row[here]))[0].to(run.device)
            found = grad_cam(run.site_network(name)[1], images, torch.from_numpy(explained[here]), options.stage)
            maps.update(zip(here.tolist(), found.cpu(), strict=True))
    certainty = answers.probabilities[number].max(axis=-1)
    return [Saliency(int(predicted[at]), float(certainty[at]), int(explained[at]), maps[at]) for at in shown.tolist()]


def _classes_to_explain(answers: TestPredictions, predicted: Indices, classes: Sequence[str], of: str) -> Indices:
    if of in (TRUTH, PREDICTION):
        return answers.truth if of == TRUTH else predicted
    return np.full_like(predicted, classes.index(of))


def grad_cam(network: Classifier, images: Tensor, classes: Tensor, stage: int | None = None) -> Tensor:
    """(1) and (2): of every image one map, of places down × places across."""
    from captum.attr import LayerGradCam  # takes half a second to load

    whole, layer, before = split_at_stage(network, images, stage)
    found: Tensor = LayerGradCam(whole, layer).attribute(
        images, target=classes.to(images.device), attribute_to_layer_input=before, relu_attributions=True
    )
    return found.detach()[:, 0]


@torch.no_grad()
def split_at_stage(network: Classifier, images: Tensor, stage: int | None = None) -> tuple[nn.Module, nn.Module, bool]:
    """The same function of images, its layer with the maps, and whether these are what the layer is given."""
    if stage is not None and stage < count_stages(network):
        cut = cut_after(network, stage)
        return cut, cut.extractor, False
    layers = chained_layers(network)
    if not layers:
        return network, _find_last_map(network, images[:1]), True
    values, last = images[:1], 1
    for number, layer in enumerate(layers, 1):
        values = layer(values)
        if values.ndim == 4 and values[0, 0].numel() > 1:
            last = number
    early = nn.Sequential(*layers[:last])
    return nn.Sequential(early, *layers[last:], network.head), early, False


def _find_last_map(network: Classifier, image: Tensor) -> nn.Module:
    """The first part of an extractor, which is no chain, that is called when all its convolutions have been."""
    parts = list(network.extractor.children())
    called: list[nn.Module] = []
    inside = [module for module in network.extractor.modules() if module is not network.extractor]
    hooks = [module.register_forward_pre_hook(lambda module, _: called.append(module)) for module in inside]
    try:
        network(image)
    finally:
        for hook in hooks:
            hook.remove()
    last = max(place for place, module in enumerate(called) if isinstance(module, nn.Conv2d))
    return next(module for module in called[last + 1 :] if any(module is part for part in parts))


def resize_map(look: Saliency, image: Tensor) -> Floats:
    """A look's map as fine as the image, its largest value 1; nothing but zeros stay zeros."""
    from captum.attr import LayerAttribution

    fine = LayerAttribution.interpolate(look.map[None, None], image.shape[-2:], "bilinear")[0, 0].double()
    found: Floats = (fine / fine.max().clamp(min=torch.finfo(torch.float64).tiny)).numpy()
    return found


def _build_case(
    dataset: FederatedDataset, answers: TestPredictions, at: int, group: str, looks: tuple[Saliency, ...]
) -> Case:
    site, row = list(dataset.sites)[answers.site[at]], int(answers.row[at])
    examples = dataset.sites[site].test
    assert isinstance(examples, (Images, Selection))
    stored = examples.stored_batch(torch.tensor([row]))[0][0].cpu()
    return Case(group, site, row, int(answers.truth[at]), _to_displayable(stored), looks)


def _to_displayable(stored: Tensor) -> Tensor:
    """Pixels in [0, 1]; of images that are stored as numbers, from the image's own least to its largest."""
    if stored.dtype == torch.uint8:
        return stored.float() / 255
    low, high = stored.min(), stored.max()
    return (stored - low).float() / (high - low).clamp(min=1e-12)


@dataclass(frozen=True)
class IntensityDistribution:
    """A site's pixel values as they are stored, before they are normalised; of all channels."""

    images: int
    mean: float
    std: float
    quartiles: tuple[float, float, float]
    black: float
    """The share of pixels with the least value that any site has: background, which the curve leaves out."""
    curve: tuple[tuple[float, float], ...]
    """(value, per cent of the pixels that are not black), in equal steps over the range common to all sites."""


def measure_intensities(dataset: FederatedDataset, stream: Stream) -> Mapping[SiteId, IntensityDistribution]:
    """How bright sites' training images are (Fed-Align-CL, Figure 1)."""
    values = {name: _sample_pixels(site.train, stream.child(name)) for name, site in dataset.sites.items()}
    low, high = min(own.min() for own in values.values()), max(own.max() for own in values.values())
    return {
        name: _describe_intensity(own, float(low), float(high if low < high else low + 1))
        for name, own in values.items()
    }


def _sample_pixels(examples: object, stream: Stream) -> Floats:
    """Images × values, both drawn where there are many."""
    assert isinstance(examples, (Images, Selection))
    rows = torch.randperm(len(examples), generator=stream.child("images").generator())[:IMAGES]
    stored = examples.stored_batch(rows)[0].cpu().flatten(1)
    chosen = torch.randperm(stored.shape[1], generator=stream.child("pixels").generator())[:PIXELS]
    found: Floats = stored[:, chosen].double().numpy()
    return found


def _describe_intensity(pixels: Floats, low: float, high: float) -> IntensityDistribution:
    counts, edges = np.histogram(pixels[pixels > low], bins=BINS, range=(low, high))
    share = 100 * counts / max(1, counts.sum())
    first, middle, third = np.quantile(pixels, [0.25, 0.5, 0.75]).tolist()
    return IntensityDistribution(
        len(pixels),
        float(pixels.mean()),
        float(pixels.std()),
        (first, middle, third),
        float((pixels <= low).mean()),
        tuple(zip(((edges[:-1] + edges[1:]) / 2).tolist(), share.tolist(), strict=True)),
    )
