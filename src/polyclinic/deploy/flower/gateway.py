"""The server's only entrance: an ASGI application for the requests of registered sites, and for nothing else.

A request's head is checked first: its path, the site's registered key, and the key's signature of the time. Until then
nothing of the body is read, nobody is woken and nothing is charged to a site. Messages and replies pass here in one
request each, straight from and into `message_queue.py`; whether a site is there is Flower's own business, to whose
application the remaining requests are passed. Flower 1.41 serves two further interfaces on the same port, through
which anyone who reaches it could register a key or start a run: they are closed.
"""

import asyncio
import time
from base64 import b64decode
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import TypeAlias
from urllib.parse import unquote

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from polyclinic.core import SiteId, __version__
from polyclinic.deploy.flower.connections import Connection, ConnectionLimits
from polyclinic.deploy.flower.message_queue import MessageQueue, QueuedMessage, ReplyUpload

Refusal: TypeAlias = tuple[int, str, str]
"""The HTTP status, a note for the server's log, and a sentence for the caller."""

FLEET = "/v1/fleet/"
NEXT_MESSAGE, REPLY = "/v1/messages/next", "/v1/messages/reply"
OPEN_PATHS = frozenset(
    [NEXT_MESSAGE, REPLY, *(FLEET + name for name in ("activate-node", "deactivate-node", "send-node-heartbeat"))]
)
KEY, TIMESTAMP, SIGNATURE = "flwr-public-key", "flwr-timestamp", "flwr-signature"
NAMES, MESSAGE_NAME = "polyclinic-names", "polyclinic-message"
PROTOCOL_HEADER, VERSION = "polyclinic-protocol", "polyclinic-version"
MAX_CLOCK_LEAD, MAX_SIGNATURE_AGE = 5.0, 305.0
"""Seconds by which the signed time may be ahead of or behind the server's clock, as Flower has it."""
MAX_REQUEST_BYTES = 64 << 10
"""Of a request that is no reply."""
PIECE_BYTES = 1 << 18
"""Messages are sent, and replies are stored, in pieces of about this size."""
QUIET_SECONDS, MIN_BYTES_PER_SECOND = 60.0, 4096
"""A body may take QUIET_SECONDS, and longer only if this many bytes pass in a second on average."""
STRANGER_SECONDS = 0.5
"""How long the answer to a refused request without a signature takes, so that a connection cannot ask often."""
SITE_REQUESTS_PER_SECOND, BURST_SECONDS = 50.0, 2.0
"""Of one site on average, and for how long more of them may come at once; those beyond wait."""
HOLD_SECONDS = 10.0
"""How long a request for work is held open while there is none, so that no site needs to ask often."""
REVOKED: Refusal = (
    403,
    "a key that is not registered",
    "its key is not registered, or was revoked; send request.json to the coordinator, who accepts it or says why not",
)
TOO_LARGE: Refusal = 413, "a request that is too large", "a request is larger than the server takes"


