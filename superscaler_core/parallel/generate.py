"""Generate: text of a causal model of transformers, with keys and values where the plan cuts them.

``generate`` of transformers runs as it is, on a model whose forward is a program. Keys and values
are inputs and results of the program: each rank keeps the box that its part of the attention reads,
from one call to the next.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import rvdcomm as rv
from superscaler_core.errors import CaptureError, PlanError
from superscaler_core.front_end.model_call import ModelCall
from superscaler_core.hugging_face.cache import (
    counting_cache,
    mask_of,
    recording_cache,
    tensors_of,
    written_cache,
)
from superscaler_core.parallel.batch import Batch
from superscaler_core.parallel.batches import Batches
from superscaler_core.parallel.forward import Side
from superscaler_core.parallel.programs import Programs
from superscaler_core.parallel.returned import class_of, with_forward
from superscaler_core.rules.calls import is_literal
from superscaler_core.run.own_samples import OwnSamples
from superscaler_core.run.rank import Rank
from superscaler_core.run.tables import Tables, box_of
from superscaler_core.run.transport import Transport
from superscaler_core.training.checksum import checksum
from superscaler_core.training.same_call import digest_of

STEP = 32
"""Rooms of caches are multiples of so many tokens, so that calls share programs."""

CACHE, AT = "kv", "kv_at"
"""The arguments that have the cache, and the places at which new tokens are written."""

REFUSED: Mapping[str, str] = {
    "num_beams": "each text is continued by one token at a time, num_beams is 1",
    "assistant_model": "no tokens are proposed here",
    "prompt_lookup_num_tokens": "no tokens are proposed here",
    "guidance_scale": "it needs a second forward; call the model for both and mix their logits",
    "cache_implementation": "the cache lies where the plan cuts",
    "past_key_values": "a call begins with its prompts",
    "inputs_embeds": "give input_ids",
    "custom_generate": "the loop is that of the library",
    "max_time": "ranks would stop at different tokens; use max_new_tokens",
    "output_hidden_states": "call the model on the text, model(input_ids=...)",
    "output_attentions": "call the model on the text, model(input_ids=...)",
}
"""Options of ``generate`` that are refused where they are set, with what there is instead."""

_UNSET = {"num_beams": 1, "guidance_scale": 1}

Chosen = Callable[[Mapping[str, Any], Side], tuple[Rank, dict[str, Any]]]
"""From the arguments of a call to this rank of its program, and the program's inputs."""


