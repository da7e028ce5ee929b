"""Duplex: one half of a microbatch computes while the other half communicates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import superscaler_core as ss
from superscaler_core.cost import PROFILES
from superscaler_core.materialize import Operands, instruction_of
from superscaler_core.memory import Moment, footprints, memory_of
from superscaler_core.plans import PLANS
from superscaler_core.program.duplex import duplex, overlapped
from superscaler_core.program.instruction import StepInstruction
from superscaler_core.program.value import Role, Value
from superscaler_core.program.verb import COMPUTING, MOVES, OF_WEIGHTS, Phase, Verb
from superscaler_core.schedules import Action, ActionKind
from superscaler_core.simulator import Simulated
from tests.superscaler_core.cases import Case, check_trains

DUPLEX = ss.Overlap(duplex=True)
ALL = ss.Overlap(prefetch=1, reductions=True, moves=True, duplex=True, bucket_bytes=1 << 12)
MOVING = [Case("megatron", 2), Case("megatron_sp", 2), Case("expert_parallel", 2, model="moe")]
CASES = [
    *MOVING[1:],
    Case("zero3", 2),
    Case("hybrid", 4, {"pp": 2, "tp": 2, "microbatches": 3}),
    Case("data_parallel", 2, model="wide_resnet"),
    Case("chimera", 4, {"pp": 2, "tp": 2, "zero": 1}),
    Case("nf1b", 2, {"microbatches": 2, "recycle": 1}, model="evoformer"),
    Case("hybrid", 4, {"pp": 2, "tp": 2, "microbatches": 2}, rewrite="halves-apart"),
]
OVERLAPPED = [replace(case, overlap=ALL) for case in CASES[:4]]
OVERLAPPED += [replace(case, overlap=DUPLEX) for case in (*CASES[4:], Case("swap", 2))]


class Normed(nn.Module):
    """Two linear layers around one batch norm, which may run twice."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.before, self.norm, self.after = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.times = times

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.before(x)
        for _ in range(self.times):
            hidden = self.after(self.norm(hidden))
        return nn.functional.mse_loss(hidden, y)


def normed(plan: str, times: int) -> ss.StepProgram:
    graph = ss.capture(Normed(times), (torch.randn(8, 8), torch.randn(8, 8)))
    made = ss.Plan(graph, range(2))
    PLANS[plan](made)
    made.overlap = DUPLEX
    return ss.compile(made).step_program


@pytest.mark.parametrize(
    "plan, times",
    [("data_parallel", 1), ("data_parallel", 2), ("megatron", 2), ("recompute", 2), ("zero3", 1)],
)
def test_the_second_half_reads_buffers_that_the_first_half_has_replaced(
    plan: str, times: int
) -> None:
    block = normed(plan, times).blocks[0, ActionKind.FORWARD]
    replaced = max(
        n
        for n, i in enumerate(block)
        if i.half == 0 and any(v.role is Role.STATE for v in i.writes)
    )
    read = min(
        n for n, i in enumerate(block) if i.half == 1 and any(v.role is Role.STATE for v in i.reads)
    )
    assert replaced < read


def test_buffers_that_both_halves_would_need_at_once_raise_plan_error() -> None:
    with pytest.raises(
        ss.PlanError, match=r"second half .* reads .*norm.running_mean.* or no duplex"
    ):
        normed("zero3", 2)


@pytest.mark.parametrize("case", OVERLAPPED[::2], ids=str)
def test_duplex_plans_train_the_same_weights_as_one_device(case: Case, tmp_path: Path) -> None:
    program = case.compiled().step_program
    program.check()
    assert ss.StepProgram.parse(str(program)) == program
    check_trains(case, tmp_path, 1e-10)


# --- the order ----------------------------------------------------------------------------------


def programs(case: Case) -> tuple[ss.StepProgram, ss.StepProgram]:
    """The program, and the same in halves."""
    plain = case.compiled().step_program
    return plain, duplex(plain)


def of_kinds(block: Iterable[StepInstruction], kinds: Iterable[Verb]) -> list[StepInstruction]:
    wanted = frozenset(kinds)
    return [i for i in block if i.kind in wanted]


def done_by(block: Iterable[StepInstruction], half: int) -> list[str]:
    """The instructions of one half in order. A move is at the place of its wait."""
    mine = (i for i in block if i.half == half and i.phase is not Phase.START)
    return [replace(i, half=None, phase=Phase.WHOLE).short for i in mine]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_half_runs_the_program_and_weights_move_once(case: Case) -> None:
    plain, both = programs(case)
    for key, block in plain.blocks.items():
        mine = [i for i in block if i.kind not in OF_WEIGHTS]
        for half in (0, 1):
            assert done_by(both.blocks[key], half) == [i.short for i in mine]
        assert of_kinds(both.blocks[key], OF_WEIGHTS) == of_kinds(block, OF_WEIGHTS)
    assert (both.begin, both.end) == (plain.begin, plain.end)
    runs, others = ([e for e in p.events if isinstance(e, Action)] for p in (plain, both))
    assert runs == others
    assert len(both.events) - len(runs) == 2 * (len(plain.events) - len(runs))


