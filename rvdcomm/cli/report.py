"""Report: plans and proofs as JSON values and as text."""

from __future__ import annotations

import json
from dataclasses import asdict
from math import isfinite
from typing import Any

from rvdcomm import Plan, Program
from rvdcomm.program import Proof, Transition


def plan_json(found: Plan) -> dict[str, Any]:
    """The plan as JSON values; an infinite gap is null."""
    steps = [
        {
            "kind": step.kind,
            "groups": step.groups,
            "state": step.dst.text,
            "ranks": sorted(step.dst.ranks),
            "num_slices": step.num_slices,
            "cost": {**asdict(cost), "recv_bytes": max(cost.recv_bytes.values(), default=0)},
        }
        for step, cost in zip(found.path.steps, found.step_costs, strict=True)
    ]
    return {
        **program_json(found.program),
        "steps": steps,
        "cost": asdict(found.cost),
        "bound": asdict(found.bound),
        "gap": found.gap if isfinite(found.gap) else None,
    }


def program_json(program: Program) -> dict[str, Any]:
    """The transition of a program of one tensor; else the list of its transitions."""
    each = [_transition_json(transition) for transition in program.transitions]
    return each[0] if len(each) == 1 else {"tensors": each}


def _transition_json(transition: Transition) -> dict[str, Any]:
    src, dst = transition.src, transition.dst
    found = {"src": str(src), "dst": str(dst), "shape": src.shape, "dtype": transition.src_dtype}
    is_converted = transition.dst_dtype != transition.src_dtype
    return found | ({"dst_dtype": transition.dst_dtype} if is_converted else {})


def program_counts(program: Program) -> dict[str, int]:
    """Counts of a program; messages are those between different ranks, reads included."""
    sizes = [num_elements for _, _, num_elements in program.traffic()]
    return {
        "ranks": len(program.ranks),
        "instructions": len(program.instructions),
        "collectives": len(program.collectives),
        "messages": len(sizes),
        "elements": sum(sizes),
    }


def proof_text(program: Program, proof: Proof) -> str:
    """What ``verify`` proved, and how much of the program was checked."""
    if proof.rounds_apart:
        pairs = ", ".join(f"{one} and {other}" for one, other in proof.rounds_apart)
        bits = (
            f"replicas add value parts in different orders (ranks {pairs}):\n"
            "         last bits of floating-point sums may differ"
        )
    else:
        bits = "replicas add value parts in one order: their sums have equal bits"
    counts = program_counts(program)
    transitions = "\n".join(map(_transition_text, program.transitions))
    return (
        f"{transitions} on {counts['ranks']} ranks\n"
        "proved   every element of every dst shard is written once, with every value part once;\n"
        "         nothing is read before it is written, src is not written, replicas are equal;\n"
        "         in every collective groups ascend, sizes agree and runs are contiguous;\n"
        "         one order of collectives for all ranks, so that none waits for another forever\n"
        f"rounds   {bits}\n"
        f"checked  instructions {counts['instructions']}, collectives {counts['collectives']}, "
        f"messages {counts['messages']}, elements between ranks {counts['elements']}"
    )


def _transition_text(transition: Transition) -> str:
    src, dst = transition.src, transition.dst
    shape = "x".join(map(str, src.shape)) or "scalar"
    dtypes = dict.fromkeys([transition.src_dtype, transition.dst_dtype])
    return f"{src.rvd} -> {dst.rvd}  {shape} {' as '.join(dtypes)}"


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object on a line of its own."""
    print(json.dumps(value, allow_nan=False))
