"""Sources: the model and the sProgram that a command line names, with their settings."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rvdcomm.cli import UsageError
from superscaler_core.checks import one_of
from superscaler_core.cost import PROFILES
from superscaler_core.errors import PlanError
from superscaler_core.models import MODELS, config_of
from superscaler_core.plan import DECISIONS_SUFFIX, Decisions, Plan
from superscaler_core.planners.auto import Setting
from superscaler_core.planners.auto.families import Filling, named
from superscaler_core.plans import PLANS, every
from superscaler_core.plans import option_texts as texts
from superscaler_core.plans.row import OptionReader


@dataclass(frozen=True)
class MadeModel:
    """A model, with example inputs of one microbatch.

    Attributes:
        model: to be captured.
        args, kwargs: arguments of its forward, by position and by name.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def to(self, dtype: torch.dtype) -> MadeModel:
        """The same in another floating-point dtype."""

        def cast(leaf: Tensor) -> Tensor:
            return leaf.to(dtype) if leaf.is_floating_point() else leaf

        inputs = pytree.tree_map_only(Tensor, cast, (self.args, dict(self.kwargs)))
        return MadeModel(self.model.to(dtype), *inputs)


@dataclass(frozen=True)
class Source:
    """A model or an sProgram.

    Attributes:
        name: its name on the command line.
        defaults: the settings that ``--set`` may change, with their defaults.
        readers: parsers of settings that are not parsed by the type of their default.
        also: further settings, used unless the other source has them; their default is None.
        microbatch: for a plan of microbatches of one size, their samples; otherwise 0.
        call: builds the model for a microbatch size and settings, or fills a plan by settings.
        recycled: for a model, as in ``models.Model``.
    """

    name: str
    defaults: Mapping[str, Any]
    call: Callable[..., Any]
    recycled: Mapping[str, int] = field(default_factory=dict)
    readers: Mapping[str, OptionReader] = field(default_factory=dict)
    also: Collection[str] = ()
    microbatch: int = 0


def model_source(name: str, preset: str | None) -> Source:
    """A model by its name, or by a function ``file.py:function`` that returns it and its inputs.

    Raises:
        UsageError: there is no such model; the message names similar ones.
    """
    if ":" in name:
        if preset is not None:
            raise UsageError(f"--preset {preset}: {name} has none; give its arguments by --set.")
        function = _function(name)
        return Source(name, _settings(function, skip="batch"), _caller(function))
    _check_known("model", name, MODELS)
    _check_known(f"preset of {name}", preset or "tiny", MODELS[name].config.presets())
    config = config_of(name, preset or "tiny")

    def make(batch: int, **settings: Any) -> MadeModel:
        for word, value in settings.items():
            # Sizes are above 0, unless 0 is their usual value and means that there is none.
            if type(value) is int and value < min(1, getattr(config, word)):
                raise UsageError(f"{name}: {word}={value} is too small a size.")
        made = config_of(name, preset or "tiny", **settings)
        with torch.device("cpu"):
            inputs = MODELS[name].example_inputs(made, batch, torch.Generator().manual_seed(0))
        return MadeModel(MODELS[name].build(made), tuple(inputs))

    return Source(name, vars(config), make, MODELS[name].recycled)


def plan_source(name: str) -> Source:
    """An sProgram by its name, by a function ``file.py:function``, or by a file of decisions.

    The name may be one of a search's table (``named``).

    Raises:
        UsageError: there is no such sProgram; the message names similar ones.
        PlanError: a name of a search's table has a choice that is not known.
    """
    setting = named(name)
    if setting is not None:
        return _setting_source(name, setting)
    if name.endswith(DECISIONS_SUFFIX):
        if not Path(name).is_file():
            raise UsageError(f"{name}: there is no such file of decisions.")
        return Source(name, {}, lambda plan: plan.decide(Decisions.load(name), fit=True))
    is_shipped = name in PLANS
    if ":" not in name:
        _check_known("plan", name, PLANS)
    function = _function(name) if ":" in name else PLANS[name]
    first = next(iter(inspect.signature(function).parameters), None)
    if first is None:
        raise UsageError(f"{name} takes no plan: an sProgram is a function of one.")

    def fill(plan: Plan, **given: Any) -> None:
        every.fill(plan, function, given)

    takes = _settings(function, skip=first)
    readers = texts.readers_of(function) if is_shipped else texts.EVERY
    also = [word for word in every.NAMES if word not in takes]
    return Source(name, takes, fill, readers=readers, also=also)


