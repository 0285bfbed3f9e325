"""The cohort of a run as its sites sign it: who took part in a round, and with which weights.

    statement = signature of a site over federation, run, round, its name, its cluster, the SHA-256 of the weights that
                it received, and the SHA-256 of the statements of the round before that it was shown

With `begin` (round 0) a site signs the terms of the run and a number that it has just drawn. The server collects the
statements of a round and forwards them with the orders of the next. A site goes on only if enough sites signed, and all
sites of a cluster received the same weights and were shown the same statements. So a server cannot play with a site
alone, nor send it other weights than the rest, for longer than one round.
"""

import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from polyclinic.algorithms.base import Algorithm
from polyclinic.core import Bundle, Failure, Refused, SiteId
from polyclinic.federation.engines import Answer
from polyclinic.federation.mailbox import Outbox
from polyclinic.storage import messages
from polyclinic.storage.files import append_line
from polyclinic.storage.messages import Fields
from polyclinic.storage.signatures import PeerKeys, SiteSigner

PURPOSE, FIELD, AGAIN, FIELDS = "round", "signed", "signed again", "signatures"
"""The purpose of a statement, the fields of a reply that hold it, and the field of an order that holds those of all."""
PARTS = ("cluster", "weights", "cohort", "signature")
SIGNED, UNDONE = "signed.jsonl", "undone from"
"""A site's file of statements on a run; and, in a row of such a file, the first round whose statements so far count no
longer, because the round is played again."""
SHA256, LONGEST_NAME = re.compile("[0-9a-f]{64}"), 200
Statement: TypeAlias = Mapping[str, str]


def hash_shared_kinds(algorithm: Algorithm, received: Bundle) -> str:
    """The SHA-256 of the kinds of a broadcast that are equal for all sites of a cluster."""
    return messages.hash_tensors({kind: group for kind, group in received.items() if kind not in algorithm.site_kinds})


def hash_terms(fields: Mapping[str, object]) -> str:
    """The SHA-256 of the terms in a `begin` message that are the same for all sites."""
    return _hash_json([fields.get(name) for name in ("recipe", "seed", "classes", "channels", "size", "sites")])


def hash_statements(statements: object) -> str:
    """The SHA-256 of the statements that an order shows."""
    return _hash_json(statements)


def _hash_json(values: object) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _named(federation: str, run: str, round: int, site: SiteId, signed: Mapping[str, str]) -> dict[str, object]:
    """All that a signature covers."""
    parts = {name: signed[name] for name in PARTS[:3]}
    return {"federation": federation, "run": run, "round": round, "site": site, **parts}


def _read_statement(found: object) -> Statement:
    if not isinstance(found, dict) or not all(isinstance(found.get(part), str) for part in PARTS):
        raise Refused("signature", "a statement of a site lacks a part")
    if not all(SHA256.fullmatch(found[part]) for part in PARTS[1:3]) or len(found["cluster"]) > LONGEST_NAME:
        raise Refused("signature", "a statement of a site has a part that is no SHA-256, or too long a name")
    return {part: found[part] for part in PARTS}


