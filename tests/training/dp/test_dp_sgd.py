"""DP-SGD's mechanism: what is clipped, who is drawn, what noise joins; against Opacus and vmap(grad)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from polyclinic import run
from polyclinic.core.errors import EngineError, RecipeError
from polyclinic.core.jobs import Fit, Fitted, Step
from polyclinic.core.network import Network
from polyclinic.core.options import Augment, Optimiser, Private, Training
from polyclinic.core.rng import Stream
from polyclinic.core.types import Batch, Bundle
from polyclinic.data.examples import Images
from polyclinic.models import build_model
from polyclinic.models.classifier import Classifier
from polyclinic.training.dp.dp_sgd import PrivateGradients, draw_poisson_batches
from polyclinic.training.dp.secure_random import draw_normals
from polyclinic.training.fit import fit
from polyclinic.training.losses import corrected_loss, proximal_loss, task_loss
from polyclinic.training.network import LiveNetwork, copy_module_weights
from polyclinic.training.stacked.optimisers import STEP_PRE_HOOKS
from tests.small import tiny
from tests.training.jobs import at_round, job

STREAM, SECRET = Stream(7, ("here",)), Stream(11, ("secret",))
SGD = Optimiser("sgd", 0.1)


def noise(count: int, size: int = 12, channels: int = 1, dtype: torch.dtype = torch.float64, seed: int = 0) -> Images:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, channels, size, size, generator=generator, dtype=dtype)
    return Images(images, torch.randint(10, (count,), generator=generator))


def model(name: str, dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> Classifier:
    return build_model(name, classes=10, channels=1, size=12, dropout=dropout, seed=Stream(1)).to(dtype)


class Grouped(nn.Module):
    """Groups, strides, dilation, odd padding, LayerNorm, and an addition in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 6, 3, stride=2, padding=(1, 0))
        self.second = nn.Conv2d(6, 9, (3, 2), padding=2, dilation=2, groups=3, bias=False)
        self.third = nn.Conv2d(6, 9, 1)
        self.norm = nn.LayerNorm(9 * 5 * 6)
        self.rectify = nn.ReLU(inplace=True)

    def forward(self, images: Tensor) -> Tensor:
        early = self.rectify(self.first(images))
        late = self.second(early)[..., :5, :6]
        late = late + self.third(early)[..., :5, :1]
        return F.gelu(self.norm(late.flatten(1)))


def grouped(dtype: torch.dtype = torch.float64) -> Classifier:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        return Classifier(Grouped(), nn.Linear(270, 10)).to(dtype)


class Twice(nn.Module):
    """One layer called twice: nothing that book-keeping knows."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(144, 144)

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.dense(torch.tanh(self.dense(images.flatten(1))))
        return found


def twice() -> Classifier:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        return Classifier(Twice(), nn.Linear(144, 10)).double()


def trained(module: Classifier, training: Training, data: Images, lr: float = 0.1, **options: object) -> Bundle:
    network = LiveNetwork(module)
    return fit(job(network, training, **options), network, data, at_round(2, lr), STREAM, SECRET).weights


def way_of(start: dict[str, Tensor], end: dict[str, Tensor]) -> float:
    return float(torch.cat([(end[n].double() - t.double()).flatten() for n, t in start.items()]).norm())


def steps_on(
    module: Classifier, private: Private, objective: object = task_loss, **training: object
) -> PrivateGradients:
    network = LiveNetwork(module)
    asked = Training(SGD, 16, private=private, **training)  # type: ignore[arg-type]
    work = Fit(copy_module_weights(module), objective, asked)  # type: ignore[arg-type]
    network.set_training_mode(frozenset(network.live["model"]))
    network.require_gradients(frozenset(network.live["model"]))
    return PrivateGradients(work, network, network.live, 16, SECRET)


def clipped(module: Classifier, batch: Batch, clip: float, **private: object) -> dict[str, Tensor]:
    steps = steps_on(module, Private(clip, 0.0, **private))  # type: ignore[arg-type]
    return steps._sum_clipped(task_loss, frozenset(steps.live["model"]), batch, {})[1]


def one_by_one(module: Classifier, batch: Batch) -> dict[str, Tensor]:
    """Every example's gradient by itself, in a plain loop."""
    names, parameters = zip(*module.named_parameters(), strict=True)
    rows = []
    for image, label in zip(*batch, strict=True):
        rows.append(torch.autograd.grad(F.cross_entropy(module(image[None]), label[None]), parameters))
    return {name: torch.stack(each) for name, each in zip(names, zip(*rows, strict=True), strict=True)}


