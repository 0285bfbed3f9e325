"""Refinement on real digits: it teaches, repeats, reduces to what it should, and looks at nothing it must not see."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NoReturn

import pytest
import torch
import torch.nn.functional as F
from pydantic import TypeAdapter
from torch import Tensor, nn

from polyclinic.algorithms.distillation import (
    FEDDF,
    RefinementOptions,
    Teacher,
    check_public,
    refine_student,
)
from polyclinic.algorithms.distillation.refine import EpochRow, RefinementResult, StudentObjective
from polyclinic.core.errors import DataError, RecipeError, WeightsError
from polyclinic.core.options import Augment, Training
from polyclinic.core.rng import Stream
from polyclinic.core.types import Bundle
from polyclinic.data.examples import Images, SiteData
from polyclinic.models import build_model
from polyclinic.models.classifier import Classifier
from polyclinic.training.data_order import draw_epoch_batches
from polyclinic.training.network import LiveNetwork, copy_module_weights
from tests.algorithms.distillation.digits import QUICK, SEED, accuracy, good, network, parts, public, untrained

RNG = Stream(3, ("refine",))
CLASSES = tuple("0123456789")
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def refined(
    options: RefinementOptions,
    teachers: list[Teacher] | None = None,
    name: str = "student",
    rng: Stream = RNG,
    key: int = 0,
) -> RefinementResult:
    """`key`: what the student's dropout was left with by whoever used it before."""
    student = network(name)
    student.set_dropout_key(key)
    return refine_student(teachers or good(), student, copy_module_weights(student.module), public(), options, rng)


def same(one: Bundle, other: Bundle) -> bool:
    return all(torch.equal(tensor, other[kind][name]) for kind, group in one.items() for name, tensor in group.items())


def test_teachers_are_good_and_the_student_begins_by_guessing() -> None:
    assert min(map(accuracy, good())) > 0.75
    student = network("student")
    assert accuracy(Teacher("start", student, copy_module_weights(student.module))) < 0.3


@pytest.mark.parametrize(
    ("options", "least"),
    [(QUICK, 0.75), (replace(QUICK, variant="paper", alpha=0.9), 0.6), (replace(FEDDF, batch=32, lr=3e-3), 0.75)],
    ids=["corrected", "paper", "feddf"],
)
def test_a_student_of_two_good_teachers_learns_and_a_run_repeats_bit_for_bit(
    options: RefinementOptions, least: float
) -> None:
    torch_state = torch.get_rng_state()
    first, again, other = refined(options), refined(options, key=9), refined(options, rng=RNG.child("other"))
    assert accuracy(Teacher("student", network("student"), first.weights)) > least
    assert same(first.weights, again.weights)
    assert first.history == again.history
    assert not same(first.weights, other.weights)
    assert torch.equal(torch.get_rng_state(), torch_state)


@pytest.mark.parametrize("loudness", [1.0, 5.0])
def test_a_teacher_that_learnt_nothing_gets_no_say(loudness: float) -> None:
    """Five times louder it drowns the others where all count alike."""
    found = refined(replace(QUICK, epochs=1), [*good(), untrained(loudness)])
    assert found.teacher_weights["untrained"] < 0.02
    assert sum(found.teacher_weights.values()) == pytest.approx(1)
    assert min(found.teacher_weights[teacher.name] for teacher in good()) > 0.2
    alike = refined(replace(QUICK, epochs=1, shapley=False), [*good(), untrained(loudness)])
    assert alike.teacher_weights["untrained"] == pytest.approx(1 / 3)
    assert alike.shapley == {}


def test_only_the_sound_variant_weights_by_worth_though_others_may_tell_it() -> None:
    options = replace(QUICK, epochs=1)
    corrected, paper = (refined(replace(options, variant=v), [*good(), untrained()]) for v in ("corrected", "paper"))
    assert paper.shapley == corrected.shapley
    assert set(paper.teacher_weights.values()) == {1 / 3}
    assert corrected.factor == 1
    assert 0 < paper.factor < 1


