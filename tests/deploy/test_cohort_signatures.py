"""Sites sign what they receive, and show it each other through the server: it can neither be alone with one of them nor
send it other weights than the rest, for longer than a round.

Honest sites are `SiteMessageHandler`s with the files of real kits; the server is honest, or does what it likes.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from polyclinic.algorithms import ALGORITHMS
from polyclinic.core import Bundle, Failure, SiteId
from polyclinic.core.errors import EngineError, Refused, RoundFailed
from polyclinic.deploy.cohort import FIELD, FIELDS, hash_statements, hash_terms
from polyclinic.deploy.config import FederationConfig, ServerSection
from polyclinic.deploy.provisioning.certificates import (
    encode_public_openssh,
    generate_key,
    key_fingerprint,
    read_private_key,
)
from polyclinic.deploy.provisioning.peer_list import PeerList, encode_peers, read_peers
from polyclinic.deploy.provisioning.provision import (
    add_site,
    provision_federation,
    revoke_site,
    rotate_all,
    rotate_site,
)
from polyclinic.deploy.serve import REVOKED, run_deployed
from polyclinic.deploy.site.config import SiteConfig
from polyclinic.deploy.site.keys import SitePeers
from polyclinic.deploy.site.message_handler import SiteMessageHandler
from polyclinic.deploy.site.orders import allow_round
from polyclinic.evaluation.rows import CostRow
from polyclinic.federation.engines import RemoteExecution
from polyclinic.federation.mailbox import Outbox
from polyclinic.federation.progress import Progress
from polyclinic.federation.rounds import Watch
from polyclinic.storage import messages
from polyclinic.storage.rollback import roll_back
from polyclinic.storage.run_folder import RunFolder
from polyclinic.storage.signatures import SiteSigner
from polyclinic.storage.site_memory import RamMemory
from tests.deploy.example_sites import (
    CLUSTERS,
    EVERY,
    EVERYTHING,
    SITES,
    TABLE,
    ApprovingHandler,
    Crossing,
    asked,
    beginning,
    config,
    loop,
    recipe,
    refusal,
    said,
    simulation,
    write_hospitals,
)
from tests.deploy.real_processes import Ward, free_port
from tests.driving import Ask
from tests.federation.mock_engine import MockEngine
from tests.small import NEEDED

OURS = [sys.executable, "-m", "polyclinic"]
STRICT = {**EVERYTHING, "least_sites": 3}
NORTH = FederationConfig(
    federation="north-sea", server=ServerSection(host="127.0.0.1", port=9443), sites=SITES, days=30
)


@pytest.fixture(scope="module")
def issued(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("issued") / "k"
    provision_federation(NORTH, folder)
    return folder


@pytest.fixture
def k(issued: Path, tmp_path: Path) -> Path:
    """Kits of this test alone."""
    return Path(shutil.copytree(issued, tmp_path / "k"))


def configured(home: Path, k: Path, site: SiteId, state: str, **settings: Any) -> SiteConfig:
    kit = k / "sites" / site
    return config(home, site, state, **{"allow": STRICT, "ca": kit / "ca.crt", "key": kit / "site.key", **settings})


def signing(home: Path, k: Path, state: str, **settings: Any) -> dict[SiteId, SiteMessageHandler]:
    return {site: ApprovingHandler(configured(home, k, site, state, **settings)) for site in SITES}


def listed(k: Path) -> Callable[[], dict[str, object] | None]:
    return lambda: read_peers(k / "server" / "peers.json", k / "ca" / "ca.crt", "north-sea")


Answers = Callable[[SiteId, bytes], bytes | Failure]


def played(k: Path, answer: Answers, out: Path, **settings: Any) -> str:
    found = recipe(**settings)
    there = RemoteExecution(MockEngine(answer), "mock")
    return run_deployed(found, there, SITES, out, read_peers=listed(k)).summary.sha256 or ""


# ---- honest ---------------------------------------------------------------------------------------------------------

HONEST: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedbn": {"algorithm": "fedbn"},
    "fedmp": {"algorithm": "fedmp"},
    "local": {"algorithm": "local"},
    "clusters": {**NEEDED["pfedcdp"], **CLUSTERS},
    "a cohort of two": {"cohort": 2},
}

LIGHT = ("fedavg", "a cohort of two")


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[] if name in LIGHT else [pytest.mark.heavy]) for name in HONEST]
)
def test_an_honest_run_is_the_simulated_one(case: str, home: Path, k: Path, tmp_path: Path) -> None:
    settings = {"rounds": 3, **HONEST[case]}
    allowed = {**EVERYTHING, "least_sites": 2} if "cohort" in settings else STRICT
    crossing = Crossing(signing(home, k, tmp_path.name, allow=allowed))
    assert (
        played(k, crossing.answer, tmp_path / "run", **settings)
        == simulation(recipe(**settings), home).run().summary.sha256
    )
    orders = [messages.decode(data).fields for _, data in crossing.sent]
    trained = [fields for fields in orders if fields["purpose"] == "train"]
    assert {len(fields[FIELDS]) for fields in trained} == ({2} if "cohort" in settings else {3})


@pytest.mark.parametrize("case", EVERY)
def test_kinds_that_count_as_shared_are_equal_for_all_sites(case: str, home: Path) -> None:
    """In every round, also for a site that takes part for the first time when others have before."""
    partly = {} if case in ("single", "cross-site") else {"cohort": 2, "cohort_order": "cyclic"}
    found = recipe(**{**EVERY[case], "rounds": 3, **partly})
    made = simulation(found, home)
    algorithm, states = made.setup.algorithm, list[Bundle]()
    rounds = loop(made, Crossing({}))
    runners = made.setup.make_runners(RamMemory(), made.secret if made.setup.plan else None)

    def answer(site: SiteId, data: bytes) -> bytes:
        return runners[site].answer(data)

    rounds.engine = MockEngine(answer)
    state, progress = algorithm.init(rounds.federation), Progress()
    for _ in range(3):
        states.append(state)
        state, progress = rounds.play_round(state, progress)
    for state in states:
        by_cluster: dict[str, dict[str, set[str]]] = {}
        for site in SITES:
            sent = algorithm.broadcast(state, site)
            kinds = by_cluster.setdefault(algorithm.cluster_of(state, site), {})
            for kind in {*sent, *kinds} - set(algorithm.site_kinds):
                kinds.setdefault(kind, set()).add(messages.hash_tensors({kind: sent.get(kind, {})}))
        for kinds in by_cluster.values():
            assert all(len(hashes) == 1 for hashes in kinds.values()), case


def test_wrappers_have_the_kinds_of_what_they_wrap(home: Path) -> None:
    assert simulation(recipe(**EVERY["pfedcdp in three clusters"]), home).setup.algorithm.site_kinds == ()
    assert ALGORITHMS["fedmp"].site_kinds == ("others",)
    assert simulation(recipe(algorithm="fedbn", ensemble=True), home).setup.algorithm.site_kinds != ()


class Dies(Exception):  # noqa: N818
    """The server's process ends."""


