"""The one door of the server: what sites need of Flower's SuperLink, and nothing else of it.

Flower 1.41 serves three interfaces on one port. Only that for sites asks who is calling: whoever reaches the port may
register a key of its own, start runs and read their results through the other two. Nor does it look whether a reply
comes from the site that it claims to be of, or how large a request is. Here stands what does.
"""

from __future__ import annotations

import asyncio
import json
import time
from base64 import b64decode
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from functools import partial
from typing import Any, TypeAlias
from urllib.parse import unquote

from polyclinic.core.contract import SiteId

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
No: TypeAlias = tuple[int, str, str]
"""A refusal: the status, a note for the server's log, a sentence for who is calling."""
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

FLEET = "/v1/fleet/"
OPEN = frozenset(
    FLEET + name
    for name in (
        "activate-node",
        "deactivate-node",
        "send-node-heartbeat",
        "pull-messages",
        "pull-object",
        "confirm-message-received",
        "push-messages",
        "push-object",
    )
)
SPOKEN = frozenset({FLEET + "push-messages", FLEET + "pull-messages"})
"""Where it is looked at in whose name; elsewhere Flower does."""
KEY, VERSION, NAMES = b"flwr-public-key", b"polyclinic-version", b"polyclinic-names"
LARGEST = 64 << 20
"""Bytes of one request: Flower sends arrays in pieces of 5 MiB."""
SMALL = 1 << 20
LEAST, MANIFOLD = 256 << 20, 16
"""A reply may have so many bytes, and as many times those of what was sent."""
HOLD = 10.0
"""Seconds that a site's question for work may wait for an answer, so that nobody needs to ask often."""


class Gateway:
    """Flower's application behind a door. `senders` reads in whose name a request is made."""

    def __init__(
        self,
        app: App,
        keys: Mapping[bytes, SiteId],
        nodes: Mapping[SiteId, int],
        version: str,
        senders: Callable[[str, bytes], set[int]],
        refused: Callable[[SiteId, str], None],
        federation: str = "",
        former: Mapping[bytes, str] | None = None,
    ) -> None:
        self.former = former or {}
        self.app, self.keys, self.nodes, self.federation = app, keys, nodes, federation
        self.version, self.senders, self.refused = version, senders, refused
        self.last_seen: dict[SiteId, float] = {}
        self.left: dict[SiteId, int] = {}
        """Bytes that each may still send in reply."""
        self.arrived: Callable[[], None] = lambda: None
        """Called when something of a reply has come."""
        self._work: dict[SiteId, asyncio.Event] = {}
        self.hold = HOLD
        self._loop: asyncio.AbstractEventLoop | None = None

    def notify_site(self, site: SiteId, size: int = 0) -> None:
        """From any thread: there is work for this site, a message of so many bytes."""
        self.left[site] = LEAST + MANIFOLD * size
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._work_event(site).set)

    def release_waiters(self) -> None:
        """From any thread: nobody needs to wait any longer."""
        self.hold = 0.0
        for site in self.nodes:
            self.notify_site(site)

    def _work_event(self, site: SiteId) -> asyncio.Event:
        return self._work.setdefault(site, asyncio.Event())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._loop = asyncio.get_running_loop()
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await self._handle_request(scope, receive, send)

    async def _handle_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, path = dict(scope["headers"]), scope["path"]
        site = self.keys.get(_read_key(headers), "")
        body = b""
        no = self._find_caller_problem(scope, headers, site)
        if no is None:
            read = await _read_body(receive, LARGEST if path == FLEET + "push-object" else SMALL)
            body, no = read or b"", self._find_body_problem(path, read, site)
        if no is not None:
            status, noted, sentence = no
            self.refused(site, noted)
            await _send_text(send, status, sentence)
            return
        if path == FLEET + "pull-messages":
            await self._wait_for_work(site)
        await self.app(scope, _replay_body(body, receive), partial(self._watch_response, send, site))
        if path == FLEET + "push-object":
            self.arrived()

    async def _watch_response(self, send: Send, site: SiteId, event: MutableMapping[str, Any]) -> None:
        """Flower has looked at the signature by now."""
        if event["type"] == "http.response.start" and event["status"] < 400:
            self.last_seen[site] = time.time()
        await send(event)

    def _find_caller_problem(self, scope: Scope, headers: Mapping[bytes, bytes], site: SiteId) -> No | None:
        """What is wrong with who is calling, and what for."""
        if scope["method"] != "POST" or scope["path"] not in OPEN:
            return 404, f"{scope['method'][:10]} {scope['path'][:60]!r} is not open to sites", "there is nothing here"
        if not site:
            whose = self.former.get(_read_key(headers), "a key that is not registered")
            return 403, whose, "its key is not registered, or was revoked; ask for a new kit"
        theirs = headers.get(VERSION, b"").decode("ascii", "replace")[:40]
        if theirs != self.version:
            told = f"the server runs polyclinic {self.version}, this site {theirs or 'another program'}"
            return 403, f"it runs polyclinic {theirs!r}, not {self.version}", f"{told}; install the server's version"
        return self._find_name_problem(headers.get(NAMES, b"").decode("ascii", "replace")[:2000], site)

    def _find_name_problem(self, names: str, site: SiteId) -> No | None:
        """A site whose settings are not those of its key: files of two kits were mixed, or a name was changed."""
        federation, _, called = map(unquote, names.partition("/"))
        for what, theirs, ours in (("site", called, site), ("federation", federation, self.federation)):
            if names and ours and theirs != ours:
                told = f"its key is that of the {what} {ours}, but `{what}` in site.yaml is {theirs[:100]!r}"
                return 403, f"it takes itself for the {what} {theirs[:100]!r}", f"{told}; use the files of one kit"
        return None

    def _find_body_problem(self, path: str, body: bytes | None, site: SiteId) -> No | None:
        """What is wrong with what is said."""
        if path == FLEET + "push-object":
            self.left[site] = self.left.get(site, 0) - len(body or b"")
        if body is None or self.left.get(site, 0) < 0:
            return 413, "a request that is too large", "a request is larger than the server takes"
        if path in SPOKEN and not self._is_sender(path, body, site):
            return 403, "a request in the name of another site", "a request in the name of another site"
        return None

    def _is_sender(self, path: str, body: bytes, site: SiteId) -> bool:
        try:
            return self.senders(path, body) <= {self.nodes[site]}
        except Exception:  # whatever a parser says of a stranger's bytes
            return False

    async def _wait_for_work(self, site: SiteId) -> None:
        event = self._work_event(site)
        try:
            await asyncio.wait_for(event.wait(), self.hold)
        except TimeoutError:
            return
        event.clear()


def _read_key(headers: Mapping[bytes, bytes]) -> bytes:
    try:
        return b64decode(headers.get(KEY, b""), validate=True)
    except ValueError:
        return b""


async def _read_body(receive: Receive, most: int) -> bytes | None:
    """The whole request, or None where it is longer than `most`."""
    pieces: list[bytes] = []
    held = 0
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            return b""
        pieces.append(event.get("body", b""))
        held += len(pieces[-1])
        if held > most:
            return None
        if not event.get("more_body", False):
            return b"".join(pieces)


def _replay_body(body: bytes, receive: Receive) -> Receive:
    """The request as if nobody had read it yet."""
    given = False

    async def again() -> MutableMapping[str, Any]:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


async def _send_text(send: Send, status: int, sentence: str) -> None:
    body = json.dumps({"polyclinic": sentence}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
