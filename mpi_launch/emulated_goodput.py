"""Bytes per second that plain TCP sockets carry: the yardstick for everything that runs over the same links.

Run as a file inside a host: ``emulated_goodput.py receive PORT BYTES WARM`` prints the rate in bytes per second and
``emulated_goodput.py send ADDRESS PORT BYTES`` feeds it. The first ``WARM`` bytes are not timed: they empty the link's
token bucket and let TCP find its window.
"""

from __future__ import annotations

import socket
import sys
import time

CHUNK = 1 << 20

#: A peer that neither comes nor sends for this long has failed; seconds.
PATIENCE = 10.0


def receive(port: int, nbytes: int, warm: int) -> float:
    """Accept one connection and return the bytes per second at which the bytes after the first ``warm`` came."""
    with socket.create_server(("", port)) as door:
        door.settimeout(PATIENCE)
        peer, _ = door.accept()
    buffer = bytearray(CHUNK)
    got, mark, began = 0, 0, 0.0
    with peer:
        peer.settimeout(PATIENCE)
        while got < nbytes:
            part = peer.recv_into(buffer)
            if not part:
                raise ConnectionError(f"the sender ended after {got} of {nbytes} bytes")
            got += part
            if not mark and got >= warm:
                mark, began = got, time.monotonic()
        seconds = time.monotonic() - began
    return (got - mark) / seconds


def send(address: str, port: int, nbytes: int) -> None:
    """Connect, waiting for the receiver to listen, and send ``nbytes``."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            peer = socket.create_connection((address, port), timeout=PATIENCE)
            break
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.005)
    data = memoryview(bytes(CHUNK))
    with peer:
        for start in range(0, nbytes, CHUNK):
            peer.sendall(data[: min(CHUNK, nbytes - start)])


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        print(receive(*map(int, sys.argv[2:])))
    else:
        send(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