def _setting_source(name: str, setting: Setting) -> Source:
    """The sProgram that a search's table names; it takes the number of microbatches."""
    default = MICROBATCHES_A_STAGE * setting.pp if setting.pp > 1 else 1
    num_devices = setting.dp * setting.tp * setting.pp

    def fill(plan: Plan, *, microbatches: int = default) -> None:
        if len(plan.devices) != num_devices:
            raise PlanError(
                f"{name!r} is of {num_devices} devices; here are {len(plan.devices)}: give "
                f"--devices {num_devices}."
            )
        Filling(setting, PROFILES["v100"], 0, microbatches)(plan)

    return Source(name, {"microbatches": default}, fill, microbatch=setting.microbatch)


MICROBATCHES_A_STAGE = 4
"""Microbatches per stage of a pipeline that a search's table names, if none are said."""


# --- settings -----------------------------------------------------------------------------------


def settings_of(
    model: Source, plan: Source, given: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split settings, such as ``layers=4`` or ``plan.tp=2``, between the model and the sProgram.

    Raises:
        UsageError: neither source has the setting, both have it, or the value has another type.
    """
    sources = {"model": model, "plan": plan}
    found: dict[str, dict[str, Any]] = {"model": {}, "plan": {}}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--set {text}: expected NAME=VALUE, such as layers=4.")
        owner, _, name = key.rpartition(".")
        whose = [owner] if owner else [w for w in sources if name in sources[w].defaults]
        whose = whose or [w for w in sources if name in sources[w].also]
        if len(whose) > 1:
            raise UsageError(
                f"--set {text}: the model {model.name} and the plan {plan.name} both take {name}; "
                f"say model.{name}= or plan.{name}=."
            )
        source = sources.get(whose[0]) if whose else None
        if source is None or name not in {*source.defaults, *source.also}:
            raise UsageError(f"--set {text}: {_known_text(sources, key)}")
        reader = source.readers.get(name) or texts.reader_of(source.defaults.get(name, False))
        try:
            found[whose[0]][name] = texts.read(f"--set {text}", value, reader)
        except PlanError as error:
            raise UsageError(str(error)) from None
    return found["model"], found["plan"]


def _known_text(sources: Mapping[str, Source], key: str) -> str:
    known = [name for source in sources.values() for name in (*source.defaults, *source.also)]
    near = get_close_matches(key.rpartition(".")[2], known, 1)
    said = (
        f"the {what} {source.name} takes {', '.join(source.defaults) or 'nothing'}"
        for what, source in sources.items()
    )
    return "; ".join(said) + "." + (f" Is it {near[0]}?" if near else "")


def _settings(function: Callable[..., Any], skip: str) -> dict[str, Any]:
    """The arguments with a default."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.name != skip and p.default is not p.empty}


# --- functions in files -------------------------------------------------------------------------


def _function(text: str) -> Callable[..., Any]:
    """The function that ``file.py:function`` names; the file is run.

    Raises:
        UsageError: there is no such file or function, or the file fails.
    """
    where, _, name = text.rpartition(":")
    path = Path(where).resolve()
    if not path.is_file():
        raise UsageError(f"{text}: there is no file {where}.")
    module = sys.modules.get(path.stem)
    if module is None or getattr(module, "__file__", None) != str(path):
        if module is not None:
            raise UsageError(f"{text}: a module {path.stem!r} is there already; rename the file.")
        module = _run(path, text)
    function = getattr(module, name, None)
    if not callable(function):
        known = [n for n, value in vars(module).items() if inspect.isfunction(value)]
        near = get_close_matches(name, known, 3, 0.0)
        raise UsageError(f"{text}: {where} has no function {name!r}; it has {', '.join(near)}.")
    found: Callable[..., Any] = function
    return found


def _run(path: Path, text: str) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{text}: {path.name} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    # Registered under its own name, so that generated code can call the functions it registers.
    sys.modules[path.stem] = module
    # As for a script, modules beside it can be imported.
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[path.stem]
        raise UsageError(f"{text}: the file fails: {type(error).__name__}: {error}") from error
    return module


def _caller(function: Callable[..., Any]) -> Callable[..., MadeModel]:
    """A user's function, and what it returns as a ``MadeModel``."""
    takes_batch = "batch" in inspect.signature(function).parameters

    def make(batch: int, **settings: Any) -> MadeModel:
        made = function(**({"batch": batch} if takes_batch else {}), **settings)
        if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
            if isinstance(made[1], Mapping):
                return MadeModel(made[0], (), made[1])
            if isinstance(made[1], Sequence):
                return MadeModel(made[0], tuple(made[1]))
        raise UsageError(
            f"{function.__name__} returned {type(made).__name__}; a model's function returns "
            "(module, example_inputs), the inputs as a tuple, or as a dict by name."
        )

    return make


def _check_known(what: str, given: str, known: Mapping[str, object]) -> None:
    try:
        one_of(what, given, known)
    except PlanError as error:
        raise UsageError(str(error)) from None