class Generator:
    """Runs the forward of a causal model with a cache.

    Args:
        programs: the programs that train.
        transport: moves tensors between ranks.
        device: where this rank computes.
        choose: gives the program of a call.
    """

    def __init__(
        self, programs: Programs, transport: Transport, device: torch.device, choose: Chosen
    ) -> None:
        self._programs, self._model, self._device = programs, programs.model, device
        self._choose, self._layers = choose, self._seen_layers()
        names = [f"{CACHE} {number}" for number in range(2 * len(self._layers))]
        made = programs.of_model(
            self._with_cache(names), Batch(dims={AT: None}, check="first"), ("logits", *names),
            {name: f"{CACHE}.{number}" for number, name in enumerate(names)},
        )  # fmt: skip
        self.side = Side(made, SameTokens(made, transport))

    def generate(self, kwargs: Mapping[str, Any]) -> Any:
        """What ``generate`` of transformers returns; the same on all ranks.

        Raises:
            PlanError: it asks for what needs another cache.
        """
        ids = kwargs.get("input_ids", kwargs.get("inputs"))
        if not isinstance(ids, Tensor) or ids.dim() != 2:
            raise PlanError("generate takes input_ids [batch, tokens] of the prompts.")
        config, _ = self._shell(0)._prepare_generation_config(
            kwargs.get("generation_config"), **_options(kwargs)
        )
        for name, instead in REFUSED.items():
            value = kwargs.get(name, getattr(config, name, None))
            if value is not None and value is not False and value != _UNSET.get(name):
                said = repr(value) if is_literal(value) else type(value).__name__
                raise PlanError(f"generate does not take {name}={said}: {instead}.")
        length = ids.shape[1]
        most = config.max_new_tokens or max((config.max_length or 20) - length, 1)
        room = -(-(length + most) // STEP) * STEP
        self._check_window(room)
        given = {**kwargs, "past_key_values": counting_cache(room)}
        if (own := kwargs.get("generation_config")) is None:
            given["use_cache"] = True
        else:
            given["generation_config"] = copy.deepcopy(own)
            given["generation_config"].use_cache = True
        return self._shell(room).generate(**given)

    def _check_window(self, room: int) -> None:
        text = self._model.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]
        window = getattr(text, "sliding_window", None)
        if not getattr(text, "use_sliding_window", True):
            window = None
        window = window or getattr(text, "attention_chunk_size", None)
        if window and room > window:
            raise PlanError(
                f"generate attends to all {room} tokens of prompt and text here, and the model to "
                f"the last {window}: make the prompt or max_new_tokens shorter."
            )

    def _shell(self, room: int) -> Any:
        """The model with ``generate``, whose forward is a program."""
        kind, device, dtype = class_of(self._model), self._device, self._layers[0][0].dtype
        cache: dict[str, OwnSamples] = {}

        def forward(own: Any, **given: Any) -> Any:
            return self._run(room, cache, given)

        forward.__signature__ = inspect.signature(kind.forward)  # type: ignore[attr-defined]
        more = {
            "forward": forward, "__call__": forward,
            "device": property(lambda own: device), "dtype": property(lambda own: dtype),
        }  # fmt: skip
        made = copy.copy(self._model)
        made.__class__ = type(kind.__name__, (kind,), more)
        # ``generate`` leaves things on its model.
        made.__dict__ = dict(self._model.__dict__)
        return made

    def _run(self, room: int, cache: dict[str, Any], given: Mapping[str, Any]) -> Any:
        """One forward of ``generate``; ``cache`` has this rank's boxes from one to the next."""
        from transformers.modeling_outputs import CausalLMOutputWithPast

        ids, counted = given["input_ids"], given["past_key_values"]
        at = torch.arange(counted.seen, counted.seen + ids.shape[1], device=ids.device)
        mask = given.get("attention_mask")
        if mask is None:
            mask = torch.ones(len(ids), int(at[-1]) + 1, dtype=torch.long, device=ids.device)
        positions = given.get("position_ids")
        if positions is None:
            positions = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        dtype = self._layers[0][0].dtype
        shapes = [(len(ids), x.shape[1], room, x.shape[3]) for pair in self._layers for x in pair]
        call = {
            "input_ids": ids, "attention_mask": mask_of(mask, at, room, dtype),
            "position_ids": positions.expand(len(ids), -1).contiguous(), AT: at,
            # Of one element in memory: this rank reads its boxes instead.
            CACHE: [torch.zeros((), dtype=dtype).expand(shape) for shape in shapes],
        }  # fmt: skip
        try:
            rank, batch = self._choose(call, self.side)
        except CaptureError as error:
            raise PlanError(
                f"generate cannot run {type(self._model).__name__}, which has to take a mask "
                f"[batch, 1, tokens, room] and a cache: {error}"
            ) from error
        for result, name in rank.tables.carried.items():
            batch[name] = cache.get(result) or _zeros(rank.tables, name, dtype)
            _check_read(rank.tables, name, batch[name])
        rank.step(batch)
        for result, name in rank.tables.carried.items():
            cache[result] = rank.carried.get(result, batch[name])
        counted.seen += ids.shape[1]
        return CausalLMOutputWithPast(logits=rank.results["logits"], past_key_values=counted)

    # --- the model ------------------------------------------------------------------------------

    def _seen_layers(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of one token, without values, layer after layer."""
        model, seen = self._model, dict[int, tuple[Tensor, Tensor]]()
        config: Any = getattr(model, "config", None)
        is_text = hasattr(class_of(model), "generate")
        if not is_text or getattr(config, "is_encoder_decoder", False):
            what = "has an encoder" if is_text else "has no generate"
            raise PlanError(
                f"{type(model).__name__} {what}: generate is for causal models of text."
            )
        num = config.get_text_config(decoder=True).num_hidden_layers

        def forward(own: Any, self: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
            cache = recording_cache(num, seen)
            found = own(self, *args, **{**kwargs, "past_key_values": cache, "use_cache": True})
            return {"loss": found.logits.float().sum()}

        made = self._programs.of_model(with_forward(model, forward), Batch())
        made.captured(made.call((), {"input_ids": torch.zeros(1, 1, dtype=torch.long)}))
        if sorted(seen) != list(range(num)):
            raise PlanError(
                f"{type(model).__name__} keeps other things than keys and values of each of its "
                f"{num} layers, and generate keeps these alone."
            )
        return [tuple(x.to("meta") for x in seen[n]) for n in range(num)]  # type: ignore[misc]

    def _with_cache(self, names: list[str]) -> nn.Module:
        """The model with the cache as an argument, and as results of these names."""
        said = inspect.signature(class_of(self._model).forward).parameters
        last = {"logits_to_keep": 1} if "logits_to_keep" in said else {}

        def forward(own: Any, self: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
            cache = written_cache(kwargs.pop(CACHE), kwargs.pop(AT))
            more = {"past_key_values": cache, "use_cache": True, **last}
            logits = own(self, *args, **{**kwargs, **more}).logits[:, -1:] * 1
            kept = dict(zip(names, tensors_of(cache), strict=True))
            return {"loss": logits.float().sum(), "logits": logits, **kept}

        kinds = inspect.Parameter.KEYWORD_ONLY
        return with_forward(
            self._model, forward, *(inspect.Parameter(name, kinds) for name in (CACHE, AT))
        )


class SameTokens(Batches):
    """Batches of which all tokens, masks and positions are compared in every call.

    A rank whose text ended by a rule of its own, or that got other prompts, is then told so.
    """

    def is_due(self, call: ModelCall) -> bool:
        return False

    def form(self, call: ModelCall) -> int:
        tokens = (checksum(x) for x in call.tensors if not x.is_floating_point())
        return digest_of(str([super().form(call), *tokens]))


def _zeros(tables: Tables, name: str, dtype: torch.dtype) -> OwnSamples:
    """An empty cache: the box of an input that this rank's program reads."""
    boxes = [box_of(box) for given, box in tables.boxes.values() if given == name]
    dim, num = tables.samples_dim(name) or 0, tables.num_microbatches
    if not boxes:
        return OwnSamples(torch.zeros(0), rv.Box((0,), (0,)), dim)
    pairs = zip(zip(*(b.lo for b in boxes), strict=True), zip(*(b.hi for b in boxes), strict=True),
                strict=True)  # fmt: skip
    ends = [(min(lo), max(hi)) for lo, hi in pairs]
    ends.insert(dim, (0, num))
    box = rv.Box(tuple(lo for lo, _ in ends), tuple(hi for _, hi in ends))
    return OwnSamples(torch.zeros(box.shape, dtype=dtype), box, dim)


def _check_read(tables: Tables, name: str, held: OwnSamples) -> None:
    """Refuse a program that reads more of a cache than the one before has left on this rank."""
    lo, hi = (tuple(n for d, n in enumerate(ends) if d != held.dim) for ends in (
        held.box.lo, held.box.hi))  # fmt: skip
    for given, text in tables.boxes.values():
        if given == name and not rv.Box(lo, hi).contains(box_of(text)):
            raise PlanError(
                f"generate: a program for one token reads {text} of {name}, and that for the "
                f"prompt has left {rv.Box(lo, hi)} here: use a plan that does not cut the sequence."
            )


def by_name(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of ``generate`` by name."""
    generate: Any = getattr(class_of(model), "generate", None)
    names = [] if generate is None else list(inspect.signature(generate).parameters)[1:]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def is_random(model: nn.Module, kwargs: Mapping[str, Any]) -> bool:
    """Whether ``generate`` with these arguments samples tokens."""
    config = kwargs.get("generation_config") or getattr(model, "generation_config", None)
    return bool(kwargs.get("do_sample", getattr(config, "do_sample", False)))


def random_state(device: torch.device) -> Tensor:
    """The state of the generator from which tokens are sampled."""
    is_cuda = device.type == "cuda"
    return torch.cuda.get_rng_state(device) if is_cuda else torch.get_rng_state()


def _options(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the generation among the arguments of ``generate``."""
    from transformers import GenerationConfig

    known = GenerationConfig()
    return {name: value for name, value in kwargs.items() if hasattr(known, name)}
