"""A site bounds what a server may send: by what the recipe's own networks need, and by little while there is no run."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyclinic.core.jobs import Failure
from polyclinic.core.types import SiteId
from polyclinic.deploy.site import participation
from polyclinic.deploy.site.message_handler import MAX_IDLE_MESSAGE, MAX_MESSAGE, SiteMessageHandler
from tests.deploy.example_sites import EVERY, Crossing, config, deployed, desks, recipe


class Measured(Crossing):
    """Every message must be one that the site takes at that moment."""

    def answer(self, site: SiteId, data: bytes) -> bytes | Failure:
        assert len(data) <= self.desks[site].largest_message()
        return super().answer(site, data)


@pytest.mark.parametrize("case", ["fedavg", "scaffold", "fedmp", "pfedcdp in three clusters"])
def test_no_honest_message_is_too_large(case: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The allowance of 256 MB would hide a mistake: here it is the room for a message's head."""
    monkeypatch.setattr(participation, "MESSAGE_ALLOWANCE", 1 << 14)
    sites = desks(home, f"size {case}")
    assert {site.largest_message() for site in sites.values()} == {MAX_IDLE_MESSAGE}
    crossing = Measured(sites)
    deployed(recipe(**{**EVERY[case], "rounds": 2}), home, crossing)
    site, largest = max(crossing.sent, key=lambda item: len(item[1]))
    assert len(largest) <= sites[site].largest_message() <= 10 * len(largest) + (1 << 15)


def test_after_a_restart_the_first_message_may_be_large(home: Path) -> None:
    crossing = Crossing(desks(home, "size restarted"))
    deployed(recipe(rounds=1), home, crossing)
    again = SiteMessageHandler(config(home, "hill", "size restarted"))
    assert again.largest_message() == MAX_MESSAGE
