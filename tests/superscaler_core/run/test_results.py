"""Results beside the loss, and programs without gradients: equal to the model on one device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import Tensor, nn

import superscaler_core as ss
from superscaler_core.plans import PLANS, fill
from superscaler_core.program import BETWEEN, OF_WEIGHTS, Verb
from tests.superscaler_core.as_torch import compiled, on_ranks

WORDS = 11


class Words(nn.Module):
    """A few blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)) for _ in range(4)
        )
        self.head = nn.Linear(8, WORDS)

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.table(tokens)
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        best = logits.argmax(-1)
        return {"loss": loss, "logits": logits, "best": best, "norm": logits.square().mean()}


def words() -> nn.Module:
    torch.manual_seed(0)
    return Words().double()


def batch(size: int, seed: int = 0, length: int = 6) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    tokens, labels = (torch.randint(WORDS, (size, length), generator=random) for _ in range(2))
    return tokens, labels


CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "zero3": ("zero3", 2, {}),
    "recompute": ("recompute", 2, {}),
    "parts": ("coshard", 2, {}),
    "routes": ("chimera", 2, {"microbatches": 4}),
    "hybrid": ("hybrid", 4, {"tp": 2, "pp": 2, "microbatches": 2}),
    "swap": ("swap", 2, {}),
}


def planned(case: str, *, grad: bool) -> ss.Plan:
    name, num_devices, options = CASES[case]
    graph = ss.capture(words(), batch(4), results=("logits", "best", "norm"))
    plan = ss.Plan(graph, range(num_devices))
    fill(plan, PLANS[name], options)
    return plan if grad else plan.without_grad()


@pytest.mark.parametrize("case, grad", [*zip(CASES, [True, False] * 3, strict=True)])
def test_every_rank_gets_the_results_of_the_model_and_its_gradients(
    case: str, grad: bool, tmp_path: Path
) -> None:
    program = ss.compile(planned(case, grad=grad))
    inputs = batch(4 * program.plan.num_microbatches, seed=1)

    def step(trainer: ss.Trainer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        results = {"loss": trainer.step(*inputs), **trainer.results}
        if grad:
            torch.optim.SGD(trainer.parameters(), lr=1.0).step()
        return results, trainer.state_dict()

    model = words()
    wanted = model(*inputs)
    if grad:
        wanted["loss"].backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
    wanted = {name: value.detach() for name, value in wanted.items()}
    for mine in on_ranks(program, tmp_path, step):
        expected = wanted, dict(model.state_dict())
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_program_without_gradients_has_only_a_forward(case: str) -> None:
    made = ss.compile(planned(case, grad=False))
    program = made.step_program
    program.check()
    assert ss.StepProgram.parse(str(program)) == program
    ran = {i.kind for device in program.devices for i, _ in program.instructions(device)}
    assert ran <= {Verb.COMPUTE, Verb.MOVE, Verb.LOSS, *OF_WEIGHTS, *BETWEEN} - {Verb.REDUCE}
    trained = ss.compile(planned(case, grad=True)).memory
    for device, memory in made.memory.items():
        assert memory.grads_bytes == memory.optimizer_bytes == 0
        assert memory.total_bytes < trained[device].total_bytes


@pytest.mark.parametrize("case", ["zero3", "hybrid"])
def test_program_without_results_has_no_transfer_of_results(case: str) -> None:
    name, num_devices, options = CASES[case]
    files = []
    for results in ((), ("logits",)):
        graph = ss.capture(words(), batch(4), results=results)
        made = compiled(graph, name, num_devices, **options)
        files.append((made, sum("p2p" in str(e) for e in made.step_program.events)))
    (without, few), (kept, more) = files
    assert more == few + kept.plan.num_microbatches
    assert "results=" not in without.files[0]


class Pair(NamedTuple):
    """An output with fields."""

    loss: Tensor
    double: Tensor


@pytest.mark.parametrize(
    "form, which",
    [
        (lambda x: {"loss": x.sum(), "double": 2 * x}, "double"),
        (lambda x: (x.sum(), 2 * x), 1),
        (lambda x: (x.sum(), 2 * x), -1),
        (lambda x: Pair(x.sum(), 2 * x), "double"),
    ],
)
def test_a_result_is_named_by_key_field_or_position(form: Any, which: str | int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(3, 5)

        def forward(self, x: Tensor) -> Any:
            return form(self.line(x))

    graph = ss.capture(Model(), (torch.ones(4, 3),), results=(which,))
    assert {name: t.shape for name, t in graph.results.items()} == {str(which): (4, 5)}


@pytest.mark.parametrize(
    "results, words_of_error",
    [
        (("scores",), "no tensor 'scores' to keep as a result; it has loss, logits, best, norm"),
        ((3,), "no tensor 3"),
    ],
)
def test_unknown_result_raises_capture_error(
    results: tuple[str | int, ...], words_of_error: str
) -> None:
    with pytest.raises(ss.CaptureError, match=words_of_error):
        ss.capture(words(), batch(4), results=results)


def test_without_grad_keeps_only_the_decisions_of_a_forward() -> None:
    plan = planned("zero3", grad=True)
    alone = plan.without_grad()
    gathered = tuple(unit for unit in plan.decisions.fsdp_units if unit[1])
    assert gathered
    assert alone.decisions == replace(plan.decisions, fsdp_units=gathered)
    assert not any(t.requires_grad for op in alone.graph.ops for t in (*op.inputs, *op.outputs))
