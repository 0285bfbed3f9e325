"""What a round costs between processes: ours over Flower, and Flower's own FedAvg, on this machine, in turn.

    python -m benchmarks.flower [--turns 2] [--rounds 5] [--theirs 2] [--sites 2]

MobileNetV2 (262 tensors), no training, TLS and signed requests on both sides. A round of ours: encode for every site,
send, each site decodes and encodes, receive, decode, average. Theirs: from `configure_train` to the end of
`aggregate_train` of an application that does the same (`flower_fedavg`).
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.deploy.child_process import ChildProcess

from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.core.jobs import Failure, Federation, Update
from polyclinic.core.options import Training
from polyclinic.core.rng import Stream
from polyclinic.core.types import SiteId
from polyclinic.deploy.config import FederationConfig as Kits, ServerConfig, ServerSection
from polyclinic.deploy.processes import SiteRegistration, open_server, serve_site
from polyclinic.deploy.provisioning.provision import provision_federation
from polyclinic.deploy.site.config import SiteConfig
from polyclinic.federation.mailbox import Outbox
from polyclinic.models import build_model
from polyclinic.storage import messages
from polyclinic.training.network import copy_module_weights

BIN = Path(sys.executable).parent
APP = Path(__file__).with_name("flower_fedavg")


def main() -> None:
    if sys.argv[1:2] == ["site"]:
        serve_site(SiteConfig.load(Path(sys.argv[2])), echo, print)
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--theirs", type=int, default=2)
    parser.add_argument("--sites", type=int, default=2)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        compare(given, Path(folder), stack)


def compare(given: argparse.Namespace, folder: Path, stack: ExitStack) -> None:
    sites = tuple(f"site-{number:02}" for number in range(1, given.sites + 1))
    kits = folder / "kits"
    provision_federation(
        Kits(federation="bench", server=ServerSection(host="127.0.0.1", port=free_port()), sites=sites), kits
    )
    reception = stack.enter_context(open_server(ServerConfig.load(kits / "server" / "server.yaml")))
    for site in sites:
        command = [sys.executable, "-m", "benchmarks.flower", "site", str(kits / "sites" / site / "site.yaml")]
        stack.enter_context(ChildProcess(command, folder / f"{site}.log"))
    theirs = Theirs(kits, sites, folder, stack)
    reception.wait_for_sites(120, len(sites), print)
    times: dict[str, list[float]] = {"ours": [], "Flower's": []}
    play(reception, sites, 2)
    for turn in range(given.turns):
        times["ours"] += play(reception, sites, given.rounds)
        times["Flower's"] += theirs.play(given.theirs)
        print(f"turn {turn + 1}: { ({name: [round(value, 2) for value in found] for name, found in times.items()}) }")
    ours, flowers = (statistics.median(times[name]) for name in times)
    print(f"{given.sites} sites, seconds per round (median): ours {ours:.2f}, Flower's {flowers:.2f}")
    print(f"ratio {ours / flowers:.3f}; the bar is 0.4")


def echo(data: bytes) -> bytes:
    message = messages.decode(data)
    return messages.encode({**message.fields, "examples": 1}, message.tensors)


def play(reception: SiteRegistration, sites: tuple[SiteId, ...], rounds: int) -> list[float]:
    """Rounds of FedAvg in which nobody trains."""
    module = build_model("mobilenet_v2", classes=10, channels=3, size=64, seed=Stream(0))
    algorithm = FedAvg(Training())
    state = algorithm.init(Federation(tuple(map(str, range(10))), dict.fromkeys(sites, 1), copy_module_weights(module)))
    seconds = []
    for round in range(1, rounds + 1):
        begun = time.perf_counter()
        fields: Mapping[SiteId, Mapping[str, Any]] = {
            site: {"run": "b", "round": round, "site": site} for site in sites
        }
        outbox = Outbox(fields, lambda site: algorithm.broadcast(state, site))  # noqa: B023
        state = algorithm.aggregate(state, updates(reception, round, outbox))
        seconds.append(time.perf_counter() - begun)
    return seconds


def updates(reception: SiteRegistration, round: int, outbox: Outbox) -> Iterator[Update]:
    for site, answer in reception.engine.exchange(round, outbox, 120):
        if not isinstance(answer, bytes):
            raise RuntimeError(f"{site}: {answer.sentence if isinstance(answer, Failure) else 'no bytes'}")
        yield Update(messages.decode(answer).tensors, 1, site)


class Theirs:
    """A SuperLink and SuperNodes as Flower's manual says, with TLS and keys of the same kits."""

    def __init__(self, kits: Path, sites: tuple[SiteId, ...], folder: Path, stack: ExitStack) -> None:
        self.home, self.folder, server = folder / "flower", folder, kits / "server"
        self.home.mkdir()
        at = f"127.0.0.1:{free_port()}"
        connection = f'[superlink]\ndefault = "bench"\n\n[superlink.bench]\naddress = "{at}"\n'
        (self.home / "config.toml").write_text(f'{connection}root-certificates = "{server / "ca.crt"}"\n')
        self.environment = {"FLWR_HOME": str(self.home), "PATH": f"{BIN}:{os.environ['PATH']}"}
        shutil.copytree(APP, folder / "app", ignore=shutil.ignore_patterns("__pycache__"))
        tls = ["--ssl-certfile", server / "server.crt", "--ssl-keyfile", server / "server.key"]
        tls += ["--ssl-ca-certfile", server / "ca.crt", "--enable-supernode-auth"]
        database = ["--database", folder / "link.db"]
        self._start(stack, "superlink", "flower-superlink", "--host", "127.0.0.1", "--port", at[10:], *tls, *database)
        wait_for(at)
        for site in sites:
            self._run("flwr", "supernode", "register", server / "sites" / f"{site}.pub", "bench")
            key = ["--auth-supernode-private-key", kits / "sites" / site / "site.key", "--port", free_port()]
            known = ["--superlink", at, "--root-certificates", server / "ca.crt"]
            self._start(stack, site, "flower-supernode", *known, *key)

    def play(self, rounds: int) -> list[float]:
        times = self.folder / "times"
        times.unlink(missing_ok=True)
        self._run("flwr", "run", self.folder / "app", "bench", "--run-config", f'rounds={rounds} times="{times}"')
        begun = time.monotonic()
        while not times.exists():
            if time.monotonic() > begun + 300:
                raise RuntimeError((self.folder / "superlink.flower.log").read_text()[-3000:])
            time.sleep(0.5)
        time.sleep(3)
        return [float(word) for word in times.read_text().split()]

    def _start(self, stack: ExitStack, name: str, *command: object) -> None:
        program, *rest = map(str, command)
        log = self.folder / f"{name}.flower.log"
        stack.enter_context(ChildProcess([str(BIN / program), *rest], log, self.environment))

    def _run(self, *command: object) -> None:
        program, *rest = map(str, command)
        environment = {**os.environ, **self.environment}
        found = subprocess.run([str(BIN / program), *rest], env=environment, capture_output=True, text=True)
        if found.returncode:
            raise RuntimeError(found.stdout + found.stderr)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def wait_for(at: str) -> None:
    host, port = at.split(":")
    for _ in range(300):
        with socket.socket() as probe:
            if probe.connect_ex((host, int(port))) == 0:
                return
        time.sleep(0.2)
    raise RuntimeError(f"nothing listens at {at}")


if __name__ == "__main__":
    main()
