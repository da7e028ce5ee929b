"""Laws of the plan engine's benchmarks: their grids, counts of bytes, and tables."""

from __future__ import annotations

import socket
from math import prod
from pathlib import Path

import pytest

from bench import superscaler_compile
from bench.superscaler_compile import PHASES, grid_of
from bench.superscaler_duplex import command as superscaler_duplex
from bench.training.sockets import sent_bytes

# --- compile time -------------------------------------------------------------------------------


@pytest.mark.parametrize("num_layers", [1, 3, 48])
@pytest.mark.parametrize("num_devices", [1, 2, 8, 64, 128])
def test_grid_uses_all_devices_and_has_at_least_one_layer_per_stage(
    num_devices: int, num_layers: int
) -> None:
    counts = grid_of(num_devices, num_layers)
    assert prod(counts.values()) == num_devices
    assert counts["pp"] <= num_layers


def test_a_sample_has_the_seconds_of_every_phase() -> None:
    found = superscaler_compile.sample(2, 4)
    assert tuple(found["secs"]) == PHASES
    assert min(found["secs"].values()) > 0
    # Each of the 2 layers all-reduces twice in the forward and twice in the backward. The hidden
    # state and its gradient are each sent once.
    assert found["transfers"] >= 2 * 4 + 2
    assert found["file_bytes"] > 4000


# --- bytes --------------------------------------------------------------------------------------


def test_sent_bytes_counts_only_bytes_sent_over_tcp(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    left, right = socket.socketpair()
    with near, far, left, right, (tmp_path / "file").open("wb") as file:
        before = sent_bytes()
        near.sendall(bytes(12345))
        far.sendall(bytes(67))
        left.sendall(bytes(8))
        file.write(bytes(9))
        file.flush()
        # All bytes have been sent once they have been read.
        assert len(far.recv(12345, socket.MSG_WAITALL)) == 12345
        assert len(near.recv(67, socket.MSG_WAITALL)) == 67
        assert sent_bytes() - before == 12345 + 67


# --- duplex -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "total, communication, wall, share",
    [(0.3245, 0.0297, 0.2972, 0.9192), (0.4611, 0.1523, 0.3985, 0.4110),
     (0.7453, 0.4432, 0.6657, 0.2635)],
)  # fmt: skip
def test_hidden_share_of_duplex_equals_the_published_overlap_of_hidup(
    total: float, communication: float, wall: float, share: float
) -> None:
    """The breakdown in HiDup's paper: one machine, two machines, and two with slow links."""
    row = {
        "rate": "100mbit",
        "samples": {"serial": [total], "duplex": [wall]},
        "comm_secs": communication,
        "predicted": {
            "serial": {"secs": total, "comm_secs": communication}, "duplex": {"secs": wall}
        },
    }  # fmt: skip
    for what in ("measured", "predicted"):
        assert superscaler_duplex.hidden(row, what) == pytest.approx(share, abs=5e-4)
    result = {"layers": 3, "batch": 64, "cluster": "2x2", "rows": [row]}
    assert f"{share:.0%}" in superscaler_duplex.table(result)
