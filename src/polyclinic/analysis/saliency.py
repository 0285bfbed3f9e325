"""Explains predictions of finished runs by Grad-CAM, for cases on which the runs agree or differ.

R. R. Selvaraju et al.: "Grad-CAM: Visual Explanations from Deep Networks via Gradient-based Localization", ICCV 2017:

    (1)  α_k = (1/Z)·Σ_ij ∂y_c / ∂A_k,ij        y_c: the logit of class c; A_k: a map with Z places
    (2)  L_c = ReLU(Σ_k α_k·A_k)

A are the last maps, before pooling, with more than one place; `stage` asks for those of an earlier stage, which are
finer. Computed by captum's LayerGradCam: MONAI has Grad-CAM, too, but captum is a dependency already.

Cases are those of Fed-Align-CL (Jiménez-Sánchez et al. 2021, Figure 5): right by all runs, wrong by all, right by the
last run alone, wrong by the last run alone. The images shown of each group are drawn at random, not picked. For a
single run: right and wrong, most and least certain.

A map shows roughly which places raised the logit of a class. It does not prove that the network looks for the
disease.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from polyclinic.core import DataError, RecipeError, SiteId, Stream
from polyclinic.data.examples import Images, Selection
from polyclinic.data.patients import Indices
from polyclinic.evaluation.metrics import Floats
from polyclinic.models.classifier import Classifier
from polyclinic.models.modifications import chained_layers, count_stages, cut_after
from polyclinic.runs.finished_run import FinishedRun, check_same_images, run_names
from polyclinic.runs.sites import FederatedDataset
from polyclinic.training.fit import evaluation_batch_size

TRUTH, PREDICTION = "truth", "prediction"
MAX_CASES = 10
"""Of a group; a figure of more cannot be read."""
BINS = 64
IMAGES, PIXELS = 400, 4096
"""The most images of a site, and the most values of an image, that enter a histogram."""


@dataclass(frozen=True)
class SaliencyOptions:
    """Which class is explained, for how many cases, at which stage."""

    of: str = PREDICTION
    """The explained class: "truth", "prediction" (of each run), or the name of a class."""
    cases: int = 3
    """How many cases of every group are shown."""
    stage: int | None = None
    """The stage whose maps are used; None: the last maps with more than one place."""


@dataclass(frozen=True, eq=False)
class RunPredictions:
    """The test images of all sites, and every run's predictions of them."""

    site: Indices
    """The number of each image's site …"""
    row: Indices
    """… and the image's place among that site's test images."""
    truth: Indices
    probabilities: Floats
    """Runs × images × classes."""

    @property
    def predicted_classes(self) -> Indices:
        return np.asarray(self.probabilities.argmax(axis=-1))

    @property
    def is_correct(self) -> NDArray[np.bool_]:
        return np.asarray(self.predicted_classes == self.truth)


@dataclass(frozen=True, eq=False)
class CaseGroup:
    """Images on which the runs agree or differ in one way, and the ones among them that are shown."""

    name: str
    images: int
    shown: Indices
    """Rows of `RunPredictions`."""


@dataclass(frozen=True, eq=False)
class Saliency:
    """One run's prediction of one case, and its map."""

    predicted: int
    probability: float
    """Of the predicted class."""
    explained: int
    map: Tensor
    """On the CPU, in the resolution of the network's maps: rows × columns, not negative."""


@dataclass(frozen=True, eq=False)
class Case:
    group: str
    site: SiteId
    row: int
    """Its row among the site's test images: a number that reveals nothing about the patient."""
    truth: int
    image: Tensor
    """Channels × height × width in [0, 1], on the CPU."""
    saliencies: tuple[Saliency, ...]
    """One for each run."""


@dataclass(frozen=True, eq=False)
class Explanation:
    names: tuple[str, ...]
    """The names of the runs."""
    classes: tuple[str, ...]
    of: str
    accuracy: tuple[float, ...]
    """Of each run, on the test images of all sites."""
    images: int
    groups: tuple[CaseGroup, ...]
    cases: tuple[Case, ...]


