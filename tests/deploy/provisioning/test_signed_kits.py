"""A kit that was changed on the way starts nothing: by its own script, by the README's commands, by `join`.

`openssl`, `sha256sum` and `sh` are the machine's own.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from polyclinic.core import __version__
from polyclinic.core.errors import EngineError
from polyclinic.deploy.provisioning.certificates import certificate_fingerprint, read_certificate
from polyclinic.deploy.provisioning.inspect import inspect_kits
from polyclinic.deploy.provisioning.manifest import check_kit
from polyclinic.deploy.provisioning.provision import add_site, revoke_site, rotate_all, rotate_server, rotate_site
from polyclinic.deploy.site.config import SiteConfig
from polyclinic.deploy.site.keys import check_own_kit
from tests.deploy.kits import SITES, site_of

OUTSIDERS = r"""
openssl x509 -in ca.crt -noout -pubkey > /dev/shm/ca.$$.pub || exit 3
openssl dgst -sha384 -verify /dev/shm/ca.$$.pub -signature MANIFEST.sig MANIFEST || exit 4
sha256sum --check --strict MANIFEST || exit 5
rm -f /dev/shm/ca.$$.pub
sed 's|^.\{66\}|./|' MANIFEST > /dev/shm/listed.$$
find . ! -type d | LC_ALL=C grep -vxFf /dev/shm/listed.$$ | cat -v
rm -f /dev/shm/listed.$$
"""
"""What a site's people can type, without a line of ours."""
INSTALL = ("--install", "--without-hashes", "--keep")
"""Kits of tests have keys."""


def started(folder: Path, *words: str) -> tuple[int, str]:
    """How start.sh ends, and what it says, where Python is one that does nothing but say so."""
    return run_start(["start.sh", *words], folder)


def run_start(command: list[str], place: Path, **environment: str) -> tuple[int, str]:
    """The same, from another folder or with other variables."""
    python = place.parent / "python-that-says-so"
    python.write_text('#!/bin/sh\necho "would install"\nexit 9\n')
    python.chmod(0o755)
    given = {**os.environ, "PYTHON": str(python), **environment}
    done = subprocess.run(["sh", *command], cwd=place, capture_output=True, text=True, env=given, check=False)
    return done.returncode, done.stdout + done.stderr


def alter_program(folder: Path) -> None:
    path = folder / "requirements.txt"
    path.write_text(path.read_text() + "helpful-package\n")


def alter_wheel(folder: Path) -> None:
    (path,) = folder.glob("*.whl")
    path.write_bytes(path.read_bytes()[:-1] + b"\1")


def alter_peers(folder: Path) -> None:
    path = folder / "peers.json"
    path.write_text(path.read_text().replace("harbour", "harbor"))


def drop_a_file(folder: Path) -> None:
    (folder / "peers.json").unlink()


def alter_and_list_anew(folder: Path) -> None:
    """What somebody does who knows sha256sum, but has not the authority's key."""
    alter_program(folder)
    names = [line.split("  ")[1] for line in (folder / "MANIFEST").read_text().splitlines()]
    listed = subprocess.run(["sha256sum", *names], cwd=folder, capture_output=True, text=True, check=True).stdout
    (folder / "MANIFEST").write_text(listed)


def drop_the_signature(folder: Path) -> None:
    (folder / "MANIFEST.sig").unlink()


ALTERATIONS: tuple[Callable[[Path], None], ...] = (
    alter_program,
    alter_wheel,
    alter_peers,
    drop_a_file,
    alter_and_list_anew,
    drop_the_signature,
)