@pytest.mark.parametrize("purpose", ["train", "evaluate"])
def test_a_server_that_was_killed_goes_on_with_the_statements_it_had(
    purpose: str, home: Path, k: Path, tmp_path: Path
) -> None:
    """It dies as the second site is asked, in round 3 or after the last, and has only its folder."""
    crossing, left = Crossing(signing(home, k, tmp_path.name)), [2]
    settings: dict[str, Any] = {"rounds": 4, "snapshot_every": 2, "algorithm": "scaffold"}

    def dying(site: SiteId, data: bytes) -> bytes | Failure:
        fields = messages.decode(data).fields
        if fields["purpose"] == purpose and fields["round"] in (3, 5):
            left[0] -= 1
            if not left[0]:
                raise Dies
        return crossing.answer(site, data)

    with pytest.raises(Dies):
        played(k, dying, tmp_path / "run", **settings)
    again = Crossing(signing(home, k, tmp_path.name))
    assert (
        played(k, again.answer, tmp_path / "run", **settings)
        == simulation(recipe(**settings), home).run().summary.sha256
    )


def away(crossing: Crossing, site: SiteId) -> Failure:
    """A site that is not connected, which its own process notices when it connects again."""
    crossing.desks[site].note_absence()
    return Failure("dead", "away")


