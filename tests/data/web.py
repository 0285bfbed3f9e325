"""A real server on this machine that can cut connections, ignore ranges, fail and redirect; archives to serve."""

from __future__ import annotations

import io
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Site:
    """What the server does, and what it was asked."""

    files: dict[str, bytes] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    ranges: bool = True
    lengths: bool = True
    cut_after: int | None = None
    """Bytes after which a connection ends, for the first `cuts` answers."""
    cuts: int = 0
    statuses: list[int] = field(default_factory=list)
    """Answers to give before serving anything."""
    redirects: dict[str, str] = field(default_factory=dict)
    asked: list[dict[str, str]] = field(default_factory=list)
    sent: int = 0
    address: str = ""


class Handler(BaseHTTPRequestHandler):
    server: Any

    def log_message(self, format: str, *args: Any) -> None:
        """The test's output belongs to the test."""

    def do_GET(self) -> None:
        site: Site = self.server.site
        site.asked.append({name.lower(): text for name, text in self.headers.items()})
        if self.path in site.redirects:
            return self._answer(302, {"Location": site.redirects[self.path]}, b"")
        if site.statuses:
            return self._answer(site.statuses.pop(0), {}, b"")
        if self.path not in site.files:
            return self._answer(404, {}, b"")
        return self._serve(site, site.files[self.path], site.tags.get(self.path, ""))

    def _serve(self, site: Site, body: bytes, tag: str) -> None:
        wanted, unless = self.headers.get("Range"), self.headers.get("If-Range")
        headers = {"ETag": tag} if tag else {}
        if not (site.ranges and wanted) or (unless and unless != tag):
            return self._answer(200, headers, body)
        start = int(wanted.removeprefix("bytes=").removesuffix("-"))
        if start >= len(body):
            return self._answer(416, {"Content-Range": f"bytes */{len(body)}"}, b"")
        headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
        return self._answer(206, headers, body[start:])

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        site: Site = self.server.site
        self.send_response(status)
        if site.lengths:
            self.send_header("Content-Length", str(len(body)))
        for name, text in headers.items():
            self.send_header(name, text)
        self.end_headers()
        if site.cut_after is not None and site.cuts > 0 and status in (200, 206):
            site.cuts -= 1
            body = body[: site.cut_after]
        site.sent += len(body)
        self.wfile.write(body)


@contextmanager
def served() -> Iterator[Site]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    site = Site(address=f"http://127.0.0.1:{server.server_port}")
    server.site = site  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield site
    server.shutdown()
    thread.join()
    server.server_close()


class Told:
    """What was reported on the way."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, int, int | None]] = []

    def __call__(self, what: str, done: int, total: int | None) -> None:
        self.lines.append((what, done, total))

    def says(self, text: str) -> bool:
        return any(text in what for what, _, _ in self.lines)


def zipped(files: dict[str, bytes], change: Callable[[zipfile.ZipInfo], None] | None = None) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, body in files.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED
            if change:
                change(info)
            archive.writestr(info, body)
    return buffer.getvalue()


def tarred(members: list[tuple[tarfile.TarInfo, bytes]], mode: str = "w:gz") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]
        for info, body in members:
            info.size = len(body)
            archive.addfile(info, io.BytesIO(body))
    return buffer.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info
