"""What this process sent through TCP, as the kernel counted it (Linux)."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

_INFO_BYTES = 256
_SENT = struct.Struct("QQ")
_SENT_OFFSET = 200
"""Of ``tcpi_bytes_sent`` and ``tcpi_bytes_retrans`` in ``tcp_info`` (linux/tcp.h, since 4.19)."""


def sent_bytes() -> int:
    """Payload that all TCP sockets of this process have sent, each byte once.

    Sockets that are closed no longer count, so that of two readings the difference is what was sent
    between them if none was closed.

    Raises:
        OSError: the kernel does not count.
    """
    return sum(map(_sent, Path("/proc/self/fd").iterdir()))


def _sent(entry: Path) -> int:
    try:
        if not os.readlink(entry).startswith("socket:"):
            return 0
    except FileNotFoundError:  # the listing's own descriptor, closed by now
        return 0
    with socket.socket(fileno=os.dup(int(entry.name))) as sock:
        try:
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        except OSError:  # no socket of TCP
            return 0
    if len(info) < _SENT_OFFSET + _SENT.size:
        raise OSError("this kernel's TCP_INFO has no count of bytes sent; Linux 4.19 has.")
    sent, again = _SENT.unpack_from(info, _SENT_OFFSET)
    return int(sent - again)
