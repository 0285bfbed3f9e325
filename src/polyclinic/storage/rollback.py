"""Going back to an earlier round of a run that has not ended, for example to undo what a hostile site has done."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from polyclinic.core import StoreError
from polyclinic.storage.files import explain_os_errors, lock_folder
from polyclinic.storage.ledger import Ledger
from polyclinic.storage.run_folder import RunFolder
from polyclinic.storage.snapshots import SnapshotStore


@dataclass(frozen=True)
class Rollback:
    """What going back does, or has done."""

    run: str
    """The run's name in messages, under which sites know it."""
    round: int
    """The round whose state the run goes on from."""
    undone: int
    """The last round that will be played again."""
    between_sites: bool
    """Whether real sites take part, which ask their people where contents differ from those that they answered."""


def plan_rollback(path: Path, round: int) -> Rollback:
    """Return what `roll_back` would do to the run in this folder; raises `StoreError` if it could not."""
    folder = RunFolder(path)
    if not folder.ledger_file.exists():
        raise StoreError(f"{path} holds no run (ledger.jsonl is missing); give the folder that was named by --out")
    if folder.is_finished:
        raise StoreError(f"the run in {path} has ended, and its sites have deleted what they remember; start a new run")
    store = SnapshotStore(folder.snapshots)
    kept = store.rounds()
    if round not in kept:
        known = ", ".join(map(str, kept)) or "none"
        raise StoreError(f"{folder.snapshots} has no snapshot of round {round}; choose one of: {known}")
    run = str(store.read(round).fields["progress"]["run"])
    return Rollback(run, round, kept[-1], folder.enrolment.exists())


def roll_back(path: Path, round: int) -> Rollback:
    """Let a run go on from the snapshot after `round` the next time it is continued.

    Later snapshots, and what was heard in later masked rounds, are deleted. The ledger keeps all its rows, and gets one
    about this: what the undone rounds cost, in privacy too, stays charged. A crash on the way leaves a folder for which
    the same call can be repeated.
    """
    plan_rollback(path, round)  # before a lock file is left in a folder that is no run's
    with lock_folder(path):
        found, folder = plan_rollback(path, round), RunFolder(path)
        store = SnapshotStore(folder.snapshots)
        Ledger(folder.ledger_file).append(event="rolled back", round=round, undone=found.undone)
        with explain_os_errors(folder.snapshots):
            for later in reversed([number for number in store.rounds() if number > round]):
                store.path_of(later).unlink(missing_ok=True)
            for masked in folder.masks.glob("*"):  # sums of undone rounds, from which a resume would go on
                if int(masked.name.partition("-")[0]) > round:
                    shutil.rmtree(masked)
        return found
