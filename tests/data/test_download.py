"""Fetching from a real server on this machine, over broken connections and with nasty archives."""

from __future__ import annotations

import hashlib
import io
import os
import socket
import stat
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib import request

import pytest

from polyclinic.core.errors import DataError, PolyclinicError
from polyclinic.data import download
from polyclinic.data.datasets.base import Download, NamedDataset
from polyclinic.data.download import RetryPolicy, fetch_dataset
from polyclinic.data.loading.image_options import ImageOptions
from polyclinic.data.records import Listing
from tests.data.web import Site, Told, member, served, tarred, zipped

QUICK = RetryPolicy(timeout=2.0, pause=0.0)
BODY = bytes(range(256)) * 4000
NAME = "Maria_Muster"


@pytest.fixture
def site() -> Iterator[Site]:
    with served() as site:
        yield site


@pytest.fixture(autouse=True, scope="module")
def _no_proxy() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("no_proxy", "127.0.0.1")
        yield


def sum_of(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def no_listing(options: ImageOptions, folder: Path) -> Listing:
    raise AssertionError("fetching does not read")


def named(*downloads: Download, folder: str = "") -> NamedDataset:
    obtain = "write to the authors."
    return NamedDataset("demo", "none", ("a", "b"), no_listing, obtain, folder=folder, downloads=downloads)


def one(
    site: Site, body: bytes, *, name: str = "file.bin", sha256: str | None = None, unpack: bool = False
) -> NamedDataset:
    """A set of one file, served by `site`."""
    site.files[f"/{name}"] = body
    sum_ = sum_of(body) if sha256 is None else sha256
    return named(Download(f"{site.address}/{name}", sum_, name, unpack=unpack))


def get(set_: NamedDataset, folder: Path, told: Told | None = None) -> list[Path]:
    return fetch_dataset(set_, folder, told or Told(), retry=QUICK)


def visible(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


# --- Download ---


def test_a_file_arrives_as_it_was_sent(site: Site, tmp_path: Path) -> None:
    told = Told()
    assert get(one(site, BODY), tmp_path, told) == [tmp_path / "demo" / "file.bin"]
    assert (tmp_path / "demo" / "file.bin").read_bytes() == BODY
    assert visible(tmp_path / "demo") == {"file.bin"}
    steps = [(done, total) for what, done, total in told.lines if what == "file.bin"]
    assert steps[-1] == (len(BODY), len(BODY))
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)


def test_the_folder_of_the_set_may_have_another_name(site: Site, tmp_path: Path) -> None:
    site.files["/file.bin"] = BODY
    set_ = named(Download(f"{site.address}/file.bin", sum_of(BODY), "file.bin"), folder="elsewhere")
    assert get(set_, tmp_path) == [tmp_path / "elsewhere" / "file.bin"]


def test_what_is_there_is_not_fetched_again(site: Site, tmp_path: Path) -> None:
    set_, told = one(site, BODY), Told()
    get(set_, tmp_path)
    site.asked.clear()
    assert get(set_, tmp_path, told) == [tmp_path / "demo" / "file.bin"]
    assert not site.asked
    assert told.says("already there")


def test_another_file_of_that_name_is_left_alone_and_refused(site: Site, tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "file.bin").write_bytes(b"mine")
    with pytest.raises(DataError, match=f"{sum_of(b'mine')} instead of {sum_of(BODY)}"):
        get(one(site, BODY), tmp_path)
    assert (tmp_path / "demo" / "file.bin").read_bytes() == b"mine"
    assert not site.asked


def test_a_cut_connection_is_continued_where_it_ended(site: Site, tmp_path: Path) -> None:
    site.tags["/file.bin"] = '"v1"'
    site.cut_after, site.cuts = 200_000, 5
    assert site.cuts > download.RETRIES, "whatever brings something new is no failure in vain"
    get(one(site, BODY), tmp_path)
    assert (tmp_path / "demo" / "file.bin").read_bytes() == BODY
    starts = [f"bytes={start}-" for start in range(200_000, len(BODY), 200_000)]
    assert [asked.get("range") for asked in site.asked] == [None, *starts]
    assert {asked.get("if-range") for asked in site.asked[1:]} == {'"v1"'}
    assert site.sent == len(BODY)


def test_a_later_fetch_continues_an_earlier_one(site: Site, tmp_path: Path) -> None:
    set_ = one(site, BODY)
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "file.bin.part").write_bytes(BODY[:1000])
    get(set_, tmp_path)
    assert site.asked[0]["range"] == "bytes=1000-"
    assert (tmp_path / "demo" / "file.bin").read_bytes() == BODY
    assert site.sent == len(BODY) - 1000


