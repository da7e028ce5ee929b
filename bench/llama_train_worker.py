"""One rank of the Llama benchmark; started by ``llama_train.py``.

    python -m bench.llama_train_worker CONFIG.json FOUND.json

Rank 0 writes samples of every method in seconds, of the slowest rank of each step.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from bench.training_method import Method, alternating
from superscaler_core.compiled import compile
from superscaler_core.front_end import capture
from superscaler_core.plan import Plan
from superscaler_core.plans import PLANS
from superscaler_core.run.load import load

TIMEOUT = timedelta(seconds=300)
NUM_CHECKED = 3
"""Steps whose losses are compared before anything is timed; they also warm up."""

_OF_LAYER = {
    **{f"self_attn.{name}_proj": ColwiseParallel for name in "qkv"},
    "self_attn.o_proj": RowwiseParallel,
    "mlp.gate_proj": ColwiseParallel,
    "mlp.up_proj": ColwiseParallel,
    "mlp.down_proj": RowwiseParallel,
}


def main(argv: list[str]) -> None:
    """Run all methods on this rank."""
    config = json.loads(Path(argv[0]).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    torch.manual_seed(0)
    model = _llama(config["model"])
    sizes = config["model"]
    shape = (config["batch"], sizes["sequence"])
    batches = [(ids, ids) for _ in range(NUM_CHECKED)
               for ids in [torch.randint(sizes["vocabulary"], shape)]]  # fmt: skip
    methods = {
        name: _TORCHS[name](model)
        if name in _TORCHS
        else _ours(name, model, batches[0], Path(config["folder"], name))
        for name in config["methods"]
    }
    samples = alternating(methods, batches, config["steps"])
    if dist.get_rank() == 0:
        Path(argv[1]).write_text(json.dumps(samples))
    dist.barrier()
    dist.destroy_process_group()


def _llama(sizes: Mapping[str, int]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=sizes["vocabulary"],
        hidden_size=sizes["width"],
        intermediate_size=4 * sizes["width"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["heads"],
        max_position_embeddings=sizes["sequence"],
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def _ours(name: str, model: Any, batch: tuple[Tensor, Tensor], folder: Path) -> Method:
    """Collective: the first rank writes the program."""
    if dist.get_rank() == 0:
        graph = capture(model, kwargs={"input_ids": batch[0], "labels": batch[1]})
        plan = Plan(graph, range(dist.get_world_size()))
        PLANS[name](plan)
        compile(plan, optimizer="momentum").save(folder)
    dist.barrier()
    trainer = load(folder)
    return Method.of(trainer.step, trainer.parameters())


def _of_rows(module: Any) -> Method:
    """A module that every rank gives its own rows of the batch."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def step(ids: Tensor, labels: Tensor) -> Tensor:
        rows, wanted = ids.chunk(size)[rank], labels.chunk(size)[rank]
        loss: Tensor = module(input_ids=rows, labels=wanted).loss
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return Method.of(step, module.parameters())


def _ddp(model: Any) -> Method:
    return _of_rows(DistributedDataParallel(deepcopy(model)))


def _fsdp2(model: Any) -> Method:
    module = deepcopy(model)
    for layer in module.model.layers:
        fully_shard(layer)
    fully_shard(module)
    return _of_rows(module)


def _dtensor(model: Any) -> Method:
    module = deepcopy(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in module.model.layers:
        parallelize_module(layer, mesh, {path: style() for path, style in _OF_LAYER.items()})

    def step(ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = module(input_ids=ids, labels=labels).loss
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return Method.of(step, module.parameters())


_TORCHS: Mapping[str, Callable[[Any], Method]] = {"ddp": _ddp, "fsdp2": _fsdp2, "dtensor": _dtensor}


if __name__ == "__main__":
    main(sys.argv[1:])
