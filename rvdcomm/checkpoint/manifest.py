"""Manifest: the file that commits a checkpoint of ours, and the marks that bind its files to it.

Every safetensors file that we write has a mark in its header. The manifest is written last, and
names each file with its mark. So a folder of such files is complete if and only if it has a
manifest and the files have the marks that the manifest names. Writers make marks, ``commit_shards``
and reshard write the manifest, and readers call ``stored_tensors``: nothing else decides whether a
folder is complete. docs/checkpoints.md describes the states of a folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rvdcomm.checkpoint.checksums import check_checksum
from rvdcomm.checkpoint.folder import Folder, check_file_name
from rvdcomm.checkpoint.safetensors_file import Header, read_header
from rvdcomm.checkpoint.stored import Extent, StoredBlock, StoredTensor
from rvdcomm.errors import CheckpointError, LayoutError
from rvdcomm.json_file import entry, parse_json
from rvdcomm.layout import Layout, dtype_name
from rvdcomm.text import quoted

FILE_NAME = "rvdcomm-manifest.json"
FORMAT, VERSION = "rvdcomm-checkpoint", 3
_READ_VERSIONS = (2, 3)
"""Checkpoints of version 2 have a sha256 of each shard, those of version 3 checksums of blocks."""

MAX_BYTES = 256 << 20
"""Enough for three million shards: 700 tensors on 4,096 ranks."""

KEY_PREFIX = "rvdcomm."
MARK_KEY = KEY_PREFIX + "mark"
"""Key of the mark in the metadata of a file's header."""


@dataclass(frozen=True, slots=True)
class Mark:
    """The mark of a file: which save wrote the file, and which rank's shards it has.

    Attributes:
        save: a text that no file of another save has. All files of a reshard have the same text;
            ``save_shards`` draws a new text for every file.
        rank: the rank whose shards the file has; None for a file of whole tensors, which can be
            read without a manifest.
    """

    save: str
    rank: int | None = None

    def to_text(self) -> str:
        """The text in the header."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, folder: Folder, file: str, header: Header) -> Mark | None:
        """The mark in a header; None if another program wrote the file."""
        text = header.metadata.get(MARK_KEY)
        if text is None:
            return None
        try:
            values = parse_json(text.encode())
            save, rank = entry(values, "save", str), values.get("rank")
            if rank is not None and type(rank) is not int:
                raise LayoutError(f"'rank' is {quoted(rank)}")
            return cls(save, rank)
        except LayoutError as error:
            raise CheckpointError(
                f"{folder.root / file} has a damaged {MARK_KEY}: {error}."
            ) from None


def check_committed(
    folder: Folder, headers: Mapping[str, Header], *, of_one_save: bool = False
) -> None:
    """Refuse files that need a manifest in a folder that has none.

    Args:
        folder: the folder of the files.
        headers: the headers of the files that are read.
        of_one_save: also refuse files that different saves wrote.
    """
    marks = {file: Mark.of(folder, file, header) for file, header in headers.items()}
    for file, mark in marks.items():
        if mark is not None and mark.rank is not None:
            raise CheckpointError(
                f"{folder.root} was never committed: {file} has shards of rank {mark.rank}, and "
                f"there is no {FILE_NAME}. Call commit_shards when all ranks have saved, or run an "
                "interrupted reshard again."
            )
    first, *others = marks or [""]
    odd = [file for file in others if marks[file] != marks[first]]
    if of_one_save and odd:
        raise CheckpointError(
            f"{folder.root}: {first} and {odd[0]} were written by two different saves; copy all "
            "files of one of them."
        )


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A rank's shard of a tensor: the file that has it, and the checksum of its bytes."""

    file: str
    checksum: str


@dataclass(frozen=True)
class ShardedTensor:
    """A tensor's dtype, its layout, and the shard of every rank of the layout."""

    dtype: str
    layout: Layout
    shards: Mapping[int, StoredShard]


