"""Try families of models that no test covers: ``python -m tests.models.others``.

Each model has a tiny size, random weights, no dropout, and dtype float32. One step of ZeRO-3 on two
devices must have the loss that torch computes; models with batch norm use one device, because a
batch norm needs the whole batch. The command prints a line per family and a summary, and takes a
few minutes.
"""

from __future__ import annotations

import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn

import superscaler_core as ss
from superscaler_core import Graph
from superscaler_core.errors import CaptureError, OpaqueWarning, PlanError
from superscaler_core.plans import PLANS

FAMILIES = {
    "ForCausalLM": """
        Cohere Olmo Olmo2 StableLm Starcoder2 Granite Phi Mpt XGLM Helium Glm Nemotron
        Persimmon GPTBigCode CodeGen Gemma SmolLM3 Ernie4_5 Exaone4 Arcee Cohere2 Apertus
        SeedOss HunYuanDenseV1 Lfm2 MiniMax BioGpt Rwkv RecurrentGemma FalconMamba Jamba
        DiffLlama
    """,
    "LMHeadModel": """
        OpenAIGPT
    """,
    "ForMaskedLM": """
        Electra DebertaV2 Deberta Albert DistilBert XLMRoberta MobileBert Camembert RoFormer
        SqueezeBert ModernBert ConvBert Nystromformer FNet MPNet Longformer BigBird Ernie
        RoCBert MegatronBert LayoutLM
    """,
    "ForConditionalGeneration": """
        Pegasus BlenderbotSmall Blenderbot M2M100 PLBart LED MT5 UMT5 FSMT
    """,
    "MTModel": """
        Marian
    """,
    "ForImageClassification": """
        Dinov2 ResNet RegNet DeiT Beit MobileNetV2 MobileViT PoolFormer Bit
        Dinov2WithRegisters ViTMSN FocalNet Data2VecVision SwiftFormer
    """,
}
"""Names of families, by the last part of the class name."""

_SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "hidden_dim"), 48),
    **dict.fromkeys(("ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "rotary_dim"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "vocab_size"), 64),
    **{"num_key_value_heads": 2, "type_vocab_size": 2, "head_dim": 8, "d_kv": 8, "num_labels": 3},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    **{"image_size": 32, "patch_size": 8, "layer_norm_eps": 1e-5, "use_cache": False},
    **dict.fromkeys(("attention_probs_dropout_prob", "hidden_dropout_prob", "attn_pdrop"), 0.0),
    **dict.fromkeys(("embd_pdrop", "resid_pdrop", "dropout", "attention_dropout"), 0.0),
    **dict.fromkeys(("activation_dropout", "dropout_rate", "residual_dropout"), 0.0),
    **dict.fromkeys(("drop_path_rate", "classifier_dropout", "classifier_dropout_prob"), 0.0),
}
"""Values of options; a configuration gets the values of the options that it has."""

_UNFIT = ((), ("head_dim",), ("head_dim", "num_key_value_heads"), ("embedding_size",))
"""Sets of options that keep their defaults, tried in order until a configuration accepts them."""


def made(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A tiny model of a class, and the arguments of its forward."""
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    for left in _UNFIT:
        sizes = {k: v for k, v in _SIZES.items() if hasattr(kind.config_class(), k)}
        try:
            config = kind.config_class(**{k: v for k, v in sizes.items() if k not in left})
            break
        except Exception as error:  # Families raise errors of different classes.
            fault = error
    else:
        raise fault
    if kind.main_input_name == "pixel_values":
        images = torch.randn(2, 3, 32, 32)
        return kind(config), {"pixel_values": images, "labels": torch.tensor([0, 1])}
    ids = torch.randint(3, 60, (2, 16))
    return kind(config), {"input_ids": ids, "labels": ids}


def outcome(name: str) -> tuple[str, str]:
    """The outcome of a model class: (equal or other, relative error), or (refused, error text)."""
    model, given = made(name)
    expected = model(**given).loss.item()
    has_batch_norm = any(isinstance(one, nn.BatchNorm2d) for one in model.modules())
    try:
        graph = ss.capture(model, kwargs=given)
        loss = _loss(graph, model.state_dict(), given, 1 if has_batch_norm else 2)
    except (CaptureError, PlanError) as fault:
        return "refused", str(fault)
    error = abs(loss - expected) / abs(expected)
    return "equal" if error < 1e-5 else "other", f"{error:.0e}"


def _loss(
    graph: Graph, state: Mapping[str, Any], given: Mapping[str, torch.Tensor], num_devices: int
) -> float:
    plan = ss.Plan(graph, range(num_devices))
    PLANS["zero3"](plan)

    def work(trainer: ss.Trainer) -> float:
        trainer.load_state_dict(state)
        return float(trainer.step(**{one.name: given[one.name] for one in graph.inputs}))

    with tempfile.TemporaryDirectory() as folder:
        return ss.run_threads(ss.compile(plan).save(folder), work, range(num_devices))[0]


if __name__ == "__main__":
    warnings.simplefilter("ignore", OpaqueWarning)
    transformers.logging.set_verbosity_error()
    counts = Counter[str]()
    for family in (name + end for end, names in FAMILIES.items() for name in names.split()):
        what, text = outcome(family)
        counts[what] += 1
        print(f"{family}: {what}, {text}", flush=True)
    print(f"of {counts.total()}:", ", ".join(f"{n} {what}" for what, n in counts.items()))
