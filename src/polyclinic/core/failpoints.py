"""Fault injection: named points at which a test can kill a run, to show that it loses nothing.

`POLYCLINIC_FAULT=name:n` kills the process with SIGKILL the n-th time it reaches `name`. If it is not set, a failpoint
costs one comparison.
"""

import os
import signal

FAILPOINTS = (
    "round-begun",
    "charge-written",
    "site-received",
    "site-evaluated",
    "site-trained",
    "memory-half-written",
    "memory-saved",
    "reply-accepted",
    "aggregated",
    "metrics-written",
    "snapshot-half-written",
    "snapshot-unnamed",
    "snapshot-written",
    "ledger-half-written",
    "ledger-written",
    "finished",
    "evaluated",
    "model-written",
    "result-written",
    "key-overwritten",
    "approval-bound",
    "run-key-written",
    "chain-key-moved",
    "run-begun",
    "order-recorded",
    "keys-made",
    "secrets-shared",
    "update-masked",
    "survivors-recorded",
    "shares-revealed",
    "keys-collected",
    "shares-collected",
    "masked-update-added",
    "updates-collected",
    "survivors-agreed",
    "sum-unmasked",
)

_name, _left = "", 0


def arm_failpoint(name: str, count: int = 1) -> None:
    """Kill the process the `count`-th time `name` is reached. An empty name disarms."""
    global _name, _left
    if name and name not in FAILPOINTS:
        raise ValueError(f"there is no fault point {name!r}; there are: {', '.join(FAILPOINTS)}")
    _name, _left = name, count


def failpoint(name: str) -> None:
    global _left
    if name and name == _name:
        _left -= 1
        if _left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


_asked, _, _count = os.environ.get("POLYCLINIC_FAULT", "").partition(":")
arm_failpoint(_asked, int(_count or 1))
