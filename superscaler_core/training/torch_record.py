"""Torch record: what torch recorded of this process, in a form that its analysis reads."""

from __future__ import annotations

import pickle
from typing import Any

import torch

import rvdcomm as rv

SCHEMA = "2.10"
"""The version of the schema if torch has no record."""

_DUMPS = ("_dump_fr_trace", "_dump_nccl_trace")
"""torch's functions: of gloo and others, and of NCCL."""


def recorded_by_torch() -> dict[str, Any]:
    """What torch's flight recorder knows of this process, with the ranks of all groups.

    torch records collectives if ``TORCH_FR_BUFFER_SIZE`` was above 0 when a group was made. Of gloo
    it records no messages between two ranks, and leaves out which ranks a group has; without these
    its analysis (``torchfrtrace``) fails, so they are added here.

    >>> # record = recorded_by_torch()
    >>> # record["entries"][-1]["profiling_name"]
    >>> # 'gloo:all_reduce'

    Returns:
        The record as torch's schema has it: ``version``, ``pg_config``, ``entries`` and more. Under
        ``unmatched_entries`` are entries of groups that torch does not know any more.
    """
    found: dict[str, Any] = {"version": SCHEMA, "pg_config": {}, "entries": []}
    for name in _DUMPS:
        dump = getattr(torch._C._distributed_c10d, name, None)
        part = {} if dump is None else pickle.loads(dump())
        found = {
            **found,
            **{key: value for key, value in part.items() if key not in ("pg_config", "entries")},
            "pg_config": {**found["pg_config"], **part.get("pg_config", {})},
            "entries": [*found["entries"], *part.get("entries", [])],
        }
    groups = {**_named(found["pg_config"]), **_groups()}
    entries = found["entries"]
    return {
        **found,
        "pg_config": groups,
        "entries": [each for each in entries if each["process_group"][0] in groups],
        "unmatched_entries": [each for each in entries if each["process_group"][0] not in groups],
    }


def _named(config: dict[str, Any]) -> dict[str, Any]:
    """The groups of torch's record that have a name; gloo's have none."""
    return {name: group for name, group in config.items() if name}


def _groups() -> dict[str, dict[str, str]]:
    """The groups of this process, as the schema has them, by their names."""
    return {
        name: {"name": name, "desc": group.desc, "ranks": str(list(group.ranks))}
        for name, group in rv.known_groups().items()
    }
