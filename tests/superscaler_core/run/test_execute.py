"""Execute: ranks that run the instructions do exactly what the printed file does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import superscaler_core as ss
from superscaler_core.run.rank import Rank
from superscaler_core.run.transport import ThreadTransport
from superscaler_core.training import in_threads, module_from
from tests.superscaler_core.cases import MODEL_OF, Case, Trained, train

ALL = ss.Overlap(prefetch=1, reductions=True, moves=True, bucket_bytes=1 << 12)
CASES = [
    Case("zero3_offload", 2, model="moe", optimizer="adamw", overlap=ALL),
    Case("swap", 2, {"keep": ss.Keep.SEGMENT_INPUTS}),
    Case("coshard", 2, sizes={"dropout": 0.3}),
    Case("hybrid", 4, {"tp": 2, "pp": 2, "microbatches": 2, "keep": ss.Keep.BLOCK_INPUTS},
         overlap=replace(ALL, duplex=True)),
    Case("interlaced", 4, {"microbatches": 3, "tp": 2}, model=MODEL_OF["interlaced"]),
    Case("dualpipe", 4, {"pp": 2, "tp": 2}, overlap=ss.Overlap(pairs=True)),
    Case("zero_bubble_v", 2, {"sizes": (1, 1, 2, 1)}, sizes={"layers": 5, "tied": True}),
    Case("nf1b", 2, {"microbatches": 2}, model="evoformer"),
]  # fmt: skip

Source = Callable[[ss.Compiled, int], object]


def executed(compiled: ss.Compiled, rank: int) -> object:
    return compiled.executor(rank)


def printed(compiled: ss.Compiled, rank: int) -> object:
    return module_from(compiled.file(rank), rank)


def trained(case: Case, source: Source) -> dict[int, Trained]:
    compiled, start = case.compiled(), case.new_model().state_dict()

    def work(transport: ThreadTransport) -> Trained:
        values = {name: value.clone() for name, value in compiled.values.items()}
        program = source(compiled, transport.rank)
        rank = Rank(program, transport, values)  # type: ignore[arg-type]
        return train(ss.Trainer(rank, transport), case, start)

    return in_threads(work, range(case.num_devices))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_executor_gives_bitwise_what_the_printed_file_gives(case: Case) -> None:
    ran, wanted = trained(case, executed), trained(case, printed)
    for rank, mine in ran.items():
        assert mine.losses == wanted[rank].losses
        for name, value in wanted[rank].parameters.items():
            assert torch.equal(mine.parameters[name], value)
