"""A site's connection to the server: a long-lived client of Flower 1.41 that pulls messages and pushes replies.

`deploy/processes.py: serve_site` runs it for `polyclinic join`. `flower/server.py` says what Flower does here, and why
this is not `flower-supernode`.
"""

import json
import random
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

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
from flwr.supernode.fleet_http_client import FleetHttpClient

from polyclinic.core import EngineError, StoreError
from polyclinic.deploy.flower.connection_errors import Disconnected, explain_status, explain_transport_error
from polyclinic.deploy.flower.request_headers import IdentityInterceptor, ServerClock, SigningInterceptor
from polyclinic.deploy.provisioning.certificates import check_site_files, read_private_key
from polyclinic.federation.engines.flower_envelope import pack_message, unpack_message
from polyclinic.storage.files import write_json

RECORD, NAME = "polyclinic", "message"
NONCE = 16
"""Random bytes at the end of every message to a site; see `flower/server.py: build_message`."""
HEARTBEAT_SECONDS = HEARTBEAT_MIN_INTERVAL
"""A site that is silent for twice as long counts as away. Flower accepts no shorter interval."""
AWAY_SECONDS = 5.0
"""The longest pause between two tries while the server is merely away."""


def build_reply(message: Message, answer: Callable[[bytes], bytes]) -> Message:
    """Answer a message of Flower's: take off the random end, and wrap the reply."""
    return Message(pack_message(answer(unpack_message(message)[:-NONCE])), reply_to=message)


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
        call_people: Is called with a sentence when somebody has to mend something.
        retry: The longest pause in seconds between two tries while somebody has to mend something.
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
    ) -> None:
        self.server, self.folder, self.report, self.is_idle = server, folder, report, is_idle
        self.authority, self.key, self.names = authority, key, names
        self.answer, self.secure, self.call_people, self.retry = answer, authority is not None, call_people, retry
        self.stop = threading.Event()
        self.clock = ServerClock(report)
        self.certificate_end: datetime | None = None
        """Until when the server's certificate is valid, once there was a connection with TLS."""
        self._open_client()

    def _open_client(self) -> None:
        """Read key and authority from their files, and make an HTTP client of them."""
        private = read_private_key(self.key)
        public = private.public_key()
        self.client = FleetHttpClient.from_server_address(
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
                with self.client, self._stay_connected() as node:
                    self.report(f"{patience.describe_recovery()}connected to {self.server}")
                    patience, was_connected = _Patience(self.retry), True
                    while not self.stop.is_set():
                        self._answer_messages(node)
            except Disconnected as reason:
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
        """The next message; None if there was none for as long as the server holds the request open."""
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
        """Raise `Disconnected` for every error of a request, with a sentence that says what is wrong."""
        try:
            yield
        except httpx.HTTPStatusError as error:
            raise explain_status(error.response, self.server) from None
        except httpx.TransportError as error:
            raise explain_transport_error(error, self.server, self.secure) from None
        except (ObjectPullError, ObjectPushError, ValueError, KeyError, TypeError) as error:
            raise Disconnected(
                f"a message was lost on the way ({type(error).__name__}); the server will send it again"
            ) from None


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