@pytest.mark.parametrize("case", MOVING, ids=str)
def test_one_half_computes_while_the_other_communicates(case: Case) -> None:
    for block in programs(case)[1].blocks.values():
        waits = [n for n, i in enumerate(block) if i.kind in MOVES and i.phase is Phase.WAIT]
        assert len(waits) >= 4
        for place in waits:
            start = next(n for n, i in enumerate(block) if i.is_start_of(block[place]))
            beside = of_kinds(block[start:place], COMPUTING)
            # Both devices compute, and only for the other half.
            assert {device for i in beside for device in i.devices} == {0, 1}
            assert {i.half for i in beside} == {0, 1} - {block[place].half}


# --- against HiDup's formula --------------------------------------------------------------------


def stages(secs: Sequence[tuple[int, int]]) -> tuple[StepInstruction, ...]:
    """A block of computations; before each but the first comes communication that takes time.

    The name of an instruction ends with its position in ``secs``.
    """
    block: list[StepInstruction] = []
    for number, (c, _) in enumerate(secs):
        if c:
            given = Operands(
                (Value(Role.RESULT, f"x{number}"),), (Value(Role.ARRIVED, str(number)),)
            )
            block.append(instruction_of(Verb.MOVE, str(number), (0,), given))
        block.append(StepInstruction(Verb.FORWARD, str(number), (0,)))
    return tuple(block)


def secs_of(order: Iterable[StepInstruction], secs: Sequence[tuple[int, int]]) -> int:
    """The end time, with computations one after another and communication beside them."""
    clock = link = 0
    ends: dict[tuple[str, int | None], int] = {}
    for i in order:
        c, p = secs[int(i.name)]
        if i.kind is Verb.FORWARD:
            clock += p
        elif i.phase is Phase.WAIT:
            clock = max(clock, ends[i.name, i.half])
        else:
            link = ends[i.name, i.half] = max(clock, link) + c
            clock = clock if i.phase is Phase.START else link
    return clock


def by_stages(secs: Iterable[tuple[int, int]]) -> int:
    """HiDup's forward: a half moves while the other half does its last computation, in turn."""
    total = debt = 0
    for c, p in secs:
        total += max(debt, c) + max(p, c)
        debt = p
    return total + debt


def halves_of(secs: Sequence[tuple[int, int]]) -> Iterable[StepInstruction]:
    return overlapped(*(tuple(replace(i, half=h) for i in stages(secs)) for h in (0, 1)))


def test_hidups_example_takes_27_instead_of_40() -> None:
    secs = [(0, 4), (3, 5), (6, 2)]
    assert by_stages(secs) == secs_of(halves_of(secs), secs) == 27
    assert 2 * secs_of(stages(secs), secs) == 40


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8))
def test_the_woven_order_is_never_slower_than_hidups_stages(secs: list[tuple[int, int]]) -> None:
    secs[0] = (0, secs[0][1])
    computing = 2 * sum(p for _, p in secs)
    beside, apart = secs_of(halves_of(secs), secs), 2 * secs_of(stages(secs), secs)
    assert computing <= beside <= by_stages(secs) <= apart


# --- memory and time ----------------------------------------------------------------------------


def largest_segment(compiled: ss.Compiled, device: int) -> int:
    """The largest increase of memory in a step of a run."""
    found = footprints(compiled.materialized, device).values()
    return max(
        peak.most.total - before.total
        for one in found
        for before, peak in zip([Moment(), *(p.after for p in one.peaks)], one.peaks, strict=False)
    )


MEMORY = [case for case in OVERLAPPED if case.model != "evoformer" and case.plan != "swap"]


@pytest.mark.parametrize("case", MEMORY, ids=str)
def test_duplex_needs_at_most_the_memory_of_one_more_segment(case: Case) -> None:
    """Compared with the same plan that runs the whole batch as one microbatch."""
    whole = replace(case, overlap=replace(case.overlap, duplex=False), batch=8).compiled()
    both = case.compiled()
    most = memory_of(whole.materialized)
    for device, memory in memory_of(both.materialized).items():
        segment = largest_segment(whole, device)
        assert memory.total_bytes <= most[device].total_bytes + segment


@pytest.mark.parametrize("case", MOVING, ids=str)
def test_the_simulator_hides_communication_behind_the_other_half(case: Case) -> None:
    # Overheads of calls, which halves have twice, are left out.
    profile = replace(PROFILES["v100"], segment_secs=0.0, move_secs=0.0)

    def found(overlap: ss.Overlap, batch: int) -> Simulated:
        sizes = {"width": 64, "sequence": 32}
        made = replace(case, overlap=overlap, batch=batch, sizes=sizes, dtype="float32").compiled()
        return ss.simulate(made, profile)

    whole, both = found(ss.Overlap(), 64), found(DUPLEX, 32)
    exposed = [sum(level.exposed_secs for level in one.levels) for one in (whole, both)]
    assert exposed[1] < 0.7 * exposed[0]
    assert both.overlap > 0.3


# --- errors -------------------------------------------------------------------------------------
