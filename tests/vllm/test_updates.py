"""Engines of vLLM serve what a trainer sends, as if they had been started from its checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.engine import Remote, needs_vllm, serving
from tests.vllm.models import FAMILIES, folder
from tests.vllm.trainers import LACKING, SOURCES, Trainer

pytestmark = needs_vllm

SEEDS = [1, 2, 3]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


CASES = [(family, tp) for family in FAMILIES for tp in (1, 2)]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-tp{case[1]}")
def engine(request: pytest.FixtureRequest, root: Path) -> Iterator[tuple[str, int, Remote]]:
    family, tp = request.param
    with serving(folder(family, 0, root), tp, root) as remote:
        yield family, tp, remote


@pytest.fixture(scope="module")
def started(engine: tuple[str, int, Remote], root: Path) -> list[object]:
    """Tokens and logits of engines that were started from the checkpoints that are sent.

    All of them for Llama; the last one for the others, whose parameters are compared bit by bit.
    """
    family, tp, _ = engine
    found: list[object] = []
    for seed in SEEDS:
        if family == "llama" or seed == SEEDS[-1]:
            with serving(folder(family, seed, root), tp, root) as remote:
                found.append(remote.tokens())
        else:
            found.append(None)
    return found


@pytest.mark.parametrize("source", SOURCES)
def test_an_engine_serves_what_was_sent(
    engine: tuple[str, int, Remote],
    started: list[object],
    source: str,
    root: Path,
    tmp_path: Path,
) -> None:
    family, tp, remote = engine
    trainer = Trainer(source, family, remote, tp, tmp_path / "trainer", SEEDS)
    try:
        for seed, wanted in zip(SEEDS, started, strict=True):
            before = remote.tokens()
            assert [error for _, error in trainer.send()] == [""] * SOURCES[source][0]
            assert remote.version() == f"seed-{seed}"
            assert remote.faults(str(folder(family, seed, root))) == []
            after = remote.tokens()
            assert all(a[0] != b[0] for a, b in zip(before, after, strict=True))
            if wanted is not None:
                assert after == wanted
        assert all(each["whole"] == {} for each in remote.workers())
    finally:
        trainer.close()


def test_an_update_is_loaded_layer_by_layer_without_staging(
    engine: tuple[str, int, Remote], root: Path, tmp_path: Path
) -> None:
    family, tp, remote = engine
    trainer = Trainer("fsdp2", family, remote, tp, tmp_path / "trainer", [4, 5], staging=False)
    try:
        for seed in (4, 5):
            assert [error for _, error in trainer.send()] == ["", ""]
            assert remote.version() == f"seed-{seed}"
            assert remote.faults(str(folder(family, seed, root))) == []
    finally:
        trainer.close()


def test_a_checkpoint_that_lacks_a_part_of_a_parameter_is_refused(
    engine: tuple[str, int, Remote], tmp_path: Path
) -> None:
    family, tp, remote = engine
    before = remote.version(), remote.tokens()
    trainer = Trainer(LACKING, family, remote, tp, tmp_path / "trainer", [6])
    try:
        ((_, error),) = trainer.send()
        assert "model.layers.0.self_attn.qkv_proj.weight (" in error
        assert (remote.version(), remote.tokens()) == before
    finally:
        trainer.close()