@dataclass(frozen=True)
class SiteCohort:
    """One run's statements at one site. `path`: the file of those that it has signed."""

    federation: str
    run: str
    path: Path
    signer: SiteSigner
    peers: PeerKeys

    def sign_terms(self, terms: str) -> dict[str, object]:
        """Return the fields of the reply to `begin`: the signed terms, and the last statement of this run, if any.

        A run that is begun again under the same terms has the same statements, by the key that the site has now.
        """
        rows = _drop_undone(_read_rows(self.path))
        former = [row for row in rows if row["round"] == 0 and row["weights"] == terms]
        drawn = former[-1]["cohort"] if former else secrets.token_hex(32)
        found: dict[str, object] = {FIELD: self._sign(0, {"cluster": "", "weights": terms, "cohort": drawn})}
        if (last := next((row for row in reversed(rows) if row["round"]), None)) is not None:
            found[AGAIN] = {
                "round": last["round"],
                **self._sign(last["round"], {part: last[part] for part in PARTS[:3]}),
            }
        return found

    def sign_round(self, round: int, cluster: str, weights: str, shown: object) -> Statement:
        """Sign that this site received weights of this hash, and was shown these statements of the round before."""
        return self._sign(round, {"cluster": cluster, "weights": weights, "cohort": hash_statements(shown)})

    def check(self, round: int, shown: object, least: int) -> None:
        """Raise `Refused` unless the statements in an order are those of an honest cohort of `least` sites or more."""
        before = round - 1
        if not isinstance(shown, dict):
            raise Refused("cohort", f"the order of round {round} shows no statements of other sites")
        valid: dict[SiteId, Statement] = {}
        for site, found in shown.items():
            with suppress(Refused):  # an unknown site or one whose key has changed since counts for nothing
                signed = _read_statement(found)
                self.peers.verify(
                    site, PURPOSE, _named(self.federation, self.run, before, site, signed), signed["signature"]
                )
                valid[site] = signed
        count = len({*valid, self.signer.site})
        if count < least:
            raise Refused(
                "cohort",
                f"{count} of the {least} sites that {self.signer.site} asks for took part in round {before} "
                "(allow.least_sites in its site.yaml)",
            )
        self._compare(before, valid)

    def _compare(self, round: int, valid: Mapping[SiteId, Statement]) -> None:
        """Raise `Refused` unless all statements of a cluster are over the same weights, this site's own among them."""
        site, rows = self.signer.site, _read_rows(self.path)
        if site in valid and valid[site] not in _find_statements(rows, round):
            raise Refused("cohort", f"the statement of {site} on round {round} is none that it made in this run")
        own = _find_statements(_drop_undone(rows), round)
        everybody = {**({site: own[-1]} if own else {}), **valid}
        firsts: dict[str, tuple[SiteId, Statement]] = {}
        for site, signed in everybody.items():
            first, other = firsts.setdefault(signed["cluster"], (site, signed))
            if signed["weights"] != other["weights"]:
                what = "terms" if round == 0 else f"weights in round {round}"
                raise Refused("cohort", f"{site} was sent other {what} than {first}")
            if round and signed["cohort"] != other["cohort"]:
                raise Refused("cohort", f"{site} was shown another list of sites in round {round} than {first}")

    def _sign(self, round: int, parts: Mapping[str, str]) -> Statement:
        named = _named(self.federation, self.run, round, self.signer.site, parts)
        signed = {**parts, "signature": self.signer.sign(PURPOSE, named)}
        if signed not in _find_statements(_drop_undone(_read_rows(self.path)), round)[-1:]:
            append_line(self.path, json.dumps({"round": round, **signed}))
        return signed


def undo_statements(path: Path, round: int) -> None:
    """Let a site's statements on this round and later ones count no longer, as a person there allowed it to come next.

    Nor does the one on the round before, if the site has answered this round: the server then went back so far that
    others may have played that one again without this site, which had compared it with theirs the first time.

    Args:
        path: The site's file of statements on the run; it keeps all rows.
        round: The round that was allowed.
    """
    if any(row["round"] >= round for row in _drop_undone(_read_rows(path))):
        append_line(path, json.dumps({UNDONE: max(1, round - 1)}))


def _drop_undone(rows: Iterable[Fields]) -> list[Fields]:
    """Return the rows of statements on rounds that were not undone since."""
    found: list[Fields] = []
    for row in rows:
        found = [former for former in found if former["round"] < row[UNDONE]] if UNDONE in row else [*found, row]
    return found


def _find_statements(rows: Iterable[Fields], round: int) -> list[Statement]:
    """Return the statements on a round among a site's rows; there are several if the round was repeated."""
    return [{part: row[part] for part in PARTS} for row in rows if row.get("round") == round]


