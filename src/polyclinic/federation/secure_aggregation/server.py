"""The server's part in a masked round: five exchanges, of which the result is the mean of the survivors' updates.

    keys    every site signs what it will receive, and two public keys       → the cohort
    shares  every site encrypts shares of its secrets for its neighbours     → the sites that mask with each other
    train   every site trains, and sends its update with masks               → the survivors
    agree   every survivor signs the list of survivors
    unmask  survivors reveal shares: of the own masks of survivors, and of the mask keys of sites that were lost

Fewer than the threshold in any exchange end the round, and nothing is unmasked. The server never needs more of a site
than its masked update, so that is all that it can lose.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

import numpy as np

from polyclinic.algorithms.base import Algorithm
from polyclinic.core import Bundle, Failure, Refused, RoundFailed, SiteId, Update, failpoint
from polyclinic.federation.engines import Answer, Engine
from polyclinic.federation.mailbox import Outbox, in_site_order
from polyclinic.federation.round_log import RoundLog, accepted_fields
from polyclinic.federation.secure_aggregation.cohort import (
    MASKS,
    Cohort,
    RoundKeys,
    check_size,
    hash_kinds,
    read_sites,
    read_texts,
)
from polyclinic.federation.secure_aggregation.commitments import PARTS, DealtShares, check_dealt, find_false_dealers
from polyclinic.federation.secure_aggregation.site import read_masks
from polyclinic.federation.secure_aggregation.transcript import Transcript, place_of
from polyclinic.federation.secure_aggregation.unmasking import FalseSecret, add_up, read_share, remove_masks
from polyclinic.federation.update_check import (
    ExpectedUpdate,
    check_address,
    check_masked_reply,
    check_report,
    check_values,
)
from polyclinic.privacy.masking.fixed_point import Words, as_tensor, restore_group
from polyclinic.privacy.masking.masks import neighbours_of
from polyclinic.privacy.masking.secrets import check_public_key
from polyclinic.privacy.transforms.mask import SUM, Mask
from polyclinic.storage import messages
from polyclinic.storage.messages import Fields, Message, hash_tensors
from polyclinic.storage.signatures import PeerKeys

Collected: TypeAlias = tuple[dict[str, Words], dict[SiteId, str], dict[SiteId, tuple[Message, list[Any]]]]
"""The sum of the masked updates, the survivors' signatures, and their replies without tensors but with reports."""
MOST_BYTES = 1 << 20
"""Of a reply without tensors."""


class Prepare(Protocol):
    """Returns the messages of one purpose to these sites, with the weights."""

    def __call__(self, purpose: str, *, sites: Sequence[SiteId]) -> Outbox: ...


