"""A live page of a run or a comparison, for those who wait for it: reads its folder, writes nothing."""

from __future__ import annotations

from polyclinic.dashboard.follow import Follower
from polyclinic.dashboard.server import BoardServer, open_board

__all__ = ["BoardServer", "Follower", "open_board"]
