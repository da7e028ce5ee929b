"""Random small form problems for tests of HiDup's planner, and their solution by brute force."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from random import Random

import numpy as np

from superscaler_core.published.hidup import (
    DuplexStage,
    FormCall,
    FormProblem,
    Signature,
    overlapped_secs,
)

NUM_FORMS = 3
CHAIN_LENGTH = 5


def chain(seed: int) -> FormProblem:
    """A chain of five calls; each writes the form that it reads.

    Every change between two forms has a cost. Computation costs are whole numbers from 0 to 10, and
    communication costs whole numbers from 1 to 10.
    """
    random = Random(seed)
    calls, reforms = [], {}
    for i in range(CHAIN_LENGTH):
        signatures = tuple(
            Signature((form,) * (i > 0), (form,), DuplexStage(0, random.randint(0, 10)))
            for form in range(NUM_FORMS)
        )
        calls.append(FormCall(f"call{i}", (i - 1,) * (i > 0), (i,), signatures))
        if i > 0:
            reforms[i - 1] = {
                pair: DuplexStage(random.randint(1, 10))
                for pair in product(range(NUM_FORMS), repeat=2)
                if pair[0] != pair[1]
            }
    return FormProblem(tuple(calls), reforms)


def chain_secs(problem: FormProblem) -> tuple[np.ndarray, np.ndarray]:
    """Overlapped and serial forward seconds of a chain, for every choice of forms.

    A call begins a stage if its form differs from the form of the previous call. Any other call
    belongs to the stage of the previous call.
    """
    forms = np.array(list(product(range(NUM_FORMS), repeat=CHAIN_LENGTH)))
    comm = np.zeros((CHAIN_LENGTH, len(forms)))
    secs = np.zeros_like(comm)
    begins = np.ones_like(comm, dtype=bool)
    for i, call in enumerate(problem.calls):
        secs[i] = np.array([s.work.secs for s in call.signatures])[forms[:, i]]
        if i > 0:
            table = np.zeros((NUM_FORMS, NUM_FORMS))
            for pair, cost in problem.reforms[i - 1].items():
                table[pair] = cost.comm_secs  # type: ignore[index]
            comm[i] = table[forms[:, i - 1], forms[:, i]]
            begins[i] = forms[:, i - 1] != forms[:, i]
    acc, debt, open_comm, open_secs = np.zeros((4, len(forms)))
    for i in range(CHAIN_LENGTH):
        closed = acc + np.maximum(debt, open_comm) + np.maximum(open_secs, open_comm)
        acc, debt = np.where(begins[i], (closed, open_secs), (acc, debt))
        open_comm = np.where(begins[i], comm[i], open_comm)
        open_secs = np.where(begins[i], secs[i], open_secs + secs[i])
    acc = acc + np.maximum(debt, open_comm) + np.maximum(open_secs, open_comm)
    return acc + open_secs, 2 * (comm + secs).sum(0)


def random_problem(seed: int) -> FormProblem:
    """A few calls that read random earlier tensors, with signatures of random forms."""
    random = Random(seed)

    def work(comm_share: float) -> DuplexStage:
        has_comm = random.random() < comm_share
        comm = (random.randint(0, 9), random.randint(0, 9)) if has_comm else (0, 0)
        return DuplexStage(comm[0], random.randint(0, 9), comm[1], random.randint(0, 9))

    calls = []
    for i in range(random.randint(2, 5)):
        reads = tuple(sorted(random.sample(range(i), min(i, random.randint(1, 2)))))
        signatures = tuple(
            Signature(
                tuple(random.randint(0, 1) for _ in reads), (random.randint(0, 1),), work(0.2)
            )
            for _ in range(random.randint(0, 2))
        )
        # Every call can read and write form 0, so that there is always a strategy.
        signatures += (Signature((0,) * len(reads), (0,), work(0.2)),)
        calls.append(FormCall(f"call{i}", reads, (i,), signatures))
    reforms = {
        i: {
            pair: DuplexStage(random.randint(0, 9), 0, random.randint(0, 9))
            for pair in ((0, 1), (1, 0))
        }
        for i in range(len(calls))
    }
    return FormProblem(tuple(calls), reforms)


def all_strategies(problem: FormProblem, most_calls: int | None) -> Iterator[Sequence[DuplexStage]]:
    """The stages of every possible strategy, enumerated from the definition of a stage."""
    num = len(problem.calls)
    for signatures in product(*(call.signatures for call in problem.calls)):
        for begins in product((False, True), repeat=num - 1):
            ends = [0, *(i + 1 for i, begin in enumerate(begins) if begin), num]
            stages = _stages(problem, signatures, ends)
            if stages is None:
                continue
            lengths = [b - a for a, b in pairwise(ends)]
            talks = [bool(n) for _, n in stages]
            may_be = all(
                (most_calls is None or length <= most_calls)
                and (i == 0 or talks[i] or lengths[i - 1] == most_calls)
                for i, length in enumerate(lengths)
            )
            if may_be:
                yield [stage for stage, _ in stages]


def _stages(
    problem: FormProblem, signatures: Sequence[Signature], ends: Sequence[int]
) -> list[tuple[DuplexStage, int]] | None:
    """The stages, each with its number of communications; None if a communication is impossible."""
    forms: dict[int, list[object]] = {}
    found = []
    for begin, end in pairwise(ends):
        stage, comms = DuplexStage(), 0
        at_start = set(forms)
        for call, signature in zip(problem.calls[begin:end], signatures[begin:end], strict=True):
            stage = stage.plus(signature.work)
            comms += bool(signature.work.comm_secs or signature.work.backward_comm_secs)
            for tensor, form in zip(call.reads, signature.reads, strict=True):
                if form not in forms[tensor]:
                    cost = problem.reforms[tensor].get((forms[tensor][0], form))
                    if cost is None or len(forms[tensor]) > 1 or tensor not in at_start:
                        return None
                    forms[tensor].append(form)
                    stage, comms = stage.plus(cost), comms + 1
            forms |= {t: [form] for t, form in zip(call.writes, signature.writes, strict=True)}
        found.append((stage, comms))
    return found


def brute_force_secs(
    problem: FormProblem, backward: str, most_calls: int | None, counts_last: bool
) -> float:
    """The least time over all strategies, in seconds; infinite if there is none."""
    return min(
        (
            overlapped_secs(stages, backward, counts_last=counts_last)
            for stages in all_strategies(problem, most_calls)
        ),
        default=float("inf"),
    )
