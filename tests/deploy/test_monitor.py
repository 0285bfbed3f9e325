"""What monitoring systems see of a server: /health, /metrics and a log of JSON lines, and nobody else."""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("flwr", reason="needs the extra polyclinic[flower]")

from polyclinic.core import RecipeError
from polyclinic.core.errors import EngineError
from polyclinic.deploy.config import ServerConfig
from polyclinic.deploy.monitor import format_metrics, serve_monitor
from polyclinic.deploy.processes import SiteRegistration, open_server
from tests.deploy.real_processes import free_port

SAMPLE = re.compile(r'[a-z_]+(\{[a-z]+="(?:[^"\\\n]|\\[\\"n])*"(,[a-z]+="(?:[^"\\\n]|\\[\\"n])*")*\})? [0-9.e+-]+')


@pytest.fixture
def monitored(kits: Path, tmp_path: Path) -> Iterator[tuple[SiteRegistration, str]]:
    """A server at work that keeps a JSON log, and the address of its monitor."""
    given = {"folder": tmp_path / "state", "port": free_port(), "monitor": f"127.0.0.1:{free_port()}", "log": "json"}
    config = ServerConfig.load(kits / "server" / "server.yaml").model_copy(update=given)
    with open_server(config) as reception:
        yield reception, f"http://{config.monitor}"


def play(reception: SiteRegistration) -> None:
    """Tell the status of two rounds, a refusal and an outlier, as a run does."""
    board = reception.board
    board.begin_run("a recipe", 5, reception.board.folders[0] / "run")
    for round in (1, 2):
        board.record_event("round", {"round": round, "cohort": ["harbour", "hill"]})
        for site, outcome in (("harbour", "accepted"), ("hill", "refused" if round == 2 else "accepted")):
            fields: dict[str, Any] = {"outlier": site == "hill"}
            if outcome == "refused":
                fields = {"why": 'it said "no"\nand\\left'}
            board.record_event("site", {"round": round, "site": site, "outcome": outcome, "down": 7, "up": 5, **fields})
        board.record_event("round done", {"round": round, "seconds": 1.5})
    board.count_refusal("", "a key that is not registered")
    board.count_refusal("", "another reason")
    board.count_refusal("hill", "a request that is too large")


def read_samples(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if not line.startswith("# ")]
    assert all(SAMPLE.fullmatch(line) for line in lines), text
    names = [line.rpartition(" ")[0] for line in lines]
    assert len(names) == len(set(names)), "Prometheus takes each figure once"
    typed = re.findall(r"# TYPE (\w+) (?:counter|gauge)\n", text)
    assert {name.partition("{")[0] for name in names} <= set(typed)
    return {name: float(line.rpartition(" ")[2]) for name, line in zip(names, lines, strict=True)}


def test_the_figures_are_those_of_the_run(monitored: tuple[SiteRegistration, str]) -> None:
    reception, at = monitored
    play(reception)
    answer = httpx.get(f"{at}/metrics", trust_env=False)
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = read_samples(answer.text)
    expected = {
        "polyclinic_round": 2,
        "polyclinic_rounds_planned": 5,
        "polyclinic_rounds_total": 2,
        "polyclinic_round_seconds_total": 3,
        'polyclinic_state{state="running",recipe="a recipe"}': 1,
        'polyclinic_site_connected{site="hill"}': 0,
        'polyclinic_site_replies_total{site="hill",outcome="refused"}': 1,
        'polyclinic_site_replies_total{site="harbour",outcome="accepted"}': 2,
        'polyclinic_site_bytes_total{site="hill",direction="down"}': 14,
        'polyclinic_site_bytes_total{site="hill",direction="up"}': 10,
        'polyclinic_site_outliers_total{site="hill"}': 1,
        'polyclinic_refusals_total{site="unknown"}': 2,
        'polyclinic_refusals_total{site="hill"}': 1,
    }
    assert {name: found.get(name) for name in expected} == expected
    days = found['polyclinic_certificate_days{certificate="server"}']
    assert 88 < days <= 90
    assert found['polyclinic_certificate_days{certificate="authority"}'] > 3650


def test_health_is_short_and_the_public_port_has_neither(monitored: tuple[SiteRegistration, str], kits: Path) -> None:
    reception, at = monitored
    assert httpx.get(f"{at}/health", trust_env=False).json() == {
        "state": "waiting for sites",
        "sites": 3,
        "connected": 0,
        "warnings": 0,
    }
    play(reception)
    health = httpx.get(f"{at}/health", trust_env=False).json()
    assert (health["state"], health["round"], health["rounds"]) == ("running", 2, 5)
    reception.board.record_event("round done", {"round": 5, "seconds": 1.5, "stopped": False})
    assert httpx.get(f"{at}/health", trust_env=False).json()["state"] == "evaluating"
    assert httpx.get(f"{at}/", trust_env=False).status_code == 404
    assert httpx.post(f"{at}/health", trust_env=False).status_code == 501
    public = f"https://127.0.0.1:{reception.link.port}"
    trusting = ssl.create_default_context(cafile=str(kits / "server" / "ca.crt"))
    with httpx.Client(verify=trusting, trust_env=False) as anybody:
        assert [anybody.get(f"{public}/{path}").status_code for path in ("health", "metrics")] == [404, 404]


def test_names_with_quotes_and_new_lines_stay_one_sample() -> None:
    odd = 'St. "Mary\\s"\n& co'
    counts = {"rounds": 0, "seconds": 0.0, "replies": {odd: {"accepted": 1}}, "bytes": {}, "outliers": {}}
    text = format_metrics({"state": "x", "counts": counts, "sites": {}, "refusals": []})
    (line,) = [line for line in text.splitlines() if line.startswith("polyclinic_site_replies_total")]
    assert SAMPLE.fullmatch(line)
    read_samples(text)


def test_a_json_log_has_one_object_an_event(monitored: tuple[SiteRegistration, str]) -> None:
    reception, _ = monitored
    play(reception)
    lines = (reception.board.folders[0] / "server.log").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert all({"time", "level", "source", "message"} <= row.keys() for row in rows)
    events = [row for row in rows if "event" in row]
    assert [row["round"] for row in events if row["event"] == "round"] == [1, 2]
    (refused,) = [row for row in events if row.get("outcome") == "refused"]
    assert (refused["site"], refused["why"]) == ("hill", 'it said "no"\nand\\left')


def test_a_monitor_that_cannot_listen_says_so(kits: Path) -> None:
    with serve_monitor(("127.0.0.1", 0), dict) as port:
        sentence = f"the monitor cannot listen on 127.0.0.1:{port} .*correct `monitor` in server.yaml"
        with pytest.raises(EngineError, match=sentence), serve_monitor(("127.0.0.1", port), dict):
            pass


@pytest.mark.parametrize("address", ["9100", "fl.example.org:9100", "127.0.0.1:99999", "::1:9100", "127.0.0.1:"])
@pytest.mark.parametrize("key", ["monitor", "listen"])
def test_addresses_that_no_machine_can_listen_on_are_refused(key: str, address: str, kits: Path) -> None:
    file = kits / "server" / "server.yaml"
    file.write_text(f"{file.read_text()}{key}: '{address}'\n")
    with pytest.raises(RecipeError, match=f"server.yaml: {key} is"):
        ServerConfig.load(file)
