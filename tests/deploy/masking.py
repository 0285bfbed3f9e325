"""The keys by which the sites of a test know each other, and sites that have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyclinic.core import Stream
from polyclinic.core.types import SiteId
from polyclinic.deploy.site.message_handler import SiteMessageHandler
from polyclinic.storage.signatures import PeerKeys, SiteSigner, make_signers
from tests.deploy.example_sites import ApprovingHandler, config

FIVE = ("fjord", "harbour", "hill", "isle", "lake")


@dataclass(frozen=True)
class KnownSites:
    """The keys of the sites, as a kit gives them to one of them."""

    signer: SiteSigner
    keys: PeerKeys


def keyring(site: SiteId, sites: Sequence[SiteId] = FIVE) -> KnownSites:
    """The same keys in every process of a test."""
    signers, peers = make_signers(list(sites), Stream(0, ("keys of a test",)))
    return KnownSites(signers[site], peers)


def masking_desks(
    home: Path, state: str, sites: Sequence[SiteId] = FIVE, **settings: Any
) -> dict[str, SiteMessageHandler]:
    """Sites that can mask their updates."""
    return {
        site: ApprovingHandler(config(home, site, state, **settings), keyring=keyring(site, sites)) for site in sites
    }
