"""Shards: each rank of a training job writes its own shards, without a process group."""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor

from rvdcomm.api import fault_of, fault_of_mode, resolved
from rvdcomm.checkpoint import dcp, journal
from rvdcomm.checkpoint.checksums import check_checksum, checksum_of, placeholder
from rvdcomm.checkpoint.faults import as_checkpoint_error
from rvdcomm.checkpoint.files import (
    PartFile,
    make_folder,
    remove_files,
    remove_partial_files,
    sync_folder,
    write_new_file,
)
from rvdcomm.checkpoint.folder import Folder
from rvdcomm.checkpoint.forms import rank_header
from rvdcomm.checkpoint.manifest import (
    FILE_NAME,
    KEY_PREFIX,
    Manifest,
    Mark,
    ShardedTensor,
    StoredShard,
)
from rvdcomm.checkpoint.reader import bytes_of
from rvdcomm.checkpoint.safetensors_file import read_header
from rvdcomm.errors import CheckpointError, LayoutError, ShapeMismatchError
from rvdcomm.json_file import entry, parse_json
from rvdcomm.layout import Layout, dtype_name, parse_ranges, ranges_text
from rvdcomm.text import quoted

SAVED_KEY = KEY_PREFIX + "saved"
_FILE = re.compile(r"rank-(\d{5,})((?:\.[0-9a-f]{16})?)\.safetensors")
"""Files of shards: the number of the rank, and what ``_owner`` makes of the save's ``save_id``."""


@dataclass(frozen=True)
class Saved:
    """The record in the header of a rank's file, which ``commit_shards`` reads.

    Attributes:
        save_id: as passed to ``save_shards``.
        layouts_sha256: checksum of the layouts of all tensors, on all ranks.
        ranks: the ranks of these layouts, as text.
        shards: layout and checksum of each of the rank's tensors, by name.
    """

    save_id: str
    layouts_sha256: str
    ranks: str
    shards: Mapping[str, tuple[str, str]]


def save_shards(
    dst_dir: str | Path,
    tensors: Mapping[str, Tensor],
    layouts: Mapping[str, Layout],
    rank: int,
    *,
    save_id: str = "",
) -> None:
    """Write this rank's shards. When every rank has done so, one of them calls ``commit_shards``.

    Nothing can be read before the commit. No save replaces a file: those of saves with other
    ``save_id``s stay until one save is committed, which removes them. A rank saves only once with
    a ``save_id``, since it would be unknown whether other ranks' shards belong to its first or
    second save.

    Args:
        dst_dir: a folder that all ranks share; made if missing.
        tensors: by name, the shard of every tensor whose layout holds the rank,
            ``[*layouts[name].cell(rank).box.shape]``. On any device; not modified.
        layouts: the layout of every tensor, the same on all ranks.
        rank: this process's number in the layouts.
        save_id: a text that all ranks of this save pass and that no other save has, such as a
            random number that one rank broadcasts; pass it to ``commit_shards``, too.

    Raises:
        ShapeMismatchError: a tensor is not the shard that its layout gives this rank.
        LayoutError: there is no layout, or a tensor has no values to write, or keeps them
            elsewhere; the message says what to pass.
        CheckpointError: the folder holds another checkpoint, or this rank's shards already, or a
            file cannot be written; nothing of the rank's shards is left then.
    """
    _check(tensors, layouts, rank)
    with as_checkpoint_error(
        f"saving shards of rank {rank} into {dst_dir}", dst_dir, "save again, with another save_id"
    ):
        _write(make_folder(dst_dir), tensors, layouts, rank, save_id)


def _write(
    root: Path,
    tensors: Mapping[str, Tensor],
    layouts: Mapping[str, Layout],
    rank: int,
    save_id: str,
) -> None:
    name = _file_name(rank, save_id)
    if name in _check_open(root).names():
        raise CheckpointError(_saved_before(root, rank, save_id))
    ordered = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    dtypes = {name: dtype_name(tensors[name].dtype) for name in ordered}
    mark = Mark(uuid.uuid4().hex, rank)

    def header(checksums: Mapping[str, str]) -> bytes:
        saved = Saved(
            save_id,
            _sha256({name: str(layout) for name, layout in layouts.items()}),
            ranges_text(sorted({r for layout in layouts.values() for r in layout.ranks})),
            {name: (str(layouts[name]), checksums[name]) for name in ordered},
        )
        kinds = {name: (dtypes[name], layouts[name]) for name in ordered}
        return rank_header(kinds, rank, mark, {SAVED_KEY: json.dumps(asdict(saved))})

    # The checksums are known only after the data is written, so placeholders of the same length
    # are written first.
    checksums = {name: placeholder(tensors[name].nbytes) for name in ordered}
    file = PartFile(root, name, owner=mark.save)
    try:
        file.append(header(checksums))
        for name in ordered:
            data = bytes_of(resolved(tensors[name].detach()).cpu().contiguous())
            file.append(data)
            checksums[name] = checksum_of(data)
        file.overwrite_start(header(checksums))
        file.commit(replace=False)
    except FileExistsError:
        raise CheckpointError(_saved_before(root, rank, save_id)) from None
    finally:
        file.discard()
    try:
        sync_folder(root)
    except OSError:
        with suppress(OSError):
            remove_files(root, lambda other: other == file.path.name)
        raise


