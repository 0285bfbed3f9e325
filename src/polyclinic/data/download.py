"""Downloads of public datasets: resumed after interruptions, checked against checksums, and unpacked safely.

A file is called NAME.part until it is complete. An archive is unpacked to a temporary folder and moved into place after
every member has been checked, so no dataset is ever half unpacked. Errors give the number of a member, not its name.
"""

import contextlib
import http.client
import os
import re
import shutil
import stat
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias, cast
from urllib import request
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from polyclinic.core import DataError
from polyclinic.data.datasets.base import Download, NamedDataset
from polyclinic.storage.files import file_sha256, lock_folder

Report: TypeAlias = Callable[[str, int, int | None], None]
"""(what, bytes done, bytes in all or None if unknown)."""

CHUNK = 1 << 20
RETRIES = 3
SPARE = 64 << 20
"""Bytes that must stay free on the disk."""
MAX_MEMBERS = 1_000_000
MAX_BYTES = 1 << 40
MAX_RATIO = 200
"""The largest allowed ratio of unpacked to packed size: deflate can reach 1,032, images hardly 5."""
SMALL = 32 << 20
"""An archive that unpacks to no more than this is allowed at any ratio."""
BUSY = (408, 425, 429)
BROKEN_ARCHIVE = (zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error, NotImplementedError, RuntimeError)


class RetryPolicy(NamedTuple):
    timeout: float = 60.0
    """The seconds without data after which a connection counts as lost."""
    pause: float = 2.0
    """The seconds before the first retry; doubled before each further one."""


DEFAULT_RETRY = RetryPolicy()


def fetch_dataset(
    dataset: NamedDataset, data_folder: Path, report: Report, *, retry: RetryPolicy = DEFAULT_RETRY
) -> list[Path]:
    """Download a dataset's files into its folder and unpack archives.

    `report` is called with the progress; files that already exist are reported and not downloaded again. Return the
    files, or the folder of an unpacked archive.
    """
    folder = data_folder / (dataset.folder or dataset.name)
    if not dataset.downloads:
        raise DataError(f"The set {dataset.name} is not for automatic download; put it into {folder}: {dataset.obtain}")
    with _disk_errors(folder), lock_folder(folder):
        return [_fetch_file(download, folder, report, retry) for download in dataset.downloads]


@contextlib.contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{folder} cannot be written ({error.strerror or type(error).__name__}); correct that and fetch again."
        ) from None


def _fetch_file(download: Download, folder: Path, report: Report, retry: RetryPolicy) -> Path:
    file, settled = folder / download.name, folder / f".{download.name}.fetched"
    if download.unpack and settled.is_file() and download.sha256.lower() in ("", settled.read_text().strip()):
        report(f"{download.name} is already there", 0, None)
        return folder
    unpacked = folder / f".{download.name}.unpacked"
    if not unpacked.is_dir():
        _ensure_file(download, file, report, retry)
        if not download.unpack:
            return file
        _unpack_archive(file, unpacked, settled.name, report)
    _move_in(unpacked, folder, settled.name)
    file.unlink(missing_ok=True)
    return folder


def _ensure_file(download: Download, file: Path, report: Report, retry: RetryPolicy) -> None:
    """Download the file unless it exists and matches its checksum."""
    if not file.is_file():
        return _download_file(download, file, report, retry)
    size, found = file.stat().st_size, file_sha256(file)
    if download.sha256 and found != download.sha256.lower():
        raise DataError(
            f"{file} has the SHA-256 sum {found} instead of {download.sha256.lower()}; remove it and fetch again."
        )
    return report(f"{download.name} is already there", size, size)


# --- Download -------------------------------------------------------------------------------------------------------


class _TransferError(Exception):
    """A failure that may be temporary."""


def _download_file(download: Download, file: Path, report: Report, retry: RetryPolicy) -> None:
    part = file.with_name(f"{file.name}.part")
    _retry_download(download, part, report, retry)
    found, size = file_sha256(part), part.stat().st_size
    _stored_validator(part).unlink(missing_ok=True)
    if download.sha256 and found != download.sha256.lower():
        part.unlink()
        raise DataError(
            f"{download.url} has the SHA-256 sum {found} instead of {download.sha256.lower()}; it was deleted: "
            "the publisher has changed it or it was tampered with, so do not use it until you know."
        )
    if not download.sha256:
        report(f"{download.name} has the SHA-256 sum {found}: compare it with the publisher's", size, size)
    os.replace(part, file)


