import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import rvdcomm as rv
import rvdcomm.cli.main
from rvdcomm.cli.main import COMMAND_LINE, main
from rvdcomm.network import Topology

COLUMNS, ROWS = "R(1)V(1)D(1,8)", "R(1)V(1)D(8,1)"
HOSTS = Topology.preset("h100", 2, 4)
MAX_COLUMNS = 100


def output(capsys, *words):
    """The output of a command that succeeds."""
    status = main(words)
    printed = capsys.readouterr()
    assert (status, printed.err) == (0, "")
    return printed.out


def help_text(capsys, *words):
    with pytest.raises(SystemExit) as exit_info:
        main([*words, "--help"])
    assert exit_info.value.code == 0
    return capsys.readouterr().out


def refusal(capsys, *words):
    """The error message of a rejected command, which prints only one line, to stderr."""
    status = main(words)
    printed = capsys.readouterr()
    assert (status, printed.out) == (2, "")
    assert printed.err.startswith("rvdcomm: error: ")
    assert printed.err.count("\n") == 1
    return printed.err


# --- plan ---------------------------------------------------------------------------------------


def test_plan_prints_the_plan(capsys):
    expected = rv.plan(rv.Layout((64, 32), COLUMNS), rv.Layout((64, 32), ROWS))
    assert output(capsys, "plan", COLUMNS, ROWS, "--shape", "64,32") == f"{expected}\n"


def test_json_has_the_numbers_of_the_plan(capsys):
    words = ("plan", COLUMNS, ROWS, "--shape", "640,320", "--hosts", "2x4", "--dtype", "int16")
    found = json.loads(output(capsys, *words, "--json"))
    shape = (640, 320)
    plan = rv.plan(rv.Layout(shape, COLUMNS), rv.Layout(shape, ROWS), "int16", HOSTS)
    assert rv.Layout.parse(found["src"]) == plan.src
    assert rv.Layout.parse(found["dst"]) == plan.dst
    assert (found["shape"], found["dtype"]) == ([640, 320], "int16")
    assert found["cost"]["wire_bytes"] == plan.cost.wire_bytes
    assert found["cost"]["secs"] == plan.cost.secs
    assert found["bound"]["recv_bytes"] == plan.bound.recv_bytes
    assert found["gap"] == plan.gap
    assert [step["kind"] for step in found["steps"]] == [step.kind for step in plan.path.steps]
    assert [step["state"] for step in found["steps"]] == [s.dst.text for s in plan.path.steps]
    assert tuple(map(tuple, found["steps"][0]["groups"])) == plan.path.steps[0].groups
    assert sum(s["cost"]["wire_bytes"] for s in found["steps"]) == plan.cost.wire_bytes


def test_json_has_no_infinity(capsys, tmp_path):
    file = tmp_path / "no_alpha.json"
    Topology.single_host(4, alpha_secs=0, bytes_per_sec=1e9).save(file)
    words = ("R(1)V(1)D(4)", "R(1)V(4)D(1)", "--shape", "8", "--topology", str(file), "--json")
    assert "Infinity" not in output(capsys, "plan", *words)


RELABEL = ("plan", "R(1)V(1)D(8,1)", "R(2)V(1)D(4,1)", "--shape", "4096,4096", "--hosts", "2x4")


def test_relabel_plans_for_the_best_rank_order_and_prints_the_savings(capsys):
    printed = output(capsys, *RELABEL, "--relabel")
    src = rv.Layout((4096, 4096), "R(1)V(1)D(8,1)")
    ranks = rv.best_ranks(src, "R(2)V(1)D(4,1)", HOSTS)
    best = rv.plan(src, rv.Layout(src.shape, "R(2)V(1)D(4,1)", ranks), topology=HOSTS)
    assert printed.startswith(
        f"{best}\nsaves  112 MiB -> 64 MiB on the wire (64 MiB -> 0 B between"
    )
    assert printed.endswith("by     --dst-ranks 0,2,4,6,1,3,5,7\n")


def test_rank_order_printed_by_relabel_gives_the_same_plan(capsys):
    relabelled = json.loads(output(capsys, *RELABEL, "--relabel", "--json"))
    named = relabelled.pop("relabelled")
    plain = json.loads(output(capsys, *RELABEL, "--json"))
    again = json.loads(output(capsys, *RELABEL, "--dst-ranks", named["dst_ranks"], "--json"))
    assert again == relabelled
    assert named["cost_before"] == plain["cost"]


