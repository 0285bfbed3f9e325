"""The check of a site's reply: whatever fails it is `Refused` by name, and never reaches the algorithm.

`check_update` is the only way of an update into a round. It checks, in this order: size and encoding
(`storage.messages`), run, round and site, the number of examples, the kinds that were agreed, names, shapes and dtypes,
scalars, values after the transforms are undone (finite, and near the broadcast), the algorithm's own check
(`Algorithm.check_update`), and the reported metrics.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias, TypeGuard

import torch

from polyclinic.core import Bundle, FlatTensors, Part, Refused, SiteId, Tensors, Update, l2_distance
from polyclinic.evaluation.metrics import METRICS, is_possible
from polyclinic.privacy.transforms.base import UpdateTransform
from polyclinic.storage.messages import Fields, Message, decode, format_untrusted

ReportRow: TypeAlias = Fields
"""A site's metrics of one model on one part of its images: `model`, `part`, the number of images `n`, and metrics."""
ReplyFields: TypeAlias = Fields
"""The fields of a site's reply, of which nothing is checked."""
TABLE_ALLOWANCE = 1 << 16
"""Bytes, beyond the tensors themselves, for names, shapes and one site's report."""
LARGEST_NUMBER = 1e100
"""Numbers that sites report lie within this, so that weighing them with counts stays finite."""
VARIANCE = "running_var"
"""The end of the name of a BatchNorm's variance."""
LARGEST_COUNT = 1 << 53
"""Integers within this are averaged without loss."""


@dataclass(frozen=True)
class ExpectedUpdate:
    """What the server accepts from one site in one round."""

    run: str
    round: int
    site: SiteId
    received: Bundle
    """What the site was sent; updates are measured as the distance from it."""
    like: Mapping[str, Tensors]
    """By kind: tensors with the names, shapes and dtypes that must come back."""
    optional: frozenset[str] = frozenset()
    examples: int = 1
    """The number of examples that the site registered: it may never claim more."""
    held: Mapping[Part, int] = field(default_factory=dict)
    """By part: the images that the site registered, where known; it may report on no more."""
    reports: Sequence[tuple[str, Part]] = ()
    """The models and parts that it was asked to report on; it may report on no others."""
    max_norm: float = 1e6

    @cached_property
    def max_bytes(self) -> int:
        """The most bytes that the message may have …"""
        return self.max_table_bytes + sum(t.nbytes for tensors in self.like.values() for t in tensors.values())

    @cached_property
    def max_table_bytes(self) -> int:
        """… and the most of them for names, shapes and dtypes, since parsing multiplies their size."""
        return TABLE_ALLOWANCE + sum(256 + len(n) for tensors in self.like.values() for n in tensors)


@dataclass(frozen=True)
class CheckedUpdate:
    """An accepted update, the other fields of the reply, and how far the model moved (client drift)."""

    update: Update
    fields: ReplyFields
    drift: float | None
    """None where no weights were sent."""
    report: list[ReportRow]
    """The site's metrics of the model it received, a row per model and part."""


def check_update(
    reply: bytes | Message,
    expected: ExpectedUpdate,
    transforms: Sequence[UpdateTransform] = (),
    algorithm_check: Callable[[Update], None] = lambda _: None,
) -> CheckedUpdate:
    """Decode a site's reply, undo the `transforms` (last first) and check everything about it; raises `Refused`."""
    message = _open_reply(reply, expected)
    fields, tensors = message.fields, message.tensors
    for transform in reversed(transforms):
        tensors = transform.decode(tensors, expected.received)
    drift = check_values(tensors, expected)
    update = Update(tensors, fields["examples"], expected.site, read_scalars(fields))
    algorithm_check(update)
    return CheckedUpdate(update, fields, drift, check_report(fields, expected))


def check_masked_reply(reply: bytes | Message, expected: ExpectedUpdate) -> tuple[Message, list[ReportRow]]:
    """Return a masked reply and its report, of which everything is checked but the values; raises `Refused`."""
    message = _open_reply(reply, expected)
    if read_scalars(message.fields):
        raise Refused("scalars", "numbers of a single site came with a masked update")
    return message, check_report(message.fields, expected)


def _open_reply(reply: bytes | Message, expected: ExpectedUpdate) -> Message:
    """Decode a reply and check whose it is, its number of examples, and names, shapes and dtypes of its tensors."""
    message = reply if isinstance(reply, Message) else decode(reply, expected.max_bytes, expected.max_table_bytes)
    fields, tensors = message.fields, message.tensors
    check_address(fields, expected.run, expected.round, expected.site)
    examples = fields.get("examples")
    if type(examples) is not int or not 0 < examples <= expected.examples:
        raise Refused(
            "examples", f"{format_untrusted(examples)} training examples where {expected.examples} are registered"
        )
    for kind in tensors.keys() - expected.like.keys():
        raise Refused("kind", f"{kind[:60]!r} is not a kind that the algorithm sends")
    for kind, like in expected.like.items():
        if kind in tensors or not (kind in expected.optional or not like):
            _check_layout(kind, tensors.get(kind, {}), like)
    return message


def check_address(fields: ReplyFields, run: str, round: int, site: SiteId) -> None:
    """Check that a message belongs to this run, round and site: no replay, no impostor."""
    for name, wanted in (("run", run), ("site", site), ("round", round)):
        found = fields.get(name)
        if found != wanted or type(found) is not type(wanted):
            raise Refused(name, f"{format_untrusted(found)} where {wanted!r} was expected")


