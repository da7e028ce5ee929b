"""Code: the files of a commit as values, which comments and docstrings do not change."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from functools import lru_cache
from hashlib import sha256


def git(*words: str, given: str = "") -> bytes | None:
    """What a git command prints; None if it fails."""
    done = subprocess.run(["git", *words], input=given.encode(), capture_output=True, check=False)
    return None if done.returncode else done.stdout


@lru_cache
def trees_of(commit: str, paths: tuple[str, ...]) -> str | None:
    """The git hashes of some paths at a commit; None if there is no such commit or path."""
    found = git("rev-parse", *(f"{commit}:{path}" for path in paths))
    return None if found is None else found.decode()


@lru_cache
def code_of(commit: str, paths: tuple[str, ...]) -> str | None:
    """A hash of the files under some paths at a commit, of Python files without their prose.

    Prose is comments, docstrings and other strings that are statements.

    Args:
        commit: the name of a commit that does not move.
        paths: files and folders of the repository.

    Returns:
        None if there is no such commit or path.
    """
    if trees_of(commit, paths) is None:
        return None
    listed = (git("ls-tree", "-r", commit, "--", *paths) or b"").decode().splitlines()
    # A line is "<mode> blob <hash>\t<path>".
    blobs = {path: words.split()[2] for words, path in (line.split("\t") for line in listed)}
    texts = dict(zip(blobs.values(), _contents([*blobs.values()]), strict=True))
    lines = [
        f"{path} {_without_prose(texts[blob]) if path.endswith(('.py', '.pyi')) else blob}"
        for path, blob in sorted(blobs.items())
    ]
    return sha256("\n".join(lines).encode()).hexdigest()


def _contents(blobs: list[str]) -> Iterator[bytes]:
    """The contents of some blobs; git prints each behind a line "<hash> blob <size>"."""
    printed = git("cat-file", "--batch", given="\n".join(blobs)) or b""
    start = 0
    for _ in blobs:
        end = printed.index(b"\n", start)
        size = int(printed[start:end].split()[2])
        yield printed[end + 1 : end + 1 + size]
        start = end + 1 + size + 1


@lru_cache(maxsize=4096)
def _without_prose(text: bytes) -> str:
    """A hash of a file's syntax tree without the strings that are statements."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not _is_prose(each)]  # type: ignore[attr-defined]
    return sha256(ast.dump(tree).encode()).hexdigest()


def _is_prose(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
