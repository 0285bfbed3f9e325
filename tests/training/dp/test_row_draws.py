"""Under a plan an image's augmentation and dropout are its own: with one image taken out, all others keep theirs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
import torchvision
from scipy import stats
from torch import Tensor, nn

from polyclinic.core.jobs import Fit, Site
from polyclinic.core.network import Network
from polyclinic.core.options import Augment, Optimiser, Private, Training
from polyclinic.core.rng import Stream
from polyclinic.core.types import Batch, Bundle
from polyclinic.data.examples import Images
from polyclinic.models import build_model
from polyclinic.models.classifier import Classifier
from polyclinic.training import data_order
from polyclinic.training.dp.dp_sgd import PrivateGradients
from polyclinic.training.fit import fit, iterate_on_host, prepare_rows
from polyclinic.training.keyed_dropout import StochasticDepth, hash_uniform, key_dropout_layers, row_keys
from polyclinic.training.losses import separable, task_loss
from polyclinic.training.network import LiveNetwork, copy_module_weights

SECRET, COUNT, VIEWS, OUT = Stream(5, ("secret",)), 20, 2, 7
EVERYTHING = Augment(rotation=20, flip=True, crop=0.3, brightness=0.3, contrast=0.3, blur=1.0)
ROWS = {
    "with all": torch.tensor([3, OUT, 11, 0, 19]),
    "one taken out": torch.tensor([3, 11, 0, 19]),
    "in another order": torch.tensor([19, 0, OUT, 3, 11]),
}


class Flattening(nn.Module):
    """Dropout before and after a flatten, and stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.early, self.late = nn.Conv2d(1, 4, 3, padding=1), nn.Dropout(0.4), nn.Dropout(0.4)
        self.depth = torchvision.ops.StochasticDepth(0.4, "row")

    def forward(self, images: Tensor) -> Tensor:
        found = torch.tanh(self.conv(images))
        result: Tensor = self.late(self.early(self.depth(found)).flatten(1))
        return result


def flattening() -> Classifier:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        return Classifier(Flattening(), nn.Linear(4 * 12 * 12, 3)).double()


def pictures() -> Images:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.rand(COUNT, 1, 12, 12, dtype=torch.float64, generator=generator)
    return Images(drawn, torch.randint(3, (COUNT,), generator=generator))


def training(clip: float = 0.5) -> Training:
    private = Private(clip, 0.0, views=VIEWS)
    return Training(Optimiser("sgd", 0.1), 4, epochs=None, steps=1, augment=EVERYTHING, private=private)


@dataclass
class Witness:
    """Sees what each image becomes in a step, and which of its units are dropped."""

    pixels: list[Tensor] = field(default_factory=list)
    units: dict[str, Tensor] = field(default_factory=dict)

    def watch(self, network: LiveNetwork) -> LiveNetwork:
        for name, layer in network.dropouts.items():
            layer.register_forward_hook(lambda _, given, found, name=name: self.note(name, given[0], found))
        return network

    def note(self, name: str, given: Tensor, found: Tensor) -> None:
        self.units[name] = ((found != 0) | (given == 0)).detach()


