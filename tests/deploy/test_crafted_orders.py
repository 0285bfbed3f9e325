"""What a kit's rules do not stop: crafted weights in later rounds of an approved recipe, at a real message handler.

This is measured and said (docs/attack.md, the site's README), and bounded by a budget alone. The attack itself is
tested in tests/analysis/attack/test_crafted_weights.py.
"""

from __future__ import annotations

from pathlib import Path

import torch

from polyclinic.analysis.attack.crafted_weights import find_imprint, fit_decoder
from polyclinic.analysis.attack.recovery import compare_with_chance, count_recovered
from polyclinic.core.rng import Stream
from polyclinic.deploy.config import FederationConfig, ServerSection
from polyclinic.deploy.provisioning.provision import provision_federation
from tests.deploy.example_sites import SITES
from tests.deploy.test_hostile_server import SIZE, attack, play_honestly, write_scans


def test_crafted_weights_follow_every_rule_and_read_training_images(tmp_path: Path) -> None:
    server = ServerSection(host="127.0.0.1", port=9443)
    provision_federation(FederationConfig(federation="north-sea", server=server, sites=SITES), tmp_path / "kits")
    (tmp_path / "scans").mkdir()
    evil = attack(tmp_path / "kits", tmp_path / "state", write_scans(tmp_path / "scans", 0))
    assert evil.begin()["ready"]
    state = play_honestly(evil, 1)
    part = evil.desk._open
    assert part is not None
    network, site = part.setup.networks.first.module, part.setup.sites["hill"]
    imprint = find_imprint(network, torch.zeros(1, 1, SIZE, SIZE), 1.0)
    assert imprint is not None
    thresholds, guesses = torch.linspace(0, 2, imprint.units + 1)[:-1], []
    for round in range(2, 6):
        sent = imprint.craft(state, thresholds, round % 2 == 0, steady=False)
        assert "failure" not in evil.order("train", round, sent)
        images, counts = imprint.read_bins(sent, evil.last(), steady=False)
        lit = counts.abs() > 1e-6 * counts.abs().max()
        guesses.append(images[lit] / counts[lit, None])
        bright = torch.cat(guesses) @ imprint.direction(sent["model"]).double()
        levels = (torch.arange(imprint.units, dtype=torch.float64) + round * 0.618 % 1) / imprint.units
        thresholds = torch.quantile(bright[(bright > 0) & (bright < 2)].sort().values, levels.clamp(max=1)).float()
        thresholds += torch.arange(imprint.units) * 1e-6
    decoder = fit_decoder(network, imprint, sent, Stream(0))
    shown = imprint.show(torch.cat(guesses), decoder)
    inside, outside = (
        torch.cat([part.batch(torch.arange(len(part)))[0] for part in parts]).flatten(1)
        for parts in ([site.train], [site.validation, site.test])
    )
    found, by_chance = count_recovered(shown, inside, outside, 1.0)
    assert found >= 12
    assert by_chance <= 3
    assert compare_with_chance(shown, inside, outside, Stream(0))[2] <= 0.05
    assert [row["purpose"] for row in evil.desk.releases.read_entries()].count("train") == 5, "all of it is in the log"
