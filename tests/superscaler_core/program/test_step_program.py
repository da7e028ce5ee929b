"""Step programs: text form, checks, and comparison with the calls of a run."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import superscaler_core as ss
from superscaler_core.materialize import Materialized
from superscaler_core.plans import PLANS
from superscaler_core.program.instruction import StepInstruction
from superscaler_core.program.verb import BETWEEN, Phase, Verb
from superscaler_core.run import Rank
from tests.superscaler_core.cases import FOLDED, MODEL_OF, OPTIMIZERS, Case, RoundRobin
from tests.superscaler_core.plans.test_halves import CASES as HALVES
from tests.superscaler_core.plans.test_plans import CASES as OTHER_CASES
from tests.superscaler_core.program.few import FEW
from tests.superscaler_core.program.few import compiled as compiled_case

NUM_DEVICES = {"dap_pipeline": 4, "mesh_2d": 4, "interlaced": 4}
SIZES = {key: {"layers": 4} for key in FOLDED}
CASES = [
    *(
        Case(
            name,
            NUM_DEVICES.get(name, 2),
            model=MODEL_OF.get(name, "gpt"),
            sizes=SIZES.get(name, {}),
        )
        for name in PLANS
    ),
    *OTHER_CASES[::7],
    Case("chimera", 4, {"pp": 2, "tp": 2, "zero": 1}),
    Case("chimera", 4, {"microbatches": 8}, sizes={"layers": 4, "tied": True}),
    RoundRobin(options={"num_microbatches": 3}),
    RoundRobin(num_devices=4, replicas=(1, 2, 1), options={"num_microbatches": 4}, model="mlp"),
]
OVERLAP = ss.Overlap(prefetch=1, reductions=True, moves=True, bucket_bytes=1 << 12)
OVERLAPPING = [
    replace(case, overlap=OVERLAP)
    for case in CASES[: len(PLANS)]
    if any(name in case.plan for name in ("zero3", "zero_off", "megatron", "dap_", "swap", "mesh"))
]
OVERLAPPING += [replace(Case("hybrid", 4, {"pp": 2, "microbatches": 2}), overlap=OVERLAP)]
OVERLAPPING += [replace(Case("chimera", 4, {"pp": 2, "zero": 1}), overlap=OVERLAP)]
OVERLAPPING += [
    replace(case, overlap=replace(OVERLAP, duplex=True))
    for case in (Case("hybrid", 4, {"pp": 2, "microbatches": 2, "tp": 2}), Case("zero3", 2))
]


@pytest.mark.parametrize("case", [*CASES, *OVERLAPPING, *HALVES[::4]], ids=str)
def test_step_programs_of_all_plans_are_read_back_and_pass_the_check(case: Case) -> None:
    program = case.compiled().step_program
    read = ss.StepProgram.parse(str(program))
    assert read == program
    for block in program.blocks.values():
        assert [StepInstruction.parse(str(i)) for i in block] == list(block)
    read.check()


# --- calls of a run -----------------------------------------------------------------------------

RECORDED: dict[str, Callable[..., str]] = {
    "forward": lambda segment: segment.__name__,
    "compute": lambda segment: segment.__name__,
    "hold": lambda segment: segment.__name__,
    "backward": lambda segment: segment.__name__,
    "recompute": lambda segment: segment.__name__,
    **{
        f"{phase}{way}": lambda segment: segment.__name__
        for phase in ("", "start_", "wait_")
        for way in ("offload", "reload")
    },
    "backward_inputs": lambda segment: segment.__name__,
    "backward_weights": lambda segment: segment.__name__,
    "keep": str,
    "kept": str,
    "move": str,
    "move_back": str,
    **{f"{phase}_{way}": str for phase in ("start", "wait") for way in ("move", "move_back")},
    "unshard": lambda names: names[0],
    "reshard": lambda names: names[0],
    "reduce": lambda names: names[0],
    "fetch": lambda names: names[0],
    **{
        f"{phase}_{what}": lambda names: names[0]
        for phase in ("start", "wait")
        for what in ("unshard", "reduce", "fetch")
    },
    "total_loss": lambda: "loss",
    "update": lambda names: names[0],
}
"""The methods that generated code calls, each with a function that labels its call."""

CALLS = {
    Verb.FORWARD: "forward",
    Verb.COMPUTE: "compute",
    Verb.HOLD: "hold",
    Verb.BACKWARD: "backward",
    Verb.RECOMPUTE: "recompute",
    Verb.BACKWARD_INPUTS: "backward_inputs",
    Verb.BACKWARD_WEIGHTS: "backward_weights",
    Verb.OFFLOAD: "offload",
    Verb.RELOAD: "reload",
    Verb.KEEP: "keep",
    Verb.RESUME: "kept",
    Verb.MOVE: "move",
    Verb.MOVE_BACK: "move_back",
    Verb.UNSHARD: "unshard",
    Verb.RESHARD: "reshard",
    Verb.REDUCE: "reduce",
    Verb.FETCH: "fetch",
    Verb.LOSS: "total_loss",
    Verb.UPDATE: "update",
}
WEIGHTS = (Verb.FETCH, Verb.UNSHARD, Verb.RESHARD, Verb.REDUCE)


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, list[tuple[str, str]]]]:
    """The calls of generated code by rank. Calls of one method by another do not count."""
    found: dict[int, list[tuple[str, str]]] = {}
    inside = threading.local()

    def wrapped(name: str, label: Callable[..., str]) -> Callable[..., Any]:
        method = getattr(Rank, name)

        def call(self: Rank, *args: Any, **options: Any) -> Any:
            if getattr(inside, "is_deep", False):
                return method(self, *args, **options)
            called = name if self._with_grad or name != "forward" else "compute"
            if self._with_grad or (name != "keep" and "load" not in name):
                found.setdefault(self.tables.rank, []).append((called, label(*args[:1])))
            inside.is_deep = True
            try:
                return method(self, *args, **options)
            finally:
                inside.is_deep = False

        return call

    with monkeypatch.context() as patch:
        for name, label in RECORDED.items():
            patch.setattr(Rank, name, wrapped(name, label))
        yield found


def idle(made: Materialized) -> set[tuple[str, str]]:
    """Directions of edges that move nothing; generated code assigns instead of calling."""
    sub_transfers = [("move", edge.name, edge.forward) for edge in made.edges.all]
    sub_transfers += [("move_back", edge.name, edge.backward) for edge in made.edges.all]
    return {(call, name) for call, name, way in sub_transfers if len(way) == 1 and way[0].is_idle}


def expected(made: Materialized, device: int) -> list[tuple[str, str]]:
    """The calls of a device according to the step program."""
    found = []
    for i, _ in made.step_program.instructions(device):
        if i.kind in BETWEEN:
            continue
        name = i.name
        if i.kind in WEIGHTS:
            uses = [
                use.name
                for use in made.uses_of(i)
                if device in use.storage.shards or device in use.sharding.shards
            ]
            name = uses[0]
        if i.kind is Verb.UPDATE:
            storage = made.weights.storage
            name = next(t.name for t in made.subject(i) if device in storage[t].shards)
        found.append((f"{i.phase}_" * bool(i.phase) + CALLS[i.kind], name))
    return found


@pytest.mark.parametrize("case", [*FEW.values(), *OVERLAPPING[::5], *CASES[-2:]], ids=str)
def test_ranks_run_the_instructions_of_the_step_program_in_order(
    case: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiled = case.compiled()
    compiled.save(tmp_path)
    inputs = case.inputs(0, compiled.plan.num_microbatches)
    given = inputs[: len(inputs) - len(case.recycled)]

    def step(trainer: ss.Trainer) -> None:
        if trainer.is_asynchronous:
            trainer.update_with(OPTIMIZERS["sgd"])
        trainer.step(*given)

    with recorded(monkeypatch) as calls:
        ss.run_threads(tmp_path, step, range(case.num_devices))
    still = idle(compiled.materialized)
    for device in range(case.num_devices):
        wanted = expected(compiled.materialized, device)
        ran = calls.get(device, [])
        assert [c for c in ran if c not in still] == [c for c in wanted if c not in still]
        assert ran


# --- errors -------------------------------------------------------------------------------------


def program(plan: str = "zero3") -> ss.StepProgram:
    made = Case(plan, 2).compiled().materialized.step_program
    made.check()
    return made


def changed(kind: Verb, *, is_twice: bool, phase: Phase, plan: str) -> ss.StepProgram:
    """A program without the first instruction of a kind, or with that instruction twice."""
    made = program(plan)
    blocks = dict(made.blocks)
    for key, block in blocks.items():
        found = (n for n, i in enumerate(block) if (i.kind, i.phase) == (kind, phase))
        place = next(found, None)
        if place is not None:
            blocks[key] = (*block[:place], *(block[place],) * (2 * is_twice), *block[place + 1 :])
            break
    return replace(made, blocks=blocks)


@pytest.mark.parametrize(
    "plan, kind, phase, is_twice, words",
    [
        ("zero3", Verb.FORWARD, Phase.WHOLE, False, "is not made before it"),
        ("zero3", Verb.FORWARD, Phase.WHOLE, True, "has run this segment in the block"),
        ("zero3", Verb.BACKWARD, Phase.WHOLE, False, "is not made before it|nothing takes"),
        ("zero3", Verb.UNSHARD, Phase.WHOLE, False, "these weights are not gathered"),
        ("zero3", Verb.RESHARD, Phase.WHOLE, False, "copy:.* exists already"),
        ("swap", Verb.OFFLOAD, Phase.START, True, "kept:stage0_segment.* was freed before"),
        ("swap", Verb.OFFLOAD, Phase.START, False, "it was not started"),
        ("swap", Verb.OFFLOAD, Phase.WAIT, False, "host:.* is not there: nothing has copied it"),
        ("swap", Verb.RELOAD, Phase.WAIT, False, "kept:.* is not there: no forward has kept it"),
        ("swap", Verb.RELOAD, Phase.START, True, "host:.* was freed before"),
        ("swap", Verb.FORWARD, Phase.WHOLE, False, "is not made before it"),
    ],
)
def test_inconsistent_step_program_raises_plan_error(
    plan: str, kind: Verb, phase: Phase, is_twice: bool, words: str
) -> None:
    with pytest.raises(ss.PlanError, match=words):
        changed(kind, is_twice=is_twice, phase=phase, plan=plan).check()


@pytest.mark.parametrize(
    "line, words",
    [
        ("step", "line 1 of a step program"),
        ("step of x on 0\nF a on 0", "line 2 of a step program"),
        ("step of x on 0\nstage 0 F:\n  Q a on 0", "cannot read the instruction 'Q a on 0'"),
        ("step of x on 0\norder:\n  0Q0", "line 3 of a step program: cannot parse action"),
    ],
)
def test_unreadable_line_of_a_step_program_raises_plan_error(line: str, words: str) -> None:
    with pytest.raises(ss.PlanError, match=words):
        ss.StepProgram.parse(line)


def test_a_program_is_a_value_that_nobody_changes_and_that_can_be_pickled() -> None:
    program = compiled_case("versions").step_program
    for name in ("blocks", "pairs", "versions", "borrowed"):
        with pytest.raises(TypeError, match="does not support item assignment"):
            getattr(program, name)[0] = ()
    assert pickle.loads(pickle.dumps(program)) == program