def test_cross_entropy_alone_is_plain_training_bit_for_bit() -> None:
    """A bare loop of torch, which knows of the package only in what order examples come."""
    options = replace(QUICK, ce=1.0, scl=0.0, kd=0.0, epochs=3)
    found = refined(options, name="mlp")
    bare = network("mlp").module.train()
    adam = torch.optim.Adam(bare.parameters(), options.lr, weight_decay=options.weight_decay)
    data, epochs = public().train, [copy_module_weights(bare)]
    for epoch in range(1, 4):
        for index in draw_epoch_batches(data.labels, Training(batch=options.batch), RNG.child("order", epoch)):
            images, labels = data.batch(index)
            adam.zero_grad()
            F.cross_entropy(bare(images), labels).backward()  # type: ignore[no-untyped-call]
            adam.step()
        epochs.append(copy_module_weights(bare))
    assert found.best > 0
    assert same(found.weights, epochs[found.best])


def test_distillation_alone_is_feddf_bit_for_bit() -> None:
    options = replace(QUICK, epochs=2)
    alone = refined(replace(options, ce=0.0, scl=0.0, kd=1.0, shapley=False))
    assert same(alone.weights, refined(replace(options, variant="feddf")).weights)
    assert not same(alone.weights, refined(options).weights)


def test_the_papers_factor_is_next_to_nothing_under_adam() -> None:
    """With α = 1 the paper's loss is FedDF's times mean(ψ), which without weight decay Adam hardly sees."""
    options = replace(QUICK, epochs=1, weight_decay=0.0)
    paper = refined(replace(options, variant="paper", alpha=1.0), name="mlp")
    feddf = refined(replace(options, variant="feddf"), name="mlp")
    start = copy_module_weights(network("mlp").module)

    def vector(bundle: Bundle) -> Tensor:
        return torch.cat([tensor.flatten() for tensor in bundle["model"].values()])

    moved = (vector(feddf.weights) - vector(start)).norm()
    assert paper.factor < 0.1
    assert paper.best == feddf.best == 1
    assert (vector(paper.weights) - vector(feddf.weights)).norm() < 0.02 * moved


def test_contrast_never_moves_the_head_and_distillation_moves_both() -> None:
    student = network("student")
    lesson = StudentObjective(good(), {teacher.name: 0.5 for teacher in good()}, QUICK, 1.0)
    student.require_gradients(frozenset(student.live["model"]))
    batch = lesson.augment_views(public().train.batch(torch.arange(32)), RNG)
    terms, named = lesson.loss_terms(student, batch), student.live["model"]
    for term, touched in (("scl", {"extractor"}), ("kd", {"extractor", "head"}), ("ce", {"extractor", "head"})):
        moves = torch.autograd.grad(terms[term], list(named.values()), retain_graph=True, allow_unused=True)
        pushed = {
            name.split(".")[0] for name, move in zip(named, moves, strict=True) if move is not None and move.any()
        }
        assert pushed == touched, term


def test_teachers_are_averaged_by_their_shares() -> None:
    images, _ = public().train.batch(torch.arange(5))
    one, other = good()
    lesson = StudentObjective([one, other], {one.name: 0.75, other.name: 0.25}, QUICK, 1.0)
    torch.testing.assert_close(lesson.teacher_logits(images), 0.75 * one.logits(images) + 0.25 * other.logits(images))
    silent = StudentObjective([one, other], {one.name: 1.0, other.name: 0.0}, QUICK, 1.0)
    torch.testing.assert_close(silent.teacher_logits(images), one.logits(images))


def test_the_loss_is_the_weighted_sum_of_its_terms_times_the_factor() -> None:
    terms = {"ce": torch.tensor(2.0), "scl": torch.tensor(3.0), "kd": torch.tensor(5.0)}
    paper = replace(QUICK, variant="paper", alpha=0.25)
    assert float(StudentObjective([], {}, QUICK, 1.0).total_loss(terms)) == pytest.approx(0.5 * 2 + 0.3 * 3 + 0.2 * 5)
    assert float(StudentObjective([], {}, paper, 0.1).total_loss(terms)) == pytest.approx(0.1 * (0.75 * 3 + 0.25 * 5))
    assert float(StudentObjective([], {}, FEDDF, 1.0).total_loss(terms)) == pytest.approx(5)


