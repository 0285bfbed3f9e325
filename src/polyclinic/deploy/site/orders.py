"""Holds a server to the approved recipe: its rounds in order, its learning rate, its first weights, nothing beside.

`OrderBook` remembers on disk what a run's server asked of this site and was answered, so that no restart of either side
makes it forget. A repeated round is the same order, or refused. Going back, or leaving out rounds, is an order of its
own that a person at the site allows (`polyclinic site allow-round`). What may leave at all, `policy.py` decides.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch

from polyclinic.config.recipe import Recipe
from polyclinic.core import Bundle, Refused, SiteId, StoreError
from polyclinic.deploy.cohort import SIGNED, undo_statements
from polyclinic.deploy.config import site_command
from polyclinic.deploy.site.policy import Allow
from polyclinic.federation.secure_aggregation.agreements import AGREEMENTS, Agreements
from polyclinic.federation.secure_aggregation.cohort import MASKS
from polyclinic.runs.assemble import given_digest
from polyclinic.storage import messages
from polyclinic.storage.files import make_folder, write_json

DAY = timedelta(hours=24)
DIGEST = 64
"""Letters of a SHA-256, before a stored reply."""
BOOK, PERMIT, RUNS = "orders.json", "allowed-round.json", "runs.json"
MOST_ENROLLED = 100


@dataclass(frozen=True)
class RunRules:
    """What a run's recipe and the site's policy allow a server to ask."""

    site: SiteId
    run: str
    rounds: int
    most_replies: int
    """Training orders that are answered in all, by a reply, a refusal or a failure."""
    most_missed: int
    """Rounds that may be left out because the site was away."""
    may_end_early: bool
    takes_part: Callable[[int], bool] = lambda _: True
    """Whether the recipe's public draw has this site in a round."""

    @property
    def most_evaluations(self) -> int:
        """How often the one order for evaluation is tried, if it failed."""
        return 1 + self.most_replies - self.rounds

    @staticmethod
    def from_recipe(
        recipe: Recipe, allow: Allow, site: SiteId, run: str, takes_part: Callable[[int], bool]
    ) -> "RunRules":
        early = recipe.early_stop is not None or recipe.privacy is not None
        most = recipe.rounds + allow.retries
        return RunRules(site, run, recipe.rounds, most, allow.missed_rounds, early, takes_part)


@dataclass(frozen=True)
class Order:
    """What a server asks, reduced to all that a reply depends on."""

    purpose: str
    round: int
    digest: str
    memory_round: int

    @staticmethod
    def from_message(message: messages.Message) -> "Order":
        """Read an order whose fields have been checked (`message_checks.check_round_fields`)."""
        fields = message.fields
        names = ("run", "site", "purpose", "round", "rounds", "seed", "lr", "parts", "memory_round")
        asked = json.dumps([fields.get(name) for name in names])
        digest = hashlib.sha256((asked + messages.hash_tensors(message.tensors)).encode()).hexdigest()
        return Order(str(fields["purpose"]), int(fields["round"]), digest, int(fields.get("memory_round") or 0))


@dataclass(frozen=True)
class _Answered:
    """The contents of an order book."""

    rounds: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    """By round: the digest of the order, and the round that the site's memory came from."""
    replies: int = 0
    missed: int = 0
    evaluated: str = ""
    """The digest of the order for evaluation …"""
    evaluations: int = 0
    """… and how often it was tried."""
    permit: str = ""
    """The permit that was used last."""

    @property
    def last(self) -> int:
        return max(self.rounds, default=0)