def _retry_download(download: Download, part: Path, report: Report, retry: RetryPolicy) -> None:
    """Retry until `part` is complete; give up after three attempts in a row without new data."""
    furthest, failures = _file_size(part), 0
    while True:
        try:
            return _attempt_download(download, part, report, retry.timeout)
        except _TransferError as interruption:
            failures = 1 if _file_size(part) > furthest else failures + 1
            furthest = max(furthest, _file_size(part))
            if failures > RETRIES:
                raise DataError(
                    f"{download.url} could not be fetched ({interruption}); fetch again later, it continues there."
                ) from None
            time.sleep(retry.pause * 2 ** (failures - 1))


def _attempt_download(download: Download, part: Path, report: Report, timeout: float) -> None:
    validator = _stored_validator(part)
    have, known = _file_size(part), validator.read_text() if validator.is_file() else ""
    headers = {"User-Agent": "polyclinic", "Accept-Encoding": "identity"}
    # Without a validator or a checksum, the rest of this file could not be distinguished from that of a newer one.
    if have and (known or download.sha256):
        headers |= {"Range": f"bytes={have}-"} | ({"If-Range": known} if known else {})
    with contextlib.closing(_open_url(download.url, headers, timeout)) as answer:
        if answer.status == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            if answer.headers.get("Content-Range", "").strip() == f"bytes */{have}":
                return  # the file is complete
            part.unlink()
            raise _TransferError("the file on the server is shorter than what was fetched")
        done, total = _parse_extent(answer, have, part)
        with part.open("ab" if done else "wb") as file:
            # the version of the file for If-Range: a strong ETag, else its date
            tag = str(answer.headers.get("ETag", ""))
            validator.write_text(tag if tag.startswith('"') else str(answer.headers.get("Last-Modified", "")))
            _check_free_space(part.parent, (total or done) - done)
            for chunk in _read_chunks(answer):
                if total is None:
                    _check_free_space(part.parent, len(chunk))
                file.write(chunk)
                done += len(chunk)
                report(download.name, done, total)
    if total is not None and done < total:
        raise _TransferError("the connection ended early")


def _open_url(url: str, headers: dict[str, str], timeout: float) -> Any:
    """Return the server's response with status 200, 206 or 416; any other status is an error."""
    if urlsplit(url).scheme not in ("http", "https"):
        raise DataError(f"{url} is neither an http nor an https address; nothing was fetched.")
    try:
        return _build_opener().open(request.Request(url, headers=headers), timeout=timeout)
    except HTTPError as error:
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            return error
        error.close()
        if error.code in BUSY or error.code >= 500:
            raise _TransferError(f"the server answered {error.code}") from None
        raise DataError(f"{url} is not available (the server answered {error.code}); see the set's README.") from None
    except URLError as error:
        raise _TransferError(_describe_error(error.reason)) from None
    except (OSError, http.client.HTTPException) as error:
        raise _TransferError(_describe_error(error)) from None


def _build_opener() -> request.OpenerDirector:
    """Allow only http and https, since urllib's default opener would also read local files."""
    opener = request.OpenerDirector()
    handlers = (request.ProxyHandler(), request.HTTPHandler(), request.HTTPSHandler(), request.UnknownHandler())
    for handler in (*handlers, request.HTTPDefaultErrorHandler(), _Redirects(), request.HTTPErrorProcessor()):
        opener.add_handler(handler)
    return opener


class _Redirects(request.HTTPRedirectHandler):
    def redirect_request(
        self, req: request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> request.Request | None:
        allowed = ("https",) if req.type == "https" else ("http", "https")
        if urlsplit(newurl).scheme not in allowed:
            fp.close()
            raise DataError(f"{req.full_url} redirects to another kind of address; nothing was fetched.")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _parse_extent(answer: Any, have: int, part: Path) -> tuple[int, int | None]:
    """Return where the response's bytes start and the length of the whole file; servers may ignore the range."""
    length = answer.headers.get("Content-Length", "")
    if answer.status != http.client.PARTIAL_CONTENT:
        return 0, int(length) if length.isdigit() else None
    found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", answer.headers.get("Content-Range", "").strip())
    if not found or int(found[1]) != have:
        part.unlink()
        raise _TransferError("the server sent another range than was asked for")
    if found[2] != "*":
        return have, int(found[2])
    return have, have + int(length) if length.isdigit() else None


def _read_chunks(answer: Any) -> Iterator[bytes]:
    try:
        while chunk := answer.read1(CHUNK):
            yield chunk
    except (OSError, http.client.HTTPException) as error:
        raise _TransferError(_describe_error(error)) from None


def _stored_validator(part: Path) -> Path:
    return part.with_name(f"{part.name}.version")


def _describe_error(error: object) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).splitlines()[0][:120].rstrip(". ")