def test_two_views_of_an_image_differ_but_not_in_label_and_one_is_enough_without_contrast() -> None:
    batch = public().train.batch(torch.arange(6))
    options = replace(QUICK, augment=Augment(rotation=10))
    images, labels = StudentObjective([], {}, options, 1.0).augment_views(batch, RNG)
    assert images.shape == (12, 1, 8, 8)
    assert torch.equal(labels, batch[1].repeat(2))
    assert all(not torch.equal(one, other) for one, other in zip(images[:6], images[6:], strict=True))
    single, once = StudentObjective([], {}, replace(options, scl=0.0), 1.0).augment_views(batch, RNG)
    assert torch.equal(single, images[:6])
    assert torch.equal(once, batch[1])


def test_the_weights_are_those_of_the_epoch_with_the_lowest_validation_loss() -> None:
    rows: list[EpochRow] = []
    student, options = network("mlp"), replace(QUICK, lr=0.03)
    found = refine_student(good(), student, copy_module_weights(student.module), public(), options, RNG, rows.append)
    losses = [row["validation_loss"] for row in found.history]
    assert 0 < found.best < found.epochs, "or the test shows nothing"
    assert rows == found.history
    assert [row["epoch"] for row in rows] == list(range(found.epochs + 1))
    assert losses[found.best] == min(losses)
    images, labels = public().validation.batch(torch.arange(len(public().validation)))
    said = Teacher("student", student, found.weights).logits(images)
    assert float(F.cross_entropy(said, labels)) == pytest.approx(losses[found.best], rel=1e-5)
    right = (said.argmax(-1) == labels).double().mean()
    assert found.history[found.best]["validation_accuracy"] == pytest.approx(float(right))


@pytest.mark.parametrize("patience", [1, 3])
def test_training_ends_when_patience_does_and_a_good_start_wins_over_bad_lessons(patience: int) -> None:
    """The student begins as a good teacher and is taught by one that knows nothing."""
    teacher = good()[1]
    options = replace(QUICK, variant="feddf", temperature=1.0, epochs=12, patience=patience)
    found = refine_student([untrained(5.0)], teacher.network, teacher.weights, public(), options, RNG)
    losses = [row["validation_loss"] for row in found.history]
    assert found.best == 0
    assert same(found.weights, teacher.weights)
    assert patience < found.epochs < 12
    assert min(losses[1:-patience]) <= min(losses[-patience:])


