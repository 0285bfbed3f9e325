# mypy: disable-error-code="import-not-found,import-untyped,misc,no-untyped-call"
"""FedLab: its standalone pipeline, its synchronous server, its serial SGD trainer with the step that is in it."""

from __future__ import annotations

import logging
from typing import Any

from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.contrib.dataset.basic_dataset import BaseDataset, FedDataset
from fedlab.core.standalone import StandalonePipeline
from torch.utils.data import DataLoader

from benchmarks.peers.workload import LR, Task, asked, clients, keep, network, report, train


class Mapped(FedDataset):
    def __init__(self, task: Task) -> None:
        self.data = clients(task.work, task.folder)

    def get_dataloader(self, client: int, batch_size: int) -> Any:
        return DataLoader(BaseDataset(*self.data[client]), batch_size, shuffle=True)


class Tuned(SGDSerialClientTrainer):
    """FedLab flattens weights in a way that channels last does not allow: so another network is trained, and copied."""

    def __init__(self, task: Task) -> None:
        super().__init__(network(task.work), task.work.clients)
        self.trained = network(task.work, tuned=True)

    def train(self, model_parameters: Any, train_loader: Any) -> Any:
        self.set_model(model_parameters)
        self.trained.load_state_dict(self._model.state_dict())
        train(self.trained, (train_loader.dataset.x, train_loader.dataset.y), self.batch_size)
        self._model.load_state_dict(self.trained.state_dict())
        return [self.model_parameters]


class Reporting(StandalonePipeline):
    def evaluate(self) -> None:
        """Called at the end of every round; nobody evaluates here."""
        report(self.handler.round)


def main() -> None:
    logging.disable(logging.INFO)
    task = asked()
    trainer = Tuned(task) if task.tuned else SGDSerialClientTrainer(network(task.work), task.work.clients)
    trainer.setup_dataset(Mapped(task))
    trainer.setup_optim(1, task.work.batch, LR)
    share = task.work.cohort / task.work.clients
    handler = SyncServerHandler(network(task.work), task.rounds, share)
    Reporting(handler, trainer).main()
    keep(handler.model.parameters(), task.folder)


if __name__ == "__main__":
    main()
