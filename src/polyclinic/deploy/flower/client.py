"""A site's end of Flower 1.41: one long-lived process that asks the server for work and answers it.

See `engines.flower` for what Flower does here, and why this is not `flower-supernode`.
"""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import quote

import httpx
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.constant import HEARTBEAT_MIN_INTERVAL
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectPushError,
    pull_and_inflate_object_from_tree,
    push_objects,
)
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from polyclinic import __version__
from polyclinic.core.errors import EngineError, StoreError
from polyclinic.deploy.flower.gateway import NAMES, VERSION
from polyclinic.deploy.provisioning.certificates import read_private_key
from polyclinic.federation.engines.flower_envelope import pack_message, unpack_message
from polyclinic.storage.run_files import write_json

RECORD, NAME = "polyclinic", "message"
NONCE = 16
"""Random bytes at the end of every message to a site (see `engines.flower.order`)."""
BEAT = HEARTBEAT_MIN_INTERVAL
"""Seconds: a site that is silent for twice as long is away. Flower takes no less."""
SKEW = 5
"""Seconds that a site's clock may be ahead, by Flower's measure."""
UNTRUSTED = {
    9: "the server's certificate is not valid yet; set this machine's clock",
    10: "the server's certificate has expired; ask the coordinator to run `polyclinic provision rotate KITS server`",
    18: "the server's certificate is not of the CA in this kit; ask the coordinator for the right ca.crt",
    19: "the server's certificate is not of the CA in this kit; ask the coordinator for the right ca.crt",
    20: "the server's certificate is not of the CA in this kit; ask the coordinator for the right ca.crt",
    62: "the server's certificate is for another host name; write the server's own name in site.yaml",
    64: "the server's certificate is for another address; write the server's own address in site.yaml",
}


def build_reply(message: Message, answer: Callable[[bytes], bytes]) -> Message:
    """What a site does with a message."""
    return Message(pack_message(answer(unpack_message(message)[:-NONCE])), reply_to=message)


class Disconnected(Exception):  # noqa: N818
    """No connection for now; it is worth trying again."""


