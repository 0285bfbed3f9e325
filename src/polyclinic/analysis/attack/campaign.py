"""Attacks a finished run: its features by site and stage, on request its gradients (`polyclinic attack`)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from polyclinic.analysis.attack.attacker_data import AttackSplit, split_for_attack
from polyclinic.analysis.attack.decoder import DecoderTraining
from polyclinic.analysis.attack.feature_inversion import (
    GUESSES,
    UNREAD,
    FeatureFunction,
    InversionFindings,
    InversionScores,
    clip_and_noise,
    extract_features,
    invert_features,
    mean_scores,
)
from polyclinic.analysis.attack.figure import COLUMNS, draw_gallery, select_spread
from polyclinic.analysis.attack.gradient_inversion import GradientInversion, Search, invert_batches
from polyclinic.analysis.attack.image_similarity import THRESHOLD, gaussian_window
from polyclinic.core import RecipeError, SiteId, Stream, slugify
from polyclinic.data.examples import Images, Selection
from polyclinic.data.loading.image_options import NORMALISATIONS
from polyclinic.models import build_model
from polyclinic.models.classifier import Classifier
from polyclinic.models.modifications import count_stages, cut_after
from polyclinic.models.weights.load import load_weights
from polyclinic.runs.finished_run import FinishedRun
from polyclinic.storage.files import explain_os_errors, write_json

SITES = 3
"""How many sites are attacked by default: FedMP reports means over three."""
MOBILENET_SIDE = 224
"""Side length in pixels of MobileNetV2's input."""
Progress: TypeAlias = Callable[[str], None]
"""Is called with a description of each step before it begins."""


@dataclass(frozen=True)
class AttackOptions:
    """The options of an attack."""

    sites: tuple[SiteId, ...] = ()
    """(): the first three."""
    stages: tuple[int, ...] = ()
    """(): all."""
    decoder_training: DecoderTraining = field(default_factory=DecoderTraining)
    most: int = 1000
    """The most images of a site that are used."""
    clip: float | None = None
    noise: float = 0.0
    """With a clip, features are also attacked as clipped and noised; the noise is in units of the clip."""
    fid_weights: Path | None = None
    inversion: int = 0
    """Images behind each gradient that is attacked; 0: no gradients are."""
    search: Search = field(default_factory=Search)
    step_clip: float = 1.0
    step_noise: float = 1.0


@dataclass(frozen=True, eq=False)
class Target:
    """A site under attack."""

    site: SiteId
    file: str
    """The site's part of file names."""
    model: str
    network: Classifier
    split: AttackSplit
    frechet_features: FeatureFunction
    stages: tuple[int, ...]


def attack_run(
    run: FinishedRun, options: AttackOptions, stream: Stream, progress: Progress = lambda _: None
) -> dict[str, Any]:
    """Attack the chosen sites and stages, and write attack.json and galleries of images into the run's folder.

    Returns:
        The content of attack.json.
    """
    targets = [_load_target(run, options, site, stream) for site in _choose_sites(run, options.sites)]
    folder = run.files.attack_folder
    with explain_os_errors(folder):
        folder.mkdir(mode=0o700, exist_ok=True)  # its pictures show patients
    found = {target.site: _attack_features(run, options, target, folder, stream, progress) for target in targets}
    inverted = {
        target.site: _attack_gradients(options, target, folder, stream, progress)
        for target in targets
        if options.inversion
    }
    report = _build_report(run, options, targets, found, inverted) | {"seed": stream.seed}
    write_json(folder / "attack.json", report)
    return report


def _choose_sites(run: FinishedRun, wanted: Sequence[SiteId]) -> list[SiteId]:
    there = list(run.dataset.sites)
    for site in wanted:
        if site not in there:
            raise RecipeError(f"there is no site {site!r:.60} in this run; choose among {', '.join(there[:12])}")
    return list(dict.fromkeys(wanted)) or there[:SITES]


