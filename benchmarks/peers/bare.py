"""The plain PyTorch loop that most people would write: load, train, add up, divide."""

from __future__ import annotations

import random

import torch

from benchmarks.peers.workload import asked, clients, keep, network, report, train


def main() -> None:
    task = asked()
    work, data = task.work, clients(task.work, task.folder)
    module = network(work, task.tuned)
    weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    for number in range(task.rounds):
        total = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        for client in random.sample(range(work.clients), work.cohort):
            module.load_state_dict(weights)
            train(module, data[client], work.batch)
            for name, tensor in module.state_dict().items():
                total[name] += tensor / work.cohort
        weights = total
        report(number + 1)
    keep(weights.values(), task.folder)


if __name__ == "__main__":
    main()
