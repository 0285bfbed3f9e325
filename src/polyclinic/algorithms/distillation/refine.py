"""Refinement after the last round: one student learns from several teachers on a labelled public set. PFedCDP, section
III-D and Algorithm 2; and FedDF (Lin, Kong, Stich, Jaggi: Ensemble distillation for robust model fusion in federated
learning, NeurIPS 2020), which is its distillation alone. (7) to (10) and (17) are in distil.py, (16) in maps.py.

    sound   (S)   L = ce·CE + scl·SCL + kd·T²·KD              teachers: z̄ = Σ_k w_k·z_k, w_k by Shapley values;
                                                              kd = 0 where they know no more than chance
    paper   (18)  L = (1 − α)·SCL + α·T²·KD                   teachers: z̄ = (1/K)·Σ_k z_k
            (19)  L ← mean(ψ)·L
    feddf   (F)   L = T²·KD                                   teachers: z̄ = (1/K)·Σ_k z_k

What (18) means: SCL sees the embeddings, which the extractor makes; it never moves the head. In (18) labels thus shape
the extractor only, and the head learns from the teachers alone: where they are wrong, so is it, however well the
classes lie apart. With α = 0 it stays as it began. (S) adds the cross-entropy, which the authors' code has too.

What (19) means: ψ does not depend on the student, so it is one number for the whole run, a factor of the learning rate.
Adam divides gradients by their own size, so of that factor nothing is left either, except that weight decay, which is
added to gradients, weighs 1/mean(ψ) times as much.

Departures. Teachers see the same changed images as the student, in evaluation mode. Embeddings are what the extractor
hands to the head; the authors' code has a projection between, the paper none. The weights of the epoch with the lowest
cross-entropy on the public validation part are kept, the start counting as epoch 0; Shapley values are of that part
too, and the test part is never looked at. The paper gives no α; FedDF takes Adam 1e-3 with a cosine schedule, at T = 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from polyclinic.algorithms.distillation import patch_attribution
from polyclinic.algorithms.distillation.losses import Teacher, contrastive_loss
from polyclinic.algorithms.distillation.shapley import beats_chance, coalition_value, shapley_values, shapley_weights
from polyclinic.core.contract import (
    Augment,
    Batch,
    Bundle,
    Examples,
    Network,
    Optimiser,
    Score,
    Stream,
    Tensors,
    Training,
)
from polyclinic.core.errors import DataError, RecipeError, WeightsError
from polyclinic.data.examples import SiteData
from polyclinic.training.augment import augment_images
from polyclinic.training.fit import draw_epoch_batches, make_optimiser, score, seed_generators
from polyclinic.training.keyed_dropout import dropout_key, first_key
from polyclinic.training.losses import softened_kl
from polyclinic.training.network import LiveNetwork
from polyclinic.training.prefetch import prefetch_batches
from polyclinic.training.rules import find_training_problems

EpochRow: TypeAlias = dict[str, float]
"""An epoch: its number, the means of the loss and its terms, the validation part's loss and accuracy."""
VIEWS = Augment(rotation=10.0, flip=True, crop=0.1)


@dataclass(frozen=True)
class RefinementOptions:
    """The options of a recipe's section `finish`."""

    idle: ClassVar[dict[str, tuple[str, ...]]] = {
        "sound": ("alpha",),
        "paper": ("ce", "scl", "kd"),
        "feddf": ("ce", "scl", "kd", "alpha", "tau"),
    }
    """Options without effect, by variant."""
    variant: Literal["sound", "paper", "feddf"] = "sound"
    epochs: int = 15
    batch: int = 128
    lr: float = 8e-4
    weight_decay: float = 1e-4
    patience: int = 5
    """Epochs in a row without a better validation loss, after which training ends."""
    temperature: float = 4.0
    """T of the distillation."""
    tau: float = 0.1
    """τ of the contrast."""
    ce: float = 0.5
    scl: float = 0.3
    kd: float = 0.2
    alpha: float = 0.5
    shapley: bool = True
    """Work out what teachers are worth; `sound` then weights them by it."""
    augment: Augment | None = VIEWS
    """How the two views of an image differ."""

    @property
    def loss_weights(self) -> dict[str, float]:
        """The weights of the loss's terms; those of weight 0 are never computed."""
        given = {
            "sound": {"ce": self.ce, "scl": self.scl, "kd": self.kd},  # (S)
            "paper": {"scl": 1 - self.alpha, "kd": self.alpha},  # (18)
            "feddf": {"kd": 1.0},  # (F)
        }[self.variant]
        return {name: weight for name, weight in given.items() if weight != 0}


