"""Sentences about a diagnosis: how strong each difference is, which methods address it, and the caveats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from polyclinic.data.findings import first_places, format_places
from polyclinic.data.heterogeneity.feature_shift import FEWEST, TRUSTED

if TYPE_CHECKING:
    from polyclinic.data.heterogeneity.diagnosis import Diagnosis, SitePair

Strength = Literal["none", "weak", "moderate", "strong"]
STRENGTHS: tuple[Strength, ...] = ("none", "weak", "moderate", "strong")
Bounds: TypeAlias = tuple[float, float]
"""The values from which a difference counts as moderate and as strong."""

LEVEL = 0.05
LABELS: Bounds = (0.01, 0.05)
"""Bits above expectation. For two classes that are balanced at the other sites: proportions of about 62 % and 75 %."""
SIZES: Bounds = (0.2, 0.5)
"""The proportion of sites lost to unequal sizes: 1 − effective / all."""
RATIO = 10.0
"""A ratio of the largest to the smallest site from which the size skew is moderate, whatever the others are."""
INTENSITY: Bounds = (0.1, 0.3)
"""Standard deviations above expectation."""
DOMAIN: Bounds = (0.2, 0.5)
"""Relative to the distance from chance to perfect classification of sites."""
MMD: Bounds = (0.02, 0.1)
"""MMD² where every feature differs by about a quarter, and by 0.6, of its standard deviation."""

Method: TypeAlias = tuple[str, str]
"""The algorithm's name ("": a setting, not an algorithm), and the words that recommend it."""
FOR_LABELS: tuple[Method, ...] = (
    ("fedavg", "FedAvg with more frequent averaging"),
    ("scaffold", "SCAFFOLD"),
    ("fedprox", "FedProx"),
    ("", "oversampling (training.oversample: true)"),
    ("local", "Local, the baseline for personal models"),
    ("pfedcdp", "PFedCDP, personal models"),
)
FOR_SIZES: tuple[Method, ...] = (
    ("", "training.weights: uniform against examples"),
    ("fednova", "FedNova, where larger sites also take more steps"),
)
FOR_SCANNERS: tuple[Method, ...] = (
    ("fedavg", "a comparison of FedAvg, FedProx, SCAFFOLD and Local"),
    ("cross-site", "Cross-site, which measures what the shift costs"),
    ("fedmp", "FedMP"),
    ("fedbn", "FedBN"),
)
FOR_DOMAINS: tuple[Method, ...] = (
    ("", "averaging after every epoch (training.epochs: 1)"),
    ("local", "a comparison with Local, which was equal or better where sites mixed modalities"),
    ("fed-align", "Fed-Align-CL, against domain shift and forgetting"),
)


@dataclass(frozen=True)
class Advice:
    kind: str
    strength: Strength
    sentence: str
    methods: tuple[str, ...] = ()
    """Given only if the difference is moderate or strong."""


def recommend_methods(diagnosis: Diagnosis) -> tuple[Advice, ...]:
    """Return one piece of advice for each kind of heterogeneity, and FedAvg if none is at least moderate."""
    found = (
        _advise_labels(diagnosis),
        _advise_sizes(diagnosis),
        _advise_intensity(diagnosis),
        _advise_features(diagnosis),
    )
    if any(advice.methods for advice in found):
        return found
    sentence = (
        f"no difference of at least moderate strength was found among {sum(site.patients for site in diagnosis.sites)} "
        "patients, so plain averaging is enough to begin with."
    )
    return (*found, Advice("nothing to correct", "none", sentence, ("FedAvg",)))


def list_caveats(diagnosis: Diagnosis, unknown: Sequence[str], shared: int) -> tuple[str, ...]:
    """Return the caveats of a diagnosis.

    `unknown`: the sites that do not name their patients; `shared`: the number of patients at more than one site.
    """
    notes = [*_advise_trust(diagnosis), *_list_conditions(diagnosis)]
    if unknown:
        notes.append(
            f"Patients are unknown at {format_places(first_places(unknown), len(unknown))}: every image counts as a "
            "patient there, and if patients have several images, differences look more certain than they are."
        )
    if shared:
        notes.append(f"{shared} of the patients compared are at more than one site, which makes sites look alike.")
    notes.append(
        "These are suggestions from the images alone: only a run shows what a method gains, and the sites' computers "
        "were not compared (if they are unequal: PFedCDP)."
    )
    return tuple(notes)


def format_thresholds() -> str:
    return (
        f"A difference counts if p ≤ {LEVEL}; it is moderate, or strong, from {LABELS[0]}, {LABELS[1]} bits (labels), "
        f"{INTENSITY[0]}, {INTENSITY[1]} standard deviations (intensities) above chance, "
        f"{DOMAIN[0]:.0%}, {DOMAIN[1]:.0%} of the distance from chance to certainty (domain classifier), an MMD² of "
        f"{MMD[0]}, {MMD[1]} (features), and {SIZES[0]:.0%}, {SIZES[1]:.0%} of sites lost to unequal sizes or a "
        f"ratio of {RATIO:g} (moderate)."
    )


def _advise_labels(diagnosis: Diagnosis) -> Advice:
    skew = diagnosis.labels
    strength = _grade_strength(skew.observed - skew.expected, LABELS, skew.p)
    farthest = max(diagnosis.sites, key=lambda site: site.skew)
    figures = f"mean divergence {skew.observed:.3f} bits, {skew.expected:.3f} expected by chance, p = {skew.p:.2g}"
    sentence = f"class proportions differ between sites no more than by chance ({figures})."
    if strength != "none":
        sentence = (
            f"class proportions differ between sites ({figures}), most at {farthest.name} ({farthest.skew:.3f} bits)."
        )
    return _build_advice("label skew", strength, sentence, FOR_LABELS)