def explain_runs(runs: Sequence[FinishedRun], options: SaliencyOptions, stream: Stream) -> Explanation:
    """Explain the same cases in every run.

    Args:
        runs: Finished runs on the same images.
        options: Which class is explained, for how many cases.
        stream: Decides which images of each group are shown.
    """
    first = runs[0].dataset
    for run in runs[1:]:
        check_same_images(run, runs[0])
    if options.of not in (TRUTH, PREDICTION, *first.classes):
        raise RecipeError(
            f"--of is {options.of!r:.60}, which is no class; choose truth, prediction, or one of "
            f"{', '.join(first.classes[:12])}"
        )
    predictions, names = predict_test_images(runs, options), run_names(runs)
    groups = group_by_agreement(predictions, names, options.cases, stream)
    shown = np.concatenate([group.shown for group in groups])
    if not len(shown):
        raise DataError(
            "no test image is right by all runs, wrong by all, or right or wrong by the last alone; give fewer runs"
        )
    saliencies = zip(
        *(_explain_run(run, predictions, number, shown, options) for number, run in enumerate(runs)), strict=True
    )
    named = [group.name for group in groups for _ in group.shown]
    cases = tuple(
        _build_case(first, predictions, at, group, maps)
        for at, group, maps in zip(shown.tolist(), named, saliencies, strict=True)
    )
    accuracy = tuple(predictions.is_correct.mean(axis=1).tolist())
    return Explanation(names, first.classes, options.of, accuracy, len(predictions.truth), tuple(groups), cases)