def test_a_server_that_ignores_ranges_restarts_cleanly(site: Site, tmp_path: Path) -> None:
    site.ranges, site.cut_after, site.cuts = False, 300_000, 1
    get(one(site, BODY), tmp_path)
    assert (tmp_path / "demo" / "file.bin").read_bytes() == BODY
    assert site.asked[1]["range"] == "bytes=300000-"


def test_a_file_that_changed_on_the_server_is_fetched_anew(site: Site, tmp_path: Path) -> None:
    """Old beginning, new end: If-Range keeps them apart even where no sum is known."""
    site.tags["/file.bin"] = '"new"'
    set_ = one(site, BODY, sha256="")
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "file.bin.part").write_bytes(b"old" * 100)
    (tmp_path / "demo" / "file.bin.part.version").write_text('"old"')
    get(set_, tmp_path)
    assert (tmp_path / "demo" / "file.bin").read_bytes() == BODY


def test_without_sum_or_version_nothing_is_continued(site: Site, tmp_path: Path) -> None:
    set_, told = one(site, BODY, sha256=""), Told()
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "file.bin.part").write_bytes(b"old" * 100)
    get(set_, tmp_path, told)
    assert "range" not in site.asked[0]
    assert (tmp_path / "demo" / "file.bin").read_bytes() == BODY
    assert told.says(sum_of(BODY))


@pytest.mark.parametrize("extra", [0, 10])
def test_a_part_that_is_whole_or_too_long(site: Site, tmp_path: Path, extra: int) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "file.bin.part").write_bytes(BODY + b"x" * extra)
    get(one(site, BODY), tmp_path)
    assert (tmp_path / "demo" / "file.bin").read_bytes() == BODY
    assert site.sent == (len(BODY) if extra else 0)


def test_a_length_nobody_told(site: Site, tmp_path: Path) -> None:
    site.lengths = False
    told = Told()
    get(one(site, BODY), tmp_path, told)
    assert (tmp_path / "demo" / "file.bin").read_bytes() == BODY
    assert all(total is None for what, _, total in told.lines if what == "file.bin")


def test_a_wrong_sum_leaves_nothing(site: Site, tmp_path: Path) -> None:
    wrong = "0" * 64
    with pytest.raises(DataError, match=f"{sum_of(BODY)} instead of {wrong}"):
        get(one(site, BODY, sha256=wrong), tmp_path)
    assert visible(tmp_path / "demo") == set()


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_passing_failure_is_tried_again(site: Site, tmp_path: Path, status: int) -> None:
    site.statuses = [status] * download.RETRIES
    get(one(site, BODY), tmp_path)
    assert (tmp_path / "demo" / "file.bin").read_bytes() == BODY
    assert len(site.asked) == download.RETRIES + 1


def test_a_lasting_failure_ends_and_keeps_the_part(site: Site, tmp_path: Path) -> None:
    set_ = one(site, BODY)
    site.ranges, site.cut_after, site.cuts = False, 1000, 100
    with pytest.raises(DataError, match="ended early"):
        get(set_, tmp_path)
    assert len(site.asked) == download.RETRIES + 1
    assert (tmp_path / "demo" / "file.bin.part").read_bytes() == BODY[:1000]


def test_what_is_not_there_is_not_tried_again(site: Site, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="answered 404"):
        get(named(Download(f"{site.address}/none", "", "none")), tmp_path)
    assert len(site.asked) == 1


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="could not be fetched"):
        get(named(Download("http://127.0.0.1:9/x", "", "x")), tmp_path)