def lengths(each: dict[str, Tensor]) -> Tensor:
    return torch.stack([g.flatten(1).square().sum(1) for g in each.values()]).sum(0).sqrt()


def summed(each: dict[str, Tensor], clip: float) -> dict[str, Tensor]:
    factors = (clip / lengths(each)).clamp(max=1)
    return {name: torch.einsum("n,n...->...", factors, g) for name, g in each.items()}


def apart(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert mine.keys() == theirs.keys()
    size = max(float(t.abs().max()) for t in theirs.values())
    return max(float((mine[n] - t).abs().max()) for n, t in theirs.items()) / size


NAMES = ("linear", "mlp", "small_cnn", "cnn_b", "cnn_c", "groupnorm_cnn")
MODULES: dict[str, Callable[[torch.dtype], Classifier]] = {
    **{name: partial(model, name) for name in NAMES},
    "grouped": grouped,
}


@pytest.mark.parametrize(("dtype", "bar"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("name", MODULES)
def test_the_clipped_sum_is_that_of_opacus(name: str, dtype: torch.dtype, bar: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from opacus import GradSampleModule

        images, labels = noise(12, dtype=dtype).batch(torch.arange(12))
        theirs = GradSampleModule(_without_inplace(MODULES[name](dtype)), loss_reduction="mean")
        F.cross_entropy(theirs(images), labels).backward()  # type: ignore[no-untyped-call]
    each = {n: p.grad_sample for n, p in theirs._module.named_parameters()}
    clip = float(lengths(each).median())
    assert apart(clipped(MODULES[name](dtype), (images, labels), clip), summed(each, clip)) <= bar


def _without_inplace(module: Classifier) -> Classifier:
    for layer in module.modules():
        if isinstance(layer, nn.ReLU):
            layer.inplace = False
    return module


@pytest.mark.parametrize("name", MODULES)
def test_both_ways_give_every_examples_own_gradient(name: str) -> None:
    module = MODULES[name](torch.float64)
    batch = noise(9).batch(torch.arange(9))
    each = one_by_one(module, batch)
    clip = float(lengths(each).median())
    steps = steps_on(module, Private(clip, 0.0))
    names = frozenset(steps.live["model"])
    for way in (steps._sum_with_tape, steps._sum_with_vmap):
        loss, sums = way(task_loss, names, batch, {}, 9)
        assert apart(sums, summed(each, clip)) <= 1e-12
        assert float(loss) == pytest.approx(F.cross_entropy(module(batch[0]), batch[1]).item(), rel=1e-6)


def test_a_layer_called_twice_is_differentiated_one_by_one() -> None:
    module, batch = twice(), noise(9).batch(torch.arange(9))
    each = one_by_one(module, batch)
    assert apart(clipped(module, batch, 1.0), summed(each, 1.0)) <= 1e-12


def contrast(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensor:
    """Mixes examples: every logit against the batch's mean."""
    del reference
    logits = network(weights, batch[0])
    return F.cross_entropy(logits + logits.mean(0, keepdim=True), batch[1])


def test_an_objective_that_mixes_examples_sees_one_at_a_time() -> None:
    module, batch = model("mlp"), noise(9).batch(torch.arange(9))
    steps = steps_on(module, Private(0.7, 0.0), contrast)
    names = frozenset(steps.live["model"])
    together = steps._sum_clipped(contrast, names, batch, {})[1]
    alone = [steps._sum_clipped(contrast, names, (batch[0][i : i + 1], batch[1][i : i + 1]), {})[1] for i in range(9)]
    assert apart(together, {n: torch.stack([a[n] for a in alone]).sum(0) for n in names}) <= 1e-12
    assert max(float(torch.cat([t.flatten() for t in a.values()]).norm()) for a in alone) <= 0.7 * (1 + 1e-6)


@pytest.mark.parametrize("objective", [proximal_loss, corrected_loss])
def test_what_looks_at_no_data_is_added_in_full(objective: Callable[..., Tensor]) -> None:
    data, start = noise(16), copy_module_weights(model("mlp"))["model"]
    reference: Bundle = {
        "anchor": {n: t + 1 for n, t in start.items()},
        "scalars": {"mu": torch.tensor(30.0)},
        "correction": {n: torch.full_like(t, -30.0) for n, t in start.items()},
    }
    training = Training(SGD, 16, private=Private(0.5, 0.0, "shuffle"))
    ends = [
        trained(model("mlp"), training, data, steps=steps, reference=reference)["model"]
        for steps in (task_loss, objective)
    ]
    for name, end in ends[0].items():  # lr 0.1 · gradient −30
        torch.testing.assert_close(ends[1][name] - end, torch.full_like(end, 3.0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("views", [2, 5])
def test_an_examples_views_are_averaged_before_they_are_clipped(views: int) -> None:
    module, batch = model("groupnorm_cnn"), noise(6 * views).batch(torch.arange(6 * views))
    each = {n: t.reshape(6, views, *t.shape[1:]).mean(1) for n, t in one_by_one(module, batch).items()}
    clip = float(lengths(each).median())
    assert apart(clipped(module, batch, clip, views=views), summed(each, clip)) <= 1e-12


def test_with_views_an_example_still_moves_the_sum_by_the_clip_at_most() -> None:
    start = copy_module_weights(model("mlp"))["model"]
    several = Private(0.01, 0.0, views=4)
    options = Training(SGD, 1, private=several, augment=Augment(rotation=20, brightness=0.5))
    assert way_of(start, trained(model("mlp"), options, noise(1), 1.0)["model"]) == pytest.approx(0.01, rel=1e-6)


def test_m3_a_neighbour_moves_the_clipped_sum_by_the_clip_at_most() -> None:
    clip, generator = 0.3, STREAM.generator()
    steps = steps_on(model("groupnorm_cnn"), Private(clip, 0.0))
    names = frozenset(steps.live["model"])
    for number in range(25):  # of eight, everyone is left out once
        images, labels = noise(8, seed=number).batch(torch.arange(8))
        images = images * torch.logspace(-3, 3, 200)[torch.randint(200, (8, 1, 1, 1), generator=generator)]
        whole = steps._sum_clipped(task_loss, names, (images, labels), {})[1]
        for gone in range(8):
            left = torch.arange(8) != gone
            assert way_of(whole, steps._sum_clipped(task_loss, names, (images[left], labels[left]), {})[1]) <= clip * (
                1 + 1e-6
            )


@pytest.mark.parametrize("name", ["groupnorm_cnn", "grouped", "small_cnn"])
def test_m3_no_example_is_longer_than_the_clip_in_float32(name: str) -> None:
    steps, alone = steps_on(MODULES[name](torch.float32), Private(0.3, 0.0)), noise(32, dtype=torch.float32)
    names, nothing = frozenset(steps.live["model"]), {n: torch.zeros_like(t) for n, t in steps.live["model"].items()}
    longest = max(
        way_of(nothing, steps._sum_clipped(task_loss, names, alone.batch(torch.tensor([row])), {})[1])
        for row in range(32)
    )
    assert 0.3 * (1 - 1e-6) <= longest <= 0.3 * (1 + 1e-6)


@pytest.mark.parametrize("objective", [task_loss, contrast])
def test_one_bad_pixel_costs_its_own_example_and_is_counted(objective: Callable[..., Tensor]) -> None:
    bad, clean = noise(16), noise(16)
    bad.images[5, 0, 3, 3], bad.images[11, 0, 3, 3] = math.nan, math.inf
    steps = steps_on(model("groupnorm_cnn"), Private(0.5, 0.0), objective)
    names, good = frozenset(steps.live["model"]), torch.tensor([i for i in range(16) if i not in (5, 11)])
    bounded = steps._sum_clipped(objective, names, bad.batch(torch.arange(16)), {})[1]
    assert int(steps.dropped) == 2
    assert apart(bounded, steps._sum_clipped(objective, names, clean.batch(good), {})[1]) <= 1e-12
    assert int(steps.dropped) == 2


def test_a_bad_example_is_reported_and_training_goes_on() -> None:
    data = noise(16)
    data.images[5, 0, 3, 3] = math.nan
    network = LiveNetwork(model("mlp"))
    asked = job(network, Training(SGD, 4, epochs=3, private=Private(0.5, 1.0, "shuffle")))
    fitted = fit(asked, network, data, at_round(1), STREAM, SECRET)
    assert fitted.dropped == 3
    assert math.isfinite(fitted.loss)
    assert all(t.isfinite().all() for t in fitted.weights["model"].values())


def ended(training: Training, secret: Stream | None = SECRET, **options: object) -> Fitted:
    network = LiveNetwork(model("groupnorm_cnn", torch.float32, dropout=0.3))
    data = noise(23, dtype=torch.float32)
    return fit(job(network, training, **options), network, data, at_round(2), STREAM, secret)


@pytest.mark.parametrize("optimiser", [Optimiser("sgd", 0.1, 0.9, 1e-3), Optimiser("adam", 0.01), Optimiser("adamw")])
@pytest.mark.parametrize("whole", [False, True])
def test_l2_without_clip_and_noise_it_is_the_job_without_privacy(optimiser: Optimiser, whole: bool) -> None:
    plain = Training(optimiser, 4, epochs=2, augment=Augment(rotation=10))
    nothing = replace(plain, private=Private(math.inf, 0.0, "shuffle"))
    one, other = ended(plain, full_batch=whole), ended(nothing, full_batch=whole)
    assert all(torch.equal(one.weights["model"][n], t) for n, t in other.weights["model"].items())
    assert one.loss == other.loss


def test_a_clip_that_nobody_reaches_gives_plain_training_up_to_rounding() -> None:
    plain = Training(Optimiser("sgd", 0.1, 0.9, 1e-3), 4, epochs=2)
    ends = [
        trained(model("groupnorm_cnn"), replace(plain, private=private), noise(23))["model"]
        for private in (None, Private(1e9, 0.0, "shuffle"))
    ]
    assert apart(dict(ends[1]), dict(ends[0])) <= 1e-12


def test_frozen_parameters_are_neither_noised_nor_counted() -> None:
    start = copy_module_weights(model("groupnorm_cnn"))["model"]
    names = LiveNetwork(model("groupnorm_cnn")).trainable_names(0.3, ())
    options = Training(SGD, 8, fine_tune=0.3, private=Private(0.1, 2.0))
    end = trained(model("groupnorm_cnn"), options, noise(16))["model"]
    assert {n for n, t in end.items() if not torch.equal(t, start[n])} == names
    one = replace(options, batch=1, epochs=None, steps=1, private=Private(1e-3, 0.0, "shuffle"))
    assert way_of(start, trained(model("groupnorm_cnn"), one, noise(16), 1.0)["model"]) == pytest.approx(1e-3, rel=1e-6)


def test_an_empty_batch_still_steps_by_its_noise() -> None:
    network, data = LiveNetwork(model("mlp")), noise(16)
    options = Training(SGD, 1, epochs=None, steps=1, private=Private(0.5, 2.0))
    secret = next(
        s for s in map(SECRET.child, range(99)) if not len(draw_poisson_batches(16, 1 / 16, 1, s.child("sample"))[0])
    )
    start = copy_module_weights(network.module)["model"]
    end = fit(job(network, options), network, data, at_round(1, 1.0), STREAM, secret).weights["model"]
    size = sum(t.numel() for t in start.values())
    drawn = draw_normals([secret.child("noise", 0, 0)], size, torch.device("cpu"), torch.float64)[0]
    moved = torch.cat([(start[n] - end[n]).flatten() for n in sorted(start)])
    torch.testing.assert_close(moved, 0.5 * 2.0 * drawn / 1.0, rtol=1e-12, atol=1e-12)


def test_the_sum_is_divided_by_the_expected_batch_not_the_drawn_one() -> None:
    network, data = LiveNetwork(model("mlp")), noise(16)
    options = Training(SGD, 4, epochs=None, steps=1, private=Private(1e-3, 0.0))
    drawn = draw_poisson_batches(16, 4 / 16, 1, SECRET.child("sample"))[0]
    steps = steps_on(model("mlp"), Private(1e-3, 0.0))
    sums = steps._sum_clipped(task_loss, frozenset(steps.live["model"]), data.batch(drawn), {})[1]
    start = copy_module_weights(network.module)["model"]
    end = fit(job(network, options), network, data, at_round(1, 1.0), STREAM, SECRET).weights["model"]
    assert len(drawn) not in (0, 4)
    assert apart({n: start[n] - t for n, t in end.items()}, {n: t / 4 for n, t in sums.items()}) <= 1e-9


def test_every_step_on_a_batch_draws_its_own_noise() -> None:
    steps = (Step(task_loss, ("extractor.",)), Step(task_loss, ("extractor.",)))
    options = Training(SGD, 16, private=Private(1e-9, 1e9))
    start = copy_module_weights(model("mlp"))["model"]["extractor.dense.weight"]
    first, both = (
        trained(model("mlp"), options, noise(16), steps=some)["model"]["extractor.dense.weight"]
        for some in (steps[:1], steps)
    )
    drawn = torch.stack([(first - start).flatten(), (both - first).flatten()])
    assert abs(float(torch.corrcoef(drawn)[0, 1])) < 5 / math.sqrt(drawn.shape[1])


def test_layers_that_mix_examples_are_refused_by_name() -> None:
    module = Classifier(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten()), nn.Linear(400, 10))
    network = LiveNetwork(module.double())
    asked = job(network, Training(SGD, 8, private=Private(1.0, 1.0)))
    with pytest.raises(RecipeError, match=r"extractor\.1 \(BatchNorm2d\).*GroupNorm"):
        fit(asked, network, noise(16), at_round(1), STREAM, SECRET)
    frozen = job(network, Training(SGD, 8, fine_tune=0.3, private=Private(1.0, 1.0)))
    fit(frozen, network, noise(16), at_round(1), STREAM, SECRET)


def test_impossible_jobs_are_refused() -> None:
    with pytest.raises(EngineError, match="secret"):
        ended(Training(SGD, 8, private=Private(1.0, 1.0)), None)
    with pytest.raises(RecipeError, match="oversample"):
        ended(Training(SGD, 8, oversample=True, private=Private(1.0, 1.0)))
    with pytest.raises(RecipeError, match=r"privacy\.clip"):
        ended(Training(SGD, 8, private=Private(math.inf, 1.0)))


def test_private_training_in_bfloat16_clips_what_it_computed() -> None:
    options = Training(SGD, 1, precision="bfloat16", private=Private(1e-2, 0.0, "shuffle"))
    start = copy_module_weights(model("groupnorm_cnn", torch.float32))["model"]
    end = trained(model("groupnorm_cnn", torch.float32), options, noise(1, dtype=torch.float32), 1.0)["model"]
    assert way_of(start, end) == pytest.approx(1e-2, rel=1e-4)  # weights of 0.1 move by steps of 1e-8


def test_runs_differ_by_their_secret_alone() -> None:
    training = Training(SGD, 8, private=Private(0.5, 1.0))
    one, same, other = (ended(training, s).weights["model"]["head.weight"] for s in (SECRET, SECRET, Stream(12)))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("engine", ["local", "stacked"])
def test_no_noise_is_used_twice_in_a_run(engine: str) -> None:
    """Over sites, rounds and steps, as optimisers receive it: far more noise than images move."""
    heard: list[Tensor] = []

    def hear_one(optimiser: torch.optim.Optimizer, *_: object) -> None:
        found = [p.grad for group in optimiser.param_groups for p in group["params"] if p.grad is not None]
        heard.append(torch.cat([gradient.flatten() for gradient in found]).clone())

    def hear_stack(_: object, __: object, gradients: dict[str, Tensor], ___: object) -> None:
        heard.extend(torch.cat([gradients[name].flatten(1) for name in sorted(gradients)], 1).clone())

    handle = register_optimizer_step_pre_hook(hear_one)
    STEP_PRE_HOOKS.append(hear_stack)
    try:
        run(tiny(privacy={"noise": 1e3, "delta": 1e-3}, engine__name=engine))
    finally:
        handle.remove()
        STEP_PRE_HOOKS.remove(hear_stack)
    assert len(heard) >= 3 * 2 * 2, "three sites, two rounds, and steps"
    related = torch.corrcoef(torch.stack(heard)) - torch.eye(len(heard))
    assert float(related.abs().max()) < 7 / math.sqrt(heard[0].numel())