FEDDF = RefinementOptions(variant="feddf", lr=1e-3, weight_decay=0.0, temperature=1.0, shapley=False, augment=None)
"""As its paper has it, but for the schedule."""


@dataclass(frozen=True, eq=False)
class RefinementResult:
    weights: Bundle
    shapley: dict[str, float]
    """Of every teacher, on the validation part; empty if not asked for."""
    teacher_weights: dict[str, float]
    history: list[EpochRow]
    """Epoch 0 is the start."""
    epochs: int
    """Trained."""
    best: int
    """The epoch whose weights these are."""
    factor: float = 1.0
    """mean(ψ) in (19)."""


def find_option_problems(options: RefinementOptions) -> Iterator[str]:
    """What cannot work, one sentence each."""
    shares = (options.ce, options.scl, options.kd)
    for name, fine, wish in (
        ("epochs", options.epochs >= 1, "1 epoch or more"),
        ("batch", options.batch >= 2, "2 images or more, as there is nothing to contrast in one"),
        ("lr", 0 < options.lr < math.inf, "a positive learning rate, usually 0.0008"),
        ("weight_decay", 0 <= options.weight_decay < math.inf, "0 or more"),
        ("patience", options.patience >= 1, "1 epoch or more"),
        ("temperature", 0 < options.temperature < math.inf, "a positive temperature, usually 4"),
        ("tau", 0 < options.tau < math.inf, "a positive temperature, usually 0.1"),
        ("alpha", 0 <= options.alpha <= 1, "a share in [0, 1]"),
        *((name, 0 <= each < math.inf, "0 or more") for name, each in zip(("ce", "scl", "kd"), shares, strict=True)),
    ):
        if not fine:
            yield f"finish.{name} is {getattr(options, name)}; choose {wish}"
    if not {"ce", "kd"} & options.loss_weights.keys():
        what = "finish.alpha is 0" if options.variant == "paper" else "finish.ce and finish.kd are 0"
        yield f"{what}, so nothing would train the student's head; give distillation a weight"
    for sentence in find_training_problems(Training(augment=options.augment)):
        yield sentence.replace("training.", "finish.", 1)


def check_public(public: SiteData) -> None:
    """Refuse a public set with too few images to learn from."""
    for part, data in _used_parts(public):
        if len(data) < 2:
            raise DataError(
                f"The {part} part of the public set {public.name!r} holds {len(data)} images, too few to refine with; "
                "give it a larger share."
            )


def _check_labels(public: SiteData, classes: int) -> None:
    for part, data in _used_parts(public):
        if int(data.labels.min()) < 0 or int(data.labels.max()) >= classes:
            raise DataError(
                f"The {part} part of the public set {public.name!r} has labels beyond its {classes} classes; "
                "give a public set with the federation's classes."
            )


def _used_parts(public: SiteData) -> tuple[tuple[str, Examples], ...]:
    """Those that refinement looks at."""
    return ("train", public.train), ("validation", public.validation)


