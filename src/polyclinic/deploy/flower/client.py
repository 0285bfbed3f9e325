"""A site's connection to the server: a long-lived client of Flower 1.41 that asks for messages and sends replies.

`deploy/processes.py: serve_site` runs it for `polyclinic join`. `flower/server.py` says what Flower does here, and why
this is not `flower-supernode`.
"""

import json
import random
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import httpx
from flwr.common.constant import HEARTBEAT_MIN_INTERVAL
from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.protobuf.client import ProtobufRequestContext
from flwr.supernode.fleet_http_client import FleetHttpClient

from polyclinic.core import EngineError, StoreError
from polyclinic.deploy.flower.connection_errors import Disconnected, explain_status, explain_transport_error
from polyclinic.deploy.flower.gateway import MESSAGE_NAME, NEXT_MESSAGE, PIECE_BYTES, REPLY
from polyclinic.deploy.flower.request_headers import IdentityInterceptor, ServerClock, SigningInterceptor
from polyclinic.deploy.provisioning.certificates import check_site_files, read_private_key
from polyclinic.storage import messages
from polyclinic.storage.files import write_json

MAX_MESSAGE_BYTES = 4 << 30
"""Of a message to a site, unless the site knows better."""
MAX_ANSWER_BYTES = 1 << 20
"""Of an answer that is no message."""
READ_SECONDS = 60.0
"""How long a transfer may pause."""
HEARTBEAT_SECONDS = HEARTBEAT_MIN_INTERVAL
"""A site that is silent for twice as long counts as away. Flower accepts no shorter interval."""
AWAY_SECONDS = 5.0
"""The longest pause between two tries while the server is merely away."""


