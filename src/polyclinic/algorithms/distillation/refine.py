"""Refinement after the last round: one student learns from several teachers on a labelled public set. PFedCDP, section
III-D and Algorithm 2; and FedDF (Lin, Kong, Stich, Jaggi: Ensemble distillation for robust model fusion in federated
learning, NeurIPS 2020), which is its distillation alone. (7) to (10) and (17) are in losses.py, (16) in
patch_attribution.py.

    corrected (S)   L = ce·CE + scl·SCL + kd·T²·KD            teachers: z̄ = Σ_k w_k·z_k, w_k by Shapley values;
                                                              kd = 0 if they predict no better than chance
    paper     (18)  L = (1 − α)·SCL + α·T²·KD                 teachers: z̄ = (1/K)·Σ_k z_k
              (19)  L ← mean(ψ)·L
    feddf     (F)   L = T²·KD                                 teachers: z̄ = (1/K)·Σ_k z_k

About (18): SCL is a function of the embeddings, which the extractor makes; it never changes the head. So in (18) labels
shape the extractor only, and the head learns from the teachers alone and repeats their mistakes, however well the
classes are separated. With α = 0 the head stays as it was. (S) adds the cross-entropy, as the authors' code does.

About (19): ψ does not depend on the student, so (19) is one factor on the learning rate for the whole run. Adam divides
gradients by their size and cancels this factor, too, except that weight decay, which is added to gradients, gets the
relative weight 1/mean(ψ).

Departures. Teachers see the same augmented images as the student, in evaluation mode. Embeddings are the inputs of the
head; the authors' code has a projection between, the paper none. The weights of the epoch with the lowest cross-entropy
on the public validation part are kept, with the start as epoch 0. Shapley values use that part too; the test part is
never used. The paper gives no α; FedDF uses Adam 1e-3 with a cosine schedule and T = 1.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, TypeAlias

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn

from polyclinic.algorithms.distillation import patch_attribution
from polyclinic.algorithms.distillation.losses import Teacher, supcon_loss
from polyclinic.algorithms.distillation.shapley import beats_chance, coalition_value, shapley_values, shapley_weights
from polyclinic.core import (
    Augment,
    Batch,
    Bundle,
    DataError,
    Examples,
    Network,
    Optimiser,
    RecipeError,
    Score,
    Share,
    Stream,
    Tensors,
    Training,
    WeightsError,
    check_options,
)
from polyclinic.core.rng import seed_generators
from polyclinic.data.examples import SiteData
from polyclinic.training.augment import augment_images
from polyclinic.training.data_order import draw_epoch_batches
from polyclinic.training.fit import make_optimiser, score
from polyclinic.training.keyed_dropout import dropout_key, first_key
from polyclinic.training.losses import softened_kl
from polyclinic.training.network import LiveNetwork
from polyclinic.training.prefetch import prefetch_batches

EpochRow: TypeAlias = dict[str, float]
"""The number of an epoch, the means of the loss and its terms, and the loss and accuracy on the validation part."""
VIEWS = Augment(rotation=10.0, flip=True, crop=0.1)


@dataclass(frozen=True)
class RefinementOptions:
    """The options of a recipe's section `finish`."""

    unused_options: ClassVar[dict[str, tuple[str, ...]]] = {
        "corrected": ("alpha",),
        "paper": ("ce", "scl", "kd"),
        "feddf": ("ce", "scl", "kd", "alpha", "tau"),
    }
    """Options without effect, by variant."""
    variant: Literal["corrected", "paper", "feddf"] = "corrected"
    epochs: PositiveInt = 15
    batch: Annotated[int, Field(ge=2)] = 128
    lr: PositiveFloat = 8e-4
    weight_decay: NonNegativeFloat = 1e-4
    patience: PositiveInt = 5
    """Consecutive epochs without a better validation loss after which training ends."""
    temperature: PositiveFloat = 4.0
    """T of the distillation."""
    tau: PositiveFloat = 0.1
    """τ of the contrast."""
    ce: NonNegativeFloat = 0.5
    scl: NonNegativeFloat = 0.3
    kd: NonNegativeFloat = 0.2
    alpha: Share = 0.5
    shapley: bool = True
    """Whether to compute the teachers' Shapley values, by which `corrected` weights them."""
    augment: Augment | None = VIEWS
    """The augmentation that makes the two views of an image."""

    def __post_init__(self) -> None:
        check_options(self, "finish.")
        if not {"ce", "kd"} & self.loss_weights.keys():
            what = "finish.alpha is 0" if self.variant == "paper" else "finish.ce and finish.kd are 0"
            raise RecipeError(f"{what}, so nothing would train the student's head; give distillation a weight")
        if self.augment is not None:
            check_options(self.augment, "finish.augment.")

    @property
    def loss_weights(self) -> dict[str, float]:
        """The weights of the terms of the loss. Terms of weight 0 are left out and never computed."""
        given = {
            "corrected": {"ce": self.ce, "scl": self.scl, "kd": self.kd},  # (S)
            "paper": {"scl": 1 - self.alpha, "kd": self.alpha},  # (18)
            "feddf": {"kd": 1.0},  # (F)
        }[self.variant]
        return {name: weight for name, weight in given.items() if weight != 0}


