"""A live page of a run or a comparison, for those who wait for it: reads its folder, writes nothing."""

from __future__ import annotations

from polyclinic.board.follow import Follower
from polyclinic.board.server import BoardServer, open_board

__all__ = ["BoardServer", "Follower", "open_board"]