def test_a_site_that_was_away_comes_back_and_a_late_one_joins(home: Path, k: Path, tmp_path: Path) -> None:
    """Two of three are enough for these sites; the third misses round 2, and its statement is missing in round 3."""
    allowed = {**EVERYTHING, "least_sites": 2}
    crossing = Crossing(signing(home, k, tmp_path.name, allow=allowed))

    def answer(site: SiteId, data: bytes) -> bytes | Failure:
        fields = messages.decode(data).fields
        if site == "hill" and fields["purpose"] == "train" and fields["round"] == 2:
            return away(crossing, site)
        if site == "lake" and fields["purpose"] in ("begin", "train") and fields.get("round", 1) == 1:
            rounds = [messages.decode(sent).fields.get("round", 0) for _, sent in crossing.sent]
            if fields["purpose"] == "train" or max(rounds) == 0:
                return away(crossing, site)
        return crossing.answer(site, data)

    assert played(k, answer, tmp_path / "run", rounds=4, quorum=2)
    strict = Crossing(signing(home, k, f"{tmp_path.name} strict"))

    def one_away(site: SiteId, data: bytes) -> bytes | Failure:
        fields = messages.decode(data).fields
        lost = site == "hill" and fields["purpose"] == "train" and fields["round"] == 2
        return away(strict, site) if lost else strict.answer(site, data)

    with pytest.raises(
        RoundFailed, match=r"harbour: refused: it takes part only with 3 sites or more .* raise quorum to 3"
    ):
        played(k, one_away, tmp_path / "other", rounds=4, quorum=1)
    with pytest.raises(RoundFailed, match="2 acceptable updates where the quorum is 3"):
        played(k, one_away, tmp_path / "closed", rounds=4)
    assert (
        played(k, strict.answer, tmp_path / "closed", rounds=4)
        == simulation(recipe(rounds=4), home).run().summary.sha256
    )


def test_a_run_outlives_the_revocation_of_a_site_and_restarts(home: Path, k: Path, tmp_path: Path) -> None:
    """Lake is revoked in round 2, and the server is stopped: it goes on with two, and with lake once that is back."""
    allowed, run = {**EVERYTHING, "least_sites": 2}, tmp_path / "run"
    crossing, settings = Crossing(signing(home, k, tmp_path.name, allow=allowed)), {"rounds": 6, "quorum": 2}
    events: list[tuple[str, Mapping[str, Any]]] = []

    def serve(sites: Sequence[SiteId], last: int) -> None:
        def answer(site: SiteId, data: bytes) -> bytes | Failure:
            fields = messages.decode(data).fields
            if fields["purpose"] == "train" and fields["round"] == 2 and "lake" in listed(k)()["sites"]:  # type: ignore[index,operator]
                revoke_site(k, "lake")
            if fields["purpose"] == "train" and fields["round"] > last:
                raise Dies
            gone = site == "lake" and "lake" not in listed(k)()["sites"]  # type: ignore[index,operator]
            return away(crossing, site) if gone else crossing.answer(site, data)

        there = RemoteExecution(MockEngine(answer), "mock")
        watch: Watch = lambda event, info: events.append((event, dict(info)))  # noqa: E731
        run_deployed(recipe(**settings), there, sites, run, watch, read_peers=listed(k))

    with pytest.raises(Dies):
        serve(SITES, 3)
    enrolled = (run / "enrolled.json").read_text()
    assert "lake" in enrolled
    with pytest.raises(Dies):
        serve(("harbour", "hill"), 4)
    assert ("absent", {"site": "lake", "kind": "dead", "why": REVOKED}) in events
    assert (run / "enrolled.json").read_text() == enrolled
    add_site(k, "lake")
    crossing.desks = {**crossing.desks, "lake": signing(home, k, tmp_path.name, allow=allowed)["lake"]}
    serve(("lake", "harbour", "hill"), 6)
    rows = [row for row in RunFolder(run).ledger() if isinstance(row, CostRow) and row.event == "round"]
    took = [{site for site, sent in row.sites.items() if sent.outcome == "accepted"} for row in rows]
    assert took == [set(SITES), *[{"harbour", "hill"}] * 3, *[set(SITES)] * 2]


