"""Pairs: plan, verify and simulate random transitions, and compare them with a dense oracle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial

import numpy as np

import rvdcomm as rv
from rvdcomm import SimulationResult
from rvdcomm.errors import MemoryLimitError
from rvdcomm.plans import clear_cache, simulate_program
from rvdcomm.program import Program
from rvdcomm.program.lower import lower
from rvdcomm.program.verify import verify
from tests.fuzz.command import Report, guarded, parser, progress
from tests.fuzz.draw import NUMPY_DTYPES, Case, draw
from tests.oracle import Array, data_faults, local_faults, shards_of


def main(words: Sequence[str] | None = None) -> int:
    made = parser(
        "pairs",
        "Plan, prove and simulate random pairs of layouts, and compare data, bytes and bounds.",
        "  python -m tests.fuzz.pairs --pairs 10000             some minutes on one core\n"
        "  python -m tests.fuzz.pairs --seed 3 --first 17 --pairs 1     one pair again\n",
    )
    made.add_argument("--pairs", type=int, default=10_000, help="how many (default 10000)")
    made.add_argument("--first", type=int, default=0, help="index of the first one (default 0)")
    args = made.parse_args(words)
    return fuzz(args.seed, range(args.first, args.first + args.pairs)).print()


def fuzz(seed: int, indices: range) -> Report:
    """Check the transitions of these indices."""
    report = Report("random pairs, simulated")
    for index in progress(indices, "pair"):
        case = draw(seed, index)
        report.counts.update(kinds_of(case))
        for fault in guarded(lambda case=case: faults_of(case)):  # type: ignore[misc]
            again = f"python -m tests.fuzz.pairs --seed {seed} --first {index} --pairs 1"
            report.findings.append(f"{fault}\n  {case}\n  {again}")
        # No pair occurs twice, so cached plans only use memory.
        clear_cache()
    return report


def kinds_of(case: Case) -> Counter[str]:
    """The kinds of a transition; the summary counts them, so that missing kinds are visible."""
    src, dst = set(case.src.ranks), set(case.dst.ranks)
    relation = "the same" if src == dst else "overlapping" if src & dst else "disjoint"
    levels = 1 if case.topology is None else len(case.topology.levels)
    kinds = [
        "pairs",
        f"on {relation} ranks",
        f"on {levels} levels",
        f"of {len(case.src.shape)} dims",
        "with parts" if case.src.rvd.v > 1 or case.dst.rvd.v > 1 else "without parts",
        "even" if case.src.is_even and case.dst.is_even else "uneven",
        f"dtypes of {len(NUMPY_DTYPES)}: {case.dtype}",
    ]
    kinds += ["with a memory limit"] * (case.memory_share is not None)
    return Counter(kinds + ["lowered for domains and slices, too"] * (case.num_slices > 0))


def faults_of(case: Case) -> list[str]:
    """The faults of a transition's plan, and of the programs of this plan."""
    plan = rv.plan(case.src, case.dst, case.dtype, case.topology)
    shards = shards_of(case.src, case.parts())
    faults = faults_of_plan(case, plan, shards)
    if case.num_slices:
        options = {"domains": case.domains, "num_slices": case.num_slices}
        lowered = partial(lower, plan.path, plan.dtype, plan.topology, **options)
        near = lowered()
        faults += local_faults(near, lambda rank: lowered(ranks=[rank]))
        faults += [f"with {options}: {fault}" for fault in faults_of_program(case, near, shards)]
    faults += local_faults(plan.program, plan.program_of)
    if case.memory_share is not None:
        faults += faults_of_limit(case, plan, shards)
    return faults


def faults_of_plan(case: Case, plan: rv.Plan, shards: dict[int, Array]) -> list[str]:
    """Faults of a plan: in data or proof, modified inputs, wrong costs, or bounds above costs."""
    before = {rank: shard.tobytes() for rank, shard in shards.items()}
    result = rv.simulate(plan, shards)
    faults = [f"plan: {fault}" for fault in faults_of_program(case, plan.program, shards, result)]
    if any(shard.tobytes() != before[rank] for rank, shard in shards.items()):
        faults.append("plan: an input was modified")
    cost, bound = asdict(plan.cost), asdict(plan.bound)
    counted = {
        "wire_bytes": result.wire_bytes,
        "recv_bytes": max(result.recv_bytes.values()),
        "peak_bytes": max(result.peak_bytes.values()),
    }
    faults += [
        f"plan: {name} is {cost[name]}, simulated {count}"
        for name, count in counted.items()
        if cost[name] != count
    ]
    if sum(result.recv_bytes.values()) != result.wire_bytes:
        faults.append("plan: more or fewer bytes arrive than are sent")
    # The tolerance is for seconds, which are sums of floats in different orders.
    faults += [
        f"plan: the bound of {name} is {bound[name]}, above the cost {cost[name]}"
        for name in cost
        if bound[name] > cost[name] * (1 + 1e-9)
    ]
    return faults + ([] if str(plan) else ["plan: it prints as nothing"])


def faults_of_program(
    case: Case, program: Program, shards: dict[int, Array], result: SimulationResult | None = None
) -> list[str]:
    """Faults of a program in its proof, its data and dtype, or in the round trip of its text."""
    faults = []
    try:
        verify(program)
    except rv.ProgramError as error:
        faults.append(f"verify: {error}")
    found = result or simulate_program(program, shards)
    faults += data_faults(case.dst, found.shards, case.parts())
    if any(shard.dtype != np.dtype(case.stored_as) for shard in found.shards.values()):
        faults.append("the dtype of a result is not the input's")
    if Program.parse(str(program)) != program:
        faults.append("the text reads back to another program")
    return faults


def faults_of_limit(case: Case, plan: rv.Plan, shards: dict[int, Array]) -> list[str]:
    """Faults of a limited plan: it must keep the limit, or the error must name a possible limit."""
    assert case.memory_share is not None
    low, high = plan.bound.peak_bytes, plan.cost.peak_bytes
    limit = low + round(case.memory_share * (high - low))
    try:
        found = rv.plan(case.src, case.dst, case.dtype, case.topology, limit)
    except MemoryLimitError as error:
        least = int(str(error).split("a plan needs is ")[1].split(";")[0])
        if least <= limit:
            return [f"limit {limit}: refused, but {least} is said to be enough"]
        found = rv.plan(case.src, case.dst, case.dtype, case.topology, least)
        limit = least
    faults = [] if found.cost.peak_bytes <= limit else [f"{found.cost.peak_bytes} bytes are needed"]
    again = replace(case, memory_share=None)
    faults += faults_of_plan(again, found, shards)
    return [f"limit {limit}: {fault}" for fault in faults]


if __name__ == "__main__":
    raise SystemExit(main())
