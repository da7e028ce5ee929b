"""The libraries of models; tests import them from this module.

``timm`` needs torchvision. The compiled ops of torchvision's wheel load only with a CUDA build of
torch. ``make venv`` therefore installs both libraries separately, in the folder ``timm`` of the
environment. This module declares the missing ops, none of which is called.
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
