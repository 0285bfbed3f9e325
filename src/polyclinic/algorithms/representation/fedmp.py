"""FedMP: completing and aligning feature manifolds. Zhou, Liu, Zhou, Liu, Yang, Zhu, Luo: FedMP: Tackling medical
feature heterogeneity in federated learning from a manifold perspective. 2025. f: the extractor, h: the head (where a
network is cut, `model.cut` says); u: a feature of another site, with its label; p_c: the prototype of class c.

    (5)  SFMC  = mean over the step's sample of others' features of CE(h(u), y_u)
    (8)  cPGMA = mean over the batch's classes c of mean_{images of c} (1 − cos(f(x), p_c))
    (1)  L = CE + SFMC / r(SFMC) + cPGMA / r(cPGMA),   r(ℓ) = ℓ/CE, between 1/10 and 10, no gradient through r
    (6)  z̄_kc ← (1 − μ_c)·z̄_kc + μ_c · mean of f(x) over site k's images of class c
    (7)  p_c  ← (1 − μ_s)·p_c + μ_s · Σ_k n_kc·z̄_kc / Σ_k n_kc
         w    ← Σ_k (n_k / n) · w_k

A site sends up to `bank` features of each class, drawn anew in every round and computed after its training as in
evaluation; the server keeps the last ones of every site. A site receives up to `receive` of each class, in turn from
all others; each step takes `sample` of these at random. Foreign features pass the head as in evaluation: they shall
move none of its statistics. In the first round there are no features and no prototypes, and (1) is cross-entropy; so
it is, for a class, until somebody has told of it. `completion` and `alignment` off: FedAvg, bit for bit.

Departures. As printed (1) divides by r itself, which for (8) is negative: the term's gradient then pushes features away
from their prototypes (tests/algorithms/test_fedmp.py shows it), so no variant does. In (5) the paper adds up where we
take the mean; (1) divides this factor out. `variant: paper` has the rest as printed: (8) is −Σ_c mean cos, (1) divides
by |r|, unbounded; z̄ and p start at 0, and (7) weighs sites by n_k whether they hold the class or not.

Few-shot: few rounds of many epochs, and the sites' ensemble predicts (`training.first_epochs`, `ensemble: true`).

What leaves a site are labelled features of patients' images: `polyclinic attack` shows what can be made of them. A
class of fewer than `fewest` images is not told, neither features nor mean. Under a privacy plan (unit image) features
and means are clipped to `clip`, noised and charged (privacy/kinds.py): `noise_features` and `noise_means`. Every class
then has `bank` slots, filled or not (learning/feature_bank.py); one of so few images that its count may be noise is
withheld.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from polyclinic.algorithms.base import WEIGHT_KINDS, RunningMean, network_weights
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.algorithms.representation.feature_bank import (
    FeatureRelease,
    check_slot_counts,
    features_of_others,
    release_features,
    release_features_privately,
)
from polyclinic.algorithms.representation.fedmp_losses import completion_loss, completion_loss_paper
from polyclinic.algorithms.representation.fedmr import labelled_features
from polyclinic.core.contract import (
    Bundle,
    Exchange,
    Federation,
    Fit,
    Score,
    Site,
    SiteId,
    Stream,
    Tensors,
    Update,
    Work,
)
from polyclinic.core.errors import RecipeError, Refused
from polyclinic.training.losses import task_loss


@dataclass(frozen=True)
class FedMP(FedAvg):
    variant: Literal["sound", "paper"] = "sound"
    completion: bool = True
    """SFMC: train the head on others' features as well."""
    alignment: bool = True
    """cPGMA: pull features to their class's prototype."""
    bank: int = 16
    """Features of each class that a site sends, and the server keeps of it."""
    receive: int = 32
    """Features of each class, of all others together, that a site receives."""
    sample: int | None = None
    """Of these, so many at every step; None: 64, or of maps, with most of the network before them, a quarter of the
    batch."""
    balanced: bool = True
    """Every class as often in a step's sample; else as often as it was received."""
    mu_client: float = 0.5
    """μ_c, what the new mean counts in (6)."""
    mu_server: float = 0.7
    """μ_s, what the new prototypes count in (7)."""
    fewest: int = 3
    """A class of fewer images than this is not told."""
    clip: float = 10.0
    """Under a privacy plan: features are no longer than this."""
    noise_features: float = 20.0
    """Under a privacy plan: the noise of a round's features, in units of what an image changes; charged."""
    noise_means: float = 20.0
    """Under a privacy plan: the noise of a round's means and counts, in units of what an image changes; charged."""

    def __post_init__(self) -> None:
        for name in ("bank", "receive", "sample", "fewest"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise RecipeError(f"algorithm.{name} is {value}; choose 1 or more")
        for name in ("mu_client", "mu_server"):
            if not 0 < getattr(self, name) <= 1:
                raise RecipeError(f"algorithm.{name} is {getattr(self, name)}; choose a share above 0, up to 1")
        for name in ("clip", "noise_features", "noise_means"):
            if not getattr(self, name) > 0:
                raise RecipeError(f"algorithm.{name} is {getattr(self, name)}; choose more than 0")

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        kinds = (*(("features",) if self.completion else ()), *(("means",) if self.alignment else ()))
        return (*super().exchanges, *(Exchange(kind, like=kind) for kind in kinds))

    def privacy_releases(self) -> Mapping[str, float]:
        # Features are drawn of the classes that the means' counts told of, so these are released in any case.
        features = {"features": self.noise_features} if self.completion else {}
        return features | ({"means": self.noise_means} if self.completion or self.alignment else {})

    def init(self, federation: Federation) -> Bundle:
        first, classes = next(iter(federation.initial["model"].values())), len(federation.classes)
        state = dict(federation.initial)
        none = first.new_zeros(classes)
        if self.completion:
            slots = first.new_zeros(classes, self.bank, *federation.features)
            state["features"] = {"values": slots, "held": none}
            state["bank"] = {f"{site}/{what}": t for site in federation.sites for what, t in state["features"].items()}
        if self.alignment:
            means = {"means": first.new_zeros(classes, math.prod(federation.features)), "images": none}
            state["means"], state["prototypes"] = means, {"means": means["means"], "known": none}
        return state

    def broadcast(self, state: Bundle, site: SiteId) -> Bundle:
        sent = {kind: state[kind] for kind in (*WEIGHT_KINDS, "prototypes") if kind in state}
        return {**sent, "others": features_of_others(state["bank"], site, self.receive)} if "bank" in state else sent

    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
        reference = self._loss_reference(received, site, rng.child("others", site.round))
        joint = completion_loss if self.variant == "sound" else completion_loss_paper
        fitted = yield Fit(network_weights(received), joint if reference else task_loss, self.training, reference)
        if not (self.completion or self.alignment):
            return Update(fitted.weights, site.examples), None
        found = yield Score(fitted.weights, labelled_features)
        classes = len(received["others"]["held"] if self.completion else received["prototypes"]["known"])
        release = self._make_release(found, classes, site, rng)
        sent, kept = dict(fitted.weights), None
        if self.completion:
            sent["features"] = {"values": release.values, "held": release.held}
        if self.alignment:
            kept = {"means": self._smooth_means(release, memory)}
            sent["means"] = {"means": kept["means"]["means"], "images": release.images}
        return Update(sent, site.examples), kept

    def _loss_reference(self, received: Bundle, site: Site, rng: Stream) -> Bundle:
        """What (5) and (8) look at; nothing in the first round, or where nobody else told of anything."""
        reference: Bundle = {}
        if self.completion and bool((received["others"]["held"] > 0).any()):
            maps = received["others"]["values"].ndim > 3
            usual = max(1, self.training.batch_size(site.examples) // 4) if maps else 64
            place, key = torch.arange(self.sample or usual), torch.tensor(rng.integer() >> 2)
            reference["bank"] = {**received["others"], "key": key}
            reference["scalars"] = {"sample": place if self.balanced else -1 - place}
        if self.alignment and bool((received["prototypes"]["known"] > 0).any()):
            reference["prototypes"] = received["prototypes"]
        return reference

    def _make_release(self, found: Tensors, classes: int, site: Site, rng: Stream) -> FeatureRelease:
        own = found["features"], found["labels"].long(), classes, self.bank, self.fewest
        if self.training.private is None:
            return release_features(*own, rng.child("bank", site.round))
        assert site.secret is not None
        return release_features_privately(*own, self.clip, (self.noise_features, self.noise_means), site.secret)

    def _smooth_means(self, release: FeatureRelease, memory: Bundle | None) -> Tensors:
        """(6); a class that is not told of keeps its mean. The first value starts it, or in `paper` moves it from 0."""
        new, seen = release.means, release.images > 0
        before = {name: tensor.to(new.device) for name, tensor in memory["means"].items()} if memory else {}
        known = before.get("known", torch.zeros_like(seen))
        old = before.get("means", torch.zeros_like(new))
        start = old if self.variant == "paper" else torch.where(known[:, None], old, new)
        moved = torch.where(seen[:, None], torch.lerp(start, new, self.mu_client), old)  # (6)
        return {"means": moved, "known": known | seen}

    def check_update(self, update: Update) -> None:
        """A site weighs in (7) by what it says it has, and others learn from what it says it holds."""
        images = update.tensors.get("means", {}).get("images")
        if images is not None and (bool((images < 0).any()) or float(images.sum()) > update.examples + 0.5):
            raise Refused("examples", f"counts of classes below 0, or of more than {update.examples} images")
        check_slot_counts(update.tensors.get("features", {}), self.bank)

    def aggregate(self, state: Bundle, updates: Iterable[Update]) -> Bundle:
        averages = {kind: RunningMean() for kind in WEIGHT_KINDS}
        bank, seen = dict(state.get("bank", {})), None
        for update in updates:
            for kind, average in averages.items():
                average.add(update.tensors.get(kind, {}), self.update_weight(update))
            bank |= {f"{update.site}/{n}": t.clone() for n, t in update.tensors.get("features", {}).items()}
            if "means" in update.tensors:
                means, images = (update.tensors["means"][name] for name in ("means", "images"))
                share = images if self.variant == "sound" else torch.full_like(images, update.examples)
                weighted = {"sum": means * share[:, None], "share": share, "images": images}
                seen = {n: seen[n] + t for n, t in weighted.items()} if seen else weighted
        kept = {**state, **{kind: average.value() for kind, average in averages.items()}}
        if self.completion:
            kept["bank"] = bank
        return {**kept, "prototypes": self._update_prototypes(state["prototypes"], seen)} if seen else kept

    def _update_prototypes(self, before: Tensors, seen: Tensors) -> Tensors:
        """(7); a class that nobody told of in a round keeps its prototype."""
        here, known = seen["images"] > 0, before["known"] > 0
        new = seen["sum"] / seen["share"].clamp(min=1e-12)[:, None]
        start = before["means"] if self.variant == "paper" else torch.where(known[:, None], before["means"], new)
        moved = torch.where(here[:, None], torch.lerp(start, new, self.mu_server), before["means"])  # (7)
        return {"means": moved, "known": (known | here).to(before["known"].dtype)}