def test_going_back_without_a_site_accuses_nobody(home: Path, k: Path, tmp_path: Path) -> None:
    """Five rounds are played, and those after the second again, without lake and then with it; each site is asked to
    allow the rounds that differ from what it answered, and no statement of the undone rounds is compared."""
    allowed, run = {**EVERYTHING, "least_sites": 2}, tmp_path / "run"
    crossing = Crossing(signing(home, k, tmp_path.name, allow=allowed))
    allowing: list[tuple[SiteId, int]] = []

    def serve(last: int, without: range = range(0)) -> None:
        def answer(site: SiteId, data: bytes) -> bytes | Failure:
            fields = messages.decode(data).fields
            round = fields.get("round", 0) if fields["purpose"] == "train" else 0
            if round > last:
                raise Dies
            if site == "lake" and without and (round in without or not round):
                return away(crossing, site)
            reply = crossing.answer(site, data)
            if isinstance(reply, Failure) and "allow-round" in reply.sentence:
                *_, named, number = reply.sentence.split()
                allow_round(home / site / tmp_path.name / "runs" / named, int(number))
                allowing.append((site, int(number)))
                reply = crossing.answer(site, data)
            assert not isinstance(reply, Failure), reply
            return reply

        with suppress(Dies):
            played(k, answer, run, rounds=6, quorum=2)

    serve(5)
    assert allowing == []
    roll_back(run, 2)
    serve(4, without=range(1, 5))
    assert allowing == [("harbour", 4), ("hill", 4)], "round 3 comes with the same contents as before"
    serve(6)
    assert allowing[2:] == [("lake", 5)], "the others have gone back already"
    assert RunFolder(run).is_finished


def test_a_key_can_be_rotated_while_a_run_goes_on(home: Path, k: Path, tmp_path: Path) -> None:
    crossing = Crossing(signing(home, k, tmp_path.name))

    def answer(site: SiteId, data: bytes) -> bytes | Failure:
        fields = messages.decode(data).fields
        if site == "lake" and fields["purpose"] == "train" and fields["round"] == 2:
            reply = crossing.answer(site, data)
            rotate_site(k, "hill")
            crossing.desks = {**crossing.desks, "hill": signing(home, k, tmp_path.name)["hill"]}
            return reply
        return crossing.answer(site, data)

    found = recipe(rounds=4)
    assert played(k, answer, tmp_path / "run", rounds=4) == simulation(found, home).run().summary.sha256
    logged = (home / "lake" / tmp_path.name / "site.log").read_text()
    assert "hill has another key than before, says the federation's authority: SHA256:" in logged


# ---- a hostile server -----------------------------------------------------------------------------------------------


class HostileServer:
    """Begins a run with every site, and then sends what it likes."""

    def __init__(self, home: Path, desks: Mapping[SiteId, SiteMessageHandler]) -> None:
        self.made, self.desks = simulation(recipe(rounds=4), home), desks
        self.rounds = loop(self.made, Crossing({}))
        self.state = self.made.setup.algorithm.init(self.rounds.federation)
        self.shown: dict[SiteId, Any] = {}

    def begin(self, *sites: SiteId) -> None:
        replies = {site: said(self.desks[site].answer_message(beginning(self.made, site))) for site in sites or SITES}
        assert all(reply.get("ready") for reply in replies.values()), replies
        self.shown = {site: reply[FIELD] for site, reply in replies.items()}

    def order(self, site: SiteId, round: int, state: Bundle | None = None, shown: Any = None) -> dict[str, Any]:
        """Send an order, and return the fields of the reply."""
        box: Outbox = self.rounds.prepare_outbox("train", round, state or self.state, [site], [], Progress())
        box.fields = {site: {**box.fields[site], FIELDS: self.shown if shown is None else shown}}
        return said(self.desks[site].answer_message(box[site]))

    def round(self, number: int, **states: Bundle) -> None:
        replies = {site: self.order(site, number, states.get(site)) for site in SITES}
        self.shown = {site: reply[FIELD] for site, reply in replies.items()}


