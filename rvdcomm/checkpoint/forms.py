"""Forms: writers of the three kinds of results: sharded, whole, and DCP (torch.distributed)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rvdcomm.checkpoint import dcp, manifest
from rvdcomm.checkpoint.catalog import SHARDING_KEY
from rvdcomm.checkpoint.checksums import BlockSum, checksum_of
from rvdcomm.checkpoint.files import PartFile, Written, write_file
from rvdcomm.checkpoint.hugging_face import INDEX_NAME, WHOLE_NAME
from rvdcomm.checkpoint.safetensors_file import header_bytes
from rvdcomm.checkpoint.target import Target, TargetBatch
from rvdcomm.layout import Box, Holding, Layout

if TYPE_CHECKING:
    from torch import Tensor

Piece = tuple[Holding, Box]
Done = Iterable[tuple[TargetBatch, Mapping[str, Written]]]
"""Batches, each with the record of every file that was written, by file name."""


class Form(Protocol):
    """A writer for one kind of checkpoint."""

    def file_name(self, rank: int, batch: int, num_batches: int) -> str:
        """The name of the file of one rank and one batch."""

    def writers_of(self, cell: Holding) -> tuple[int, ...]:
        """The ranks whose files store a cell."""

    def begin(self, batch: TargetBatch, files: Mapping[int, PartFile]) -> None:
        """Write the part of each file that precedes the tensors."""

    def put(self, piece: Piece, data: Tensor, files: Mapping[int, PartFile]) -> None:
        """Write a piece of a cell; ``data`` is contiguous and alone in its storage."""

    def end(self, target: Target, files: Mapping[int, PartFile]) -> None:
        """Complete a tensor after all its pieces are written."""

    def finish(self, root: Path, batches: Sequence[TargetBatch], done: Done) -> None:
        """Write the description of the checkpoint after all its files are complete."""


class Safetensors:
    """One safetensors file per rank and batch, and the manifest that commits them.

    Args:
        is_whole: write files of whole tensors, in Hugging Face's form.
        save: the text that marks the files of this run (``Mark.save``).
        metadata: texts for the header of each file.
    """

    def __init__(
        self, is_whole: bool, save: str = "", metadata: Mapping[str, str] | None = None
    ) -> None:
        self.is_whole, self.save, self.metadata = is_whole, save, metadata or {}
        self._sums: dict[Holding, BlockSum] = {}

    def file_name(self, rank: int, batch: int, num_batches: int) -> str:
        if not self.is_whole:
            return f"rank-{rank:05}-{batch + 1:05}-of-{num_batches:05}.safetensors"
        if num_batches == 1:
            return WHOLE_NAME
        return f"model-{batch + 1:05}-of-{num_batches:05}.safetensors"

    def writers_of(self, cell: Holding) -> tuple[int, ...]:
        return cell.ranks

    def begin(self, batch: TargetBatch, files: Mapping[int, PartFile]) -> None:
        for rank, file in files.items():
            tensors = {t.name: (t.dtype, t.layout) for t in batch.targets_of(rank)}
            mark = manifest.Mark(self.save, None if self.is_whole else rank)
            header = rank_header(tensors, rank, mark, self.metadata)
            file.append(header)
            file.end_segment(checksum_of(header))

    def put(self, piece: Piece, data: Tensor, files: Mapping[int, PartFile]) -> None:
        from rvdcomm.checkpoint.reader import bytes_of

        cell, view = piece[0], bytes_of(data)
        self._sums.setdefault(cell, BlockSum()).update(view)
        for rank in cell.ranks:
            files[rank].append(view)

    def end(self, target: Target, files: Mapping[int, PartFile]) -> None:
        for cell in target.cells:
            checksum = self._sums.pop(cell, BlockSum()).text()
            for rank in cell.ranks:
                files[rank].end_segment(checksum)

    def finish(self, root: Path, batches: Sequence[TargetBatch], done: Done) -> None:
        tensors = {}
        for batch, files in done:
            # Segment 0 is the header.
            checksums = {rank: iter(files[name].segments[1:]) for rank, name in batch.files.items()}
            for target in batch.targets:
                shards = {
                    rank: manifest.StoredShard(batch.files[rank], next(checksums[rank])[1])
                    for rank in target.layout.ranks
                }
                tensors[target.name] = manifest.ShardedTensor(target.dtype, target.layout, shards)
        saves = {name: self.save for batch in batches for name in batch.files.values()}
        text = manifest.Manifest(tensors, saves).to_text()
        if self.is_whole and len(batches) != 1:
            write_file(root, INDEX_NAME, _index(batches).encode())
        write_file(root, manifest.FILE_NAME, text.encode())


def rank_header(
    tensors: Mapping[str, tuple[str, Layout]],
    rank: int,
    mark: manifest.Mark,
    metadata: Mapping[str, str],
) -> bytes:
    """Header of a file with a rank's shards, given dtype and layout of each tensor by name.

    If no layout has several value parts, which torch cannot express, the header also holds the
    offsets of the shards in torch's format. ``HuggingFaceStorageReader`` of
    ``torch.distributed.checkpoint`` can then read the files.
    """
    boxes = {name: layout.cell(rank).box for name, (_, layout) in tensors.items()}
    metadata = {"format": "pt", **metadata, manifest.MARK_KEY: mark.to_text()}
    if mark.rank is not None and all(layout.rvd.v == 1 for _, layout in tensors.values()):
        offsets = {
            name: {"saved_offsets": _offset(boxes[name], layout.shape)}
            for name, (_, layout) in tensors.items()
        }
        metadata |= {SHARDING_KEY: json.dumps(offsets), "DCP_VERSION": "1.0"}
    shards = {name: (dtype, boxes[name].shape) for name, (dtype, _) in tensors.items()}
    return header_bytes(shards, metadata)


def _offset(box: Box, shape: tuple[int, ...]) -> list[int]:
    """Offset of a shard. Torch identifies shards by offsets, so empty ones get the tensor's end."""
    if not box.is_empty:
        return list(box.lo)
    return [size - extent for size, extent in zip(shape, box.shape, strict=True)]


