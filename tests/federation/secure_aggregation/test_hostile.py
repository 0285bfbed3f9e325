"""A hostile server, and a hostile site, in a masked round: what honest sites refuse, and that nothing is unmasked."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from polyclinic.core.errors import Refused, RoundFailed
from polyclinic.core.types import SiteId
from polyclinic.deploy.site.orders import allow_round
from polyclinic.federation.rounds import Rounds
from polyclinic.federation.secure_aggregation.agreements import Agreements
from polyclinic.federation.secure_aggregation.cohort import MASKS, Cohort
from polyclinic.federation.secure_aggregation.transcript import Transcript
from polyclinic.privacy.transforms.mask import SUM
from polyclinic.storage import messages
from polyclinic.storage.messages import Message
from polyclinic.storage.signatures import make_signers
from tests.federation.secure_aggregation.played import (
    Play,
    masked,
    network_with_statistics as network_with_statistics,
    same_bits,
)

Masks = dict[str, Any]


def changing(purpose: str, change: Callable[[SiteId, Masks], None]) -> Callable[[SiteId, Message], Message]:
    """Change what messages of a purpose say about masks."""

    def changed(site: SiteId, message: Message) -> Message:
        if message.fields.get("purpose", purpose) != purpose or MASKS not in message.fields:
            return message
        masks = {**message.fields[MASKS]}
        change(site, masks)
        return Message({**message.fields, MASKS: masks}, message.tensors)

    return changed


def refused(played: Play, purpose: str, why: str, by: set[SiteId] | None = None) -> None:
    """The round fails, the sites refuse by name, and none of them has revealed a share."""
    with pytest.raises(RoundFailed):
        played.play()
    found = {site: sentence for (site, asked), sentence in played.refusals.items() if asked == purpose}
    assert set(found) == (by or set(played.sites)), found
    assert all(why in sentence for sentence in found.values()), found
    assert not played.said("unmask")


def test_sites_that_are_sent_other_weights_refuse_the_cohort() -> None:
    """The attack on secure aggregation by weights that make all other sites' updates vanish."""

    def other_hashes(site: SiteId, masks: Masks) -> None:
        if site == "site-1":
            masks["received"] = {**masks["received"], "model": "0" * 64}

    played = Play(masked(), change_order=changing("keys", other_hashes))
    with pytest.raises(RoundFailed, match="another attempt"):
        Play(masked(quorum=5), change_order=changing("keys", other_hashes)).play()  # an honest server finds it out
    rounds = played.rounds()
    rounds.peers = None
    keys: dict[str, Any] = {}
    for site in played.sites:
        order = next(iter(rounds.prepare_outbox("keys", 1, played.made.setup.federation.initial, [site], []).items()))
        message = Message({**order_fields(order[1]), MASKS: {"received": hashes(site), "attempt": 0}}, {})
        keys[site] = played.runners[site].reply(message).fields[MASKS]
    fields = {**message.fields, "purpose": "shares", MASKS: {"keys": keys}}
    for site in played.sites:
        with pytest.raises(Refused, match="cohort: site-2 was sent other weights"):
            played.runners[site].reply(Message({**fields, "site": site}, {}))


def order_fields(data: bytes) -> dict[str, Any]:
    return dict(messages.decode(data).fields)


def hashes(site: SiteId) -> dict[str, str]:
    return {"model": "1" * 64 if site == "site-1" else "2" * 64}


def test_weights_other_than_those_that_were_signed_are_not_trained_on() -> None:
    def crafted(site: SiteId, message: Message) -> Message:
        if message.fields["purpose"] != "train" or site != "site-1":
            return message
        model = {name: torch.zeros_like(tensor) for name, tensor in message.tensors["model"].items()}
        return Message(message.fields, {**message.tensors, "model": model})

    played = Play(masked(quorum=5), change_order=crafted)
    refused(played, "train", "are not those whose hash it has signed", {"site-1"})


