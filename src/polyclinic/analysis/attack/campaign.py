"""All attacks on a finished run, site by site and stage by stage, and what they come to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from polyclinic.analysis.attack.attacker_data import AttackSplit, split_for_attack
from polyclinic.analysis.attack.decoder import DecoderTraining
from polyclinic.analysis.attack.feature_inversion import (
    GUESSES,
    UNREAD,
    FeatureAttack,
    InversionFindings,
    InversionScores,
    Judge,
    clip_and_noise,
    extract_features,
    invert_features,
    mean_scores,
)
from polyclinic.analysis.attack.figure import COLUMNS, draw_gallery, select_spread
from polyclinic.analysis.attack.gradient_inversion import GradientInversion, Search, invert_batches
from polyclinic.analysis.attack.image_similarity import THRESHOLD, gaussian_window
from polyclinic.core.contract import SiteId, Stream
from polyclinic.core.errors import RecipeError
from polyclinic.core.text import slugify
from polyclinic.data.examples import Images, Selection
from polyclinic.data.loading.options import NORMALISATIONS
from polyclinic.models import build_model, load_weights
from polyclinic.models.classifier import Classifier
from polyclinic.models.split_point import count_stages, cut_after
from polyclinic.runs.finished_run import FinishedRun
from polyclinic.storage.run_files import explain_os_errors, write_json

SITES = 3
"""FedMP's figures are means over three sites."""
JUDGED_AT = 224
"""Pixels a side at which MobileNetV2 looks at pictures."""


err = Console(stderr=True)


@dataclass(frozen=True)
class AttackOptions:
    """What shall be attacked, and how hard."""

    sites: tuple[SiteId, ...] = ()
    """None named: the first three."""
    stages: tuple[int, ...] = ()
    """None named: all."""
    effort: DecoderTraining = field(default_factory=DecoderTraining)
    most: int = 1000
    """Images of a site that are used."""
    clip: float | None = None
    noise: float = 0.0
    """Protected features are attacked too, if there is a clip."""
    fid_weights: Path | None = None
    inversion: int = 0
    """Images behind each gradient that is attacked."""
    search: Search = field(default_factory=Search)
    step_clip: float = 1.0
    step_noise: float = 1.0


@dataclass(frozen=True, eq=False)
class Target:
    """A site under attack."""

    site: SiteId
    file: str
    """Its name as part of a file's."""
    model: str
    network: Classifier
    halves: AttackSplit
    judge: Judge
    stages: tuple[int, ...]


def attack_run(past: FinishedRun, wishes: AttackOptions, stream: Stream) -> dict[str, Any]:
    """Attack every site and stage; writes attack.json and galleries into the run's folder."""
    targets = [_load_target(past, wishes, site, stream) for site in _choose_sites(past, wishes.sites)]
    folder = past.folder / "attack"
    with explain_os_errors(folder):
        folder.mkdir(mode=0o700, exist_ok=True)  # its pictures show patients
    found = {target.site: _attack_features(past, wishes, target, folder, stream) for target in targets}
    inverted = {
        target.site: _attack_gradients(wishes, target, folder, stream) for target in targets if wishes.inversion
    }
    told = _build_report(past, wishes, targets, found, inverted) | {"seed": stream.seed}
    write_json(folder / "attack.json", told)
    return told


def _choose_sites(past: FinishedRun, wanted: Sequence[SiteId]) -> list[SiteId]:
    there = list(past.dataset.sites)
    for site in wanted:
        if site not in there:
            raise RecipeError(f"there is no site {site!r:.60} in this run; choose among {', '.join(there[:12])}")
    return list(dict.fromkeys(wanted)) or there[:SITES]