class SiteConnection:
    """Connects a site to the server, and reconnects after every interruption, whatever its reason.

    Args:
        server: The server's address, HOST:PORT.
        authority: The file of the federation's certificate authority; None connects without TLS.
        key: The file of the site's private key, with which every request is signed. Both files are read again before
            every new connection, so that they can be replaced while the site runs.
        folder: Where the number of the current node is kept.
        answer: Turns a message into a reply. It never raises, and answering a message twice has no further effect.
        report: Is called with a sentence whenever the state of the connection changes.
        is_idle: Whether the site takes part in no run at the moment.
        names: The names of federation and site in site.yaml, which the server compares with the owner of the key.
        largest_message: The most bytes of a message that the site takes at the moment.
        note_absence: Is called whenever the connection was interrupted, or a reply came too late.
        call_people: Is called with a sentence when somebody has to mend something.
        retry: The longest pause in seconds between two tries while somebody has to mend something.
        is_done: Whether the site shall not connect again once the connection has ended.
    """

    def __init__(
        self,
        server: str,
        authority: Path | None,
        key: Path,
        folder: Path,
        answer: Callable[[bytes], bytes],
        report: Callable[[str], None] = lambda _: None,
        is_idle: Callable[[], bool] = lambda: False,
        names: tuple[str, str] | None = None,
        call_people: Callable[[str], None] = lambda _: None,
        retry: float = 300.0,
        largest_message: Callable[[], int] = lambda: MAX_MESSAGE_BYTES,
        note_absence: Callable[[], None] = lambda: None,
        is_done: Callable[[], bool] = lambda: False,
    ) -> None:
        self.server, self.folder, self.report, self.is_idle = server, folder, report, is_idle
        self.authority, self.key, self.names = authority, key, names
        self.answer, self.secure, self.call_people, self.retry = answer, authority is not None, call_people, retry
        self.largest_message, self.note_absence, self.is_done = largest_message, note_absence, is_done
        self.stop = threading.Event()
        self.clock = ServerClock(report)
        self.certificate_end: datetime | None = None
        """Until when the server's certificate is valid, once there was a connection with TLS."""
        self._open_client()

    def _open_client(self) -> None:
        """Read key and authority from their files, and make an HTTP client of them."""
        private = read_private_key(self.key)
        public = private.public_key()
        self.client = _BoundedClient.from_server_address(
            self.server,
            self.authority is None,
            None if self.authority is None else self.authority.read_bytes(),
            [IdentityInterceptor(self.names), SigningInterceptor(private, self.clock, self._read_certificate)],
        )
        self.public = public_key_to_bytes(public)

    def serve_forever(self) -> None:
        """Answer messages until `stop` is set, then close the connection. Can be called once."""
        patience = _Patience(self.retry)
        was_connected = False
        while not self.stop.is_set():
            try:
                with self.client, self._stay_connected():
                    self.report(f"{patience.describe_recovery()}connected to {self.server}")
                    patience, was_connected = _Patience(self.retry), True
                    while not self.stop.is_set():
                        self._answer_next_message()
            except Disconnected as reason:
                self.note_absence()
                if self.is_done():
                    self.report(f"{self.server} has closed; this site is done, and ends")
                    return
                is_over = was_connected and not reason.needs_people and self.is_idle()
                sentence = f"{self.server} has closed; waiting for the next run" if is_over else str(reason)
                self._report_trouble(sentence, reason.needs_people, patience)
            self._reopen_client(patience)

    def _report_trouble(self, sentence: str, needs_people: bool, patience: "_Patience") -> None:
        """Report a trouble once, and pause until the next try."""
        if patience.is_news(sentence, needs_people):
            again = f"; this site tries again by itself, every {_format_seconds(self.retry)} at the latest"
            self.report(sentence + again * needs_people)
            if needs_people:
                self.call_people(sentence)
        self.stop.wait(patience.next_pause(needs_people))

    def _reopen_client(self, patience: "_Patience") -> None:
        """Read the files of key and authority again until they can be used, and make a new client of them."""
        while not self.stop.is_set():
            try:
                if self.authority is not None:
                    check_site_files(self.authority, self.key)
                self._open_client()
                return
            except (EngineError, OSError, ValueError) as error:  # perhaps they are just being replaced
                self._report_trouble(f"{error}", True, patience)

    def _read_certificate(self, response: httpx.Response) -> None:
        """Note until when the server's certificate is valid."""
        with suppress(KeyError, AttributeError, ValueError, TypeError):
            shown = response.extensions["network_stream"].get_extra_info("ssl_object").getpeercert()
            self.certificate_end = datetime.fromtimestamp(ssl.cert_time_to_seconds(shown["notAfter"]), UTC)

    @contextmanager
    def _stay_connected(self) -> Iterator[None]:
        node = self._activate_node()
        gone = threading.Event()
        threading.Thread(target=self._send_heartbeats, args=(node, gone), daemon=True).start()
        try:
            yield
        finally:
            gone.set()
            with suppress(httpx.HTTPError):
                self.client.DeactivateNode(DeactivateNodeRequest(node_id=node.node_id))

    def _activate_node(self) -> Node:
        request = ActivateNodeRequest(public_key=self.public, heartbeat_interval=HEARTBEAT_SECONDS)
        with self._translate_errors():
            try:
                number = self.client.ActivateNode(request).node_id
            except httpx.HTTPStatusError as error:
                if error.response.status_code != 412:
                    raise
                self._deactivate_predecessor()
                number = self.client.ActivateNode(request).node_id
        with suppress(StoreError):  # without it the next start takes a minute longer
            write_json(self.folder / "node.json", {"node": number})
        return Node(node_id=number)

    def _deactivate_predecessor(self) -> None:
        """Sign off the site's previous process, which ended without doing so and still counts as connected."""
        with suppress(OSError, ValueError, KeyError, httpx.HTTPStatusError):
            former = json.loads((self.folder / "node.json").read_text())
            self.client.DeactivateNode(DeactivateNodeRequest(node_id=int(former["node"])))

    def _send_heartbeats(self, node: Node, gone: threading.Event) -> None:
        while not gone.wait(HEARTBEAT_SECONDS * 0.4):
            with suppress(httpx.HTTPError):
                self.client.SendNodeHeartbeat(SendNodeHeartbeatRequest(node=node, heartbeat_interval=HEARTBEAT_SECONDS))

    def _answer_next_message(self) -> None:
        with self._translate_errors():
            found = self._pull_message()
        if found is None:
            return
        name, message = found
        reply = self._refuse_size() if message is None else self.answer(message)
        del message, found
        with self._translate_errors():
            self._push_reply(name, reply)

    def _pull_message(self) -> tuple[str, bytes | None] | None:
        """The next message and its name, without its bytes if they are too many; None if there is none for now."""
        with self._send_request(NEXT_MESSAGE, [], 0, {}) as response:
            if response.status_code == httpx.codes.NO_CONTENT:
                return None
            name, size = response.headers[MESSAGE_NAME], int(response.headers["content-length"])
            if size > self.largest_message():
                return name, None
            return name, b"".join(response.iter_raw(PIECE_BYTES))

    def _push_reply(self, name: str, reply: bytes) -> None:
        with self._send_request(
            REPLY, _Pieces(reply), len(reply), {MESSAGE_NAME: name}, (httpx.codes.GONE,)
        ) as response:
            if response.status_code == httpx.codes.GONE:  # nobody waits for it any more: the run went on without it
                self.note_absence()

    @contextmanager
    def _send_request(
        self, path: str, content: Iterable[bytes], size: int, headers: dict[str, str], also: Sequence[int] = ()
    ) -> Iterator[httpx.Response]:
        """Send a signed request, and raise `httpx.HTTPStatusError` unless it is answered with success or `also`."""
        http = self.client._client
        address, headers = f"{self.client._base_url}{path}", {**headers, "content-length": str(size)}
        request = http.build_request("POST", address, content=content, headers=headers, timeout=READ_SECONDS)
        response = self.client._send(ProtobufRequestContext(path, None, request), stream=True)
        try:
            if response.status_code not in also:
                response.raise_for_status()
            if response.status_code == httpx.codes.NO_CONTENT:
                response.read()  # to its end, so that the connection can be used again
            yield response
        finally:
            response.close()

    def _refuse_size(self) -> bytes:
        """The reply to a message that is larger than this site takes."""
        most = self.largest_message() / 1e6
        why = f"a message of more than {most:.0f} MB, the most that this site takes now"
        self.report(f"refused: {why}")
        return messages.encode({"run": "", "failure": "refused", "why": why}, {})

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Raise `Disconnected` for every error of a request, with a sentence that says what is wrong."""
        try:
            yield
        except httpx.HTTPStatusError as error:
            raise explain_status(error.response, self.server) from None
        except httpx.TransportError as error:
            raise explain_transport_error(error, self.server, self.secure) from None
        except (ValueError, KeyError) as error:
            raise Disconnected(
                f"a message was lost on the way ({type(error).__name__}); the server will send it again"
            ) from None


class _BoundedClient(FleetHttpClient):
    """Flower's client, which takes no answer of any size and does not wait for ever."""

    def _send(self, context: ProtobufRequestContext, *, stream: bool = False) -> httpx.Response:
        response: httpx.Response = super()._send(context, stream=True)
        context.request.extensions["timeout"]["read"] = READ_SECONDS
        if stream or response.is_error:  # Flower bounds errors itself
            return response
        content = bytearray()
        try:
            for piece in response.iter_raw(PIECE_BYTES):
                content += piece
                if len(content) > MAX_ANSWER_BYTES:
                    raise httpx.RemoteProtocolError("an answer that is too large", request=context.request)
        finally:
            response.close()
        extensions = response.extensions
        return httpx.Response(
            response.status_code, content=bytes(content), request=context.request, extensions=extensions
        )


