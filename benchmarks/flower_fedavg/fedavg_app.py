"""FedAvg of MobileNetV2 by Flower's own means and without training: what a round of its own costs."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torchvision.models import mobilenet_v2

client = ClientApp()
server = ServerApp()


@client.train()
def train(message: Message, _: Context) -> Message:
    """What came goes back, by way of a network's weights, as every client does it."""
    network = mobilenet_v2(num_classes=10)
    network.load_state_dict(next(iter(message.content.array_records.values())).to_torch_state_dict())
    metrics = MetricRecord({"num-examples": 1})
    return Message(RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": metrics}), reply_to=message)


class Timed(FedAvg):
    """Notes when each round begins and when it is aggregated."""

    times: list[float]

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self.times.append(time.time())
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        result = super().aggregate_train(server_round, replies)
        self.times.append(time.time())
        return result


@server.main()
def main(grid: Grid, context: Context) -> None:
    strategy = Timed(fraction_evaluate=0.0, min_train_nodes=2, min_available_nodes=2)
    strategy.times = []
    start = ArrayRecord(mobilenet_v2(num_classes=10).state_dict())
    strategy.start(grid, start, num_rounds=int(context.run_config["rounds"]))
    seconds = [end - begin for begin, end in zip(strategy.times[::2], strategy.times[1::2], strict=True)]
    Path(str(context.run_config["times"])).write_text(" ".join(f"{value:.3f}" for value in seconds))
