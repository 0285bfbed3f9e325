"""`federation.yaml` and `server.yaml`: what is wrong is told in a sentence, and any name can be a site's."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings, strategies as st

from polyclinic.core.errors import PolyclinicError, RecipeError
from polyclinic.deploy.config import FederationConfig, ServerConfig, site_folder_name
from polyclinic.deploy.provisioning.kit import build_site_kit, quote_yaml, render_server_yaml
from tests.deploy.kits import GOOD, NORTH


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"sites": None}, "'sites' has no value"),
        ({"sites": "harbour, hill"}, "but it should be a list, such as [harbour, hill]"),
        ({"sites": ["harbour", "harbour"]}, "would share one folder"),
        ({"sites": ["a b", "a_b"]}, "would share one folder"),
        ({"sites": ["Hill", "hill"]}, "would share one folder"),
        ({"sites": ["a/b"]}, "rename the site"),
        ({"sites": ["server"]}, "rename the site"),
        ({"sites": [7]}, "sites.0 is 7, but it should be text"),
        ({"server": {"host": "0.0.0.0", "port": 9443}}, "every address"),
        ({"server": {"host": "https://fl.example.org", "port": 9443}}, "no scheme"),
        ({"server": {"host": "*.example.org", "port": 9443}}, "wildcard"),
        ({"server": {"host": "10.0.0.256", "port": 9443}}, "DNS name or IP address"),
        ({"server": {"host": "fl.example.org", "port": 99999}}, "less than or equal to 65535"),
        ({"server": "fl.example.org:9443"}, "should hold keys of its own"),
        ({"server": {"port": 9443}}, "'server.host' is missing"),
        ({"days": 0}, "greater than or equal to 1"),
        ({"days": "a year"}, "days is 'a year', but it should be a whole number"),
        ({"day": 365}, "there is no key 'day'; there are: federation, server, days, sites"),
        ({"federation": ""}, "at least 1 character"),
        ({"federation": 'a"b'}, "no slash, quote"),
    ],
)
def test_a_wrong_federation_is_reported_in_a_sentence(tmp_path: Path, change: dict[str, object], sentence: str) -> None:
    path = tmp_path / "federation.yaml"
    path.write_text(yaml.safe_dump(GOOD))
    FederationConfig.load(path)
    path.write_text(yaml.safe_dump({**GOOD, **change}))
    with pytest.raises(PolyclinicError) as caught:
        FederationConfig.load(path)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "should hold keys such as"),
        ("- harbour\n", "should hold keys such as"),
        ("sites: [a\n", "cannot be read as YAML"),
        ("federation: a\nfederation: b\n", "twice"),
        ("federation: a\n", "is missing"),
    ],
)
def test_a_file_that_is_no_federation_is_reported_in_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "federation.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=sentence):
        FederationConfig.load(path)
    with pytest.raises(RecipeError, match=r"cannot read the federation\.yaml .*docs/deploy\.md"):
        FederationConfig.load(tmp_path / "other.yaml")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("monitor: 9100", "monitor is 9100, but it should be HOST:PORT, such as 127.0.0.1:9100"),
        ("port: many", "port is 'many', but it should be a whole number"),
        ("notify: mail", "notify is 'mail', but it should be a list, such as [mail]"),
        ("sites: harbour", "sites should hold keys of its own"),
        ("insecure: perhaps", "insecure is 'perhaps', but it should be true or false"),
    ],
)
def test_a_wrong_server_yaml_is_reported_in_plain_words(line: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    given = yaml.safe_load(render_server_yaml(NORTH, NORTH.sites).data)
    path.write_text(yaml.safe_dump({**given, **yaml.safe_load(line)}))
    with pytest.raises(RecipeError) as caught:
        ServerConfig.load(path)
    assert words in str(caught.value)


def test_a_server_without_tls_is_for_this_machine_alone(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    text = render_server_yaml(NORTH, NORTH.sites).data.decode().replace("insecure: false", "insecure: true")
    path.write_text(text)
    assert ServerConfig.load(path).insecure
    path.write_text(text.replace("127.0.0.1", "fl.example.org"))
    with pytest.raises(RecipeError, match="insecure: true is for rehearsals on one machine"):
        ServerConfig.load(path)


NAMES = st.text(st.characters(exclude_categories=("C", "Z"), exclude_characters="/@|"), min_size=1, max_size=100)


@settings(max_examples=200, deadline=None)
@given(NAMES)
def test_any_name_can_be_a_folder_and_yaml(name: str) -> None:
    folder = site_folder_name(name)
    assert folder not in ("", ".", "..")
    assert not set(folder) & set("/\\ \0'\"$%;&|")
    assert len(f".{folder}.zip.4194304.tmp".encode()) <= 255
    assert yaml.safe_load(f"site: {quote_yaml(name)}\n") == {"site": name}


@settings(max_examples=30, deadline=None)
@given(NAMES)
def test_a_name_cannot_write_other_keys_into_site_yaml(name: str) -> None:
    federation = NORTH.model_copy(update={"sites": (name,)})
    held = yaml.safe_load(build_site_kit(federation, name, b"", b"")["site.yaml"].data)
    assert held["site"] == name
    assert (held["data"], held["budget"], held["insecure"]) == ({}, None, False)