@dataclass(frozen=True)
class Manifest:
    """The tensors of a checkpoint by name, and the save that wrote each of its files.

    Law (tests/checkpoint/test_manifest.py): ``Manifest.from_json(x.to_json()) == x``.

    Raises:
        CheckpointError: there is no tensor, or a shard or a file is missing or superfluous.
    """

    tensors: Mapping[str, ShardedTensor]
    saves: Mapping[str, str]

    def __post_init__(self) -> None:
        if not self.tensors:
            raise CheckpointError("it names no tensor")
        for name, tensor in self.tensors.items():
            missing = sorted(set(tensor.layout.ranks) ^ set(tensor.shards))
            if missing:
                raise CheckpointError(
                    f"tensor {quoted(name)} {tensor.layout} needs a shard of each of its ranks and "
                    f"of no others; that of rank {missing[0]} is missing or too much."
                )
        files = {shard.file for tensor in self.tensors.values() for shard in tensor.shards.values()}
        if odd := sorted(files ^ set(self.saves)):
            raise CheckpointError(
                f"file {quoted(odd[0])} needs the name of its save and a shard of a tensor"
            )

    def to_json(self) -> dict[str, Any]:
        """JSON values: shards in ascending order of ranks, files by their number in a list."""
        files = sorted(self.saves)
        number = {file: i for i, file in enumerate(files)}
        tensors = {
            name: {
                "dtype": tensor.dtype,
                "layout": str(tensor.layout),
                "shards": [[number[s.file], s.checksum] for _, s in sorted(tensor.shards.items())],
            }
            for name, tensor in sorted(self.tensors.items())
        }
        saves = [self.saves[file] for file in files]
        return {
            "format": FORMAT, "version": VERSION, "files": files, "saves": saves, "tensors": tensors
        }  # fmt: skip

    def to_text(self) -> str:
        """The text of the file: one line a tensor."""
        values = self.to_json()
        lines = (f"{json.dumps(n)}: {json.dumps(t)}" for n, t in values.pop("tensors").items())
        head = json.dumps(values)[:-1]
        return f'{head}, "tensors": {{\n' + ",\n".join(lines) + "\n}}\n"

    @classmethod
    def from_json(cls, values: Any) -> Manifest:
        """Read the values that ``to_json`` gives.

        Raises:
            CheckpointError, LayoutError: the values have another form.
        """
        form, version = entry(values, "format", str), entry(values, "version", int)
        if form != FORMAT or version not in _READ_VERSIONS:
            raise CheckpointError(
                f"it is {quoted(form)} version {quoted(version)}; this reads {FORMAT} versions "
                f"{' and '.join(map(str, _READ_VERSIONS))}"
            )
        files = [check_file_name(file, "it") for file in entry(values, "files", list)]
        saves = entry(values, "saves", list)
        if len(files) != len(saves) or not all(isinstance(save, str) for save in saves):
            raise CheckpointError(f"it has {len(files)} files and {quoted(saves)} as their saves")
        tensors = entry(values, "tensors", dict)
        return cls(
            {name: _tensor(name, value, files) for name, value in tensors.items()},
            dict(zip(files, saves, strict=True)),
        )

    @classmethod
    def load(cls, folder: Folder) -> Manifest:
        """Read the manifest of the checkpoint in a folder."""
        try:
            return cls.from_json(folder.read_json(FILE_NAME, MAX_BYTES))
        except (CheckpointError, LayoutError) as error:
            raise CheckpointError(
                f"{folder.root / FILE_NAME} is no manifest: {str(error).rstrip('.')}."
            ) from None


def _tensor(name: str, value: Any, files: list[str]) -> ShardedTensor:
    dtype, text = dtype_name(entry(value, "dtype", str)), entry(value, "layout", str)
    found = [_shard(name, shard, files) for shard in entry(value, "shards", list)]
    layout = Layout.parse(text)
    if len(layout.ranks) != len(found):
        raise CheckpointError(
            f"tensor {quoted(name)} has {len(found)} shards and the layout {quoted(text)}"
        )
    return ShardedTensor(dtype, layout, dict(zip(sorted(layout.ranks), found, strict=True)))


def _shard(name: str, value: Any, files: list[str]) -> StoredShard:
    if (
        not isinstance(value, list)
        or [type(v) for v in value] != [int, str]
        or not 0 <= value[0] < len(files)
    ):
        raise CheckpointError(
            f"tensor {quoted(name)} has the shard {quoted(value)}; expected [file number, checksum]"
        )
    try:
        return StoredShard(files[value[0]], check_checksum(value[1]))
    except CheckpointError as error:
        raise CheckpointError(f"tensor {quoted(name)}: {error}") from None


def stored_tensors(
    folder: Folder, manifest: Manifest
) -> tuple[dict[str, StoredTensor], dict[str, Header]]:
    """The tensors of a manifest, with the position of each shard, and the headers of the files.

    Raises:
        CheckpointError: a file is missing, belongs to another save, or does not hold exactly the
            shards that the manifest names.
    """
    headers = {file: read_header(folder, file) for file in manifest.saves}
    for file, save in manifest.saves.items():
        mark = Mark.of(folder, file, headers[file])
        if mark is None or mark.save != save:
            raise CheckpointError(
                f"{folder.root / file} is not the file that {FILE_NAME} commits: another save "
                "wrote it. The two saves must not be mixed; save again into a new folder."
            )
    held = {(shard.file, n) for n, t in manifest.tensors.items() for shard in t.shards.values()}
    for file, header in headers.items():
        if odd := [name for name in header.entries if (file, name) not in held]:
            raise CheckpointError(
                f"{folder.root / FILE_NAME} leaves out tensor {quoted(odd[0])}, which {file} holds."
            )
    out = {}
    for name, tensor in manifest.tensors.items():
        blocks = tuple(
            _block(folder, name, tensor, rank, headers[tensor.shards[rank].file])
            for rank in tensor.shards
        )
        shape = tensor.layout.shape
        out[name] = StoredTensor(name, tensor.dtype, shape, blocks, tensor.layout.rvd.v)
    return out, headers


def _block(
    folder: Folder, name: str, tensor: ShardedTensor, rank: int, header: Header
) -> StoredBlock:
    cell, shard = tensor.layout.cell(rank), tensor.shards[rank]
    found = header.entries.get(name)
    if found is None or (found.dtype, found.shape) != (tensor.dtype, cell.box.shape):
        has = "does not hold it" if found is None else f"holds {found.dtype} {found.shape}"
        raise CheckpointError(
            f"tensor {name!r}, rank {rank}: {folder.root / FILE_NAME} says {tensor.dtype} "
            f"{cell.box.shape}, and {shard.file} {has}; one of the files is of another checkpoint."
        )
    try:
        checksum = check_checksum(shard.checksum, found.num_bytes)
    except CheckpointError as error:
        raise CheckpointError(
            f"{folder.root / FILE_NAME}: tensor {quoted(name)}, rank {rank}: {error}."
        ) from None
    extent = Extent(shard.file, found.start, found.num_bytes, found.shape, checksum=checksum)
    return StoredBlock.whole(extent, cell.box, cell.part)
