"""A hostile server, and a hostile site, in a masked round: what honest sites refuse, and that nothing is unmasked."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
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
from polyclinic.federation.secure_aggregation.commitments import hash_seed, hash_shares
from polyclinic.federation.secure_aggregation.transcript import Transcript
from polyclinic.privacy.masking.shamir import PRIME, recover_secret
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


def test_one_attempt_has_one_cohort_and_it_cannot_be_small() -> None:
    """In one cohort a site could be made to reveal its own mask and in another its mask key: its update alone."""
    played = Play(masked(sites=6, rounds=1))
    played.play()
    orders = {site: order for site, order in played.sent if order.fields["purpose"] == "shares"}
    keys = orders["site-6"].fields[MASKS]["keys"]

    def share(site: SiteId, members: set[str], attempt: int = 0) -> Message:
        chosen = {name: keys[name] for name in keys if name in members}
        return played.runners[site].reply(
            Message({**orders[site].fields, "round": 1, MASKS: {"keys": chosen, "attempt": attempt}}, {})
        )

    with pytest.raises(Refused, match="3 sites take part, where 5 are needed"):
        share("site-1", {"site-1", "site-2", "site-6"})
    with pytest.raises(Refused, match="agreed to another list"):
        share("site-6", {"site-2", "site-3", "site-4", "site-5", "site-6"})
    assert share("site-6", set(keys)).fields[MASKS]["sealed"], "the same cohort again is answered"


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


def test_a_public_key_with_which_nobody_can_agree_on_a_secret_leaves_its_site_out() -> None:
    """Else every other site would have to refuse the cohort."""

    def forge(site: SiteId, masks: Masks) -> None:
        if site == "site-2" and "mask_key" in masks:
            masks["mask_key"] = base64.b64encode(bytes(32)).decode()

    found = Play(masked(rounds=1), change_reply=changing("keys", forge)).play()
    assert same_bits(found.state, Play(masked(rounds=1), {("site-2", "keys")}).play().state)


def lying(*liars: SiteId, points: Sequence[int] = ()) -> Callable[[SiteId, Message], Message]:
    """Sites that reveal nonsense; with `points`, those of all who reveal, shares by which secrets are one more."""

    def lie(site: SiteId, masks: Masks) -> None:
        for part in ("own", "lost") if site in liars and "own" in masks else ():
            own = int(site[-1])
            shift = pow(weight_at_zero(points, own), -1, PRIME) if own in points else 0x1234
            masks[part] = {s: f"{(int(share, 16) + shift) % PRIME:x}" for s, share in masks[part].items()}

    return changing("unmask", lie)


def weight_at_zero(points: Sequence[int], own: int) -> int:
    """The factor of a share in the secret."""
    return recover_secret({point: int(point == own) for point in points}, len(points))


def outcomes(rounds: Rounds) -> dict[SiteId, Mapping[str, Any]]:
    """What a server that plays these rounds will say about its sites."""
    found: dict[SiteId, Mapping[str, Any]] = {}
    rounds.watch = lambda event, facts: found.update({facts["site"]: facts}) if event == "site" else None
    return found


@pytest.mark.parametrize("points", [(), (1, 2, 3, 4)])
def test_false_shares_of_one_site_are_found_and_done_without(points: Sequence[int]) -> None:
    """Also shares that shift each secret by one, of which nothing else tells."""
    rounds = Play(masked(rounds=1), change_reply=lying("site-2", points=points)).rounds()
    said = outcomes(rounds)
    assert same_bits(rounds.play_all().state, Play(masked(rounds=1)).play().state)
    assert {site for site, facts in said.items() if "why" in facts} == {"site-2"}
    assert said["site-2"]["why"] == "shares: site-2 has revealed another share of a secret than was dealt to it"


def test_false_shares_of_a_lost_sites_key_name_the_liar_and_not_the_lost_site() -> None:
    lost = {("site-7", "train")}
    rounds = Play(masked(rounds=1, sites=7), lost, change_reply=lying("site-2", points=range(1, 6))).rounds()
    said = outcomes(rounds)
    assert same_bits(rounds.play_all().state, Play(masked(rounds=1, sites=7), lost).play().state)
    assert {site for site, facts in said.items() if "revealed" in facts.get("why", "")} == {"site-2"}
    assert said["site-7"]["why"] == "its process ended"


def test_false_shares_of_more_sites_end_the_round() -> None:
    with pytest.raises(
        RoundFailed, match=r"3 shares came, where 4 are needed.*site-2 has revealed.*site-3 has revealed"
    ):
        Play(masked(), change_reply=lying("site-2", "site-3")).play()


def dealing(change: Callable[[Masks], None], dealer: SiteId = "site-2") -> Callable[[SiteId, Message], Message]:
    return changing("shares", lambda site, masks: change(masks) if site == dealer and "sealed" in masks else None)


def deal_junk(masks: Masks) -> None:
    masks["sealed"] = dict.fromkeys(masks["sealed"], base64.b64encode(bytes(148)).decode())


def deal_other_hashes(masks: Masks) -> None:
    masks["hashes"] = {site: text[::-1] for site, text in masks["hashes"].items()}


def deal_no_base64(masks: Masks) -> None:
    masks["sealed"] = dict.fromkeys(masks["sealed"], "§")


@pytest.mark.parametrize("deal", [deal_junk, deal_other_hashes, deal_no_base64])
def test_a_dealer_whose_shares_nobody_can_read_is_named_and_left_out_of_the_next_attempt(
    deal: Callable[[Masks], None], tmp_path: Path
) -> None:
    played = Play(masked(rounds=1), change_reply=dealing(deal))
    rounds = remembering(played, tmp_path)
    with pytest.raises(RoundFailed, match=r"other sites cannot read the shares of site-2 \(site-2: shares"):
        rounds.play_all()
    assert not played.said("agree"), "it is found before anything is signed"
    found = rounds.play_all().state
    assert same_bits(found, Play(masked(rounds=1), {("site-2", "keys")}).play().state)
    assert not played.refusals


def test_a_dealer_who_deals_one_false_share_harms_nobody_and_its_holder_is_not_blamed() -> None:
    def deal(masks: Masks) -> None:
        masks["hashes"] = {**masks["hashes"], "site-3": "0 0"}

    rounds = Play(masked(rounds=1), change_reply=dealing(deal)).rounds()
    said = outcomes(rounds)
    assert same_bits(rounds.play_all().state, Play(masked(rounds=1)).play().state)
    assert [site for site, facts in said.items() if "why" in facts] == []


def test_one_site_that_complains_about_all_has_nobody_left_out() -> None:
    def complain(site: SiteId, masks: Masks) -> None:
        if site == "site-2" and "unreadable" in masks:
            masks["unreadable"] = ["site-1", "site-3", "site-4", "site-5"]

    found = Play(masked(rounds=1), change_reply=changing("train", complain)).play()
    assert same_bits(found.state, Play(masked(rounds=1)).play().state)


def test_a_dealer_of_another_secret_is_named_and_left_out_once_people_let_the_round_be_played_again(
    tmp_path: Path,
) -> None:
    def deal(masks: Masks) -> None:
        masks["seed"] = "0" * 64

    played = Play(masked(rounds=1), change_reply=dealing(deal))
    rounds = remembering(played, tmp_path)
    with pytest.raises(RoundFailed, match="that site-2 has dealt do not give the secret that it committed to"):
        rounds.play_all()
    with pytest.raises(RoundFailed, match=r"site-2 dealt false shares.*agreed to another list of sites in round 1"):
        rounds.play_all()
    for runner in played.runners.values():
        assert runner.masking is not None
        runner.masking.agreements.forget_after(0)
    found = rounds.play_all().state
    assert same_bits(found, Play(masked(rounds=1), {("site-2", "keys")}).play().state)


def test_a_hash_of_a_share_tells_neither_the_share_nor_that_two_are_equal() -> None:
    """Each names its cohort, dealer, holder and part; 256 bits at least have to be guessed."""
    places = [("c", "a", "b"), ("d", "a", "b"), ("c", "b", "a"), ("c", "a", "a")]
    found = [text for place in places for text in hash_shares(*place, (5, 5)).split()]
    assert len(set(found)) == len(found) == 8
    assert hash_seed("c", "a", bytes(32)) != hash_seed("c", "b", bytes(32))
    assert len(found[0]) == 64


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