def test_an_untouched_kit_passes_every_check(kits: Path) -> None:
    for folder in (kits / "server", *(site_of(kits, name) for name in SITES)):
        check_kit(folder)
        done = subprocess.run(["sh", "-c", OUTSIDERS], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0
        settings, key = ("server.yaml", "server.key") if folder.name == "server" else ("site.yaml", "site.key")
        shown = {f"./{name}" for name in (settings, key, "MANIFEST", "MANIFEST.sig")}
        assert {line for line in done.stdout.splitlines() if line.startswith("./")} == shown
        assert started(folder, "--check") == (0, "")
        code, said = started(folder, *INSTALL)
        assert (code, "would install" in said) == (9, True), said
        authority = certificate_fingerprint(read_certificate(kits / "ca" / "ca.crt"))
        assert authority in said, "to be compared by telephone"


@pytest.mark.parametrize("alter", ALTERATIONS, ids=lambda alter: alter.__name__)
def test_an_altered_kit_is_refused_by_everybody(kits: Path, alter: Callable[[Path], None]) -> None:
    for folder in (site_of(kits, "hill"), kits / "server"):
        alter(folder)
        with pytest.raises(EngineError) as caught:
            check_kit(folder)
        assert "\n" not in str(caught.value)
        assert "ask the coordinator" in str(caught.value)
        assert subprocess.run(["sh", "-c", OUTSIDERS], cwd=folder, capture_output=True).returncode in (4, 5)
        code, said = started(folder, *INSTALL)
        assert code == 1
        assert "would install" not in said
        assert "ask the coordinator" in said
    assert len(inspect_kits(kits).problems) == 2
    with pytest.raises(EngineError):
        list(check_own_kit(SiteConfig.load(site_of(kits, "hill") / "site.yaml")))


def test_a_whole_kit_of_another_authority_has_another_fingerprint(kits: Path) -> None:
    """Somebody who replaces all files can sign them, but not with the key of the fingerprint that was told."""
    told = certificate_fingerprint(read_certificate(kits / "ca" / "ca.crt"))
    _, said = started(site_of(kits.with_name("others"), "hill"), *INSTALL)
    assert "fingerprint" in said.lower()
    assert told not in said
    with pytest.raises(EngineError, match="not signed by the authority"):
        check_kit(site_of(kits.with_name("others"), "hill"), kits / "ca" / "ca.crt")


def test_settings_and_keys_may_be_changed(kits: Path) -> None:
    folder = site_of(kits, "hill")
    (folder / "site.yaml").write_text((folder / "site.yaml").read_text() + "# ours\n")
    (folder / "site.key").unlink()
    (folder / "state").mkdir()
    check_kit(folder)
    code, said = started(folder, *INSTALL)
    assert (code, "would install" in said) == (9, True), said


def add_a_module(folder: Path) -> str:
    (folder / "venv.py").write_text("raise SystemExit('planted')\n")
    return "venv.py"


def add_a_hidden_package(folder: Path) -> str:
    (folder / "..pip").mkdir()
    (folder / "..pip" / "__init__.py").write_text("")
    return "..pip"


def add_a_program(folder: Path) -> str:
    """Of a name that the script calls, with blanks and a line end in another one."""
    for name in ("openssl", "a b\nREADME.md"):
        (folder / name).write_text("#!/bin/sh\necho planted\n")
        (folder / name).chmod(0o755)
    return "a b?README.md, openssl"


def add_a_compose_file(folder: Path) -> str:
    (folder / "compose.override.yaml").write_text("services: {}\n")
    return "compose.override.yaml"


def add_a_wheel(folder: Path) -> str:
    (folder / "constraints-2.txt").symlink_to("requirements.txt")
    (folder / "polyclinic-9.9-py3-none-any.whl").write_bytes(b"planted")
    return "constraints-2.txt, polyclinic-9.9-py3-none-any.whl"


def put_a_link_for_a_signed_file(folder: Path) -> str:
    (folder / "README.md").rename(folder.parent / "elsewhere.md")
    (folder / "README.md").symlink_to("../elsewhere.md")
    return "README.md"


def put_a_link_for_our_own(folder: Path) -> str:
    (folder / ".venv").symlink_to(folder.parent)
    return ".venv"


ADDITIONS: tuple[Callable[[Path], str], ...] = (
    add_a_module,
    add_a_hidden_package,
    add_a_program,
    add_a_compose_file,
    add_a_wheel,
    put_a_link_for_a_signed_file,
    put_a_link_for_our_own,
)


@pytest.mark.parametrize("add", ADDITIONS, ids=lambda add: add.__name__)
def test_an_added_file_is_refused_by_name_at_every_start(kits: Path, add: Callable[[Path], str]) -> None:
    """What an adversary did: a file that MANIFEST does not list passed every check, and was run."""
    for folder in (site_of(kits, "hill"), kits / "server"):
        name = add(folder)
        for words in (INSTALL, (), ("--check",)):
            code, said = started(folder, *words)
            assert code == 1
            assert said.startswith(f"not of the signed kit, or links: {name}; move them elsewhere")
            assert said.count("\n") == 1
        if (folder / name).is_symlink():
            continue
        shown = subprocess.run(["sh", "-c", OUTSIDERS], cwd=folder, capture_output=True, text=True).stdout
        assert f"./{name.split(', ')[-1]}" in shown


def test_what_programs_and_people_put_here_is_no_addition(kits: Path) -> None:
    own = {"hill": ("site.key.former", "request.json"), "server": ()}
    for folder in (site_of(kits, "hill"), kits / "server"):
        for name in (".venv", "state", "recipes", "wheels", *(["runs"] if folder.name == "server" else [])):
            (folder / name).mkdir()
        for name in own[folder.name]:
            (folder / name).write_text("ours")
        assert started(folder, "--check") == (0, "")


def test_a_venv_that_came_with_a_kit_is_never_run_and_made_anew(kits: Path) -> None:
    """Its marks are those of another folder of the same content."""
    folder = site_of(kits, "hill")
    planted = folder / ".venv" / "bin" / "python"
    planted.parent.mkdir(parents=True)
    planted.write_text("#!/bin/sh\necho planted\n")
    planted.chmod(0o755)
    configuration = folder / ".venv" / "pyvenv.cfg"
    configuration.write_text("home = /usr/bin\n")
    mark = folder / ".venv" / f"polyclinic-{__version__}"
    for text in ("", "1 0\n", None):
        mark.write_text(text or "")
        if text is None:
            configuration.unlink()
        code, said = started(folder)
        assert (code, "planted" in said) == (1, False)
        assert ".venv was not made here" in said
    code, said = started(folder, *INSTALL)
    assert (code, "removing the folder .venv" in said) == (9, True), said
    assert not planted.exists()


def test_only_the_venv_of_this_folder_is_run_isolated(kits: Path) -> None:
    """The mark that `--install` writes lets the same folder start, and Python is called with -I."""
    folder = site_of(kits, "hill")
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "pyvenv.cfg").write_text("home = /usr/bin\n")
    (folder / ".venv" / "bin" / "python").write_text('#!/bin/sh\necho "$@"\n')
    (folder / ".venv" / "bin" / "python").chmod(0o755)
    marking = ["sh", "-c", "stat -c '%i %W' .venv/pyvenv.cfg 2>/dev/null || stat -f '%i %B' .venv/pyvenv.cfg"]
    mark = subprocess.run(marking, cwd=folder, capture_output=True, check=True).stdout
    (folder / ".venv" / f"polyclinic-{__version__}").write_bytes(mark)
    assert started(folder, "--once") == (0, "-I -m polyclinic join site.yaml --once\n")
    assert started(folder, "key", "--new") == (0, "-I -m polyclinic site key site.yaml --new\n")
    again = run_start([f"{folder.name}/start.sh"], folder.parent, CDPATH="/tmp")
    assert again == (0, "-I -m polyclinic join site.yaml\n"), "from another folder"


