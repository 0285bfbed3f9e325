"""What a server looks after while it runs: keys and certificates that change, and certificates that will end."""

from __future__ import annotations

import configparser
import json
import os
import shutil
import stat
import sys
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="needs the extra polyclinic[flower]")

from polyclinic.core.types import SiteId
from polyclinic.deploy.config import ServerConfig
from polyclinic.deploy.notices import ATTENTION, Notifier
from polyclinic.deploy.provisioning.certificates import PublicKey, read_certificate
from polyclinic.deploy.provisioning.provision import add_site, revoke_site, rotate_server, rotate_site
from polyclinic.deploy.recipe_queue import RecipeQueue
from polyclinic.deploy.upkeep import COPYING, Upkeep, site_warnings
from polyclinic.storage.run_folder import RunFolder


class Registered:
    """Takes keys, and remembers them; `said` and `called` hold what was reported, and to whom."""

    def __init__(self, kits: Path) -> None:
        file = kits / "server" / "server.yaml"
        self.revoked: list[str] = []
        self.sites: list[SiteId] = []
        self.certificates: list[Path] = []
        self.said: list[str] = []
        self.called: list[str] = []
        self.upkeep = Upkeep(
            ServerConfig.load(file),
            file,
            self,
            lambda certificate, _: self.certificates.append(certificate),
            self.said.append,
            self.called.append,
        )

    def revoke_keys(self, revoked: Iterable[tuple[PublicKey, str]]) -> list[str]:
        self.revoked = [whose for _, whose in revoked]
        return []

    def register_keys(self, keys: Mapping[SiteId, Path]) -> list[str]:
        self.sites = list(keys)
        return []


def test_changed_files_are_taken_and_unchanged_ones_are_left_alone(kits: Path) -> None:
    found = Registered(kits)
    found.upkeep.look()
    assert (found.sites, found.certificates, found.said) == ([], [], [])
    rotate_server(kits)
    add_site(kits, "dune")
    found.upkeep.look()
    assert found.sites[-1] == "dune"
    assert len(found.certificates) == 1
    found.upkeep.look()  # now with the key of dune among the files that are watched
    taken = len(found.certificates)
    assert [sentence for sentence in found.said if "shows its new certificate" in sentence] == found.said
    found.upkeep.look()
    assert len(found.certificates) == taken


def test_a_revoked_key_is_cut_off_even_if_the_rest_of_the_kit_is_half_copied(kits: Path) -> None:
    found, file = Registered(kits), kits / "server" / "server.yaml"
    revoke_site(kits, "hill")
    file.write_text(file.read_text()[:20])
    for number in range(1, 2 * COPYING):
        found.upkeep.look()
        assert found.revoked[0].startswith("the key of hill that was revoked")
        assert len(found.called) == (number >= COPYING), "files that are being copied are no trouble for some seconds"
    assert found.said[0].startswith("the changed files are not taken: server.yaml")
    assert found.sites == []


def test_a_certificate_without_its_key_is_not_taken_until_the_key_is_there(kits: Path) -> None:
    found, server = Registered(kits), kits / "server"
    shutil.copytree(server, kits / "before")
    rotate_server(kits)
    new = (server / "server.key").read_bytes()
    shutil.copy2(kits / "before" / "server.key", server / "server.key")
    found.upkeep.look()
    assert found.certificates == []
    (server / "server.key").write_bytes(new)
    found.upkeep.look()
    assert found.certificates == [server / "server.crt"]


def test_the_end_of_a_certificate_is_announced_thirty_days_ahead_once_a_day(kits: Path) -> None:
    found, end = Registered(kits), read_certificate(kits / "server" / "server.crt").not_valid_after_utc
    hours = [end - timedelta(days=31) + timedelta(hours=6) * number for number in range(4 * 32)]
    for now in hours:
        found.upkeep.look(now)
    days = [sentence for sentence in found.said if "the certificate of the server ends on" in sentence]
    assert len(days) == 31
    assert "in 30 days; run `polyclinic provision rotate KITS server`" in days[0]
    assert "in 0 days" in days[-1]
    assert found.called == [sentence.removeprefix("warning: ") for sentence in found.said]
    found.upkeep.look(end + timedelta(days=1))
    assert "ended on" in found.said[-1]


def test_a_site_is_warned_of_both_certificates(kits: Path) -> None:
    authority = kits / "sites" / "hill" / "ca.crt"
    end = read_certificate(authority).not_valid_after_utc
    soon, early = end - timedelta(days=10), end - timedelta(days=40)
    assert site_warnings(authority, None, early) == []
    assert site_warnings(None, soon + timedelta(days=5), soon) == [
        f"the server's certificate ends on {soon + timedelta(days=5):%Y-%m-%d}, in 5 days; ask the coordinator to run "
        "`polyclinic provision rotate KITS server`"
    ]
    (sentence,) = site_warnings(authority, None, soon)
    assert sentence == f"ca.crt ends on {end:%Y-%m-%d}, in 10 days; ask the coordinator for a new kit"


