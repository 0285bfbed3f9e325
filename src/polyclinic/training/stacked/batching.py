"""Which batches a stack computes at once: each site's batches of a round, grouped by length into calls."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from polyclinic.core import Batch, Examples, Fit, Site, Stream, Tensors
from polyclinic.data.examples import Selection
from polyclinic.training.data_order import schedule_steps
from polyclinic.training.dp.dp_sgd import BATCH_MULTIPLE, expected_batch_size, is_plain_sgd
from polyclinic.training.fit import augment_batch
from polyclinic.training.keyed_dropout import dropout_key, first_key, row_keys
from polyclinic.training.prefetch import prefetch_in_thread, to_device

UNPADDED = 0
"""The length of a random batch until it is padded."""


@dataclass(frozen=True)
class StackMember:
    """One site's job in a stack; the arguments are those of `fit`."""

    job: Fit
    data: Examples
    site: Site
    stream: Stream
    secret: Stream | None = None

    @property
    def batch_size(self) -> int:
        return self.job.training.batch_size(len(self.data))

    @property
    def draws_by_row(self) -> bool:
        """Whether an image's augmentation and dropout follow from its row, as under a privacy plan."""
        return not is_plain_sgd(self.job.training.private)

    @property
    def own_secret(self) -> Stream:
        """The secret of a private job, which has one."""
        assert self.secret is not None
        return self.secret


class MicroBatch(NamedTuple):
    """One batch of one site; an optimiser step takes one or several."""

    number: int
    """The step's number in the whole run."""
    position: int
    """The batch's position within the step."""
    rows: Tensor
    """The examples."""
    length: int
    """The number of rows, padding included; UNPADDED until a random batch is padded."""
    step_fraction: float
    """The fraction of the step's examples that are in this batch."""
    completes_step: bool
    """Whether the optimiser steps after it."""
    present: int
    """The number of rows that are not padding."""
    expected: int = 1
    """The number by which a private step's sum is divided."""


def plan_micro_batches(member: StackMember) -> list[MicroBatch]:
    """List a site's batches of the round in their order, which is drawn on the CPU, as `fit` draws it."""
    training, examples = member.job.training, len(member.data)
    labels = member.data.labels.cpu() if training.oversample else torch.empty(examples)
    plain = is_plain_sgd(training.private)
    random = not plain and training.private is not None and training.private.sampling == "poisson"
    planned = []
    for number, batches in schedule_steps(member.job, labels, member.stream, member.secret, member.site.round):
        lengths = [rows.numel() for rows in batches]
        expected = 1 if plain else expected_batch_size(training, examples, member.job.full_batch, sum(lengths))
        for position, rows in enumerate(batches or [torch.zeros(0, dtype=torch.int64)]):
            present, last = rows.numel(), position >= len(batches) - 1
            length, fraction = UNPADDED if random else present, present / max(sum(lengths), 1)
            planned.append(MicroBatch(number, position, rows, length, fraction, last, present, expected))
    return planned


def group_calls(plans: Sequence[Sequence[MicroBatch]]) -> list[list[int]]:
    """Group the sites' batches into calls, and return the sites of each call.

    The site with the most batches left leads; all sites whose next batch is like its own join the call.
    """
    done, calls = [0] * len(plans), []

    def left(site: int) -> int:
        return len(plans[site]) - done[site]

    def kind(site: int) -> tuple[int, bool]:
        batch = plans[site][done[site]]
        return batch.length, batch.completes_step

    while left(leader := max(range(len(plans)), key=left)):
        calls.append([site for site in range(len(plans)) if left(site) and kind(site) == kind(leader)])
        for site in calls[-1]:
            done[site] += 1
    return calls


