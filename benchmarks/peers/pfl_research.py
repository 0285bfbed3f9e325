# mypy: disable-error-code="import-not-found,import-untyped,misc,no-untyped-call,type-arg"
"""pfl-research: its simulated backend and FederatedAveraging; the training step is pfl's own."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel

from benchmarks.peers.workload import LR, Network, Task, asked, clients, keep, network, report


class WithLoss(torch.nn.Module):
    """pfl asks the module for `loss` and `metrics`; it always evaluates in round 0, so metrics cost nothing here."""

    def __init__(self, module: Network) -> None:
        super().__init__()
        self.module = module

    def loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.train()
        return F.cross_entropy(self.module(images), labels)

    def metrics(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        return {"images": Weighted(len(labels), len(labels))}


class Reporting(TrainingProcessCallback):
    def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
        report(central_iteration + 1)
        return False, Metrics()


def cohorts(task: Task) -> Any:
    data = clients(task.work, task.folder)
    sampler = get_user_sampler("minimize_reuse", list(range(task.work.clients)))
    return FederatedDataset(lambda user: PyTorchTensorDataset(data[user], user_id=str(user)), sampler)


def main() -> None:
    logging.disable(logging.INFO)
    task = asked()
    pytorch_ops._DEFAULT_DEVICE = torch.device("cpu")
    module = WithLoss(network(task.work, task.tuned))
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    data = cohorts(task)
    backend = SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByDatapoints()])
    asked_of_all = NNAlgorithmParams(
        central_num_iterations=task.rounds,
        evaluation_frequency=task.rounds + 1,
        train_cohort_size=task.work.cohort,
        val_cohort_size=None,
    )
    step = NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LR, local_batch_size=task.work.batch)
    FederatedAveraging().run(asked_of_all, backend, model, step, callbacks=[Reporting()])
    keep(module.parameters(), task.folder)


if __name__ == "__main__":
    main()
