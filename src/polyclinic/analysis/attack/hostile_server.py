"""A server that plays the first round of a recipe honestly and sends crafted weights from the second on.

The sites run the code that real sites run (`federation.site_runner`), on the recipe as it was approved. What the server
then knows is compared with images that the sites trained on and with images that they did not (validation and test).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from polyclinic.analysis.attack.crafted_weights import (
    Imprint,
    dense_inputs,
    draw_textures,
    find_imprint,
    fit_decoder,
)
from polyclinic.analysis.attack.recovery import (
    LabelCounts,
    Recovered,
    View,
    compare_with_chance,
    count_recovered,
)
from polyclinic.config.recipe import Recipe
from polyclinic.core import Bundle, Failure, RecipeError, RoundFailed, SiteId, Stream, Update
from polyclinic.data.examples import Images, Selection
from polyclinic.federation.engines.local import LocalEngine
from polyclinic.federation.rounds import Rounds
from polyclinic.runs.assemble import round_options
from polyclinic.runs.experiment import Experiment
from polyclinic.storage.journal import RamJournal
from polyclinic.storage.site_memory import RamMemory
from polyclinic.training.data_order import batches_per_epoch

GRID = 2.0**-24
"""The step of the fixed point numbers to which updates are rounded before they are summed under masks."""
FAINT = 1e-6
"""Of the largest record: below it a bin holds rounding, not an image."""


@dataclass(frozen=True)
class CraftedAnswer:
    """One update, or the mean of several, to weights with an imprint."""

    origin: SiteId
    first_class: bool
    sent: Bundle
    back: Bundle


class HostileServer:
    """A server that knows the recipe, and sees what its sites send back."""

    def __init__(self, experiment: Experiment, stream: Stream) -> None:
        setup = experiment.setup
        if setup.algorithm.pooled or setup.recipe.clusters or setup.networks.first.auxiliary_modules:
            raise RecipeError(
                f"{setup.recipe.name} trains pooled images, clusters or auxiliary networks, which this attack cannot "
                "play; set algorithm: fedavg and drop clusters"
            )
        self.setup, self.stream = setup, stream
        self.network = setup.networks.first.module
        first = next(iter(setup.sites.values())).train
        blank = first.batch(torch.arange(1))[0]
        pixels = torch.cat([part.batch(torch.arange(min(len(part), 64)))[0] for part in self._parts("train")])
        optimiser = setup.recipe.training.optimiser.name
        imprint = find_imprint(self.network, blank, float(pixels.abs().max()), optimiser != "sgd")
        if imprint is None:
            raise RecipeError(
                f"{setup.recipe.model.name} does not end in a dense layer with a bias, which this attack needs; attack "
                "a finished run of it instead"
            )
        self.imprint: Imprint = imprint
        self.steady = setup.plan is not None
        self.bins = imprint.bins(self.steady)
        rules = round_options(setup.recipe, experiment.run_id())
        secret = experiment.secret_of_plan
        self.rounds = Rounds(
            setup.federation,
            setup.algorithm,
            LocalEngine(setup.make_runners(RamMemory(), secret)),
            rules,
            RamJournal(),
            transforms=setup.transforms,
        )
        self.state = setup.algorithm.init(setup.federation)
        self.decoder: Tensor | None = None
        if imprint.layout == "shifts":
            crafted = self.craft_even()
            self.decoder = fit_decoder(self.network, imprint, crafted, stream.child("textures"))

    def part_of(self, site: SiteId, name: str) -> Images | Selection:
        """Return the images of one part of a site."""
        part = getattr(self.setup.sites[site], name)
        assert isinstance(part, Images | Selection)
        return part

    def _parts(self, *names: str) -> Iterator[Images | Selection]:
        """Yield the parts of all sites that have images."""
        yield from (part for site in self.setup.sites for name in names if len(part := self.part_of(site, name)))

    def _craft(self, thresholds: Tensor, first_class: bool) -> Bundle:
        return self.imprint.craft(self.state, thresholds, first_class, self.steady)

    def craft_even(self) -> Bundle:
        """Return weights with an imprint over all brightnesses."""
        return self._craft(self._even_thresholds(), True)

    def _even_thresholds(self) -> Tensor:
        """Return thresholds over all brightnesses that an image can have."""
        if self.imprint.layout == "features":
            bright = self._texture_features @ self.imprint.direction(self.state["model"]).double()
            middle, half = float(bright.mean()), 2 * float(bright.max() - bright.min())
            return torch.linspace(middle - half, middle + half, self.bins, dtype=torch.float64)
        low, high = (-1, 1) if self.imprint.layout == "pixels" else (0, 2)
        return torch.linspace(low * self.imprint.range, high * self.imprint.range, self.bins + 1)[:-1]

    @cached_property
    def _texture_features(self) -> Tensor:
        """The features of random textures, which are like those of images: the server needs no image to know them."""
        channels, height, width = self.imprint.image
        pixels = draw_textures(64, height, width, self.stream.child("length")).clamp(0, 1) * self.imprint.range
        weights = self.state
        if self.imprint.layout != "features":
            weights = self.craft_even()
        shown = pixels[:, None].expand(-1, channels, -1, -1)
        return dense_inputs(self.network, self.imprint.dense, weights, shown).double()

    def exchange(self, round: int, sent: Bundle, view: View) -> dict[SiteId, Bundle]:
        """Play one round with these weights; return what the server then sees, by site."""
        sites = list(self.setup.federation.sites)
        outbox = self.rounds.prepare_outbox("train", round, sent, sites, [])
        replies: dict[SiteId, Update] = {}
        for site, reply in self.rounds.engine.exchange(round, outbox, None):
            if isinstance(reply, Failure | bytes):
                raise RoundFailed(f"site {site} did not answer: {getattr(reply, 'sentence', 'unreadable')}")
            tensors = reply.tensors
            for transform in reversed(self.setup.transforms):
                tensors = transform.decode(tensors, sent)
            replies[site] = Update(tensors, reply.fields["examples"], site)
        if view == "each":
            return {site: update.tensors for site, update in replies.items()}
        rounded = [
            Update(round_to_grid(update.tensors, sent), update.examples, site) for site, update in replies.items()
        ]
        return {"all sites": self.setup.algorithm.aggregate(sent, iter(rounded))}

    def play(self, rounds: int, view: View) -> list[CraftedAnswer]:
        """Play an honest round, then `rounds` with crafted weights; return the answers to those."""
        honest = self.exchange(1, self.state, "sum")
        self.state = {**self.state, **next(iter(honest.values()))}
        thresholds, answers = self._even_thresholds(), []
        known: list[Tensor] = []
        if self.steady and self.bins:  # the server is even told how bright the images are
            thresholds = self._separate_brightest()
        for number in range(rounds):
            first_class = number % 2 == 1
            sent = self._craft(thresholds, first_class)
            for origin, back in self.exchange(number + 2, sent, view).items():
                answers.append(CraftedAnswer(origin, first_class, sent, back))
                if not self.steady and self.bins:
                    known.append(self._guess([answers[-1]]) @ self.imprint.direction(sent["model"]).double())
            if known and len(bright := torch.cat(known)):
                thresholds = self._quantiles(bright, number + 1)
        return answers

    def _quantiles(self, bright: Tensor, shift: int = 0) -> Tensor:
        """Return thresholds with as many images between any two of them, at other places in every round."""
        bins, offset = self.bins, (shift * 0.618) % 1
        levels = (torch.arange(bins, dtype=torch.float64) + offset) / bins
        chosen = torch.quantile(bright.double().sort().values, levels.clamp(max=1.0))
        return chosen + torch.arange(bins) * 1e-9  # ascending where quantiles coincide

    def _brightness(self, site: SiteId) -> Tensor:
        """Return a·f of a site's training images, as a network with an imprint sees them."""
        sent = self.craft_even()
        return self.features_of(self.part_of(site, "train"), sent) @ self.imprint.direction(sent["model"]).double()

    def _separate_brightest(self) -> Tensor:
        """Return thresholds between the brightest training images of all sites: one image in each bin."""
        every = torch.cat([self._brightness(site) for site in self.setup.sites])
        bright = torch.tensor(sorted(set(every.tolist()))[-self.bins - 1 :], dtype=torch.float64)
        between = (bright[:-1] + bright[1:]) / 2
        spare = torch.linspace(-2, -1, self.bins - len(between), dtype=torch.float64) + bright[0]
        return torch.cat([spare, between])

    def _occupied_bins(self, answer: CraftedAnswer, thresholds: Tensor) -> Tensor:
        """Return which bins hold an image of the site, of the classes asked for: under noise the server is told."""
        first = self.setup.sites[answer.origin].train.labels.cpu() == 0
        chosen = self._brightness(answer.origin)[first == answer.first_class]
        places = torch.searchsorted(thresholds.double(), chosen) - 1
        return torch.bincount(places[places >= 0], minlength=len(thresholds)) > 0

    def features_of(self, part: Images | Selection, sent: Bundle) -> Tensor:
        """Return what the imprint's layer receives for the images of a part, with the weights that were sent."""
        images = part.batch(torch.arange(len(part)))[0]
        return dense_inputs(self.network, self.imprint.dense, sent, images).double()

    def _guess(self, answers: Sequence[CraftedAnswer]) -> Tensor:
        """Return the features of the images that answers of one origin and one kind recorded, a row for each guess."""
        if self.imprint.layout == "labels":
            return torch.zeros(0, 1, dtype=torch.float64)
        bins = [self.imprint.read_bins(answer.sent, answer.back, self.steady) for answer in answers]
        images, counts = (torch.stack([one[n] for one in bins]).sum(0) for n in (0, 1))
        if self.steady:  # under noise only their direction is read, and the length is that of an image
            chosen = images[self._occupied_bins(answers[0], self._separate_brightest())]
            unit: Tensor = chosen / chosen.norm(dim=1, keepdim=True).clamp(min=1e-30)
            return unit * float(self._texture_features.norm(dim=1).mean())
        lit = counts.abs() > FAINT * counts.abs().max().clamp(min=1e-30)
        found = images[lit] / counts[lit, None]
        room = 1.05 * self.imprint.range * (1 if self.imprint.layout == "pixels" else 2)
        if self.imprint.layout == "features":
            room = 2 * float(self._texture_features.abs().max())
        fits = found.isfinite().all(1) & (found.abs().amax(1) <= room)
        return found[fits]

    def guess_images(self, answers: Sequence[CraftedAnswer]) -> Tensor:
        """Return what the server can show for all answers: rows of pixels, or of features."""
        if not self.steady:
            groups = [[answer] for answer in answers]
        else:  # the same thresholds in all rounds: noise averages out
            keys = dict.fromkeys((answer.origin, answer.first_class) for answer in answers)
            groups = [[a for a in answers if (a.origin, a.first_class) == key] for key in keys]
        return self.imprint.show(torch.cat([self._guess(group) for group in groups]), self.decoder)

    def true_images(self, *parts: str) -> Tensor:
        """Return the images of the sites' parts in the form that guesses have."""
        if self.imprint.layout == "labels":
            return torch.zeros(sum(map(len, self._parts(*parts))), 1)
        if not self.imprint.shows_images:
            sent = self.craft_even()
            return torch.cat([self.features_of(part, sent) for part in self._parts(*parts)])
        rows = [part.batch(torch.arange(len(part)))[0] for part in self._parts(*parts)]
        return torch.cat(rows).mean(1).flatten(1).double()

    def count_labels(self, answers: Sequence[CraftedAnswer]) -> dict[SiteId, LabelCounts]:
        """Read how many training images of each class a site has, from the first answer of each site that tells."""
        found: dict[SiteId, LabelCounts] = {}
        for answer in answers:
            if answer.origin in self.setup.sites and answer.origin not in found and not answer.first_class:
                data, name = self.setup.sites[answer.origin].train, f"{self.imprint.head}.bias"
                moved = (answer.sent["model"][name] - answer.back["model"][name]).double()
                shares = (-moved / step_length(self.setup.recipe, len(data)))[1:]
                counts = (shares * len(data)).tolist()
                true = torch.bincount(data.labels.cpu(), minlength=len(moved)).tolist()
                found[answer.origin] = LabelCounts((len(data) - sum(counts), *counts), tuple(true))
        return found

    def compare(self, answers: Sequence[CraftedAnswer], view: View) -> Recovered:
        """Compare all guesses with images that were trained on, and with images that were not."""
        guesses, inside = self.guess_images(answers), self.true_images("train")
        outside = self.true_images("validation", "test")
        scale = self.imprint.range if self.imprint.shows_images else float(inside.std()) * 3
        near = count_recovered(guesses, inside, outside, scale)
        share, expected, p_value = compare_with_chance(guesses, inside, outside, self.stream.child("shuffles"))
        sgd = self.setup.recipe.training.optimiser.name == "sgd"
        return Recovered(
            view=view,
            images=self.imprint.shows_images,
            rounds=len({id(answer.sent) for answer in answers}),
            guesses=len(guesses),
            trained=len(inside),
            found=near[0],
            held_out=len(outside),
            found_held_out=near[1],
            nearest_trained=share,
            expected=expected,
            p_value=p_value,
            labels=self.count_labels(answers) if sgd else {},
        )


