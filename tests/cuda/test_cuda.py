"""On a GPU: the CUDA engine gives the bits of the CPU engine, and CUDA graphs capture calls."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import rvdcomm as rv
from rvdcomm.native import core
from rvdcomm.program import ALIGN_BYTES, Program
from rvdcomm.program.lower import lower
from rvdcomm.run.schedule import Do, schedules
from rvdcomm.run.stage import CudaStage, native_stage
from tests.oracle import all_pairs

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is here"),
    pytest.mark.skipif(core is None or not core.has_cuda, reason="built without CUDA"),
]

HOST = rv.Topology.single_host(4, 0, 1.0)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.complex64]


def random_bytes(num_bytes: int, seed: int) -> torch.Tensor:
    """Small integers of any dtype: every sum is exact, and no bit pattern is a NaN."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 4, (num_bytes,), dtype=torch.uint8, generator=generator)


def local_actions(program: Program, rank: int) -> list[Do]:
    return [action for action in schedules(program)[rank].actions if isinstance(action, Do)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuda_stages_give_the_same_bits_as_cpu_stages(dtype: torch.dtype) -> None:
    rng = random.Random(str(dtype))
    found = []
    for src, dst in rng.sample(list(all_pairs((12, 20), 4)), 30):
        path = rv.plan(src, dst, dtype, HOST).path
        program = lower(path, str(dtype).removeprefix("torch."), HOST)
        for rank in program.ranks:
            item = program.item_bytes
            sizes = [layout.cell(rank).box.num_elements * item for layout in (src, dst)]
            sizes.append(program.arena(rank).num_bytes + ALIGN_BYTES)
            cpu = [random_bytes(size, seed) for seed, size in enumerate(sizes)]
            gpu = [block.cuda() for block in cpu]
            actions, strides = local_actions(program, rank), (None, None)
            stage = native_stage(program, rank, (rank,), actions, strides)
            stage.bind([cpu[2].data_ptr()], None, 0.0)
            stage.run((cpu[0].data_ptr(), cpu[1].data_ptr()), 1)
            addresses = [block.data_ptr() for block in gpu]
            CudaStage(program, rank, (rank,), actions, strides).run(
                addresses, torch.cuda.current_stream(), None
            )
            torch.cuda.synchronize()
            if not all(torch.equal(a, b.cpu()) for a, b in zip(cpu, gpu, strict=True)):
                found.append(f"{src.rvd} -> {dst.rvd}: rank {rank}")
    assert found == []


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_redistribute_on_one_gpu_returns_an_equal_tensor(nccl: None) -> None:
    layout = rv.Layout((6, 10), "R(1)V(1)D(1,1)")
    tensor = torch.randn(6, 10, device="cuda")
    assert torch.equal(rv.redistribute(tensor, layout, layout), tensor)


def test_a_redistributor_is_captured_in_a_cuda_graph(nccl: None) -> None:
    layout = rv.Layout((64, 32), "R(1)V(1)D(1,1)")
    call = rv.Redistributor(rv.plan(layout, layout))
    src, out = torch.zeros(64, 32, device="cuda"), torch.zeros(64, 32, device="cuda")
    call(src, out=out)  # The graph must not capture the uploads of the first call.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(src, out=out)
    src.fill_(7)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, src)