class _Pieces:
    """Bytes to send in pieces, as often as needed."""

    def __init__(self, data: bytes) -> None:
        self.data = memoryview(data)

    def __iter__(self) -> Iterator[bytes]:
        for start in range(0, len(self.data), PIECE_BYTES):
            yield bytes(self.data[start : start + PIECE_BYTES])


class _Patience:
    """How long to wait before the next try: longer from try to try, and longest where people have to mend something."""

    def __init__(self, longest: float) -> None:
        self.longest, self.wait, self.since = longest, 1.0, time.monotonic()
        self.reported, self.needed_people = "", False

    def is_news(self, sentence: str, needs_people: bool) -> bool:
        """Whether this trouble is another one than before."""
        if needs_people and not self.needed_people:
            self.since, self.needed_people = time.monotonic(), True
        news, self.reported = sentence != self.reported, sentence
        return news

    def next_pause(self, needs_people: bool) -> float:
        """Seconds until the next try; never the same for many sites at once."""
        longest = self.longest if needs_people else min(self.longest, AWAY_SECONDS)
        pause, self.wait = min(self.wait, longest), min(self.wait * 1.5, longest)
        return pause * random.uniform(0.8, 1.0)

    def describe_recovery(self) -> str:
        """The beginning of the sentence about a connection: how long something had to be mended, if so."""
        seconds = time.monotonic() - self.since
        return f"mended after {_format_seconds(seconds)}: " if self.needed_people else ""


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
