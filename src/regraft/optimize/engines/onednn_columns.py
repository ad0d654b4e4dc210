"""Products of which few columns are read, by a gather whose index is the same in each call.

DeBERTa multiplies each query with the keys of all relative positions that there may be, and gathers those that there
are: of 1024 columns 255, for 128 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from regraft.optimize.engines.onednn_fusions import called

_PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"bmm": torch.bmm, "mm": torch.mm, "matmul": torch.matmul}


def of_columns_read(
    gather: Node, gm: GraphModule, steady: Mapping[Node, Tensor]
) -> dict[Node, Callable[[Mapping[Node, Any]], Tensor]]:
    """A product and a gather from it, as functions of the values of the nodes; nothing where they stay as they are.

    Args:
        gather: The gather.
        gm: The graph.
        steady: The values that are the same in each call: the index and the second matrix have to be among them.
    """
    call: dict[str, Any] = {**dict(zip(("input", "dim", "index"), gather.args)), **gather.kwargs}
    product, index = call.get("input"), call.get("index")
    if called(gather, gm) != "gather" or not isinstance(product, Node) or not isinstance(index, Node):
        return {}
    multiply = _PRODUCTS.get(called(product, gm))
    if multiply is None or len(product.args) != 2 or product.kwargs or len(product.users) > 1:
        return {}
    first, second = product.args
    if not isinstance(first, Node) or not isinstance(second, Node) or first in steady:
        return {}
    if second not in steady or steady[second].ndim < 2 or index not in steady:
        return {}
    matrix, places = steady[second], steady[index]
    if call.get("dim") not in (-1, places.ndim - 1):
        return {}
    read, among_them = torch.unique(places, return_inverse=True)
    if not 0 < 2 * len(read) <= matrix.shape[-1]:
        return {}
    columns = matrix.index_select(-1, read)
    return {
        product: lambda env: multiply(env[first], columns),
        gather: lambda env: torch.gather(env[product], -1, among_them),
    }
