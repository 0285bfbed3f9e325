"""Measures a machine's profile: processor, memory, battery and network."""

import socket
import statistics
import time
from contextlib import suppress

import psutil

from polyclinic.config.capability import GIGABYTE, LATENCY, Capability, MachineProfile
from polyclinic.core import EngineError, check_options

CPU_SECONDS = 0.5
"""Seconds over which the processor's load is averaged."""
UNSUPPORTED = suppress(OSError, NotImplementedError, AttributeError)
"""Ignores the errors by which psutil says that a system has no such sensor."""
CONNECTIONS = 5
PATIENCE = 5.0
"""Seconds after which a server counts as unreachable."""


def measure_machine(server: tuple[str, int] | None = None, most_latency_ms: float = LATENCY) -> MachineProfile:
    """Measure this machine now; the profile says how each number was found."""
    check_options(Capability(max_latency_ms=most_latency_ms), "capability.")
    network, way = _score_network(server, most_latency_ms)
    cpu, speed = _score_cpu(*_read_frequency())
    battery, power = _score_battery(*_read_charge())
    memory = psutil.virtual_memory()
    notes = speed, f"{memory.available / GIGABYTE:.1f} of {memory.total / GIGABYTE:.1f} GB available", power, way
    return MachineProfile(cpu, min(1.0, memory.available / memory.total), battery, network, memory.total, notes)


def _read_frequency() -> tuple[float, float]:
    """The current and the highest frequency in MHz; 0 where the system does not report it."""
    with UNSUPPORTED:
        if found := psutil.cpu_freq():
            return found.current or 0.0, found.max or 0.0
    return 0.0, 0.0


def _score_cpu(now: float, most: float) -> tuple[float, str]:
    if now > 0 and most > 0:
        return min(1.0, now / most), f"runs at {now:,.0f} of {most:,.0f} MHz"
    used = psutil.cpu_percent(interval=CPU_SECONDS)
    return _clamp_unit(1 - used / 100), f"reports no highest frequency; {used:.0f} % was in use over {CPU_SECONDS:g} s"


def _read_charge() -> tuple[float | None, bool]:
    """The battery's charge in percent (None without one), and whether it is plugged in."""
    with UNSUPPORTED:
        if found := psutil.sensors_battery():
            return float(found.percent), bool(found.power_plugged)
    return None, False


def _score_battery(percent: float | None, plugged: bool) -> tuple[float, str]:
    if percent is None:
        return 1.0, "no battery: mains power counts as full"
    if plugged:
        return 1.0, f"plugged in: mains power counts as full (battery at {percent:.0f} %)"
    return _clamp_unit(percent / 100), f"battery at {percent:.0f} %, not plugged in"


def _score_network(server: tuple[str, int] | None, most: float) -> tuple[float, str]:
    if server is None:
        return 1.0, "not measured, because no server was given; counts as full"
    delay = measure_latency(server, max(PATIENCE, most / 1000))
    way = f"{delay:.3g} ms to {server[0]}:{server[1]}, the median of {CONNECTIONS} connections; {most:g} ms counts 0"
    return _clamp_unit(1 - delay / most), way


def measure_latency(server: tuple[str, int], patience: float = PATIENCE) -> float:
    """Milliseconds of a round trip to the server: the median of several TCP connections."""
    host, port = server
    try:
        if not 0 < port < 2**16:
            raise ValueError("ports are numbers from 1 to 65535")
        with socket.create_connection(server, patience) as first:
            family, address = first.family, first.getpeername()
        return 1000 * statistics.median(_time_connection(family, address, patience) for _ in range(CONNECTIONS))
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise EngineError(
            f"the server {host}:{port} cannot be reached ({reason}); check its address, that it runs, and that "
            "firewalls let this machine through"
        ) from None


def _time_connection(family: int, address: tuple[str | int, ...], patience: float) -> float:
    """Seconds that a connection takes. The address is numeric, so no name lookup is timed."""
    with socket.socket(family, socket.SOCK_STREAM) as line:
        line.settimeout(patience)
        begun = time.perf_counter()
        line.connect(address)
        return time.perf_counter() - begun


def _clamp_unit(value: float) -> float:
    return min(1.0, max(0.0, value))
