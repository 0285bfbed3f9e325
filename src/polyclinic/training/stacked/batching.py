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
from polyclinic.training.dp.dp_sgd import BATCH_MULTIPLE, expected_batch_size, is_plain_sgd
from polyclinic.training.fit import augment_batch, schedule_steps
from polyclinic.training.keyed_dropout import dropout_key, first_key
from polyclinic.training.prefetch import prefetch_in_thread, to_device


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
    def batch_size(self) -> int:
        """Of its batches: that of all in a stack."""
        return self.job.training.batch_size(len(self.data))


class MicroBatch(NamedTuple):
    """One batch of one site."""

    number: int
    """Of its step, in the whole run."""
    position: int
    """Among the batches of the step."""
    rows: Tensor
    length: int
    """Of the batch: of its rows. ANY, until it is padded like those computed with it."""
    step_fraction: float
    """Of the step's examples."""
    completes_step: bool
    """The optimiser steps after it."""
    present: int
    """Rows that are not padding."""
    expected: int = 1
    """What a private step's sum is divided by."""

    def pad_to(self, length: int) -> MicroBatch:
        return self._replace(rows=F.pad(self.rows, (0, length - self.present)), length=length)


UNPADDED = 0


def plan_micro_batches(member: StackMember) -> list[MicroBatch]:
    """A site's batches in their order; it is drawn on the CPU, as `fit` draws it."""
    training, examples = member.job.training, len(member.data)
    labels = member.data.labels.cpu() if training.oversample else torch.empty(examples)
    plain = is_plain_sgd(training.private)
    random = not plain and training.private is not None and training.private.sampling == "poisson"
    found = []
    for number, micro in schedule_steps(member.job, labels, member.stream, member.secret, member.site.round):
        lengths = [rows.numel() for rows in micro]
        expected = 1 if plain else expected_batch_size(training, examples, member.job.full_batch, sum(lengths))
        for position, rows in enumerate(micro or [torch.zeros(0, dtype=torch.int64)]):
            length, last = rows.numel(), position >= len(micro) - 1
            share = length / max(sum(lengths), 1)
            found.append(
                MicroBatch(number, position, rows, UNPADDED if random else length, share, last, length, expected)
            )
    return found


def group_calls(plans: Sequence[Sequence[MicroBatch]]) -> list[list[int]]:
    """Who is computed together, call by call: whoever has most left leads, and all that are like it go along."""
    at, found = [0] * len(plans), []

    def left(site: int) -> int:
        return len(plans[site]) - at[site]

    def kind(site: int) -> tuple[int, bool]:
        bit = plans[site][at[site]]
        return bit.length, bit.completes_step

    while left(leader := max(range(len(plans)), key=left)):
        found.append([site for site in range(len(plans)) if left(site) and kind(site) == kind(leader)])
        for site in found[-1]:
            at[site] += 1
    return found


@dataclass(frozen=True)
class StackStep:
    """Batches of one length, computed at once."""

    schedule: StackSchedule
    micro_batches: list[MicroBatch]
    """Of everyone who is seated."""
    computed_sites: list[int]
    rows: Tensor
    keys: Tensor
    computed: Tensor | None
    """Whose rows of the stack are computed (None: everyone's) …"""
    members: Tensor | None
    """… and who of the stack takes a step (None: everyone)."""
    members_among_computed: Tensor | None
    """The members' places among the seated, where more are seated than members."""
    step_fractions: Tensor | None
    """Of the members' steps, where a step takes several batches."""
    present: Tensor
    """Whose rows hold an example and not padding, of everyone who is seated."""
    expected: Tensor
    """What the members' private sums are divided by."""
    step_numbers: list[tuple[int, int]]
    """The members, and the numbers of their steps."""

    @property
    def computes_all(self) -> bool:
        return self.computed is None

    @property
    def completes_step(self) -> bool:
        return self.micro_batches[0].completes_step

    def select_members(self, stacked: Tensors) -> Tensors:
        inside = self.members_among_computed
        return stacked if inside is None else {name: t[inside] for name, t in stacked.items()}

    def augment_images(self, images: Tensor, labels: Tensor) -> Batch:
        """The sites' images as `fit` would change them."""
        training = self.schedule.members[0].job.training
        views = 1 if training.private is None else training.private.views
        if training.augment is None and views == 1:
            return images, labels
        batches = []
        for place, (site, bit) in enumerate(zip(self.computed_sites, self.micro_batches, strict=True)):
            stream = self.schedule.members[site].stream.child("augment", bit.number, bit.position)
            there = bit.present or 1  # of an empty batch nothing is used, but it has its place
            some = augment_batch(images[place, :there], labels[place, :there], training, stream)
            batches.append([_pad_rows(t, bit.length * views) for t in some])
        changed_images, changed_labels = (torch.stack(parts) for parts in zip(*batches, strict=True))
        return changed_images, changed_labels