class Gateway:
    """The ASGI application of a server.

    Args:
        app: Flower's ASGI application, which keeps account of the sites that are connected.
        keys: The site of each registered public key.
        protocol: The number of the protocol that every site must speak (`polyclinic.core.PROTOCOL`).
        messages: What waits for sites, and their replies.
        limits: The limits on connections, which make a difference between those of sites and others.
        refused: Is called with the site ("" for an unknown caller) and the reason of every refused request.
        federation: The federation's name; "" accepts any.
        former: Public keys that were revoked, each with a description of its owner.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Mapping[bytes, SiteId],
        protocol: int,
        messages: MessageQueue,
        limits: ConnectionLimits,
        refused: Callable[[SiteId, str], None],
        federation: str = "",
        former: Mapping[bytes, str] | None = None,
    ) -> None:
        self.former = former or {}
        self.app, self.keys, self.federation = app, keys, federation
        self.protocol, self.messages, self.limits, self.refused = protocol, messages, limits, refused
        self.last_seen: dict[SiteId, float] = {}
        self.versions: dict[SiteId, str] = {}
        """The version of polyclinic that each site says it runs."""
        self.hold = HOLD_SECONDS
        self._held: dict[SiteId, asyncio.Future[bool]] = {}
        """The request for work of each site that is held open."""
        self._notified: set[SiteId] = set()
        """Sites whose next request is not held, since there may have come something between two requests."""
        self._free_at: dict[SiteId, float] = {}
        """When each site's requests so far would be over, if they came evenly."""
        self._loop: asyncio.AbstractEventLoop | None = None
        messages.announce = self.notify_site

    def notify_site(self, site: SiteId) -> None:
        """Release the site's held request: there may be a message for it. May be called from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._release_site, site)

    def _release_site(self, site: SiteId, there_may_be_work: bool = True) -> None:
        held = self._held.pop(site, None)
        if held is not None and not held.done():
            held.set_result(there_may_be_work)
        elif there_may_be_work:
            self._notified.add(site)

    def release_waiters(self) -> None:
        """Release all held requests and hold none from now on. May be called from any thread."""
        self.hold = 0.0
        for site in list(self._held):
            self.notify_site(site)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._loop = asyncio.get_running_loop()
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await self._handle_request(Request(scope, receive), send)

    async def _handle_request(self, request: Request, send: Send) -> None:
        connection: Connection = request.scope["state"]["connection"]
        site = self.keys.get(_read_key(request), "")
        if (refusal := self._find_stranger_problem(request, site)) is not None:
            status, note, sentence = refusal
            await asyncio.sleep(STRANGER_SECONDS)
            await self._refuse(request, send, "", (status, f"{note}, from {connection.address}", sentence))
            return
        self.limits.mark_signed(connection, site)
        self.last_seen[site], self.versions[site] = time.time(), _read_version(request)
        connection.requests += 1
        try:
            await asyncio.sleep(self._excess_seconds(site))
            if (refusal := self._find_caller_problem(request, site)) is not None:
                await self._refuse(request, send, site, refusal)
            else:
                await self._answer_site(request, send, site)
        except ClientDisconnect:
            pass
        except TimeoutError:
            self.refused(site, "a request or reply of which too few bytes pass")
            connection.close()
        finally:
            connection.requests -= 1
            connection.since = time.monotonic()

    def _excess_seconds(self, site: SiteId) -> float:
        """How long this request of a site has to wait, because the site makes more than it may."""
        now = time.monotonic()
        self._free_at[site] = max(now, self._free_at.get(site, 0.0)) + 1 / SITE_REQUESTS_PER_SECOND
        return max(0.0, self._free_at[site] - now - BURST_SECONDS)

    async def _answer_site(self, request: Request, send: Send, site: SiteId) -> None:
        """Answer a request whose signature has been verified."""
        path = request.scope["path"]
        if path == REPLY:
            await self._receive_reply(request, send, site)
        elif (body := await _read_body(request, MAX_REQUEST_BYTES)) is None:
            await self._refuse(request, send, site, TOO_LARGE)
        elif path == NEXT_MESSAGE:
            await self._send_next_message(request, send, site)
        else:
            await self.app(request.scope, _replay_body(body, request.receive), send)

    async def _refuse(self, request: Request, send: Send, site: SiteId, refusal: Refusal) -> None:
        status, note, sentence = refusal
        self.refused(site, note)
        field = "detail" if status == 401 else "polyclinic"  # the site itself finds out that its clock is wrong
        await JSONResponse({field: sentence}, status)(request.scope, request.receive, send)

    async def _send_next_message(self, request: Request, send: Send, site: SiteId) -> None:
        """Send the site its next message, waiting for one; or nothing, so that it asks again."""
        message = self.messages.collect(site)
        if message is None and await self._hold_request(site):
            if not self._is_registered(request, site):
                await self._refuse(request, send, site, REVOKED)
                return
            message = self.messages.collect(site)
        if message is None:
            await Response(status_code=204)(request.scope, request.receive, send)
            return
        headers = {"content-length": str(message.size), MESSAGE_NAME: message.name}
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            }
        )
        pace = _Pace()
        for piece in _split_message(message):
            async with asyncio.timeout(pace.seconds_left()):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            pace.passed += len(piece)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        message.parts = ()

    async def _hold_request(self, site: SiteId) -> bool:
        """Wait until there may be a message for the site. False: a later request of the site has taken its place."""
        self._release_site(site, there_may_be_work=False)
        if site in self._notified:
            self._notified.discard(site)
            return True
        held: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._held[site] = held
        with suppress(TimeoutError):
            async with asyncio.timeout(self.hold):
                return await held
        if self._held.get(site) is held:
            del self._held[site]
        return True

    async def _receive_reply(self, request: Request, send: Send, site: SiteId) -> None:
        upload = self.messages.begin_reply(request.headers.get(MESSAGE_NAME, ""), site)
        if upload is None:
            await Response(status_code=410)(request.scope, request.receive, send)
            return
        complete = False
        try:
            complete = await _store_body(request, upload)
        except TimeoutError:  # which is an OSError, too
            raise
        except OSError as error:
            self.refused(site, f"a reply that cannot be stored here ({error.strerror})")
            await Response(status_code=507)(request.scope, request.receive, send)
            return
        finally:
            if not complete:
                self.messages.drop_reply(upload)
        if complete and not self._is_registered(request, site):
            self.messages.drop_reply(upload)
            await self._refuse(request, send, site, REVOKED)
        elif complete:
            self.messages.finish_reply(upload)
            await Response(status_code=204)(request.scope, request.receive, send)
        else:
            await self._refuse(request, send, site, TOO_LARGE)

    def _is_registered(self, request: Request, site: SiteId) -> bool:
        """Whether the key of a request is still the site's: it may have been revoked while the request was open."""
        return self.keys.get(_read_key(request)) == site

    def _find_stranger_problem(self, request: Request, site: SiteId) -> Refusal | None:
        """Why this caller is nobody who may make this request, judged by its method, path, key and signature."""
        if request.method != "POST" or request.scope["path"] not in OPEN_PATHS:
            return 404, "a request for what is not open to sites", "there is nothing here"
        if not site:
            status, note, sentence = REVOKED
            return status, self.former.get(_read_key(request), note), sentence
        return _find_signature_problem(request, site)

    def _find_caller_problem(self, request: Request, site: SiteId) -> Refusal | None:
        """Why this site, whose signature has been verified, may not take part as it is."""
        if (protocol := request.headers.get(PROTOCOL_HEADER, "")[:20]) != str(self.protocol):
            theirs, version = f"protocol {protocol or 'unknown'}", _read_version(request)
            return (
                403,
                f"it speaks {theirs!r} (polyclinic {version!r}), not {self.protocol}",
                f"the server runs polyclinic {__version__} with protocol {self.protocol}, this site "
                f"{version or 'another program'} with {theirs}; install the server's version",
            )
        return self._find_name_problem(request.headers.get(NAMES, "")[:2000], site)

    def _find_name_problem(self, names: str, site: SiteId) -> Refusal | None:
        """Why the names in site.yaml are not those of the key: files of two kits are mixed, or a name was changed."""
        federation, _, named = map(unquote, names.partition("/"))
        for what, theirs, ours in (("site", named, site), ("federation", federation, self.federation)):
            if names and ours and theirs != ours:
                return (
                    403,
                    f"it calls itself the {what} {theirs[:100]!r}",
                    f"its key is that of the {what} {ours}, but `{what}` in site.yaml is {theirs[:100]!r}; use the "
                    "files of one kit",
                )
        return None