@dataclass
class ServerCohort:
    """The statements of a run at the server, which checks them against what it sent and forwards them.

    Args:
        federation: The federation's name.
        run: The run.
        path: The file of all statements, so that a resumed run forwards the same.
        algorithm: Says which kinds of a broadcast differ between sites.
        peers: The sites' public keys; sites without one sign nothing.
        terms: The hash of the run's terms.
    """

    federation: str
    run: str
    path: Path
    algorithm: Algorithm
    peers: PeerKeys
    terms: str
    statements: dict[int, dict[SiteId, Statement]] = field(default_factory=dict)
    _sent: dict[str, str] = field(default_factory=dict)
    """By cluster, the hash of the weights of the round that is under way."""
    _unsaved: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for row in _drop_undone(_read_rows(self.path)):
            self.statements.setdefault(row["round"], {})[row["site"]] = {part: row[part] for part in PARTS}

    def show_statements(self, outbox: Outbox) -> None:
        """Put the statements of the round before into the orders.

        Those on a round that is about to be played, or a later one, are of rounds that a rollback or a crash undid:
        they count no longer, or a site that is absent now would be shown with weights that nobody else received.
        """
        self._sent = {}
        trained = [int(str(order["round"])) for order in outbox.fields.values() if order["purpose"] == "train"]
        self._undo_from(min(trained, default=0))
        oldest = min((int(str(fields["oldest_snapshot"])) for fields in outbox.fields.values()), default=0)
        for round in [round for round in self.statements if 0 < round < oldest]:
            del self.statements[round]  # no resume goes back so far; the file has them
        outbox.fields = {site: {**fields, FIELDS: self._shown(fields)} for site, fields in outbox.fields.items()}

    def _undo_from(self, round: int) -> None:
        undone = [later for later in self.statements if later >= round > 0]
        for later in undone:
            del self.statements[later]
        if undone:
            append_line(self.path, json.dumps({UNDONE: round}))

    def _shown(self, order: Mapping[str, object]) -> dict[SiteId, Statement]:
        found = self.statements.get(int(str(order["round"])) - 1, {})
        return {site: found[site] for site in sorted(found)}

    def save(self) -> None:
        """Write the statements that have come to the file, before the round that they are of can count."""
        if self._unsaved:
            append_line(self.path, "\n".join(self._unsaved))
            self._unsaved.clear()

    def take_terms(self, site: SiteId, reply: Mapping[str, object]) -> Failure | None:
        """Keep a site's statement on the terms; return why it does not count, if so.

        A site whose key was rotated also signs its last statement again.
        """
        wrong = self._take(site, 0, reply, {"cluster": "", "weights": self.terms})
        again = reply.get(AGAIN)
        if wrong is None and isinstance(again, dict) and type(again.get("round")) is int:
            former = self.statements.get(again["round"], {}).get(site)
            if former is not None:
                right = {part: former[part] for part in PARTS[:3]}
                return self._take(site, again["round"], {FIELD: again}, right)
        return wrong

    def take_reply(self, site: SiteId, answer: Answer, outbox: Outbox) -> Answer:
        """Keep the statement in a reply to an order, and return the reply; a `Failure` if the statement is wrong."""
        order = outbox.fields.get(site, {})
        if isinstance(answer, Failure) or order.get("purpose") != "train" or site not in self.peers.keys:
            return answer
        try:
            fields = answer.fields if isinstance(answer, messages.Message) else messages.decode_fields(answer)
        except Refused:
            return answer  # the round says what is wrong with it
        round, received = int(str(order["round"])), outbox.bundle(site)
        cluster = self.algorithm.cluster_from_broadcast(received)
        if cluster not in self._sent:
            self._sent[cluster] = hash_shared_kinds(self.algorithm, received)
        right = {"cluster": cluster, "weights": self._sent[cluster], "cohort": hash_statements(order[FIELDS])}
        return self._take(site, round, fields, right) or answer

    def _take(self, site: SiteId, round: int, reply: Fields, right: Mapping[str, str]) -> Failure | None:
        if site not in self.peers.keys:
            return None
        try:
            signed = _read_statement(reply.get(FIELD))
            if wrong := [part for part, value in right.items() if signed[part] != value]:
                raise Refused("signature", f"{site} signed another {wrong[0]} than it was sent")
            named = _named(self.federation, self.run, round, site, signed)
            self.peers.verify(site, PURPOSE, named, signed["signature"])
        except Refused as refusal:
            return Failure("refused", str(refusal))
        if self.statements.setdefault(round, {}).get(site) != signed:
            self.statements[round][site] = signed
            self._unsaved.append(json.dumps({"round": round, "site": site, **signed}))
        return None


def _read_rows(path: Path) -> list[Fields]:
    """The rows of a file of statements; a killed process may have left an incomplete one."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found