def _check_layout(kind: str, tensors: Tensors, like: Tensors) -> None:
    if isinstance(tensors, FlatTensors) and tensors.has_layout_of(like):
        return
    for name in like.keys() - tensors.keys():
        raise Refused("missing", f"{kind}/{name} is not there")
    for name in tensors.keys() - like.keys():
        raise Refused("extra", f"{kind}/{name[:60]!r} was not asked for")
    for name, tensor in tensors.items():
        if tensor.shape != like[name].shape:
            raise Refused("shape", f"{kind}/{name} is {tuple(tensor.shape)}, not {tuple(like[name].shape)}")
        if tensor.dtype != like[name].dtype:
            raise Refused("dtype", f"{kind}/{name} is {tensor.dtype}, not {like[name].dtype}")


def check_values(tensors: Bundle, expected: ExpectedUpdate) -> float | None:
    """Check that all values are finite and each kind lies within `max_norm` of what was sent; return how far the
    model moved."""
    drift: float | None = None
    for kind, group in tensors.items():
        norm = l2_distance(group, expected.received.get(kind, {}))
        if not math.isfinite(norm):
            bad = next((n for n, t in group.items() if not bool(torch.isfinite(t).all())), None)
            if bad is not None:
                raise Refused(
                    "finite", f"{kind}/{bad} holds NaN or infinity; training diverged, lower the learning rate"
                )
        if not norm <= expected.max_norm:
            raise Refused("norm", f"{kind} moved by {norm:.3g}, more than {expected.max_norm:.3g} in one round")
        counts = [tensor.reshape(-1) for tensor in group.values() if tensor.dtype == torch.int64 and tensor.numel()]
        if counts and max(abs(int(v)) for v in torch.cat(counts).aminmax()) > LARGEST_COUNT:
            raise Refused("norm", f"{kind} holds counts beyond {LARGEST_COUNT}")
        negative = next((n for n, t in group.items() if n.endswith(VARIANCE) and bool((t < 0).any())), None)
        if negative is not None:
            raise Refused("norm", f"{kind}/{negative} holds values below 0, but it is a variance")
        drift = norm if kind == "model" else drift
    return drift


def read_scalars(fields: ReplyFields) -> dict[str, float]:
    """Return the few numbers that an algorithm's sites report beside tensors."""
    scalars = fields.get("scalars", {})
    if not isinstance(scalars, dict):
        raise Refused("scalars", "scalars are not an object")
    for name, value in scalars.items():
        if not is_number(value):
            raise Refused("scalars", f"{name[:40]!r} is not a finite number")
    return {name: float(value) for name, value in scalars.items()}


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether it is a number to compute with: no bool, nothing infinite, no integer of 400 digits."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST_NUMBER <= value <= LARGEST_NUMBER


def check_report(fields: ReplyFields, expected: ExpectedUpdate) -> list[ReportRow]:
    """Return a site's metrics, checked to be rows of possible values, at most one for each model and part that it was
    asked about: they steer the schedule and early stopping.

    Args:
        fields: The fields of its reply.
        expected: What it was asked about, and how many images it registered.
    """
    report = fields.get("report", [])
    if not isinstance(report, list) or not all(isinstance(row, dict) for row in report):
        raise Refused("report", "the report is not a list of rows")
    due = list(expected.reports)
    for row in report:
        about = row.get("model"), row.get("part")
        if about not in due:
            which = f"the model {format_untrusted(about[0])} on {format_untrusted(about[1])} images"
            raise Refused("report", f"a row is about {which}, which was not asked for, or not twice")
        due.remove(about)
        if type(row.get("n")) is not int or not 0 <= row["n"] <= LARGEST_COUNT:
            raise Refused("report", "a row of the report has no count")
        most = next((count for part, count in expected.held.items() if part == row["part"]), LARGEST_COUNT)
        if row["n"] > most:
            raise Refused("report", f"it reports on {row['n']} {row['part']!r} images where {most} are registered")
        for name, value in row.items():
            if name not in ("model", "part", "n") and not _is_metric(name, value):
                raise Refused("report", f"{name[:40]!r} is not a metric with a possible value")
    return report


def _is_metric(name: str, value: object) -> bool:
    """Whether this may be in a row, which is stored beside the round and the site and must not overwrite them."""
    return name in METRICS and (value is None or (is_number(value) and is_possible(name, value)))


def split_predictions(
    tensors: Mapping[str, torch.Tensor], classes: int, held: Mapping[Part, int] | None = None
) -> Bundle:
    """Return predictions by `model|part`: probabilities, labels and patient numbers, checked against each other.

    `held`: by part, the images that the site registered, where known.
    """
    bundle: Bundle = {}
    for path, tensor in tensors.items():
        group, _, key = path.rpartition("|")
        bundle.setdefault(group, {})[key] = tensor
    for group, found in bundle.items():
        rows = found.get("probabilities", torch.zeros(0))
        if not rows.is_floating_point() or rows.shape[1:] != (classes,):
            raise Refused("predictions", f"{group[:60]!r} are not finite probabilities of {classes} classes")
        most = next((count for part, count in (held or {}).items() if group.endswith(f"|{part}")), len(rows))
        if len(rows) != most:
            raise Refused("predictions", f"{group[:60]!r} has {len(rows)} rows where {most} images are registered")
        if not bool(torch.isfinite(rows).all()):
            raise Refused("predictions", f"{group[:60]!r} are not finite probabilities of {classes} classes")
        columns = (found.get(key, torch.zeros(0)) for key in ("labels", "patients"))
        if any(c.dtype != torch.int64 or c.shape != rows.shape[:1] for c in columns):
            raise Refused("predictions", f"{group[:60]!r} has not one label and one patient per row")
    return bundle