def _advise_sizes(diagnosis: Diagnosis) -> Advice:
    lost = 1 - diagnosis.effective_sites / len(diagnosis.sites)
    strength = _grade_strength(lost, SIZES)
    if strength == "weak":
        strength = "moderate" if diagnosis.size_ratio >= RATIO else "none" if lost < SIZES[0] / 2 else "weak"
    return _build_advice(
        "size skew",
        strength,
        f"{len(diagnosis.sites)} sites weigh as much as {diagnosis.effective_sites:.1f} of equal size, and the largest "
        f"has {format_ratio(diagnosis.size_ratio)} times the images of the smallest.",
        FOR_SIZES,
    )


def format_ratio(value: float) -> str:
    """ "1.5", "1,000"."""
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _advise_intensity(diagnosis: Diagnosis) -> Advice:
    measured = diagnosis.intensity
    pair = max(diagnosis.pairs, key=lambda pair: pair.intensity)
    strength = _grade_strength(measured.observed - measured.expected, INTENSITY, measured.p)
    figures = f"{measured.observed:.2f} standard deviations, {measured.expected:.2f} expected by chance"
    sentence = (
        f"grey values differ most between {pair.a} and {pair.b} ({figures} and class proportions, p = {measured.p:.2g})"
        + (", which is no more than chance." if strength == "none" else ".")
    )
    return _build_advice("intensity shift", strength, sentence, FOR_SCANNERS)


def _advise_features(diagnosis: Diagnosis) -> Advice:
    compared = [(pair, pair.holm) for pair in diagnosis.pairs if pair.holm is not None]
    differing = [pair for pair, holm in compared if holm <= LEVEL]
    strength = _feature_strength(diagnosis, differing)
    domain = diagnosis.domain
    recognised = (
        ""
        if domain is None
        else (
            f"a classifier recognises the site of an unseen patient's image in {domain.accuracy:.0%} of cases "
            f"({domain.low:.0%} to {domain.high:.0%}; chance {domain.chance:.0%}, p = {domain.p:.2g}), and "
        )
    )
    pairs = f"{len(differing)} of {len(compared)} pairs of sites differ (MMD, p by permutation, Holm's correction)"
    seen = "look alike, as far as these features show" if strength == "none" else "look different at different sites"
    methods = FOR_SCANNERS + (FOR_DOMAINS if strength == "strong" else ())
    return _build_advice("feature shift", strength, f"images of the same class {seen}: {recognised}{pairs}.", methods)


def _feature_strength(diagnosis: Diagnosis, differing: Sequence[SitePair]) -> Strength:
    domain = diagnosis.domain
    by_classifier = "none" if domain is None else _grade_strength(domain.excess, DOMAIN, domain.p)
    distances = [pair.mmd2 for pair in differing if pair.mmd2 is not None]
    if domain is not None and domain.p <= LEVEL:
        # With many sites, no single pair may be significant although all differ: take the mean distance.
        everyone = [pair.mmd2 for pair in diagnosis.pairs if pair.mmd2 is not None]
        distances.append(sum(everyone) / max(1, len(everyone)))
    by_pairs = _grade_strength(max(distances), MMD) if distances else "none"
    return max(by_classifier, by_pairs, key=STRENGTHS.index)


def _advise_trust(diagnosis: Diagnosis) -> list[str]:
    domain, names = diagnosis.domain, [site.name for site in diagnosis.sites]
    if domain is None:
        return [f"There is no domain classifier: fewer than two sites have {FEWEST} patients to train and test it."]
    notes = []
    if left := [name for name in names if name not in domain.sites]:
        notes.append(
            f"The domain classifier leaves out {format_places(first_places(left), len(left))}, with fewer than "
            f"{FEWEST} patients."
        )
    if not domain.is_trusted:
        notes.append(
            f"The domain classifier cannot be trusted: it had {domain.patients} patients per site, and needs {TRUSTED}."
        )
    if not domain.balanced:
        notes.append(
            "The sites have too few patients of the same classes to balance the domain classifier, so its chance level "
            "is what the classes alone reveal, and its accuracy above chance is a cautious figure."
        )
    return notes


def _list_conditions(diagnosis: Diagnosis) -> list[str]:
    notes = []
    if apart := sum(pair.holm is None for pair in diagnosis.pairs):
        notes.append(
            f"{apart} of {len(diagnosis.pairs)} pairs of sites have no class in common to compare images within, so "
            "that label skew and feature shift cannot be separated there."
        )
    smallest = (len(diagnosis.pairs) - apart) / (1 + diagnosis.permutations)
    if smallest > LEVEL:
        notes.append(
            f"With so many pairs, no single pair can be significant (the smallest possible p is {smallest:.2g}); use "
            "the domain classifier instead."
        )
    return notes


def _build_advice(kind: str, strength: Strength, sentence: str, methods: Sequence[Method]) -> Advice:
    return Advice(
        kind, strength, sentence, tuple(words for _, words in methods) if strength in ("moderate", "strong") else ()
    )


def _grade_strength(value: float, bounds: Bounds, p: float = 0.0) -> Strength:
    if p > LEVEL:
        return "none"
    return "strong" if value >= bounds[1] else "moderate" if value >= bounds[0] else "weak"