def crafted(state: Bundle) -> Bundle:
    return {kind: {name: torch.zeros_like(t) for name, t in group.items()} for kind, group in state.items()}


@pytest.fixture
def server(home: Path, k: Path, tmp_path: Path) -> HostileServer:
    found = HostileServer(home, signing(home, k, tmp_path.name))
    found.begin()
    return found


def test_a_server_that_follows_the_rules_gets_replies(server: HostileServer) -> None:
    for number in (1, 2, 3):
        server.round(number)


def test_a_cohort_of_one_is_refused(server: HostileServer) -> None:
    own = {"hill": server.shown["hill"]}
    for shown in (own, {}, {"hill": server.shown["hill"], "harbour": {}}, {"hill": own["hill"], "dune": own["hill"]}):
        assert "1 of the 3 sites that hill asks for" in refusal(server.order("hill", 1, shown=shown))
    two = {site: server.shown[site] for site in ("hill", "lake")}
    assert "2 of the 3 sites that hill asks for" in refusal(server.order("hill", 1, shown=two))
    wrong: Any
    for wrong in ([1], "x", 3):
        assert "shows no statements" in refusal(server.order("hill", 1, shown=wrong))


def test_statements_of_others_cannot_be_made_up(server: HostileServer) -> None:
    own = server.shown["hill"]
    for forged in (own, {**own, "signature": SiteSigner("lake", generate_key()).sign("round", {})}):
        shown = {**server.shown, "lake": forged}
        assert "2 of the 3 sites that hill asks for" in refusal(server.order("hill", 1, shown=shown))
    shown = {**server.shown, "lake": server.shown["harbour"]}
    assert "2 of the 3 sites" in refusal(server.order("hill", 1, shown=shown)), "one site's for another's"
    server.round(1)
    former = server.shown
    server.round(2)
    assert "1 of the 3 sites" in refusal(server.order("hill", 3, shown=former)), "those of an earlier round"


def test_other_weights_for_one_site_are_refused_by_all_in_the_next_round(server: HostileServer) -> None:
    server.round(1)
    server.round(2, hill=crafted(server.state))
    for site in SITES:
        assert "was sent other weights in round 2 than" in refusal(server.order(site, 3))
    assert "of the 3 sites" in refusal(server.order("hill", 3, shown={"hill": server.shown["hill"]}))


def test_another_list_of_sites_for_one_of_them_is_refused(home: Path, k: Path, tmp_path: Path) -> None:
    """The server plays two runs of the same name: hill sees the others' statements, they see none of hill's."""
    found = HostileServer(home, signing(home, k, tmp_path.name, allow={**EVERYTHING, "least_sites": 2}))
    found.begin()
    without = {site: found.shown[site] for site in ("harbour", "lake")}
    replies = {site: found.order(site, 1, shown=None if site == "hill" else without) for site in SITES}
    found.shown = {site: reply[FIELD] for site, reply in replies.items()}
    assert "was shown another list of sites in round 1 than" in refusal(found.order("hill", 2))


def test_statements_of_an_earlier_run_are_not_taken_twice(home: Path, k: Path, tmp_path: Path) -> None:
    """The same recipe on the same images is a run of the same name. Hill begins it anew, the rest is a recording."""
    first = HostileServer(home, signing(home, k, tmp_path.name))
    first.begin()
    recorded = dict(first.shown)
    first.round(1)
    later = dict(first.shown)
    first.desks["hill"].answer_message(
        messages.encode({"purpose": "end", "run": first.made.run_id(), "site": "hill"}, {})
    )
    second = HostileServer(home, first.desks)
    second.begin("hill")
    own = second.shown["hill"]
    assert own != recorded["hill"], "a number drawn anew"
    assert "is none that it made in this run" in refusal(second.order("hill", 1, shown=recorded))
    reply = second.order("hill", 1, shown={**recorded, "hill": own})
    assert FIELD in reply, "in the first round it cannot tell"
    shown = {**later, "hill": reply[FIELD]}
    assert "was shown another list of sites in round 1" in refusal(second.order("hill", 2, shown=shown))


