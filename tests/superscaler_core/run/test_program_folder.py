"""A program's folder has the program before or the new one, wherever a save stops."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import superscaler_core as ss
from superscaler_core.run.program_folder import MARK, ProgramFolder, saving
from tests.injected import DONE, KILLED, in_child
from tests.superscaler_core.run.test_run import batch_split, inputs
from tests.superscaler_core.small import on_one

Files = dict[str, str]
OLD: Files = {f"rank_{rank}.py": f"old {rank}" for rank in range(3)} | {"weights/a": "old"}
NEW: Files = {f"rank_{rank}.py": f"new {rank}" for rank in range(2)} | {
    "weights/a": "new",
    "weights/b": "new",
    "modules.pt": "new",
}


def save(folder: Path, files: Files) -> None:
    with saving(folder) as new:
        for name, text in files.items():
            (new / name).parent.mkdir(exist_ok=True)
            (new / name).write_text(text)


def read(folder: Path) -> Files:
    program = ProgramFolder.open(folder)
    return {name: program.read(name).decode() for name in program.files}


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here ends the machine, and syncs take most of the time on a busy disk."""
    monkeypatch.setattr("os.fsync", lambda _: None)


@pytest.mark.parametrize("kill", [True, False])
def test_folder_has_one_program_wherever_a_save_stops(tmp_path: Path, kill: bool) -> None:
    seen = []
    save(tmp_path / "old", OLD)
    for number in count():
        folder = shutil.copytree(tmp_path / "old", tmp_path / f"program {number}")
        code = in_child(lambda folder=folder: save(folder, NEW), folder, number, kill=kill)
        seen.append(read(folder))
        assert seen[-1] in (OLD, NEW), f"call {number}"
        save(folder, NEW)
        assert {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} == {
            *NEW, MARK,
        }, "the next save leaves nothing of the one that stopped"  # fmt: skip
        assert read(folder) == NEW
        if code == DONE:
            break
        assert (code == KILLED) == kill
    assert (seen[0], seen[-1]) == (OLD, NEW)


class Scaled(nn.Module):
    """A model with a weight, a buffer and a constant of a scale."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((6, 5), scale))
        self.register_buffer("shift", torch.full((5,), scale))
        self.constant = torch.full((5,), scale, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight * self.constant + self.shift).sum()


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ss.Compiled, list[float]]:
    """A folder with a program and its weights, another program, and the losses of both."""
    folder, made = tmp_path_factory.mktemp("programs") / "old", []
    for scale in (1.0, 2.0):
        graph = ss.capture(Scaled(scale).double(), (inputs(4),))
        made.append(ss.compile(batch_split(graph) if scale > 1 else on_one(ss.Plan(graph, [0]))))
    losses = [loss(compiled.save(folder)) for compiled in reversed(made)]
    return folder, made[1], losses


def loss(folder: Path) -> float:
    ranks = ProgramFolder.open(folder).ranks
    found = ss.run_threads(folder, lambda t: t.step(inputs(4)).item(), range(len(ranks)))
    return found[0]


@pytest.mark.parametrize("number", [0, 3, 20, 33, 36, 40])
def test_killed_save_never_mixes_programs_and_weights(
    programs: tuple[Path, ss.Compiled, list[float]], number: int, tmp_path: Path
) -> None:
    folder, new, losses = programs
    shutil.copytree(folder, tmp_path / "program")
    code = in_child(lambda: new.save(tmp_path / "program"), tmp_path, number, kill=True)
    assert code == KILLED
    assert loss(tmp_path / "program") in losses


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def other(path: Path) -> None:
    path.write_bytes(bytes([*path.read_bytes()[:-1], 7]))


@pytest.mark.parametrize(
    "name, damage",
    [
        ("rank_0.py", Path.unlink),
        ("rank_0.py", other),
        ("constants.npz", cut),
        ("weights/rvdcomm-manifest.json", Path.unlink),
        ("weights/rvdcomm-manifest.json", other),
        (MARK, cut),
        (MARK, other),
    ],
)
def test_incomplete_or_mixed_folder_raises_plan_error(
    programs: tuple[Path, ss.Compiled, list[float]],
    name: str,
    damage: Callable[[Path], None],
    tmp_path: Path,
) -> None:
    shutil.copytree(programs[0], tmp_path / "program")
    damage(tmp_path / "program" / name)
    with pytest.raises(ss.PlanError, match=r"(rank_0|constants|manifest|program).*save the"):
        loss(tmp_path / "program")


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", '{"version": 2}', '{"version": 2, "files": []}',
        '{"version": 2, "files": {"../a": [1, ""]}}', '{"version": 2, "files": {"/a": [1, ""]}}',
        '{"version": 2, "files": {"a": [1]}}', '{"version": 1, "files": {}}', "[" * 100_000, "\xff",
    ],
)  # fmt: skip
def test_mark_of_another_form_raises_plan_error(text: str, tmp_path: Path) -> None:
    (tmp_path / MARK).write_bytes(text.encode("latin-1"))
    with pytest.raises(ss.PlanError, match=r"program\.json is damaged"):
        ProgramFolder.open(tmp_path)


def test_files_that_the_mark_does_not_name_are_not_read(
    programs: tuple[Path, ss.Compiled, list[float]], tmp_path: Path
) -> None:
    shutil.copytree(programs[0], tmp_path / "program")
    (tmp_path / "program" / "modules.pt").write_text("no pickle")
    (tmp_path / "program" / "rank_7.py").write_text("raise RuntimeError")
    assert loss(tmp_path / "program") == programs[2][1]
