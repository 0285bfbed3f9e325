"""FedMP: completing and aligning feature manifolds. Zhou, Liu, Zhou, Liu, Yang, Zhu, Luo: FedMP: Tackling medical
feature heterogeneity in federated learning from a manifold perspective. 2025. f: the extractor, h: the head (a recipe's
`model.split_after` sets the border); u: a feature of another site, with label y_u; p_c: the prototype of class c.

    (5)  SFMC  = mean over the step's sample of others' features of CE(h(u), y_u)
    (8)  cPGMA = mean over the batch's classes c of mean_{images of c} (1 − cos(f(x), p_c))
    (1)  L = CE + SFMC / r(SFMC) + cPGMA / r(cPGMA),   r(ℓ) = ℓ/CE, between 1/10 and 10, no gradient through r
    (6)  z̄_kc ← (1 − μ_c)·z̄_kc + μ_c · mean of f(x) over site k's images of class c
    (7)  p_c  ← (1 − μ_s)·p_c + μ_s · Σ_k n_kc·z̄_kc / Σ_k n_kc
         w    ← Σ_k (n_k / n) · w_k

A site sends up to `bank` features of each class, drawn anew in every round and computed after its training in
evaluation mode; the server keeps the last ones of every site. A site receives up to `receive` of each class, taken in
turn from all others, and samples `sample` of these in each step. Foreign features pass the head in evaluation mode, so
that they do not change its statistics. In round 1, and for a class that no site has released yet, there is nothing to
learn from, and (1) is cross-entropy. With `completion` and `alignment` off it is FedAvg, bit for bit.

Departures. As printed (1) divides by r itself, which for (8) is negative: the term's gradient then pushes features away
from their prototypes (tests/algorithms/test_fedmp.py shows it), so no variant does. In (5) the paper takes the sum,
here it is the mean; (1) divides this factor out. `variant: paper` has the rest as printed: (8) is −Σ_c mean cos, (1)
divides by |r|, unbounded; z̄ and p start at 0, and (7) weights sites by n_k even if they lack the class.

Few-shot learning: few rounds of many epochs and the ensemble of sites (`training.first_epochs`, `ensemble: true`).

Labelled features of patients' images leave the site: `polyclinic attack` shows how much of an image they reveal. Of a
class with fewer than `fewest` images nothing is released. Under a privacy plan (unit image) features and means are
clipped to `clip`, noised and charged (privacy/releases.py) with `noise_features` and `noise_means`. Every class then
has `bank` slots, filled or not (feature_bank.py); a class with so few images that its count may be noise is withheld.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import PositiveFloat, PositiveInt

from polyclinic.algorithms.base import WEIGHT_KINDS, BundleMean, network_weights
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.algorithms.representation.feature_bank import (
    FeatureRelease,
    check_class_counts,
    check_slot_counts,
    features_of_others,
    labelled_features,
    release_features,
    release_features_privately,
)
from polyclinic.algorithms.representation.fedmp_losses import completion_loss, completion_loss_paper
from polyclinic.core import (
    Bundle,
    Exchange,
    Federation,
    Fit,
    PositiveShare,
    Score,
    Site,
    SiteId,
    Stream,
    Tensors,
    Update,
    Updates,
    Work,
)
from polyclinic.training.losses import task_loss


@dataclass(frozen=True)
class FedMP(FedAvg):
    site_kinds: ClassVar[tuple[str, ...]] = ("others",)
    variant: Literal["corrected", "paper"] = "corrected"
    completion: bool = True
    """SFMC: train the head on the features of other sites as well."""
    alignment: bool = True
    """cPGMA: pull features to the prototype of their class."""
    bank: PositiveInt = 16
    """Features of each class that a site sends and the server keeps."""
    receive: PositiveInt = 32
    """Features of each class that a site receives from all others together."""
    sample: PositiveInt | None = None
    """Features in a step's sample; None: 64, or a quarter of the batch if features are maps, which cost more."""
    balanced: bool = True
    """Whether all classes are equally frequent in a sample; otherwise they are as frequent as received."""
    mu_client: PositiveShare = 0.5
    """μ_c, the weight of the new mean in (6)."""
    mu_server: PositiveShare = 0.7
    """μ_s, the weight of the new prototypes in (7)."""
    fewest: PositiveInt = 3
    """The least number of images of a class that is released."""
    clip: PositiveFloat = 10.0
    """Under a privacy plan: the norm to which features are clipped."""
    noise_features: PositiveFloat = 20.0
    """Under a privacy plan: the noise multiplier of a round's features, which is charged."""
    noise_means: PositiveFloat = 20.0
    """Under a privacy plan: the noise multiplier of a round's means and counts, which is charged."""

    def exchanges(self) -> tuple[Exchange, ...]:
        kinds = (*(("features",) if self.completion else ()), *(("means",) if self.alignment else ()))
        return (*super().exchanges(), *(Exchange(kind, like=kind) for kind in kinds))

    def privacy_releases(self) -> Mapping[str, float]:
        # The noised counts of the means decide which classes' features are released, so these are always charged.
        features = {"features": self.noise_features} if self.completion else {}
        return features | ({"means": self.noise_means} if self.completion or self.alignment else {})

    def init(self, federation: Federation) -> Bundle:
        first, classes = next(iter(federation.initial["model"].values())), len(federation.classes)
        state, none = dict(federation.initial), first.new_zeros(classes)
        if self.completion:
            state["features"] = {"values": first.new_zeros(classes, self.bank, *federation.features), "held": none}
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
        joint = completion_loss if self.variant == "corrected" else completion_loss_paper
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
        """Return the inputs of (5) and (8): none in round 1, or if no other site has released anything."""
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
        """Return the means after (6). A class without images keeps its mean; the first value starts it (`paper`: 0)."""
        new, seen = release.means, release.images > 0
        before = {name: tensor.to(new.device) for name, tensor in memory["means"].items()} if memory else {}
        known = before.get("known", torch.zeros_like(seen))
        old = before.get("means", torch.zeros_like(new))
        start = old if self.variant == "paper" else torch.where(known[:, None], old, new)
        moved = torch.where(seen[:, None], torch.lerp(start, new, self.mu_client), old)  # (6)
        return {"means": moved, "known": known | seen}

    def needs_single_updates(self) -> str:
        return "fedmp hands the features of single sites on to the others" if self.completion else ""

    def check_update(self, update: Update) -> None:
        """Refuse counts that the number of examples rules out: they are weights in (7) and sizes of the bank."""
        check_class_counts(update.tensors.get("means", {}), update.examples)
        check_slot_counts(update.tensors.get("features", {}), self.bank)

    def aggregate(self, state: Bundle, updates: Updates) -> Bundle:
        mean, bank, seen = BundleMean(), dict(state.get("bank", {})), None
        for update in updates:
            mean.add(update.tensors, self.update_weight(update))
            bank |= {f"{update.site}/{n}": t.clone() for n, t in update.tensors.get("features", {}).items()}
            if "means" in update.tensors:
                means, images = (update.tensors["means"][name] for name in ("means", "images"))
                share = images if self.variant == "corrected" else torch.full_like(images, update.examples)
                weighted = {"sum": means * share[:, None], "share": share, "images": images}
                seen = {n: seen[n] + t for n, t in weighted.items()} if seen else weighted
        kept = {**state, **mean.value(), **({"bank": bank} if self.completion else {})}
        return {**kept, "prototypes": self._update_prototypes(state["prototypes"], seen)} if seen else kept

    def _update_prototypes(self, before: Tensors, seen: Tensors) -> Tensors:
        """Return the prototypes after (7). A class that no site released in the round keeps its prototype."""
        here, known = seen["images"] > 0, before["known"] > 0
        new = seen["sum"] / seen["share"].clamp(min=1e-12)[:, None]
        start = before["means"] if self.variant == "paper" else torch.where(known[:, None], before["means"], new)
        moved = torch.where(here[:, None], torch.lerp(start, new, self.mu_server), before["means"])  # (7)
        return {"means": moved, "known": (known | here).to(before["known"].dtype)}
