"""The plan engine uses only public names of rvdcomm, and calls no collectives directly."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import rvdcomm as rv
import rvdcomm.checkpoint
import rvdcomm.cli
import rvdcomm.collector
import rvdcomm.units
import rvdcomm.whole_file
import superscaler_core

FILES = sorted(Path(superscaler_core.__file__).parent.rglob("*.py"))
PUBLIC = {
    "rvdcomm": {*rv.__all__, "__version__"},
    "rvdcomm.checkpoint": set(rvdcomm.checkpoint.__all__),
    "rvdcomm.cli": set(rvdcomm.cli.__all__),
    "rvdcomm.collector": set(rvdcomm.collector.__all__),
    "rvdcomm.units": set(rvdcomm.units.__all__),
    "rvdcomm.whole_file": set(rvdcomm.whole_file.__all__),
}
# Names that start and end a process group, and ask about its members.
SETUP = {
    "destroy_process_group",
    "get_backend",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_initialized",
}


def misuses(source: str) -> list[str]:
    """Names of rvdcomm or torch.distributed that a client must not use."""
    tree = ast.parse(source)
    modules: dict[str, str] = {}
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                modules[alias.asname or alias.name.partition(".")[0]] = alias.name
                if alias.name.startswith("rvdcomm.") and alias.name not in PUBLIC:
                    found.append(alias.name)
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {alias.name for alias in node.names}
            if node.module.partition(".")[0] == "rvdcomm":
                found += [f"{node.module}.{n}" for n in names - PUBLIC.get(node.module, set())]
            if node.module == "torch" and "distributed" in names:
                modules["distributed"] = "torch.distributed"
            if node.module.startswith("torch.distributed"):
                found += [f"{node.module}.{n}" for n in names - SETUP]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        owner = ast.unparse(node.value)
        module = modules.get(owner, owner)
        if module in PUBLIC and node.attr not in PUBLIC[module] and node.attr != "checkpoint":
            found.append(f"{module}.{node.attr}")
        if module == "torch.distributed" and node.attr not in SETUP:
            found.append(f"{module}.{node.attr}")
    return found


def test_the_engine_uses_public_names_and_no_collectives() -> None:
    found = {file.name: misuses(file.read_text()) for file in FILES}
    assert {name: names for name, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    [
        "from rvdcomm.layout.box import Box",
        "import rvdcomm.plans.planner",
        "import rvdcomm as rv\nrv.planner",
        "import rvdcomm as rv\nrv._C",
        "import torch.distributed as dist\ndist.all_reduce(x)",
        "import torch\ntorch.distributed.broadcast(x, 0)",
        "from torch import distributed\ndistributed.send(x, 1)",
        "from torch.distributed import isend",
        "from torch.distributed.nn.functional import all_gather",
    ],
)
def test_linter_finds_private_names_and_collectives(source: str) -> None:
    assert misuses(source)


def test_the_linter_lets_public_names_pass() -> None:
    source = "import rvdcomm as rv\nfrom rvdcomm.checkpoint import reshard\nrv.plan; rv.Box"
    assert misuses(source) == []