def _check_open(root: Path) -> Folder:
    """The folder, unless it holds a checkpoint of another form or one that is complete."""
    folder = Folder(root)
    names = folder.names()
    for name in (FILE_NAME, journal.FILE_NAME, dcp.FILE_NAME):
        if name in names:
            raise CheckpointError(_taken(root, name))
    return folder


def _taken(root: Path, name: str) -> str:
    return f"{root} holds a complete checkpoint or another one ({name}); use a new folder."


def _saved_before(root: Path, rank: int, save_id: str) -> str:
    return (
        f"{root} holds shards that rank {rank} saved before with save_id={save_id!r} and that "
        "were never committed; use a new folder, or a save_id that all ranks of this save pass "
        "and that no other save has."
    )


def _sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _check(tensors: Mapping[str, Tensor], layouts: Mapping[str, Layout], rank: int) -> None:
    if not layouts:
        raise LayoutError(
            f"save_shards: rank {rank} passes no layouts; there is no tensor to save."
        )
    expected = {name for name, layout in layouts.items() if rank in layout}
    if set(tensors) != expected:
        odd = sorted(set(tensors) ^ expected)
        raise ShapeMismatchError(
            f"save_shards: rank {rank} passes {len(tensors)} tensors and {len(expected)} layouts "
            f"hold it; they differ in {odd[:5]}."
        )
    for name, tensor in tensors.items():
        fault = fault_of_mode() or fault_of(tensor)
        if fault is not None:
            raise LayoutError(f"save_shards: rank {rank}: tensor {name!r} {fault}")
        shape = layouts[name].cell(rank).box.shape
        if tuple(tensor.shape) != shape:
            raise ShapeMismatchError(
                f"save_shards: rank {rank} passes {name!r} {list(tensor.shape)}, its shard under "
                f"{layouts[name]} is {list(shape)}."
            )


def commit_shards(
    dst_dir: str | Path, ranks: Iterable[int], *, save_id: str | None = None
) -> Manifest:
    """Make one checkpoint of the shards that ``ranks`` saved; only then can it be read.

    Of several jobs that save into one folder, one commits; the others get an error. Then the files
    of all other saves are removed from the folder.

    Args:
        dst_dir: the folder that the ranks passed to ``save_shards``.
        ranks: all ranks of the layouts. Files of other ranks are not part of the checkpoint.
        save_id: as passed to ``save_shards``. None takes the one save that is in the folder.

    Raises:
        CheckpointError: the folder holds a complete checkpoint, a rank's shards are missing,
            several saves are there and ``save_id`` is None, ranks disagree about a tensor, or a
            file cannot be read or written.
    """
    root = Path(dst_dir)
    with as_checkpoint_error(f"committing {root}", root, "commit again if it cannot be read"):
        folder = _check_open(root)
        ranks = sorted(set(ranks))
        owner = _owner_of(folder, ranks, save_id)
        manifest = _manifest(folder, ranks, owner)
        try:
            text = manifest.to_text().encode()
            write_new_file(root, FILE_NAME, text, uuid.uuid4().hex)
        except FileExistsError:
            raise CheckpointError(_taken(root, FILE_NAME)) from None
    # The checkpoint is complete. No other save can be committed here any more, so what these left
    # is of no use; it stays if it cannot be removed.
    with suppress(OSError):
        remove_partial_files(root)
        remove_files(root, lambda name: _FILE.fullmatch(name) and name not in manifest.saves)
    return manifest


def _owner_of(folder: Folder, ranks: list[int], save_id: str | None) -> str:
    """What the names of the files of one save have after the number of the rank."""
    if save_id is not None:
        return _owner(save_id)
    found = {match[2] for name in folder.names() if (match := _FILE.fullmatch(name))}
    if len(found) < 2:
        return next(iter(found), "")
    ids = sorted(
        _saved(folder, int(match[1]), match[2])[1].save_id
        for owner in found
        if (match := next(m for n in folder.names() if (m := _FILE.fullmatch(n)) and m[2] == owner))
    )
    raise CheckpointError(
        f"{folder.root} holds shards of {len(found)} saves, with save_id {quoted(ids)}; say which "
        "is to be committed: commit_shards(..., save_id=...)."
    )


