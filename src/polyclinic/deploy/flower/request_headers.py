"""What a site adds to its requests: its names and versions, and its signature over the server's time."""

import time
from base64 import b64encode
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from urllib.parse import quote

import httpx
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext

from polyclinic.core import PROTOCOL, __version__
from polyclinic.deploy.flower.gateway import NAMES, PROTOCOL_HEADER, VERSION
from polyclinic.deploy.provisioning.certificates import PrivateKey

SENT = "polyclinic.sent"
"""Of a request's extensions: when it was sent, by this machine's clock."""
MAX_CLOCK_ERROR = 86_400.0
"""Seconds by which this machine's clock may be wrong and is still corrected for."""


class IdentityInterceptor:
    """Adds to every request the protocol, the version of polyclinic and the names in site.yaml."""

    def __init__(self, names: tuple[str, str] | None) -> None:
        self.headers = {PROTOCOL_HEADER: str(PROTOCOL), VERSION: __version__}
        if names is not None:
            self.headers[NAMES] = "/".join(quote(name, safe="") for name in names)

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        context.request.headers.update(self.headers)
        return call_next(context)


class ServerClock:
    """This machine's clock, corrected by what the server says of its own once it has refused a signed time.

    Flower refuses a time that is more than 5 s ahead of the server's, or 5 min behind.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self.report, self.correction = report, 0.0

    def now(self) -> datetime:
        return datetime.fromtimestamp(time.time() - self.correction, UTC)

    def correct(self, response: httpx.Response) -> bool:
        """Take the server's time from now on; False if it differs from this clock by nothing, or by too much."""
        ahead = read_clock_skew(response)
        if ahead is None or abs(ahead) > MAX_CLOCK_ERROR or abs(ahead - self.correction) < 2:
            return False
        self.correction = ahead
        self.report(f"{describe_skew(ahead)}; signatures are corrected for that, but set it by NTP")
        return True


class SigningInterceptor:
    """Signs the time of every request, as Flower's own interceptor does; once more if this machine's clock is wrong."""

    def __init__(self, key: PrivateKey, clock: ServerClock, look: Callable[[httpx.Response], None]) -> None:
        self.key, self.clock, self.look = key, clock, look
        self.public = b64encode(public_key_to_bytes(key.public_key())).decode("ascii")
        self.has_looked = False

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        self._sign(context.request)
        response = call_next(context)
        if response.status_code == 401 and self.clock.correct(response):
            response.close()
            self._sign(context.request)
            response = call_next(context)
        if not self.has_looked and response.is_success:
            self.look(response)
            self.has_looked = True
        return response

    def _sign(self, request: httpx.Request) -> None:
        now = self.clock.now().isoformat()
        request.extensions = {**request.extensions, SENT: time.time()}
        signature = sign_message(self.key, now.encode("ascii"))
        request.headers[FLEET_HTTP_PUBLIC_KEY_HEADER] = self.public
        request.headers[TIMESTAMP_HEADER] = now
        request.headers[FLEET_HTTP_SIGNATURE_HEADER] = b64encode(signature).decode("ascii")


def describe_skew(ahead: float) -> str:
    """A sentence without an end: by how many seconds this clock is ahead of the server's."""
    return f"this machine's clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the server's"


def read_clock_skew(response: httpx.Response) -> float | None:
    """Seconds by which this machine's clock is surely ahead of the server's; None if the server sent no date.

    The date was set at some moment between request and response: no skew is seen where that explains the difference.
    """
    try:  # the date is cut off to a full second
        date = parsedate_to_datetime(response.headers["date"]).timestamp() + 0.5
    except (KeyError, ValueError):
        return None
    now = time.time()
    least, most = response.request.extensions.get(SENT, now) - date, now - date
    return least if least > 0 else min(most, 0.0)