def _load_target(run: FinishedRun, options: AttackOptions, site: SiteId, stream: Stream) -> Target:
    model, network = run.site_network(site)
    last = count_stages(network)
    for stage in options.stages:
        if not 1 <= stage <= last:
            raise RecipeError(f"--stages has {stage}, but the network of {site} has stages 1 to {last}")
    examples = run.dataset.sites[site].train
    assert isinstance(examples, (Images, Selection))
    split = split_for_attack(site, examples, stream.child("images", site), options.most, run.device)
    others = [slugify(name) for name in run.dataset.sites if name != site]
    number = list(run.dataset.sites).index(site) + 1
    file = f"{slugify(site)}-{number}" if slugify(site) in others else slugify(site)
    if options.fid_weights:
        frechet_features = _load_mobilenet(options.fid_weights, run.device)
    else:
        frechet_features = partial(extract_features, cut_after(network, last).extractor, split.normalise)
    return Target(site, file, model, network, split, frechet_features, options.stages or tuple(range(1, last + 1)))


def _load_mobilenet(weights: Path, device: torch.device) -> FeatureFunction:
    module = build_model("mobilenet_v2", classes=2, channels=3, size=MOBILENET_SIDE, seed=Stream(0))
    load_weights(module, weights)
    extractor = module.extractor.to(device).eval()

    def normalise(pixels: Tensor) -> Tensor:
        mean, deviation = (pixels.new_tensor(values).view(3, 1, 1) for values in NORMALISATIONS["imagenet"])
        colour = (pixels.expand(-1, 3, -1, -1) - mean) / deviation
        return F.interpolate(colour, size=(MOBILENET_SIDE, MOBILENET_SIDE), mode="bilinear", align_corners=False)

    return partial(extract_features, extractor, normalise)


def _attack_features(
    run: FinishedRun, options: AttackOptions, target: Target, folder: Path, stream: Stream, progress: Progress
) -> dict[int, InversionFindings]:
    untrained = run.untrained_network(target.site, stream.child("untrained", target.site))
    defence = None if options.clip is None else clip_and_noise(options.clip, options.noise)
    found = {}
    for stage in target.stages:
        progress(f"{target.site}: features of stage {stage}")
        own = stream.child("features", target.site, stage)
        attack = invert_features(
            target.network,
            untrained,
            stage,
            target.split,
            target.frechet_features,
            options.decoder_training,
            own,
            defence,
        )
        title = f"{target.site}, features of stage {stage}: from best (left) to worst; figures: SSIM"
        chosen = select_spread(attack.similarity["decoder"][0]).to(target.split.target_images.device)
        guesses = {GUESSES[name]: guess[chosen] for name, guess in attack.guesses.items()}
        ssim = {GUESSES[name]: similarity[0][chosen] for name, similarity in attack.similarity.items()}
        path = folder / f"gallery-{target.file}-stage{stage}.png"
        draw_gallery(target.split.target_images[chosen], guesses, ssim, title, path)
        found[stage] = attack.findings
    return found


def _attack_gradients(
    options: AttackOptions, target: Target, folder: Path, stream: Stream, progress: Progress
) -> GradientInversion:
    images, own = options.inversion, stream.child("gradients", target.site)
    progress(f"{target.site}: gradients")
    inversion = invert_batches(
        target.network, target.split, images, options.search, options.step_clip, options.step_noise, own
    )
    title = f"{target.site}, gradients of {images} image{'s' * (images > 1)} each; figures: SSIM"
    guesses, ssim = ({name: t[:COLUMNS] for name, t in group.items()} for group in (inversion.guesses, inversion.ssim))
    draw_gallery(inversion.originals[:COLUMNS], guesses, ssim, title, folder / f"gallery-{target.file}-gradient.png")
    return inversion