FEDDF = RefinementOptions(variant="feddf", lr=1e-3, weight_decay=0.0, temperature=1.0, shapley=False, augment=None)
"""FedDF as in its paper, except for the learning-rate schedule."""


@dataclass(frozen=True, eq=False)
class RefinementResult:
    weights: Bundle
    shapley: dict[str, float]
    """The value of every teacher on the validation part; empty with `shapley: false`."""
    teacher_weights: dict[str, float]
    history: list[EpochRow]
    """One row per epoch; epoch 0 is the start."""
    epochs: int
    """The number of epochs trained."""
    best: int
    """The epoch that the weights are from."""
    factor: float = 1.0
    """mean(ψ) in (19)."""


def check_public(public: SiteData) -> None:
    """Raise a DataError if a part of the public set has fewer than two images."""
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
    """Return the parts that refinement uses."""
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
    """Train `student` from `start` on the public set.

    Args:
        teachers: Trained networks with different names and the student's classes.
        student: The network to train.
        start: Its initial weights.
        public: A labelled public set; its test part is not used.
        options: The options of a recipe's section `finish`.
        rng: The random stream of the refinement.
        watch: Called with the row of every epoch when it ends.
    """
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
    found, history, best = _train_student(
        StudentObjective(ready, shares, options, factor), student, start, public, rng, watch
    )
    return RefinementResult(found, worth, shares, history, len(history) - 1, best, factor)


def _resolve_teacher_weights(
    options: RefinementOptions, names: Sequence[str], worth: Mapping[str, float], labels: Tensor
) -> tuple[RefinementOptions, dict[str, float]]:
    """Return the options and every teacher's weight, both without distillation if all predict no better than chance."""
    if not worth or options.variant != "corrected":
        return options, dict.fromkeys(names, 1 / len(names))
    if beats_chance(math.fsum(worth.values()), labels) or "ce" not in options.loss_weights:
        return options, shapley_weights(worth)
    return replace(options, kd=0.0), dict.fromkeys(names, 0.0)


def _teacher_values(
    teachers: Sequence[Teacher], student: LiveNetwork, start: Bundle, public: SiteData, options: RefinementOptions
) -> dict[str, float]:
    """Return Shapley values if wanted; raise an error if a teacher does not fit the student's task."""
    names = [teacher.name for teacher in teachers]
    if not names or len(set(names)) < len(names):
        raise DataError(f"Every teacher needs a name of its own, but there are: {', '.join(names) or 'no teachers'}.")
    classes = _predict(student, start, public.validation)["logits"].shape[1]
    _check_labels(public, classes)
    teacher_logits = {each.name: _predict(each.network, each.weights, public.validation)["logits"] for each in teachers}
    for name, logits in teacher_logits.items():
        if logits.shape[1] != classes:
            raise WeightsError(
                f"Teacher {name!r} predicts {logits.shape[1]} classes, the student {classes}; give both the same task."
            )
        if not bool(logits.isfinite().all()):
            raise WeightsError(
                f"Teacher {name!r} predicts values that are not finite; leave it out, or train it again."
            )
    return shapley_values(coalition_value(teacher_logits, public.validation.labels), names) if options.shapley else {}


def logits_and_labels(network: Network, weights: Bundle, batch: Batch, _reference: Bundle) -> Tensors:
    """Return logits and labels, a row per example."""
    return {"logits": network(weights, batch[0]), "labels": batch[1]}


def _predict(network: LiveNetwork, weights: Bundle, data: Examples) -> Tensors:
    return score(Score(weights, logits_and_labels), network, data)


