"""Slow cable between two networks: `python -m tests.harness.slow_cable NAME NAME SECONDS`.

Each network gets an interface, cable0 and cable1. Packets sent into one come out of the other that many
seconds later, or as many as the last line of standard input says. It runs as root, until it is killed, and
the interfaces end with it. It is for kernels without netem.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
MTU = 65000
MAX_LINE_BYTES = 64


def interface_in(network: str, name: str) -> int:
    """Enter a network and make an interface there. Returns what its packets are read from."""
    entrance = os.open(f"/run/netns/{network}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(entrance, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"no entrance to {network}")
    os.close(entrance)
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    return fd


def carry(ends: tuple[int, int], delay_s: float, orders: int) -> None:
    """Give each end what comes from the other one, for ever. `orders`: a descriptor that other delays come
    from.
    """
    other = dict(zip(ends, reversed(ends), strict=True))
    on_the_way: deque[tuple[float, int, bytes]] = deque()
    sources = {*ends, orders}
    while True:
        left_s = max(0.0, on_the_way[0][0] - time.monotonic()) if on_the_way else None
        for end in select.select(sources, (), (), left_s)[0]:
            if end == orders:
                if line := os.read(orders, MAX_LINE_BYTES):
                    delay_s = float(line.split()[-1])
                else:
                    sources.discard(orders)  # nobody has any more
                continue
            try:
                on_the_way.append((time.monotonic() + delay_s, other[end], os.read(end, MTU)))
            except OSError:  # it is down
                time.sleep(delay_s)
        while on_the_way and on_the_way[0][0] <= time.monotonic():
            _, end, packet = on_the_way.popleft()
            try:
                os.write(end, packet)
            except OSError:
                continue  # a cut cable loses what is in it


if __name__ == "__main__":
    made = interface_in(sys.argv[1], "cable0"), interface_in(sys.argv[2], "cable1")
    print("made", flush=True)
    carry(made, float(sys.argv[3]), sys.stdin.fileno())
