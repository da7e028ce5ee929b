"""Renamed: a model with every module and parameter under another attribute name."""

from __future__ import annotations

from torch import nn


def renamed(model: nn.Module) -> nn.Module:
    """Give all modules and parameters other names, without changes to the model's own code.

    Each module gets a ``__getattr__`` that maps an old name to the new one. The items of lists keep
    their names.
    """
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        names: dict[str, str] = {}
        for table in (module._modules, module._parameters):
            for name in list(table):
                names[name] = f"x_{name[::-1]}"
                table[names[name]] = table.pop(name)  # type: ignore[assignment]
        module.__class__ = _under(type(module), names)
    return model


def _under(kind: type[nn.Module], names: dict[str, str]) -> type[nn.Module]:
    def get(self: nn.Module, name: str) -> object:
        return kind.__getattr__(self, names.get(name, name))

    made = type(kind.__name__, (kind,), {"__getattr__": get})
    made.__module__ = kind.__module__
    return made
