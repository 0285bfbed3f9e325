"""Why a site has no connection, as one sentence that says who mends it."""

import socket
import ssl
from contextlib import suppress

import httpx

from polyclinic.deploy.flower.request_headers import MAX_CLOCK_ERROR, describe_skew, read_clock_skew

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
    """There is no connection at the moment; trying again may help.

    `needs_people`: somebody has to mend something first, here or at the server, so that tries may be rare.
    """

    def __init__(self, sentence: str, needs_people: bool = False) -> None:
        super().__init__(sentence)
        self.needs_people = needs_people


def explain_status(response: httpx.Response, server: str) -> Disconnected:
    """Explain a response that is an error."""
    ahead = read_clock_skew(response)
    if response.status_code == 401 and ahead is not None and abs(ahead) > MAX_CLOCK_ERROR:
        return Disconnected(f"{describe_skew(ahead)}; set both by NTP", needs_people=True)
    with suppress(ValueError, KeyError, TypeError):
        return Disconnected(f"{server} refuses this site: {response.json()['polyclinic']}", needs_people=True)
    if response.status_code == 412:
        return Disconnected(
            f"{server} still counts another process of this site as connected; is one running? trying again"
        )
    return Disconnected(f"{server} no longer knows this connection ({response.status_code}); connecting anew")


def explain_transport_error(error: httpx.TransportError, server: str, secure: bool) -> Disconnected:
    """Explain a request without a response. `secure`: whether it was sent over TLS."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            other = f"the server's certificate is not trusted ({cause.verify_message})"
            return Disconnected(f"{server}: {TLS_PROBLEMS.get(cause.verify_code, other)}", needs_people=True)
        if isinstance(cause, socket.gaierror):
            return Disconnected(
                f"{server}: no such host is known here; check `server` in site.yaml, and DNS; trying again"
            )
        if isinstance(cause, ssl.SSLError) and cause.reason == "WRONG_VERSION_NUMBER":
            return Disconnected(f"{server} does not speak TLS; check host and port in site.yaml", needs_people=True)
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, httpx.ProxyError):
        return Disconnected(
            f"the proxy in HTTPS_PROXY does not connect to {server} ({error}); ask those who run it, or correct it",
            needs_people=True,
        )
    if isinstance(error, httpx.RemoteProtocolError) and not secure:
        return Disconnected(f"{server} hangs up; if it speaks TLS, set insecure: false in site.yaml; trying again")
    return Disconnected(
        f"{server} cannot be reached ({type(error).__name__}); is it running, and its port open? trying again"
    )
