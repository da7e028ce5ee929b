"""Measure the rate of one plain TCP stream: the limit for every benchmark on a link.

The receiver measures the time, so bytes that wait in the sender's socket buffer are not counted.

    python -m bench.cluster.stream                              # loopback of this machine
    python bench/cluster/stream.py receive --bind 10.0.0.1      # prints its port; bytes, seconds
    python bench/cluster/stream.py send --to 10.0.0.1 --port N  # until the receiver hangs up
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# 1 MiB per call: below 64 KiB the Python loop, not the link, limits a loopback stream.
CHUNK_BYTES = 1 << 20
# Not counted: at first, the shaper's burst and TCP's slow start distort the rate.
WARM_UP_SECS = 0.3
# How long one side waits for the other; both start within the start-up time of an interpreter.
PEER_TIMEOUT_SECS = 15.0
POLL_SECS = 0.01


class StreamError(RuntimeError):
    """A stream could not be measured: its sender or its receiver failed."""


def receive(bind: str, seconds: float) -> tuple[int, float]:
    """Print the port, accept one connection, and count the bytes that arrive in about ``seconds``.

    Args:
        bind: address to listen on; the system chooses the port.
        seconds: how long to count, after ``WARM_UP_SECS`` that are not counted.

    Returns:
        The number of bytes, and the seconds in which they arrived.
    """
    with socket.create_server((bind, 0)) as server:
        server.settimeout(PEER_TIMEOUT_SECS)
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
    with connection:
        connection.settimeout(PEER_TIMEOUT_SECS)
        _count(connection, WARM_UP_SECS)
        return _count(connection, seconds)


def _count(connection: socket.socket, seconds: float) -> tuple[int, float]:
    buffer = bytearray(CHUNK_BYTES)
    num_bytes = 0
    start = now = time.perf_counter()
    while now - start < seconds:
        received = connection.recv_into(buffer)
        if received == 0:
            raise StreamError(f"the sender hung up {now - start:.2f} s into {seconds} s")
        num_bytes += received
        now = time.perf_counter()
    return num_bytes, now - start


def send(to: str, port: int) -> None:
    """Send zeros to ``to``:``port`` until the receiver hangs up, which is the normal end."""
    chunk = bytes(CHUNK_BYTES)
    with (
        socket.create_connection((to, port), timeout=PEER_TIMEOUT_SECS) as connection,
        contextlib.suppress(ConnectionError),
    ):
        while True:
            connection.sendall(chunk)


def measure(
    address: str,
    seconds: float,
    *,
    receiver_prefix: Sequence[str] = (),
    sender_prefix: Sequence[str] = (),
) -> float:
    """Return the bytes per second of one TCP stream between two processes started here.

    Args:
        address: where the receiver listens.
        seconds: how long to count.
        receiver_prefix, sender_prefix: put in front of each command line, for example
            ``("ip", "netns", "exec", "left")``.

    Raises:
        StreamError: one of the two processes failed; its stderr is in the message.
    """
    me = [sys.executable, str(Path(__file__).resolve())]
    receiver_command = [*receiver_prefix, *me, "receive", "--bind", address, "--seconds"]
    with contextlib.ExitStack() as stack:
        receiver = _start(stack, [*receiver_command, str(seconds)])
        assert receiver.stdout is not None
        port = receiver.stdout.readline().strip()
        if not port:
            _check(receiver, "receiver", PEER_TIMEOUT_SECS)
        sender = _start(stack, [*sender_prefix, *me, "send", "--to", address, "--port", port])
        # If the sender fails, report it now; the receiver would report a timeout only 15 s later.
        while receiver.poll() is None and not sender.poll():
            time.sleep(POLL_SECS)
        if sender.poll():
            _check(sender, "sender", PEER_TIMEOUT_SECS)
        report = _check(receiver, "receiver", PEER_TIMEOUT_SECS)
        _check(sender, "sender", PEER_TIMEOUT_SECS)
    counted = json.loads(report)
    return float(counted["bytes"] / counted["secs"])


def loopback_stream(seconds: float) -> float:
    """Return the bytes per second of one TCP stream over loopback: the TCP stack's own limit."""
    return measure("127.0.0.1", seconds)


def _start(stack: contextlib.ExitStack, command: Sequence[str]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # The stack unwinds last in, first out: kill, then reap the process and close its pipes.
    stack.enter_context(process)
    stack.callback(process.kill)
    return process


def _check(process: subprocess.Popen[str], role: str, timeout_secs: float) -> str:
    """Wait until ``process`` has ended with status 0, and return what it printed."""
    try:
        printed, complaint = process.communicate(timeout=timeout_secs)
    except subprocess.TimeoutExpired:
        raise StreamError(f"the {role} did not end within {timeout_secs:.0f} s") from None
    if process.returncode != 0:
        message = f"the {role} ended with status {process.returncode}: {complaint.strip()}"
        raise StreamError(message)
    return printed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.cluster.stream",
        description="Measure one plain TCP stream. Without a role: sender and receiver both run "
        "here, over loopback, and the rate is printed.",
    )
    parser.add_argument("role", nargs="?", choices=["receive", "send"])
    parser.add_argument("--seconds", type=float, default=1.0, help="how long to count (1)")
    parser.add_argument("--bind", default="127.0.0.1", help="receive: address to listen on")
    parser.add_argument("--to", default="127.0.0.1", help="send: address of the receiver")
    parser.add_argument("--port", type=int, help="send: the port that the receiver printed")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one role of a stream, or both over loopback."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.role == "send" and args.port is None:
        parser.error("send needs --port: the number that the receiver printed")
    try:
        _run_role(args)
    except (OSError, StreamError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


def _run_role(args: argparse.Namespace) -> None:
    if args.role == "send":
        send(args.to, args.port)
    elif args.role == "receive":
        num_bytes, secs = receive(args.bind, args.seconds)
        print(json.dumps({"bytes": num_bytes, "secs": secs}))
    else:
        bytes_per_sec = loopback_stream(args.seconds)
        print(f"loopback: {bytes_per_sec * 8 / 1e6:.1f} Mbit/s ({bytes_per_sec / 1e6:.1f} MB/s)")


if __name__ == "__main__":
    sys.exit(main())