@pytest.mark.parametrize("name", ["state", "recipes", "site.key", "request.json"])
def test_what_no_new_kit_holds_stops_the_first_installation(name: str, kits: Path) -> None:
    """A key, an approval or the seed of the noise that somebody else has made must not be taken for our own."""
    folder = site_of(kits, "hill")
    (folder / "site.key").unlink()
    assert started(folder, "--install", "--without-hashes")[0] == 9
    (folder / name).mkdir()
    for words in (("--install", "--without-hashes"), ()):
        code, said = started(folder, *words)
        assert code == 1
        assert said.startswith(f"{name} is here already; if it was made here: sh start.sh --install --keep")


def test_settings_other_than_the_coordinators_are_named(kits: Path) -> None:
    for folder, settings in ((site_of(kits, "hill"), "site.yaml"), (kits / "server", "server.yaml")):
        (folder / "site.key").unlink(missing_ok=True)
        assert (folder / "DELIVERED").read_bytes() == (folder / settings).read_bytes()
        (folder / settings).write_text((folder / settings).read_text() + "notify: [sh, -c, planted]\n")
        code, said = started(folder, "--install", "--without-hashes")
        assert code == 1
        assert said.startswith(f"{settings} is not as the coordinator made it (see: diff DELIVERED {settings})")