def _build_report(
    run: FinishedRun,
    options: AttackOptions,
    targets: Sequence[Target],
    found: Mapping[SiteId, Mapping[int, InversionFindings]],
    inverted: Mapping[SiteId, GradientInversion],
) -> dict[str, Any]:
    numbers = sorted({stage for here in found.values() for stage in here})
    means = {n: mean_scores([here[n].guesses for here in found.values() if n in here]) for n in numbers}
    leaking = {n: _count_leaks([here[n].leaks for here in found.values() if n in here]) for n in numbers}
    return {
        "run": run.recipe.name,
        "protection": None if options.clip is None else {"clip": options.clip, "noise": options.noise},
        "threshold": THRESHOLD,
        "ssim_window": len(gaussian_window(run.dataset.size)),
        "frechet_network": "the last stage of the run's own network"
        if options.fid_weights is None
        else f"MobileNetV2 ({options.fid_weights.name}), at {MOBILENET_SIDE} pixels",
        "decoder_steps": options.decoder_training.steps,
        "sites": {
            target.site: {
                "model": target.model,
                "attackers_images": len(target.split.attacker_images),
                "attacked_images": len(target.split.target_images),
                "stages": {str(n): asdict(findings) for n, findings in found[target.site].items()},
                **({"gradients": inverted[target.site].as_json()} if inverted else {}),
            }
            for target in targets
        },
        "mean": {str(n): {guess: asdict(figures) for guess, figures in row.items()} for n, row in means.items()},
        "leaks": {str(n): row for n, row in leaking.items()},
        "verdict": format_verdict(means, leaking, list(inverted.values())),
    }


def _count_leaks(sites: Sequence[Mapping[str, bool]]) -> dict[str, int]:
    """Return the number of sites at which each kind of guess from features leaks."""
    return {guess: sum(leaks[guess] for leaks in sites) for guess in sites[0]}


def format_verdict(
    means: Mapping[int, Mapping[str, InversionScores]],
    leaking: Mapping[int, Mapping[str, int]],
    inverted: Sequence[GradientInversion],
) -> str:
    """Summarise all findings in one sentence."""
    bad = [n for n in means if leaking[n]["decoder"]]
    good = [n for n in means if n not in bad]
    parts = []
    if bad:
        worst = means[bad[0]]
        guesses, decoder = [worst[guess] for guess in UNREAD], worst["decoder"]
        best = max(g.ssim for g in guesses), min(g.l2 for g in guesses), max(g.recognised for g in guesses)
        parts.append(
            f"features of {_format_stages(bad)} give images away (stage {bad[0]}: "
            f"{_format_figures(decoder.ssim, decoder.l2, decoder.recognised)}; without a decoder at best "
            f"{_format_figures(*best)})"
        )
    if good:
        parts.append(f"this decoder makes nothing of {_format_stages(good)} that the attacker's own images do not show")
    if any("protected" in row for row in leaking.values()):
        left = [n for n in means if leaking[n].get("protected")]
        still = f"{_format_stages(left)} still leak{'s' * (len(left) == 1)}" if left else "none leaks"
        parts.append(f"as protected here, {still}")
    sentence = "; ".join([*parts, *_format_gradients(inverted)])
    return f"{sentence[0].upper()}{sentence[1:]}."


def _format_figures(ssim: float, l2: float, recognised: float) -> str:
    return f"SSIM {ssim:.2f}, L2 {l2:.2f}, {recognised:.0%} recognised"


def _format_gradients(inverted: Sequence[GradientInversion]) -> list[str]:
    if not inverted:
        return []
    open_, hidden = (any(found.does_leak(kind) for found in inverted) for kind in ("plain", "protected"))
    first = "gradients give images away" if open_ else "this search finds no image behind gradients"
    return [first, f"clipped and noised they {'do so still' if hidden else 'do not'}"] if open_ else [first]


def _format_stages(numbers: Sequence[int]) -> str:
    *most, last = map(str, numbers)
    return f"stages {', '.join(most)} and {last}" if most else f"stage {last}"