@dataclass
class MaskedRound:
    """One round whose updates are added up behind masks.

    Args:
        options: The stage `mask` of the recipe.
        algorithm: The algorithm whose updates are averaged.
        engine: Where the sites are.
        deadline: Seconds that an exchange waits; None: until all have answered.
        prepare: Makes the messages of this round.
        expected: Returns what is accepted of a site, given its cluster ("") and what it was sent, in the masked layout.
        plain: The kinds, names and shapes of an update before it was masked.
        log: Gets an entry per site.
        transcript: What was heard before a resume.
        run, round: The run and the round.
        quorum: The fewest survivors of which the round is made, if more than the threshold.
        peers: The sites' public keys, to leave out a site whose signature is wrong; None: the sites check each other.
    """

    options: Mask
    algorithm: Algorithm
    engine: Engine
    deadline: float | None
    prepare: Prepare
    expected: Callable[[SiteId, str, Bundle], ExpectedUpdate]
    plain: Bundle
    log: RoundLog
    transcript: Transcript
    run: str
    round: int
    quorum: int = 1
    peers: PeerKeys | None = None
    weights: str = ""
    """The hash of what the round begins with."""
    attempt: int = 0
    received: Bundle = field(default_factory=dict)
    """The weights that updates are measured from, the same for all sites."""

    def play(self, sites: Sequence[SiteId]) -> Update:
        """Return one update that stands for all survivors; raises `RoundFailed` below the threshold.

        A round that fails before its survivors are agreed on begins anew when the run is resumed, with other masks.
        """
        for site in sites:
            self.log.add(site)  # in this order, whoever answers first after a resume
        outbox = self.prepare("train", sites=sites)
        sent = {site: outbox.take(site) for site in sites}
        self.received = next(iter(sent.values()))
        self.weights = hash_tensors(self.received)
        self.attempt = self.transcript.find_attempt(self.round, self.weights)
        for site in self._left_out():
            self._refuse(
                site, Refused("shares", f"{site} dealt false shares of its secrets, and is left out of the round")
            )
            sent.pop(site, None)
        try:
            cohort = self._collect_keys(sent)
            masked_with, dealt = self._collect_shares(cohort)
            total, signatures, accepted = self._collect_updates(cohort, masked_with, dealt)
        except RoundFailed:
            self.transcript.write_sites(self._place("given-up"), [])
            raise
        survivors = sorted(signatures)
        asked = {**self._masks(cohort), "sites": masked_with, "survivors": signatures}
        try:
            agreed = self._collect_signatures(survivors, asked)
            self._check_enough(sorted(agreed), cohort, "signed the list of survivors")
            revealed = self._collect_revealed(cohort, survivors, {**asked, "agreed": agreed}, dealt)
            remove_masks(total, self.options, cohort, (masked_with, survivors), revealed, dealt)
        except (Refused, RoundFailed) as error:
            if isinstance(error, FalseSecret):
                self._leave_out([error.dealer])
            if isinstance(error, FalseSecret) or self._is_refused_for_good(survivors, cohort):
                self.transcript.write_sites(self._place("given-up"), [])
            if isinstance(error, RoundFailed):
                raise
            raise RoundFailed(self._failure(f"the masks could not be removed ({error})")) from None
        failpoint("sum-unmasked")
        update = self._mean_update(total, cohort, survivors)
        for site in survivors:
            self._accept(site, *accepted[site])
        return update

    def _expect(self, site: SiteId, received: Bundle) -> ExpectedUpdate:
        return self.expected(site, "", received)

    def _place(self, phase: str) -> str:
        return place_of(self.round, self.weights, self.attempt, phase)

    def _masks(self, cohort: Cohort) -> Fields:
        return {"keys": cohort.to_json()}

    def _collect_keys(self, sent: Mapping[SiteId, Bundle]) -> Cohort:
        """Return the cohort: every site that has signed the hashes of what it will receive, and its keys."""
        hashes: dict[int, dict[str, str]] = {}
        for bundle in sent.values():
            if id(bundle) not in hashes:
                hashes[id(bundle)] = hash_kinds(bundle)
        wanted = {site: hashes[id(bundle)] for site, bundle in sent.items()}

        def check(site: SiteId, found: Fields) -> None:
            keys = RoundKeys.from_json(dict(found))
            if dict(keys.received) != wanted[site] or keys.attempt != self.attempt:
                raise Refused("cohort", f"{site} has signed other weights, or another attempt, than it was asked to")
            check_public_key(keys.mask_key)
            check_public_key(keys.cipher_key)
            most = self.algorithm.update_weight(Update({}, self._expect(site, sent[site]).examples))
            if keys.weight > most:
                raise Refused("examples", f"{site} asks for a weight of {keys.weight:g} where {most:g} is its most")
            if self.peers is not None:
                self.peers.verify(site, "keys", keys.statement(self.run, self.round, site), keys.signature)

        def close(sites: list[SiteId]) -> None:
            try:
                check_size(self.options, len(sites), self.quorum)
            except Refused as refusal:
                raise RoundFailed(self._failure(f"{len(sites)} sites began it; {refusal}")) from None

        def ask(site: SiteId) -> Fields:
            return {"received": wanted[site], "attempt": self.attempt}

        found = self._ask("keys", list(sent), ask, check, close)
        keys = {site: RoundKeys.from_json(dict(reply)) for site, reply in sorted(found.items())}
        failpoint("keys-collected")
        return Cohort(self.run, self.round, keys)

    def _leave_out(self, dealers: list[SiteId]) -> None:
        """Leave sites out of the next attempt at this round, and name them."""
        for site in dealers:
            self._refuse(site, Refused("shares", f"{site} dealt false shares of its secrets"))
        self.transcript.write_sites(self._place("left-out"), dealers)

    def _left_out(self) -> set[SiteId]:
        """Return the sites that were left out after earlier attempts at this round."""
        places = [place_of(self.round, self.weights, attempt, "left-out") for attempt in range(self.attempt)]
        return {site for place in places for site in self.transcript.read_sites(place) or ()}

    def _collect_shares(self, cohort: Cohort) -> tuple[list[SiteId], DealtShares]:
        """Return the sites that mask with each other, and what they have dealt to each other."""

        def check(site: SiteId, found: Fields) -> None:
            check_dealt(site, neighbours_of(site, cohort.sites, self.options.neighbours, cohort.digest), found)

        def close(sites: list[SiteId]) -> None:
            self._check_enough(sites, cohort, "shared their secrets")

        found = self._ask("shares", cohort.sites, lambda _: self._masks(cohort), check, close)
        failpoint("shares-collected")
        return sorted(found), DealtShares(found)

    def _collect_updates(self, cohort: Cohort, masked_with: list[SiteId], dealt: DealtShares) -> Collected:
        """Return the sum of the masked updates, the survivors' signatures, and their replies without tensors."""
        place = self._place("train")
        if (kept := self._read_total(place)) is not None:
            return kept
        outbox = self.prepare("train", sites=masked_with)
        self._add_field(outbox, lambda s: {**self._masks(cohort), "sites": masked_with, **dealt.for_holder(s)})
        complaints: dict[SiteId, list[SiteId]] = {}
        total: dict[str, Words] = {}
        signatures: dict[SiteId, str] = {}
        accepted: dict[SiteId, tuple[Message, list[Any]]] = {}
        for site, answer in self._exchange(outbox):
            received = outbox.take(site)
            try:
                message, report = check_masked_reply(answer, self._expect(site, received))
                signature = str(read_masks(message.fields).get("signature"))
                complaints[site] = read_sites(read_masks(message.fields).get("unreadable"), cohort.keys)
                if self.peers is not None:
                    self.peers.verify(site, "masked", cohort.masked_statement(site, masked_with), signature)
            except Refused as refusal:
                self._refuse(site, refusal)
                continue
            add_up(total, message.tensors)
            signatures[site], accepted[site] = signature, (Message(message.fields, {}), report)
            del message, answer
            failpoint("masked-update-added")
        if false := find_false_dealers(self.options, complaints):
            self._leave_out(false)
            raise RoundFailed(self._failure(f"other sites cannot read the shares of {', '.join(false)}"))
        self._check_enough(sorted(signatures), cohort, "sent their updates")
        for site, (message, _) in accepted.items():
            self.transcript.write_reply(place, site, message)
        self.transcript.write_total(place, {kind: {SUM: as_tensor(words)} for kind, words in total.items()})
        self.transcript.write_sites(place, sorted(signatures))
        failpoint("updates-collected")
        return total, signatures, accepted

    def _read_total(self, place: str) -> Collected | None:
        """Return what the sites had sent before a resume, if their list was complete."""
        closed, total = self.transcript.read_sites(place), self.transcript.read_total(place)
        if closed is None or total is None:
            return None
        signatures: dict[SiteId, str] = {}
        accepted: dict[SiteId, tuple[Message, list[Any]]] = {}
        outbox = self.prepare("train", sites=closed)
        for site in closed:
            message = self.transcript.read_reply(place, site)
            if message is None:
                return None
            signatures[site] = str(read_masks(message.fields).get("signature"))
            accepted[site] = message, list(check_report(message.fields, self._expect(site, outbox.take(site))))
        words: dict[str, Words] = {}
        add_up(words, total)
        return words, signatures, accepted

    def _collect_signatures(self, survivors: list[SiteId], asked: Fields) -> dict[SiteId, str]:
        """Return the survivors' signatures over their list."""
        found = self._ask("agree", survivors, lambda _: asked, lambda *_: None)
        failpoint("survivors-agreed")
        return {site: str(reply.get("signature")) for site, reply in found.items()}

    def _collect_revealed(
        self, cohort: Cohort, survivors: list[SiteId], asked: Fields, dealt: DealtShares
    ) -> dict[SiteId, Fields]:
        """Return what each survivor reveals: shares of survivors' own masks and of lost sites' mask keys."""

        def check(site: SiteId, found: Fields) -> None:
            for part in PARTS:
                for dealer, text in read_texts(found.get(part)).items():
                    dealt.check_share(cohort.digest, dealer, site, part, read_share(text))

        return self._ask("unmask", survivors, lambda site: {**asked, **dealt.for_holder(site)}, check)

    def _mean_update(self, total: Mapping[str, Words], cohort: Cohort, survivors: list[SiteId]) -> Update:
        """Return the survivors' mean as one update that stands for all of them."""
        unweighted = {e.kind for e in self.algorithm.exchanges() if not e.weighted}
        weights = [cohort.keys[site].weight / cohort.largest_weight for site in survivors]
        tensors: Bundle = {}
        for kind, like in self.plain.items():
            divisor = float(len(survivors)) if kind in unweighted else float(np.sum(weights))
            received = self.received.get(kind, {})
            tensors[kind] = restore_group(kind, total[kind], received, like, divisor) if kind in total else {}
        expected = self._expect(survivors[0], self.received)
        examples = sum(self._expect(site, self.received).examples for site in survivors)
        update = Update(tensors, examples, survivors[0], members=tuple(survivors))
        try:
            check_values(tensors, replace(expected, like=self.plain))
            self.algorithm.check_update(update)
        except Refused as refusal:
            raise RoundFailed(self._failure(f"the sum of the updates is not acceptable ({refusal})")) from None
        return update

    def _accept(self, site: SiteId, message: Message, report: list[Any]) -> None:
        """Log a survivor, whose drift nobody but itself knows."""
        fields = message.fields
        self.log.add(site, **accepted_fields(fields, {}, None))
        self.log.reports[site] = report
        self.log.accepted += 1
        if fields.get("keeps_memory") is True:
            self.log.sites_with_memory.add(site)

    def _ask(
        self,
        phase: str,
        sites: Sequence[SiteId],
        masks: Callable[[SiteId], Fields],
        check: Callable[[SiteId, Fields], None],
        close: Callable[[list[SiteId]], None] | None = None,
    ) -> dict[SiteId, Fields]:
        """Send a message without weights to each site, and return what the acceptable replies say about masks.

        `close` raises `RoundFailed` if the sites that answered are too few. An exchange that it has closed ends with
        the same sites when the run is resumed.
        """
        place = self._place(phase)
        closed = self.transcript.read_sites(place)
        wanted = list(sites) if closed is None else closed
        found: dict[SiteId, Fields] = {}
        for site in wanted:
            if (kept := self.transcript.read_reply(place, site)) is not None:
                found[site] = read_masks(kept.fields)
        if missing := [site for site in wanted if site not in found]:
            outbox = self.prepare(phase, sites=missing)
            outbox.tensors = lambda _: {}
            self._add_field(outbox, masks)
            for site, answer in self._exchange(outbox):
                try:
                    reply = answer if isinstance(answer, Message) else messages.decode(answer, MOST_BYTES, MOST_BYTES)
                    check_address(reply.fields, self.run, self.round, site)
                    check(site, read_masks(reply.fields))
                except Refused as refusal:
                    self._refuse(site, refusal)
                    continue
                self.transcript.write_reply(place, site, Message(reply.fields, {}))
                found[site] = read_masks(reply.fields)
        if close is not None:
            close(sorted(found))
            self.transcript.write_sites(place, sorted(found))
        return found

    def _add_field(self, outbox: Outbox, masks: Callable[[SiteId], Fields]) -> None:
        outbox.fields = {site: {**fields, MASKS: masks(site)} for site, fields in outbox.fields.items()}

    def _exchange(self, outbox: Outbox) -> Iterator[tuple[SiteId, bytes | Message]]:
        """Send the messages and yield the replies in the order of sites; sites without one are logged."""
        arrivals: Iterator[tuple[SiteId, Answer]] = in_site_order(
            self.engine.exchange(self.round, outbox, self.deadline), list(outbox), self.log.add_refusal
        )
        for site, answer in arrivals:
            known = self.log.sites.get(site)
            down, up = (known.down, known.up) if known is not None else (0, 0)
            size = 0 if isinstance(answer, Failure) else messages.message_size(answer)
            self.log.add(site, down=down + outbox.sizes.get(site, 0), up=up + size)
            if isinstance(answer, Failure):
                self.log.add(site, outcome=answer.kind, why=answer.sentence)
            else:
                yield site, answer

    def _refuse(self, site: SiteId, refusal: Refused) -> None:
        self.log.add(site, outcome="refused", kind=refusal.kind, why=str(refusal))

    def _check_enough(self, sites: list[SiteId], cohort: Cohort, what: str) -> None:
        least = self.options.threshold_of(len(cohort.keys))
        if what != "signed the list of survivors":
            least = max(least, self.quorum)
        if len(sites) < least:
            raise RoundFailed(self._failure(f"{len(sites)} of {len(cohort.keys)} sites {what}, and {least} are needed"))

    def _is_refused_for_good(self, survivors: list[SiteId], cohort: Cohort) -> bool:
        """Whether so many survivors refuse this attempt themselves, as with keys that are no longer theirs, that asking
        the same again is of no use."""
        known = {site: self.log.sites[site] for site in survivors}
        refusing = sum(found.outcome == "refused" and found.kind is None for found in known.values())
        return len(survivors) - refusing < self.options.threshold_of(len(cohort.keys))

    def _failure(self, why: str) -> str:
        failed = [f"{site}: {found.why}" for site, found in self.log.sites.items() if found.why]
        more = f" ({'; '.join(failed[:3])})" if failed else ""
        return (
            f"round {self.round} was given up, and no update was unmasked, because {why}{more}; mend that and resume, "
            "or start anew with fewer sites"
        )
