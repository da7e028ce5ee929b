"""The command line: its output, its exit statuses and its errors for invalid requests."""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from textwrap import dedent

import pytest
import torch

import rvdcomm as rv
import superscaler_core as ss
from superscaler_core.cli.main import COMMAND_LINE, main
from superscaler_core.cli.profile import DTYPES
from superscaler_core.cli.training import TrainingResult
from superscaler_core.models import MODELS
from superscaler_core.planners import PLANNERS
from superscaler_core.plans import PLANS
from superscaler_core.schedules import SCHEDULES, one_f_one_b, recompute_apart, split_backward
from tests.superscaler_core.cli.conftest import Say

MINE = """
import torch
from torch import nn

class Line(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.line = nn.Linear(width, 4, bias=False)

    def forward(self, x):
        return self.line(x).square().mean()

def model(batch, *, width=8, tied=False):
    return Line(width), (torch.ones(batch, width),)

def fixed():
    return Line(8), (torch.ones(4, 8),)

def no_model():
    return 3

def broken():
    raise RuntimeError("a line\\nand another")

def split(plan, *, tied=True):
    for op in plan.graph.ops:
        plan.op_assign(op, 0)

def nothing(plan):
    pass

def twice(plan):
    import superscaler_core as ss
    plan.op_trans(plan.graph.ops[0], ss.pieces({"b": (0, 3)}, {"b": (2, 4)}))
    split(plan)
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    """A file of a user. Its name is unique, because modules stay imported."""
    path = tmp_path / f"mine_{abs(hash(str(tmp_path)))}.py"
    path.write_text(MINE)
    return str(path)


# --- help ---------------------------------------------------------------------------------------


def help_of(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit, match="0"):
        main([*words, "--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "words, columns",
    [*zip([[], *([name] for name in COMMAND_LINE.commands)], cycle([60, 120, 80]))],
)
def test_help_names_all_models_and_plans_and_shows_an_example(
    words: list[str],
    columns: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = help_of(words, capsys)
    said = text.replace("\n", " ")
    special = {"schedule": SCHEDULES, "search": (*MODELS, *PLANNERS), "profile": DTYPES}
    named = special.get("".join(words), (*MODELS, *PLANS))
    assert all(name in said for name in named)
    assert "example" in text
    assert "superscaler " in text.partition("example")[2]
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("name", COMMAND_LINE.commands)
def test_examples_in_the_help_are_valid_command_lines(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = COMMAND_LINE.commands[name].epilog.replace("\\\n", " ").splitlines()
    examples = [line.partition(f" {name} ")[2] for line in lines if f" {name} " in line]
    named = (*MODELS, *SCHEDULES, "mine.py:model")
    examples = [text for text in examples if text.split()[0] in named or ".json" in text]
    assert len(examples) >= 2
    for text in examples:
        assert COMMAND_LINE.parser().parse_args([name, *shlex.split(text)]).command == name


# --- commands -----------------------------------------------------------------------------------


def test_version_option_prints_the_package_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"superscaler {rv.__version__}\n"


def test_ctrl_c_ends_a_command_without_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(parser: object, words: Sequence[str], given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rvdcomm.cli.command.Parser.parse_args", interrupted)
    assert main(["plan", "gpt", "megatron"]) == 130
    assert capsys.readouterr() == ("", "superscaler: interrupted\n")


def test_plan_prints_a_report_and_writes_one_file_per_rank(tmp_path: Path, say: Say) -> None:
    folder = tmp_path / "program"
    said = say(["plan", "mlp", "zero1", "--devices", "2", "--out", str(folder)])
    assert said.status == 0
    assert said.out.startswith("MLPModel: 9 ops on 2 devices")
    assert "gradients of weights, to where they are stored" in said.out
    assert f"wrote 2 files rank_*.py to {folder}" in said.out
    assert sorted(path.name for path in folder.glob("*.py")) == ["rank_0.py", "rank_1.py"]


def test_settings_reach_the_model_and_the_plan(say: Say) -> None:
    words = ["plan", "mlp", "accumulate", "--summary", "--dtype", "bfloat16"]
    said = say([*words, "--set", "layers=2", "--set", "plan.microbatches=3"])
    assert said.out.startswith("MLPModel: 6 ops on 1 device, 1 stage, 3 microbatches (1f1b)")


def test_list_settings_are_separated_by_commas(say: Say) -> None:
    words = ["plan", "swin", "gpipe", "--devices", "3", "--summary", "--set"]
    assert "3 stages" in say([*words, "depths=2,2"]).out


def test_topology_option_adds_bytes_between_hosts_to_the_report(tmp_path: Path, say: Say) -> None:
    link = rv.Link(1e-6, 1e9)
    path = tmp_path / "cluster.json"
    rv.Topology.hosts([[0], [1]], link, link).save(path)
    words = ["plan", "mlp", "data_parallel", "--devices", "2", "--summary"]
    said = say([*words, "--topology", str(path)])
    assert "sends     0 B between ranks, " in said.out
    assert "between hosts a step" in said.out


@pytest.mark.parametrize(
    ("words", "num"),
    [((), 1), (("--topology", "v100:1x3"), 3), (("--devices", "2", "--topology", "v100:1x3"), 2)],
)
def test_without_a_number_of_devices_a_plan_is_for_all_of_the_topology(
    words: Sequence[str], num: int, say: Say
) -> None:
    said = say(["plan", "mlp", "data_parallel", "--summary", *words])
    assert f"9 ops on {num} device" in said.out


PASTED = "hybrid dp=2 tp=1 pp=2 samples=2 schedule=zero-bubble zero=1"


def test_a_name_of_the_table_of_search_is_a_plan_of_its_microbatches(say: Say) -> None:
    words = ["mlp", PASTED, "--devices", "4", "--set", "microbatches=6", "--dtype", "float64"]
    said = say(["run", *words, "--threads", "--check", "--steps", "2"])
    assert "same  as the eager model to 1e-10" in said.out
    explained = say(["explain", *words]).out
    assert " F5 " in explained
    assert " F6 " not in explained


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([PASTED], "is of 4 devices; here are 1: give --devices 4"),
        ([PASTED, "--microbatch", "2"], "--microbatch 2: the plan is of microbatches of 4"),
        ([PASTED + " zeros=1"], "zeros=1 is no choice of auto's plans, .* names dp, tp, pp,"),
    ],
)
def test_a_name_of_search_that_does_not_fit_is_refused(
    words: list[str], message: str, say: Say
) -> None:
    said = say(["simulate", "mlp", *words])
    assert re.search(message, said.err)


def test_decisions_file_can_be_used_as_a_plan(tmp_path: Path, say: Say) -> None:
    path = str(tmp_path / "mine.plan")
    sizes = ["--devices", "2", "--set", "layers=1"]
    first = say(["plan", "gpt", "megatron", *sizes, "--decisions", path])
    assert first.status == 0
    again = say(["plan", "gpt", path, *sizes])
    assert again.out.strip() == first.out.replace(f"wrote {path}", "").strip()
    step = say(["explain", "gpt", path, *sizes, "--step"])
    assert ss.StepProgram.parse(step.out).devices == (0, 1)
    other = say(["plan", "gpt", path, "--devices", "3", "--set", "layers=1"])
    assert other.status != 0
    assert "on devices [0, 1]: the plan is about GPT on [0, 1, 2]" in other.err


def test_decisions_file_may_contain_a_split_backward_schedule(tmp_path: Path, say: Say) -> None:
    """All commands follow a pipeline schedule that was edited in the file."""
    path = tmp_path / "mine.plan"
    sizes = ["--devices", "2", "--set", "layers=2"]
    options = ["--set", "plan.microbatches=2", "--decisions", str(path)]
    assert say(["plan", "gpt", "one_f_one_b", *sizes, *options]).status == 0
    halves = split_backward(recompute_apart(one_f_one_b(2, 2)), lambda worker: worker)
    assert str(one_f_one_b(2, 2)) in path.read_text()
    path.write_text(path.read_text().replace(str(one_f_one_b(2, 2)), str(halves)))
    plan = say(["plan", "gpt", str(path), *sizes])
    assert "2 microbatches (1f1b-recompute-split)" in plan.out
    step = say(["explain", "gpt", str(path), *sizes, "--step"])
    assert "stage 1 W:\n  W stage1_segment0 on 1\n" in step.out
    grid = say(["explain", "gpt", str(path), *sizes])
    assert "worker 1 -- F0 R0 I0 F1 R1 I1 W0 W1\n" in grid.out
    assert say(["simulate", "gpt", str(path), *sizes]).status == 0
    ran = say(["run", "gpt", str(path), *sizes, "--threads", "--check", "--steps", "2"])
    assert ran.status == 0


def test_validate_lists_the_completed_checks(say: Say) -> None:
    said = say(["validate", "mlp", "megatron", "--devices", "2"])
    assert said.status == 0
    checks = [line.split()[:2] for line in said.out.splitlines()]
    names = ("devices", "placement", "coverage", "order", "communication", "memory")
    assert checks == [["ok", f"{name}:"] for name in names]


@pytest.mark.parametrize(
    "function, words, message",
    [
        ("nothing", [], r"failed  3 parts have no device: .*op_assign"),
        ("twice", [], r"failed  two parts of line:linear .* overlap in b\[2:3\]"),
        ("split", ["--memory-limit", "64B"], r"failed  device 0 needs .* the limit is 64 B"),
    ],
)
def test_validate_of_an_invalid_plan_exits_with_1(
    function: str, words: list[str], message: str, mine: str, say: Say
) -> None:
    said = say(["validate", f"{mine}:fixed", f"{mine}:{function}", *words])
    assert said.status == 1
    assert re.search(message, said.out.splitlines()[-1])


@pytest.mark.parametrize(
    "words, texts",
    [
        ("mlp one_f_one_b", ["what was split how", "layers.*:linear", "worker 1 -- F0 B0 F1 B1"]),
        # The graph of the stages has branches.
        ("mbart interlaced --set microbatches=1 --set layers=1",
         ["worker 0 0F0 2F0 1F0  --  -- 1B0 2B0 0B0", "worker 1 0F0 2F0  -- 3F0 3B0  -- 2B0"]),
    ],
)  # fmt: skip
def test_explain_shows_op_splits_and_the_schedule(words: str, texts: list[str], say: Say) -> None:
    said = say(["explain", *words.split(), "--devices", "2"])
    assert all(text in said.out for text in texts)


def test_explain_edge_option_prints_the_communication_plan_of_the_edge(say: Say) -> None:
    said = say(["explain", "mlp", "one_f_one_b", "--devices", "2", "--edge", "e2"])
    assert said.out.startswith("e2: gelu[4, 12] float32")
    assert "step  primitive  groups" in said.out
    assert "what was split how" not in said.out


@pytest.mark.parametrize(
    "words",
    [
        ["mlp", "one_f_one_b", "--set", "microbatches=3", "--optimizer", "momentum"],
        ["moe", "expert_parallel", "--dtype", "float64", "--duplex", "--overlap", "1"],
        # Dropout and master weights are compared with a program of one device.
        ["gpt", "data_parallel", "--set", "dropout=0.2", "--set", "layers=1", "--steps", "2"],
        ["mlp", "zero1", "--dtype", "bfloat16", "--master-dtype", "float32"],
        ["evoformer", "nf1b", "--set", "microbatches=3", "--dtype", "float64", "--steps", "2"],
        # Asynchronous pipelines are compared with their schedule on one device.
        ["mlp", "pipedream", "--set", "microbatches=5", "--dtype", "float64", "--steps", "1"],
    ],
)
def test_run_trains_as_a_single_device_does(words: list[str], say: Say) -> None:
    said = say(["run", *words, "--devices", "2", "--threads", "--check"])
    assert said.status == 0
    lines = said.out.splitlines()
    assert all(line.startswith(f"step {i}") for i, line in enumerate(lines[:-1], 1))
    assert lines[-1].startswith("same")


def test_run_check_reports_different_results_and_exits_with_1(
    say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    from superscaler_core.cli import run

    monkeypatch.setattr(run, "TOLERANCES", {"float32": -1.0})
    said = say(["run", "mlp", "data_parallel", "--threads", "--check"])
    assert said.status == 1
    assert said.out.splitlines()[-1].startswith("DIFFERENT  as the eager model to -1:")


def test_nan_results_have_an_infinite_difference() -> None:
    good = TrainingResult((1.0, 2.0), {"a": torch.ones(2), "b": torch.zeros(3)})
    bad = TrainingResult(
        (1.0, math.nan), {"a": torch.ones(2), "b": torch.tensor([0.0, math.nan, 0.0])}
    )
    assert good.difference(good)[:2] == (0.0, 0.0)
    assert good.difference(bad) == (math.inf, math.inf, "b")


def test_models_and_plans_can_be_loaded_from_python_files(mine: str, say: Say) -> None:
    words = [f"{mine}:model", f"{mine}:split", "--microbatch", "6", "--set", "width=10"]
    said = say(["plan", *words, "--summary"])
    assert (said.status, said.err) == (0, "")
    assert said.out.startswith("Line: ")
    checked = say(["run", f"{mine}:fixed", f"{mine}:split", "--threads", "--check"])
    assert checked.out.splitlines()[-1].startswith("same")


@pytest.mark.dist
def test_run_under_torchrun_trains_as_a_single_device_does(tmp_path: Path) -> None:
    command = ["run", "mlp", "zero3", "--check", "--dtype", "float64", "--steps", "2"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, "--standalone", "-m", "superscaler_core", *command],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["step", "step", "same"]


def test_options_after_the_plan_name_equal_set_options(say: Say) -> None:
    words = ["plan", "gpt", "--devices", "4", "--summary"]
    one = say([*words, "hybrid:tp=2,pp=2,keep=block_inputs"])
    sets = ("tp=2", "pp=2", "keep=block_inputs")
    two = say([*words, "hybrid", *(w for text in sets for w in ("--set", text))])
    assert one.status == 0
    assert (one.out, one.err) == (two.out, two.err)


# --- invalid requests -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, message",
    [
        (["plan"], "the following arguments are required: MODEL, PLAN (see 'superscaler plan"),
        (["plam", "mlp", "zero1"], "invalid choice: 'plam'"),
        (["plan", "gpd", "zero1"], "there is no model 'gpd'; there are gpt, moe,"),
        (["plan", "mlp", "hybrid:dp=2"], "not 'dp=2'; hybrid takes tp, pp, microbatches,"),
        (["plan", "mlp", "hybrid:tp=x"], "hybrid:tp=x: expected a whole number, such as 1"),
        (["plan", "mlp", "zero"], "Is it zero3 or zero2 or zero1?"),
        (["plan", "mlp", "zero1", "--preset", "tinny"], "no preset of mlp 'tinny'; there are tiny"),
        (["plan", "mlp", "zero1", "--devices", "0"], "expected a number of at least 1, got '0'"),
        (["plan", "mlp", "zero1", "--memory-limit", "lots"], "cannot parse bytes 'lots'"),
        (["plan", "mlp", "zero1", "--set", "layers"], "expected NAME=VALUE"),
        (["plan", "mlp", "zero1", "--set", "layer=3"], "takes nothing. Is it layers?"),
        (["plan", "mlp", "zero1", "--set", "layers=few"], "expected a whole number, such as 3."),
        (["plan", "swin", "zero1", "--set", "depths=2,x"],
         "numbers with commas between, such as 2,1"),
        (["plan", "mlp", "zero1", "--set", "has_classes=so"], "expected true or false"),
        (["plan", "mlp", "zero1", "--topology", "nowhere.json"], "nowhere.json"),
        (["plan", "none.py:model", "zero1"], "there is no file none.py"),
        (["plan", "mlp", "none.plan"], "none.plan: there is no such file of decisions"),
        (["plan", "mlp", "megatron", "--decisions", "x.txt"], "ends with '.plan'"),
        (["plan", "gpt", "zero1", "--set", "width=0"], "gpt: width=0 is too small a size"),
        (["plan", "gpt", "terapipe", "--set", "slices=0"], "slices=0: a sequence is one slice"),
        (["run", "mlp", "zero1"], "run needs a process for every device"),
        (["run", "mlp", "zero1", "--lr", "nan"], "expected a number of at least 0, got 'nan'"),
        (["run", "mlp", "zero1", "--seed", "9" * 20], "expected an integer of at most 64 bits"),
        (["explain", "mlp", "gpipe", "--devices", "2", "--edge", "e9"], "there is no edge 'e9'"),
        (["plan", "mlp", "gpipe", "--devices", "9"], "9 stages of the 3 blocks"),
    ],
)  # fmt: skip
def test_invalid_request_exits_with_2_and_a_one_line_error(
    words: list[str], message: str, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    said = say(words)
    assert (said.status, said.out) == (2, "")
    assert said.err.startswith("superscaler: error: ")
    assert said.err.count("\n") == 1
    assert message in said.err


@pytest.mark.parametrize(
    "words, message",
    [
        (["{}:modle", "zero1"], "has no function 'modle'; it has model"),
        (["{}:no_model", "zero1"], "no_model returned int; a model's function returns (module,"),
        (["{}:broken", "zero1"], "broken fails: RuntimeError: a line and another"),
        (["{}:fixed", "{}:broken"], "takes no plan: an sProgram is a function of one"),
        (["{}:fixed", "zero1", "--preset", "tiny"], "has none; give its arguments by --set"),
        (["{}:model", "{}:split", "--set", "tied=1"], "say model.tied= or plan.tied=."),
    ],
)
def test_errors_in_a_user_file_are_reported_in_one_line(
    words: list[str], message: str, mine: str, say: Say
) -> None:
    said = say(["plan", *(word.format(mine) for word in words)])
    assert (said.status, said.out) == (2, "")
    assert said.err.count("\n") == 1
    assert message in said.err


def test_options_that_contradict_torchrun_are_rejected(
    say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    said = say(["run", "mlp", "zero1", "--devices", "2"])
    assert "--devices 2, but torchrun started 4 processes" in said.err
    said = say(["run", "mlp", "zero1", "--threads"])
    assert "leave it out under torchrun" in said.err


def test_user_model_may_take_named_inputs_and_import_a_sibling_module(
    tmp_path: Path, say: Say
) -> None:
    (tmp_path / "beside_mine.py").write_text("WIDTH = 6\n")
    (tmp_path / "named_mine.py").write_text(
        dedent("""
        import torch
        from beside_mine import WIDTH

        class Named(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.line = torch.nn.Linear(WIDTH, WIDTH)

            def forward(self, x, *, weights=None, square=False):
                y = self.line(x) * weights
                return {"loss": (y * y if square else y).mean(), "scores": y}

        def make(batch):
            x = torch.ones(batch, WIDTH)
            return Named(), {"weights": 2 * x, "x": x, "square": True}
        """)
    )
    words = [f"{tmp_path / 'named_mine.py'}:make", "data_parallel", "--devices", "2"]
    assert "Named:" in say(["plan", *words]).out
    said = say(["run", *words, "--threads", "--check", "--dtype", "float64"])
    assert "same  as the eager model to 1e-10" in said.out