def refine_student(
    teachers: Sequence[Teacher],
    student: LiveNetwork,
    start: Bundle,
    public: SiteData,
    options: RefinementOptions,
    rng: Stream,
    watch: Callable[[EpochRow], None] = lambda _: None,
) -> RefinementResult:
    """Train `student` from `start` on the public set; `watch` is told of every epoch as it ends."""
    for sentence in find_option_problems(options):
        raise RecipeError(sentence)
    check_public(public)
    ready = [teacher.on_device() for teacher in teachers]
    worth = _teacher_values(ready, student, start, public, options)
    options, shares = _resolve_teacher_weights(
        options, [teacher.name for teacher in ready], worth, public.validation.labels
    )
    factor = 1.0
    if options.variant == "paper":
        factor = patch_attribution.loss_factor(
            patch_attribution.attribute_patches(ready, public.train, rng.child("maps")).psi
        )  # (19)
    lesson = StudentObjective(ready, shares, options, factor)
    found, history, best = _train_student(lesson, student, start, public, rng, watch)
    return RefinementResult(found, worth, shares, history, len(history) - 1, best, factor)


def _resolve_teacher_weights(
    options: RefinementOptions, names: Sequence[str], worth: Mapping[str, float], labels: Tensor
) -> tuple[RefinementOptions, dict[str, float]]:
    """The options as they can be followed, and every teacher's weight: 0 where all know no more than chance."""
    if not worth or options.variant != "sound":
        return options, dict.fromkeys(names, 1 / len(names))
    if beats_chance(math.fsum(worth.values()), labels) or "ce" not in options.loss_weights:
        return options, shapley_weights(worth)
    return replace(options, kd=0.0), dict.fromkeys(names, 0.0)


def _teacher_values(
    teachers: Sequence[Teacher], student: LiveNetwork, start: Bundle, public: SiteData, options: RefinementOptions
) -> dict[str, float]:
    """Shapley values if they are asked for; and a refusal of teachers that have nothing to teach this student."""
    names = [teacher.name for teacher in teachers]
    if not names or len(set(names)) < len(names):
        raise DataError(f"Every teacher needs a name of its own, but there are: {', '.join(names) or 'no teachers'}.")
    classes = _predict(student, start, public.validation)["logits"].shape[1]
    _check_labels(public, classes)
    opinions = {each.name: _predict(each.network, each.weights, public.validation)["logits"] for each in teachers}
    for name, logits in opinions.items():
        if logits.shape[1] != classes:
            raise WeightsError(
                f"Teacher {name!r} knows {logits.shape[1]} classes, the student {classes}; give both the same task."
            )
        if not bool(logits.isfinite().all()):
            raise WeightsError(
                f"Teacher {name!r} predicts values that are not finite; leave it out, or train it again."
            )
    return shapley_values(coalition_value(opinions, public.validation.labels), names) if options.shapley else {}


