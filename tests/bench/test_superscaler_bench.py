"""Laws of the plan engine's benchmarks: what they compile, what they count, what they print."""

from __future__ import annotations

import json
import socket
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import llama_train, superscaler_compile, superscaler_duplex, superscaler_train
from bench.sockets import sent_bytes
from bench.superscaler_compile import PHASES, grid_of, points_of
from bench.superscaler_train import compiled_gpt, planned_bytes
from rvdcomm import Topology

MODEL = {"layers": 2, "width": 16, "heads": 4, "sequence": 8, "vocabulary": 40}
MICROBATCH, MICROBATCHES = 3, 4


# --- compile time -------------------------------------------------------------------------------


@pytest.mark.parametrize("num_layers", [1, 3, 48])
@pytest.mark.parametrize("num_devices", [1, 2, 8, 64, 128])
def test_a_grid_has_all_devices_and_a_layer_a_stage(num_devices: int, num_layers: int) -> None:
    counts = grid_of(num_devices, num_layers)
    assert prod(counts.values()) == num_devices
    assert counts["pp"] <= num_layers


def test_points_vary_layers_and_devices_one_at_a_time() -> None:
    points = points_of([1, 4, 48], [1, 8, 128])
    assert points == [(48, 1), (48, 8), (48, 128), (1, 8), (4, 8)]


def test_a_sample_has_the_seconds_of_every_phase() -> None:
    found = superscaler_compile.sample(2, 4)
    assert tuple(found["secs"]) == PHASES
    assert min(found["secs"].values()) > 0
    # A layer all-reduces twice forward and twice back; the hidden state goes there and back.
    assert found["transfers"] >= 2 * 4 + 2
    assert found["file_bytes"] > 4000


def test_compile_lines_fit_100_columns_and_are_drawn(tmp_path: Path) -> None:
    rows = [
        {"layers": layers, "devices": devices, **grid_of(devices, layers)}
        | {"samples": {phase: [0.5, 99.25, 100.125] for phase in PHASES}}
        | {"transfers": 1234, "peak_bytes": 1 << 30}
        for layers, devices in points_of([1, 48], [8, 128])
    ]
    lines = [superscaler_compile.line_of(superscaler_compile.cells_of(row)) for row in rows]
    assert max(map(len, lines)) <= 100
    assert "496.25" in lines[0]
    pytest.importorskip("matplotlib")
    superscaler_compile.plot(rows, tmp_path / "growth.png")
    assert (tmp_path / "growth.png").stat().st_size > 1000


# --- bytes --------------------------------------------------------------------------------------


def test_sent_bytes_counts_what_tcp_took_and_nothing_else(tmp_path: Path) -> None:
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
        # All has been sent when it has been read.
        assert len(far.recv(12345, socket.MSG_WAITALL)) == 12345
        assert len(near.recv(67, socket.MSG_WAITALL)) == 67
        assert sent_bytes() - before == 12345 + 67


def planned(pp: int, tp: int) -> list[int]:
    args = SimpleNamespace(model=MODEL, microbatch=MICROBATCH, microbatches=MICROBATCHES)
    # Latency is nothing, so that fewest bytes are best.
    topology = Topology.single_host(pp * tp, alpha_secs=1e-12, bytes_per_sec=1e6)
    return planned_bytes(compiled_gpt(args, pp, tp), topology)  # type: ignore[arg-type]


HIDDEN_BYTES = 4 * MICROBATCH * MODEL["sequence"] * MODEL["width"]
LOSS_BYTES = 4


def test_tensor_parallel_sends_four_all_reduces_a_layer_and_microbatch() -> None:
    all_reduce = 2 * HIDDEN_BYTES // 2
    expected = MICROBATCHES * MODEL["layers"] * 4 * all_reduce
    assert planned(pp=1, tp=2) == [expected, expected]


def test_pipeline_sends_the_hidden_state_there_its_gradient_back_and_the_loss_once() -> None:
    expected = MICROBATCHES * HIDDEN_BYTES
    assert planned(pp=2, tp=1) == [expected, expected + LOSS_BYTES]


# --- training -----------------------------------------------------------------------------------


@pytest.mark.dist
def test_methods_train_alike_and_gloo_sends_what_is_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = [f"--{name}={value}" for name, value in MODEL.items()]
    counts = [f"--microbatch={MICROBATCH}", f"--microbatches={MICROBATCHES}", "--steps=2"]
    out = tmp_path / "train.json"
    # The ranks compare the losses of all methods, and fail if they differ.
    assert superscaler_train.main([*sizes, *counts, "--grids=2x1,1x2", f"--out={out}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[:-1])) <= 100
    assert sum(line.startswith(("2 x 1", "1 x 2")) for line in lines) == 6
    for row in json.loads(out.read_text())["rows"]:
        assert max(row["tcp_bytes"]["dist"]) > 0
        assert all(len(samples["step"]) == 2 for samples in row["samples"].values())
        for sent, by_plan in zip(row["tcp_bytes"]["dist"], row["planned_bytes"], strict=True):
            # What is above is headers: some 50 bytes a message of gloo.
            assert by_plan <= sent <= 1.2 * by_plan + 4096


def test_a_row_of_llamas_compares_with_torchs_own_way() -> None:
    samples = {"zero3": [0.1, 0.2, 0.3], "fsdp2": [0.4, 0.5, 0.3]}
    result = {"model": llama_train.SIZES, "batch": 3, "rows": [{"ranks": 2, "samples": samples}]}
    lines = llama_train.table(result).splitlines()
    assert lines[2].split() == ["2", "zero3", "200", "100", "300", "fsdp2", "2.00"]
    assert lines[3].split() == ["2", "fsdp2", "400", "300", "500", "-"]


# --- duplex -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "total, communication, wall, share",
    [(0.3245, 0.0297, 0.2972, 0.9192), (0.4611, 0.1523, 0.3985, 0.4110),
     (0.7453, 0.4432, 0.6657, 0.2635)],
)  # fmt: skip
def test_what_duplex_hides_is_counted_as_in_hidups_table(
    total: float, communication: float, wall: float, share: float
) -> None:
    """The break-down of HiDup's paper: one machine, two of them, and two with slow links."""
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