def _pad_rows(rows: Tensor, length: int) -> Tensor:
    missing = length - len(rows)
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


class StackSchedule:
    """The whole of a stack's round: all turns, with what they need already on the device."""

    def __init__(
        self, members: Sequence[StackMember], device: torch.device, fill_idle: bool, has_dropout: bool
    ) -> None:
        """`fill`: where most take part in a turn, the others are computed too, so that shapes repeat.

        `drawing`: the network has dropout, which needs keys.
        """
        self.members, self.device = members, device
        self.first_keys = [first_key(seat.stream) if has_dropout else 0 for seat in members]
        self.plans = [plan_micro_batches(seat) for seat in members]
        self.steps = [sum(bit.completes_step for bit in plan) for plan in self.plans]
        self.fill_idle = fill_idle
        self.has_random_lengths = any(bit.length == UNPADDED for plan in self.plans for bit in plan)
        selections = [seat.data for seat in members if isinstance(seat.data, Selection)]
        alike = len(selections) == len(members) and all(s.shared is selections[0].shared for s in selections)
        self.shared_images = selections[0].shared if alike else None
        self.pool_rows = torch.cat([s.rows for s in selections]) if alike else None
        self.image_device = device if self.shared_images is None else self.shared_images.labels.device
        """Where images are looked up …"""
        self.needs_transfer = self.image_device.type != device.type
        """… which may be elsewhere than where they are needed."""
        self.site_offsets = torch.tensor([0, *(len(seat.data) for seat in members)]).cumsum(0)[:-1]

    def plan_steps(self) -> Iterator[StackStep]:
        at = [iter(plan) for plan in self.plans]
        planned = [
            (members, _pad_to_common_length([next(at[site]) for site in members]))
            for members in group_calls(self.plans)
        ]
        filled = [self._add_idle_sites(members, found) for members, found in planned]
        rows = _send_tensors([self._image_rows(who, found) for who, found in filled], self.image_device)
        keys = _send_tensors([self._dropout_keys(who, found) for who, found in filled], self.device)
        counts = _send_tensors([torch.tensor([bit.present for bit in found]) for _, found in filled], self.device)
        over = _send_tensors([_expected_sizes(found) for _, found in planned], self.device)
        for number, ((members, found), (who, seated)) in enumerate(zip(planned, filled, strict=True)):
            yield StackStep(
                self,
                seated,
                who,
                rows[number],
                keys[number],
                self._site_index(who),
                self._site_index(members),
                None if who == members else self._send_index([who.index(site) for site in members]),
                self._step_fractions(found),
                torch.arange(found[0].length, device=self.device) < counts[number][:, None],
                over[number],
                [(site, bit.number) for site, bit in zip(members, found, strict=True)],
            )

    def _add_idle_sites(self, members: list[int], found: list[MicroBatch]) -> tuple[list[int], list[MicroBatch]]:
        """With everyone else seated too, if that is worth it: what they compute is thrown away."""
        everyone = list(range(len(self.members)))
        length = found[0].length
        short = length < self.members[0].batch_size and not self.has_random_lengths
        if not self.fill_idle or short or not len(everyone) / 2 <= len(members) < len(everyone):
            return members, found
        idle = {
            site: MicroBatch(
                0, 0, torch.arange(length) % len(self.members[site].data), length, 0.0, found[0].completes_step, 0
            )
            for site in everyone
        }
        busy = dict(zip(members, found, strict=True))
        return everyone, [busy.get(site, idle[site]) for site in everyone]

    def _image_rows(self, sites: list[int], found: list[MicroBatch]) -> Tensor:
        """Rows of each site's own images, or, where all share them, of the pool."""
        rows = torch.stack([bit.rows for bit in found])
        return rows if self.pool_rows is None else rows + self.site_offsets[sites, None]

    def _dropout_keys(self, sites: list[int], found: list[MicroBatch]) -> Tensor:
        numbered = zip(sites, found, strict=True)
        return torch.tensor([dropout_key(self.first_keys[site], bit.number, bit.position) for site, bit in numbered])

    def _step_fractions(self, found: list[MicroBatch]) -> Tensor | None:
        if all(bit.step_fraction == 1 for bit in found):
            return None
        return to_device(torch.tensor([bit.step_fraction for bit in found], dtype=torch.float64), self.device)

    def _site_index(self, sites: list[int]) -> Tensor | None:
        return None if len(sites) == len(self.members) else self._send_index(sites)

    def _send_index(self, places: list[int]) -> Tensor:
        return to_device(torch.tensor(places), self.device)

    @contextmanager
    def open_batches(self) -> Iterator[Iterator[tuple[StackStep, Batch]]]:
        """The turns with their batches; images that lie elsewhere are fetched ahead of use."""
        turns = list(self.plan_steps())
        if self.shared_images is None or not self.needs_transfer:
            yield ((turn, turn.augment_images(*self._load_batches(turn))) for turn in turns)
            return
        shared, pinned = self.shared_images, self.device.type == "cuda"
        with prefetch_in_thread(
            lambda turn: shared.stored_batch(self._pool_index(turn), pinned), turns, self.device
        ) as batches:
            shaped = (
                _split_by_site(turn, shared.scale_images(i), t) for turn, (i, t) in zip(turns, batches, strict=True)
            )
            yield ((turn, turn.augment_images(*batch)) for turn, batch in zip(turns, shaped, strict=True))

    def _load_batches(self, step: StackStep) -> Batch:
        """The batches of a turn, stacked; where sites share their images, in one gathering."""
        if self.shared_images is not None:
            return _split_by_site(step, *self.shared_images.batch(self._pool_index(step)))
        batches = [
            self.members[site].data.batch(rows) for site, rows in zip(step.computed_sites, step.rows, strict=True)
        ]
        images, labels = (torch.stack(parts) for parts in zip(*batches, strict=True))
        return images.to(self.device), labels.to(self.device)

    def _pool_index(self, step: StackStep) -> Tensor:
        """Which of the shared images."""
        assert self.pool_rows is not None
        return self.pool_rows.index_select(0, step.rows.reshape(-1))


def _pad_to_common_length(found: list[MicroBatch]) -> list[MicroBatch]:
    """Batches of one length: random ones are padded, to one of few lengths."""
    if found[0].length != UNPADDED:
        return found
    longest = max(1, *(bit.present for bit in found))
    return [bit.pad_to(-(-longest // BATCH_MULTIPLE) * BATCH_MULTIPLE) for bit in found]


def _expected_sizes(found: list[MicroBatch]) -> Tensor:
    return torch.tensor([bit.expected for bit in found])


def _split_by_site(step: StackStep, images: Tensor, labels: Tensor) -> Batch:
    """A row of batches per site, from one long batch."""
    return images.reshape(*step.rows.shape, *images.shape[1:]), labels.reshape(step.rows.shape)


def _send_tensors(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """All on the device, in one copy."""
    block = to_device(torch.cat([t.reshape(-1) for t in tensors]), device)
    pieces = torch.split(block, [t.numel() for t in tensors])
    return [piece.reshape(t.shape) for piece, t in zip(pieces, tensors, strict=True)]
