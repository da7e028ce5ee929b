"""Steps on one device: the time of our generated program beside that of the model in torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import Tensor
from tqdm import tqdm

import superscaler_core as ss
from bench.command_line import parser_for
from bench.result import environment, write
from bench.tables import grid
from superscaler_core.models.gpt import GPT, GPTConfig, example_inputs

DESCRIPTION = """\
Run forward and backward of a GPT on one device, a GPU if there is one: the model in eager torch,
and the program that superscaler_core generates for a plan of one device. Both have the same weights
and batches, and take turns. Their losses must agree. What our step takes longer is the price of the
generated program.

columns:
  torch, ours  a step in milliseconds: the median (the device is waited for)
  ratio        our time over torch's
"""

EPILOG = """\
examples:
  python -m bench.one_device                            # on a GPU: a minute
  python -m bench.one_device --widths 64 --layers 2     # small enough for a CPU
"""

SEQUENCE, VOCABULARY, HEAD_WIDTH = 512, 8192, 64
DTYPES = {"float32": 1e-5, "bfloat16": 2e-2}
"""Dtypes of the weights, and the relative tolerance of losses."""

WARM_UP = 3


class RowsGPT(GPT):
    """A GPT whose loss takes rows of scores.

    The loss of ``GPT`` takes classes as dim 1, so that plans can cut it. For that, torch has a GPU
    kernel that is many times slower, and our program does not use it.
    """

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy, in float32."""
        x = self.embed(tokens) + self.position(torch.arange(SEQUENCE, device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        scores = self.head(self.norm(x)).float()
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


Step = Callable[[], Tensor]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = parser_for("one_device", DESCRIPTION, EPILOG)
    parser.add_argument("--widths", default="512,1024,2048", help="hidden sizes of the GPTs")
    parser.add_argument("--layers", type=int, default=8, help="layers of a GPT (8)")
    parser.add_argument("--batch", type=int, default=8, help="sequences of 512 tokens a step (8)")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each (20)")
    parser.add_argument("--out", type=Path, default=Path("bench/results/scratch/one_device.json"))
    given = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(given)
    widths = [int(text) for text in args.widths.split(",")]
    cells = [(width, dtype) for width in widths for dtype in DTYPES]
    rows = [
        row_of(width, args.layers, args.batch, dtype, args.steps)
        for width, dtype in tqdm(cells, desc="models")
    ]
    print(table(rows))
    found = {
        "title": "Steps on one device, ours beside torch's",
        **environment("one_device", given),
    }
    write({**found, "rows": rows}, args.out)
    return 0


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Median steps of torch and of ours, and their ratio."""
    lines = [["width", "dtype", "parameters", "torch ms", "ours ms", "ratio"]]
    for row in rows:
        torchs, ours = 1e3 * row["torch_secs"], 1e3 * row["our_secs"]
        lines.append([str(row["width"]), row["dtype"], f"{row['parameters'] / 1e6:.0f} M",
                      f"{torchs:.2f}", f"{ours:.2f}", f"{ours / torchs:.3f}"])  # fmt: skip
    return grid(lines)


def row_of(width: int, layers: int, batch: int, dtype: str, num_steps: int) -> dict[str, Any]:
    """The times of one GPT; raises ``SystemExit`` if the losses differ."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = GPTConfig(VOCABULARY, SEQUENCE, layers, width, max(1, width // HEAD_WIDTH))
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    with device:
        model = RowsGPT(config).to(getattr(torch, dtype))
    inputs = [x.to(device) for x in example_inputs(config, batch, generator)]
    parallel = ss.parallelize(model, inputs)

    def torchs() -> Tensor:
        loss: Tensor = model(*inputs)
        loss.backward()  # type: ignore[no-untyped-call]
        for parameter in model.parameters():
            parameter.grad = None
        return loss.detach()

    def ours() -> Tensor:
        loss = parallel.step(*inputs)
        for parameter in parallel.parameters():
            parameter.grad = None
        return loss

    steps: dict[str, Step] = {"torch": torchs, "our": ours}
    losses = {name: step().item() for name, step in steps.items()}
    if not abs(losses["torch"] - losses["our"]) <= DTYPES[dtype] * abs(losses["torch"]):
        raise SystemExit(f"width {width}, {dtype}: the losses differ: {losses}.")
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(WARM_UP):
        for step in steps.values():
            step()
    for _ in range(num_steps):
        for name, step in steps.items():
            samples[name].append(_secs(step, device))
    return {
        "width": width,
        "layers": layers,
        "batch": batch,
        "dtype": dtype,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        **{f"{name}_secs": median(found) for name, found in samples.items()},
        "samples": samples,
    }


def _secs(step: Step, device: torch.device) -> float:
    """Seconds of a step, until the device has finished it."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    wait()
    start = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