@pytest.mark.parametrize("executor", ["dist", "peer"])
def test_relabel_plans_for_the_given_executor(capsys, executor):
    printed = output(capsys, *RELABEL, "--relabel", "--executor", executor, "--program")
    assert ("collective" in printed) == (executor == "dist")


def test_relabel_of_a_full_layout_prints_the_new_layout(capsys):
    full = "R(2)V(1)D(4,1) shape(4096,4096) ranks(0:8)"
    printed = output(capsys, "plan", RELABEL[1], full, "--hosts", "2x4", "--relabel")
    assert printed.endswith("by     R(2)V(1)D(4,1) shape(4096,4096) ranks(0,2,4,6,1,3,5,7)\n")


@pytest.mark.parametrize(
    "dst, options, src_ranks, dst_ranks",
    [
        (4, [], range(4), range(4)),
        (3, [], range(4), range(3)),
        (4, ["--src-ranks", "4:8"], range(4, 8), range(4, 8)),
        (4, ["--dst-ranks", "2:6"], range(4), range(2, 6)),
        (4, ["--src-ranks", "3,1,0,2", "--dst-ranks", "9,5,6,7"], (3, 1, 0, 2), (9, 5, 6, 7)),
    ],
)
def test_ranks_default_to_those_of_src(capsys, dst, options, src_ranks, dst_ranks):
    words = ("plan", "R(1)V(1)D(4)", f"R(1)V(1)D({dst})", "--shape", "10", "--json", *options)
    found = json.loads(output(capsys, *words))
    assert rv.Layout.parse(found["src"]).ranks == tuple(src_ranks)
    assert rv.Layout.parse(found["dst"]).ranks == tuple(dst_ranks)


def words_2_to_3():
    return ("plan", "R(1)V(1)D(2)", "R(1)V(1)D(3)", "--shape", "12")


def test_shape_of_a_full_layout_applies_to_the_other_layout(capsys):
    src = "R(1)V(1)D(2) shape(10) ranks(4,5) cuts(0,3,10)"
    found = json.loads(output(capsys, "plan", src, "R(2)V(1)D(1)", "--json"))
    assert found["src"] == src
    assert found["dst"] == "R(2)V(1)D(1) shape(10) ranks(4,5)"


def test_a_scalar_has_an_empty_shape(capsys):
    words = ("plan", "R(1)V(3)D()", "R(3)V(1)D()", "--shape", "", "--json")
    assert json.loads(output(capsys, *words))["shape"] == []


def test_cuts_option_applies_to_both_layouts(capsys):
    words = ("plan", "R(1)V(1)D(4)", "R(1)V(1)D(3)", "--shape", "10", "--cuts", "balanced")
    found = json.loads(output(capsys, *words, "--json"))
    assert rv.Layout.parse(found["src"]).cuts == ((0, 3, 6, 8, 10),)
    assert rv.Layout.parse(found["dst"]).cuts == ((0, 4, 7, 10),)


@pytest.mark.parametrize(
    "options, topology",
    [
        (["--hosts", "2x4"], HOSTS),
        (["--hosts", "0:4;4:8"], HOSTS),
        (["--preset", "h100", "--hosts", "2x4"], HOSTS),
        (["--preset", "v100"], Topology.preset("v100", 1, 8)),
    ],
)
def test_options_for_hosts_and_preset_give_the_topology(capsys, options, topology):
    words = ("plan", COLUMNS, ROWS, "--shape", "64,64", "--json", *options)
    plan = rv.plan(rv.Layout((64, 64), COLUMNS), rv.Layout((64, 64), ROWS), topology=topology)
    found = json.loads(output(capsys, *words))["cost"]
    assert (found["host_bytes"], found["secs"]) == (plan.cost.host_bytes, plan.cost.secs)


def test_topology_is_read_from_a_file(capsys, tmp_path):
    HOSTS.save(tmp_path / "cluster.json")
    words = ("plan", COLUMNS, ROWS, "--shape", "64,64")
    from_file = output(capsys, *words, "--topology", str(tmp_path / "cluster.json"))
    assert from_file == output(capsys, *words, "--hosts", "2x4")


