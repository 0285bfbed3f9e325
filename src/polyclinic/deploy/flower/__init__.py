"""Flower as the transport between server and sites. Importing it checks Flower's version and sets its environment."""

import os
from importlib.metadata import distributions

from polyclinic.core import EngineError
from polyclinic.deploy.provisioning.software import FLWR

ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_DATABASE": ":flwr-in-memory:",
}
"""Keeps Flower from the internet, from installing packages, and from the disk."""

_found = next((package.version for package in distributions(name="flwr")), "none")
if _found != FLWR:
    raise EngineError(f"this needs flwr {FLWR}, here is {_found}; pip install 'polyclinic[flower]'")
os.environ.update(ENVIRONMENT)
