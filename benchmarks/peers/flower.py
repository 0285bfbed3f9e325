# mypy: disable-error-code="import-not-found,import-untyped,misc,no-untyped-call,untyped-decorator"
"""Flower's simulation on Ray: one CPU, so one worker; its FedAvg strategy; the training step is the user's."""

from __future__ import annotations

import logging
import os
from typing import Any

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks.peers.workload import asked, clients, keep, network, own_network, report, train

TASK = "POLYCLINIC_PEERS_TASK"
"""The workers' processes learn their task from the environment, which Ray hands down."""

client_app = ClientApp()
server_app = ServerApp()


@client_app.train()
def fit(message: Message, context: Context) -> Message:
    task = asked(os.environ[TASK].split("\n"))
    module = own_network(task.work, task.tuned)
    module.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    client = clients(task.work, task.folder)[int(context.node_config["partition-id"])]
    train(module, client, task.work.batch)
    content = RecordDict()
    content["arrays"] = ArrayRecord(module.state_dict())
    content["metrics"] = MetricRecord({"num-examples": len(client[1])})
    return Message(content=content, reply_to=message)


class Reporting(FedAvg):
    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        arrays, metrics = super().aggregate_train(server_round, replies)
        report(server_round)
        return arrays, metrics


@server_app.main()
def serve(grid: Grid, _: Context) -> None:
    task = asked(os.environ[TASK].split("\n"))
    work = task.work
    strategy = Reporting(
        fraction_train=work.cohort / work.clients,
        fraction_evaluate=0.0,
        min_train_nodes=work.cohort,
        min_available_nodes=work.clients,
    )
    result = strategy.start(grid, ArrayRecord(network(work).state_dict()), num_rounds=task.rounds)
    keep(result.arrays.to_torch_state_dict().values(), task.folder)


def main() -> None:
    task = asked()
    os.environ[TASK] = "\n".join(task.arguments())
    logging.disable(logging.INFO)
    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=task.work.clients,
        backend_config={"init_args": {"num_cpus": 1}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )


if __name__ == "__main__":
    # By its own name, so that Ray's workers import these functions instead of unpickling them for every task.
    from benchmarks.peers import flower

    flower.main()