def attack_recipe(
    recipe: Recipe, view: View, rounds: int | None = None, seed: int | None = None, data: Path | None = None
) -> Recovered:
    """Play a recipe as a server that sends crafted weights; return what it made of the updates.

    Args:
        recipe: The recipe, as sites approve it.
        view: What the server sees of a round.
        rounds: The crafted rounds (None: all of the recipe but the first).
        seed: Of textures and shuffles (None: the recipe's).
        data: The data folder.
    """
    last = recipe.rounds - 1
    if not 1 <= (rounds or last) <= last:
        raise RecipeError(
            f"{recipe.name} has {recipe.rounds} rounds, of which the first is honest; attack 1 to {last} of the others"
        )
    server = open_server(recipe, seed, data)
    return server.compare(server.play(rounds or last, view), view)


def open_server(recipe: Recipe, seed: int | None = None, data: Path | None = None) -> HostileServer:
    """Return a server that is about to play a recipe. Masks are left out: the view `sum` stands for them."""
    bare = recipe.model_copy(update={"stages": [stage for stage in recipe.stages if stage.name != "mask"]})
    return HostileServer(Experiment(bare, None, data), Stream(recipe.seed if seed is None else seed, ("attack",)))


def step_length(recipe: Recipe, images: int) -> float:
    """Return how far a weight moves in a round of SGD whose gradient is always 1."""
    training = recipe.training
    options, batch = training.optimiser, training.batch_size(images)
    steps = training.epochs * batches_per_epoch(images, batch) if training.epochs else training.steps or 1
    return options.lr * sum((1 - options.momentum ** (n + 1)) / (1 - options.momentum) for n in range(steps))


def round_to_grid(update: Bundle, received: Bundle) -> Bundle:
    """Return an update as masks would carry it: its distance from what was received in steps of a fixed size."""

    def rounded(kind: str, name: str, tensor: Tensor) -> Tensor:
        moved = (tensor.double() - received[kind][name].double()) / GRID
        return (received[kind][name].double() + moved.round() * GRID).to(tensor.dtype)

    return {
        kind: {name: rounded(kind, name, tensor) for name, tensor in group.items()} for kind, group in update.items()
    }