class Forbidden:
    """Examples that nobody may look at."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AssertionError(f"somebody asked for {name}")

    def __len__(self) -> NoReturn:
        raise AssertionError("somebody counted")


@pytest.mark.parametrize("variant", ["corrected", "paper", "feddf"])
def test_the_test_part_is_never_looked_at(variant: Any) -> None:
    student, data = network("mlp"), public()
    secret = SiteData(data.name, data.train, data.validation, Forbidden())
    refine_student(
        good(), student, copy_module_weights(student.module), secret, replace(QUICK, variant=variant, epochs=1), RNG
    )
    check_public(secret)


def normalised(seed: str) -> LiveNetwork:
    """A small network with BatchNorm and dropout."""
    plain = build_model("cnn_c", classes=10, channels=1, size=8, seed=SEED.child(seed))
    extractor = nn.Sequential(plain.extractor, nn.BatchNorm1d(32), nn.Dropout(0.3))
    return LiveNetwork(Classifier(extractor, plain.head))


def test_batch_normalisation_learns_its_statistics_and_teachers_may_live_in_the_students_network() -> None:
    student = normalised("student")
    start = copy_module_weights(student.module)
    found = {}
    for where in (student, normalised("elsewhere")):
        teacher = Teacher("shared", where, copy_module_weights(normalised("other").module))
        found[where] = refine_student([teacher, *good()], student, start, public(), replace(QUICK, epochs=2), RNG)
    one, other = found.values()
    assert same(one.weights, other.weights)
    assert one.best > 0
    assert not torch.equal(one.weights["buffers"]["extractor.1.running_mean"], torch.zeros(32))


@NEEDS_CUDA
@pytest.mark.parametrize("variant", ["corrected", "paper", "feddf"])
def test_it_runs_on_a_gpu_with_teachers_here_and_images_there(variant: Any) -> None:
    cuda = torch.device("cuda")
    student = LiveNetwork(network("student").module, cuda)
    start, options = copy_module_weights(student.module), replace(QUICK, variant=variant, alpha=0.9)
    teachers = [good()[0], Teacher("there", LiveNetwork(network("mlp").module, cuda), good()[1].weights)]
    found = refine_student(teachers, student, start, public(), options, RNG)
    moved = SiteData("moved", *(part.to(cuda) for part in parts()[2:]))
    assert next(iter(found.weights["model"].values())).is_cuda
    assert accuracy(Teacher("student", student, found.weights)) > 0.6
    assert found.shapley == pytest.approx(
        refine_student(teachers, student, start, moved, options, RNG).shapley, rel=1e-3
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"epochs": 0}, "finish.epochs is 0, but should be greater than 0"),
        ({"batch": 1}, "finish.batch is 1, but should be greater than or equal to 2"),
        ({"lr": 0.0}, "finish.lr is 0.0"),
        ({"lr": math.nan}, "finish.lr is nan"),
        ({"weight_decay": -1.0}, "finish.weight_decay is -1.0"),
        ({"patience": 0}, "finish.patience is 0"),
        ({"temperature": 0.0}, "finish.temperature is 0.0"),
        ({"tau": math.inf}, "finish.tau is inf"),
        ({"alpha": 1.5}, "finish.alpha is 1.5"),
        ({"kd": -0.1}, "finish.kd is -0.1"),
        ({"variant": "paper", "alpha": 0.0}, "finish.alpha is 0, so nothing would train the student's head"),
        ({"ce": 0.0, "kd": 0.0}, "finish.ce and finish.kd are 0"),
        ({"augment": Augment(crop=1.0)}, "finish.augment.crop is 1.0"),
    ],
)
def test_options_that_cannot_work_are_named(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RecipeError) as refusal:
        replace(RefinementOptions(), **change)
    assert str(refusal.value).startswith(sentence)


def test_a_recipe_can_write_the_options() -> None:
    written = {"variant": "paper", "alpha": 0.3, "augment": {"rotation": 5, "flip": False}}
    read = TypeAdapter(RefinementOptions).validate_python(written)
    assert read == replace(RefinementOptions(), variant="paper", alpha=0.3, augment=Augment(rotation=5))


def test_public_sets_that_cannot_teach_are_refused() -> None:
    data = public()
    check_public(data)
    student, none = network("mlp"), parts()[2].subset(torch.arange(0))
    for part, lacking in (("train", replace(data, train=none)), ("validation", replace(data, validation=none))):
        with pytest.raises(DataError, match=f"The {part} part of the public set 'public' holds 0 images"):
            check_public(lacking)
        with pytest.raises(DataError, match="holds 0 images"):
            refine_student(good(), student, copy_module_weights(student.module), lacking, QUICK, RNG)


def test_teachers_that_cannot_teach_are_refused() -> None:
    three = LiveNetwork(build_model("mlp", classes=3, channels=1, size=8, seed=SEED))
    broken = untrained(math.nan)
    for teachers, kind, sentence in (
        ([good()[0], good()[0]], DataError, "name of its own"),
        (
            [Teacher("small", three, copy_module_weights(three.module))],
            WeightsError,
            "'small' predicts 3 classes, the student 10",
        ),
        ([good()[0], broken], WeightsError, "'untrained' predicts values that are not finite"),
    ):
        with pytest.raises(kind, match=sentence):
            refined(QUICK, teachers)
    student = network("mlp")
    with pytest.raises(DataError, match="no teachers"):
        refine_student([], student, copy_module_weights(student.module), public(), QUICK, RNG)
    with pytest.raises(DataError, match="labels beyond its 3 classes"):
        refine_student(good(), three, copy_module_weights(three.module), public(), QUICK, RNG)


def test_a_learning_rate_that_blows_up_is_named() -> None:
    with pytest.raises(RecipeError, match=r"epoch 1 of the refinement the loss is not finite; lower finish\.lr"):
        refined(replace(QUICK, lr=1e30))


def test_teachers_that_know_nothing_do_not_teach() -> None:
    """The student is then that of labels and contrast alone, bit for bit."""
    lost = [untrained(1.0), replace(untrained(1.0), name="untrained too")]
    validation = public().validation
    images, labels = validation.batch(torch.arange(len(validation)))
    shuffled = replace(public(), validation=Images(images, labels.roll(1)))
    student = network("student")
    start = copy_module_weights(student.module)
    found, alone = (
        refine_student(lost, student, start, shuffled, replace(QUICK, epochs=1, kd=kd), RNG) for kd in (QUICK.kd, 0.0)
    )
    assert set(found.teacher_weights.values()) == {0.0}
    assert same(found.weights, alone.weights)