def logits_and_labels(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensors:
    """Logits, a row per example."""
    del reference
    return {"logits": network(weights, batch[0]), "labels": batch[1]}


def _predict(network: LiveNetwork, weights: Bundle, data: Examples) -> Tensors:
    return score(Score(weights, logits_and_labels), network, data)


@dataclass(frozen=True, eq=False)
class StudentObjective:
    """What every step of the student makes smaller."""

    teachers: Sequence[Teacher]
    shares: Mapping[str, float]
    options: RefinementOptions
    factor: float

    def teacher_logits(self, images: Tensor) -> Tensor:
        """z̄: the teachers' logits, averaged."""
        heard = [(self.shares[each.name], each) for each in self.teachers if self.shares[each.name] > 0]
        return torch.stack([share * each.logits(images).to(images.device) for share, each in heard]).sum(0)

    def augment_views(self, batch: Batch, stream: Stream) -> Batch:
        """Every image as it is changed at random, twice where there is something to contrast."""
        images, labels = batch
        count = 2 if "scl" in self.options.loss_weights else 1
        how = self.options.augment
        seen = [images if how is None else augment_images(images, how, stream.child(view)) for view in range(count)]
        return torch.cat(seen), labels.repeat(count)

    def loss_terms(self, student: LiveNetwork, batch: Batch) -> Tensors:
        """The terms of the loss, on images as the student sees them."""
        (images, labels), options, wanted = batch, self.options, self.options.loss_weights
        taught = self.teacher_logits(images) if "kd" in wanted else None
        # Only now: a teacher may live in the same module, and has left it in evaluation mode.
        student.set_training_mode(frozenset(student.live["model"]))
        embeddings = student.features(student.live, images)
        logits = student.module.head(embeddings)
        found = {}
        if "ce" in wanted:
            found["ce"] = F.cross_entropy(logits, labels)  # (9)
        if "scl" in wanted:
            found["scl"] = contrastive_loss(embeddings, labels, options.tau)  # (17)
        if taught is not None:
            found["kd"] = softened_kl(logits, taught, options.temperature)  # (10)
        return found

    def total_loss(self, terms: Tensors) -> Tensor:
        """(S), (18), (F); times the factor of (19)."""
        weighted = [weight * terms[name] for name, weight in self.options.loss_weights.items()]
        return self.factor * torch.stack(weighted).sum()


def _train_student(
    lesson: StudentObjective,
    student: LiveNetwork,
    start: Bundle,
    public: SiteData,
    rng: Stream,
    watch: Callable[[EpochRow], None],
) -> tuple[Bundle, list[EpochRow], int]:
    """The best epoch's weights, all epochs, and which was the best."""
    options = lesson.options
    live = student.load_weights(start)
    moving = student.require_gradients(frozenset(live["model"]))
    adam = make_optimiser(moving, Optimiser("adam", weight_decay=options.weight_decay), options.lr)
    history: list[EpochRow] = [{"epoch": 0, **_validate(student, public.validation)}]
    losses, kept = [history[0]["validation_loss"]], student.copy_weights()
    watch(history[0])
    with seed_generators(rng.child("draws"), student.device), student.use_checkpointing():
        for epoch in range(1, options.epochs + 1):
            means = _train_epoch(lesson, student, adam, public.train, epoch, rng)
            history.append({"epoch": epoch, **means, **_validate(student, public.validation)})
            watch(history[epoch])
            if not all(map(math.isfinite, history[epoch].values())):
                raise RecipeError(f"In epoch {epoch} of the refinement the loss is not finite; lower finish.lr.")
            if history[epoch]["validation_loss"] < min(losses):
                kept = student.copy_weights()
            losses.append(history[epoch]["validation_loss"])
            # The start may win in the end but uses up no patience: a new student gets worse before it gets better.
            if epoch - losses.index(min(losses[1:]), 1) >= options.patience:
                break
    return kept, history, losses.index(min(losses))


def _train_epoch(
    lesson: StudentObjective, student: LiveNetwork, adam: torch.optim.Optimizer, data: Examples, epoch: int, rng: Stream
) -> EpochRow:
    """One pass over the public training part; the means of the loss and its terms."""
    cut = draw_epoch_batches(data.labels, Training(batch=lesson.options.batch), rng.child("order", epoch))
    key, names = first_key(rng), ("loss", *lesson.options.loss_weights)
    totals = torch.zeros(len(names), device=student.device)
    with prefetch_batches(data, cut, student.device) as fed:
        for position, batch in enumerate(fed):
            student.set_dropout_key(dropout_key(key, (epoch - 1) * len(cut) + position, 0))
            terms = lesson.loss_terms(student, lesson.augment_views(batch, rng.child("views", epoch, position)))
            loss = lesson.total_loss(terms)
            adam.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            adam.step()
            totals += len(batch[1]) * torch.stack([loss, *(terms[name] for name in names[1:])]).detach()
    return dict(zip(names, (totals / len(data)).tolist(), strict=True))


def _validate(student: LiveNetwork, data: Examples) -> EpochRow:
    found = _predict(student, student.live, data)
    right = found["logits"].argmax(-1) == found["labels"]
    return {
        "validation_loss": float(F.cross_entropy(found["logits"], found["labels"])),
        "validation_accuracy": float(right.float().mean()),
    }
