"""A program's folder: its files replace those of the program before all together, or not at all.

A save writes everything into a hidden folder inside, and last the mark: the names and checksums of
all files. Then one rename makes the hidden folder the committed one, and from there each file moves
to its place. A reader takes a file from the committed folder if it is still there. So at every
moment, wherever a save stops, the folder has the program before or the new one; a folder in which
files were removed or mixed by other means is told by its mark.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rvdcomm.whole_file import sync_folder, sync_tree
from superscaler_core.errors import PlanError

CONSTANTS = "constants.npz"
"""File with the values that depend on no input; it is read without unpickling."""
WEIGHTS = "weights"
"""File name of a checkpoint of the captured model's whole parameters."""
TOPOLOGY = "topology.json"
"""File name of the topology that a program was compiled for."""

_NARROW = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
_WIDER = {getattr(torch, name): torch.float32 for name in _NARROW}
"""Dtypes that numpy does not have; all their values are exact in float32."""

MARK = "program.json"
"""File with the name, bytes and checksum of every other file; without it there is no program."""

VERSION = 2
_RANK = re.compile(r"rank_(\d+)\.py")
_STAGE, _COMMITTED = ".saving-", ".committed"
_CHECKED_THEMSELVES = ".safetensors"
"""Weights: their checkpoint has checksums, and each rank reads only a part of such a file."""

File = tuple[int, str]
"""Number of bytes and sha256 of a file; no sha256 if the file has checksums itself."""


