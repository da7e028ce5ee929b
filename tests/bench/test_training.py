"""Laws of the training benchmark: its workloads, bytes and memory, and what it prints."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.machine.method import seen
from bench.training import command, torchs
from bench.training.ours import FORMS
from bench.training.peak import peak_bytes, restart_peak
from bench.training.planned import planned_bytes
from bench.training.workloads import WORKLOADS, Stage
from rvdcomm import Topology
from superscaler_core.compiled import compile
from superscaler_core.front_end import capture
from superscaler_core.models import build, example_inputs
from superscaler_core.plan import Plan
from superscaler_core.plans import PLANS
from tests.dist.on_ranks import on_ranks

# --- workloads ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("name", command.WORKLOADS)
def test_stages_of_a_workload_compute_the_loss_of_its_model(name: str, num_stages: int) -> None:
    if name == "llama":
        pytest.importorskip("transformers")
    workload = WORKLOADS[name](True)
    torch.manual_seed(0)
    model = workload.build()
    inputs, targets = workload.inputs(4, torch.Generator().manual_seed(0))
    made: Any = (inputs,)
    for i in range(num_stages):
        made = Stage(workload, model, i, num_stages)(*made)
        made = made if isinstance(made, tuple) else (made,)
    loss = workload.loss(made if len(made) > 1 else made[0], targets)
    torch.testing.assert_close(loss, model(inputs, targets))


def test_every_parameter_of_a_model_is_in_one_stage() -> None:
    workload = WORKLOADS["moe"](True)
    model = workload.build()
    found = [p for i in range(2) for p in Stage(workload, model, i, 2).parameters()]
    assert sorted(map(id, found)) == sorted(map(id, model.parameters()))


# --- memory and bytes -----------------------------------------------------------------------------


def test_peak_bytes_count_memory_that_was_freed_again() -> None:
    before = restart_peak()
    torch.ones(64 << 18)
    assert 60 << 20 < peak_bytes() - before < 80 << 20
    assert peak_bytes() >= restart_peak()


MODEL = {"layers": 2, "width": 16, "heads": 4, "sequence": 8, "vocabulary": 40}
MICROBATCH, MICROBATCHES = 3, 4


def planned(pp: int, tp: int) -> list[int]:
    inputs = example_inputs("gpt", MICROBATCH, **MODEL)
    plan = Plan(capture(build("gpt", **MODEL), inputs), range(pp * tp))
    PLANS["hybrid"](plan, tp=tp, pp=pp, microbatches=MICROBATCHES)
    # With almost no latency, the plan with the fewest bytes is the best.
    topology = Topology.single_host(pp * tp, alpha_secs=1e-12, bytes_per_sec=1e6)
    return planned_bytes(compile(plan), topology)


HIDDEN_BYTES = 4 * MICROBATCH * MODEL["sequence"] * MODEL["width"]
LOSS_BYTES = 4


def test_tensor_parallel_sends_four_all_reduces_per_layer_and_microbatch() -> None:
    all_reduce = 2 * HIDDEN_BYTES // 2
    expected = MICROBATCHES * MODEL["layers"] * 4 * all_reduce
    assert planned(pp=1, tp=2) == [expected, expected]


def test_pipeline_sends_hidden_state_forward_gradient_back_and_loss_once() -> None:
    expected = MICROBATCHES * HIDDEN_BYTES
    assert planned(pp=2, tp=1) == [expected, expected + LOSS_BYTES]


# --- training -------------------------------------------------------------------------------------


@pytest.mark.dist
def test_competitors_have_equal_losses_and_gloo_sends_the_planned_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "SCRATCH", tmp_path)
    ours, others = ("data_parallel messages", "auto"), ("one", "fsdp2", "pipeline")
    out = tmp_path / "training.json"
    words = ["--tiny", "--workloads=moe", "--ranks=2", "--steps=2", "--budget=1"]
    words += [f"--plans={','.join(ours)}", f"--against={','.join(others)}", f"--out={out}"]
    # The ranks compare the losses of all steps, and fail if they differ.
    assert command.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[:-1])) <= 100
    (row,) = json.loads(out.read_text())["rows"]
    assert re.search(r" ms simulated, [\d.]+ in the race$", row["found"]["auto"])
    assert re.search(r"^data_parallel.* ms in a race of 5$", row["found"][ours[0]])
    assert re.search(r"^Pipelined\(stages=2.* in a race of 6$", row["found"]["pipeline"])
    seen = row["competitors"]
    assert set(seen) == {*ours, *others}
    assert all(len(one["secs"]) == 2 for one in seen.values())
    both = zip(seen[ours[0]]["sent_bytes"], row["planned_bytes"][ours[0]], strict=True)
    for sent, by_plan in both:
        # The surplus is headers: about 50 bytes per message of gloo.
        assert by_plan <= sent <= 1.2 * by_plan + 4096


@pytest.mark.parametrize("name", ["gpt", "wide_resnet"])
def test_our_plans_have_the_options_of_the_ways_of_torch_that_cut_equally(name: str) -> None:
    """Degrees, microbatches and schedules one for one; buckets, and none, of data parallelism."""
    workload = WORKLOADS[name](False)
    pipelines = [*torchs.pipelines(4, workload)]
    forms = [dict(form.options) for form in FORMS["pipelined"](4, workload)]
    assert [x["pp"] for x in forms] == [x.stages for x in pipelines]
    assert [x["microbatches"] for x in forms] == [x.microbatches for x in pipelines]
    assert [x["tp"] > 1 for x in forms] == [x.cuts for x in pipelines]
    assert [x["chunks"] for x in forms] == [x.chunks for x in pipelines]
    cuts = [*torchs.cuts(4, workload)]
    megatrons = FORMS["megatron"](4, workload)
    assert {dict(x.options)["tp"] for x in megatrons} == {x.inner for x in cuts}
    assert bool(cuts) == (name == "gpt")
    buckets = {x.overlap.bucket_bytes for x in FORMS["data_parallel"](4, workload)}
    assert buckets >= {mib << 20 for mib in torchs.BUCKETS_MIB}


def test_every_rank_of_a_pipeline_has_a_row_of_each_microbatch() -> None:
    workload = WORKLOADS["wide_resnet"](False)
    for way in torchs.pipelines(8, workload):
        assert workload.batch % (way.microbatches * (8 // way.stages)) == 0
        assert way.stages <= workload.num_blocks


@pytest.mark.dist
@on_ranks(2, 60.0)
def test_every_way_of_torch_trains_as_one_process(rank: int) -> None:
    ways = [way for name in torchs.WAYS for way in torchs.WAYS[name](2, WORKLOADS["gpt"](False))]
    first, *others = losses_of(ways, is_tiny=False, num_steps=2)
    assert len(ways) > 20
    assert all(losses == pytest.approx(first, rel=1e-5) for losses in others)


def losses_of(ways: Sequence[torchs.Share], *, is_tiny: bool, num_steps: int) -> list[list[float]]:
    """The losses of steps of a GPT by each way; those after the first depend on gradients."""
    workload = WORKLOADS["gpt"](is_tiny)
    torch.manual_seed(0)
    model, generator = workload.build(), torch.Generator().manual_seed(1)
    batch = workload.inputs(workload.batch, generator)
    methods = (way(workload, model) for way in ways)
    return [[seen(method, batch)[0] for _ in range(num_steps)] for method in methods]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--plans", "foo"], "expected some of auto"),
        (["--against", ""], "expected some of one"),
        (["--ranks", "1"], "2 ranks or more"),
        (["--cluster", "2"], "2x2"),
        (["--rates", "foo"], "foo"),
        (["--steps", "0"], "1 or more"),
        (["--budget", "nan"], "above 0"),
    ],
)
def test_wrong_option_is_refused(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main(words)
    assert problem in capsys.readouterr().err


@pytest.mark.dist
@on_ranks(4, 60.0)
def test_tensor_parallel_replicas_train_as_one_process(rank: int) -> None:
    """DDP that is not told of a mesh leaves gradients of DTensors as they are."""
    ways = torchs.One(threads=2), torchs.Cut(inner=2)
    alone, cut = losses_of(ways, is_tiny=True, num_steps=3)
    assert alone == pytest.approx(cut, rel=1e-6)
    assert alone[0] > alone[2]


def test_ratio_is_the_fastest_torch_step_over_our_step() -> None:
    secs = {"auto": [0.1, 0.2, 0.3], "ddp": [0.4, 0.5, 0.3], "fsdp2": [0.9, 0.8, 0.7]}
    seen = {name: {"secs": samples} for name, samples in secs.items()}
    row = {"plans": ["auto"], "against": ["one", "ddp", "fsdp2"], "workload": "gpt", "world": "4",
           "competitors": seen}  # fmt: skip
    assert command.ratio(row, "auto") == 2.0
    assert command.summary([row]).splitlines()[1].split() == ["gpt", "4", "-", "2.00"]


def test_plans_are_compared_with_the_way_of_torch_that_cuts_equally() -> None:
    secs = {"data_parallel": 0.2, "ddp": 0.3, "zero3": 0.4, "fsdp2": 0.2, "pipelined": 0.1}
    row = {"workload": "gpt", "world": "2",
           "competitors": {name: {"secs": [each]} for name, each in secs.items()}}  # fmt: skip
    assert command.same_plan_ratios(row) == pytest.approx({"data_parallel": 1.5, "zero3": 0.5})
    half = {**row, "competitors": {**row["competitors"], "ddp": {"secs": [0.1]}}}
    *_, median = command.same_plans([row, half]).splitlines()
    assert median.split() == ["median", "1.00", "0.50", "-", "-"]
