"""A statement is accepted from the site that signed it, for its purpose, word for word, and from nobody else."""

import pytest

from polyclinic.core import Refused
from polyclinic.storage.signatures import PeerKeys, make_signers

FIELDS = {"run": "a1", "round": 3, "weights": "ab" * 32}


def test_a_signature_is_verified() -> None:
    signers, peers = make_signers(["north", "south"])
    peers.verify("north", "cohort", FIELDS, signers["north"].sign("cohort", FIELDS))
    peers.verify("north", "cohort", dict(reversed(FIELDS.items())), signers["north"].sign("cohort", FIELDS))


@pytest.mark.parametrize(
    ("site", "purpose", "fields"),
    [
        ("south", "cohort", FIELDS),
        ("north", "masks", FIELDS),
        ("north", "cohort", {**FIELDS, "round": 4}),
        ("north", "cohort", {**FIELDS, "more": 1}),
        ("west", "cohort", FIELDS),
    ],
)
def test_another_statement_or_site_is_refused(site: str, purpose: str, fields: dict[str, object]) -> None:
    signers, peers = make_signers(["north", "south"])
    with pytest.raises(Refused, match=r"signature|no site"):
        peers.verify(site, purpose, fields, signers["north"].sign("cohort", FIELDS))


@pytest.mark.parametrize("signature", [None, 3, "", "!", "AAAA", "A" * 1000])
def test_what_is_no_signature_is_refused(signature: object) -> None:
    _, peers = make_signers(["north"])
    with pytest.raises(Refused, match="no valid signature"):
        peers.verify("north", "cohort", FIELDS, signature)
    with pytest.raises(Refused, match="no site"):
        PeerKeys({}).verify("north", "cohort", FIELDS, signature)