def _index(batches: Sequence[TargetBatch]) -> str:
    """Hugging Face's index, which names each tensor's file, of batches that are on one rank."""
    files, total_size = dict[str, str](), 0
    for batch in batches:
        ((rank, file),) = batch.files.items()
        files |= dict.fromkeys((target.name for target in batch.targets), file)
        total_size += sum(target.shard_bytes(rank) for target in batch.targets)
    values = {
        "metadata": {"total_size": total_size},
        "weight_map": dict(sorted(files.items())),
    }
    return json.dumps(values, indent=2) + "\n"


class Dcp:
    """Writer of files and description as ``dcp.save`` writes them, with one replica of each cell.

    The format has no place for a mark or for texts about the model. ``.metadata`` commits the
    files.
    """

    def __init__(self, save: str = "", metadata: Mapping[str, str] | None = None) -> None:
        pass

    def file_name(self, rank: int, batch: int, num_batches: int) -> str:
        return f"__{rank}_{batch}.distcp"

    def writers_of(self, cell: Holding) -> tuple[int, ...]:
        return cell.ranks[:1]

    def begin(self, batch: TargetBatch, files: Mapping[int, PartFile]) -> None:
        pass

    def put(self, piece: Piece, data: Tensor, files: Mapping[int, PartFile]) -> None:
        import torch

        file = files[piece[0].ranks[0]]
        stream: Any = _SummedStream(file)
        torch.save(data, stream)
        if stream.error is not None:
            raise stream.error
        file.end_segment(stream.sum.text())

    def end(self, target: Target, files: Mapping[int, PartFile]) -> None:
        pass

    def finish(self, root: Path, batches: Sequence[TargetBatch], done: Done) -> None:
        chunks = (chunk for batch, files in done for chunk in _chunks(batch, files))
        write_file(root, dcp.FILE_NAME, dcp.metadata_bytes(chunks))


def _chunks(batch: TargetBatch, files: Mapping[str, Written]) -> Iterator[dcp.Chunk]:
    """The pieces of a batch, in the order in which they were written, with their positions."""
    segments = {name: iter(written.segments) for name, written in files.items()}
    positions = dict.fromkeys(files, 0)
    for target in batch.targets:
        for _, pieces in pieces_of(target):
            for cell, box in pieces:
                file = batch.files[cell.ranks[0]]
                num_bytes, _ = next(segments[file])
                shape = target.layout.shape
                start = positions[file]
                yield dcp.Chunk(target.name, target.dtype, shape, box, file, start, num_bytes)
                positions[file] += num_bytes


class _SummedStream:
    """The stream to which ``torch.save`` writes.

    The first error is kept for the caller, because torch would raise another in its place.
    """

    def __init__(self, file: PartFile) -> None:
        self.file, self.sum = file, BlockSum()
        self.error: BaseException | None = None

    def write(self, data: Any) -> int:
        try:
            if self.error is None:
                self.sum.update(data)
                self.file.append(data)
        except BaseException as error:
            self.error = error
        return len(data)

    def flush(self) -> None:
        pass


def pieces_of(target: Target) -> Iterator[tuple[Box, list[Piece]]]:
    """For every window of a tensor, its intersections with the cells of the layout.

    An empty tensor yields one empty piece, so that every form records the tensor.
    """
    whole = Box.of_shape(target.layout.shape)
    if whole.is_empty:
        yield whole, [(target.cells[0], whole)]
    for window in target.windows():
        found = ((cell, cell.boxes[0].intersect(window)) for cell in target.cells)
        yield window, [(cell, box) for cell, box in found if box is not None]


FORMS: dict[str, Callable[..., Form]] = {
    "sharded": partial(Safetensors, is_whole=False),
    "whole": partial(Safetensors, is_whole=True),
    "dcp": Dcp,
}
"""Constructors of the forms, by the name of the kind of checkpoint; every run makes its own form.

Each takes ``save`` and ``metadata`` as ``Safetensors`` does.
"""