def test_other_terms_for_one_site_are_refused(home: Path, k: Path, tmp_path: Path) -> None:
    found = HostileServer(home, signing(home, k, tmp_path.name))
    terms = {"classes": ["malignant", "benign"]}
    assert hash_terms({"classes": 1}) != hash_terms(terms)
    for site in SITES:
        fields = {"size": 9} if site == "hill" else {}
        reply = said(found.desks[site].answer_message(beginning(found.made, site, fields)))
        if not fields:
            found.shown[site] = reply[FIELD]
    cheated = messages.decode(beginning(found.made, "hill")).fields
    longer = recipe(rounds=5)
    reply = said(
        found.desks["hill"].answer_message(
            asked(
                "begin",
                "hill",
                longer,
                {**{n: cheated[n] for n in ("run", "classes", "channels", "size", "sites", "plan")}},
            )
        )
    )
    found.shown["hill"] = reply[FIELD]
    found.rounds.rules = type(found.rounds.rules)(**{**vars(found.rounds.rules), "rounds": 5})
    assert "was sent other terms than" in refusal(found.order("hill", 1))


def test_the_statement_is_kept_over_a_restart(server: HostileServer, home: Path, k: Path, tmp_path: Path) -> None:
    """A site that was restarted still knows what it was sent."""
    server.round(1)
    server.round(2, hill=crafted(server.state))
    server.desks = signing(home, k, tmp_path.name)
    assert "was sent other weights in round 2 than" in refusal(server.order("hill", 3))


# ---- a hostile site -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lie", ["weights", "cohort", "signature", "none", "cluster"])
def test_a_site_that_signs_something_else_is_named_and_stops_nobody(
    lie: str, home: Path, k: Path, tmp_path: Path
) -> None:
    """Else its statement would make all the others refuse."""
    crossing = Crossing(signing(home, k, tmp_path.name, allow={**EVERYTHING, "least_sites": 2}))
    signer = SiteSigner("hill", read_private_key(k / "sites" / "hill" / "site.key"))

    def answer(site: SiteId, data: bytes) -> bytes | Failure:
        reply = crossing.answer(site, data)
        fields = messages.decode(data).fields
        if site != "hill" or fields["purpose"] != "train" or isinstance(reply, Failure):
            return reply
        message = messages.decode(reply)
        signed = dict(message.fields[FIELD])
        if lie != "none":
            signed[lie] = hash_statements(lie)
            named = {name: signed[name] for name in ("cluster", "weights", "cohort")}
            ids = {"federation": "north-sea", "run": fields["run"], "round": fields["round"], "site": "hill"}
            if lie != "signature":
                signed["signature"] = signer.sign("round", {**ids, **named})
        return messages.encode({**message.fields, FIELD: None if lie == "none" else signed}, message.tensors)

    seen: list[Mapping[str, Any]] = []
    found, there = recipe(rounds=3, quorum=2), RemoteExecution(MockEngine(answer), "mock")
    watch = lambda event, info: seen.append(info) if event == "site" else None  # noqa: E731
    summary = run_deployed(found, there, SITES, tmp_path / "run", watch, read_peers=listed(k)).summary
    assert summary.rounds == 3
    refused = {info["site"] for info in seen if info.get("outcome") == "refused"}
    assert refused == {"hill"}
    assert all("signature" in info["why"] for info in seen if info["site"] == "hill")


