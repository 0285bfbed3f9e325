"""What a round costs between processes: ours over Flower, and Flower's own FedAvg, on this machine, in turn.

    python -m benchmarks.flower [--turns 2] [--rounds 5] [--theirs 2] [--sites 2]
    python -m benchmarks.flower --load many     # 50 sites, messages of 2.5 kB: seconds a round
    python -m benchmarks.flower --load large    # 3 sites, ResNet-50 (94 MB a message): peak memory of the server

MobileNetV2 (262 tensors), no training, TLS and signed requests on both sides. A round of ours: encode for every site,
send, each site decodes and encodes, receive, decode, average. Theirs: from `configure_train` to the end of
`aggregate_train` of an application that does the same (`flower_fedavg`). With `--load` all sites are threads of one
process, and this process is the server alone.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
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
from polyclinic.deploy.flower.client import SiteConnection
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
    if sys.argv[1:2] == ["sites"]:
        attend_all(Path(sys.argv[2]))
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--theirs", type=int, default=2)
    parser.add_argument("--sites", type=int, default=0)
    parser.add_argument("--load", choices=LOADS)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        if given.load:
            measure_load(given, Path(folder), stack)
        else:
            given.sites = given.sites or 2
            compare(given, Path(folder), stack)


LOADS: dict[str, tuple[int, dict[str, Any]]] = {
    "many": (50, {"name": "linear", "classes": 2, "channels": 1, "size": 16}),
    "large": (3, {"name": "resnet50", "classes": 2, "channels": 3, "size": 64}),
}
"""The number of sites, and the model."""


def measure_load(given: argparse.Namespace, folder: Path, stack: ExitStack) -> None:
    count, model = LOADS[given.load]
    sites = tuple(f"site-{number:02}" for number in range(1, (given.sites or count) + 1))
    reception = stack.enter_context(open_server(ServerConfig.load(furnish(folder, sites) / "server" / "server.yaml")))
    command = [sys.executable, "-m", "benchmarks.flower", "sites", str(folder / "kits" / "sites")]
    stack.enter_context(ChildProcess(command, folder / "sites.log"))
    reception.wait_for_sites(300, len(sites), print)
    idle, begun = peak_megabytes(), time.process_time()
    seconds = play(reception, sites, given.rounds, **model)
    used = (time.process_time() - begun) / given.rounds
    print(f"{len(sites)} sites, {model['name']}: seconds a round {[round(value, 2) for value in seconds]}")
    print(
        f"server: CPU-seconds a round {used:.2f}; MB before the first round {idle:.0f}, at most {peak_megabytes():.0f}"
    )


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def attend_all(kits: Path) -> None:
    """Be all sites of a federation, each a thread."""
    for path in sorted(kits.glob("*/site.yaml")):
        site = SiteConfig.load(path)
        assert site.ca is not None
        assert site.key is not None
        site.folder.mkdir(parents=True, exist_ok=True)
        connection = SiteConnection(site.server, site.ca, site.key, site.folder, echo)
        threading.Thread(target=connection.serve_forever, daemon=True).start()
    threading.Event().wait()


def furnish(folder: Path, sites: tuple[SiteId, ...]) -> Path:
    """Make the kits of a federation, and return their folder."""
    server = ServerSection(host="127.0.0.1", port=free_port())
    provision_federation(Kits(federation="bench", server=server, sites=sites), folder / "kits")
    return folder / "kits"


def compare(given: argparse.Namespace, folder: Path, stack: ExitStack) -> None:
    sites = tuple(f"site-{number:02}" for number in range(1, given.sites + 1))
    kits = furnish(folder, sites)
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


def play(
    reception: SiteRegistration,
    sites: tuple[SiteId, ...],
    rounds: int,
    name: str = "mobilenet_v2",
    classes: int = 10,
    channels: int = 3,
    size: int = 64,
) -> list[float]:
    """Rounds of FedAvg in which nobody trains."""
    module = build_model(name, classes=classes, channels=channels, size=size, seed=Stream(0))
    algorithm = FedAvg(Training())
    state = algorithm.init(
        Federation(tuple(map(str, range(classes))), dict.fromkeys(sites, 1), copy_module_weights(module))
    )
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
        update = Update(messages.decode(answer).tensors, 1, site)
        del answer
        yield update
        update.tensors.clear()  # as `federation/rounds.py` does


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