def _find_signature_problem(request: Request, site: SiteId) -> Refusal | None:
    """Why the caller does not prove now that it has the private key of the site whose public key it names."""
    signed = request.headers.get(TIMESTAMP, "")[:64]
    try:
        age = time.time() - datetime.fromisoformat(signed).timestamp()
        if not -MAX_CLOCK_LEAD < age < MAX_SIGNATURE_AGE:
            return 401, f"a signed time of {site}'s key that is not now", "the signed time is not now"
        signature = b64decode(request.headers.get(SIGNATURE, ""))
        _parse_key(_read_key(request)).verify(signature, signed.encode(), ec.ECDSA(SHA256()))
    except (ValueError, InvalidSignature, OverflowError):
        return 401, f"a request with {site}'s key but without its signature", "the signature is not that of the key"
    return None


class _Pace:
    """How long the next piece of a body may take."""

    def __init__(self) -> None:
        self.begun, self.passed = time.monotonic(), 0

    def seconds_left(self) -> float:
        allowed = QUIET_SECONDS + self.passed / MIN_BYTES_PER_SECOND
        return max(0.0, self.begun + allowed - time.monotonic())


@lru_cache(maxsize=1024)
def _parse_key(key: bytes) -> ec.EllipticCurvePublicKey:
    found = load_pem_public_key(key)
    if not isinstance(found, ec.EllipticCurvePublicKey):
        raise ValueError("not an elliptic curve's key")
    return found


def _read_version(request: Request) -> str:
    return request.headers.get(VERSION, "")[:40]


def _read_key(request: Request) -> bytes:
    try:
        return b64decode(request.headers.get(KEY, ""), validate=True)
    except ValueError:
        return b""


async def _read_pieces(request: Request) -> AsyncIterator[bytes]:
    """The body as it arrives; raises `TimeoutError` if it does so too slowly."""
    pieces, pace = request.stream(), _Pace()
    while True:
        try:
            async with asyncio.timeout(pace.seconds_left()):
                piece = await anext(pieces)
        except StopAsyncIteration:
            return
        pace.passed += len(piece)
        yield piece


async def _read_body(request: Request, limit: int) -> bytes | None:
    """The whole body; None as soon as it exceeds `limit` bytes."""
    body = bytearray()
    async for piece in _read_pieces(request):
        body += piece
        if len(body) > limit:
            return None
    return bytes(body)


async def _store_body(request: Request, upload: ReplyUpload) -> bool:
    """Store a reply as it arrives; False as soon as it is larger than it may be."""
    held = bytearray()
    async for piece in _read_pieces(request):
        held += piece
        if upload.size + len(held) > upload.most_bytes:
            return False
        if len(held) >= PIECE_BYTES:
            await asyncio.to_thread(upload.write, bytes(held))
            held.clear()
    upload.write(bytes(held))
    upload.flush()  # a full disk has to be noticed here
    return True


def _split_message(message: QueuedMessage) -> Iterator[bytes]:
    for part in message.parts:
        view = memoryview(part)
        for start in range(0, len(view), PIECE_BYTES):
            yield bytes(view[start : start + PIECE_BYTES])


def _replay_body(body: bytes, receive: Receive) -> Receive:
    """A `receive` that delivers the body again, which has been read already."""
    held: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return held.pop() if held else await receive()

    return replay
