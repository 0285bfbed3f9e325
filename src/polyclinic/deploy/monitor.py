"""`/health` and `/metrics` of a server, for monitoring systems: on an address apart, never on the sites' port."""

import json
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias

from polyclinic.core import EngineError
from polyclinic.deploy.config import join_host_port

Status: TypeAlias = Mapping[str, Any]
"""What `ServerStatus.build_status` returns."""
Sample: TypeAlias = tuple[Mapping[str, str], float]
"""The labels of a figure, and its value."""


@contextmanager
def serve_monitor(address: tuple[str, int], read_status: Callable[[], Status]) -> Iterator[int]:
    """Answer GET /health and GET /metrics on an address until the block ends; yields the port.

    Nothing that is answered concerns a patient or an image: counts, bytes, states and names of sites.
    """
    host, port = address

    class MonitorHandler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/health":
                self._send(200, "application/json", json.dumps(describe_health(read_status())))
            elif path == "/metrics":
                self._send(200, "text/plain; version=0.0.4", format_metrics(read_status()))
            else:
                self._send(404, "text/plain", "There is nothing here but /health and /metrics.\n")

        def _send(self, status: int, kind: str, text: str) -> None:
            data = text.encode()
            self.send_response(status)
            for name, value in {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def version_string(self) -> str:
            return "polyclinic"

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing: a monitoring system asks every few seconds."""

    try:
        server = _Listener(host, port, MonitorHandler)
    except OSError as error:
        raise EngineError(
            f"the monitor cannot listen on {join_host_port(host, port)} ({error.strerror}); correct `monitor` in "
            "server.yaml, or leave it out"
        ) from None
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)


class _Listener(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), handler)

    def server_bind(self) -> None:
        """Bind without looking up this machine's name, which may take long."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "localhost", int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that end before their answer."""


def describe_health(status: Status) -> dict[str, object]:
    """The state of the server in a few fields; whoever gets an answer knows that the process is at work."""
    connected = sum(site["state"] == "connected" for site in status["sites"].values())
    named = {name: status[name] for name in ("recipe", "round", "rounds") if name in status}
    counts = {"sites": len(status["sites"]), "connected": connected, "warnings": len(status.get("warnings", ()))}
    return {"state": status["state"], **named, **counts}


def format_metrics(status: Status) -> str:
    """The figures of a server in the text format of Prometheus."""
    return "".join(line for metric in _list_metrics(status) for line in _format(*metric))


def _list_metrics(status: Status) -> Iterator[tuple[str, str, str, Sequence[Sample]]]:
    counts, sites = status["counts"], status["sites"]
    state: Sample = ({"state": str(status["state"]), "recipe": str(status.get("recipe", ""))}, 1)
    yield "polyclinic_state", "gauge", "The state of the server and its recipe.", [state]
    yield "polyclinic_round", "gauge", "The round that is being played.", [({}, status.get("round", 0))]
    yield "polyclinic_rounds_planned", "gauge", "The rounds of the recipe.", [({}, status.get("rounds", 0))]
    yield "polyclinic_rounds_total", "counter", "Rounds played by this process.", [({}, counts["rounds"])]
    yield "polyclinic_round_seconds_total", "counter", "Seconds of these rounds.", [({}, counts["seconds"])]
    there = [({"site": site}, float(found["state"] == "connected")) for site, found in sites.items()]
    yield "polyclinic_site_connected", "gauge", "Whether a site is connected.", there
    seen = [({"site": s}, datetime.fromisoformat(f["seen"]).timestamp()) for s, f in sites.items() if f["seen"]]
    yield "polyclinic_site_seen_seconds", "gauge", "When a site was last heard of, in Unix time.", seen
    for name, text in (
        ("replies", "Replies of a site by outcome."),
        ("bytes", "Bytes to (down) and from (up) a site."),
    ):
        label = {"replies": "outcome", "bytes": "direction"}[name]
        found = [({"site": site, label: what}, n) for site, by in counts[name].items() for what, n in by.items()]
        yield f"polyclinic_site_{name}_total", "counter", text, found
    outliers = [({"site": site}, float(number)) for site, number in counts["outliers"].items()]
    yield "polyclinic_site_outliers_total", "counter", "Updates of a site that were outliers.", outliers
    refused = [({"site": row["site"] or "unknown"}, float(row["times"])) for row in status["refusals"]]
    yield "polyclinic_refusals_total", "counter", "Requests that the gateway refused.", _add_up(refused)
    now = datetime.now(UTC)
    ends = [
        ({"certificate": name}, (datetime.fromisoformat(end) - now).total_seconds() / 86_400)
        for name, end in status.get("certificates", {}).items()
    ]
    yield "polyclinic_certificate_days", "gauge", "Days until a certificate ends.", ends


def _add_up(samples: Iterable[Sample]) -> list[Sample]:
    """One sample for equal labels, as Prometheus demands."""
    sums: dict[tuple[tuple[str, str], ...], float] = {}
    for labels, value in samples:
        key = tuple(labels.items())
        sums[key] = sums.get(key, 0.0) + value
    return [(dict(key), value) for key, value in sums.items()]


def _format(name: str, kind: str, text: str, samples: Iterable[Sample]) -> Iterator[str]:
    yield f"# HELP {name} {text}\n# TYPE {name} {kind}\n"
    for labels, value in samples:
        pairs = ",".join(f'{label}="{_escape(given)}"' for label, given in labels.items())
        yield f"{name}{{{pairs}}} {value:.17g}\n" if pairs else f"{name} {value:.17g}\n"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