def test_memory_limit_bounds_the_peak_of_the_plan(capsys):
    words = ("plan", "R(1)V(1)D(1,4)", "R(1)V(1)D(4,1)", "--shape", "64,64", "--json")
    found = json.loads(output(capsys, *words, "--memory-limit", "12KiB"))
    assert found["cost"]["peak_bytes"] <= 12 * 1024


@pytest.mark.parametrize("name", ["plan.svg", "plan.png"])
def test_picture_is_written(capsys, tmp_path, name):
    pytest.importorskip("matplotlib")
    file = tmp_path / name
    printed = output(capsys, *words_2_to_3(), "--picture", str(file))
    assert printed.endswith(f"wrote  {file}\n")
    assert file.read_bytes()[:4] in (b"<?xm", b"\x89PNG")


@pytest.mark.parametrize(
    "src, dst, shape",
    [
        ("R(1)V(16)D(1,1,1)", "R(1)V(1)D(2,4,2)", "160,320,64"),
        ("R(2)V(8)D(1,1)", "R(16)V(1)D(1,1)", "4096,4096"),
        ("R(1)V(1)D(1,16)", "R(1)V(1)D(16,1)", "100000,100000"),
    ],
)
def test_tables_have_at_most_100_columns(capsys, src, dst, shape):
    lines = output(capsys, "plan", src, dst, "--shape", shape, "--hosts", "4x4").splitlines()
    assert max(map(len, lines)) <= MAX_COLUMNS


# --- verify -------------------------------------------------------------------------------------


def test_a_printed_program_verifies(capsys, tmp_path):
    file = tmp_path / "program.txt"
    words = ("plan", "R(1)V(4)D(1,1)", "R(1)V(1)D(2,2)", "--shape", "6,10", "--hosts", "2x2")
    file.write_text(output(capsys, *words, "--program"))
    printed = output(capsys, "verify", "--program-file", str(file))
    assert printed == output(capsys, "verify", *words[1:])


def test_program_of_several_tensors_is_proved_and_reported_with_every_transition(capsys, tmp_path):
    file = tmp_path / "program.txt"
    src, dst = rv.Layout((6, 4), "R(1)V(1)D(2,1)"), rv.Layout((6, 4), "R(1)V(1)D(1,2)")
    (program,) = rv.plan_many({"a": src, "b": dst}, {"a": dst, "b": src}, "int16").programs
    file.write_text(str(program))
    printed = output(capsys, "verify", "--program-file", str(file))
    assert printed.startswith(
        "R(1)V(1)D(2,1) -> R(1)V(1)D(1,2)  6x4 int16\n"
        "R(1)V(1)D(1,2) -> R(1)V(1)D(2,1)  6x4 int16 on 2 ranks\nproved "
    )
    found = json.loads(output(capsys, "verify", "--program-file", str(file), "--json"))
    one = {"shape": [6, 4], "dtype": "int16"}
    assert found["tensors"] == [
        {"src": str(a), "dst": str(b), **one} for a, b in ((src, dst), (dst, src))
    ]


GATHER = ("R(1)V(1)D(8)", "R(8)V(1)D(1)", "--shape", "64", "--topology", "dgx-1")


def test_plan_is_saved_and_handed_to_other_programs(capsys, tmp_path):
    names = ("save", "schedule", "msccl")
    files = {name: str(tmp_path / name) for name in names}
    options = [word for name in names for word in (f"--{name}", files[name])]
    printed = output(capsys, "plan", *GATHER, *options)
    assert printed.endswith("".join(f"wrote  {files[name]}\n" for name in names))
    assert str(rv.load_plan(files["save"])) in printed
    assert 'coll="allgather"' in Path(files["msccl"]).read_text()
    proved = output(capsys, "verify", "--schedule", files["schedule"])
    assert proved.startswith("proved  tensors 1  ranks 8  rounds ")
    counts = json.loads(output(capsys, "verify", "--schedule", files["schedule"], "--json"))
    assert counts["proved"] is True
    assert counts["messages"] > 0