@dataclass(frozen=True)
class StackStep:
    """Batches of one length, computed at once.

    The members are the sites whose batches these are. Other sites may be computed too (see `_add_idle_sites`), and what
    they compute is thrown away.
    """

    schedule: "StackSchedule"
    micro_batches: list[MicroBatch]
    """One for each computed site."""
    computed_sites: list[int]
    rows: Tensor
    """The images of each computed site."""
    keys: Tensor
    """The dropout key of each computed site, or of each of its rows (and views) under a privacy plan."""
    computed: Tensor | None
    """The computed sites as an index into the stack; None: all sites."""
    members: Tensor | None
    """The members as an index into the stack; None: all sites."""
    members_among_computed: Tensor | None
    """The members as an index into the computed sites; None: all of these."""
    step_fractions: Tensor | None
    """The fraction of each member's step that its batch is; None: each batch is a whole step."""
    present: Tensor
    """Computed sites × rows: which rows hold an example and not padding."""
    expected: Tensor
    """The numbers by which the members' private sums are divided."""
    step_numbers: list[tuple[int, int]]
    """The members, and the numbers of their steps."""

    @property
    def completes_step(self) -> bool:
        return self.micro_batches[0].completes_step

    def select_members(self, stacked: Tensors) -> Tensors:
        """Select the members' rows from tensors of all computed sites."""
        index = self.members_among_computed
        return stacked if index is None else {name: t[index] for name, t in stacked.items()}

    def augment_images(self, images: Tensor, labels: Tensor) -> Batch:
        """Augment each site's batch as `fit` does."""
        training = self.schedule.members[0].job.training
        views = 1 if training.private is None else training.private.views
        if training.augment is None and views == 1:
            return images, labels
        batches = []
        for row, (site, batch) in enumerate(zip(self.computed_sites, self.micro_batches, strict=True)):
            member, present = self.schedule.members[site], batch.present or 1  # an empty batch takes a row, not used
            if member.draws_by_row:
                stream, rows = member.own_secret.child("augment", batch.number), batch.rows[:present]
            else:
                stream, rows = member.stream.child("augment", batch.number, batch.position), None
            augmented = augment_batch(images[row, :present], labels[row, :present], training, stream, rows)
            batches.append([_pad_rows(t, batch.length * views) for t in augmented])
        stacked_images, stacked_labels = (torch.stack(parts) for parts in zip(*batches, strict=True))
        return stacked_images, stacked_labels


