"""Who trains on what when, in a stack: each site's batches, and which sites' batches are computed at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from polyclinic.core.contract import Batch, Examples, Fit, Site, Stream, Tensors
from polyclinic.data.examples import Selection
from polyclinic.training.dp.dp_sgd import ROUNDED, changes_nothing, expected_batch
from polyclinic.training.fit import changed, schedule
from polyclinic.training.keyed_dropout import first_key, key_of
from polyclinic.training.prefetch import fetched, onto


@dataclass(frozen=True)
class StackMember:
    """One site's place in a stack."""

    job: Fit
    data: Examples
    site: Site
    stream: Stream
    secret: Stream | None = None
    """Of a private job: who joins its steps, and its noise."""

    @property
    def size(self) -> int:
        """Of its batches: that of all in a stack."""
        return self.job.training.size(len(self.data))


class MicroBatch(NamedTuple):
    """One batch of one site."""

    number: int
    """Of its step, in the whole run."""
    position: int
    """Among the batches of the step."""
    rows: Tensor
    length: int
    """Of the batch: of its rows. ANY, until it is padded like those computed with it."""
    share: float
    """Of the step's examples."""
    last: bool
    """The optimiser steps after it."""
    present: int
    """Rows that are not padding."""
    expected: int = 1
    """What a private step's sum is divided by."""

    def padded(self, length: int) -> MicroBatch:
        return self._replace(rows=F.pad(self.rows, (0, length - self.present)), length=length)


ANY = 0


def bits(seat: StackMember) -> list[MicroBatch]:
    """A site's batches in their order; it is drawn on the CPU, as `fit` draws it."""
    training, examples = seat.job.training, len(seat.data)
    labels = seat.data.labels.cpu() if training.oversample else torch.empty(examples)
    plain = changes_nothing(training.private)
    random = not plain and training.private is not None and training.private.sampling == "poisson"
    found = []
    for number, micro in schedule(seat.job, labels, seat.stream, seat.secret, seat.site.round):
        lengths = [rows.numel() for rows in micro]
        expected = 1 if plain else expected_batch(training, examples, seat.job.whole, sum(lengths))
        for position, rows in enumerate(micro or [torch.zeros(0, dtype=torch.int64)]):
            length, last = rows.numel(), position >= len(micro) - 1
            share = length / max(sum(lengths), 1)
            found.append(MicroBatch(number, position, rows, ANY if random else length, share, last, length, expected))
    return found


def calls(plans: Sequence[Sequence[MicroBatch]]) -> list[list[int]]:
    """Who is computed together, call by call: whoever has most left leads, and all that are like it go along."""
    at, found = [0] * len(plans), []

    def left(site: int) -> int:
        return len(plans[site]) - at[site]

    def kind(site: int) -> tuple[int, bool]:
        bit = plans[site][at[site]]
        return bit.length, bit.last

    while left(leader := max(range(len(plans)), key=left)):
        found.append([site for site in range(len(plans)) if left(site) and kind(site) == kind(leader)])
        for site in found[-1]:
            at[site] += 1
    return found


@dataclass(frozen=True)
class StackStep:
    """Batches of one length, computed at once."""

    table: StackSchedule
    bits: list[MicroBatch]
    """Of everyone who is seated."""
    who: list[int]
    rows: Tensor
    keys: Tensor
    seated: Tensor | None
    """Whose rows of the stack are computed (None: everyone's) …"""
    members: Tensor | None
    """… and who of the stack takes a step (None: everyone)."""
    inside: Tensor | None
    """The members' places among the seated, where more are seated than members."""
    shares: Tensor | None
    """Of the members' steps, where a step takes several batches."""
    present: Tensor
    """Whose rows hold an example and not padding, of everyone who is seated."""
    expected: Tensor
    """What the members' private sums are divided by."""
    stepping: list[tuple[int, int]]
    """The members, and the numbers of their steps."""

    @property
    def everyone(self) -> bool:
        return self.seated is None

    @property
    def last(self) -> bool:
        return self.bits[0].last

    def of_members(self, stacked: Tensors) -> Tensors:
        inside = self.inside
        return stacked if inside is None else {name: t[inside] for name, t in stacked.items()}

    def changed(self, images: Tensor, labels: Tensor) -> Batch:
        """The sites' images as `fit` would change them."""
        training = self.table.seats[0].job.training
        views = 1 if training.private is None else training.private.views
        if training.augment is None and views == 1:
            return images, labels
        batches = []
        for place, (site, bit) in enumerate(zip(self.who, self.bits, strict=True)):
            stream = self.table.seats[site].stream.child("augment", bit.number, bit.position)
            there = bit.present or 1  # of an empty batch nothing is used, but it has its place
            some = changed(images[place, :there], labels[place, :there], training, stream)
            batches.append([_lengthened(t, bit.length * views) for t in some])
        changed_images, changed_labels = (torch.stack(parts) for parts in zip(*batches, strict=True))
        return changed_images, changed_labels


def _lengthened(rows: Tensor, length: int) -> Tensor:
    missing = length - len(rows)
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


