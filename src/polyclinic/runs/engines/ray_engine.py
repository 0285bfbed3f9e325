"""Many sites on a cluster or several GPUs: Flower's simulation on Ray carries our messages to Ray's actors.

Of Flower 1.41 this takes the backend of its Simulation Runtime, with one generic ClientApp for all sites. Its Grid is
left out: it polls ten times a second, and would report a dead actor as any other mistake. `run_simulation`, which sets
both up, is deprecated. An actor builds the sites' runners once, from the recipe and the data folder, as `Experiment`
does; what sites remember lies on disk, so any actor may serve any site. One that dies is started anew.

Whoever reaches Ray's ports may run programs, and Ray listens on all addresses: so a Ray of our own wants a token. It
starts no dashboard, sends nothing home, and ends with the engine.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
import tempfile
import traceback
from collections.abc import Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from itertools import islice
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import yaml

from polyclinic.config.recipe import Recipe
from polyclinic.core import EngineError, Failure, PolyclinicError, SiteId, Stream
from polyclinic.federation.engines import Answer
from polyclinic.federation.engines.flower_envelope import pack_message, unpack_message
from polyclinic.federation.engines.local import answer_or_failure, keep_freed_memory, parse_worker_reply
from polyclinic.federation.site_runner import SiteRunner
from polyclinic.runs.assemble import RunSetup, assemble, price_plan
from polyclinic.runs.networks import recipe_for_site
from polyclinic.runs.privacy_plan import noise_secret, write_noise
from polyclinic.runs.sites import load_sites
from polyclinic.storage.files import write_atomically
from polyclinic.storage.run_folder import RunFolder
from polyclinic.storage.site_memory import DiskMemory

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp

ABSENT = "pip install 'polyclinic[ray]'"
KIND, SITE = "kind", "site"
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
}
"""No telemetry, and no output of Ray's."""
OWN = {"RAY_AUTH_MODE": "token", "RAY_gcs_rpc_server_reconnect_timeout_s": "5", "RAY_worker_niceness": "0"}
"""For a Ray that we start: processes of a killed run end within seconds, and actors have normal priority."""
AGAIN = {"max_restarts": -1, "max_task_retries": 1}
"""A message whose actor dies is tried once more by the next one: what a site does for it has effect once. If that one
dies too, it seems to be what they die of."""


@dataclass(frozen=True)
class ActorSetup:
    """What an actor needs to run any site."""

    recipe: str
    data: Path | None
    folder: Path
    """The folder with the noise of a private run …"""
    memory: Path
    """… and the one with the sites' memory."""
    images: str
    """The fingerprint of the run's images."""
    device: str


def make_actor_setup(
    setup: RunSetup, folder: Path | None, data: Path | None, memory: Path, secret: Stream | None
) -> ActorSetup:
    """Return what actors need; a run without a `folder` keeps its noise in `memory`, for as long as the run lasts."""
    kept = folder or memory
    if folder is None and setup.plan is not None and secret is not None:
        write_noise(setup.plan, kept)
        write_atomically(RunFolder(kept).secret, f"{secret.seed:x}".encode(), mode=0o600)
    return ActorSetup(
        setup.recipe.to_yaml(),
        data and data.resolve(),
        kept.resolve(),
        memory.resolve(),
        setup.dataset.fingerprint,
        setup.networks.first.device.type,
    )


@cache
def build_runners(setup: ActorSetup) -> Mapping[SiteId, SiteRunner]:
    """Return the runners of all sites, in this process."""
    recipe = recipe_for_site(Recipe.from_values(yaml.safe_load(setup.recipe)), setup.device)
    torch.set_num_threads(recipe.engine.threads)
    keep_freed_memory()
    dataset = load_sites(recipe, setup.data)
    if dataset.fingerprint != setup.images:
        raise EngineError("the images there are not those that the run began with; give every machine the same data")
    run = assemble(recipe, dataset, lambda draft: price_plan(draft, setup.folder), setup.data)
    secret = noise_secret(recipe, setup.folder) if recipe.privacy is not None else None
    return run.make_runners(DiskMemory(setup.memory), secret)


def make_site_app(setup: ActorSetup) -> ClientApp:
    """Return the Flower app that answers the messages of all sites."""
    from flwr.app import ConfigRecord, Message
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.query()
    def answer(message: Message, context: Context) -> Message:
        kind, payload = serve_message(setup, str(context.node_config[SITE]), unpack_message(message))
        content = pack_message(payload)
        content[KIND] = ConfigRecord({KIND: kind})
        return Message(content, reply_to=message)

    return app


def serve_message(setup: ActorSetup, site: SiteId, data: bytes) -> tuple[str, bytes]:
    """Return the result of `answer_or_failure`, or "unfit" if this process cannot run the sites."""
    try:
        runner = build_runners(setup)[site]
    except PolyclinicError as error:
        return "unfit", str(error).encode()
    except Exception:
        return "bug", traceback.format_exc().encode()
    return answer_or_failure(runner, data)


def make_request(site: SiteId, node: int, data: bytes) -> tuple[Message, Context]:
    """Return a message to a site, and the context of its app."""
    from flwr.app import Context, Message, RecordDict
    from flwr.common.constant import PARTITION_ID_KEY, SUPERLINK_NODE_ID
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, SUPERLINK_NODE_ID
    return (
        Message(pack_message(data), node, "query"),
        Context(1, node, {PARTITION_ID_KEY: node, SITE: site}, RecordDict(), {}),
    )


def parse_reply(reply: Message) -> bytes | Failure:
    """Return a site's reply or failure."""
    kind, payload = str(reply.content[KIND][KIND]), unpack_message(reply)
    if kind == "unfit":
        raise EngineError(f"an actor of Ray's cannot run the sites: {payload.decode()}")
    return parse_worker_reply(kind, payload, "an actor of Ray's")


