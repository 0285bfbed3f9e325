"""A site's connection to the server: a long-lived client of Flower 1.41 that asks for messages and sends replies.

`deploy/processes.py: serve_site` runs it for `polyclinic join`. `flower/server.py` says what Flower does here, and why
this is not `flower-supernode`.
"""

import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import quote

import httpx
from flwr.common.constant import HEARTBEAT_MIN_INTERVAL
from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from polyclinic.core import EngineError, StoreError, __version__
from polyclinic.deploy.flower.gateway import MESSAGE_NAME, NAMES, NEXT_MESSAGE, PIECE_BYTES, REPLY, VERSION
from polyclinic.deploy.provisioning.certificates import read_private_key
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
MAX_CLOCK_LEAD = 5
"""Seconds that a site's clock may be ahead before Flower rejects its signatures."""
TLS_PROBLEMS = {
    9: "the server's certificate is not valid yet; set this machine's clock",
    10: "the server's certificate has expired; ask the coordinator to run `polyclinic provision rotate KITS server`",
    18: "the server's certificate is not of the CA in this kit; ask the coordinator for the right ca.crt",
    19: "the server's certificate is not of the CA in this kit; ask the coordinator for the right ca.crt",
    20: "the server's certificate is not of the CA in this kit; ask the coordinator for the right ca.crt",
    62: "the server's certificate is for another host name; write the server's own name in site.yaml",
    64: "the server's certificate is for another address; write the server's own address in site.yaml",
}


class Disconnected(Exception):  # noqa: N818
    """There is no connection at the moment; trying again may help."""


class SiteConnection:
    """Connects a site to the server, and reconnects after every interruption.

    Args:
        server: The server's address, HOST:PORT.
        authority: The file of the federation's certificate authority; None connects without TLS.
        key: The file of the site's private key, with which every request is signed.
        folder: Where the number of the current node is kept.
        answer: Turns a message into a reply. It never raises, and answering a message twice has no further effect.
        report: Is called with a sentence whenever the state of the connection changes.
        is_idle: Whether the site takes part in no run at the moment.
        names: The names of federation and site in site.yaml, which the server compares with the owner of the key.
        largest_message: The most bytes of a message that the site takes at the moment.
        note_absence: Is called whenever the connection was interrupted, or a reply came too late.
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
        largest_message: Callable[[], int] = lambda: MAX_MESSAGE_BYTES,
        note_absence: Callable[[], None] = lambda: None,
    ) -> None:
        self.largest_message, self.note_absence = largest_message, note_absence
        self.server, self.folder, self.report, self.is_idle = server, folder, report, is_idle
        self.stop = threading.Event()
        private = read_private_key(key)
        public = private.public_key()
        self.client = _BoundedClient.from_server_address(
            server,
            authority is None,
            None if authority is None else authority.read_bytes(),
            [_IdentityInterceptor(names), NodeAuthHttpInterceptor(private, public)],
        )
        self.public = public_key_to_bytes(public)
        self.answer, self.secure = answer, authority is not None

    def serve_forever(self) -> None:
        """Answer messages until `stop` is set, then close the connection. Can be called once."""
        reported, wait, was_connected = "", 1.0, False
        with self.client:
            while not self.stop.is_set():
                try:
                    with self._stay_connected():
                        self.report(f"connected to {self.server}")
                        reported, wait, was_connected = "", 1.0, True
                        while not self.stop.is_set():
                            self._answer_next_message()
                except Disconnected as reason:
                    self.note_absence()
                    is_over = was_connected and self.is_idle()
                    sentence = f"{self.server} has closed; waiting for the next run" if is_over else str(reason)
                    if sentence != reported:
                        self.report(reported := sentence)
                    self.stop.wait(wait)
                    wait = min(wait * 1.5, 5.0)

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
        """Raise `Disconnected` for errors where retrying may help, and `EngineError` where somebody must act."""
        try:
            yield
        except httpx.HTTPStatusError as error:
            raise _explain_status(error.response, self.server) from None
        except httpx.TransportError as error:
            raise _explain_transport_error(error, self.server, self.secure) from None
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


class _IdentityInterceptor:
    """Adds to every request the version of polyclinic and the names in site.yaml."""

    def __init__(self, names: tuple[str, str] | None) -> None:
        self.headers = {VERSION: __version__}
        if names is not None:
            self.headers[NAMES] = "/".join(quote(name, safe="") for name in names)

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        context.request.headers.update(self.headers)
        return call_next(context)


def _explain_status(response: httpx.Response, server: str) -> Exception:
    with suppress(ValueError, KeyError, TypeError):
        return EngineError(f"{server} refuses this site: {response.json()['polyclinic']}")
    ahead = _clock_skew(response)
    if response.status_code == 401 and ahead is not None and not -300 < ahead < MAX_CLOCK_LEAD:
        return EngineError(
            f"this machine's clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the server's; "
            "set both by NTP"
        )
    if response.status_code == 412:
        return Disconnected(
            f"{server} still counts another process of this site as connected; is one running? trying again"
        )
    return Disconnected(f"{server} no longer knows this connection ({response.status_code}); connecting anew")


def _clock_skew(response: httpx.Response) -> float | None:
    """Seconds by which this machine's clock is ahead of the server's; None if the server sent no date."""
    try:
        return time.time() - parsedate_to_datetime(response.headers["date"]).timestamp()
    except (KeyError, ValueError):
        return None


def _explain_transport_error(error: httpx.TransportError, server: str, secure: bool) -> Exception:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            other = f"the server's certificate is not trusted ({cause.verify_message})"
            return EngineError(f"{server}: {TLS_PROBLEMS.get(cause.verify_code, other)}")
        if isinstance(cause, socket.gaierror):
            return Disconnected(
                f"{server}: no such host is known here; check `server` in site.yaml, and DNS; trying again"
            )
        if isinstance(cause, ssl.SSLError) and cause.reason == "WRONG_VERSION_NUMBER":
            return EngineError(f"{server} does not speak TLS; check host and port in site.yaml")
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, httpx.RemoteProtocolError) and not secure:
        return Disconnected(f"{server} hangs up; if it speaks TLS, set insecure: false in site.yaml; trying again")
    return Disconnected(
        f"{server} cannot be reached ({type(error).__name__}); is it running, and its port open? trying again"
    )
