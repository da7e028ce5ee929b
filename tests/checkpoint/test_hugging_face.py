"""Folders that transformers, diffusers and others write, some with several checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import rvdcomm as rv
from rvdcomm.checkpoint import load_shards, open_checkpoint, reshard
from tests.checkpoint.models import are_equal, files_of, load_whole

Files = dict[str, dict[str, float]]


def folder(root: Path, files: Files, indices: dict[str, list[str]]) -> Path:
    """Safetensors files of tensors of three equal values, and indices of these files."""
    root.mkdir(exist_ok=True)
    for file, values in files.items():
        save_file({name: torch.full((3,), value) for name, value in values.items()}, root / file)
    for index, names in indices.items():
        weight_map = {name: file for file in names for name in files[file]}
        (root / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return root


def values(root: Path, index: str | None = None) -> dict[str, float]:
    layout = rv.Layout((3,), "R(1)V(1)D(1)")
    layouts = dict.fromkeys(open_checkpoint(root, index=index).tensors, layout)
    return {n: t[2].item() for n, t in load_shards(root, layouts, 0, index=index).items()}


def two(prefix: str, suffix: str = "", scale: float = 1.0) -> Files:
    return {
        f"{prefix}-00001-of-00002{suffix}.safetensors": {"a": scale},
        f"{prefix}-00002-of-00002{suffix}.safetensors": {"b": 2 * scale},
    }


PLAIN, HALF, OTHER = two("model"), two("model.fp16", scale=10.0), two("consolidated", scale=100.0)
DIFFUSION, OLD = two("diffusion_pytorch_model"), two("diffusion_pytorch_model", ".fp16", 10.0)
ONE = {"diffusion_pytorch_model.safetensors": {"a": 1.0, "b": 2.0}}
INDEX, FP16 = ".safetensors.index.json", ".safetensors.index.fp16.json"


@pytest.mark.parametrize(
    "files, indices, scale",
    [
        (PLAIN | HALF, {"model" + INDEX: list(PLAIN), "model" + FP16: list(HALF)}, 1),
        (HALF, {"model" + FP16: list(HALF)}, 10),
        (DIFFUSION, {"diffusion_pytorch_model" + INDEX: list(DIFFUSION)}, 1),
        (ONE | OLD, {"diffusion_pytorch_model" + FP16: list(OLD)}, 1),
        (OLD, {"diffusion_pytorch_model" + FP16: list(OLD)}, 10),
        (OTHER, {"consolidated" + INDEX: list(OTHER)}, 100),
        (PLAIN | OTHER, {"model" + INDEX: list(PLAIN), "consolidated" + INDEX: list(OTHER)}, 1),
        (ONE | {"diffusion_pytorch_model.fp16.safetensors": {"a": 10.0, "b": 20.0}}, {}, 1),
        ({"unet.fp16.safetensors": {"a": 10.0, "b": 20.0}}, {}, 10),
    ],
)
def test_the_checkpoint_without_variant_is_read(
    files: Files, indices: dict[str, list[str]], scale: float, tmp_path: Path
) -> None:
    assert values(folder(tmp_path, files, indices)) == {"a": scale, "b": 2 * scale}


@pytest.mark.parametrize(
    "index, scale", [("model" + FP16, 10), ("consolidated" + INDEX, 100), ("one.safetensors", 5)]
)
def test_the_checkpoint_that_index_names_is_read(index: str, scale: float, tmp_path: Path) -> None:
    indices = {"model" + INDEX: list(PLAIN), "model" + FP16: list(HALF)}
    indices |= {"consolidated" + INDEX: list(OTHER)}
    files = PLAIN | HALF | OTHER | {"one.safetensors": {"a": 5.0, "b": 10.0}}
    assert values(folder(tmp_path, files, indices), index) == {"a": scale, "b": 2 * scale}


def test_several_checkpoints_without_a_first_one_are_rejected(tmp_path: Path) -> None:
    indices = {"consolidated" + INDEX: list(OTHER), "diffusion_pytorch_model" + INDEX: [*DIFFUSION]}
    folder(tmp_path, OTHER | DIFFUSION, indices)
    with pytest.raises(rv.CheckpointError, match=r"several checkpoints, \['consolidated.*--index"):
        open_checkpoint(tmp_path)
    with pytest.raises(rv.CheckpointError, match=r"has no index or .* 'x'; it has \['consolidat"):
        open_checkpoint(tmp_path, index="x")


def test_tensors_that_the_index_omits_are_left_out_if_requested(tmp_path: Path) -> None:
    files: Files = {"m-1.safetensors": {"a": 1.0, "old": 7.0}, "m-2.safetensors": {"b": 2.0}}
    src = folder(tmp_path / "src", files, {"model" + INDEX: list(files)})
    index = json.loads((src / ("model" + INDEX)).read_text())
    del index["weight_map"]["old"]
    (src / ("model" + INDEX)).write_text(json.dumps(index))
    with pytest.raises(rv.CheckpointError, match=r"leaves out tensor 'old', .*or say --tensors-o"):
        reshard(src, tmp_path / "dst")
    report = reshard(src, tmp_path / "dst", to="whole", tensors_only=True)
    assert "left out, not in the index: old\n" in str(report.plan)
    assert set(load_whole(tmp_path / "dst", {})) == {"a", "b"}
    layouts = {"a": rv.Layout((3,), "R(1)V(1)D(1)")}
    assert load_shards(src, layouts, 0, strict=False)["a"].tolist() == [1, 1, 1]


# --- carried files ------------------------------------------------------------------------------

CARRIED = {"config.json": b"{}", "tokenizer.model": b"\0\1", "modeling_mine.py": b"pass\n"}
LEFT = {"pytorch_model.bin": b"x", "pytorch_model.bin.index.json": b"{}", ".gitattributes": b"x"}


def test_config_and_tokenizer_are_carried_to_whole_results(tmp_path: Path) -> None:
    src = folder(tmp_path / "src", PLAIN, {"model" + INDEX: list(PLAIN)})
    for name, data in (CARRIED | LEFT).items():
        (src / name).write_bytes(data)
    (src / "onnx").mkdir()
    report = reshard(src, tmp_path / "dst", to="whole")
    assert "carried along: config.json, modeling_mine.py, tokenizer.model\n" in str(report.plan)
    ours = {"rvdcomm-manifest.json", "rvdcomm-journal.jsonl", "model.safetensors"}
    assert set(files_of(tmp_path / "dst")) == ours | set(CARRIED)
    assert {n: (tmp_path / "dst" / n).read_bytes() for n in CARRIED} == CARRIED
    before = {path: path.stat().st_ino for path in (tmp_path / "dst").iterdir()}
    reshard(src, tmp_path / "dst", to="whole", verify=True)
    changed = {p for p in before if p.stat().st_ino != before[p]}
    assert {p.name for p in changed} <= {"rvdcomm-manifest.json"}
    (src / "config.json").write_bytes(b"{ }")
    with pytest.raises(rv.CheckpointError, match="its files carried along differ"):
        reshard(src, tmp_path / "dst", to="whole")


@pytest.mark.parametrize("to", ["sharded", "dcp"])
def test_other_results_carry_no_files(to: str, tmp_path: Path) -> None:
    src = folder(tmp_path / "src", PLAIN, {"model" + INDEX: list(PLAIN)})
    (src / "config.json").write_bytes(b"{}")
    reshard(src, tmp_path / "dst", to=to)
    assert not (tmp_path / "dst/config.json").exists()


def test_folders_of_transformers_are_read_with_their_variants(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=8, intermediate_size=12, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    half = transformers.LlamaForCausalLM(config).half()
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(tmp_path / "src", max_shard_size="2KB")
    half.save_pretrained(tmp_path / "src", max_shard_size="2KB", variant="fp16")
    reshard(tmp_path / "src", tmp_path / "one", to="whole")
    reshard(tmp_path / "src", tmp_path / "two", to="whole", index="model" + FP16)
    assert are_equal(load_whole(tmp_path / "one", {}), model.state_dict())
    assert are_equal(load_whole(tmp_path / "two", {}), half.state_dict())
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "one", dtype="float32")
    assert are_equal(again.state_dict(), model.state_dict())
