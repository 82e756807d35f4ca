"""The one way between the real node's network and this machine's loopback: `-m tests.cluster.relay PID API KUBELET`.

PID is a process of the node. Inside, on the API server's service address and on the loopback, it listens for the API
server, whose port here is API; here, on the loopback port KUBELET, for the kubelet, which has the same port inside.
Bytes are passed on as they are: the certificates are valid on both sides.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import socket
import sys
from collections.abc import Awaitable, Callable

from . import kernel
from .machine import SERVICE_ADDRESS

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def relay(pid: int, api: int, kubelet: int) -> None:
    """Serves until the process is killed."""
    # A socket belongs for good to the network that the thread which made it was in.
    with concurrent.futures.ThreadPoolExecutor(1, initializer=kernel.setns, initargs=(pid, "net")) as inside:

        async def to_the_api_server() -> Streams:
            return await asyncio.open_connection("127.0.0.1", api)

        async def to_the_kubelet() -> Streams:
            connection = inside.submit(socket.socket).result()
            connection.setblocking(False)
            await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", kubelet))
            return await asyncio.open_connection(sock=connection)

        servers = []
        for address in ((SERVICE_ADDRESS, 443), ("127.0.0.1", api)):
            listener = inside.submit(socket.create_server, address).result()
            servers.append(await asyncio.start_server(_passing(to_the_api_server), sock=listener))
        servers.append(await asyncio.start_server(_passing(to_the_kubelet), "127.0.0.1", kubelet))
        await asyncio.gather(*(server.serve_forever() for server in servers))


def _passing(connect: Callable[[], Awaitable[Streams]]) -> Callable[..., Awaitable[None]]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError), contextlib.closing(writer):  # the other side is away: so is this one
            there, back = await connect()
            with contextlib.closing(back):
                await asyncio.gather(_pass(reader, back), _pass(there, writer))

    return serve


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


if __name__ == "__main__":
    asyncio.run(relay(*map(int, sys.argv[1:])))
