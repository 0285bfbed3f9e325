"""The board's server: two addresses, GET only, and this machine only unless every request must carry a token.

A request can only choose between two answers; no part of it ever becomes a path on the disk.
"""

import errno
import hmac
import json
import re
import socket
import socketserver
import sys
from functools import lru_cache
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from polyclinic.core import EngineError, RecipeError
from polyclinic.dashboard.follow import Follower, PageState
from polyclinic.dashboard.page import POLICY, page_kind, render_page, render_parts, tab_title
from polyclinic.deploy.config import is_loopback, join_host_port

LISTEN_PROBLEMS = {
    errno.EADDRINUSE: "another program has that port; choose one with --port, or 0 for any that is free",
    errno.EACCES: "that port is the system's; choose one above 1023 with --port",
    errno.EADDRNOTAVAIL: "this machine has no such address; leave out --host, or name one of its own",
}
REFUSAL_HEADERS = {
    HTTPStatus.METHOD_NOT_ALLOWED: {"Allow": "GET"},
    HTTPStatus.UNAUTHORIZED: {"WWW-Authenticate": "Bearer"},
}
TOKEN = re.compile(r"[A-Za-z0-9._~-]{16,200}")
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class BoardServer(ThreadingHTTPServer):
    """Serves the state of one folder."""

    daemon_threads = True
    allow_reuse_port = False

    def __init__(self, follower: Follower, host: str, port: int, token: str | None) -> None:
        self.follower, self.host, self.token = follower, host, token
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self.address_family = family
        super().__init__((str(address[0]), port), Handler)

    def server_bind(self) -> None:
        """Bind without looking up this machine's name, which may take HTTPServer long."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.host, int(self.server_address[1])

    @property
    def board_url(self) -> str:
        """The address to open, with the token, which the browser then keeps."""
        name = socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{join_host_port(name, self.server_port)}/" + (f"?token={self.token}" if self.token else "")

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that a browser has closed."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    server: BoardServer
    timeout = 20
    error_content_type = "text/plain; charset=utf-8"
    error_message_format = "%(code)d %(message)s\n"

    def parse_request(self) -> bool:
        """Read the request, and refuse it here, whatever its method, if it is not authorised."""
        if not super().parse_request():
            return False
        if (refusal := self._check_request()) is not None:
            self.send_text(*refusal)
        return refusal is None

    def _check_request(self) -> tuple[HTTPStatus, str] | None:
        if not self._is_for_this_host():
            return HTTPStatus.FORBIDDEN, "This board answers to the name of this machine alone (localhost)."
        if not self._is_authorised():
            return HTTPStatus.UNAUTHORIZED, (
                "This board needs its token: paste the address that polyclinic board has printed into the address bar, "
                "or send the header Authorization: Bearer TOKEN."
            )
        if self.command != "GET":
            return HTTPStatus.METHOD_NOT_ALLOWED, "This board is only looked at: GET."
        return None

    def _is_for_this_host(self) -> bool:
        """A foreign page may let its own name resolve to this machine (DNS rebinding); then Host holds that name."""
        if not is_loopback(self.server.host):
            return True  # there the token authorises a request
        given = self.headers.get_all("Host", [])
        try:
            name = urlsplit(f"//{given[0]}").hostname if len(given) == 1 else None
        except ValueError:
            return False
        return name is not None and is_loopback(name)

    def _is_authorised(self) -> bool:
        if self.server.token is None:
            return True
        kind, _, bearer = self.headers.get("Authorization", "").partition(" ")
        return any(map(self._is_token, (bearer if kind == "Bearer" else "", self._cookie_token(), self._query_token())))

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), (self.server.token or "").encode())

    def _cookie_token(self) -> str:
        try:
            kept = SimpleCookie(self.headers.get("Cookie", "")).get(self._cookie_name)
        except CookieError:
            return ""
        return kept.value if kept is not None else ""

    @property
    def _cookie_name(self) -> str:
        """The name includes the port, since browsers share cookies among the ports of a machine."""
        return f"polyclinic-{self.server.server_port}"

    def _query_token(self) -> str:
        """The token in the address of the page, which is accepted there only."""
        where, _, query = self.path.partition("?")
        return parse_qs(query).get("token", [""])[-1] if where == "/" else ""

    def do_GET(self) -> None:
        where = self.path.partition("?")[0]
        if where == "/" and self.server.token is not None and self._is_token(self._query_token()):
            kept = f"{self._cookie_name}={self.server.token}; Path=/; HttpOnly; SameSite=Strict"
            self.send_text(HTTPStatus.SEE_OTHER, "", more={"Location": "/", "Set-Cookie": kept})
        elif where == "/":
            self.send_text(HTTPStatus.OK, render_page(self.server.follower.read_state()), "text/html")
        elif where == "/state.json":
            self.send_text(HTTPStatus.OK, state_json(self.server.follower.read_state()), "application/json")
        else:
            self.send_text(HTTPStatus.NOT_FOUND, "There is nothing here but / and /state.json.")

    def send_text(
        self, status: HTTPStatus, text: str, kind: str = "text/plain", more: dict[str, str] | None = None
    ) -> None:
        data = text.encode()
        self.send_response(status)
        headers = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(data)), **(more or {})}
        for name, value in (headers | REFUSAL_HEADERS.get(status, {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def end_headers(self) -> None:
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def version_string(self) -> str:
        return "polyclinic"

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: an address may hold the token."""


@lru_cache(maxsize=2)  # one state answers all requests of that time
def state_json(view: PageState) -> str:
    """The state for programs, with the parts that the page replaces."""
    words = {"state": view.sentence, "title": view.title, "kind": page_kind(view)}
    page = {"parts": render_parts(view), "words": words, "tab": tab_title(view)}
    return json.dumps(view.to_json() | page, allow_nan=False)


def open_board(folder: Path, host: str = "127.0.0.1", port: int = 8765, token: str | None = None) -> BoardServer:
    """Listen on an address; `serve_forever` answers. With a token every request needs it; other hosts require one."""
    if token is None and not is_loopback(host):
        raise RecipeError(
            f"{host} is not this machine alone, and a board tells about patients' data: give --token new, which "
            "everyone who looks must then have, or leave out --host and reach it by ssh -L"
        )
    if token is not None and not TOKEN.fullmatch(token):
        raise RecipeError(
            "a token has 16 to 200 letters, digits or . _ ~ -, so that nobody guesses it; --token new draws one"
        )
    follower = Follower(folder)
    try:
        return BoardServer(follower, host, port, token)
    except OSError as error:
        number = errno.EADDRNOTAVAIL if isinstance(error, socket.gaierror) else error.errno or 0
        reason = LISTEN_PROBLEMS.get(number, f"{error.strerror or error}; choose another --port")
        raise EngineError(f"the board cannot listen on {join_host_port(host, port)}: {reason}") from None