def actor_resources(workers: int, threads: int, cpus: int, gpus: int | None) -> tuple[int, float]:
    """Return the number of actors and each one's share of a GPU; `gpus`: None if they compute on CPUs.

    A whole number of shares make a GPU, so that no actor needs parts of two.
    """
    if gpus is None:
        return workers or max(1, cpus // threads), 0.0
    if not gpus:
        raise EngineError("Ray has no GPU here; set engine.device: cpu")
    return workers or gpus, 1 / ceil((workers or gpus) / gpus)


class RayEngine:
    """Runs sites in `workers` actors at once (0: one for each GPU, or for every `threads` CPUs)."""

    def __init__(self, assignment: ActorSetup, sites: Iterable[SiteId], workers: int, threads: int) -> None:
        for name in ("ray", "flwr"):
            if find_spec(name) is None:
                raise EngineError(f"the engine ray needs {name}, which is not installed; {ABSENT}")
        self.nodes = {site: number for number, site in enumerate(sites, 1)}
        self.resources = ExitStack()
        try:
            self.workers, share = self._connect(workers, threads, assignment.device == "cuda")
            self._start_actors(assignment, threads, share)
        except BaseException:
            self.close()
            raise

    def _connect(self, workers: int, threads: int, on_gpu: bool) -> tuple[int, float]:
        """Connect to the cluster that RAY_ADDRESS names, or start a Ray of our own on this machine."""
        address = os.environ.get("RAY_ADDRESS") or "local"
        os.environ.update(QUIET)
        options: dict[str, Any] = {}
        if address == "local":
            # Ray reads the token once in a process.
            os.environ.update({**OWN, "RAY_AUTH_TOKEN": secrets.token_hex(32), **os.environ})
            cpus, gpus = os.cpu_count() or 1, torch.cuda.device_count() if on_gpu else None
            actors, _ = actor_resources(workers, threads, cpus, gpus)
            place = self.resources.enter_context(tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True))
            options = {"num_cpus": actors * threads, "num_gpus": gpus or 0, "_temp_dir": place}
        else:
            _check_reachable(address)
        import ray

        if ray.is_initialized():
            raise EngineError("Ray already runs in this process; call ray.shutdown() before the run")
        self.resources.callback(ray.shutdown)
        ours = {name: value for name, value in os.environ.items() if name.startswith("POLYCLINIC_")}
        environment = {**QUIET, **ours, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            ray.init(
                address,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.CRITICAL,
                runtime_env={"env_vars": environment},
                **options,
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise EngineError(f"no Ray answers at {address} ({reason}); check RAY_ADDRESS, or unset it") from error
        found = cast(Any, ray).cluster_resources()
        return actor_resources(workers, threads, int(found.get("CPU", 1)), int(found.get("GPU", 0)) if on_gpu else None)

    def _start_actors(self, assignment: ActorSetup, threads: int, share: float) -> None:
        from flwr.server.superlink.fleet.vce.backend.raybackend import RayBackend
        from ray import kill

        logging.getLogger("flwr").setLevel(logging.CRITICAL)  # the round loop reports what fails
        self.backend = RayBackend({"client_resources": {"num_cpus": threads, "num_gpus": share, **AGAIN}})
        try:
            self.backend.build(partial(make_site_app, assignment))
        except ValueError:
            raise EngineError(
                f"no machine of Ray's has {threads} CPUs{' and a GPU' if share else ''} for an actor; lower "
                "engine.threads, or give Ray more"
            ) from None
        idle: list[Any] = cast(Any, self.backend.pool).pool
        for spare in idle[self.workers :]:
            kill(spare)
        del idle[self.workers :]
        self.workers = len(idle)
        self.threads = ThreadPoolExecutor(self.workers)
        self.resources.callback(self._stop_actors, list(idle))

    def _stop_actors(self, actors: list[Any]) -> None:
        """Stop actors before Ray: a thread that waits for one would wait for ever without it."""
        from ray import kill

        self.threads.shutdown(wait=False, cancel_futures=True)
        for actor in actors:
            kill(actor)
        self.threads.shutdown()

    def exchange(
        self, round: int, sent: Mapping[SiteId, bytes], deadline: float | None
    ) -> Iterable[tuple[SiteId, Answer]]:
        """Keep one message more than there are actors in flight, so that no actor is idle."""
        waiting = iter(sent)
        busy: dict[Future[Answer], SiteId] = {}
        while True:
            for site in islice(waiting, self.workers + 1 - len(busy)):
                busy[self.threads.submit(self._ask_actor, site, sent[site])] = site
            if not busy:
                return
            for done in wait(busy, return_when=FIRST_COMPLETED).done:
                yield busy.pop(done), done.result()

    def _ask_actor(self, site: SiteId, data: bytes) -> Answer:
        from ray.exceptions import RayError, RayTaskError

        try:
            reply, _ = self.backend.process_message(*make_request(site, self.nodes[site], data))
        except RayTaskError:
            raise
        except RayError as error:
            return Failure(
                "dead", f"two actors in turn ended over it ({type(error).__name__}); were they out of memory?"
            )
        return parse_reply(reply)

    def close(self) -> None:
        """Stop everything that was started."""
        self.resources.close()


def _check_reachable(address: str) -> None:
    """Fail at once if nothing listens there; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        if port.isdigit():
            socket.create_connection((host.removeprefix("ray://"), int(port)), timeout=5).close()
    except OSError as error:
        reason = error.strerror or error
        raise EngineError(f"no Ray answers at {address} ({reason}); check RAY_ADDRESS, or unset it") from None
