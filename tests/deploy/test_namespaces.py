"""Two machines in spirit: the server and each site in a network of their own, with a cable to a common switch."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra polyclinic[flower]")

from polyclinic.deploy.status import read_status
from tests.deploy.example_sites import recipe
from tests.deploy.real_processes import Ward, furnish
from tests.driving import Ask

SITES = ("harbour", "hill")
ROLES = ("server", *SITES)
ADDRESSES = {role: f"10.77.0.{number}" for number, role in enumerate(ROLES, 1)}
PORT = 9443
NAMES = Path("/run/netns")
MARK = "polyclinic-"


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise OSError(f"`ip {' '.join(words)}`: {done.stderr.strip()}")


def remove_those_of(pid: int) -> None:
    """Namespaces, and with them the cables that end there."""
    for name in NAMES.glob(f"{MARK}{pid}-*"):
        with suppress(OSError):
            ip("netns", "del", name.name)


def remove_left_behind() -> None:
    """What a test that was killed could not remove."""
    for name in NAMES.glob(f"{MARK}*-*"):
        pid = int(name.name.split("-")[1])
        if not Path(f"/proc/{pid}").exists():
            remove_those_of(pid)


def lay_cables(prefix: str) -> dict[str, Path]:
    """A namespace for each role, and one for the switch; nothing of it touches the network of this machine."""
    switch = f"{prefix}switch"
    ip("netns", "add", switch)
    ip("-n", switch, "link", "add", "switch", "type", "bridge")
    ip("-n", switch, "link", "set", "switch", "up")
    for role, address in ADDRESSES.items():
        name = f"{prefix}{role}"
        ip("netns", "add", name)
        ip("-n", switch, "link", "add", role, "type", "veth", "peer", "name", "cable", "netns", name)
        ip("-n", switch, "link", "set", role, "master", "switch", "up")
        ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
        for device in ("lo", "cable"):
            ip("-n", name, "link", "set", device, "up")
    return {role: NAMES / f"{prefix}{role}" for role in ROLES}


@pytest.fixture
def networks() -> Iterator[dict[str, Path]]:
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip (Debian, Ubuntu: apt-get install iproute2)")
    remove_left_behind()
    try:
        try:
            found = lay_cables(f"{MARK}{os.getpid()}-")
        except OSError as error:
            pytest.skip(f"this machine lets no network namespaces be made, which takes root: {error}")
        yield found
    finally:
        remove_those_of(os.getpid())
        assert not list(NAMES.glob(f"{MARK}{os.getpid()}-*"))


def test_between_networks_the_result_is_the_simulations(networks: dict[str, Path], ask: Ask, tmp_path: Path) -> None:
    """Harbour's cable is not plugged in at first, which shows that there is no other way."""
    furnish(tmp_path, SITES, ADDRESSES["server"], PORT)
    found = recipe(rounds=2)
    with Ward(tmp_path, ask, networks) as ward:
        ip("-n", networks["harbour"].name, "link", "set", "cable", "down")
        server = ward.serve(found, "run")
        for site in SITES:
            ward.join(site)
        ward.until(lambda: present(tmp_path / "run") == ["hill"], "hill's arrival, alone")
        pids = [os.getpid(), server.pid, *ward.pids().values()]
        assert len({os.readlink(f"/proc/{pid}/ns/net") for pid in pids}) == 4, "each in a network of its own"
        ip("-n", networks["harbour"].name, "link", "set", "cable", "up")
        result, simulated = ward.play(found, "run", server)
        for process in ward.sites.values():
            assert f"connected to {ADDRESSES['server']}:{PORT}" in process.log.read_text()
            assert process.stop() == 0, ward.said()
    assert result.rounds == 2
    assert result.sha256 == simulated.sha256
    assert list(result.sites) == list(SITES)


def present(folder: Path) -> list[str]:
    told = read_status(folder) or {"sites": {}}
    return [site for site, there in told["sites"].items() if there["state"] == "connected"]