def test_verify_says_what_is_wrong_with_a_schedule(capsys, tmp_path):
    path = tmp_path / "rounds.json"
    output(capsys, "plan", *GATHER, "--schedule", str(path))
    values = json.loads(path.read_text())
    values["rounds"][0]["messages"].pop()
    path.write_text(json.dumps(values))
    assert main(["verify", "--schedule", str(path)]) == 1
    assert "not proved: " in capsys.readouterr().err
    path.write_text("{}")
    assert main(["verify", "--schedule", str(path)]) == 2
    assert "it has no 'format'" in capsys.readouterr().err
    assert main(["verify", *GATHER, "--schedule", str(path)]) == 2
    assert "leave out src, dst, shape, topology" in capsys.readouterr().err


def test_what_msccl_cannot_name_is_refused(capsys, tmp_path):
    path = tmp_path / "x.xml"
    words = ("plan", COLUMNS, ROWS, "--shape", "64,64", "--hosts", "2x4", "--msccl", str(path))
    assert main(words) == 2
    assert "all that MSCCL names" in capsys.readouterr().err
    assert not path.exists()


def test_verify_prints_the_proof_and_the_counts_of_the_program(capsys):
    words = ("verify", "R(1)V(4)D(1)", "R(4)V(1)D(1)", "--shape", "64")
    program = rv.plan(rv.Layout((64,), words[1]), rv.Layout((64,), words[2])).program
    found = json.loads(output(capsys, *words, "--json"))
    traffic = [num_elements for _, _, num_elements in program.traffic()]
    assert found["proved"] is True
    assert found["instructions"] == len(program.instructions)
    assert (found["messages"], found["elements"]) == (len(traffic), sum(traffic))
    text = output(capsys, *words)
    assert "written once" in text
    assert f"messages {len(traffic)}, elements between ranks {sum(traffic)}" in text
    assert max(map(len, text.splitlines())) <= MAX_COLUMNS


def _without_last(program, word):
    lines = program.splitlines()
    del lines[max(i for i, line in enumerate(lines) if line.startswith(word))]
    return "\n".join(lines)


