"""Programs: change step programs at random; a change is refused, or trains the same weights.

A program whose change is accepted may be changed again, so a case is a walk.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from traceback import walk_tb

from torch import Tensor

import superscaler_core as ss
from superscaler_core import StepProgram, Trainer
from superscaler_core.errors import PlanError
from superscaler_core.run import Rank, ThreadTransport
from superscaler_core.training import in_threads
from tests.fuzz.command import Report, parser, progress
from tests.superscaler_core.cases import OPTIMIZERS, Case, Trained, difference
from tests.superscaler_core.plans.test_halves import CASES as HALVES
from tests.superscaler_core.plans.test_plans import CASES as PLANS
from tests.superscaler_core.program.mutants import Mutant, mutant
from tests.superscaler_core.program.test_pairs import OVERLAPPED
from tests.superscaler_core.program.test_step_program import CASES as OTHERS

TOLERANCE = 1e-12
"""Largest relative difference in float64: another order of sums may round another way."""

GOES_ON = 0.75
"""Part of the accepted changes after which the changed program is changed again."""

EQUAL = "accepted and equal"

FLOOR = 1e-3
"""Gradients whose largest element is below this are compared absolutely; some are only noise."""

OVERLAPS = [
    ss.Overlap(prefetch=1),
    ss.Overlap(prefetch=2, reductions=True, bucket_bytes=4000),
    ss.Overlap(moves=True),
    ss.Overlap(duplex=True, prefetch=1, reductions=True),
    ss.Overlap(pairs=True),
    ss.Overlap(prefetch=1, reductions=True, moves=True, bucket_bytes=4000),
]
ALONE = [case for case in (*PLANS, *OTHERS, *HALVES) if case.dtype == "float64"]
BESIDE = [
    replace(case, overlap=overlap)
    for n, case in enumerate(ALONE)
    for m, overlap in enumerate(OVERLAPS)
    if (n + m) % 3 == 0
]
CASES = [*ALONE, *OVERLAPPED, *BESIDE]


def main(words: Sequence[str] | None = None) -> int:
    made = parser(
        "programs",
        "Change the step programs of all plans at random: an instruction or an event less, twice,\n"
        "moved, or with other operands. The check refuses a change, or it trains the same weights.",
        "  python -m tests.fuzz.programs --mutants 10000\n"
        "  python -m tests.fuzz.programs --mutants 500 --seed 3",
    )
    made.add_argument("--mutants", type=int, default=10000, help="how many (default 10000)")
    args = made.parse_args(words)
    return fuzz(args.seed, args.mutants).print()


def fuzz(seed: int, num_mutants: int, cases: Sequence[Case] = CASES) -> Report:
    """Try mutants of the programs of all cases, the same number of each."""
    report = Report("changed step programs")
    each = -(-num_mutants // len(cases))
    for number in progress(range(len(cases)), "case"):
        rng = random.Random(f"{seed} {number}")
        left = num_mutants - number * each
        try_case(report, cases[number], rng, min(each, left))
    return report


def try_case(report: Report, case: Case, rng: random.Random, num_mutants: int) -> None:
    """Try mutants of one program."""
    if num_mutants <= 0:
        return
    try:
        compiled = case.compiled()
    except PlanError:
        # Not every plan can be overlapped in every way.
        report.counts["cases that are refused"] += 1
        return
    found, program = Tried(case, compiled), compiled.step_program
    for number in range(num_mutants):
        one = mutant(program, rng)
        # Each of the two ways to run a program runs every second one.
        result = found.result(one, trained if number % 2 else executed)
        if result == EQUAL:
            program = one.program if rng.random() < GOES_ON else compiled.step_program
        report.counts[result.partition(":")[0]] += 1
        if result.startswith("accepted"):
            report.counts[f"{result}, {one.change}"] += 1
        if result.startswith("WRONG"):
            report.findings.append(f"{case} {case.overlap}: {one.change}: {one.what}: {result}")


class Tried:
    """A case whose mutants are tried.

    Args:
        case, compiled: the case, compiled.
    """

    def __init__(self, case: Case, compiled: ss.Compiled) -> None:
        self._case, self._compiled = case, compiled
        self._original: Mapping[int, Trained] | None = None

    def result(self, one: Mutant, run: Run) -> str:
        """What becomes of a mutant."""
        try:
            changed = self._compiled.with_program(one.program)
        except PlanError as error:
            return f"refused by {_module_of(error)}"
        except Exception as error:
            return f"WRONG check fails: {type(error).__name__}: {error}"
        if self._original is None:
            self._original = trained(self._case, self._compiled)
        try:
            errors = differences(run(self._case, changed), self._original)
        except Exception as error:
            return f"WRONG runs not: {type(error).__name__}: {str(error)[:300]}"
        if not errors <= TOLERANCE:
            return f"WRONG accepted and other: {errors}"
        is_read_back = StepProgram.parse(str(one.program)) == one.program
        return EQUAL if is_read_back else "WRONG read back as another program"


def _module_of(error: Exception) -> str:
    """The module that raised an error."""
    found = [frame for frame, _ in walk_tb(error.__traceback__)]
    return str(found[-1].f_globals["__name__"])


Run = Callable[[Case, ss.Compiled], Mapping[int, Trained]]
"""Two steps of a program on threads: losses, gradients, weights and results of every rank."""


def trained(case: Case, compiled: ss.Compiled) -> Mapping[int, Trained]:
    """Two steps of the printed program."""
    with tempfile.TemporaryDirectory() as folder:
        compiled.save(folder)
        work = _steps(case, compiled)
        return ss.run_threads(Path(folder), work, range(case.num_devices), timeout_secs=10.0)


def executed(case: Case, compiled: ss.Compiled) -> Mapping[int, Trained]:
    """Two steps of the program's instructions."""
    steps, weights = _steps(case, compiled), case.new_model().state_dict()

    def work(transport: ThreadTransport) -> Trained:
        values = {name: value.clone() for name, value in compiled.values.items()}
        trainer = Trainer(Rank(compiled.executor(transport.rank), transport, values), transport)
        trainer.load_state_dict(weights)
        return steps(trainer)

    return in_threads(work, range(case.num_devices), timeout_secs=10.0)


def _steps(case: Case, compiled: ss.Compiled) -> Callable[[ss.Trainer], Trained]:
    batch = [case.inputs(n, compiled.plan.num_microbatches) for n in range(2)]

    def work(trainer: ss.Trainer) -> Trained:
        if trainer.is_asynchronous:
            trainer.update_with(OPTIMIZERS["plain"])
        losses = [trainer.step(*x[: len(x) - len(case.recycled)]).item() for x in batch]
        grads = {f"grad {n}": p.grad for n, p in trainer.named_parameters() if p.grad is not None}
        return Trained(tuple(losses), {**grads, **trainer.state_dict(), **_results(trainer)})

    return work


def _results(trainer: ss.Trainer) -> dict[str, Tensor]:
    return {f"result {name}": value for name, value in trainer.results.items()}


def differences(found: Mapping[int, Trained], original: Mapping[int, Trained]) -> float:
    """The largest difference of all ranks."""
    return max(difference(found[rank], one, FLOOR) for rank, one in original.items())


if __name__ == "__main__":
    raise SystemExit(main())