@dataclass(frozen=True, eq=False)
class StudentObjective:
    """The loss that every step of the student minimises."""

    teachers: Sequence[Teacher]
    shares: Mapping[str, float]
    options: RefinementOptions
    factor: float

    def teacher_logits(self, images: Tensor) -> Tensor:
        """Return z̄, the weighted mean of the teachers' logits."""
        weighted = [(self.shares[each.name], each) for each in self.teachers if self.shares[each.name] > 0]
        return torch.stack([share * each.logits(images).to(images.device) for share, each in weighted]).sum(0)

    def augment_views(self, batch: Batch, stream: Stream) -> Batch:
        """Return one augmented view of every image, or two if the loss has the contrast."""
        images, labels = batch
        count = 2 if "scl" in self.options.loss_weights else 1
        how = self.options.augment
        seen = [images if how is None else augment_images(images, how, stream.child(view)) for view in range(count)]
        return torch.cat(seen), labels.repeat(count)

    def loss_terms(self, student: LiveNetwork, batch: Batch) -> Tensors:
        """Return the terms of the loss on augmented images."""
        (images, labels), options, wanted = batch, self.options, self.options.loss_weights
        teacher = self.teacher_logits(images) if "kd" in wanted else None
        # Only now: a teacher may share the module, and leaves it in evaluation mode.
        student.set_training_mode(frozenset(student.live["model"]))
        embeddings = student.features(student.live, images)
        logits = student.module.head(embeddings)
        found = {}
        if "ce" in wanted:
            found["ce"] = nn.functional.cross_entropy(logits, labels)  # (9)
        if "scl" in wanted:
            found["scl"] = supcon_loss(embeddings, labels, options.tau)  # (17)
        if teacher is not None:
            found["kd"] = softened_kl(logits, teacher, options.temperature)  # (10)
        return found

    def total_loss(self, terms: Tensors) -> Tensor:
        """Return (S), (18) or (F), times the factor of (19)."""
        return self.factor * torch.stack([w * terms[name] for name, w in self.options.loss_weights.items()]).sum()


def _train_student(
    objective: StudentObjective,
    student: LiveNetwork,
    start: Bundle,
    public: SiteData,
    rng: Stream,
    watch: Callable[[EpochRow], None],
) -> tuple[Bundle, list[EpochRow], int]:
    """Return the weights of the best epoch, the rows of all epochs, and the number of the best one."""
    options = objective.options
    moving = frozenset(student.load_weights(start)["model"])
    adam = make_optimiser(
        student.require_gradients(moving), Optimiser("adam", weight_decay=options.weight_decay), options.lr
    )
    history: list[EpochRow] = [{"epoch": 0, **_validate(student, public.validation)}]
    losses, kept = [history[0]["validation_loss"]], student.copy_weights()
    watch(history[0])
    with seed_generators(rng.child("draws"), student.device), student.use_checkpointing():
        for epoch in range(1, options.epochs + 1):
            means = _train_epoch(objective, student, adam, public.train, epoch, rng)
            history.append({"epoch": epoch, **means, **_validate(student, public.validation)})
            watch(history[epoch])
            if not all(map(math.isfinite, history[epoch].values())):
                raise RecipeError(f"In epoch {epoch} of the refinement the loss is not finite; lower finish.lr.")
            if history[epoch]["validation_loss"] < min(losses):
                kept = student.copy_weights()
            losses.append(history[epoch]["validation_loss"])
            # The start does not count for patience: a new student gets worse before it gets better.
            if epoch - losses.index(min(losses[1:]), 1) >= options.patience:
                break
    return kept, history, losses.index(min(losses))


def _train_epoch(
    objective: StudentObjective,
    student: LiveNetwork,
    adam: torch.optim.Optimizer,
    data: Examples,
    epoch: int,
    rng: Stream,
) -> EpochRow:
    """Train for one epoch; return the means of the loss and its terms."""
    cut = draw_epoch_batches(data.labels, Training(batch=objective.options.batch), rng.child("order", epoch))
    key, names = first_key(rng), ("loss", *objective.options.loss_weights)
    totals = torch.zeros(len(names), device=student.device)
    with prefetch_batches(data, cut, student.device) as fed:
        for position, batch in enumerate(fed):
            student.set_dropout_key(dropout_key(key, (epoch - 1) * len(cut) + position, 0))
            terms = objective.loss_terms(student, objective.augment_views(batch, rng.child("views", epoch, position)))
            loss = objective.total_loss(terms)
            adam.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            adam.step()
            totals += len(batch[1]) * torch.stack([loss, *(terms[name] for name in names[1:])]).detach()
    return dict(zip(names, (totals / len(data)).tolist(), strict=True))


def _validate(student: LiveNetwork, data: Examples) -> EpochRow:
    found = _predict(student, student.live, data)
    return {
        "validation_loss": float(nn.functional.cross_entropy(found["logits"], found["labels"])),
        "validation_accuracy": float((found["logits"].argmax(-1) == found["labels"]).float().mean()),
    }
