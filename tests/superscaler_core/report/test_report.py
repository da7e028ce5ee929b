"""Report: reported bytes equal sent bytes, equal layers share a row, and lines are not too long."""

from __future__ import annotations

from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rvdcomm as rv
import superscaler_core as ss
from superscaler_core import models, plans
from superscaler_core.program import Verb
from superscaler_core.report import PricedMove, explain_edge, explain_ops, moves_of
from superscaler_core.report.table import numbers_text, table

WIDTH = 100


@cache
def graph_of(name: str, layers: int = 2) -> ss.Graph:
    with torch.device("meta"):
        model = models.build(name, layers=layers)
    return ss.capture(model, models.example_inputs(name, 4, layers=layers))


def planned(
    name: str, plan_name: str, num_devices: int, layers: int = 2, **options: Any
) -> ss.Plan:
    plan = ss.Plan(graph_of(name, layers), range(num_devices))
    plans.fill(plan, plans.PLANS[plan_name], options)
    return plan


def compiled(*args: Any, **options: Any) -> ss.Compiled:
    return ss.compile(planned(*args, **options))


CASES = [
    ("gpt", "megatron_sp", 4, {}),
    ("gpt", "zero2", 2, {}),
    ("gpt", "zero3", 2, {}),
    ("gpt", "hybrid", 4, {"pp": 2, "microbatches": 2}),
    ("gpt", "chimera", 4, {"pp": 2, "zero": 1}),
    ("moe", "expert_parallel", 2, {}),
]


@pytest.mark.parametrize(
    "name, plan_name, num_devices, options, master",
    [(*case, master) for case, master in zip(CASES, cycle([None, torch.float64]))],
)
def test_reported_bytes_equal_the_bytes_that_ranks_send(
    name: str,
    plan_name: str,
    num_devices: int,
    options: dict[str, Any],
    master: torch.dtype | None,
    tmp_path: Path,
) -> None:
    plan = planned(name, plan_name, num_devices, **options)
    made = ss.compile(plan, precision=ss.Precision(master))
    assert made.report().sent_bytes == moved_bytes(made, name, tmp_path, master)
    texts = [str(made.report()), explain_ops(made.plan)]
    assert max(len(line) for text in texts for line in text.splitlines()) <= WIDTH


def moved_bytes(
    made: ss.Compiled, name: str, folder: Path, master: torch.dtype | None = None
) -> int:
    """Bytes that all ranks send in a step."""
    made.save(folder)
    batch = models.example_inputs(name, 4 * made.plan.num_microbatches)

    def work(trainer: ss.Trainer) -> int:
        trainer.init_weights(lambda name, weight: weight.zero_())
        trainer.step(*batch)
        return trainer._transport.sent_bytes

    return sum(ss.run_threads(folder, work, made.plan.devices, dtype=master).values())


@pytest.mark.parametrize("is_recompute", [False, True])
def test_reported_bytes_equal_sent_bytes_with_a_window_in_two_stages(
    is_recompute: bool, tmp_path: Path
) -> None:
    plan = planned("gpt", "hybrid", 4, pp=2, microbatches=2, zero=1)
    plan.unshard(plan.graph.ops_in("layers.*"))
    if is_recompute:
        plan.recompute_regions(*(stage.ops for stage in plan.stages))
    made = ss.compile(plan)
    # Each of 2 stages gathers for 2 microbatches: in the forward, in the backward, and in a rerun.
    gathers = made.materialized.counts[Verb.UNSHARD, plan.fsdp_units[0]]
    assert gathers == 2 * 2 * (2 + is_recompute)
    assert made.report().sent_bytes == moved_bytes(made, "gpt", tmp_path)


@pytest.mark.parametrize("plan_name", ["megatron", "zero3"])
def test_more_layers_increase_counts_but_not_rows(plan_name: str) -> None:
    few, many = (compiled("gpt", plan_name, 2, layers).report().rows for layers in (2, 5))
    assert len(few) == len(many) <= 20
    grown = [len(b.moves) / len(a.moves) for a, b in zip(few, many, strict=True)]
    assert max(grown) > 2


def test_megatron_reports_two_all_reduces_per_layer_and_direction() -> None:
    large = rv.Topology.single_host(4, alpha_secs=1e-12, bytes_per_sec=1e9)
    report = compiled("gpt", "megatron", 4, layers=3).report(large)
    for way in ("forward", "backward"):
        rows = report.of(way)
        assert [len(row.moves) for row in rows] == [3, 3]
        assert {row.first.primitives for row in rows} == {("all_reduce",)}
        assert all(row.gap == pytest.approx(1, rel=1e-2) for row in rows)
        assert {row.first.layouts for row in rows} == {"R(1)V(4)D(1,1,1) -> R(4)V(1)D(1,1,1)"}


def test_windows_fetch_twice_and_reduce_once_a_microbatch() -> None:
    report = compiled("gpt", "zero3", 2).report()
    assert {row.first.num_times for row in report.of("fetch")} == {2}
    assert {row.first.num_times for row in report.of("reduce")} == {1}


def test_an_edge_between_stages_moves_once_a_microbatch_each_way() -> None:
    report = compiled("gpt", "one_f_one_b", 2, microbatches=3).report()
    (there,), (back,) = report.of("forward"), report.of("backward")
    assert (there.first.stages, back.first.stages) == ((0, 1), (1, 0))
    assert there.first.num_times == back.first.num_times == 3
    assert there.sent_bytes == 3 * 4 * 8 * 16 * 4  # 3 tensors [4, 8, 16] of float32