def test_forged_keys_in_a_sites_name_are_refused_by_all() -> None:
    stranger, _ = make_signers(["site-1"])

    def forge(_: SiteId, masks: Masks) -> None:
        keys = Cohort.from_json("run", 1, masks["keys"]).keys
        own = replace(keys["site-1"], weight=0.5)
        signature = stranger["site-1"].sign("keys", own.statement("run", 1, "site-1"))
        masks["keys"] = {**masks["keys"], "site-1": replace(own, signature=signature).to_json()}

    refused(Play(masked(), change_order=changing("shares", forge)), "shares", "no valid signature")


def test_a_site_is_never_given_keys_of_its_own_that_are_not() -> None:
    def swap(site: SiteId, masks: Masks) -> None:
        other = base64.b64encode(bytes(32)).decode()
        masks["keys"] = {**masks["keys"], site: {**masks["keys"][site], "mask_key": other}}

    refused(Play(masked(), change_order=changing("shares", swap)), "shares", "are not its own")


@pytest.mark.parametrize("left", [["site-1", "site-2", "site-3"], ["site-1"]])
def test_a_cohort_below_the_threshold_is_refused(left: list[SiteId]) -> None:
    def fewer(_: SiteId, masks: Masks) -> None:
        masks["sites"] = left

    with pytest.raises(RoundFailed):
        (played := Play(masked(), change_order=changing("train", fewer))).play()
    assert len(played.refusals) == 5
    assert not played.said("train")


def test_a_policy_may_ask_for_more_sites() -> None:
    played = Play(masked())
    runner = played.runners["site-1"]
    assert runner.masking is not None
    runner.masking = replace(runner.masking, least_sites=6)
    found = played.play()
    assert found.rounds == 2
    assert "5 sites take part, where 6 are needed" in played.refusals["site-1", "shares"]


def test_survivors_that_did_not_sign_are_refused() -> None:
    def invent(_: SiteId, masks: Masks) -> None:
        masks["survivors"] = {site: signature for site, signature in masks["survivors"].items() if site != "site-5"}
        masks["survivors"]["site-5"] = masks["survivors"]["site-1"]

    refused(Play(masked(), change_order=changing("agree", invent)), "agree", "no valid signature")


def test_nothing_is_revealed_without_enough_signatures() -> None:
    def fewer(_: SiteId, masks: Masks) -> None:
        masks["agreed"] = dict(list(masks["agreed"].items())[:3])

    refused(Play(masked(), change_order=changing("unmask", fewer)), "unmask", "3 sites have signed")


def test_a_second_list_of_survivors_is_refused_in_the_same_round() -> None:
    """The differencing attack: two sums of one round that differ by one site would show its update."""
    played = Play(masked(rounds=1))
    played.play()
    agreed = [(site, order) for site, order in played.sent if order.fields["purpose"] == "agree"]
    for site, order in agreed:
        masks = dict(order.fields[MASKS])
        masks["survivors"] = {s: text for s, text in masks["survivors"].items() if s != "site-5" or site == "site-5"}
        message = Message({**order.fields, MASKS: masks}, {})
        if site != "site-5":
            with pytest.raises(Refused, match="agreed to another list"):
                played.runners[site].reply(message)
        assert played.runners[site].reply(order).fields[MASKS]["signature"], "the same list again is answered"


def test_another_attempt_has_other_masks_and_is_not_unmasked_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Play(masked(rounds=1))
    played.play()
    first = played.said("train")
    played.replies.clear()
    monkeypatch.setattr(Transcript, "find_attempt", lambda *_: 1)
    refused(played, "agree", "agreed to another list")
    assert len(played.said("train")) == 5
    assert not {*played.said("train")} & {*first}
    one, other = (messages.decode(found[0]).tensors["model"][SUM] for found in (first, played.said("train")))
    assert float((one == other).float().mean()) < 0.01


