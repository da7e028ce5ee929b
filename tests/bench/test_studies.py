"""Laws of the studies' systems and cells, on a small model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.cells.cell import PULLS, Cell
from bench.cells.cluster import EAGER, GPUS, PAPER
from bench.cells.workload import FOLDER, Workload, _captured, captured, keep_graphs
from bench.search.catalogue import cells
from bench.studies import sensitivity, transfers
from bench.studies.__main__ import main
from bench.studies.study import ALPA, COLUMNS, STUDIES, THEN, TODAY, Study, budget_of
from bench.studies.systems import (
    COSHARD_GPT,
    DEEPSPEED,
    DEEPSPEED_MOE,
    DEEPSPEED_THEN,
    FSDP,
    MEGATRON,
    MEGATRON_THEN,
    System,
)
from superscaler_core.evaluation import Candidate, Trial
from superscaler_core.plan import Keep
from superscaler_core.planners.auto import Setting

TINY = Workload(
    "gpt",
    {"layers": 2, "width": 64, "heads": 4, "sequence": 32, "vocabulary": 64, "fused": False},
    "float16",
    8,
)


def cell(num_gpus: int, **changes: Any) -> Cell:
    return Cell("tiny", replace(TINY, **changes), num_gpus, {"Megatron": MEGATRON})


def proposed(system: System, num_gpus: int, *, fits: bool = True, **changes: Any) -> list[Setting]:
    """All settings that a system proposes if every candidate fits, or if none fits."""
    found: list[Setting] = []
    for candidate in system(cell(num_gpus, **changes).request()):
        found.append(Setting.parse(candidate.name))
        candidate.follow(trial(candidate, len(found), fits=fits))
    return found


def trial(candidate: Candidate, number: int, *, fits: bool) -> Trial:
    return Trial(candidate, float(number), number, "" if fits else "needs more")


# --- systems ------------------------------------------------------------------------------------


@pytest.mark.parametrize("study", STUDIES.values(), ids=list(STUDIES))
def test_a_study_has_models_and_systems_for_every_number_of_gpus(study: Study) -> None:
    assert tuple(study.workloads) == GPUS
    for _, _, each in study.cells("x"):
        # The batch can be divided among any number of replicas.
        assert each.workload.batch % max(GPUS) == 0
        for system in (study.plan, *study.then, *study.today):
            layouts = list(system.layouts(each.num_gpus))
            assert layouts
            assert all(x.dp * x.tp * x.pp == each.num_gpus for x in layouts)


def test_each_column_runs_all_systems_that_it_compares() -> None:
    for study in STUDIES.values():
        assert set(study.ours) == set(study.baselines) == set(COLUMNS)
        for column, _, each in study.cells("x"):
            asked = {*each.first, *each.systems}
            assert {study.ours[column], *study.baselines[column]} <= asked


@pytest.mark.parametrize("name", [name for name in STUDIES if name != "alphafold2"])
def test_a_baseline_may_use_every_grid_that_the_paper_s_plan_uses(name: str) -> None:
    """Degrees of data, tensor and pipeline parallelism; pipelines of 3F1B are the plan itself."""
    study = STUDIES[name]
    for column, _, each in study.cells(name):
        systems = study.then if column == THEN else study.today
        num = each.num_gpus
        theirs = {(x.dp, x.tp, x.pp) for system in systems for x in system.layouts(num)}
        ours = {(x.dp, x.tp, x.pp) for x in study.plan.layouts(num)}
        assert ours
        assert ours <= theirs


def test_both_columns_have_equal_hosts_but_for_how_kernels_are_launched() -> None:
    for column, _, each in STUDIES["swin"].cells("x"):
        assert each.cluster == (PAPER if column == TODAY else EAGER)
        assert each.clusters == ({} if column == TODAY else {ALPA: PAPER})
        assert each.overlaps == (column == TODAY)
    assert replace(EAGER, profile=PAPER.profile) == PAPER
    assert EAGER.profile.issue_secs > 0 == PAPER.profile.issue_secs


def test_a_planner_may_have_hosts_of_its_own() -> None:
    eager = replace(cell(2), cluster=EAGER, clusters={ALPA: PAPER})
    assert eager.request("Megatron").profile == EAGER.profile
    assert eager.request(ALPA).profile == PAPER.profile


def test_systems_of_then_use_only_features_of_then() -> None:
    for setting in proposed(MEGATRON_THEN, 4):
        assert setting.zero == (1 if setting.dp > 1 else 0)
        assert setting.keep is not Keep.SEGMENT_INPUTS
        assert {setting.prefetch, setting.reductions, setting.moves} == {False}
    found = proposed(DEEPSPEED_THEN, 4)
    assert all(x.pp == 1 and not x.moves for x in found)
    assert all(x.zero == 3 or x.offload for x in found)
    assert {(x.zero, x.offload) for x in found if x.dp > 1} >= {(3, False), (3, True), (1, True)}
    assert any(x.prefetch and x.reductions for x in found)
    for setting in proposed(COSHARD_GPT, 4):
        assert (setting.zero, setting.prefetch, setting.reductions) == (0, 0, False)


def test_sharded_weights_of_today_may_be_in_stages() -> None:
    found = proposed(FSDP, 8)
    assert {(x.tp, x.pp) for x in found if x.zero == 3} >= {(1, 1), (2, 2), (1, 2)}


def test_baselines_of_today_try_each_schedule_with_its_own_chunks() -> None:
    in_stages = replace(MEGATRON, layouts=lambda num: [Setting(pp=num)])
    found = proposed(in_stages, 2, sizes={**TINY.sizes, "layers": 8})
    tried = {(x.schedule, x.chunks) for x in found}
    assert tried >= {("interleaved", 1), ("interleaved", 2), ("zero-bubble", 1), ("dualpipe-v", 1)}
    assert all(chunks == 1 for schedule, chunks in tried if schedule != "interleaved")


def test_experts_of_a_baseline_are_dealt_out_to_replicas() -> None:
    sizes = {"layers": 2, "width": 64, "heads": 4, "sequence": 32, "vocabulary": 64, "experts": 4}
    moe = replace(cell(4), workload=Workload("moe", sizes, "float16", 8))
    found = [Setting.parse(each.name) for each in DEEPSPEED_MOE(moe.request())]
    assert {x.experts for x in found if x.dp > 1} == {True}
    assert any(x.dp > 1 for x in found)


def test_systems_of_today_use_features_where_they_apply() -> None:
    found = proposed(MEGATRON, 4)
    assert {x.offload for x in found if x.zero == 1} == {False, True}
    assert {x.chunks for x in found if x.pp == 1} == {1}
    assert {x.zero for x in found if x.dp > 1} == {1}
    assert all(x.sequence and x.vocabulary for x in found if x.tp > 1)
    assert any(x.reductions and x.moves for x in found)
    assert any(x.prefetch for x in proposed(DEEPSPEED, 4))


def test_microbatches_grow_only_if_smaller_ones_fit() -> None:
    alone = System("mine", lambda num: [Setting()])
    assert {x.samples for x in proposed(alone, 1)} == {1, 2, 4, 8}
    assert {x.samples for x in proposed(alone, 1, fits=False)} == {1}


def test_image_model_has_no_vocabulary_or_sequence_split() -> None:
    sizes = {"image": 16, "window": 4, "width": 16, "heads": 2, "depths": (1, 1)}
    images = replace(cell(2), workload=Workload("swin", sizes, "float16", 8))
    found = [Setting.parse(each.name) for each in MEGATRON(images.request())]
    assert any(x.tp > 1 for x in found)
    assert not any(x.vocabulary or x.sequence for x in found)


def test_system_without_enough_memory_tries_all_memory_savings() -> None:
    found = proposed(replace(MEGATRON, layouts=lambda num: [Setting(tp=2)]), 2, fits=False)
    assert [x.keep for x in found if x.samples == 1] == [
        Keep.EVERYTHING,
        Keep.ATTENTION_ONLY,
        Keep.SEGMENT_INPUTS,
        Keep.BLOCK_INPUTS,
    ]


# --- cells --------------------------------------------------------------------------------------


def test_row_breaks_down_the_time_and_memory_of_a_step() -> None:
    row = replace(cell(2), pulled=("Megatron",)).row("Megatron", 60.0)
    assert row["samples_per_sec"] == pytest.approx(TINY.batch / row["secs"])
    assert row["samples"] * row["microbatches"] == TINY.batch
    assert sum(row["shares"].values()) == pytest.approx(1.0)
    assert sum(row["memory"].values()) == row["peak_bytes"] <= PAPER.limit_bytes
    assert set(row["pulled_secs"]) == set(PULLS)
    assert "pulled_secs" not in cell(2).row("Megatron", 60.0)
    assert Setting.parse(row["plan"]).dp <= 2


def test_cell_keeps_its_optimizer_and_communication_and_uses_its_cluster() -> None:
    (flat, *_) = (c for c in cells().values() if c.name == "alphafold2-16-L48_cm1536_cz512-then")
    assert (flat.communication, flat.workload.recycle) == ("ring", 2)
    assert (flat.workload.optimizer, flat.workload.master_dtype) == ("momentum", None)
    slow = replace(PAPER, profile=replace(PAPER.profile, launch_secs=1.0))
    plain, slower = (replace(cell(2), cluster=x).row("Megatron", 60.0) for x in (PAPER, slow))
    assert slower["secs"] > 100 * plain["secs"]


def test_stored_graph_is_read_instead_of_captured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Set here so that ``monkeypatch`` restores the former value after the test.
    monkeypatch.setenv(FOLDER, "")
    keep_graphs(tmp_path / "graphs")
    made = captured(replace(TINY, dtype="float32"), 3)
    (kept,) = (tmp_path / "graphs").iterdir()
    assert kept.suffix == ".pickle"
    # This process caches the graphs that it captured, and does not look in the folder for them.
    assert captured(replace(TINY, dtype="float32"), 3) is made
    forgotten: Any = _captured
    forgotten.cache_clear()
    monkeypatch.delattr("bench.cells.workload._capture")
    again = captured(replace(TINY, dtype="float32"), 3)
    assert again is not made
    assert [op.name for op in again.ops] == [op.name for op in made.ops]
    assert [str(op.annotation) for op in again.ops] == [str(op.annotation) for op in made.ops]
    assert [t.shape for t in again.inputs] == [t.shape for t in made.inputs]


# --- reports ------------------------------------------------------------------------------------


def test_rvd_is_never_slower_than_point_to_point_for_64_mib() -> None:
    """With replicas at both ends, RVD is more than 4 times as fast as point-to-point.

    Point-to-point sends every replica over the slow link. RVD sends one of them.
    """
    found = {(c["category"], c["relation"], c["size"]): c["secs"] for c in transfers.cases()}
    assert len({key[:2] for key in found if key[1] != "in group"}) == 18
    assert all(
        secs["rvd"] <= 1.01 * secs["p2p"] for (*_, size), secs in found.items() if size == "64 MiB"
    )
    large = found["R->R", "n->2n", "64 MiB"]
    assert large["p2p"] > 4 * large["rvd"]


def test_command_rejects_an_unsupported_number_of_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["swin", "--gpus", "5"])
    assert "(4, 8, 16, 32) GPUs" in capsys.readouterr().err


# --- sensitivity --------------------------------------------------------------------------------


def test_every_change_changes_the_assumption_in_its_name() -> None:
    usual = PAPER
    slow, fast, roomy, tight, narrow, wide = (
        change.of(usual) for name, change in sensitivity.CHANGES.items() if name != "as assumed"
    )
    flops = 2 * 4096**3
    secs = [x.profile.flops_secs(flops, "float32", "linear") for x in (slow, usual, fast)]
    assert secs == sorted(secs, reverse=True)
    assert secs[0] == pytest.approx(1.25 * secs[1])
    assert roomy.limit_bytes - usual.limit_bytes == 1 << 30
    assert usual.limit_bytes - tight.limit_bytes == 2 << 30
    rates = [x.between.bytes_per_sec / usual.between.bytes_per_sec for x in (narrow, wide)]
    assert rates == pytest.approx([0.5, 1.1])


def test_models_are_compared_under_each_change() -> None:
    head = {"cell": "swin-16-L50_C1024@NIC x 0.5", "shares": {"compute": 0.8}}
    found = sensitivity.compared(
        [
            {**head, "planner": "auto", "samples_per_sec": 3.0},
            {**head, "planner": "Megatron", "samples_per_sec": 2.0},
            {**head, "planner": "ZeRO-3", "problem": "does not fit"},
        ]
    )
    assert found["swin L50 C1024"]["NIC x 0.5"].factor == 1.5
    assert found["swin L50 C1024"]["as assumed"].factor is None
    table = {line[0]: line[1:] for line in sensitivity.lines(found)}
    assert table["swin L50 C1024"].count("-") == len(sensitivity.CHANGES) - 1


@pytest.mark.parametrize("per_host", [1, 2], ids=["two hosts", "one host"])
def test_slower_nic_slows_down_only_cells_on_several_hosts(
    per_host: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = replace(cell(2), cluster=replace(PAPER, per_host=per_host))
    monkeypatch.setattr("bench.studies.sensitivity.cells", lambda: {"tiny": known})
    usual, less = (
        sensitivity.compute(f"tiny@{name}", "Megatron", 60.0)
        for name in ("as assumed", "NIC x 0.5")
    )
    assert (usual["secs"] < less["secs"]) if per_host == 1 else (usual["secs"] == less["secs"])
    assert (usual["cell"], less["cell"]) == ("tiny@as assumed", "tiny@NIC x 0.5")


def test_search_on_fewer_gpus_has_less_time() -> None:
    budgets = [budget_of(cell(num), 32.0) for num in (4, 32)]
    assert budgets == [pytest.approx(16.0), pytest.approx(32.0)]


def test_planner_of_the_table_gets_overlap_only_in_cells_that_overlap() -> None:
    names = [
        replace(cell(2), overlaps=overlaps).row("alpa_hierarchical", 20.0)["tried"]
        for overlaps in (False, True)
    ]
    assert names[0] < names[1]


def test_plan_is_checked_on_a_captured_graph_only_if_the_cell_says_so() -> None:
    own = cell(2, batch=32)  # no other test has captured the graph of 32 samples
    asked, unchecked = (replace(own, has_check=has).request() for has in (True, False))
    assert asked.check_secs(32) > 0 == unchecked.check_secs(32)
    assert unchecked.as_captured is unchecked
    assert asked.graph_of is unchecked.graph_of