class OrderBook:
    """The orders of one run that this site has answered; `folder`: the run's own."""

    def __init__(self, folder: Path, rules: RunRules) -> None:
        self.folder, self.rules = folder, rules

    def check(self, order: Order, was_away: bool) -> None:
        """Raise `Refused` unless this order is the next one, or an answered one again.

        `was_away`: the site was not connected all the time since its last answer in this run.
        """
        book = self._book_for(order)
        if order.purpose == "evaluate":
            self._check_evaluation(book, order, was_away)
        else:
            self._check_round(book, order, was_away)

    def record(self, order: Order) -> None:
        """Enter an order before any image is used for it: whatever comes of it, other contents are refused."""
        book = self._book_for(order)
        missed = book.missed + len(self._rounds_left_out(book, order.round))
        if order.purpose == "evaluate":
            book = replace(book, evaluated=order.digest, evaluations=book.evaluations + 1, missed=missed)
        else:
            rounds = {**book.rounds, order.round: (order.digest, order.memory_round)}
            book = replace(book, rounds=rounds, replies=book.replies + 1, missed=missed)
        write_json(self.folder / BOOK, asdict(book))

    def _check_round(self, book: _Answered, order: Order, was_away: bool) -> None:
        rules, round = self.rules, order.round
        if book.evaluated:
            self._refuse(order, "comes after this run was evaluated here")
        if not rules.takes_part(round):
            raise Refused("round", f"the recipe's draw leaves {rules.site} out of round {round}")
        if book.replies >= rules.most_replies:
            self._refuse(order, f"would be answer {book.replies + 1} of a run that has {rules.most_replies}")
        if round in book.rounds:
            if book.rounds[round][0] != order.digest:
                self._refuse(order, "was answered before, and comes again with other contents")
            return
        if round < book.last:
            self._refuse(order, f"comes after round {book.last}")
        self._check_gap(book, order, was_away)
        known = {0, *book.rounds}
        before = max((memory for _, memory in book.rounds.values()), default=0)
        if order.memory_round not in known or order.memory_round < before:
            raise Refused(
                "round", f"{rules.site} has no memory of round {order.memory_round} to start round {round} from"
            )

    def _check_evaluation(self, book: _Answered, order: Order, was_away: bool) -> None:
        if book.evaluated:
            if book.evaluated != order.digest:
                self._refuse(order, "asks for a second evaluation of this run")
            if book.evaluations >= self.rules.most_evaluations:
                self._refuse(order, f"would be try {book.evaluations + 1} of the evaluation")
            return
        end = self.rules.rounds + 1
        if order.round <= book.last or (order.round < end and not self.rules.may_end_early):
            self._refuse(order, f"asks for the evaluation, which follows round {max(book.last, self.rules.rounds)}")
        self._check_gap(book, order, was_away)

    def _check_gap(self, book: _Answered, order: Order, was_away: bool) -> None:
        left_out = self._rounds_left_out(book, order.round)
        if left_out and not was_away:
            self._refuse(order, f"leaves out round {left_out[0]}, for which {self.rules.site} was there")
        if book.missed + len(left_out) > self.rules.most_missed:
            self._refuse(
                order, f"leaves out {len(left_out)} rounds, beyond allow.missed_rounds: {self.rules.most_missed}"
            )

    def _rounds_left_out(self, book: _Answered, round: int) -> list[int]:
        """The rounds of this site between its last answer and `round`."""
        return [number for number in range(book.last + 1, round) if self.rules.takes_part(number)]

    def _refuse(self, order: Order, why: str) -> None:
        rules = self.rules
        raise Refused(
            "round",
            f"round {order.round} of run {rules.run} {why}; if {rules.site} agrees, run there: "
            f"{site_command('allow-round', f'{rules.run} {order.round}')}",
        )

    def _book_for(self, order: Order) -> _Answered:
        """The book, gone back to the order's round if a person has allowed this round and that was not yet used."""
        book, permit = self._read(), read_permit(self.folder)
        if permit is None or permit["round"] != order.round or permit["mark"] == book.permit:
            return book
        skipped = order.round - 1 if order.round > book.last + 1 else 0
        earlier = {number: row for number, row in book.rounds.items() if number < order.round}
        if skipped:  # a round without an answer, so that nothing between is left out
            earlier[skipped] = ("", 0)
        forgotten = replace(book, evaluated="", evaluations=0, permit=permit["mark"])
        return replace(forgotten, rounds=earlier, replies=len(earlier))

    def _read(self) -> _Answered:
        path = self.folder / BOOK
        if not path.exists():
            return _Answered()
        try:
            values = json.loads(path.read_text())
            rounds = {int(number): (str(row[0]), int(row[1])) for number, row in values["rounds"].items()}
            return _Answered(**{**values, "rounds": rounds})
        except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise StoreError(f"{path} is damaged ({error}); have the run begun anew") from None


def reply_key(order: Order, fields: Mapping[str, object]) -> str:
    """Return a hash of all that a reply depends on: the order, and with whom an update is masked."""
    if MASKS not in fields:
        return order.digest
    return hashlib.sha256(json.dumps([order.digest, fields[MASKS]], sort_keys=True).encode()).hexdigest()


def read_cached_reply(kept: Path, asked: str) -> bytes | None:
    """The stored reply, if this message is the last one of its kind again."""
    with contextlib.suppress(OSError, Refused), open(kept, "rb") as file:
        if file.read(DIGEST) == asked.encode():
            reply = file.read()
            messages.decode(reply)
            return reply
    return None


def read_permit(folder: Path) -> dict[str, Any] | None:
    """Return the round that a person at the site has allowed in a run, and the mark of that permission."""
    try:
        values = json.loads((folder / PERMIT).read_text())
        return {"round": int(values["round"]), "mark": str(values["mark"])}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StoreError(f"{folder / PERMIT} is damaged ({error}); allow the round again") from None


def read_permission(folder: Path, round: int) -> str:
    """Return the mark of the permission by which a round of a run is played; "" if nobody allowed it once more."""
    permit = read_permit(folder)
    return permit["mark"] if permit is not None and round >= permit["round"] else ""


def allow_round(folder: Path, round: int) -> None:
    """Let the server of a run ask for this round next, whatever was answered; `folder`: the run's own.

    What the site agreed to about masks in this and later rounds is forgotten, as these rounds are played again; what it
    signed that it received in them counts no longer.
    """
    undo_statements(folder / SIGNED, round)
    Agreements(folder / AGREEMENTS).forget_after(round - 1)
    write_json(folder / PERMIT, {"round": round, "mark": datetime.now(UTC).isoformat()})