@pytest.mark.parametrize(
    "wrong",
    [
        {"cohort": "a" * 10**6},
        {"cohort": "0"},
        {"weights": 3},
        {"signature": "A" * 10**5},
        {"signed again": {"round": [1]}},
        {"signed again": {"round": 10**9}},
        {"signed again": 7},
    ],
    ids=lambda wrong: "".join(wrong),
)
def test_what_a_site_says_of_the_terms_stops_nobody_either(
    wrong: dict[str, Any], home: Path, k: Path, tmp_path: Path
) -> None:
    """A statement travels to all other sites: it is small and whole, or the site is done without."""
    crossing = Crossing(signing(home, k, tmp_path.name, allow={**EVERYTHING, "least_sites": 2}))

    def answer(site: SiteId, data: bytes) -> bytes | Failure:
        reply = crossing.answer(site, data)
        if site != "hill" or messages.decode(data).fields["purpose"] != "begin" or isinstance(reply, Failure):
            return reply
        fields = dict(messages.decode(reply).fields)
        again = {name: value for name, value in wrong.items() if name == "signed again"}
        return messages.encode({**fields, FIELD: {**fields[FIELD], **wrong}, **again}, {})

    assert played(k, answer, tmp_path / "run", rounds=2, quorum=2)
    orders = [messages.decode(data).fields for site, data in crossing.sent if site == "lake"]
    shown = [set(fields[FIELDS]) for fields in orders if fields.get("round") == 1 and fields["purpose"] == "train"]
    assert shown == [set(SITES) if "signed again" in wrong else {"harbour", "lake"}]


# ---- the list of sites ----------------------------------------------------------------------------------------------


def authority_key(k: Path) -> Any:
    return read_private_key(k / "ca" / "ca.key")


def test_only_a_newer_list_of_the_authority_is_taken(home: Path, k: Path, tmp_path: Path) -> None:
    told: list[str] = []
    peers = SitePeers(configured(home, k, "hill", tmp_path.name), told.append)
    kit = json.loads((k / "sites" / "hill" / "peers.json").read_text())
    found = PeerList("north-sea", kit["version"] + 1, {**kit["sites"], "dune": kit["sites"]["lake"]})
    wrong: Any
    for wrong in (
        found.sign(generate_key()),
        {**found.sign(authority_key(k)), "version": 99},
        {**found.sign(authority_key(k)), "sites": {}},
        PeerList("south-sea", 9, found.sites).sign(authority_key(k)),
        PeerList("north-sea", 9, {"dune": "no key"}).sign(authority_key(k)),
        {},
        None,
        [],
    ):
        with pytest.raises(Refused, match="peers"):
            peers.take_list(wrong)
    assert set(peers.keys.keys) == set(SITES)
    peers.config.folder.mkdir(exist_ok=True)
    peers.take_list(found.sign(authority_key(k)))
    assert set(peers.keys.keys) == {*SITES, "dune"}
    assert told == [f"dune is a site of this federation, says the federation's authority: {_mark(k, 'lake')}"]
    peers.take_list(kit)
    assert set(SitePeers(peers.config).keys.keys) == {*SITES, "dune"}, "an older list, also after a restart"


def test_a_new_authority_replaces_the_list_of_the_old_one(home: Path, k: Path, tmp_path: Path) -> None:
    peers = SitePeers(configured(home, k, "hill", tmp_path.name))
    kit = json.loads((k / "sites" / "hill" / "peers.json").read_text())
    peers.config.folder.mkdir(exist_ok=True)
    former = PeerList("north-sea", 10**6, {"hill": kit["sites"]["hill"]}).sign(authority_key(k))
    peers.take_list(former)
    rotate_all(k)
    again = SitePeers(peers.config)
    assert set(again.keys.keys) == set(SITES)
    with pytest.raises(Refused, match="not signed by the federation's authority"):
        again.take_list(former)


def _mark(k: Path, site: SiteId) -> str:
    return key_fingerprint((k / "server" / "sites" / f"{site}.pub").read_bytes())