def test_a_round_that_people_let_be_played_again_has_other_keys_and_masks() -> None:
    """With the same keys, another list of survivors would reveal both secrets of a site, and its recorded update."""
    played = Play(masked(rounds=1))
    played.play()
    first = played.said("train"), played.said("unmask")
    for runner in played.runners.values():
        assert runner.masking is not None
        runner.masking.agreements.forget_after(0)  # as allow_round does
    played.replies.clear()
    recorded = [(site, order) for site, order in played.sent if order.fields["purpose"] == "unmask"]
    for site, order in recorded:
        masks = dict(order.fields[MASKS])
        masks["survivors"] = {s: text for s, text in masks["survivors"].items() if s != "site-5" or site == "site-5"}
        for purpose in ("agree", "unmask"):
            again = Message({**order.fields, "purpose": purpose, MASKS: masks}, {})
            with pytest.raises(Refused, match=f"the keys of {site} in this round are not its own"):
                played.runners[site].reply(again)
    honest = played.play().state
    assert same_bits(honest, Play(masked(rounds=1)).play().state)
    one, other = (messages.decode(found[0]).tensors["model"][SUM] for found in (first[0], played.said("train")))
    assert float((one == other).float().mean()) < 0.01
    revealed = [messages.decode(found[0]).fields[MASKS]["own"] for found in (first[1], played.said("unmask"))]
    assert not set(revealed[0].values()) & set(revealed[1].values())


def test_a_list_that_its_sites_can_no_longer_sign_is_given_up_and_the_round_begun_anew(tmp_path: Path) -> None:
    played = Play(masked(rounds=1), {("site-2", "agree"), ("site-3", "agree")})
    rounds = remembering(played, tmp_path)
    with pytest.raises(RoundFailed, match="3 of 5 sites signed"):
        rounds.play_all()
    for runner in played.runners.values():
        assert runner.masking is not None
        runner.masking.agreements.forget_after(0)
    played.lost.clear()
    with pytest.raises(RoundFailed, match=r"are not its own"):
        rounds.play_all()
    assert same_bits(rounds.play_all().state, Play(masked(rounds=1)).play().state)


def test_never_both_secrets_of_one_site_are_revealed() -> None:
    played = Play(masked(rounds=1), {("site-3", "train")})
    played.play()
    for data in played.said("unmask"):
        found = messages.decode(data).fields[MASKS]
        assert set(found["own"]) == {"site-1", "site-2", "site-4", "site-5"}
        assert set(found["lost"]) == {"site-3"}


@pytest.mark.parametrize("weight", [1e9, 0, -1, None])
def test_a_site_that_claims_more_weight_than_it_has_is_left_out(weight: Any) -> None:
    def claim(site: SiteId, masks: Masks) -> None:
        if site == "site-2" and "weight" in masks:
            masks["weight"] = weight

    played = Play(masked(rounds=1), change_reply=changing("keys", claim))
    played.play()
    assert {site for site, purpose, _ in played.replies if purpose == "train"} == set(played.sites) - {"site-2"}


def remembering(played: Play, folder: Path) -> Rounds:
    """Rounds of a server that can resume them."""
    rounds = played.rounds()
    rounds.journal.masks = folder
    return rounds


def lying(*liars: SiteId) -> Callable[[SiteId, Message], Message]:
    def lie(site: SiteId, masks: Masks) -> None:
        if site in liars and "own" in masks:
            masks["own"] = dict.fromkeys(masks["own"], "1234")

    return changing("unmask", lie)


def test_false_shares_of_one_site_are_found_and_done_without() -> None:
    played, honest = Play(masked(), change_reply=lying("site-2")), Play(masked())
    assert same_bits(played.play().state, honest.play().state)


def test_false_shares_of_more_sites_end_the_round() -> None:
    with pytest.raises(RoundFailed, match=r"the shares of a secret of site-\d do not fit together"):
        Play(masked(), change_reply=lying("site-2", "site-3")).play()


def test_what_a_site_has_agreed_to_outlives_it(tmp_path: Any) -> None:
    kept = Agreements(tmp_path / "masks.json")
    kept.bind(3, "survivors", "a, b")
    again = Agreements(tmp_path / "masks.json")
    again.bind(3, "survivors", "a, b")
    with pytest.raises(Refused, match="agreed to another list of sites in round 3"):
        again.bind(3, "survivors", "a")
    again.bind(4, "survivors", "a")
    allow_round(tmp_path, 4)  # by the site's people, in another process
    assert (kept.times_allowed, Agreements(tmp_path / "other.json").times_allowed) == (1, 0)
    again.bind(4, "survivors", "b")
    with pytest.raises(Refused, match="agreed to another list of sites in round 3"):
        again.bind(3, "survivors", "a")
