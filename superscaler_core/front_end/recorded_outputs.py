"""Recorded outputs: hidden states and the like, which models of transformers record by hooks.

The library installs the hooks when they are first asked for. Inside of a trace this would be a
change of the model that a program does not make, so it is done before.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from superscaler_core.front_end.model_call import ModelCall


def install_recorders(model: nn.Module, call: ModelCall) -> None:
    """Install the hooks that a call asks for; the model computes the same.

    Args:
        model: a model of transformers, or of no library.
        call: its arguments, such as ``output_hidden_states=True``.
    """
    library: Any = sys.modules.get("transformers.utils.output_capturing")
    if library is None:
        return
    for module in model.modules():
        config = getattr(module, "config", None)
        known = library._CAN_RECORD_REGISTRY.get(module) if config is not None else None
        asked = (f"output_{name}" for name in known or ())
        if any(call.kwargs.get(name, getattr(config, name, False)) for name in asked):
            library.maybe_install_capturing_hooks(module)
