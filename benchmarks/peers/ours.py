"""Polyclinic: FedAvg through the round loop and the local engine, with ledger, metrics and a snapshot every round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.peers.workload import LR, Task, Workload, asked, clients, keep, network, report
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.core.jobs import Federation
from polyclinic.core.options import Optimiser, Training
from polyclinic.core.rng import Stream
from polyclinic.data.examples import Images, SiteData
from polyclinic.federation.engines.local import LocalEngine
from polyclinic.federation.progress import RoundOptions
from polyclinic.federation.rounds import Rounds
from polyclinic.federation.site_runner import SiteRunner
from polyclinic.models import build_model
from polyclinic.models.classifier import Classifier
from polyclinic.storage.journal import FolderJournal
from polyclinic.storage.site_memory import RamMemory
from polyclinic.training.network import LiveNetwork, copy_module_weights

MODELS = {"small": "small_cnn", "enh": "groupnorm_cnn", "mlp": "mlp"}


def sites(task: Task) -> dict[str, SiteData]:
    parts = {f"client-{number}": Images(*client) for number, client in enumerate(clients(task.work, task.folder))}
    return {name: SiteData(name, images, images, images) for name, images in parts.items()}


def classifier(work: Workload) -> Classifier:
    """Polyclinic's own network, with everybody's first weights."""
    module = build_model(MODELS[work.model], classes=10, channels=1, size=work.size, dropout=0.0, seed=Stream(0))
    with torch.no_grad():
        for ours, theirs in zip(module.parameters(), network(work).parameters(), strict=True):
            ours.copy_(theirs)
    return module


def main() -> None:
    task = asked()
    data, module = sites(task), classifier(task.work)
    algorithm = FedAvg(Training(Optimiser("sgd", LR), batch=task.work.batch))
    live = LiveNetwork(module)
    runners = {name: SiteRunner(name, site, algorithm, live, RamMemory()) for name, site in data.items()}
    federation = Federation(
        tuple("0123456789"), {n: len(s.train) for n, s in data.items()}, copy_module_weights(module)
    )
    rules = RoundOptions(rounds=task.rounds, cohort=task.work.cohort, evaluate_every=0)
    rounds = Rounds(federation, algorithm, LocalEngine(runners), rules, Reporting(task.folder / "run"))
    weights = rounds.play_all().state["model"]
    keep((weights[name] for name, _ in module.named_parameters()), task.folder)


class Reporting(FolderJournal):
    """A round is over once its snapshot lies on disk."""

    def save_snapshot(self, round: int, state: Any, progress: Mapping[str, Any]) -> None:
        super().save_snapshot(round, state, progress)
        report(round)


if __name__ == "__main__":
    main()
