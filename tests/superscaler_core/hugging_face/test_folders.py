"""Folders of transformers: read by boxes, written in parallel, and equal to from_pretrained's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
)

import rvdcomm as rv
import superscaler_core as ss
from superscaler_core.hugging_face import give_buffers
from superscaler_core.hugging_face.write import files_of
from tests.covering import each_value
from tests.superscaler_core.parallel.threads import on_threads

_SMALL = {"vocab_size": 64, "use_cache": False}
_LLAMA = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, **_SMALL,
}  # fmt: skip

CONFIGS: dict[str, PretrainedConfig] = {
    "Llama": LlamaConfig(**_LLAMA),
    "tied Llama": LlamaConfig(tie_word_embeddings=True, **_LLAMA),
    "Mixtral": MixtralConfig(num_local_experts=4, **_LLAMA),
    # Weights of three pieces, [in, out].
    "GPT-2": GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=16, bos_token_id=0,
                        eos_token_id=0, **_SMALL),
    "Phi-3": Phi3Config(**{**_LLAMA, "num_key_value_heads": 4}, pad_token_id=0, eos_token_id=0,
                        bos_token_id=0),
}  # fmt: skip

PLANS = {
    "zero3": 2,
    "megatron": 2,
    "hybrid:tp=2,microbatches=2": 4,
    "data_parallel:experts=true": 2,
    "one_f_one_b:microbatches=2": 2,
    "data_parallel:zero=1,whole=true": 3,
}


def batch() -> dict[str, torch.Tensor]:
    ids = torch.arange(96).view(12, 8) % 64
    return {"input_ids": ids, "labels": ids}


def on_meta(config: PretrainedConfig) -> Any:
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config)
    give_buffers(made)
    return made


def seeded(config: PretrainedConfig) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


@each_value(family=CONFIGS, plan=PLANS)
def test_folder_is_read_by_boxes_and_written_as_it_was(family, plan, tmp_path):
    if "experts" in plan and family != "Mixtral":
        family = "Mixtral"
    model = seeded(CONFIGS[family])
    # In the form of the hub, in which every expert has tensors of its own.
    model.save_pretrained(tmp_path / "in", save_original_format=True)

    def work(parallel):
        loss = parallel.evaluate(**batch()).item()
        parallel.save_pretrained(tmp_path / "out", max_shard_bytes=1 << 14)
        return loss

    found = on_threads(
        on_meta(CONFIGS[family]), batch(), PLANS[plan], work, plan=plan, weights=tmp_path / "in"
    )
    assert found[0] == pytest.approx(model.eval()(**batch()).loss.item(), rel=1e-6)
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert back.state_dict().keys() == model.state_dict().keys()
    for name, value in back.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])


def test_folder_has_the_dtype_that_is_asked_for(tmp_path):
    model = seeded(CONFIGS["Llama"])
    on_threads(
        model, batch(), 2, lambda p: p.save_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    )
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {value.dtype for value in back.parameters()} == {torch.bfloat16}
    weight = model.lm_head.weight.bfloat16()
    assert torch.equal(back.lm_head.weight, weight)
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"


def test_parameters_that_the_folder_lacks_keep_the_values_of_the_model(tmp_path, caplog):
    full = seeded(CONFIGS["Llama"])
    full.model.save_pretrained(tmp_path / "base")
    torch.manual_seed(1)
    other = AutoModelForCausalLM.from_config(CONFIGS["Llama"])

    def work(parallel):
        return parallel.state_dict()

    found = on_threads(other, batch(), 2, work, plan="zero3", weights=tmp_path / "base")[0]
    assert "lacks 1 parameters, such as lm_head.weight" in caplog.text
    assert torch.equal(found["lm_head.weight"], other.lm_head.weight)
    assert torch.equal(found["model.norm.weight"], full.model.norm.weight)
    assert torch.equal(found["model.embed_tokens.weight"], full.model.embed_tokens.weight)


def test_lacking_parameters_of_a_model_without_values_are_named(tmp_path):
    seeded(CONFIGS["Llama"]).model.save_pretrained(tmp_path / "base")
    with pytest.raises(rv.CheckpointError, match=r"lacks 1 parameters, such as lm_head\.weight"):
        on_threads(on_meta(CONFIGS["Llama"]), batch(), 2, lambda p: None, weights=tmp_path / "base")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"intermediate_size": 64}, r"is \[64, 32\] in the model and \[48, 32\] in the folder"),
        ({"num_hidden_layers": 3}, r"lacks 9 parameters, such as model\.layers\.2"),
    ],
)
def test_folder_of_another_configuration_is_refused(change, match, tmp_path):
    seeded(CONFIGS["Llama"]).save_pretrained(tmp_path / "in")
    config = LlamaConfig(**{**_LLAMA, **change})
    with pytest.raises(rv.CheckpointError, match=match):
        on_threads(on_meta(config), batch(), 2, lambda p: None, weights=tmp_path / "in")


def test_name_of_the_hub_is_refused_with_what_to_do():
    with pytest.raises(rv.CheckpointError, match="download it first"):
        on_threads(
            on_meta(CONFIGS["Llama"]), batch(), 1, lambda p: None, weights="meta-llama/Llama-3"
        )


def test_conversion_that_is_not_known_is_refused_by_name(tmp_path, monkeypatch):
    from superscaler_core.hugging_face import names

    seeded(CONFIGS["Mixtral"]).save_pretrained(tmp_path / "in", save_original_format=True)
    known = {k: v for k, v in names.OPERATIONS.items() if k != "MergeModulelist"}
    monkeypatch.setattr(names, "OPERATIONS", known)
    with pytest.raises(rv.CheckpointError, match="tensors by MergeModulelist"):
        on_threads(on_meta(CONFIGS["Mixtral"]), batch(), 1, lambda p: None, weights=tmp_path / "in")


def test_model_of_no_library_has_no_folder(tmp_path):
    class Model(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).square().mean()

    with pytest.raises(ss.PlanError, match="models of transformers, not Model"):
        on_threads(
            Model(4, 4), {"x": torch.randn(2, 4)}, 1, lambda p: p.save_pretrained(tmp_path / "out")
        )


def test_save_that_cannot_write_fails_on_all_ranks_and_leaves_no_weights(tmp_path, monkeypatch):
    from superscaler_core.hugging_face import write

    def full(self: Any, *args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write.OpenFile, "put", full)

    def work(parallel):
        with pytest.raises(rv.CheckpointError, match="No space left") as caught:
            parallel.save_pretrained(tmp_path / "out")
        return str(caught.value)

    found = on_threads(seeded(CONFIGS["Llama"]), batch(), 2, work, plan="zero3")
    assert found[0] == found[1]
    assert not list(Path(tmp_path / "out").glob("*.safetensors*"))


def test_ranks_that_write_to_other_folders_are_told_so(tmp_path):
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        folder.mkdir()

    def work(parallel):
        parallel.save_pretrained(folders[parallel.trainer.rank], max_shard_bytes=1 << 14)

    with pytest.raises(rv.CheckpointError, match="on a disk that they share"):
        on_threads(seeded(CONFIGS["Llama"]), batch(), 2, work, plan="zero3")


def test_configuration_has_the_dtype_of_the_files(tmp_path):
    model = seeded(CONFIGS["Llama"])
    model.config.dtype = torch.bfloat16
    on_threads(model, batch(), 1, lambda p: p.save_pretrained(tmp_path / "out"))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.float32
    model.config.dtype = torch.float32


def test_two_names_of_one_parameter_are_told(tmp_path, caplog):
    untied = seeded(CONFIGS["Llama"])
    untied.save_pretrained(tmp_path / "in")
    on_threads(on_meta(CONFIGS["tied Llama"]), batch(), 1, lambda p: None, weights=tmp_path / "in")
    assert "which are one parameter of the model" in caplog.text


def test_files_hold_every_tensor_once_and_are_dealt_out_to_ranks():
    tensors = {f"t{n}": ("float32", (1 << 18, n + 1)) for n in range(7)}
    files = files_of(tensors, range(3), 5 << 20)
    assert [name for file in files for name in file.tensors] == list(tensors)
    assert {file.writer for file in files} == {0, 1, 2}