@contextmanager
def saving(folder: str | Path) -> Iterator[Path]:
    """A new folder for the files of a program, which become those of ``folder`` at the end.

    Processes that save into one folder do so one after another.

    Law (tests/superscaler_core/run/test_program_folder.py): wherever the block or a system call
    fails or the process is killed, a reader gets the program before or the new one.

    Raises:
        OSError: a file cannot be written; then the program before is unchanged.
    """
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root):
        _finish(root)
        for old in root.glob(f"{_STAGE}*"):
            shutil.rmtree(old, ignore_errors=True)
        stage = Path(tempfile.mkdtemp(prefix=_STAGE, dir=root))
        try:
            yield stage
            files = {name: _file(stage / name) for name in _names(stage)}
            (stage / MARK).write_text(_text(files))
            sync_tree(stage)
            stage.rename(root / _COMMITTED)
        except BaseException:
            shutil.rmtree(stage, ignore_errors=True)
            raise
        sync_folder(root)
        _finish(root)


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Hold the lock of a folder; the system releases it if this process dies."""
    descriptor = os.open(root, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _finish(root: Path) -> None:
    """Move the files of a committed program to their places; the mark is the last."""
    committed = root / _COMMITTED
    if (committed / MARK).exists():
        new = _entries(_mark(committed))
        with suppress(PlanError):
            for name in _entries(_mark(root)) - new:
                _remove(root / name)
        for name in [*sorted(new), MARK]:
            if (committed / name).exists():
                _remove(root / name)
                (committed / name).rename(root / name)
        sync_folder(root)
    shutil.rmtree(committed, ignore_errors=True)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _names(stage: Path) -> list[str]:
    """The files below a folder, with their folders inside it."""
    return sorted(str(p.relative_to(stage)) for p in stage.rglob("*") if p.is_file())


def _entries(files: Mapping[str, File]) -> set[str]:
    """The entries of the folder itself in which the files are."""
    return {Path(name).parts[0] for name in files}


def _file(path: Path) -> File:
    if path.suffix == _CHECKED_THEMSELVES:
        return path.stat().st_size, ""
    data = path.read_bytes()
    return len(data), hashlib.sha256(data).hexdigest()


def _text(files: Mapping[str, File]) -> str:
    return json.dumps({"version": VERSION, "files": files}, indent=1) + "\n"


def _mark(folder: Path) -> dict[str, File]:
    """The files that the mark of a folder names.

    Raises:
        PlanError: there is no mark, or it is of another form.
    """
    try:
        found = json.loads((folder / MARK).read_text())
        files = {name: tuple(file) for name, file in found["files"].items()}
        if found["version"] != VERSION or not all(map(_is_file, files.items())):
            raise ValueError("it has another form or version")
        return files
    except FileNotFoundError:
        raise PlanError(
            f"{folder} has no {MARK}: it is no program, or its save stopped before its end, or an "
            "earlier version wrote it; save the program again."
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PlanError(f"{folder / MARK} is damaged ({error}); save the program again.") from None


def _is_file(item: tuple[str, tuple[object, ...]]) -> bool:
    """Whether an item of a mark is a name inside the folder, with its bytes and checksum."""
    path, file = Path(item[0]), item[1]
    is_inside = bool(path.parts) and not path.is_absolute() and ".." not in path.parts
    return is_inside and list(map(type, file)) == [int, str]


@dataclass(frozen=True)
class ProgramFolder:
    """The complete program in a folder.

    Attributes:
        root: the folder.
        files: its files as the mark names them; others in the folder are not read.
    """

    root: Path
    files: Mapping[str, File]

    @classmethod
    def open(cls, folder: str | Path) -> ProgramFolder:
        """Read the mark.

        Raises:
            PlanError: the folder has no complete program.
        """
        root = Path(folder)
        committed = root / _COMMITTED
        with suppress(PlanError):
            return cls(root, _mark(committed))
        return cls(root, _mark(root))

    def __contains__(self, name: str) -> bool:
        """Whether the program has this file, or files in a folder of this name."""
        return name in _entries(self.files)

    @property
    def ranks(self) -> list[int]:
        """The ranks that have a file."""
        return sorted(int(found[1]) for found in map(_RANK.fullmatch, self.files) if found)

    @property
    def identity(self) -> str:
        """A text that differs between programs of other code or constants.

        Weights are compared when they are loaded. Modules are pickles, whose bytes may differ
        between processes that save one program.
        """
        read = {n: f for n, f in self.files.items() if _RANK.fullmatch(n) or n == CONSTANTS}
        return hashlib.sha256(_text(read).encode()).hexdigest()

    def path(self, name: str) -> Path:
        """Where a file or folder of the program is now."""
        committed = self.root / _COMMITTED / name
        return committed if committed.exists() else self.root / name

    def read(self, name: str) -> bytes:
        """The bytes of a file.

        Raises:
            PlanError: the file is missing, or is not the one that was saved.
        """
        try:
            data = self.path(name).read_bytes()
        except FileNotFoundError:
            data = None
        if data is None or (len(data), hashlib.sha256(data).hexdigest()) != self.files[name]:
            what = "is missing" if data is None else "is not the file that was saved"
            raise PlanError(
                f"{self.root / name} {what}: the folder mixes two programs, was copied in part, or "
                "is being saved now; save the program again, or copy all of it."
            )
        return data

    def checked(self, name: str) -> Path:
        """A file or folder whose files, other than weights, are those that were saved.

        Raises:
            PlanError: one is missing, or is not the one that was saved.
        """
        for inner, (num_bytes, sha256) in self.files.items():
            if Path(inner).parts[0] != name:
                continue
            if sha256:
                self.read(inner)
            elif not (path := self.path(inner)).is_file() or path.stat().st_size != num_bytes:
                raise PlanError(
                    f"{self.root / inner} is missing or is not the file that was saved; save the "
                    "program again, or copy all of it."
                )
        return self.path(name)


# --- constants ----------------------------------------------------------------------------------


def save_constants(folder: Path, constants: Mapping[str, Tensor]) -> None:
    """Write constants to a program's folder, each under its dtype and its name."""
    arrays = {
        f"{str(value.dtype).removeprefix('torch.')}:{name}": value.detach()
        .to(_WIDER.get(value.dtype, value.dtype))
        .cpu()
        .numpy()
        for name, value in constants.items()
    }
    with (folder / CONSTANTS).open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


def load_constants(data: bytes) -> dict[str, Tensor]:
    """Read the file that ``save_constants`` wrote."""
    found = {}
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        for key in arrays.files:
            dtype, _, name = key.partition(":")
            found[name] = torch.from_numpy(arrays[key]).to(getattr(torch, dtype))
    return found