DAMAGES = {
    "a sum is missing": lambda p: _without_last(p, "add"),
    "a sum is doubled": lambda p: p + [x for x in p.splitlines() if x.startswith("add")][-1],
    "a read is missing": lambda p: _without_last(p, "copy"),
    "a buffer is missing": lambda p: _without_last(p, "buffer"),
    "a box is outside": lambda p: p.replace("[0:3,", "[0:9,"),
    "the text stops": lambda p: p[: len(p) // 2],
    "no program": lambda p: "hello\n",
    "an unknown dtype": lambda p: p.replace("float32", "float33"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_corrupted_program_is_not_proved(capsys, tmp_path, damage):
    file = tmp_path / "program.txt"
    words = ("plan", "R(1)V(4)D(1,1)", "R(1)V(1)D(2,2)", "--shape", "6,10", "--program")
    file.write_text(DAMAGES[damage](output(capsys, *words)))
    assert main(["verify", "--program-file", str(file)]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("rvdcomm: not proved: ")
    assert printed.out == ""
    assert main(["verify", "--program-file", str(file), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["proved"] is False
    assert found["error"] in printed.err


# --- help and bench -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMAND_LINE.commands)
def test_help_shows_an_example(capsys, name):
    text = help_text(capsys, name)
    assert re.search(rf"^ +rvdcomm {name} ", text, re.MULTILINE)
    assert max(map(len, text.splitlines())) <= MAX_COLUMNS


@pytest.mark.parametrize("words", [(), ("plan",), ("verify",)])
def test_help_explains_the_notation(capsys, words):
    text = help_text(capsys, *words)
    assert "R(2)V(1)D(1,4)  2 replicas, 1 value part, dim 0 whole, dim 1 cut in 4" in text
    assert max(map(len, text.splitlines())) <= MAX_COLUMNS


def test_the_examples_of_the_help_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = [help_text(capsys, *words) for words in ((), ("plan",), ("verify",))]
    commands = [line for text in texts for line in re.findall("^ +rvdcomm (.*)$", text, re.M)]
    assert len(commands) >= 6
    for command in commands:
        words, _, file = command.partition(" > ")
        text = output(capsys, *shlex.split(words))
        if file:
            Path(file).write_text(text)


def test_bench_passes_its_arguments_on(monkeypatch):
    ran = []

    def run(command, **options):
        ran.append(command)
        return subprocess.CompletedProcess(command, 7)

    monkeypatch.setattr(rvdcomm.cli.bench.subprocess, "run", run)
    monkeypatch.setattr(Path, "exists", lambda path: path.parts[-2:] == ("bench", "run.py"))
    assert main(["bench", "--size", "64KiB", "--json"]) == 7
    assert main(["bench", "--", "--help"]) == 7
    assert ran == [
        [sys.executable, "-m", "bench.run", "--size", "64KiB", "--json"],
        [sys.executable, "-m", "bench.run", "--help"],
    ]


def test_bench_needs_the_source_tree(capsys, monkeypatch):
    monkeypatch.setattr(Path, "exists", lambda path: False)
    assert "clone of the repository" in refusal(capsys, "bench")


def test_the_command_line_imports_no_torch():
    code = (
        "import sys, rvdcomm.cli; "
        "rvdcomm.cli.main(['verify', 'R(1)V(2)D(1)', 'R(2)V(1)D(1)', '--shape', '6']); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


# --- terminals, signals and files ---------------------------------------------------------------


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["--version"])
    assert exit_info.value.code == 0
    assert re.fullmatch(r"rvdcomm (\d+\.\d+\.\d+\S*|from a source tree)\n", capsys.readouterr().out)


@pytest.mark.parametrize("columns", [80, 90])
def test_help_has_the_width_of_the_columns_variable(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    text = help_text(capsys, "plan")
    options = text[text.index("options:") : text.index("layouts:")]
    assert columns - 20 < max(map(len, options.splitlines())) <= columns


def test_ctrl_c_ends_a_command_without_a_traceback():
    command = [sys.executable, "-m", "rvdcomm", "verify", "--program-file", "-"]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **streams) as process:
        # The text is larger than the buffer of a pipe: once it is written, the command is reading.
        process.stdin.write(b"#" * (4 << 20))
        process.stdin.flush()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, b"", b"rvdcomm: interrupted\n")


@pytest.mark.parametrize(
    "words",
    [
        ("plan", COLUMNS, ROWS, "--shape", "64,64", "--topology"),
        ("verify", "--program-file"),
        ("calibrate", "--ranks", "2", "--out", "unused.json", "--like"),
    ],
    ids=lambda words: words[-1],
)
def test_named_pipe_without_a_writer_is_rejected(tmp_path, words):
    os.mkfifo(tmp_path / "pipe")
    command = [sys.executable, "-m", "rvdcomm", *words, "pipe"]
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    environment["PYTHONPATH"] = str(Path(rv.__file__).parents[1])
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, timeout=60, capture_output=True, text=True
    )
    assert done.returncode in (1, 2)
    assert re.search("pipe is (not a (topology|network)|empty)", done.stderr)
    assert "Traceback" not in done.stderr


def test_a_pipe_with_a_writer_is_read(capsys, tmp_path):
    HOSTS.save(tmp_path / "cluster.json")
    reader, writer = os.pipe()
    os.write(writer, (tmp_path / "cluster.json").read_bytes())
    os.close(writer)
    words = ("plan", COLUMNS, ROWS, "--shape", "64,64")
    from_pipe = output(capsys, *words, "--topology", f"/dev/fd/{reader}")
    os.close(reader)
    assert from_pipe == output(capsys, *words, "--hosts", "2x4")


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_empty_program_is_rejected_with_its_name(capsys, tmp_path, monkeypatch, text):
    (tmp_path / "program.txt").write_text(text)
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    for file in (str(tmp_path / "program.txt"), "-"):
        error = refusal(capsys, "verify", "--program-file", file)
        assert f"--program-file {file} is empty" in error


@pytest.mark.parametrize(
    "words, match",
    [
        ("reshard a b --max-file-bytes 0", "0 is too little: expected at least 1 byte"),
        ("reshard a b --memory-limit 0", "0 is too little: expected at least 1 byte"),
        ("calibrate --max-bytes 0B", "0B is too little: expected at least 1 byte"),
        ("calibrate --secs nan", "cannot parse seconds 'nan': expected a number above 0"),
        ("calibrate --timeout 0", "cannot parse seconds '0'"),
        ("calibrate --limit inf", "cannot parse seconds 'inf'"),
        ("calibrate --timeout 1e30", "cannot parse seconds '1e30': expected a number above 0"),
    ],
)
def test_numbers_out_of_range_are_rejected(capsys, words, match):
    assert match in refusal(capsys, *words.split())


# --- invalid requests ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, match",
    [
        ("", "required: COMMAND"),
        ("fly", "invalid choice: 'fly'"),
        ("plan", "required: SRC, DST"),
        ("plan R(1)V(1)D(2) R(2)V(1)D(1)", "needs a shape, such as --shape 4096,4096"),
        ("plan R2 R(1)V(1)D(2) --shape 4", "cannot parse layout 'R2': expected 'R('"),
        ("plan R(1)V(1)D(2) R(1)V(1)D(2) --shape 4,4", "splits 1 dims but shape (4, 4) has 2"),
        ("plan R(1)V(1)D(2) R(1)V(1)D(2) --shape 4x4", "cannot parse shape '4x4'"),
        ("plan R(1)V(1)D(2) R(1)V(1)D(2) --shape 4 --src-ranks 0:3", "needs 2 ranks"),
        ("plan R(1)V(1)D(2) R(1)V(1)D(2) --shape 4 --src-ranks 1,1", "rank 1 is given twice"),
        ("plan R(1)V(1)D(2) R(1)V(1)D(2) --shape 4 --dst-ranks a", "cannot parse ranks 'a'"),
        ("plan R(1)V(1)D(2) R(1)V(1)D(2) --shape 4 --dtype int3", "dtype 'int3' is unknown"),
        ("plan R(1)V(2)D(1) R(1)V(1)D(2) --shape 4 --dtype bool", "cannot be summed"),
        ("plan R(1)V(1)D(2) R(1)V(1)D(2) --shape 4 --hosts 1x1", "ranks [1] are not in"),
        ("plan R(1)V(1)D(2) R(1)V(1)D(2) --shape 4 --hosts two", "cannot parse ranks 'two'"),
        ("plan R(1)V(1)D(2) R(1)V(1)D(2) --shape 4 --hosts 0:2;1:3", "names a rank twice"),
        ("plan R(1)V(1)D(2) R(1)V(1)D(2) --shape 4 --topology no.json", "No such file"),
        ("plan R(1)V(1)D(2) R(2)V(1)D(1) --shape 9 --memory-limit 9", "memory_limit=9"),
        ("plan R(1)V(1)D(2) R(2)V(1)D(1) --shape 9 --memory-limit 9X", "cannot parse bytes '9X'"),
        ("plan R(1)V(1)D(2) R(2)V(1)D(1) --shape 9 --picture a.gif", "use a name in .svg or .png"),
        ("plan R(1)V(1)D(2) R(2)V(1)D(1) --shape 9 --json --program", "not allowed with"),
        ("plan 'R(2)V(1)D(1) shape(3)' 'R(1)V(1)D(2) shape(4)'", "names its own shape"),
        ("plan 'R(2)V(1)D(1) shape(3)' 'R(1)V(1)D(2)' --src-ranks 0:2", "names its own shape"),
        (
            "plan 'R(2)V(1)D(1) shape(3)' 'R(1)V(1)D(2)' --topology t --preset h100",
            "already describes",
        ),
        (f"plan R(1)V(1)D(2) R(2)V(1)D(1) --shape {2**62}", f"take {2**64} bytes on all ranks"),
        (f"plan R(2)V(1)D(1) R(1)V(1)D(2) --shape {2**60}", f"take {2**63} bytes on all ranks"),
        ("calibrate --out .", "--out . is a folder; name a file in it."),
        ("verify", "needs SRC and DST, or --program-file"),
        ("verify --program-file no.txt", "No such file"),
        ("verify --program-file .", "Is a directory: '.'"),
        ("verify --program-file /dev/zero", "--program-file /dev/zero: it is longer than"),
        ("plan R(1)V(1)D(2) R(1)V(1)D(2) --shape 4 --topology .", "Is a directory: '.'"),
        ("verify R(1)V(1)D(2) R(2)V(1)D(1) --program-file p", "leave out src, dst"),
    ],
)
def test_invalid_request_is_rejected_with_one_line(capsys, words, match):
    assert match in refusal(capsys, *shlex.split(words))