class StackSchedule:
    """The whole of a stack's round: all turns, with what they need already on the device."""

    def __init__(self, seats: Sequence[StackMember], device: torch.device, fill: bool, drawing: bool) -> None:
        """`fill`: where most take part in a turn, the others are computed too, so that shapes repeat.

        `drawing`: the network has dropout, which needs keys.
        """
        self.seats, self.device = seats, device
        self.first_keys = [first_key(seat.stream) if drawing else 0 for seat in seats]
        self.plans = [bits(seat) for seat in seats]
        self.steps = [sum(bit.last for bit in plan) for plan in self.plans]
        self.fill = fill
        self.random = any(bit.length == ANY for plan in self.plans for bit in plan)
        selections = [seat.data for seat in seats if isinstance(seat.data, Selection)]
        alike = len(selections) == len(seats) and all(s.shared is selections[0].shared for s in selections)
        self.shared = selections[0].shared if alike else None
        self.pool = torch.cat([s.rows for s in selections]) if alike else None
        self.home = device if self.shared is None else self.shared.labels.device
        """Where images are looked up …"""
        self.apart = self.home.type != device.type
        """… which may be elsewhere than where they are needed."""
        self.starts = torch.tensor([0, *(len(seat.data) for seat in seats)]).cumsum(0)[:-1]

    def turns(self) -> Iterator[StackStep]:
        at = [iter(plan) for plan in self.plans]
        planned = [(members, _alike([next(at[site]) for site in members])) for members in calls(self.plans)]
        filled = [self._filled(members, found) for members, found in planned]
        rows = _sent([self._places(who, found) for who, found in filled], self.home)
        keys = _sent([self._keys(who, found) for who, found in filled], self.device)
        counts = _sent([torch.tensor([bit.present for bit in found]) for _, found in filled], self.device)
        over = _sent([_expected(found) for _, found in planned], self.device)
        for number, ((members, found), (who, seated)) in enumerate(zip(planned, filled, strict=True)):
            yield StackStep(
                self,
                seated,
                who,
                rows[number],
                keys[number],
                self._index(who),
                self._index(members),
                None if who == members else self._sent_one([who.index(site) for site in members]),
                self._shares(found),
                torch.arange(found[0].length, device=self.device) < counts[number][:, None],
                over[number],
                [(site, bit.number) for site, bit in zip(members, found, strict=True)],
            )

    def _filled(self, members: list[int], found: list[MicroBatch]) -> tuple[list[int], list[MicroBatch]]:
        """With everyone else seated too, if that is worth it: what they compute is thrown away."""
        everyone = list(range(len(self.seats)))
        length = found[0].length
        short = length < self.seats[0].size and not self.random
        if not self.fill or short or not len(everyone) / 2 <= len(members) < len(everyone):
            return members, found
        idle = {
            site: MicroBatch(0, 0, torch.arange(length) % len(self.seats[site].data), length, 0.0, found[0].last, 0)
            for site in everyone
        }
        busy = dict(zip(members, found, strict=True))
        return everyone, [busy.get(site, idle[site]) for site in everyone]

    def _places(self, who: list[int], found: list[MicroBatch]) -> Tensor:
        """Rows of each site's own images, or, where all share them, of the pool."""
        rows = torch.stack([bit.rows for bit in found])
        return rows if self.pool is None else rows + self.starts[who, None]

    def _keys(self, who: list[int], found: list[MicroBatch]) -> Tensor:
        numbered = zip(who, found, strict=True)
        return torch.tensor([key_of(self.first_keys[site], bit.number, bit.position) for site, bit in numbered])

    def _shares(self, found: list[MicroBatch]) -> Tensor | None:
        if all(bit.share == 1 for bit in found):
            return None
        return onto(torch.tensor([bit.share for bit in found], dtype=torch.float64), self.device)

    def _index(self, sites: list[int]) -> Tensor | None:
        return None if len(sites) == len(self.seats) else self._sent_one(sites)

    def _sent_one(self, places: list[int]) -> Tensor:
        return onto(torch.tensor(places), self.device)

    @contextmanager
    def served(self) -> Iterator[Iterator[tuple[StackStep, Batch]]]:
        """The turns with their batches; images that lie elsewhere are fetched ahead of use."""
        turns = list(self.turns())
        if self.shared is None or not self.apart:
            yield ((turn, turn.changed(*self._picked(turn))) for turn in turns)
            return
        shared, pinned = self.shared, self.device.type == "cuda"
        with fetched(lambda turn: shared.stored(self._place(turn), pinned), turns, self.device) as batches:
            shaped = (_shaped(turn, shared.scaled(i), t) for turn, (i, t) in zip(turns, batches, strict=True))
            yield ((turn, turn.changed(*batch)) for turn, batch in zip(turns, shaped, strict=True))

    def _picked(self, turn: StackStep) -> Batch:
        """The batches of a turn, stacked; where sites share their images, in one gathering."""
        if self.shared is not None:
            return _shaped(turn, *self.shared.batch(self._place(turn)))
        batches = [self.seats[site].data.batch(rows) for site, rows in zip(turn.who, turn.rows, strict=True)]
        images, labels = (torch.stack(parts) for parts in zip(*batches, strict=True))
        return images.to(self.device), labels.to(self.device)

    def _place(self, turn: StackStep) -> Tensor:
        """Which of the shared images."""
        assert self.pool is not None
        return self.pool.index_select(0, turn.rows.reshape(-1))


def _alike(found: list[MicroBatch]) -> list[MicroBatch]:
    """Batches of one length: random ones are padded, to one of few lengths."""
    if found[0].length != ANY:
        return found
    longest = max(1, *(bit.present for bit in found))
    return [bit.padded(-(-longest // ROUNDED) * ROUNDED) for bit in found]


def _expected(found: list[MicroBatch]) -> Tensor:
    return torch.tensor([bit.expected for bit in found])


def _shaped(turn: StackStep, images: Tensor, labels: Tensor) -> Batch:
    """A row of batches per site, from one long batch."""
    return images.reshape(*turn.rows.shape, *images.shape[1:]), labels.reshape(turn.rows.shape)


def _sent(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """All on the device, in one copy."""
    block = onto(torch.cat([t.reshape(-1) for t in tensors]), device)
    pieces = torch.split(block, [t.numel() for t in tensors])
    return [piece.reshape(t.shape) for piece, t in zip(pieces, tensors, strict=True)]
