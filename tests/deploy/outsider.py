"""Somebody without a key who reaches the server's port, as a process: `python -m tests.deploy.outsider`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import resource
import ssl
import time

HALF_A_REQUEST = b"POST /v1/messages/next HTTP/1.1\r\nHost: server\r\nX-Slow: "
HALF_A_HELLO = bytes.fromhex("160301020001")
WAYS = ("silent", "half a handshake", "half a request")


async def open_one(host: str, port: int, way: str) -> asyncio.StreamWriter:
    """A connection that is begun in one of the ways, and not continued."""
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection(host, port, ssl=trusting if way == "half a request" else None)
    writer.write({"silent": b"", "half a handshake": HALF_A_HELLO, "half a request": HALF_A_REQUEST}[way])
    return writer


async def hold(host: str, port: int, count: int, seconds: float, rate: float) -> None:
    """Open so many connections in a second, until `count` are open, and again whenever the server closes one."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    begun, opened, failed, held = time.monotonic(), 0, 0, list[asyncio.StreamWriter]()
    while time.monotonic() < begun + seconds:
        await asyncio.sleep(1 / rate)
        if len(held) >= count:
            held = [one for one in held if not one.is_closing()]
            continue
        try:
            async with asyncio.timeout(5):
                held.append(await open_one(host, port, WAYS[opened % len(WAYS)]))
            opened += 1
        except (OSError, TimeoutError):
            failed += 1
    print(f"opened {opened}, failed {failed}, held {len(held)}", flush=True)
    for one in held:
        with contextlib.suppress(Exception):
            one.transport.abort()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--rate", type=float, default=200)
    given = parser.parse_args()
    asyncio.run(hold("127.0.0.1", given.port, given.count, given.seconds, given.rate))