def test_a_command_is_called_with_the_event_and_one_line(tmp_path: Path) -> None:
    program, told = tmp_path / "notice", tmp_path / "told"
    program.write_text(
        f"#!{sys.executable}\nimport sys, json; open({str(told)!r}, 'a').write(json.dumps(sys.argv[1:]))"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    Notifier([str(program), "--urgent"]).send_and_wait(ATTENTION, "hill; $(touch x) is\naway " + "y" * 9999)
    words = json.loads(told.read_text())
    assert words[:2] == ["--urgent", ATTENTION]
    assert words[2].startswith("hill; $(touch x) is away y")
    assert len(words[2]) == 500
    for command in ([str(tmp_path / "not there")], ["false"], []):
        Notifier(command).send_and_wait(ATTENTION, "disturbs nobody")


def test_recipes_are_played_by_name_and_a_failed_one_again_when_it_changes(tmp_path: Path) -> None:
    queue = RecipeQueue(tmp_path / "recipes", tmp_path / "runs")
    assert queue.next_recipe() is None
    (tmp_path / "recipes").mkdir()
    first, second = (tmp_path / "recipes" / name for name in ("a.yaml", "b.yaml"))
    for path in (second, first):
        path.write_text("rounds: 1")
    assert queue.next_recipe() == first
    assert queue.set_aside(first, "a key is unknown")
    assert queue.next_recipe() == second
    assert queue.waiting_recipes() == []
    queue.run_folder(second).mkdir(parents=True)
    RunFolder(queue.run_folder(second)).result.write_text("{}")
    assert queue.next_recipe() is None
    os.utime(first, ns=(1, 1))
    assert queue.next_recipe() == first
    assert RecipeQueue(queue.folder, queue.out).next_recipe() == first


def test_a_recipe_that_waits_for_sites_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After some minutes, or soon if a site has connected or gone; people are told once."""
    queue, path, now = RecipeQueue(tmp_path, tmp_path / "runs"), tmp_path / "a.yaml", [1000.0]
    monkeypatch.setattr("polyclinic.deploy.recipe_queue.time", SimpleNamespace(monotonic=lambda: now[0]))
    path.write_text("rounds: 1")
    assert queue.set_aside(path, "hill has been away for 31 s", True, "harbour")
    assert queue.waiting_recipes() == ["a.yaml"]
    for seconds, sites, due in ((9, "both", False), (11, "harbour", False), (11, "both", True), (301, "harbour", True)):
        now[0] = 1000.0 + seconds
        assert (queue.next_recipe(sites) == path) is due
    assert not queue.set_aside(path, "hill has been away for 32 s", True, "harbour")
    assert queue.set_aside(path, "hill refused", True, "harbour")


def test_a_rotated_and_a_revoked_key_are_told_apart_from_a_new_site(kits: Path) -> None:
    found = Registered(kits)
    rotate_site(kits, "harbour")
    revoke_site(kits, "hill")
    found.upkeep.look()
    assert sorted(word.split(" that was ")[0] for word in found.revoked) == ["the key of harbour", "the key of hill"]
    assert "hill" not in found.sites
    assert "harbour" in found.sites


@pytest.mark.parametrize(
    ("unit", "command", "capability"),
    [
        ("sites/hill/polyclinic-site.service", "", ""),
        ("server/polyclinic-server.service", " recipes --out runs", "CAP_NET_BIND_SERVICE"),
    ],
)
def test_a_service_starts_again_for_ever_and_may_do_nothing_else(
    unit: str, command: str, capability: str, kits: Path
) -> None:
    """A site has no capability at all; a server may listen on a port below 1024."""
    found = configparser.ConfigParser(interpolation=None, strict=True)
    found.optionxform = str  # type: ignore[assignment, method-assign]
    found.read(kits / unit)
    service = found["Service"]
    assert found["Unit"]["StartLimitIntervalSec"] == "0"
    assert (service["Restart"], service["LimitNOFILE"]) == ("always", "65536")
    assert service["ExecStart"] == f"/bin/sh {service['WorkingDirectory']}/start.sh{command}", "which checks the kit"
    assert (service["AmbientCapabilities"], service["CapabilityBoundingSet"]) == (capability, capability)
    assert service["NoNewPrivileges"] == "true"
