"""Fed-Align: adversarial alignment between sites. Jiménez-Sánchez, Tardy, González Ballester, Mateus, Piella:
Memory-aware curriculum federated learning for breast cancer classification. Computer Methods and Programs in
Biomedicine 229, 2023, arXiv:2107.02504; the authors' code: github.com/ameliajimenez/curriculum-federated-learning. With
`training.curriculum.by: forgotten` it is Fed-Align-CL. F: the extractor; D_k: site k's discriminator; Z: noise
N(0, σ²); u_k: features Z(F(x)) of some of site k's images, by the model that all sites received in the round before.

    (1)  w_k ← a step on the cross-entropy, in the first `warmup` rounds
    (2)  D_k ← a step on  −mean log D_k(u_k) − mean log(1 − D_k(u_j)),   j: all other sites
    (3)  w_k ← a step on  CE + α · mean −½·(log D_k(F(x)) + log(1 − D_k(F(x)))),   D_k as it is
    (4)  w   ← Σ_k (n_k / n) · Z(w_k)

After the warm-up (2) and (3) are done on every batch. D_k never leaves its site and is not averaged. From the last
warm-up round to the last round but one a site sends `bank` features without labels, drawn anew, and receives up to
`receive` of all others together, in turn. With `align: 0` and `variance: 0` it is FedAvg, bit for bit.

`variant: paper` is the paper's Algorithm 1 in one process that has all images, which hospitals cannot run. In every
step, site after site: (1), and after the warm-up with every other site j, on this step's batches, by k's one optimiser

    (5)  D_k ← a step on  −mean log D_k(F_k(x)) − mean log(1 − D_k(Z(F_j(x)))),   F_k and F_j as they are
    (6)  F_k, F_j ← a step on  α · (−mean log D_k(F_k(x)) − mean log D_k(Z(F_j(x)))),   D_k as it is

Departures. (5) and (6) are the paper's Eq. 2 and 3. Between hospitals features travel once per exchange, and no
gradient travels back. Of (6) only the first term would remain at site k, which makes its features easier to tell apart;
the reverse, −log(1 − D_k(F(x))), makes sites change places. (3) asks D_k to be uncertain instead (Tzeng et al., ICCV
2015), in one step with the cross-entropy, so that α weights it with any optimiser. All u are of one model: otherwise
D_k could tell locally trained models, or rounds, apart. The authors' released code detaches all features: its Eq. 3 has
no gradient, and nothing is aligned. D_k gives a logit (theirs: two units and a sigmoid). Sites are weighted by
examples (the paper: `training.weights: uniform`). In `paper` images come in random order (no curriculum), optimisers
start anew in every round, and sites with more steps than another one reuse its batches.

Z is no privacy protection: nothing is clipped, so the paper's σ² = 0.001 has no ε. It is added to parameters and
features, not to statistics such as BatchNorm's. No privacy plan covers it: (3) uses features outside the priced steps.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import nn

from polyclinic.algorithms.base import WEIGHT_KINDS, BundleMean, classifier_weights, network_weights, with_prefix
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.algorithms.representation import feature_bank, fed_align_losses as losses
from polyclinic.algorithms.representation.fed_align_losses import DISCRIMINATOR, alignment_loss, discriminator_loss
from polyclinic.algorithms.representation.fed_align_pooled import PooledFit
from polyclinic.core import (
    AUX_PREFIX,
    Bundle,
    Exchange,
    Federation,
    Fit,
    RecipeError,
    Score,
    Site,
    SiteId,
    Step,
    Stream,
    Tensors,
    Update,
    Updates,
    Work,
)
from polyclinic.training.losses import task_loss

CLASSIFIER, DISCRIMINATION = ("extractor.", "head."), (f"{AUX_PREFIX}{DISCRIMINATOR}.",)
"""The parameters that (3) and (2) train."""
MOST = 100_000
Count = Annotated[int, Field(ge=1, le=MOST)]


@dataclass(frozen=True)
class FedAlign(FedAvg):
    site_kinds: ClassVar[tuple[str, ...]] = ("others",)
    unused_options: ClassVar[dict[str, tuple[str, ...]]] = {"paper": ("bank", "receive", "lessons")}
    variant: Literal["corrected", "paper"] = "corrected"
    align: Annotated[float, Field(ge=0, le=MOST)] = 1.0
    """α, the weight of the alignment in (3) or (6); 0: no alignment and no exchange of features."""
    warmup: Annotated[int, Field(ge=0, le=MOST)] = 5
    """Rounds before the alignment starts."""
    bank: Count = 64
    """Features that a site sends and the server keeps."""
    receive: Count = 128
    """Features that a site receives from all others together."""
    hidden: Count = 4
    """Hidden units of a discriminator."""
    lessons: Count = 1
    """Steps on (2) for each on (3): a learning rate for a pretrained network is low for a new discriminator."""
    variance: Annotated[float, Field(ge=0, le=MOST)] = 0.0
    """σ² of the noise on parameters and features that leave a site; the paper has 0.001. No privacy guarantee."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.training.private is not None and self.align:
            raise RecipeError(
                "fed-align uses images outside the steps that a privacy plan prices; leave privacy out, or set "
                "algorithm.align: 0"
            )
        object.__setattr__(self, "pooled", self.variant == "paper" and self.align > 0)

    def exchanges(self) -> tuple[Exchange, ...]:
        kinds = ("features",) if self.align else ()
        return (*super().exchanges(), *(Exchange(kind, like=kind, optional=True) for kind in kinds))

    def warning(self) -> str:
        place = "fed-align, variant paper: all sites train in this process, which no hospital could take part in"
        noise = f"fed-align adds noise of variance {self.variance:g} to what leaves a site, without clipping: "
        noise += "this is no privacy guarantee, and no ε is claimed for it"
        return "; ".join([place] * self.pooled + [noise] * (self.variance > 0))

    def auxiliary(self, features: tuple[int, ...], classes: int) -> Mapping[str, nn.Module]:
        return {DISCRIMINATOR: losses.Discriminator(math.prod(features), self.hidden)} if self.align else {}

    def init(self, federation: Federation) -> Bundle:
        state = classifier_weights(federation.initial)
        if not self.align:
            return state
        like = next(iter(state["model"].values()))
        slots = {"values": like.new_zeros(1, self.bank, *federation.features), "held": like.new_zeros(1)}
        bank = {f"{site}/{what}": tensor for site in federation.sites for what, tensor in slots.items()}
        if self.pooled:
            bank = {site: torch.tensor(examples) for site, examples in federation.sites.items()}
        return {**state, "features": slots, "bank": bank}

    def broadcast(self, state: Bundle, site: SiteId) -> Bundle:
        sent = network_weights(state)
        if self.pooled or "bank" not in state:
            return {**sent, **{kind: state[kind] for kind in ("features", "bank") if kind in state}}
        return {**sent, "others": feature_bank.features_of_others(state["bank"], site, self.receive)}

    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
        start = network_weights(received)
        if not self.align:
            fitted = yield Fit(start, task_loss, self.training)
            return Update(self._noised_weights(fitted.weights, rng, site), site.examples), None
        if self.pooled:
            return (yield from self._fit_pooled(received, memory or {}, site, rng))
        before = memory or {**losses.initial_discriminator(received["others"], self.hidden, rng), "own": {}}
        accompanied = {kind: {**group, **before.get(kind, {})} for kind, group in start.items()}
        if site.round > self.warmup and before.get("own") and bool(received["others"]["held"] > 0):
            steps = (Step(discriminator_loss, DISCRIMINATION),) * self.lessons  # (2)
            steps += (Step(alignment_loss, CLASSIFIER),)  # (3)
            reference = losses.bank_reference(before["own"], received["others"], self.align)
            fitted = yield Fit(accompanied, steps, self.training, reference)
        else:
            fitted = yield Fit(accompanied, (Step(task_loss, CLASSIFIER),), self.training)  # (1)
        own = {kind: with_prefix(AUX_PREFIX, group) for kind, group in fitted.weights.items()}
        sent = self._noised_weights(fitted.weights, rng, site)
        if not self.warmup <= site.round < site.rounds:  # no site will use them
            return Update(sent, site.examples), own
        found, draws = (yield Score(start, feature_bank.labelled_features)), rng.child("bank", site.round)
        nobody = torch.zeros_like(found["labels"]).long()
        release = feature_bank.release_features(found["features"], nobody, 1, self.bank, 1, draws)
        shown = losses.add_noise({"values": release.values}, self.variance, draws.child("noise").generator())  # Z(F(x))
        features = {**shown, "held": release.held}
        return Update({**sent, "features": features}, site.examples), {**own, "own": features}

    def _fit_pooled(self, received: Bundle, memory: Bundle, site: Site, rng: Stream) -> Work:
        """Train all sites in this process."""
        like = received["features"]
        streams = {name: Stream(rng.seed, ("site", name)) for name in received["bank"]}
        places = {name: f"{DISCRIMINATOR}@{name}" for name in streams}
        known = {
            p: memory.get(p) or losses.initial_discriminator(like, self.hidden, streams[n])["model"]
            for n, p in places.items()
        }
        alpha = self.align if site.round > self.warmup else 0.0
        fitted = yield PooledFit(
            classifier_weights(received), task_loss, self.training, known, align=alpha, variance=self.variance
        )
        mean, kept = BundleMean(), dict[str, Tensors]()  # (1), (5), (6)
        for name in (kind.removeprefix("model@") for kind in fitted.weights if kind.startswith("model@")):
            own = {kind: fitted.weights[f"{kind}@{name}"] for kind in WEIGHT_KINDS}
            update = Update(self._noised_weights(own, streams[name], site), int(received["bank"][name]))
            mean.add(update.tensors, self.update_weight(update))  # (4)
            kept[places[name]] = with_prefix(AUX_PREFIX, own["model"])
        return Update(mean.value(), site.examples), kept

    def _noised_weights(self, weights: Bundle, rng: Stream, site: Site) -> Bundle:
        """Return Z(w_k) of (4)."""
        model = classifier_weights(weights)
        noise = rng.child("noise", site.round).generator()
        return {**model, "model": losses.add_noise(model["model"], self.variance, noise)}

    def needs_single_updates(self) -> str:
        return "fed-align hands the features of single sites on to the others" if self.align else ""

    def check_update(self, update: Update) -> None:
        feature_bank.check_slot_counts(update.tensors.get("features", {}), self.bank)

    def aggregate(self, state: Bundle, updates: Updates) -> Bundle:
        mean, bank = BundleMean(), dict(state.get("bank", {}))
        for update in updates:
            mean.add(update.tensors, self.update_weight(update))  # (4)
            bank |= {f"{update.site}/{n}": t.clone() for n, t in update.tensors.get("features", {}).items()}
        return {**state, **mean.value(), **({"bank": bank} if self.align else {})}