def step(rows: Tensor, images: Images, monkeypatch: pytest.MonkeyPatch) -> Witness:
    """One step of `fit` on these rows."""
    witness, network = Witness(), LiveNetwork(flattening())
    witness.watch(network)

    @separable
    def objective(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensor:
        if len(batch[1]):
            witness.pixels.append(batch[0])
        return network.loss(weights, batch)

    monkeypatch.setattr(data_order, "draw_poisson_batches", lambda *_: [rows])
    job = Fit(copy_module_weights(network.module), objective, training())
    fit(job, network, images, Site("a", COUNT, 1, 1, 0.1), Stream(0), SECRET)
    return witness


def of_row(rows: Tensor, values: Tensor, row: int) -> Tensor:
    (place,) = (rows == row).nonzero().flatten().tolist()
    return values[place * VIEWS : (place + 1) * VIEWS]


@pytest.mark.parametrize("other", ["one taken out", "in another order"])
def test_a_batch_without_an_image_is_the_same_for_all_others(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (step(ROWS[name], pictures(), monkeypatch) for name in ("with all", other))
    assert first.units.keys() == {"extractor.early", "extractor.late", "extractor.depth"}
    for row in (3, 11, 0, 19):
        seen = [of_row(rows, w.pixels[0], row) for rows, w in ((ROWS["with all"], first), (ROWS[other], second))]
        assert torch.equal(*seen)
        for name in first.units:
            masks = [of_row(r, w.units[name], row) for r, w in ((ROWS["with all"], first), (ROWS[other], second))]
            assert torch.equal(*masks), name
    assert not torch.equal(first.pixels[0][0], first.pixels[0][1]), "each view is another"
    assert not first.units["extractor.late"].all()


def test_an_image_that_is_zeroed_changes_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    blank = pictures()
    blank.images[OUT] = 0
    first, second = (step(ROWS["with all"], images, monkeypatch) for images in (pictures(), blank))
    kept = (ROWS["with all"] != OUT).repeat_interleave(VIEWS)
    assert torch.equal(first.pixels[0][kept], second.pixels[0][kept])
    for name, units in first.units.items():
        assert torch.equal(units[kept], second.units[name][kept])


@pytest.mark.parametrize("way", ["_sum_with_tape", "_sum_with_vmap"])
def test_m3_taking_an_image_out_moves_the_sum_by_a_clip_at_most(way: str) -> None:
    """With augmentation and dropout, which is what the accountant prices."""
    network, clip = LiveNetwork(flattening()), 0.01
    job = Fit(copy_module_weights(network.module), task_loss, training(clip))
    names, data = frozenset(network.live["model"]), pictures()
    network.set_training_mode(names)
    network.require_gradients(names)
    private = PrivateGradients(job, network, network.live, COUNT, SECRET)

    def summed(rows: Tensor) -> Tensor:
        (batch,) = prepare_rows(iter([data.batch(rows)]), [rows], network, training(clip), SECRET, 3)
        _, sums = getattr(private, way)(task_loss, names, batch, {}, len(rows))
        return torch.cat([sums[name].flatten() for name in sorted(sums)])

    moved = summed(ROWS["with all"]) - summed(ROWS["one taken out"])
    assert float(moved.norm()) == pytest.approx(clip, rel=1e-9), "this image is longer than the clip"
    assert torch.allclose(summed(ROWS["with all"]), summed(ROWS["in another order"]), rtol=0, atol=1e-14)


def test_both_ways_drop_the_same_units() -> None:
    network, rows = LiveNetwork(flattening()), ROWS["with all"]
    job = Fit(copy_module_weights(network.module), task_loss, training(math.inf))
    names = frozenset(network.live["model"])
    network.set_training_mode(names)
    network.require_gradients(names)
    private = PrivateGradients(job, network, network.live, COUNT, SECRET)
    (batch,) = prepare_rows(iter([pictures().batch(rows)]), [rows], network, training(), SECRET, 3)
    one, other = (
        way(task_loss, names, batch, {}, len(rows))[1] for way in (private._sum_with_tape, private._sum_with_vmap)
    )
    for name in names:
        torch.testing.assert_close(one[name], other[name], rtol=1e-12, atol=1e-14)


def test_keys_of_rows_steps_and_views_do_not_go_together() -> None:
    """Correlations of independent numbers have the variance 1/n; six deviations are one in a billion."""
    rows, many = torch.arange(40_000), 40_000
    keys = [row_keys(SECRET.child("augment", step), rows, 2).view(-1, 2) for step in (0, 1)]
    numbers = torch.cat([hash_uniform(key.flatten(), 8).double().view(many, 16) for key in keys], 1)
    found = torch.corrcoef(numbers.T) - torch.eye(32)
    assert float(found.abs().max()) < 6 / math.sqrt(many)
    after = torch.corrcoef(torch.stack([numbers[1:, 0], numbers[:-1, 0]]))[0, 1]
    assert abs(float(after)) < 6 / math.sqrt(many)
    assert stats.kstest(numbers.flatten().numpy(), "uniform", method="asymp").pvalue > 1e-3
    assert len(set(torch.cat(keys).flatten().tolist())) == 4 * many


def test_stochastic_depth_without_rows_is_torchvisions() -> None:
    values = torch.rand(50, 3, 2, 2)
    for mode in ("row", "batch"):
        theirs = torchvision.ops.StochasticDepth(0.3, mode).train()
        ours = nn.Sequential(torchvision.ops.StochasticDepth(0.3, mode)).train()
        key_dropout_layers(ours.named_modules(), torch.device("cpu"))
        assert isinstance(ours[0], StochasticDepth)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            wanted = theirs(values)
            torch.manual_seed(4)
            assert torch.equal(ours(values), wanted)
        ours.eval()
        assert torch.equal(ours(values), values)


def test_a_network_with_row_keys_goes_back_to_one_key() -> None:
    network = LiveNetwork(build_model("mlp", classes=3, channels=1, size=12, dropout=0.5, seed=Stream(1)))
    network.set_training_mode(frozenset(network.live["model"]))
    images = torch.rand(4, 1, 12, 12)
    network.set_dropout_key(77)
    before = network(network.live, images)
    network.set_dropout_key(row_keys(SECRET, torch.arange(4), 1))
    by_row = network(network.live, images)
    network.set_dropout_key(77)
    assert torch.equal(network(network.live, images), before)
    assert not torch.equal(by_row, before)


def test_rows_are_copied_step_by_step() -> None:
    steps = [[torch.tensor([1, 2]), torch.tensor([[3], [4]])], [], [torch.tensor([5])]]
    found: Iterator[list[Tensor]] = iterate_on_host(steps)
    assert [[index.tolist() for index in batches] for batches in found] == [[[1, 2], [3, 4]], [], [[5]]]
    assert list(iterate_on_host([[], []])) == [[], []]