def test_join_says_what_is_looser_than_the_coordinator_made_it(kits: Path) -> None:
    path = site_of(kits, "hill") / "site.yaml"
    assert list(check_own_kit(SiteConfig.load(path))) == []
    settings = yaml.safe_load(path.read_text())
    settings["allow"] |= {"least_images": 1, "kinds": ["model", "predictions"], "rounds": 5, "algorithms": "all"}
    path.write_text(yaml.safe_dump(settings))
    (said,) = check_own_kit(SiteConfig.load(path))
    assert said.endswith("(DELIVERED): allow.algorithms, allow.kinds, allow.least_images")


def test_a_relative_entry_of_path_is_refused_before_anything_runs(kits: Path) -> None:
    folder = site_of(kits, "hill")
    add_a_program(folder)
    for path in (f".:{os.environ['PATH']}", f"{os.environ['PATH']}:", f":{os.environ['PATH']}", "/bin::/usr/bin"):
        code, said = run_start(["start.sh", *INSTALL], folder, PATH=path)
        assert (code, said.startswith("PATH has an entry"), "planted" in said) == (1, True, False), path


def test_a_kit_starts_from_any_folder_and_in_folders_with_blanks(kits: Path, tmp_path: Path) -> None:
    place = tmp_path / "-our kits" / "of hill"
    place.parent.mkdir()
    site_of(kits, "hill").rename(place)
    for command, where in ((["of hill/start.sh"], place.parent), ([str(place / "start.sh")], tmp_path)):
        code, said = run_start([*command, *INSTALL], where)
        assert (code, "would install" in said) == (9, True), said


def test_changed_line_ends_are_a_changed_kit(kits: Path) -> None:
    folder = site_of(kits, "hill")
    path = folder / "MANIFEST"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert "MANIFEST is not signed by the authority" in started(folder, *INSTALL)[1]


def test_without_hashes_nothing_is_installed_unless_told(kits: Path) -> None:
    (site_of(kits, "hill") / "site.key").unlink()
    code, said = started(site_of(kits, "hill"))
    assert code == 1
    assert "no hashes" in said
    assert "--without-hashes" in said
    assert "would install" not in said


def test_kits_are_signed_again_after_every_change(kits: Path) -> None:
    changes: list[Callable[[], None]] = [
        lambda: rotate_site(kits, "hill"),
        lambda: rotate_server(kits),
        lambda: add_site(kits, "lake"),
        lambda: revoke_site(kits, "harbour"),
        lambda: rotate_all(kits),
    ]
    for change in changes:
        change()
        assert inspect_kits(kits).problems == ()
    for name in ("hill", "lake"):
        check_kit(site_of(kits, name), kits / "ca" / "ca.crt")


def test_compose_files_build_the_kit_and_leave_secrets_outside(kits: Path) -> None:
    for folder, role in ((kits / "server", "server"), (site_of(kits, "hill"), "site")):
        ((name, service),) = yaml.safe_load((folder / "compose.yaml").read_text())["services"].items()
        assert name == role
        assert service["build"] == "."
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert ".:/kit" in service["volumes"]
        assert service.get("ports", []) == (["9443:9443"] if role == "server" else [])
        ignored = (folder / ".dockerignore").read_text().splitlines()
        steps = [line.split() for line in (folder / "Dockerfile").read_text().splitlines() if line[:1] not in ("#", "")]
        (copied,) = [step[1:-1] for step in steps if step[0] == "COPY"]
        assert ignored == ["*", *(f"!{name}" for name in copied)], "nothing else reaches the image, no key among it"
        assert all((folder / name).is_file() for name in copied)
        assert not any("key" in name for name in copied)
        entry = [" ".join(step) for step in steps if step[0] in ("ENTRYPOINT", "CMD")]
        assert entry[0] == 'ENTRYPOINT ["polyclinic"]'
        assert ("join" if role == "site" else "serve") in entry[1]