class RunHistory:
    """The runs that servers began at this site in the last day, and the recipes that they enrolled it for."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / RUNS

    def check_begin(self, site: SiteId, allow: Allow) -> None:
        """Raise `Refused` if as many runs have begun within a day as the site allows."""
        begun = self._read()["begun"]
        if len(begun) >= allow.runs_per_day:
            raise Refused(
                "policy",
                f"{len(begun)} runs have begun at {site} within 24 hours, which are all that it allows; wait, or raise "
                "allow.runs_per_day in the site's site.yaml",
            )

    def record_begin(self) -> None:
        values = self._read()
        self._write({**values, "begun": [*values["begun"], datetime.now(UTC).isoformat()]})

    def record_enrolment(self, digest: str) -> None:
        """Enter the recipe of an enrolment, from which on the site waits for its run."""
        values = self._read()
        if digest not in values["enrolled"]:
            self._write({**values, "enrolled": [*values["enrolled"], digest][-MOST_ENROLLED:]})

    def has_enrolled(self, digest: str) -> bool:
        return digest in self._read()["enrolled"]

    def _write(self, values: Mapping[str, list[str]]) -> None:
        make_folder(self.path.parent, 0o700)
        write_json(self.path, values)

    def _read(self) -> dict[str, list[str]]:
        """The file, without the runs of earlier days."""
        if not self.path.exists():
            return {"begun": [], "enrolled": []}
        try:
            values = json.loads(self.path.read_text())
            since = datetime.now(UTC) - DAY
            begun = [time for time in values["begun"] if datetime.fromisoformat(time) > since]
            return {"begun": begun, "enrolled": [str(digest) for digest in values["enrolled"]]}
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise StoreError(f"{self.path} is damaged ({error}); remove it") from None


def check_learning_rate(rate: float, recipe: Recipe, round: int, scale: float, site: SiteId) -> None:
    """Raise `Refused` unless the recipe's schedule has this learning rate in this round; `scale`: of the cluster."""
    base, schedule = recipe.training.optimiser.lr, recipe.schedule
    cuts = (round - 1) // (schedule.patience + 1) if schedule.name == "plateau" else 0
    allowed = {base * schedule.lr_factor(round, recipe.rounds, number) * scale for number in range(cuts + 1)}
    if rate not in allowed:
        raise Refused(
            "lr",
            f"{site} was asked to train with a learning rate of {rate:g} in round {round}, where the recipe has "
            f"{' or '.join(f'{value:g}' for value in sorted(allowed, reverse=True)[:3])}",
        )


def check_tensors(sent: Bundle, like: Bundle, optional: frozenset[str], site: SiteId) -> None:
    """Raise `Refused` unless a message has the kinds, names, shapes and types of `like`, and finite values only.

    A kind in `optional` may be missing. Where a tensor of `like` has a length of 0, any length will do: so many
    features of other sites come.
    """
    for kind in sent.keys() - like.keys():
        raise Refused("kind", f"{site} was sent {kind[:60]!r}, which the recipe's algorithm does not send")
    for kind, wanted in like.items():
        group = sent.get(kind, {})
        if not group and kind in optional:
            continue
        if group.keys() != wanted.keys() or not all(_fits(group[name], wanted[name]) for name in wanted):
            raise Refused("shape", f"the {kind} sent to {site} has other names, shapes or types than its own")
        for name, tensor in group.items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise Refused("finite", f"the {kind} sent to {site} holds NaN or infinity in {name[:60]!r}")


def _fits(tensor: torch.Tensor, like: torch.Tensor) -> bool:
    return (
        tensor.dtype == like.dtype
        and tensor.dim() == like.dim()
        and all(size == wanted or wanted == 0 for size, wanted in zip(tensor.shape, like.shape, strict=True))
    )


def check_first_weights(sent: Bundle, own: Bundle, digest: str | None, site: SiteId) -> None:
    """Raise `Refused` unless round 1 brings the recipe's own first weights.

    Args:
        sent: The tensors of the message.
        own: The same, as this site makes them from the recipe's seed.
        digest: The SHA-256 that the recipe names, if its first weights are given (`model.sha256`).
        site: The site's name.
    """
    if digest is not None:
        if given_digest(sent, own) != digest:
            raise Refused("weights", f"the first weights sent to {site} are not those whose SHA-256 the recipe names")
    elif messages.hash_tensors(sent) != messages.hash_tensors(own) and not _nearly_equal(sent, own):
        raise Refused("weights", f"the first weights sent to {site} are not those that the recipe's seed makes")


def _nearly_equal(sent: Bundle, own: Bundle) -> bool:
    """Whether they differ in the last bits at most, as between processors of different makes."""
    return all(
        torch.allclose(sent[kind][name].cpu().double(), tensor.cpu().double(), rtol=1e-5, atol=1e-7)
        for kind, group in own.items()
        for name, tensor in group.items()
    )
