"""Limits on the connections to the server, so that nobody without a key uses up its memory, time or descriptors.

A connection counts as unsigned until a request of it carries the valid signature of a registered site. An unsigned one
has seconds to live, and when there are too many of them, one is closed to make room for the new one: if one address has
too many, its oldest; else the oldest of the address that has most, and only at last of one from which sites have signed
before. So sites that share an address with an attacker are not locked out, connections of sites are never closed in
favour of strangers' ones, and strangers with few addresses keep no new connection of others out.
"""

import asyncio
import contextlib
import errno
import ipaddress
import resource
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from polyclinic.core import SiteId

UNSIGNED_SECONDS = 10.0
"""From the first packet to the end of the first signed request's head: TLS handshake included."""
IDLE_SECONDS = 75.0
"""How long a site's connection may be without a request, or in the middle of a request's head."""
SITE_CONNECTIONS = 4
"""Of one site; it needs two or three."""
SITE_ADDRESSES = 4
"""How many addresses are remembered of a site, from which it has signed."""
SPARE_DESCRIPTORS = 128
"""Never used for connections: for the files of the run."""
MAX_DESCRIPTORS = 1 << 16
"""As many as are asked of the system, if it sets no limit."""
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def raise_descriptor_limit() -> int:
    """Allow this process as many descriptors as the system lets it have, and return how many these are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a system may allow less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, MAX_DESCRIPTORS)


@dataclass(eq=False)
class Connection:
    """One connection to the server."""

    socket: socket.socket
    address: str
    """The network it comes from: an IPv4 address, or the first 64 bits of an IPv6 address."""
    site: SiteId = ""
    """Whose signature a request of it carried; "": nobody's yet."""
    requests: int = 0
    """Signed requests that are being answered."""
    since: float = field(default_factory=time.monotonic)
    """When it was opened; of a site's connection, when its last request ended."""

    def close(self) -> None:
        """Cut the connection off; the loop that reads it then releases its descriptor."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


class ConnectionLimits:
    """Accepts connections, and closes those that are too many, too old or too quiet.

    Args:
        sites: The number of registered sites.
        descriptors: How many descriptors this process may have.
        refused: Is called with "" and a reason for every connection that is closed.
    """

    def __init__(self, sites: int, descriptors: int, refused: Callable[[SiteId, str], None]) -> None:
        self.most_unsigned = min(
            4 * sites + 64, max(8, descriptors - SPARE_DESCRIPTORS - (SITE_CONNECTIONS + 1) * sites)
        )
        self.most_per_address = max(4, self.most_unsigned // 2)
        self.refused = refused
        self.connections: set[Connection] = set()
        self.addresses: dict[SiteId, list[str]] = {}
        """From where each site has signed, the last address at the end."""

    async def accept_forever(
        self,
        listener: socket.socket,
        make_protocol: Callable[[Connection], asyncio.Protocol],
        tls: ssl.SSLContext | None,
    ) -> None:
        """Accept connections until the task is cancelled.

        Args:
            listener: A socket that listens.
            make_protocol: Makes the protocol that reads a connection; it calls `discard` when the connection is lost.
            tls: None accepts connections without TLS.
        """
        listener.setblocking(False)
        loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()
        tasks.add(loop.create_task(self._close_old_forever()))
        try:
            while True:
                try:
                    raw, address = await loop.sock_accept(listener)
                except OSError as error:
                    if listener.fileno() < 0:
                        return
                    if error.errno in EXHAUSTED:
                        self.refused("", "connections that this machine has no descriptor for")
                        self._make_room()
                    await asyncio.sleep(0.2)
                    continue
                connection = self._admit(raw, str(address[0]))
                task = loop.create_task(self._open(connection, make_protocol, tls))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        finally:
            for task in tasks:
                task.cancel()
            for connection in list(self.connections):
                connection.close()

    def mark_signed(self, connection: Connection, site: SiteId) -> None:
        """A request of this connection carries the site's valid signature. The site's oldest idle one may give way."""
        if connection.site != site:
            connection.site = site
            former = [address for address in self.addresses.get(site, []) if address != connection.address]
            self.addresses[site] = [*former, connection.address][-SITE_ADDRESSES:]
            own = [other for other in self.connections if other.site == site]
            if len(own) > SITE_CONNECTIONS:
                self._close_oldest([other for other in own if other is not connection and not other.requests] or own)

    def discard(self, connection: Connection) -> None:
        """The connection is lost."""
        self.connections.discard(connection)

    def _unsigned(self, address: str = "") -> list[Connection]:
        return [one for one in self.connections if not one.site and address in ("", one.address)]

    def _admit(self, raw: socket.socket, address: str) -> Connection:
        """Note a new connection. If there are too many unsigned ones, another is closed."""
        connection = Connection(raw, _network(address))
        alike = self._unsigned(connection.address)
        if len(alike) >= self.most_per_address:
            self.refuse(connection, "too many connections without a signed request")
            self._close_oldest(alike)
        elif len(self._unsigned()) >= self.most_unsigned:
            self.refuse(connection, "too many connections without a signed request from all addresses, at last")
            self._make_room()
        self.connections.add(connection)
        return connection

    def _make_room(self) -> None:
        """Close the oldest unsigned connection of the address that has most of them.

        An address from which sites have signed comes last, as long as it has no more than these sites need.
        """
        unsigned = self._unsigned()
        counts = Counter(one.address for one in unsigned)
        sites = Counter(address for known in self.addresses.values() for address in known)

        def rank(address: str) -> tuple[bool, int]:
            return counts[address] > SITE_CONNECTIONS * sites[address], counts[address]

        most = max(map(rank, counts), default=None)
        self._close_oldest([one for one in unsigned if rank(one.address) == most])

    def refuse(self, connection: Connection, why: str) -> None:
        """Count a refusal of this connection."""
        self.refused(connection.site, why if connection.site else f"{why}, from {connection.address}")

    def _close_oldest(self, connections: list[Connection]) -> None:
        if connections:
            oldest = min(connections, key=lambda one: one.since)
            self.connections.discard(oldest)
            oldest.close()

    async def _open(
        self,
        connection: Connection,
        make_protocol: Callable[[Connection], asyncio.Protocol],
        tls: ssl.SSLContext | None,
    ) -> None:
        """Shake hands, and hand the connection over to its protocol."""
        loop, timeout = asyncio.get_running_loop(), None if tls is None else UNSIGNED_SECONDS
        try:
            await loop.connect_accepted_socket(
                lambda: make_protocol(connection),
                connection.socket,
                ssl=tls,
                ssl_handshake_timeout=timeout,
                ssl_shutdown_timeout=timeout,
            )
        except (OSError, TimeoutError):  # ssl.SSLError is an OSError
            if connection in self.connections:
                self.refuse(connection, "a TLS handshake that failed")
            self.discard(connection)

    async def _close_old_forever(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self.close_old(time.monotonic())

    def close_old(self, now: float) -> None:
        """Close unsigned connections that are too old, and sites' connections that are idle."""
        for one in list(self.connections):
            if not one.site and now > one.since + UNSIGNED_SECONDS:
                self.refuse(one, f"a connection without a signed request for {UNSIGNED_SECONDS:.0f} s")
                self._close_oldest([one])
            elif one.site and not one.requests and now > one.since + IDLE_SECONDS:
                self._close_oldest([one])


def _network(address: str) -> str:
    """The address, or the network of an IPv6 address: its owner has all others in it, too."""
    with contextlib.suppress(ValueError):
        found = ipaddress.ip_address(address.partition("%")[0])
        if isinstance(found, ipaddress.IPv6Address):
            return str(found.ipv4_mapped or ipaddress.ip_network((found, 64), strict=False))
    return address