def predict_test_images(runs: Sequence[FinishedRun], options: SaliencyOptions) -> RunPredictions:
    """Predict the test images of every site with every run's network at that site."""
    held = {name: site.test for name, site in runs[0].dataset.sites.items()}
    sizes = [len(examples) for examples in held.values()]
    if not sum(sizes):
        raise DataError(
            "no site has a test image, so there is no case to show; give runs whose data.split has a test part"
        )
    return RunPredictions(
        np.repeat(np.arange(len(sizes)), sizes),
        np.concatenate([np.arange(size) for size in sizes]),
        np.concatenate([examples.labels.cpu().numpy() for examples in held.values()]),
        np.stack([_predict_run(run, options) for run in runs]),
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
    probabilities = np.asarray(torch.cat(found).numpy())
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


def group_by_agreement(predictions: RunPredictions, names: Sequence[str], most: int, stream: Stream) -> list[CaseGroup]:
    """Group the images by which runs are right; show up to `most` images of each group, evenly over sites."""
    if len(names) == 1:
        return _order_by_certainty(predictions, most)
    right, last = predictions.is_correct, names[-1]
    masks = {
        "right by all": right.all(axis=0),
        "wrong by all": ~right.any(axis=0),
        f"right by {last} alone": right[-1] & ~right[:-1].any(axis=0),
        f"wrong by {last} alone": ~right[-1] & right[:-1].all(axis=0),
    }
    drawn = np.random.default_rng(stream.integer()).permutation(len(predictions.truth))
    return [
        CaseGroup(name, int(mask.sum()), _select_evenly(drawn[mask[drawn]], predictions.site, most))
        for name, mask in masks.items()
    ]


def _order_by_certainty(predictions: RunPredictions, most: int) -> list[CaseGroup]:
    """Group a single run's images. The most certain come from the more certain half, so no case is in two groups."""
    certain = np.argsort(-predictions.probabilities[0].max(axis=-1), kind="stable")
    groups = []
    for name, mask in {"right": predictions.is_correct[0], "wrong": ~predictions.is_correct[0]}.items():
        members = certain[mask[certain]]
        more, less = np.split(members, [-(-len(members) // 2)])
        groups += [
            CaseGroup(f"{name}, {degree} certain", len(members), _select_evenly(half, predictions.site, most))
            for degree, half in (("most", more), ("least", less[::-1]))
        ]
    return groups


def _select_evenly(order: Indices, site: Indices, most: int) -> Indices:
    """Take every site's first image in `order`, then every site's second, and so on; return them site by site."""
    turn = np.zeros(len(order), dtype=np.int64)
    for number in np.unique(site[order]):
        here = site[order] == number
        turn[here] = np.arange(here.sum())
    taken = order[np.argsort(turn, kind="stable")[:most]]
    return np.asarray(taken[np.argsort(site[taken], kind="stable")])


def _explain_run(
    run: FinishedRun, predictions: RunPredictions, run_number: int, shown: Indices, options: SaliencyOptions
) -> list[Saliency]:
    """Return one run's saliency for every case that is shown."""
    predicted = predictions.predicted_classes[run_number]
    explained = {TRUTH: predictions.truth, PREDICTION: predicted}.get(options.of)
    if explained is None:
        explained = np.full_like(predicted, run.dataset.classes.index(options.of))
    maps: dict[int, Tensor] = {}
    for number, name in enumerate(run.dataset.sites):
        here = shown[predictions.site[shown] == number]
        if len(here):
            images = run.dataset.sites[name].test.batch(torch.from_numpy(predictions.row[here]))[0].to(run.device)
            found = grad_cam(run.site_network(name)[1], images, torch.from_numpy(explained[here]), options.stage)
            maps.update(zip(here.tolist(), found.cpu(), strict=True))
    certainty = predictions.probabilities[run_number].max(axis=-1)
    return [Saliency(int(predicted[at]), float(certainty[at]), int(explained[at]), maps[at]) for at in shown.tolist()]


def grad_cam(network: Classifier, images: Tensor, classes: Tensor, stage: int | None = None) -> Tensor:
    """Compute (1) and (2): a map of rows × columns for every image."""
    from captum.attr import LayerGradCam  # takes half a second to load

    whole, layer, before = split_at_stage(network, images, stage)
    found: Tensor = LayerGradCam(whole, layer).attribute(
        images, target=classes.to(images.device), attribute_to_layer_input=before, relu_attributions=True
    )
    return found.detach()[:, 0]


@torch.no_grad()
def split_at_stage(network: Classifier, images: Tensor, stage: int | None = None) -> tuple[nn.Module, nn.Module, bool]:
    """Split a network at the maps.

    Returns:
        A module that computes the same, its layer with the maps, and whether the maps are that layer's input (else its
        output).
    """
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
    """Return the first part of an extractor, not a chain, that is called after all its convolutions."""
    called: list[nn.Module] = []
    with ExitStack() as hooks:
        for module in list(network.extractor.modules())[1:]:
            hooks.callback(module.register_forward_pre_hook(lambda module, _: called.append(module)).remove)
        network(image)
    last = max(place for place, module in enumerate(called) if isinstance(module, nn.Conv2d))
    return next(module for module in called[last + 1 :] if module in set(network.extractor.children()))


def resize_map(heat: Tensor, image: Tensor) -> Floats:
    """Interpolate a map to the size of the image and scale its maximum to 1; a map of zeros stays zero."""
    from captum.attr import LayerAttribution

    fine = LayerAttribution.interpolate(heat[None, None], image.shape[-2:], "bilinear")[0, 0].double()
    return np.asarray((fine / fine.max().clamp(min=torch.finfo(torch.float64).tiny)).numpy())


def _build_case(
    dataset: FederatedDataset, predictions: RunPredictions, at: int, group: str, saliencies: tuple[Saliency, ...]
) -> Case:
    site, row = list(dataset.sites)[predictions.site[at]], int(predictions.row[at])
    examples = dataset.sites[site].test
    assert isinstance(examples, (Images, Selection))
    stored = examples.stored_batch(torch.tensor([row]))[0][0].cpu()
    return Case(group, site, row, int(predictions.truth[at]), _to_displayable(stored), saliencies)


def _to_displayable(stored: Tensor) -> Tensor:
    """Return pixels in [0, 1]. Images stored as floats are scaled from their minimum to their maximum."""
    if stored.dtype == torch.uint8:
        return stored.float() / 255
    low, high = stored.min(), stored.max()
    return (stored - low).float() / (high - low).clamp(min=1e-12)


@dataclass(frozen=True)
class IntensityDistribution:
    """The distribution of a site's pixel values as stored, before normalisation, over all channels."""

    images: int
    mean: float
    std: float
    quartiles: tuple[float, float, float]
    black: float
    """The share of pixels with the lowest value at any site: background, which the curve leaves out."""
    curve: tuple[tuple[float, float], ...]
    """(value, per cent of the pixels that are not black), in equal steps over the range of all sites."""


def measure_intensities(dataset: FederatedDataset, stream: Stream) -> Mapping[SiteId, IntensityDistribution]:
    """Measure the pixel values of each site's training images (Fed-Align-CL, Figure 1)."""
    values = {name: _sample_pixels(site.train, stream.child(name)) for name, site in dataset.sites.items()}
    low, high = min(own.min() for own in values.values()), max(own.max() for own in values.values())
    return {
        name: _describe_intensity(own, float(low), float(high if low < high else low + 1))
        for name, own in values.items()
    }


def _sample_pixels(examples: object, stream: Stream) -> Floats:
    """Return a random sample of images × values."""
    assert isinstance(examples, (Images, Selection))
    rows = torch.randperm(len(examples), generator=stream.child("images").generator())[:IMAGES]
    stored = examples.stored_batch(rows)[0].cpu().flatten(1)
    chosen = torch.randperm(stored.shape[1], generator=stream.child("pixels").generator())[:PIXELS]
    return np.asarray(stored[:, chosen].double().numpy())


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
