"""Steps of rules: fused, stacked, transposed and padded tensors are read by ranges."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rvdcomm as rv
from rvdcomm.checkpoint import (
    Concat,
    Crop,
    Pad,
    Rules,
    Split,
    Stack,
    Transpose,
    Unstack,
    open_checkpoint,
    reshard,
)
from rvdcomm.checkpoint.plan import MIN_MEMORY_LIMIT
from rvdcomm.checkpoint.steps import KINDS, RuleStep
from tests.checkpoint.models import SOURCES, Model, are_equal, load_sharded, load_whole, make
from tests.covering import each_value

QKV = ("l.*.q.*", "l.*.k.*", "l.*.v.*")
STEPS: list[RuleStep] = [
    Split("l.*.qkv.*", QKV, sizes=(4, 1, 1), groups=2),
    Split("*.gate_up", ("*.gate", "*.up"), dim=1),
    Unstack("*.experts.*", "*.experts.#.*", dim=1),
    Transpose("*.c_attn", (1, 0)),
    Transpose('"quoted" \\ and\x7f\n*', (2, 0, 1)),
    Crop("embed", 5),
    Pad("embed", size=16),
    Pad("*.head", multiple=64, dim=1),
    Concat("l.*.qkv.*", QKV, groups=2),
    Stack("*.experts.*", "*.experts.#.*", dim=1),
]


def numbered(*shape: int, start: int = 0) -> Tensor:
    size = int(torch.tensor(shape).prod())
    return torch.arange(start, start + size, dtype=torch.float32).reshape(shape)


def stepped(
    root: Path, tensors: Model, *steps: RuleStep, kind: str = "whole", **options: Any
) -> Model:
    """The tensors after these steps, by a reshard."""
    root.mkdir(exist_ok=True)
    texts = {n: rv.Layout(tuple(t.shape), cut(t), range(3)) for n, t in tensors.items()}
    src = make(kind, root, tensors, {name: str(layout) for name, layout in texts.items()})
    reshard(src, root / "dst", Rules(steps=steps), to="whole", verify=True, **options)
    return load_whole(root / "dst", {})


def cut(tensor: Tensor) -> str:
    """A layout on three ranks along the last dim, with value parts for vectors."""
    ones = "1," * (tensor.dim() - 1)
    return f"R(1)V(1)D({ones}3)" if tensor.dim() > 1 else "R(1)V(3)D(1)"


@pytest.mark.parametrize("step", STEPS, ids=lambda step: str(step)[:30])
def test_step_survives_a_round_trip_of_its_text(step: RuleStep) -> None:
    assert Rules.parse(str(Rules(steps=[step]))).steps == (step,)


def test_every_kind_of_step_is_tested() -> None:
    assert {step.kind for step in STEPS} == set(KINDS)


# --- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SOURCES)
def test_fused_qkv_is_split_by_heads(kind: str, tmp_path: Path) -> None:
    # Two groups of four q heads, a k head and a v head; a head has two rows.
    q, k, v = numbered(16, 5), numbered(4, 5, start=100), numbered(4, 5, start=200)
    groups = [(q[g * 8 : g * 8 + 8], k[g * 2 : g * 2 + 2], v[g * 2 : g * 2 + 2]) for g in range(2)]
    fused = torch.cat([torch.cat(group) for group in groups])
    found = stepped(tmp_path, {"l.0.qkv.w": fused}, STEPS[0], kind=kind)
    assert are_equal(found, {"l.0.q.w": q, "l.0.k.w": k, "l.0.v.w": v})


@each_value(kind=SOURCES, dim=[0, 1, 2])
def test_experts_are_stacked_and_taken_apart(kind: str, dim: int, tmp_path: Path) -> None:
    experts = {f"m.experts.{i}.up": numbered(4, 6, start=100 * i) for i in range(11)}
    stack, apart = (step("m.experts.up", "m.experts.#.up", dim) for step in (Stack, Unstack))
    stacked = stepped(tmp_path / "one", experts, stack, kind=kind)
    assert are_equal(stacked, {"m.experts.up": torch.stack(list(experts.values()), dim)})
    assert are_equal(stepped(tmp_path / "two", stacked, apart, kind=kind), experts)


@pytest.mark.parametrize("kind", SOURCES)
def test_transposed_tensors_are_those_of_torch(kind: str, tmp_path: Path) -> None:
    tensors = {"a": numbered(7, 5), "b.x": numbered(3, 4, 6)}
    steps = Transpose("a", (1, 0)), Transpose("b.*", (2, 0, 1))
    found = stepped(tmp_path, tensors, *steps, kind=kind)
    expected = {"a": tensors["a"].T, "b.x": tensors["b.x"].permute(2, 0, 1)}
    assert are_equal(found, {name: t.contiguous() for name, t in expected.items()})


@pytest.mark.parametrize("kind", SOURCES)
def test_padding_is_zeros_and_is_cropped(kind: str, tmp_path: Path) -> None:
    tensors = {"w": numbered(5, 3), "b": numbered(6)}
    pads = Pad("w", size=8), Pad("b", multiple=4)
    padded = stepped(tmp_path / "one", tensors, *pads, kind=kind)
    assert are_equal(
        padded, {"w": torch.cat([tensors["w"], torch.zeros(3, 3)]),
                 "b": torch.cat([tensors["b"], torch.zeros(2)])}
    )  # fmt: skip
    crops = Crop("w", 5), Crop("b", 6)
    assert are_equal(stepped(tmp_path / "two", padded, *crops, kind=kind), tensors)


@pytest.mark.parametrize("dim, groups", [(0, 1), (0, 3), (1, 2)])
def test_concat_undoes_split(dim: int, groups: int, tmp_path: Path) -> None:
    tensors = {"a.w": numbered(12, 8), "b.w": numbered(24, 16, start=1000)}
    parts = ("*.x", "*.y")
    split = Split("*.w", parts, dim, (3, 1), groups)
    apart = stepped(tmp_path / "one", tensors, split)
    assert set(apart) == {"a.x", "a.y", "b.x", "b.y"}
    joined = stepped(tmp_path / "two", apart, Concat("*.w", parts, dim, groups))
    assert are_equal(joined, tensors)


def test_steps_follow_each_other_and_layouts_cut_their_result(tmp_path: Path) -> None:
    # Conv1D of GPT-2: [in, 3 out], which becomes q, k, v of [out, in], stacked over the layers.
    tensors = {f"h.{i}.c_attn": numbered(4, 6, start=100 * i) for i in range(2)}
    steps = (
        Split("h.#.c_attn", ("h.#.q", "h.#.k", "h.#.v"), dim=1),
        Transpose("h.#.*", (1, 0)),
        Pad("h.#.q", size=3),
        Stack("h.*", "h.#.*"),
    )
    rules = Rules({"h.k": "R(1)V(1)D(1,2,1)"}, ranks=range(2), steps=steps)
    reshard(make("whole", tmp_path, tensors), tmp_path / "dst", rules)
    parts = [[w[:, 2 * i : 2 * i + 2].T for w in tensors.values()] for i in range(3)]
    parts[0] = [torch.cat([q, torch.zeros(1, 4)]) for q in parts[0]]
    expected = {f"h.{n}": torch.stack(p) for n, p in zip("qkv", parts, strict=True)}
    assert are_equal(load_sharded(tmp_path / "dst", expected), expected)
    assert open_checkpoint(tmp_path / "dst").tensors["h.k"].chosen[0].box.shape == (2, 1, 4)


def test_steps_hold_no_whole_tensor(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(1 << 10, 1 << 11)}  # 8 MiB
    src = make("sharded", tmp_path, tensors, {"w": "R(1)V(1)D(1,2) shape(1024,2048)"})
    rules = Rules(steps=[Split("w", ("q", "k"), groups=8), Transpose("q", (1, 0))])
    limit = 16 * MIN_MEMORY_LIMIT
    reshard(src, tmp_path / "warm", rules, to="whole", memory_limit=limit)
    tracemalloc.start()
    reshard(src, tmp_path / "dst", rules, to="whole", memory_limit=limit)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < limit + (512 << 10)
    found = load_whole(tmp_path / "dst", {})
    rows = tensors["w"].reshape(8, 2, 64, -1)
    expected = {"q": rows[:, 0].reshape(512, -1).T.contiguous(), "k": rows[:, 1].reshape(512, -1)}
    assert are_equal(found, expected)


def test_flipped_bit_is_detected_where_a_step_reads_a_part(tmp_path: Path) -> None:
    src = make("sharded", tmp_path, {"w": numbered(6, 8)}, {"w": "R(1)V(1)D(1,1) shape(6,8)"})
    data = bytearray((src / "rank-00000.safetensors").read_bytes())
    data[-1] ^= 1
    (src / "rank-00000.safetensors").write_bytes(data)
    with pytest.raises(rv.CheckpointError, match=r"of tensor 'a' .* are damaged"):
        reshard(src, tmp_path / "dst", Rules(steps=[Split("w", ("a", "b")), Crop("a", 1)]))


# --- what fits not ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "steps, message",
    [
        ([Split("x.*", ("a.*", "b.*"))], r"\[split\] .* matches no tensor; the 3 tensors have nam"),
        ([Split("w", ("a", "b"), sizes=(3, 2))], "has 6 elements, no multiple of 5"),
        ([Split("w", ("a", "e.0"))], "makes 'e.0', which there is already"),
        ([Concat("x", ("w", "v"))], "needs 'v' beside 'w'"),
        ([Concat("x", ("w", "e.0"))], r"'w' is float32 \[6, 4\], and 'e.0' is float32 \[5\]"),
        ([Concat("x", ("w", "e.0"), dim=3)], r"'w' \[6, 4\] has no dim 3"),
        ([Stack("e", "e.#")], "'e.2' is there, and number 1 is not"),
        ([Transpose("w", (0, 2, 1))], r"'w' \[6, 4\] has 2 dims"),
        ([Crop("w", 7)], "has fewer elements"),
        ([Pad("w", size=5)], r"has more elements; \[crop\] makes"),
    ],
)
def test_steps_that_do_not_fit_are_rejected(
    steps: list[RuleStep], message: str, tmp_path: Path
) -> None:
    src = make("whole", tmp_path, {"w": numbered(6, 4), "e.0": numbered(5), "e.2": numbered(5)})
    with pytest.raises(rv.LayoutError, match=message):
        reshard(src, tmp_path / "dst", Rules(steps=steps))
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize(
    "text, message",
    [
        ("[split]\nw = {parts = ['a']}", "give 2 or more different parts"),
        ("[split]\nw = {parts = ['a', '*']}", r"'\*' needs the wildcards of 'w'"),
        ("[split]\nw = {parts = ['a', 'b'], sizes = [1]}", "a size of at least 1 for each part"),
        ("[split]\nw = {parts = ['a', 1]}", "parts is"),
        ("[split]\nw = {parts = ['a', 'b'], dim = true}", "dim is True"),
        ("[split]\nw = 'a, b'", r"\[split\] 'w' is 'a, b'; expected parts, dim, sizes, groups"),
        ("[split]\nw = {dims = [1]}", "expected parts, dim"),
        ("[stack]\nw = {parts = 'a'}", "one # more"),
        ("[concat]\nw = {dim = 0}", "lacks one of parts"),
        ("[transpose]\nw = [1, 1]", r"dims are a permutation such as \[1, 0\]"),
        ("[pad]\nw = {}", "give either a size or a multiple"),
        ("split = 1", "'split' is 1; expected"),
    ],
)
def test_invalid_steps_are_rejected(text: str, message: str) -> None:
    with pytest.raises(rv.LayoutError, match=message):
        Rules.parse(text)


def test_steps_that_no_table_can_hold_are_rejected() -> None:
    with pytest.raises(rv.LayoutError, match=r"a second step of its kind for 'w', and a table has"):
        Rules(steps=[Crop("w", 1), Pad("w", 3), Crop("w", 2, dim=1)])


@pytest.mark.parametrize("number, lost", [("9" * 12, 1), ("9" * 5000, 1), ("0" * 5000 + "2", 1)])
def test_parts_are_counted_in_bounded_time_and_memory(
    number: str, lost: int, tmp_path: Path
) -> None:
    src = make("whole", tmp_path, {"e.0": numbered(5), f"e.{number}": numbered(5)})
    with pytest.raises(rv.LayoutError, match=f"is there, and number {lost} is not"):
        reshard(src, tmp_path / "dst", Rules(steps=[Stack("e", "e.#")]))