def test_a_server_that_says_nothing_is_given_up(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        set_ = named(Download(f"http://127.0.0.1:{silent.getsockname()[1]}/x", "", "x"))
        with pytest.raises(DataError, match="timed out"):
            fetch_dataset(set_, tmp_path, Told(), retry=RetryPolicy(timeout=0.05, pause=0.0))


@pytest.mark.parametrize("scheme", ["file:///etc/hostname", "ftp://127.0.0.1/x", "data:,x"])
def test_other_kinds_of_address_are_refused(site: Site, tmp_path: Path, scheme: str) -> None:
    with pytest.raises(DataError, match="neither an http nor an https"):
        get(named(Download(scheme, "", "x")), tmp_path)
    site.redirects["/x"] = scheme
    with pytest.raises(DataError, match=r"another kind of address|answered 302"):
        get(named(Download(f"{site.address}/x", "", "x")), tmp_path)
    assert visible(tmp_path / "demo") == set()


def test_a_redirect_may_not_give_up_encryption() -> None:
    asked = request.Request("https://127.0.0.1/x")
    with pytest.raises(DataError, match="another kind of address"):
        download._Redirects().redirect_request(asked, io.BytesIO(), 302, "Found", {}, "http://127.0.0.1/x")


def test_a_redirect_within_the_web_is_followed(site: Site, tmp_path: Path) -> None:
    set_ = one(site, BODY)
    site.redirects["/file.bin"] = f"{site.address}/real"
    site.files["/real"] = BODY
    get(set_, tmp_path)
    assert (tmp_path / "demo" / "file.bin").read_bytes() == BODY


def test_a_full_disk_is_told_before_it_is_full(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "SPARE", 1 << 60)
    with pytest.raises(DataError, match="make room"):
        get(one(site, BODY), tmp_path)
    assert site.sent <= len(BODY)
    assert not (tmp_path / "demo" / "file.bin").exists()


def test_a_set_without_downloads_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        get(named(), tmp_path)
    assert str(tmp_path / "demo") in str(caught.value)
    assert "write to the authors" in str(caught.value)


def test_two_at_once_do_not_mix(site: Site, tmp_path: Path) -> None:
    set_, lock = one(site, BODY), tmp_path / "demo" / ".lock"
    lock.parent.mkdir()
    other = "import fcntl, sys; f = open(sys.argv[1], 'wb'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", other, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout
        child.stdout.readline()
        with pytest.raises(PolyclinicError, match="another process"):
            get(set_, tmp_path)
        child.communicate(b"\n")
    assert not site.asked
    get(set_, tmp_path)


# --- Unpack ---


GOOD = {"top/a/1.png": b"one", "top/b/2.png": b"two", "readme.txt": b"read"}
ARCHIVES = {
    "set.zip": zipped(GOOD),
    "set.tar": tarred([(member(name), body) for name, body in GOOD.items()], "w"),
    "set.tar.gz": tarred([(member(name), body) for name, body in GOOD.items()]),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_is_unpacked_into_the_folder(site: Site, tmp_path: Path, name: str) -> None:
    set_, told = one(site, ARCHIVES[name], name=name, unpack=True), Told()
    assert get(set_, tmp_path) == [tmp_path / "demo"]
    assert all((tmp_path / "demo" / file).read_bytes() == body for file, body in GOOD.items())
    assert visible(tmp_path / "demo") == {"top", "readme.txt"}
    site.asked.clear()
    get(set_, tmp_path, told)
    assert not site.asked
    assert told.says("already there")


def test_an_interrupted_move_is_finished(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_ = one(site, ARCHIVES["set.zip"], name="set.zip", unpack=True)
    real, moved = os.replace, []

    def stop(source: Any, target: Any) -> None:
        if Path(source).parent.name == ".set.zip.unpacked":
            moved.append(target)
            if len(moved) == 2:
                raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        get(set_, tmp_path)
    monkeypatch.undo()
    site.asked.clear()
    get(set_, tmp_path)
    assert not site.asked
    assert all((tmp_path / "demo" / file).read_bytes() == body for file, body in GOOD.items())
    assert visible(tmp_path / "demo") == {"top", "readme.txt"}


def test_what_lies_there_is_not_overwritten(site: Site, tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "readme.txt").write_text("mine")
    set_ = one(site, ARCHIVES["set.zip"], name="set.zip", unpack=True)
    with pytest.raises(DataError, match="move those away"):
        get(set_, tmp_path)
    assert (tmp_path / "demo" / "readme.txt").read_text() == "mine"
    assert not (tmp_path / "demo" / "top").exists()
    (tmp_path / "demo" / "readme.txt").unlink()
    get(set_, tmp_path)
    assert all((tmp_path / "demo" / file).read_bytes() == body for file, body in GOOD.items())


def as_link(info: zipfile.ZipInfo) -> None:
    info.external_attr = (stat.S_IFLNK | 0o777) << 16


ABSOLUTE = {f"/tmp/{NAME}.png": b"x"}
NASTY = {
    "zip-slip": zipped({"ok.png": b"x", f"../{NAME}.png": b"x"}),
    "zip-slip deeper": zipped({f"a/../../{NAME}.png": b"x"}),
    "zip absolute": zipped(ABSOLUTE),
    "zip backslash": zipped({f"..\\{NAME}.png": b"x"}),
    "zip drive": zipped({f"C:{NAME}.png": b"x"}),
    "zip link": zipped({f"{NAME}.png": b"/etc/passwd"}, as_link),
    "tar slip": tarred([(member("ok.png"), b"x"), (member(f"../{NAME}.png"), b"x")]),
    "tar absolute": tarred([(member(f"/tmp/{NAME}.png"), b"x")]),
    "tar symlink": tarred([(member(f"{NAME}.png", tarfile.SYMTYPE, "/etc/passwd"), b"")]),
    "tar symlink, then through it": tarred(
        [(member("d", tarfile.SYMTYPE, "/tmp"), b""), (member(f"d/{NAME}.png"), b"x")]
    ),
    "tar hard link": tarred([(member(f"{NAME}.png", tarfile.LNKTYPE, "../../secret"), b"")]),
    "tar device": tarred([(member(f"{NAME}.png", tarfile.CHRTYPE), b"")]),
    "tar pipe": tarred([(member(f"{NAME}.png", tarfile.FIFOTYPE), b"")]),
    "one name twice": tarred([(member(f"{NAME}.png"), b"x"), (member(f"{NAME}.png"), b"y")]),
    "a file as a folder": tarred([(member(NAME), b"x"), (member(f"{NAME}/1.png"), b"y")]),
    "zip bomb": zipped({f"{NAME}.png": bytes(64 << 20)}),
    "tar bomb": tarred([(member(f"{NAME}.png"), bytes(64 << 20))]),
    "no archive": BODY,
    "zip cut short": ARCHIVES["set.zip"][:-30],
    "tar cut short": tarred([(member("a.png"), os.urandom(50_000))])[:20_000],
    "zip damaged": ARCHIVES["set.zip"].replace(b"top/a/1.png", b"top/a/X.png", 1),
}


@pytest.mark.parametrize("kind", NASTY)
def test_a_nasty_archive_leaves_nothing_and_names_nobody(site: Site, tmp_path: Path, kind: str) -> None:
    set_ = one(site, NASTY[kind], name="set.archive", unpack=True)
    with pytest.raises(DataError) as caught:
        get(set_, tmp_path / "data")
    assert NAME not in str(caught.value)
    assert caught.value.__cause__ is None
    assert visible(tmp_path / "data" / "demo") == {"set.archive"}
    left = {path.name for path in (tmp_path / "data" / "demo").iterdir()}
    assert left == {"set.archive", ".lock"}
    assert {path.name for path in tmp_path.iterdir()} == {"data"}
    assert not Path(f"/tmp/{NAME}.png").exists()


def test_too_many_members_are_refused(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "MAX_MEMBERS", 2)
    with pytest.raises(DataError, match="more than 2 files"):
        get(one(site, ARCHIVES["set.zip"], name="set.zip", unpack=True), tmp_path)


def test_an_encrypted_zip_is_refused(site: Site, tmp_path: Path) -> None:
    body = bytearray(zipped({"a.png": b"x"}))
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        body[body.index(signature) + offset] |= 1
    with pytest.raises(DataError, match="is encrypted;"):
        get(one(site, bytes(body), name="set.zip", unpack=True), tmp_path)
