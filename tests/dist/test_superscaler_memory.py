"""Co-shard on real processes: inner activations of one part at a time, and no byte more sent."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from torch import Tensor

import superscaler_core as ss
from superscaler_core.plan import Keep
from superscaler_core.run import DistCall
from tests.dist.world import Worlds
from tests.superscaler_core.cases import Case

pytestmark = pytest.mark.dist

NUM_RANKS = 2
LOSS_BYTES = 16
"""The loss and its share, which the model of memory does not follow."""
SIZES = {"layers": 1, "heads": 16, "sequence": 64, "fused": False}
"""The matrices of attention are most of what a block makes."""


def step(rank: int, folder: Path, case: Case) -> tuple[int, Counter[tuple[str, str]]]:
    """The peak of a second step, and what was moved in it: how often between which layouts."""
    trainer, inputs = ss.load(folder), case.inputs(0)
    trainer.step(*inputs)
    for parameter in trainer.parameters():
        parameter.grad = None
    moved: Counter[tuple[str, str]] = Counter()
    with pytest.MonkeyPatch.context() as patch, ss.LiveBytes(trainer) as live:
        move = DistCall.move

        def counted(call: DistCall, tensor: Tensor | None) -> Tensor | None:
            plan = call.redistributor.plan
            moved[str(plan.src), str(plan.dst)] += 1
            return move(call, tensor)

        patch.setattr(DistCall, "move", counted)
        trainer.step(*inputs)
    return live.peak_bytes, moved


def test_co_shard_on_processes_divides_the_peak_of_a_block_by_its_parts(
    worlds: Worlds, tmp_path: Path
) -> None:
    """The peak is a + b / parts; a single part has no sum of parts beside it, so a little less."""
    peaks, moves, sent = {}, {}, {}
    for parts in (1, 2, 4, 8):
        options = {"parts": parts, "tp": 2, "keep": Keep.BLOCK_INPUTS}
        case = Case("coshard", NUM_RANKS, options, sizes=SIZES, batch=2)
        compiled = case.compiled()
        compiled.save(tmp_path / str(parts))
        found = worlds(NUM_RANKS).run(step, tmp_path / str(parts), case)
        for rank, (peak, _) in enumerate(found):
            assert compiled.memory[rank].step_bytes == pytest.approx(peak, abs=LOSS_BYTES)
        peaks[parts], moves[parts] = found[0]
        sent[parts] = compiled.report().sent_bytes
    divided = 4 * (peaks[2] - peaks[4])
    rest = peaks[4] - divided // 4
    assert peaks[8] == rest + divided // 8
    assert peaks[1] == pytest.approx(rest + divided, abs=divided * 0.02)
    assert divided > 3 * rest
    # The list of moved tensors is the same, so the sent bytes are the same.
    assert moves[1] == moves[2] == moves[4] == moves[8]
    assert len(set(sent.values())) == 1
    assert moves[1].total() > 0
