"""A small model with uneven sizes; functions that save and load it in several formats."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor

import rvdcomm as rv
from rvdcomm.checkpoint import Rules, commit_shards, save_shards
from rvdcomm.layout import Box

Model = dict[str, Tensor]


def model() -> Model:
    """A model with integer values, so that partial sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(0)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-8, 8, shape, generator=generator)

    return {
        "embed.weight": integers(7, 10).float(),
        "layers.0.q.weight": integers(9, 5).bfloat16(),
        "layers.0.o.weight": integers(6, 4, 3).half(),
        "layers.0.fp8": integers(5, 3).to(torch.float8_e4m3fn),
        "ids": integers(11),
        "mask": integers(3) > 0,
        "scale": torch.tensor(3.0, dtype=torch.float64),
        "empty": torch.empty(0, 4),
    }


# Covers uneven cuts, replicas, value parts, permuted ranks, empty shards, tensors on few ranks.
SHARDED = {
    "embed.weight": "R(1)V(1)D(2,3) shape(7,10) ranks(5,1,2,3,4,0) cuts(0,1,7;0,4,4,10)",
    "layers.0.q.weight": "R(2)V(1)D(1,3) shape(9,5) ranks(0:6)",
    "layers.0.o.weight": "R(1)V(2)D(1,3,1) shape(6,4,3) ranks(0:6)",
    "layers.0.fp8": "R(1)V(1)D(1,2) shape(5,3) ranks(3,1)",
    "ids": "R(1)V(1)D(6) shape(11) ranks(0:6) cuts(balanced)",
    "mask": "R(1)V(1)D(6) shape(3) ranks(0:6)",
    "scale": "R(2)V(3)D() shape() ranks(0:6)",
    "empty": "R(1)V(1)D(2,1) shape(0,4) ranks(4,5)",
}

RULES = Rules(
    {
        "*.q.weight": "R(1)V(1)D(4,1)",
        "*.o.weight": "R(2)V(1)D(1,1,2)",
        "embed.*": "R(1)V(1)D(1,3) ranks(3,0,1) cuts(0,7;0,1,1,10)",
        "ids": "R(1)V(1)D(2) ranks(1,2)",
        "empty": "R(1)V(1)D(1,4)",
    },
    ranks=range(4),
)


# --- sources ------------------------------------------------------------------------------------


def save_whole(root: Path, tensors: Model) -> None:
    save_file(tensors, root / "model.safetensors")


def save_indexed(root: Path, tensors: Model) -> None:
    names = sorted(tensors)
    files = {name: f"model-{i % 3 + 1:05}-of-00003.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, root / file)
    index = {"metadata": {"total_size": 0}, "weight_map": files}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))


def save_sharded(root: Path, tensors: Model, texts: Mapping[str, str] = SHARDED) -> None:
    layouts = {name: rv.Layout.parse(texts[name]) for name in tensors}
    ranks = {rank for layout in layouts.values() for rank in layout.ranks}
    for rank in ranks:
        mine = {n: shard_of(tensors[n], layouts[n], rank) for n in tensors if rank in layouts[n]}
        save_shards(root, mine, layouts, rank)
    commit_shards(root, ranks)


def shard_of(tensor: Tensor, layout: rv.Layout, rank: int) -> Tensor:
    """A rank's shard. Value part p > 0 is p everywhere; part 0 is the tensor minus these parts."""
    cell = layout.cell(rank)
    box = tensor[cell.box.slices_within(Box.of_shape(tensor.shape))]
    if layout.rvd.v == 1:
        return box
    others = sum(range(layout.rvd.v))
    return torch.full_like(box, cell.part) if cell.part else box - others


def save_dcp(root: Path, tensors: Model) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dcp warns that there is only one process.
        dcp.save(dict(tensors), checkpoint_id=root)


def save_dcp_transposed(root: Path, tensors: Model) -> None:
    """Like ``save_dcp``, with non-contiguous tensors and with parameters."""

    def strided(tensor: Tensor) -> Tensor:
        tensor = tensor.t().contiguous().t() if tensor.dim() == 2 else tensor
        return torch.nn.Parameter(tensor) if tensor.dtype == torch.float32 else tensor

    save_dcp(root, {name: strided(tensor) for name, tensor in tensors.items()})


def save_dcp_safetensors(root: Path, tensors: Model) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = dcp.HuggingFaceStorageWriter(str(root), save_distributed=True)
        dcp.save(dict(tensors), storage_writer=writer)


SOURCES: dict[str, Callable[[Path, Model], None]] = {
    "whole": save_whole,
    "indexed": save_indexed,
    "sharded": save_sharded,
    "dcp": save_dcp,
    "dcp-transposed": save_dcp_transposed,
    "dcp-safetensors": save_dcp_safetensors,
}


def make(
    kind: str, root: Path, tensors: Model | None = None, texts: Mapping[str, str] = SHARDED
) -> Path:
    """Save a checkpoint in ``root / kind``; ``texts`` are the layouts of a sharded one."""
    folder = root / kind
    folder.mkdir()
    tensors = model() if tensors is None else tensors
    if kind == "sharded":
        save_sharded(folder, tensors, texts)
    else:
        SOURCES[kind](folder, tensors)
    return folder


# --- results ------------------------------------------------------------------------------------


def load_whole(root: Path, like: Model) -> Model:
    return {n: t for file in root.glob("*.safetensors") for n, t in load_file(file).items()}


def load_dcp(root: Path, like: Model) -> Model:
    out = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(out, checkpoint_id=root)
    return out


def load_sharded(root: Path, like: Model) -> Model:
    """Read the shards with the safetensors library, and assemble the tensors by their layouts."""
    manifest = json.loads((root / "rvdcomm-manifest.json").read_text())
    files = {name: load_file(root / name) for name in manifest["files"]}
    out: Model = {}
    for name, tensor in manifest["tensors"].items():
        layout = rv.Layout.parse(tensor["layout"])
        parts = [torch.zeros_like(like[name]) for _ in range(layout.rvd.v)]
        for rank, (file, _) in zip(sorted(layout.ranks), tensor["shards"], strict=True):
            cell = layout.cell(rank)
            shard = files[manifest["files"][file]][name]
            assert tuple(shard.shape) == cell.box.shape
            parts[cell.part][cell.box.slices_within(Box.of_shape(layout.shape))] = shard
        out[name] = parts[0] if len(parts) == 1 else torch.stack(parts).sum(0, dtype=parts[0].dtype)
    return out


LOADERS: dict[str, Callable[[Path, Model], Model]] = {
    "whole": load_whole,
    "sharded": load_sharded,
    "dcp": load_dcp,
}


def are_equal(a: Model, b: Model) -> bool:
    """Whether two models have equal names, dtypes, shapes and bits."""
    return set(a) == set(b) and all(
        a[n].dtype == b[n].dtype and a[n].shape == b[n].shape and bits(a[n]) == bits(b[n])
        for n in a
    )


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def files_of(root: Path) -> dict[str, bytes]:
    """The content of all files in a folder, by name."""
    return {path.name: path.read_bytes() for path in sorted(root.iterdir())}