def test_a_coordinator_can_invent_sites_unless_people_have_pinned_them(home: Path, k: Path, tmp_path: Path) -> None:
    """Whoever has the authority's key and the server makes two sites; hill's people had compared two others' keys."""
    invented = {site: SiteSigner(site, generate_key()) for site in ("dune", "marsh")}
    kit = json.loads((k / "sites" / "hill" / "peers.json").read_text())
    lines = {site: _openssh(signer) for site, signer in invented.items()}
    values = json.loads(encode_peers(PeerList("north-sea", 50, {**kit["sites"], **lines}), authority_key(k)))
    pins = (_mark(k, "harbour"), _mark(k, "lake"))
    for state, settings in (("open", {}), ("pinned", {"peers": pins})):
        desks = signing(home, k, f"{tmp_path.name} {state}", **settings)
        found = HostileServer(home, desks)
        begun = said(desks["hill"].answer_message(beginning(found.made, "hill", {"peers": values})))
        terms = begun[FIELD]["weights"]
        for site, signer in invented.items():
            parts = {"cluster": "", "weights": terms, "cohort": 64 * "0"}
            ids = {"federation": "north-sea", "run": found.made.run_id(), "round": 0, "site": site}
            found.shown[site] = {**parts, "signature": signer.sign("round", {**ids, **parts})}
        found.shown["hill"] = begun[FIELD]
        reply = found.order("hill", 1)
        if state == "open":
            assert FIELD in reply
        else:
            assert "1 of the 3 sites that hill asks for" in refusal(reply)


def _openssh(signer: SiteSigner) -> str:
    return encode_public_openssh(signer.key.public_key()).decode().strip()


def test_a_site_without_keys_of_others_is_alone_only_if_it_says_so(home: Path, tmp_path: Path) -> None:
    for least in (1, 3):
        desk = ApprovingHandler(
            config(home, "hill", f"{tmp_path.name} {least}", allow={**EVERYTHING, "least_sites": least})
        )
        found = HostileServer(home, {"hill": desk})
        assert said(desk.answer_message(beginning(found.made, "hill"))).get("ready") is True
        reply = found.order("hill", 1, shown={})
        if least == 1:
            assert reply["round"] == 1
        else:
            assert "has no keys of others" in refusal(reply)


@pytest.mark.heavy
def test_real_processes_with_keys_that_sites_made(ask: Ask, tmp_path: Path) -> None:
    """By the commands of a kit's README, over TLS, with three sites that ask for three.
    `./scripts/test --heavy tests/deploy/test_cohort_signatures.py`"""
    write_hospitals(tmp_path)
    server = ServerSection(host="127.0.0.1", port=free_port())
    kits = tmp_path / "k"
    provision_federation(NORTH.model_copy(update={"server": server}), kits, site_keys=False)
    for site in SITES:
        path = kits / "sites" / site / "site.yaml"
        values = yaml.safe_load(path.read_text()) | {"data": {TABLE: str(tmp_path / site / TABLE)}, "allow": STRICT}
        path.write_text(yaml.safe_dump(values))
        done = subprocess.run([*OURS, "site", "key", str(path)], capture_output=True, text=True, check=True)
        assert "SHA256:" in done.stdout
    requests = [str(kits / "sites" / site / "request.json") for site in SITES]
    subprocess.run([*OURS, "provision", "accept", str(kits), *requests, "--yes"], capture_output=True, check=True)
    with Ward(tmp_path, ask) as ward:
        for site in SITES:
            ward.join(site)
        result, simulated = ward.play(recipe(rounds=3), "run")
        assert result.sha256 == simulated.sha256
    rows = [json.loads(line) for line in (tmp_path / "run" / "signatures.jsonl").read_text().splitlines()]
    assert {(row["round"], row["site"]) for row in rows} == {(round, site) for round in range(4) for site in SITES}


def test_a_server_with_another_authoritys_list_does_not_start(k: Path, tmp_path: Path) -> None:
    provision_federation(NORTH, tmp_path / "other")
    with pytest.raises(EngineError, match="copy the whole server kit anew"):
        read_peers(tmp_path / "other" / "server" / "peers.json", k / "ca" / "ca.crt", "north-sea")