def _manifest(folder: Folder, ranks: list[int], owner: str) -> Manifest:
    root = folder.root
    found: dict[str, dict[int, StoredShard]] = {}
    kinds: dict[str, tuple[str, str]] = {}
    saves: dict[str, str] = {}
    first: tuple[int, Saved] | None = None
    for rank in ranks:
        file = f"rank-{rank:05}{owner}.safetensors"
        mark, saved, dtypes = _saved(folder, rank, owner)
        for name, (layout, checksum) in saved.shards.items():
            kind = (dtypes[name], layout)
            if kinds.setdefault(name, kind) != kind:
                raise CheckpointError(
                    f"{root}: rank {rank} saved {name!r} as {' '.join(kind)}, a rank before it as "
                    f"{' '.join(kinds[name])}."
                )
            found.setdefault(name, {})[rank] = StoredShard(file, checksum)
            saves[file] = mark.save
        first = first or (rank, saved)
        _check_same_save(root, first, (rank, saved))
    if first is None:
        raise CheckpointError(f"{root}: commit_shards needs the ranks that saved, got none.")
    if missing := sorted(set(parse_ranges(first[1].ranks)) - set(ranks)):
        raise CheckpointError(
            f"{root}: the layouts hold ranks {first[1].ranks}, and commit_shards was not given "
            f"{ranges_text(missing)}."
        )
    try:
        tensors = {
            name: ShardedTensor(dtype, Layout.parse(layout), found[name])
            for name, (dtype, layout) in kinds.items()
        }
        return Manifest(tensors, saves)
    except (CheckpointError, LayoutError) as error:
        files = quoted(sorted(saves))
        raise CheckpointError(
            f"{root}: a header of {files} is damaged: {str(error).rstrip('.')}; save again."
        ) from None


def _check_same_save(root: Path, a: tuple[int, Saved], b: tuple[int, Saved]) -> None:
    for what, of_a, of_b in (
        ("save_id", a[1].save_id, b[1].save_id),
        ("the sha256 of all layouts", a[1].layouts_sha256, b[1].layouts_sha256),
    ):
        if of_a != of_b:
            raise CheckpointError(
                f"{root}: ranks {a[0]} and {b[0]} saved two different checkpoints: {what} is "
                f"{quoted(of_a)} and {quoted(of_b)}; save again on all ranks."
            )


def _saved(folder: Folder, rank: int, owner: str) -> tuple[Mark, Saved, dict[str, str]]:
    """The mark of a rank's file, what was saved in it, and the dtype of each tensor."""
    name = f"rank-{rank:05}{owner}.safetensors"
    if name not in folder.names():
        others = [n for n in folder.names() if _FILE.fullmatch(n)]
        there = f" ({quoted(others[0])} is of another rank or save)" if others else ""
        raise CheckpointError(
            f"{folder.root}: rank {rank} has saved no shards as {name}{there}; call save_shards on "
            "it, wait for all ranks, then commit_shards on one."
        )
    header = read_header(folder, name)
    mark = Mark.of(folder, name, header)
    try:
        values = parse_json(header.metadata.get(SAVED_KEY, "").encode())
        shards = {n: tuple(v) for n, v in entry(values, "shards", dict).items()}
        is_known = mark is not None and mark.rank == rank and set(shards) == set(header.entries)
        if mark is None or not is_known or not all(map(_is_texts, shards.values())):
            raise LayoutError(f"its mark is {mark} and its shards are {quoted(list(shards))}")
        for shard_name, (_, checksum) in shards.items():
            check_checksum(checksum, header.entries[shard_name].num_bytes)
        save_id, layouts, ranks = (
            entry(values, key, str) for key in ("save_id", "layouts_sha256", "ranks")
        )
        parse_ranges(ranks)  # An error for a text that no save wrote.
        dtypes = {n: e.dtype for n, e in header.entries.items()}
        return mark, Saved(save_id, layouts, ranks, shards), dtypes
    except (CheckpointError, LayoutError, TypeError) as error:
        raise CheckpointError(
            f"{folder.root / name} is no file of save_shards of rank {rank}: {error}."
        ) from None


def _is_texts(values: tuple[object, ...]) -> bool:
    return len(values) == 2 and all(isinstance(value, str) for value in values)


def _file_name(rank: int, save_id: str) -> str:
    return f"rank-{rank:05}{_owner(save_id)}.safetensors"


def _owner(save_id: str) -> str:
    """What the file names of a save have after the number of the rank (``_FILE``)."""
    return f".{_sha256(save_id)[:16]}" if save_id else ""
