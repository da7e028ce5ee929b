"""The libraries of models; tests import them from here.

``timm`` needs torchvision, whose wheel has compiled ops that load beside a CUDA build of torch
alone. ``make venv`` therefore installs the two apart, in the folder ``timm`` of the environment,
and here its ops, none of which is called, are declared.
"""

import importlib.util
import os
import sys
from pathlib import Path

import torch

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.append(str(Path(sys.prefix) / "timm"))
if importlib.util.find_spec("torchvision") and not torch.cuda.is_available():
    for name in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )

import timm
import transformers

__all__ = ["timm", "transformers"]