def _file_size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _check_free_space(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if size + SPARE > free:
        raise DataError(
            f"{folder} needs {size >> 20:,} MiB more, but only {free >> 20:,} MiB are free on its disk; make room."
        )


# --- Unpack ---------------------------------------------------------------------------------------------------------


class _ArchiveMember(NamedTuple):
    name: str
    size: int
    kind: str
    """file, folder, or another kind, which is refused."""
    open: Callable[[], IO[bytes]]


_Opens: TypeAlias = Callable[[tarfile.TarInfo], IO[bytes]]
"""What `TarFile.extractfile` is for plain files."""


def _unpack_archive(archive: Path, target: Path, seal: str, report: Report) -> None:
    """Unpack into `target`, which is created when complete; its file `seal` holds the archive's checksum."""
    half = archive.with_name(f".{archive.name}.unpacking")
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir()
    try:
        members = _tar_members(archive) if tarfile.is_tarfile(archive) else _zip_members(archive)
        for number, member in enumerate(_check_members(members, archive), start=1):
            _resolve_target(member, half, f"Member {number} of {archive.name}")
            report(f"{archive.name}: unpacking", number, None)
        (half / seal).write_text(file_sha256(archive))
        os.rename(half, target)
    except BROKEN_ARCHIVE:
        raise DataError(f"{archive} is not an intact zip or tar archive; remove it and fetch again.") from None
    except OSError as error:
        if error.errno is not None:
            raise
        raise DataError(f"{archive} is damaged; remove it and fetch again.") from None
    finally:
        shutil.rmtree(half, ignore_errors=True)


def _zip_members(archive: Path) -> Iterator[_ArchiveMember]:
    with zipfile.ZipFile(archive) as file:
        for info in file.infolist():
            yield _ArchiveMember(info.filename, info.file_size, _zip_kind(info), partial(file.open, info))


def _zip_kind(info: zipfile.ZipInfo) -> str:
    """Return the kind of a member. Zips written on Unix hold the file mode in the upper external attributes."""
    mode = info.external_attr >> 16
    if info.flag_bits & 1:
        return "encrypted"
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
        return "a link or device"
    return "folder" if info.is_dir() else "file"


def _tar_members(archive: Path) -> Iterator[_ArchiveMember]:
    with tarfile.open(archive) as file:
        for info in file:
            kind = "file" if info.isreg() else "folder" if info.isdir() else "a link or device"
            yield _ArchiveMember(info.name, info.size, kind, partial(cast(_Opens, file.extractfile), info))


def _check_members(members: Iterator[_ArchiveMember], archive: Path) -> Iterator[_ArchiveMember]:
    """Yield the members while their number and declared sizes stay within the limits and the free disk space."""
    most, total = min(MAX_BYTES, max(SMALL, MAX_RATIO * archive.stat().st_size)), 0
    for number, member in enumerate(members, start=1):
        total += member.size
        if number > MAX_MEMBERS or total > most:
            raise DataError(
                f"{archive} would unpack to more than {MAX_MEMBERS:,} files or {most >> 20:,} MiB; "
                "it was left packed: no image archive is like that."
            )
        _check_free_space(archive.parent, member.size)
        yield member


def _resolve_target(member: _ArchiveMember, target: Path, who: str) -> None:
    if member.kind not in ("file", "folder"):
        raise DataError(f"{who} is {member.kind}; nothing was unpacked, because only plain files are safe.")
    steps = member.name.removesuffix("/").split("/")
    if ".." in steps or "" in steps or "\\" in member.name or re.match(r"[A-Za-z]:", member.name):
        raise DataError(f"{who} would be written outside the set's folder; nothing was unpacked.")
    path = target.joinpath(*steps)
    try:
        (path if member.kind == "folder" else path.parent).mkdir(parents=True, exist_ok=True)
        if member.kind == "file":
            with member.open() as source, path.open("xb") as file:
                shutil.copyfileobj(source, file, CHUNK)
    except (FileExistsError, NotADirectoryError, IsADirectoryError):
        raise DataError(f"{who} has the same name as an earlier one; nothing was unpacked.") from None


def _move_in(unpacked: Path, folder: Path, last: str) -> None:
    """Move the unpacked entries into the folder, continuing after an interruption. `last` is moved last."""
    entries = sorted(unpacked.iterdir(), key=lambda entry: (entry.name == last, entry.name))
    if taken := sum((folder / entry.name).exists() for entry in entries if entry.name != last):
        raise DataError(
            f"{taken} of the files and folders just unpacked are in {folder} already; move those away and fetch again."
        )
    for entry in entries:
        os.replace(entry, folder / entry.name)
    unpacked.rmdir()