def _load_target(past: FinishedRun, wishes: AttackOptions, site: SiteId, stream: Stream) -> Target:
    model, network = past.site_network(site)
    last = count_stages(network)
    for stage in wishes.stages:
        if not 1 <= stage <= last:
            raise RecipeError(f"--stages has {stage}, but the network of {site} has stages 1 to {last}")
    examples = past.dataset.sites[site].train
    assert isinstance(examples, (Images, Selection))
    halves = split_for_attack(site, examples, stream.child("images", site), wishes.most, past.device)
    others = [slugify(name) for name in past.dataset.sites if name != site]
    number = list(past.dataset.sites).index(site) + 1
    file = f"{slugify(site)}-{number}" if slugify(site) in others else slugify(site)
    judge = _load_mobilenet(wishes.fid_weights, past.device) if wishes.fid_weights else _network_judge(network, halves)
    return Target(site, file, model, network, halves, judge, wishes.stages or tuple(range(1, last + 1)))


def _network_judge(network: Classifier, halves: AttackSplit) -> Judge:
    extractor = cut_after(network, count_stages(network)).extractor
    return lambda pixels: extract_features(extractor, halves.normalise, pixels)


def _load_mobilenet(weights: Path, device: torch.device) -> Judge:
    module = build_model("mobilenet_v2", classes=2, channels=3, size=JUDGED_AT, seed=Stream(0))
    load_weights(module, weights)
    extractor = module.extractor.to(device).eval()

    def seen(pixels: Tensor) -> Tensor:
        mean, deviation = (pixels.new_tensor(values).view(3, 1, 1) for values in NORMALISATIONS["imagenet"])
        colour = (pixels.expand(-1, 3, -1, -1) - mean) / deviation
        return F.interpolate(colour, size=(JUDGED_AT, JUDGED_AT), mode="bilinear", align_corners=False)

    return lambda pixels: extract_features(extractor, seen, pixels)


def _attack_features(
    past: FinishedRun, wishes: AttackOptions, target: Target, folder: Path, stream: Stream
) -> dict[int, InversionFindings]:
    untrained = past.untrained_network(target.site, stream.child("untrained", target.site))
    disguise = None if wishes.clip is None else clip_and_noise(wishes.clip, wishes.noise)
    found = {}
    for stage in target.stages:
        with err.status(f"{target.site}: features of stage {stage}"):
            own = stream.child("features", target.site, stage)
            won = invert_features(
                target.network, untrained, stage, target.halves, target.judge, wishes.effort, own, disguise
            )
            title = f"{target.site}, features of stage {stage}: from best (left) to worst; figures: SSIM"
            _draw_gallery(won, target.halves, title, folder / f"gallery-{target.file}-stage{stage}.png")
            found[stage] = won.findings
    return found


def _draw_gallery(won: FeatureAttack, halves: AttackSplit, title: str, path: Path) -> None:
    chosen = select_spread(won.similarity["decoder"][0]).to(halves.target_images.device)
    guesses = {GUESSES[name]: guess[chosen] for name, guess in won.guesses.items()}
    alike = {GUESSES[name]: found[0][chosen] for name, found in won.similarity.items()}
    draw_gallery(halves.target_images[chosen], guesses, alike, title, path)


def _attack_gradients(wishes: AttackOptions, target: Target, folder: Path, stream: Stream) -> GradientInversion:
    images, own = wishes.inversion, stream.child("gradients", target.site)
    with err.status(f"{target.site}: gradients"):
        won = invert_batches(
            target.network, target.halves, images, wishes.search, wishes.step_clip, wishes.step_noise, own
        )
        title = f"{target.site}, gradients of {images} image{'s' * (images > 1)} each; figures: SSIM"
        guesses, alike = ({name: t[:COLUMNS] for name, t in group.items()} for group in (won.guesses, won.ssim))
        draw_gallery(won.originals[:COLUMNS], guesses, alike, title, folder / f"gallery-{target.file}-gradient.png")
    return won