class StackSchedule:
    """All steps of a stack's round, with the tensors that they need already on the device.

    Args:
        members: The sites' jobs.
        device: Where the stack is computed.
        fill_idle: Where most sites take part in a call, compute the others too, so that shapes repeat.
        has_dropout: The network has dropout, which needs keys.
    """

    def __init__(
        self, members: Sequence[StackMember], device: torch.device, fill_idle: bool, has_dropout: bool
    ) -> None:
        self.members, self.device, self.fill_idle = members, device, fill_idle
        self.has_dropout = has_dropout
        self.first_keys = [first_key(member.stream) if has_dropout else 0 for member in members]
        self.plans = [plan_micro_batches(member) for member in members]
        self.steps = [sum(batch.completes_step for batch in plan) for plan in self.plans]
        self.has_random_lengths = any(batch.length == UNPADDED for plan in self.plans for batch in plan)
        selections = [member.data for member in members if isinstance(member.data, Selection)]
        alike = len(selections) == len(members) and all(s.shared is selections[0].shared for s in selections)
        self.shared_images = selections[0].shared if alike else None
        self.pool_rows = torch.cat([s.rows for s in selections]) if alike else None
        self.image_device = device if self.shared_images is None else self.shared_images.labels.device
        self.needs_transfer = self.image_device.type != device.type
        self.site_offsets = torch.tensor([0, *(len(member.data) for member in members)]).cumsum(0)[:-1]

    def plan_steps(self) -> Iterator[StackStep]:
        """Yield the round's steps; all their tensors are copied to the device beforehand."""
        left = [iter(plan) for plan in self.plans]
        calls = [(sites, _pad_to_common_length([next(left[s]) for s in sites])) for sites in group_calls(self.plans)]
        filled = [self._add_idle_sites(sites, batches) for sites, batches in calls]
        rows = _send_tensors([self._image_rows(sites, batches) for sites, batches in filled], self.image_device)
        keys = _send_tensors([self._dropout_keys(sites, batches) for sites, batches in filled], self.device)
        present = _send_tensors([torch.tensor([b.present for b in batches]) for _, batches in filled], self.device)
        expected = _send_tensors([torch.tensor([b.expected for b in batches]) for _, batches in calls], self.device)
        for number, ((sites, batches), (computed, all_batches)) in enumerate(zip(calls, filled, strict=True)):
            yield StackStep(
                self,
                all_batches,
                computed,
                rows[number],
                keys[number],
                self._site_index(computed),
                self._site_index(sites),
                None if computed == sites else self._send_index([computed.index(site) for site in sites]),
                self._step_fractions(batches),
                torch.arange(batches[0].length, device=self.device) < present[number][:, None],
                expected[number],
                [(site, batch.number) for site, batch in zip(sites, batches, strict=True)],
            )

    def _add_idle_sites(self, sites: list[int], batches: list[MicroBatch]) -> tuple[list[int], list[MicroBatch]]:
        """Add the sites that have no batch in this call, with any images, if enough others have one."""
        everyone, length = list(range(len(self.members))), batches[0].length
        short = length < self.members[0].batch_size and not self.has_random_lengths
        if not self.fill_idle or short or not len(everyone) / 2 <= len(sites) < len(everyone):
            return sites, batches
        busy, last = dict(zip(sites, batches, strict=True)), batches[0].completes_step
        for site in set(everyone) - busy.keys():
            busy[site] = MicroBatch(0, 0, torch.arange(length) % len(self.members[site].data), length, 0.0, last, 0)
        return everyone, [busy[site] for site in everyone]

    def _image_rows(self, sites: list[int], batches: list[MicroBatch]) -> Tensor:
        """Return the rows of each site's own images or, where all sites share their images, of `pool_rows`."""
        rows = torch.stack([batch.rows for batch in batches])
        return rows if self.pool_rows is None else rows + self.site_offsets[sites, None]

    def _dropout_keys(self, sites: list[int], batches: list[MicroBatch]) -> Tensor:
        numbered, private = list(zip(sites, batches, strict=True)), self.members[0].job.training.private
        if self.has_dropout and private is not None and self.members[0].draws_by_row:
            streams = [self.members[site].own_secret.child("dropout", batch.number) for site, batch in numbered]
            keys = [row_keys(s, b.rows.flatten(), private.views) for s, (_, b) in zip(streams, numbered, strict=True)]
            return torch.stack(keys)
        return torch.tensor([dropout_key(self.first_keys[site], b.number, b.position) for site, b in numbered])

    def _step_fractions(self, batches: list[MicroBatch]) -> Tensor | None:
        if all(batch.step_fraction == 1 for batch in batches):
            return None
        return to_device(torch.tensor([batch.step_fraction for batch in batches], dtype=torch.float64), self.device)

    def _site_index(self, sites: list[int]) -> Tensor | None:
        return None if len(sites) == len(self.members) else self._send_index(sites)

    def _send_index(self, index: list[int]) -> Tensor:
        return to_device(torch.tensor(index), self.device)

    @contextmanager
    def open_batches(self) -> Iterator[Iterator[tuple[StackStep, Batch]]]:
        """Open an iterator over the steps and their batches; images stored elsewhere are loaded ahead of use."""
        steps = list(self.plan_steps())
        if self.shared_images is None or not self.needs_transfer:
            yield ((step, step.augment_images(*self._load_batches(step))) for step in steps)
            return
        shared, pinned = self.shared_images, self.device.type == "cuda"

        def load(step: StackStep) -> Batch:
            return shared.stored_batch(self._pool_index(step), pinned)

        with prefetch_in_thread(load, steps, self.device) as loaded:
            batches = (_split_by_site(s, shared.scale_images(i), t) for s, (i, t) in zip(steps, loaded, strict=True))
            yield ((step, step.augment_images(*batch)) for step, batch in zip(steps, batches, strict=True))

    def _load_batches(self, step: StackStep) -> Batch:
        """Return the stacked batches of a step; images that all sites share are gathered at once."""
        if self.shared_images is not None:
            return _split_by_site(step, *self.shared_images.batch(self._pool_index(step)))
        batches = [self.members[k].data.batch(rows) for k, rows in zip(step.computed_sites, step.rows, strict=True)]
        images, labels = (torch.stack(parts) for parts in zip(*batches, strict=True))
        return images.to(self.device), labels.to(self.device)

    def _pool_index(self, step: StackStep) -> Tensor:
        """Return the step's rows of the shared images."""
        assert self.pool_rows is not None
        return self.pool_rows.index_select(0, step.rows.reshape(-1))


def _pad_rows(rows: Tensor, length: int) -> Tensor:
    missing = length - len(rows)
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


def _pad_to_common_length(batches: list[MicroBatch]) -> list[MicroBatch]:
    """Pad random batches to one length, of which there are few."""
    if batches[0].length != UNPADDED:
        return batches
    longest = max(1, *(batch.present for batch in batches))
    length = -(-longest // BATCH_MULTIPLE) * BATCH_MULTIPLE
    return [b._replace(rows=nn.functional.pad(b.rows, (0, length - b.present)), length=length) for b in batches]


def _split_by_site(step: StackStep, images: Tensor, labels: Tensor) -> Batch:
    """Reshape one long batch to sites × rows."""
    return images.reshape(*step.rows.shape, *images.shape[1:]), labels.reshape(step.rows.shape)


def _send_tensors(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """Copy all tensors to the device at once."""
    block = to_device(torch.cat([t.reshape(-1) for t in tensors]), device)
    pieces = torch.split(block, [t.numel() for t in tensors])
    return [piece.reshape(t.shape) for piece, t in zip(pieces, tensors, strict=True)]
