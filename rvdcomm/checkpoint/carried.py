"""Carried files: what a model needs besides its tensors, such as its config and its tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rvdcomm.checkpoint import dcp, journal, manifest
from rvdcomm.checkpoint.files import TEMPORARY_SUFFIX, write_file
from rvdcomm.checkpoint.folder import Folder
from rvdcomm.checkpoint.hugging_face import is_weights

MAX_BYTES = 128 << 20
"""Larger files are left behind; the tokenizer of a vocabulary of 256,000 words takes 35 MB."""

_WEIGHTS = (
    *(".bin", ".pt", ".pth", ".ckpt", ".distcp", ".gguf", ".h5", ".msgpack", ".npz", ".onnx"),
    *(".index.json", TEMPORARY_SUFFIX),
)
"""Ends of the names of files that hold tensors in other forms, or say where they are."""


def carried(folder: Folder, names: Iterable[str]) -> tuple[str, ...]:
    """The names of the files that ``reshard(to="whole")`` copies as they are.

    Hidden files, folders and files of more than ``MAX_BYTES`` are left behind.
    """
    ours = {manifest.FILE_NAME, journal.FILE_NAME}
    return tuple(
        name
        for name in names
        if not (name.startswith(".") or name in ours or name.endswith(_WEIGHTS))
        and not (is_weights(name) or dcp.is_dcp([name]))
        and (folder.root / name).is_file()
        and folder.version(name)[0] <= MAX_BYTES
    )


def carry(folder: Folder, names: Iterable[str], root: Path) -> None:
    """Copy files of a checkpoint into ``root``, unless they are there."""
    for name in names:
        data = folder.read(name, MAX_BYTES)
        path = root / name
        if not path.is_file() or path.read_bytes() != data:
            write_file(root, name, data)
