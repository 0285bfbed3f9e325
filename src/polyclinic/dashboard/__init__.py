"""The board: a live page of a run or a comparison. It reads the folder and writes nothing."""

from polyclinic.dashboard.follow import Follower
from polyclinic.dashboard.server import BoardServer, open_board

__all__ = ["BoardServer", "Follower", "open_board"]
