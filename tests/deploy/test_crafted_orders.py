"""What a kit's rules do not stop: crafted weights in later rounds of an approved recipe, at a real message handler.

This is measured and said (docs/attack.md, the site's README), and bounded by a budget alone. The attack itself is
tested in tests/analysis/attack/test_crafted_weights.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from polyclinic.analysis.attack.crafted_weights import find_imprint, fit_decoder
from polyclinic.analysis.attack.recovery import compare_with_chance, count_recovered
from polyclinic.core import Bundle, DataError, Refused
from polyclinic.core.rng import Stream
from polyclinic.deploy.config import FederationConfig, ServerSection
from polyclinic.deploy.provisioning.provision import provision_federation
from polyclinic.deploy.site.message_handler import SiteMessageHandler
from polyclinic.federation.secure_aggregation.cohort import MASKS, hash_kinds
from polyclinic.federation.site_runner import SiteRunner
from polyclinic.privacy.transforms.mask import SUM
from polyclinic.storage import messages
from tests.deploy.example_sites import SITES, asked, recipe, said, write_hospitals
from tests.deploy.masking import FIVE, masking_desks
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


def test_weights_that_drive_a_masked_update_out_of_range_are_answered_like_any_others(tmp_path: Path) -> None:
    """A refusal, or a figure in one, would tell a server that chooses the weights what a masked update was."""
    write_hospitals(tmp_path, FIVE)
    made = recipe(rounds=5, stages=[{"name": "mask"}], evaluate__every=0, training={"batch": 4})
    desks = masking_desks(tmp_path, "desks", FIVE)
    shape = {"classes": ["benign", "malignant"], "channels": 1, "size": 8, "sites": [*FIVE], "plan": None}
    for desk in desks.values():
        assert said(desk.answer_message(asked("begin", desk.site, made, {**shape, "run": "run-1"})))["ready"]
        desk.note_absence()
    part = desks["fjord"]._open
    assert part is not None
    honest = part.broadcast_templates[""]
    crafted = {**honest, "model": {name: torch.full_like(t, 600.0) for name, t in honest["model"].items()}}

    def answer(desk: SiteMessageHandler, purpose: str, masks: dict[str, Any], weights: Bundle) -> messages.Message:
        where = {"run": "run-1", "site": desk.site, "seed": made.seed, "purpose": purpose, "round": 2, "rounds": 5}
        order = {**where, "lr": made.training.optimiser.lr, "parts": [], "oldest_snapshot": 0, "memory_round": 0}
        return messages.decode(desk.answer_message(messages.encode({**order, MASKS: masks}, weights)))

    signed = {"received": hash_kinds(crafted), "attempt": 0}
    keys = {site: answer(desks[site], "keys", signed, {}).fields[MASKS] for site in FIVE}
    reply = answer(desks["fjord"], "train", {"keys": keys, "sites": sorted(FIVE)}, crafted)
    assert {"failure", "why"} & set(reply.fields) == set()
    assert reply.fields["examples"] == 8
    assert list(reply.tensors["model"]) == [SUM]
    assert any("were brought into range" in line for line in desks["fjord"].site_log.read_lines()), "its people know"


@pytest.mark.parametrize("fault", [Refused("finite", "17 values are NaN"), DataError("image 17 of 23 is broken")])
def test_what_goes_wrong_while_images_are_at_work_is_one_sentence(
    fault: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ServerSection(host="127.0.0.1", port=9443)
    provision_federation(FederationConfig(federation="north-sea", server=server, sites=SITES), tmp_path / "kits")
    (tmp_path / "scans").mkdir()
    evil = attack(tmp_path / "kits", tmp_path / "state", write_scans(tmp_path / "scans", 0))
    assert evil.begin()["ready"]

    def fail(*_: object) -> None:
        raise fault

    monkeypatch.setattr(SiteRunner, "run_job", fail)
    reply = evil.order("train", 1, evil.first_weights())
    assert (reply["failure"], reply["why"]) == ("error", "hill cannot do this; its own log says why")
    assert "17" in evil.desk.site_log.read_lines()[-1], "and in its own log the reason"


def test_a_second_masked_run_of_one_seed_is_refused_whatever_its_name(tmp_path: Path) -> None:
    """What sites train follows from the seed: two sums, one without a site, would differ by its update."""
    write_hospitals(tmp_path, FIVE)
    desk = masking_desks(tmp_path, "desks", FIVE)["fjord"]
    shape = {"classes": ["benign", "malignant"], "channels": 1, "size": 8, "sites": [*FIVE], "plan": None}
    settings: dict[str, Any] = {"stages": [{"name": "mask"}], "evaluate__every": 0}

    def begin(run: str, **changes: Any) -> str:
        fields = said(
            desk.answer_message(asked("begin", "fjord", recipe(**settings, **changes), {**shape, "run": run}))
        )
        return str(fields.get("why", fields.get("ready")))

    known = (
        "agreement: the masked run run-1 with seed 0 has begun at fjord before, and a second sum of the same updates "
        "could be compared with its own; give the recipe another seed, and have it approved anew"
    )
    assert [begin("run-1"), begin("run-1")] == ["True", "True"], "the same run goes on"
    desk = masking_desks(tmp_path, "desks", FIVE)["fjord"]
    assert begin("run-1") == "True", "also after a restart"
    assert [begin("run-2"), begin("run-2", rounds=3)] == [known, known]
    assert said(desk.answer_message(messages.encode({"purpose": "end", "run": "run-1", "site": "fjord"}, {})))["ended"]
    assert [begin("run-1"), begin("run-2")] == [known, known], "also after its end, when its agreements are gone"
    assert begin("run-3", seed=1) == "True"
    settings["stages"] = []
    assert begin("run-4") == "True", "without masks nothing is hidden"
