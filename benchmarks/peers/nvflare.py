# mypy: disable-error-code="import-not-found,import-untyped,misc,no-untyped-call"
"""NVFlare's simulator: its FedAvg recipe; the training step is the user's, in a script of the client API.

With fewer threads than sites the simulator starts a new process, and torch in it, for every task (4 s each). So here it
has as many sites as a round has clients, each in a process that stays, and a site plays another client every round;
they take turns at training, so that one trains at a time, as with everybody else.
NVFlare hands the script a round's number with each task: the first task of a round says that the ones before are over.
"""

from __future__ import annotations

import fcntl
import os
import random
import sys

import torch

from benchmarks.peers.workload import NETWORKS, Task, asked, clients, keep, network, own_network, report, train

TASK = "POLYCLINIC_PEERS_TASK"


def client() -> None:
    """What every client runs."""
    import nvflare.client as flare

    task = asked(os.environ[TASK].split("\n"))
    module = own_network(task.work, task.tuned)
    flare.init()
    seat = int(flare.get_site_name().removeprefix("site-")) - 1
    while flare.is_running():
        received = flare.receive()
        if received is None:
            break
        report(received.current_round)
        data = clients(task.work, task.folder)[cohort(task, received.current_round)[seat]]
        module.load_state_dict(received.params)
        with open(task.folder / "turn", "w") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            train(module, data, task.work.batch)
        flare.send(flare.FLModel(params=module.state_dict(), meta={"NUM_STEPS_CURRENT_ROUND": len(data[1])}))


def cohort(task: Task, number: int) -> list[int]:
    """The clients of a round: every site's process draws the same ones."""
    return random.Random(number).sample(range(task.work.clients), task.work.cohort)


def simulate(task: Task) -> None:
    from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
    from nvflare.recipe import SimEnv

    kind = NETWORKS[task.work.model]
    recipe = FedAvgRecipe(
        name="fedavg",
        model={"class_path": f"{kind.__module__}.{kind.__name__}", "args": {"size": task.work.size}},
        min_clients=task.work.cohort,
        num_rounds=task.rounds,
        train_script=__file__,
    )
    where = task.folder / "nvflare"
    recipe.execute(SimEnv(num_clients=task.work.cohort, num_threads=task.work.cohort, workspace_root=str(where)))
    (found,) = where.rglob("FL_global_model.pt")
    weights = torch.load(found, weights_only=True)["model"]
    keep((weights[name] for name, _ in network(task.work).named_parameters()), task.folder)


if __name__ == "__main__":
    if TASK in os.environ:
        client()
    else:
        os.environ[TASK] = "\n".join(asked().arguments())
        simulate(asked(sys.argv[1:]))
