"""The matrix of ``nvidia-smi topo -m``, and what is refused."""

from __future__ import annotations

import pytest

import rvdcomm as rv
from rvdcomm.network import parse_matrix
from rvdcomm.network.smi import BRICKS

CUBE = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tGPU4\tGPU5\tGPU6\tGPU7\tmlx5_0\tmlx5_1\tCPU Affinity\tNUMA\x1b[0m
GPU0\t X \tNV1\tNV1\tNV2\tNV2\tSYS\tSYS\tSYS\tPIX\tSYS\t0-19,40-59\t0
GPU1\tNV1\t X \tNV2\tNV1\tSYS\tNV2\tSYS\tSYS\tPIX\tSYS\t0-19,40-59\t0
GPU2\tNV1\tNV2\t X \tNV2\tSYS\tSYS\tNV1\tSYS\tPHB\tSYS\t0-19,40-59\t0
GPU3\tNV2\tNV1\tNV2\t X \tSYS\tSYS\tSYS\tNV1\tPHB\tSYS\t0-19,40-59\t0
GPU4\tNV2\tSYS\tSYS\tSYS\t X \tNV1\tNV1\tNV2\tSYS\tPIX\t20-39,60-79\t1
GPU5\tSYS\tNV2\tSYS\tSYS\tNV1\t X \tNV2\tNV1\tSYS\tPIX\t20-39,60-79\t1
GPU6\tSYS\tSYS\tNV1\tSYS\tNV1\tNV2\t X \tNV2\tSYS\tPHB\t20-39,60-79\t1
GPU7\tSYS\tSYS\tSYS\tNV1\tNV2\tNV1\tNV2\t X \tSYS\tPHB\t20-39,60-79\t1
mlx5_0\tPIX\tPIX\tPHB\tPHB\tSYS\tSYS\tSYS\tSYS\t X \tSYS

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""


def matrix(*rows: str) -> str:
    """The text of a matrix, from the words of its rows."""
    header = "\t".join(f"GPU{i}" for i in range(len(rows)))
    lines = [f"GPU{i}\t" + "\t".join(row.split()) for i, row in enumerate(rows)]
    return "\n".join([f"\t{header}\tCPU Affinity", *lines])


def test_nvlinks_of_a_cube_mesh_are_those_of_the_preset() -> None:
    network, preset = parse_matrix(CUBE), rv.Network.preset("dgx-1")
    pairs = {(w.src, w.dst): w.link for w in network.wires if isinstance(w.src, int)}
    assert {pair: x for pair, x in pairs.items() if isinstance(pair[1], int)} == {
        (wire.src, wire.dst): wire.link for wire in preset.wires
    }
    # Pairs without NVLinks are reached over the sockets, which the affinity to CPUs shows.
    assert [network.link(rank, "cpu0") is None for rank in range(8)] == 4 * [False] + 4 * [True]
    assert network.link("cpu0", "cpu1") is not None


@pytest.mark.parametrize("links, generation, bytes_per_sec", [(12, 3, 300e9), (18, 4, 450e9)])
def test_equal_nvlinks_of_all_pairs_lead_to_a_switch(links, generation, bytes_per_sec) -> None:
    rows = [" ".join("X" if i == j else f"NV{links}" for j in range(8)) for i in range(8)]
    network = parse_matrix(matrix(*rows))
    assert [switch.name for switch in network.switches] == ["nvswitch"]
    assert network.link(7, "nvswitch").bytes_per_sec == bytes_per_sec
    assert parse_matrix(matrix(*rows), nvlink=generation) == network
    assert parse_matrix(matrix(*rows), nvlink=5).link(0, "nvswitch").bytes_per_sec == links * 50e9


def test_few_equal_nvlinks_join_pairs() -> None:
    rows = [" ".join("X" if i == j else "NV4" for j in range(4)) for i in range(4)]
    network = parse_matrix(matrix(*rows))
    assert not network.switches
    assert network.link(0, 3).bytes_per_sec == 4 * BRICKS[3][0]


def test_pcie_is_a_tree() -> None:
    network = parse_matrix(
        matrix(
            "X PIX PHB PHB SYS",
            "PIX X PHB PHB SYS",
            "PHB PHB X PXB SYS",
            "PHB PHB PXB X SYS",
            "SYS SYS SYS SYS X",
        ),
        pcie_bytes_per_sec=25e9,
    )
    above = {node: [w.dst for w in network.out[node]] for node in network.nodes}
    assert above[0] == above[1] == ["pcie0"]
    assert above[2] == above[3] == ["pcie1"]
    assert above[4] == ["cpu1"]
    assert sorted(above["cpu0"], key=str) == ["cpu1", "pcie0", "pcie1"]
    assert network.link(0, "pcie0").bytes_per_sec == 25e9


def test_sockets_of_one_gpu_each_are_joined_by_a_switch() -> None:
    network = parse_matrix(matrix("X SYS SYS", "SYS X SYS", "SYS SYS X"))
    assert {switch.name for switch in network.switches} == {"cpu0", "cpu1", "cpu2", "upi"}


def test_gpus_under_one_switch_need_no_socket() -> None:
    network = parse_matrix(matrix("X PIX", "PIX X"))
    assert [switch.name for switch in network.switches] == ["pcie0"]


@pytest.mark.parametrize(
    "text, options, error",
    [
        ("", {}, "no matrix of 'nvidia-smi topo -m'"),
        (matrix("X"), {}, "of 2 GPUs and more"),
        (matrix("X PIX", "PIX"), {}, "for each GPU a line"),
        (matrix("X PIX", "PHB X"), {}, "GPU0 to GPU1 of the matrix is PIX, and back it is PHB"),
        (matrix("X FOO", "FOO X"), {}, "GPU0 to GPU1 of the matrix is 'FOO'"),
        (matrix("X X", "X X"), {}, "GPU0 to GPU1 of the matrix is 'X'"),
        (matrix("PIX X", "X PIX"), {}, "GPU0 to GPU0 of the matrix is 'PIX'"),
        (matrix("X NV12", "NV12 X"), {"nvlink": 2}, "12 NVLinks of a GPU; NVLink 2 has 6"),
        (matrix("X NV12", "NV12 X"), {"nvlink": 9}, "NVLink 9 has no"),
    ],
)
def test_other_texts_are_refused(text: str, options: dict[str, int], error: str) -> None:
    with pytest.raises(rv.LayoutError, match=error):
        parse_matrix(text, **options)
