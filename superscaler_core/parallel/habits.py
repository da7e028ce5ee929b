"""Habits: what users of torch's modules call on a parallel model, and what there is instead."""

from __future__ import annotations

from typing import Any

INSTEAD = {
    "train": "modes are those of the model that was given to parallelize: call model.train() there",
    "eval": "evaluate runs in eval() mode; for steps, call eval() of the model that was given to "
    "parallelize",
    "zero_grad": "call zero_grad() of the optimizer",
    "no_sync": "for accumulation, step several times inside scaled(1 / n), then step the optimizer",
    "module": "state_dict() has the names of the model itself; the model that was given to "
    "parallelize keeps its first values",
    "to": "device and dtype are options of parallelize",
    "cuda": "device is an option of parallelize",
    "half": "dtype is an option of parallelize; or call it under torch.autocast",
    "bfloat16": "dtype is an option of parallelize; or call it under torch.autocast",
    "float": "dtype is an option of parallelize",
    "modules": "it has no modules, but parameters() and named_parameters()",
    "named_modules": "it has no modules, but parameters() and named_parameters()",
    "named_buffers": "it is parallel already; state_dict() has its buffers",
    "backward": "step runs forward and backward",
}
"""Names of torch's modules and wrappers that a parallel model does not have."""


class Habits:
    """Errors that say what there is instead of a habit of torch."""

    def __getattr__(self, name: str) -> Any:
        kind = type(self).__name__
        hint = f": {INSTEAD[name]}." if name in INSTEAD else "."
        raise AttributeError(
            f"{kind!r} object has no attribute {name!r}{hint}", name=name, obj=self
        )


class Results(dict[str, Any]):
    """Results by name; an error says which there are."""

    def __missing__(self, name: str) -> Any:
        raise KeyError(
            f"no result {name!r}: the steps keep {', '.join(self) or 'none'}; name it in "
            "step_results=(...) of parallelize."
        )
