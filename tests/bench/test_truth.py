"""Truth: rows, errors, fits, and the model whose steps were measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it

import superscaler_core as ss
from bench.truth import command, scaling
from bench.truth.errors import largest_data_parallel, summary
from bench.truth.fit import collective
from bench.truth.megatron import MegatronConfig, MegatronGPT, less_maximum
from bench.truth.reading import COLLECTIVES, READINGS, Constants, Programs, topology_of
from bench.truth.rows import VARIABLE, Row, all_reduces, folder, groups, rows
from superscaler_core.cost import PROFILES
from superscaler_core.plan import Keep
from superscaler_core.plans.hybrid import hybrid
from superscaler_core.run.evaluate import evaluate

TINY = MegatronConfig(layers=4, width=16, heads=4, sequence=8, vocabulary=32, dropout=0.0)

HEAD = (
    "# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,"
    "tensor parallelism,data parallelism,pipeline parallelism,iteration time (ms)"
)


def a_row(**changes: float) -> Row:
    return Row(4, 16, 2, 16, 4, 4, 8, 2, 1, 2, 0.5)._replace(**changes)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "vtrain"
    home.mkdir()
    (home / "single_node.csv").write_text(f"{HEAD}\n4,16,2,16,4,4,8,2,1,2,500\n")
    (home / "multi_node.csv").write_text(f"params,{HEAD}\n3.6,16,16,2,16,4,4,8,2,4,2,250\n")
    for num, known in COLLECTIVES.items():
        lines = ["size(B),count,type,time(ns)"]
        for size in (1 << 20, 1 << 24, 1 << 28):
            secs = known.latency_secs + 2 * (num - 1) / num * size / known.bytes_per_sec
            lines.append(f"{size},{size // 4},float,{1e9 * secs}")
        (home / f"AR_GPU{num}_LUT").write_text("\n".join(lines) + "\n")
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return tmp_path


# --- rows and errors ----------------------------------------------------------------------------


def test_rows_are_those_of_the_files(data: Path) -> None:
    assert folder() == data
    assert rows(data, "single_node") == [a_row()]
    assert rows(data, "multi_node") == [a_row(gpus=16, dp=4, secs=0.25)]
    assert a_row().microbatches == 8


def test_command_without_the_data_says_where_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert command.main([]) == 2
    assert "vTrain" in capsys.readouterr().out


def test_command_predicts_all_rows(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    assert command.main(["--readings", "--out", str(out)]) == 0
    table = capsys.readouterr().out
    assert all(name in table for name in READINGS)
    assert '"predicted_secs"' in out.read_text()


def test_errors_are_relative_and_choices_are_measured() -> None:
    fast, slow = a_row(secs=1.0), a_row(secs=2.0, dp=2, tp=1)
    alone = a_row(secs=4.0, batch=8)
    found = summary([fast, slow, alone], [1.5, 1.0, 4.0])
    assert found["mean_absolute_error"] == pytest.approx((0.5 + 0.5 + 0) / 3)
    assert found["bias"] == pytest.approx(0)
    assert found["groups"] == 1
    # The prediction and the rule both choose the slow row.
    assert found["chosen_over_fastest"] == found["rule_over_fastest"] == 2.0
    assert largest_data_parallel([fast, slow]) == slow
    assert len(groups([fast, slow, alone])) == 2


@pytest.mark.parametrize("num", COLLECTIVES)
def test_fit_of_a_collective_finds_its_constants(data: Path, num: int) -> None:
    found, error = collective(num, all_reduces(data, num))
    assert found[:2] == pytest.approx(COLLECTIVES[num][:2])
    assert error < 1e-9


# --- the model and its program ------------------------------------------------------------------


def test_model_computes_a_gpt() -> None:
    torch.manual_seed(0)
    model, tokens = MegatronGPT(TINY), torch.randint(32, (2, 8))
    x = model.embed(tokens) + model.position(torch.arange(8))
    for layer in model.layers:
        attn = layer.attn
        y = F.linear(layer.norm1(x), attn.weight.flatten(0, 2), attn.bias.flatten())
        q, k, v = y.view(2, 8, 4, 3, 4).permute(3, 0, 2, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.linear(y, attn.out.weight, layer.attn_bias)
        y = F.gelu(F.linear(layer.norm2(x), layer.up.weight, layer.up_bias), approximate="tanh")
        x = x + F.linear(y, layer.down.weight, layer.down_bias)
    loss = F.cross_entropy(F.linear(model.norm(x), model.head.weight).transpose(1, 2), tokens)
    assert model(tokens, tokens).item() == pytest.approx(loss.item(), rel=1e-5)


def test_maximum_has_no_gradient() -> None:
    scores = torch.randn(2, 3, requires_grad=True)
    less_maximum(scores).sum().backward()
    assert scores.grad is not None
    assert scores.grad.eq(1).all()


def test_program_of_a_row_computes_the_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, tokens = MegatronGPT(TINY), torch.randint(32, (4, 8))
    graph = ss.capture(model, (tokens, tokens))
    plan = ss.Plan(graph, devices=range(4))
    hybrid(plan, tp=2, pp=2, microbatches=1, vocabulary=True, keep=Keep.BLOCK_INPUTS)
    ss.compile(plan)
    loss = evaluate(graph, (tokens, tokens), dict(model.named_parameters()))
    assert loss.item() == pytest.approx(model(tokens, tokens).item(), rel=1e-5)


@pytest.mark.parametrize("name", READINGS)
def test_reading_decides_what_is_recomputed(name: str) -> None:
    row, reading = a_row(), READINGS[name]
    compiled = Programs(reading, [row]).compiled(row)
    regions = compiled.plan.decisions.recompute_regions
    layers = {"all": 4, "all but last": 2, "none": 0}[reading.recompute]
    assert len(regions) == layers


def test_host_of_the_measured_runs_is_late() -> None:
    profile = Constants().profile()
    assert profile.issue_secs > 0
    assert profile.host_waits
    assert profile.call_secs(8) > profile.call_secs(4) == profile.issue_secs


def test_preset_has_the_fitted_constants() -> None:
    fitted, preset = Constants().profile(), PROFILES["a100-eager"]
    assert preset.issue_secs == fitted.issue_secs
    assert preset.action_secs == fitted.action_secs
    assert preset.memory.at(1e9) == fitted.memory.at(1e9)


def test_cluster_has_hosts_of_eight() -> None:
    assert [len(level.groups) for level in topology_of(8).levels] == [8]
    assert [len(level.groups) for level in topology_of(64).levels] == [64, 8]


def test_published_throughput_counts_the_operations_of_a_step_with_recomputation() -> None:
    """Products of a layer: 24 h^2 + 4 s h per token, four times with backward and recomputation.

    The head is computed three times; the paper counts 6 h V per token for it.
    """
    row = scaling.NARAYANAN["1.7B"]
    h, per_token = row.width, 24 * row.width**2 + 4 * scaling.SEQUENCE * row.width
    layers = 4 * row.layers * per_token
    tokens = row.batch * scaling.SEQUENCE
    assert row.step_flops == pytest.approx(tokens * (layers + 6 * h * scaling.VOCABULARY))
    assert row.tflops_of(row.step_flops / row.gpus / 1e14) == pytest.approx(100)


@pytest.mark.parametrize(("micro", "chunks"), [(3, 1), (512, 1), (1, 2)])
def test_batch_that_cannot_be_cut_has_no_step(micro: int, chunks: int) -> None:
    row = scaling.Scaled(2, 64, 2, 1, 3, 12, 32, 0.0)
    assert scaling._secs(row, micro, chunks, Constants()) is None


def test_larger_batch_of_a_published_row_takes_longer() -> None:
    """Of ``n`` microbatches over 2 stages, ``n + 1`` turns."""
    rows = (scaling.Scaled(4, 512, 8, 1, 2, 2, batch, 0.0) for batch in (4, 8))
    less, more = (scaling._secs(row, 1, 2, Constants()) or 0.0 for row in rows)
    assert 0 < less < more < 2 * less