LINK = rv.Link(1e-6, 1e9)


def test_bytes_are_reported_per_topology_level() -> None:
    made = compiled("gpt", "hybrid", 4, pp=2, tp=2, microbatches=2)
    hosts = rv.Topology.hosts([[0, 1], [2, 3]], LINK, LINK)
    report = made.report(hosts)
    assert set(report.level_bytes) == {"rank", "host"}
    between = [m for m in moves_of(made.materialized, hosts) if m.stages[0] != m.stages[1]]
    # The loss is on the second host, and both hosts need it.
    loss = sum(row.level_bytes[1] for row in report.of("loss"))
    expected = sum(m.num_times * m.level_bytes[1] for m in between) + loss
    assert report.level_bytes["host"] == expected > 0
    assert report.sent_bytes == sum(report.level_bytes.values())


def test_three_levels_count_every_byte_once() -> None:
    made = compiled("gpt", "data_parallel", 4)
    groups = ([(0,), (1,), (2,), (3,)], [(0, 1), (2, 3)], [(0, 1, 2, 3)])
    levels = [rv.Level(n, tuple(g), LINK) for n, g in zip("abc", groups, strict=True)]
    cluster = rv.Topology(tuple(levels))
    hosts = rv.Topology(tuple(levels[:2]))
    by_level = made.report(cluster).level_bytes
    assert by_level == made.report(hosts).level_bytes | {"c": 0}


def test_summary_has_counts_sent_bytes_memory_and_notes() -> None:
    made = compiled("gpt", "megatron", 2)
    made.plan.note("batch statistics are of a shard")
    lines = made.summary().splitlines()
    assert lines[0] == "GPT: 61 ops on 2 devices, 1 stage, 1 microbatch (1f1b)"
    assert [line.split()[0] for line in lines[1:]] == ["sends", "memory", "note"]
    assert str(made.report()).startswith(made.summary())


# --- explain ------------------------------------------------------------------------------------


def test_ops_of_equal_layers_share_a_row_with_their_cut() -> None:
    made = compiled("gpt", "megatron", 2, layers=3)
    rows = {line.split()[1]: line for line in explain_ops(made.plan, width=200).splitlines()}
    assert rows["layers.*.mlp.up:linear"].split()[0] == "3"
    assert "n/2" in rows["layers.*.mlp.up:linear"]
    assert "k/2" in rows["layers.*.mlp.down:linear"]
    assert "2 copies" in rows["norm:layer_norm"]


def test_recomputed_ops_are_marked() -> None:
    made = compiled("gpt", "recompute", 1)
    rows = {line.split()[1]: line for line in explain_ops(made.plan, width=200).splitlines()}
    assert "again" in rows["layers.*.mlp:gelu"]
    assert "again" not in rows["cross_entropy"]


def edge_that_moves(made: ss.Compiled) -> PricedMove:
    return next(m for m in moves_of(made.materialized) if m.way == "backward")


def test_an_edge_is_explained_with_its_ends_and_its_plans() -> None:
    made = compiled("gpt", "megatron", 2)
    move = edge_that_moves(made)
    text = explain_edge(made.materialized, move.name)
    assert text.startswith(f"{move.name}: {move.tensor}")
    assert "forward: nothing moves" in text
    assert str(move.plans[0]) in text


class Twice(nn.Module):
    """A product whose result two ops read."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(6, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.line(x)
        return (y.relu() + y.tanh()).sum()


def test_explanation_of_a_derived_edge_names_its_parent() -> None:
    plan = ss.Plan(ss.capture(Twice(), (torch.ones(4, 6),)), range(2))
    for op in plan.graph.ops:
        how = {"linear": ss.split("k", 2), "tanh": ss.split("b", 2)}.get(op.kind, ss.replicate(2))
        plan.op_assign(plan.op_trans(op, how), [0, 1])
    made = ss.compile(plan).materialized
    (child,) = (edge for edge in made.edges.all if edge.parent is not None)
    assert child.parent is not None
    assert f"line:linear by edge {child.parent.name} in stage 0" in explain_edge(made, child.name)
    assert ", in 2 summands" in explain_edge(made, child.parent.name)


def test_a_use_of_a_weight_is_explained_with_its_storage() -> None:
    made = compiled("gpt", "zero1", 2)
    text = explain_edge(made.materialized, "embed.weight")
    assert "stored" in text
    assert "fetch:" in text
    assert "reduce:" in text


def test_unknown_edge_is_rejected() -> None:
    made = compiled("gpt", "one_f_one_b", 2)
    (edge,) = made.materialized.edges.all
    words = rf"no edge 'e7'; edges of activations are {edge.name}; .* near are .*{edge.name}"
    with pytest.raises(ss.PlanError, match=words):
        explain_edge(made.materialized, "e7")


# --- text ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [30, 100])
def test_table_fits_its_width_and_keeps_all_words(width: int) -> None:
    rows = [["e0", "layers.0.attn, norm and more", "12 KiB"], ["e1", "a" * 8, "3 MiB"]]
    text = table(["edge", "tensors", "bytes"], rows, width)
    assert max(map(len, text.splitlines())) <= width
    assert all(word in text.split() for word in ("norm", "more", "12", "MiB", "a" * 8))


@pytest.mark.parametrize(
    "numbers, text", [([], ""), ([3], "3"), ([4, 3], "3,4"), ([1, 2, 3, 5, 7, 8], "1-3,5,7,8")]
)
def test_consecutive_numbers_are_written_as_ranges(numbers: list[int], text: str) -> None:
    assert numbers_text(numbers) == text
