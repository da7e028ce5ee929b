"""Random models with packed linear maps train under plans as on a single device."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import superscaler_core as ss
from superscaler_core.front_end import convert
from tests.superscaler_core.as_torch import check_program, compiled, on_ranks
from tests.superscaler_core.packed import Conv1D, Model, models

WIDTH = 12


class Fused(nn.Module):
    """A linear map with several pieces, whose product is the input of a second map."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        count, size = draw.choice((2, 3, 4)), draw.choice((8, 12))
        is_even = draw.random() < 0.7
        # In some models the last piece is shorter, like keys that have fewer heads than queries.
        self.sizes = [size] * count if is_even else [size] * (count - 1) + [size // 2]
        forms = ["split", "slices", "narrow", "lead"]
        self.form = draw.choice([*forms, *(["chunk", "unbind", "index"] if is_even else [])])
        linear = draw.choice((Conv1D, nn.Linear))
        self.up, self.down = linear(WIDTH, sum(self.sizes)), linear(size, WIDTH)

    def pieces(self, made: Tensor) -> Sequence[Tensor]:
        count, size = len(self.sizes), self.sizes[0]
        starts = [sum(self.sizes[:i]) for i in range(count)]
        if self.form == "split":
            return made.split(self.sizes, dim=-1)
        if self.form == "chunk":
            return made.chunk(count, dim=-1)
        if self.form == "slices":
            return [made[..., a : a + n] for a, n in zip(starts, self.sizes, strict=True)]
        if self.form == "narrow":
            return [made.narrow(-1, a, n) for a, n in zip(starts, self.sizes, strict=True)]
        if self.form == "lead":
            return [x.transpose(1, 2) for x in made.transpose(1, 2).split(self.sizes, dim=1)]
        apart = made.view(*made.shape[:-1], count, size)
        return (
            apart.unbind(-2) if self.form == "unbind" else [apart[..., i, :] for i in range(count)]
        )

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.pieces(self.up(x))
        for other in others:
            num = first.shape[-1] // other.shape[-1]
            first = F.silu(first) * other[..., None].expand(*other.shape, num).flatten(-2)
        return x + self.down(first)


class Stack(nn.Module):
    """Two blocks of ``Fused``."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Fused(random.Random(seed)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def batch() -> Tensor:
    return torch.randn(4, 5, WIDTH, generator=torch.Generator().manual_seed(1)).double()


def model_of(seed: int) -> Stack:
    torch.manual_seed(seed)
    return Stack(seed).double()


PLAN = {"megatron": 2, "zero3": 3, "data_parallel": 2, "hybrid": 4}


@pytest.mark.parametrize("seed, plan_name", [*enumerate(PLAN), (4, "zero3"), (0, "hybrid")])
def test_training_equals_that_on_a_single_device(seed: int, plan_name: str, tmp_path: Path) -> None:
    options = {"tp": 2, "pp": 1, "microbatches": 1, "zero": 1} if plan_name == "hybrid" else {}
    model = model_of(seed)
    program = compiled(ss.capture(model, (batch(),)), plan_name, PLAN[plan_name], **options)
    check_program(program, model, [batch()] * 2, tmp_path)


def gpt() -> Model:
    torch.manual_seed(4)
    return models()["split Conv1D"]().double()


def words() -> tuple[Tensor, Tensor]:
    made = torch.randint(20, (2, 4, 6), generator=torch.Generator().manual_seed(1))
    return made[0], made[1]


@pytest.mark.parametrize("form", ["safetensors", "dcp"])
def test_checkpoint_moves_from_a_single_device_to_a_plan_and_back(
    form: str, tmp_path: Path
) -> None:
    def go(model: nn.Module | ss.Trainer, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        if isinstance(model, nn.Module):
            model(*words()).backward()
        else:
            model.step(*words())
        optimizer.step()

    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3)
    go(model, optimizer)
    ss.save_run(tmp_path / "first", model, optimizer=optimizer)
    go(model, optimizer)
    go(model, optimizer)
    program = compiled(ss.capture(gpt(), words()), "megatron")

    def work(trainer: ss.Trainer) -> None:
        here = torch.optim.AdamW(trainer.parameters(), lr=0.1, eps=1e-3)
        trainer.load(tmp_path / "first", optimizer=here)
        go(trainer, here)
        trainer.save(tmp_path / "second", optimizer=here, format=form)

    on_ranks(program, tmp_path / "program", work)
    again = gpt()
    optimizer = torch.optim.AdamW(again.parameters(), lr=0.1, eps=1e-3)
    ss.load_run(tmp_path / "second", again, optimizer=optimizer)
    go(again, optimizer)
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=1e-9, atol=1e-11)


def test_asynchronous_training_with_packed_maps_equals_that_with_whole_maps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older versions of a parameter have the dims of the program, and their memory is reused."""

    def train(folder: Path) -> dict[str, Tensor]:
        graph = ss.capture(gpt(), words())
        program = compiled(graph, "pipedream", 4, pp=2, tp=2, microbatches=4)

        def work(trainer: ss.Trainer) -> dict[str, Tensor]:
            trainer.update_with(lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9))
            for _ in range(2):
                trainer.step(*(torch.cat([tensor] * 4) for tensor in words()))
            return trainer.state_dict()

        return on_ranks(program, folder, work)[0]

    pieces = train(tmp_path / "pieces")
    monkeypatch.setattr(convert, "find_packings", lambda _: {})
    torch.testing.assert_close(train(tmp_path / "whole"), pieces, rtol=1e-9, atol=1e-12)
