# mypy: disable-error-code="import-not-found,import-untyped,misc,no-untyped-call"
"""PFLlib, from a copy of github.com/TsingZ0/PFLlib named by --pfllib: its FedAvg server and clients, its own step.

PFLlib drops a client's last, incomplete batch: on A it takes 6 steps where the others take 7. It would read a client's
file anew in every round; here it gets the mapped images that all get.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.peers.workload import LR, Task, asked, clients, keep, network, report

SOURCE = "POLYCLINIC_PEERS_PFLLIB"
OFF = (
    *("random_join_ratio", "time_select", "auto_break", "learning_rate_decay", "dlg_eval", "privacy", "dp_sigma"),
    *("client_drop_rate", "train_slow_rate", "send_slow_rate", "num_new_clients"),
)
UNUSED = ("top_cnt", "dlg_gap", "batch_num_per_client", "fine_tuning_epoch", "fine_tuning_epoch_new")


def options(task: Task) -> SimpleNamespace:
    """What PFLlib's command line would give: FedAvg, everything else off."""
    off = dict.fromkeys(OFF, 0)
    unused = dict.fromkeys(UNUSED, 1)
    return SimpleNamespace(
        **off,
        **unused,
        device="cpu",
        dataset="images",
        num_classes=10,
        algorithm="FedAvg",
        goal="speed",
        save_folder_name="items",
        time_threthold=1e9,
        eval_gap=1,
        global_rounds=task.rounds - 1,
        local_epochs=1,
        batch_size=min(task.work.batch, task.work.images),
        local_learning_rate=LR,
        learning_rate_decay_gamma=1.0,
        num_clients=task.work.clients,
        join_ratio=task.work.cohort / task.work.clients,
        model=network(task.work, task.tuned),
    )


def main() -> None:
    task = asked()
    sys.path.insert(0, str(Path(os.environ[SOURCE]).resolve() / "system"))
    os.chdir(task.folder)
    from utils import data_utils

    data = clients(task.work, task.folder)
    data_utils.read_client_data = lambda _, client, **__: list(zip(*data[client], strict=True))
    from flcore.servers.serveravg import FedAvg

    class Reporting(FedAvg):
        over = 0

        def evaluate(self, acc: Any = None, loss: Any = None) -> None:
            """PFLlib evaluates at least once and prints its best accuracy; nobody evaluates here."""
            self.rs_test_acc.append(0.0)

        def aggregate_parameters(self) -> None:
            super().aggregate_parameters()
            self.over += 1
            report(self.over)

        def save_results(self) -> None:
            """Nothing was evaluated."""

    server = Reporting(options(task), 0)
    server.train()
    keep(server.global_model.parameters(), task.folder)


if __name__ == "__main__":
    main()