def _build_report(
    past: FinishedRun,
    wishes: AttackOptions,
    targets: Sequence[Target],
    found: Mapping[SiteId, Mapping[int, InversionFindings]],
    inverted: Mapping[SiteId, GradientInversion],
) -> dict[str, Any]:
    numbers = sorted({stage for here in found.values() for stage in here})
    means = {n: mean_scores([here[n].guesses for here in found.values() if n in here]) for n in numbers}
    leaking = {n: _count_leaks(here[n] for here in found.values() if n in here) for n in numbers}
    return {
        "run": past.recipe.name,
        "protection": None if wishes.clip is None else {"clip": wishes.clip, "noise": wishes.noise},
        "threshold": THRESHOLD,
        "ssim_window": len(gaussian_window(past.dataset.size)),
        "frechet_network": _judge_name(wishes),
        "decoder_steps": wishes.effort.steps,
        "sites": {
            target.site: {
                "model": target.model,
                "attackers_images": len(target.halves.attacker_images),
                "attacked_images": len(target.halves.target_images),
                "stages": {str(n): asdict(findings) for n, findings in found[target.site].items()},
                **({"gradients": inverted[target.site].as_json()} if inverted else {}),
            }
            for target in targets
        },
        "mean": {str(n): {guess: asdict(figures) for guess, figures in row.items()} for n, row in means.items()},
        "leaks": {str(n): row for n, row in leaking.items()},
        "verdict": format_verdict(means, leaking, list(inverted.values())),
    }


def _judge_name(wishes: AttackOptions) -> str:
    if wishes.fid_weights is None:
        return "the last stage of the run's own network"
    return f"MobileNetV2 ({wishes.fid_weights.name}), at {JUDGED_AT} pixels"


def _count_leaks(sites: Iterable[InversionFindings]) -> dict[str, int]:
    """At how many sites each guess that reads features is a leak."""
    total: dict[str, int] = {}
    for findings in sites:
        for guess, leak in findings.leaks.items():
            total[guess] = total.get(guess, 0) + leak
    return total


def format_verdict(
    means: Mapping[int, Mapping[str, InversionScores]],
    leaking: Mapping[int, Mapping[str, int]],
    inverted: Sequence[GradientInversion],
) -> str:
    """All of it in one sentence."""
    bad = [n for n in means if leaking[n]["decoder"]]
    good = [n for n in means if n not in bad]
    parts = []
    if bad:
        worst = means[bad[0]]
        guesses = [worst[guess] for guess in UNREAD]
        best = max(g.ssim for g in guesses), min(g.l2 for g in guesses), max(g.recognised for g in guesses)
        here = worst["decoder"].ssim, worst["decoder"].l2, worst["decoder"].recognised
        parts.append(
            f"features of {_format_stages(bad)} give images away (stage {bad[0]}: {_format_figures(here)}; without a decoder at "
            f"best {_format_figures(best)})"
        )
    if good:
        parts.append(f"this decoder makes nothing of {_format_stages(good)} that the attacker's own images do not show")
    if any("protected" in row for row in leaking.values()):
        left = [n for n in means if leaking[n].get("protected")]
        still = f"{_format_stages(left)} still leak{'s' * (len(left) == 1)}" if left else "none leaks"
        parts.append(f"as protected here, {still}")
    sentence = "; ".join([*parts, *_format_gradients(inverted)])
    return f"{sentence[0].upper()}{sentence[1:]}."


def _format_figures(found: tuple[float, float, float]) -> str:
    return f"SSIM {found[0]:.2f}, L2 {found[1]:.2f}, {found[2]:.0%} recognised"


def _format_gradients(inverted: Sequence[GradientInversion]) -> list[str]:
    if not inverted:
        return []
    open_, hidden = (any(found.does_leak(kind) for found in inverted) for kind in ("plain", "protected"))
    first = "gradients give images away" if open_ else "this search finds no image behind gradients"
    second = "do so still" if hidden and open_ else "do not"
    return [first, *([f"clipped and noised they {second}"] if open_ else [])]


def _format_stages(numbers: Sequence[int]) -> str:
    *most, last = map(str, numbers)
    return f"stages {', '.join(most)} and {last}" if most else f"stage {last}"
