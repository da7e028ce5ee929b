"""Shard: a model asks for a tensor to be cut; planners read the request from the captured graph."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from superscaler_core.errors import AnnotationError
from superscaler_core.graph.shard_spec import ShardSpec
from superscaler_core.rules.calls import is_tracing

TARGET = "superscaler.shard"
"""The torch op that marks its argument in a traced program; it returns nothing."""


def shard(tensor: Tensor, spec: str) -> Tensor:
    """Ask for a tensor to be cut among devices; return the tensor itself.

    The call costs nothing: it leaves a mark (``Graph.marks``) only while
    ``superscaler_core.capture`` traces a model. The plan ``gspmd`` follows the marks; other plans
    ignore them. A mark belongs to one value: the result of a later op may be marked in another way.

    Args:
        tensor: an input, a parameter or an activation.
        spec: which dims are cut along which axes of a mesh, such as ``"d0@x, d1@y"``; see
            ``ShardSpec``.

    Raises:
        AnnotationError: the text is no spec, or names a dim that the tensor does not have.

    >>> import torch
    >>> x = torch.ones(4, 6)
    >>> shard(x, "d0@x, d1@-") is x
    True
    """
    said = ShardSpec.parse(spec)
    try:
        said.said(tensor.dim())
    except AnnotationError as error:
        raise AnnotationError(f"shard of a tensor of shape {list(tensor.shape)}: {error}") from None
    if is_tracing():
        torch.ops.superscaler.shard(tensor, str(said))
    return tensor


torch.library.define("superscaler::shard", "(Tensor x, str spec) -> ()")
torch.library.register_fake("superscaler::shard", lambda tensor, spec: None)
# Tracing drops calls whose results nobody uses, unless they are declared to have an effect.
has_side_effect(torch.ops.superscaler.shard.default)
