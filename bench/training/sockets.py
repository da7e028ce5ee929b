"""Sockets: the bytes that this process sent through TCP, as the kernel counts them (Linux)."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

_INFO_BYTES = 256
_SENT = struct.Struct("QQ")
_SENT_OFFSET = 200
"""Byte offset of ``tcpi_bytes_sent`` in ``tcp_info`` (linux/tcp.h, since 4.19).

``tcpi_bytes_retrans`` follows it.
"""


def sent_bytes() -> int:
    """Payload bytes that all TCP sockets of this process have sent, without retransmissions.

    Closed sockets no longer count. The difference of two readings is therefore the payload between
    them only if no socket was closed.

    Raises:
        OSError: the kernel does not count these bytes.
    """
    return sum(map(_sent, Path("/proc/self/fd").iterdir()))


def _sent(entry: Path) -> int:
    try:
        if not os.readlink(entry).startswith("socket:"):
            return 0
    except FileNotFoundError:  # The descriptor of the directory listing itself; already closed.
        return 0
    with socket.socket(fileno=os.dup(int(entry.name))) as sock:
        try:
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        except OSError:  # Not a TCP socket.
            return 0
    if len(info) < _SENT_OFFSET + _SENT.size:
        raise OSError("this kernel's TCP_INFO has no count of bytes sent; Linux 4.19 has.")
    sent, again = _SENT.unpack_from(info, _SENT_OFFSET)
    return int(sent - again)
