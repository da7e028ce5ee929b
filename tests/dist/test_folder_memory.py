"""A model of a GiB is read and written by ranks that never have more of it than their boxes."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import superscaler_core as ss
from tests.dist.world import Worlds

pytestmark = [pytest.mark.dist, pytest.mark.alone]

GIB = 1 << 30
_TINY = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "vocab_size": 128, "use_cache": False,
}  # fmt: skip
_LARGE = {
    **_TINY, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16,
    "vocab_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 16,
}  # fmt: skip


def write_zeros(folder: Path, config: LlamaConfig) -> int:
    """A folder of zeros, which takes no room on the disk; the bytes of its tensors."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    header, position = {}, 0
    for name, value in model.state_dict().items():
        ends = [position, position := position + value.nbytes]
        header[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": ends}
    folder.mkdir()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + position)
    return position


def peak_bytes() -> int:
    """The most memory that this process has had since the counter was cleared."""
    text = Path("/proc/self/status").read_text()
    return next(int(s.split()[1]) << 10 for s in text.splitlines() if s.startswith("VmHWM"))


def passed_through(
    rank: int, plan: str, config: LlamaConfig, src: Path, dst: Path
) -> tuple[int, int]:
    """Bytes of this rank's boxes, and the peak over a bare process of reading and writing."""
    ids = torch.arange(32).view(2, 16)
    batch = {"input_ids": ids, "labels": ids}

    def through(config: LlamaConfig, src: Path | None, dst: Path) -> int:
        with torch.device("meta" if src else "cpu"):
            model = AutoModelForCausalLM.from_config(config)
        parallel = ss.parallelize(model, kwargs=batch, plan=plan, weights=src)
        parallel.save_pretrained(dst)
        return sum(value.nbytes for value in parallel.parameters())

    # A small model imports everything that a large one needs.
    small = dst.with_name(f"{dst.name}-small")
    through(LlamaConfig(**_TINY), None, small)
    through(LlamaConfig(**_TINY), small, small)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    bare = peak_bytes()
    return through(config, src, dst), peak_bytes() - bare


@pytest.mark.parametrize("plan", ["zero3", "megatron"])
def test_no_rank_has_more_than_its_boxes_and_a_tenth(worlds: Worlds, plan, tmp_path):
    config = LlamaConfig(**_LARGE)
    assert write_zeros(tmp_path / "in", config) > GIB
    found = worlds(2, timeout_secs=120).run(
        passed_through, plan, config, tmp_path / "in", tmp_path / "out"
    )
    for boxes, peak in found:
        assert boxes < 0.6 * GIB
        assert peak < 1.1 * boxes