class SiteConnection:
    """A site at work. `answer` turns one message into another: it never raises, and a message that comes again changes
    nothing; `tell` says how things stand; `resting`: whether no run is under way. `names`: as site.yaml has them, the
    federation's and the site's, for the server to compare with whose key it is."""

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
    ) -> None:
        self.server, self.folder, self.tell, self.resting = server, folder, report, is_idle
        self.stop = threading.Event()
        private = read_private_key(key)
        public = private.public_key()
        self.client = FleetHttpClient.from_server_address(
            server,
            authority is None,
            None if authority is None else authority.read_bytes(),
            [_IdentityInterceptor(names), NodeAuthHttpInterceptor(private, public)],
        )
        self.public = public_key_to_bytes(public)
        self.answer, self.secure = answer, authority is not None

    def serve_forever(self) -> None:
        """Serve until `stop` is set; go on after every interruption. Once only: then the connection is closed."""
        with self.client:
            self._run_session()

    def _run_session(self) -> None:
        said, wait, known = "", 1.0, False
        while not self.stop.is_set():
            try:
                with self._stay_connected() as node:
                    self.tell(f"connected to {self.server}")
                    said, wait, known = "", 1.0, True
                    while not self.stop.is_set():
                        self._answer_messages(node)
            except Disconnected as reason:
                closed = f"{self.server} has closed; waiting for the next run"
                sentence = closed if known and self.resting() else str(reason)
                if sentence != said:
                    self.tell(said := sentence)
                self.stop.wait(wait)
                wait = min(wait * 1.5, 5.0)

    @contextmanager
    def _stay_connected(self) -> Iterator[Node]:
        node = self._activate_node()
        gone = threading.Event()
        threading.Thread(target=self._send_heartbeats, args=(node, gone), daemon=True).start()
        try:
            yield node
        finally:
            gone.set()
            with suppress(httpx.HTTPError):
                self.client.DeactivateNode(DeactivateNodeRequest(node_id=node.node_id))

    def _activate_node(self) -> Node:
        request = ActivateNodeRequest(public_key=self.public, heartbeat_interval=BEAT)
        with self._translate_errors():
            try:
                number = self.client.ActivateNode(request).node_id
            except httpx.HTTPStatusError as error:
                if error.response.status_code != 412:
                    raise
                self._deactivate_predecessor()
                number = self.client.ActivateNode(request).node_id
        with suppress(StoreError):  # it spares the next start a minute, no more
            write_json(self.folder / "node.json", {"node": number})
        return Node(node_id=number)

    def _deactivate_predecessor(self) -> None:
        """The server still counts on a process of this site that ended without a word: take leave in its name."""
        with suppress(OSError, ValueError, KeyError, httpx.HTTPStatusError):
            number = int(json.loads((self.folder / "node.json").read_text())["node"])
            self.client.DeactivateNode(DeactivateNodeRequest(node_id=number))

    def _send_heartbeats(self, node: Node, gone: threading.Event) -> None:
        while not gone.wait(BEAT * 0.4):
            with suppress(httpx.HTTPError):
                self.client.SendNodeHeartbeat(SendNodeHeartbeatRequest(node=node, heartbeat_interval=BEAT))

    def _answer_messages(self, node: Node) -> None:
        with self._translate_errors():
            message = self._pull_message(node)
        if message is None:
            return
        begun = time.perf_counter()
        reply = build_reply(message, self.answer)
        with self._translate_errors():
            self._push_reply(node, reply, time.perf_counter() - begun)

    def _pull_message(self, node: Node) -> Message | None:
        """The next message; the server keeps this request until there is one, for a while."""
        found = self.client.PullMessages(PullMessagesRequest(node=node))
        if not found.messages_list:
            return None
        run, tree = found.messages_list[0].metadata.run_id, found.message_object_trees[0]
        message = pull_and_inflate_object_from_tree(
            tree,
            make_pull_object_fn_protobuf(self.client.PullObject, node, run),
            make_confirm_message_received_fn_protobuf(self.client.ConfirmMessageReceived, node, run),
            return_type=Message,
            initial_backoff=0.1,
        )
        message.metadata.__dict__["_message_id"] = tree.object_id
        return message

    def _push_reply(self, node: Node, reply: Message, seconds: float) -> None:
        reply.metadata.__dict__["_message_id"] = reply.object_id
        with no_object_id_recompute():
            asked = self.client.PushMessages(
                PushMessagesRequest(
                    node=node,
                    messages_list=[message_to_proto(remove_content_from_message(reply))],
                    message_object_trees=[get_object_tree(reply)],
                    clientapp_runtime_list=[seconds],
                )
            )
            push = make_push_object_fn_protobuf(self.client.PushObject, node, reply.metadata.run_id, asked.session_id)
            push_objects(get_all_nested_objects(reply), push, object_ids_to_push=set(asked.objects_to_push))

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Errors on the way as sentences: `Away` where waiting may help, `EngineError` where somebody must act."""
        try:
            yield
        except httpx.HTTPStatusError as error:
            raise _explain_status(error.response, self.server) from None
        except httpx.TransportError as error:
            raise _explain_transport_error(error, self.server, self.secure) from None
        except (ObjectPullError, ObjectPushError, ValueError, KeyError, TypeError) as error:
            raise Disconnected(
                f"a message was lost on the way ({type(error).__name__}); the server will send it again"
            ) from None


class _IdentityInterceptor:
    """Says in every request which polyclinic is speaking, and for whom it takes itself."""

    def __init__(self, names: tuple[str, str] | None) -> None:
        self.headers = {VERSION.decode(): __version__}
        if names is not None:
            self.headers[NAMES.decode()] = "/".join(quote(name, safe="") for name in names)

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        context.request.headers.update(self.headers)
        return call_next(context)


def _explain_status(response: httpx.Response, server: str) -> Exception:
    with suppress(ValueError, KeyError, TypeError):
        return EngineError(f"{server} refuses this site: {response.json()['polyclinic']}")
    ahead = _clock_skew(response)
    if response.status_code == 401 and ahead is not None and not -300 < ahead < SKEW:
        return EngineError(
            f"this machine's clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the server's; "
            "set both by NTP"
        )
    if response.status_code == 412:
        return Disconnected(f"{server} still counts on another process of this site; is one running? trying again")
    return Disconnected(f"{server} no longer knows this connection ({response.status_code}); connecting anew")


def _clock_skew(response: httpx.Response) -> float | None:
    """Seconds by which this machine's clock is ahead of the server's."""
    try:
        return _format_clock() - parsedate_to_datetime(response.headers["date"]).timestamp()
    except (KeyError, ValueError):
        return None


def _format_clock() -> float:
    return time.time()


def _explain_transport_error(error: httpx.TransportError, server: str, secure: bool) -> Exception:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            other = f"the server's certificate is not trusted ({cause.verify_message})"
            return EngineError(f"{server}: {UNTRUSTED.get(cause.verify_code, other)}")
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
