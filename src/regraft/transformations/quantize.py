"""`Quantize`: linear layers with weights, and activations, of eight bits or fewer, by torchao."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from regraft.core.edit import Edit
from regraft.core.pattern import Calls, Match
from regraft.core.query import Facts, require, that
from regraft.core.rewrite import Rewrite
from regraft.core.vocabulary import LINEAR
from regraft.transformations._keeping import keeping, not_kept
from regraft.transformations._quantized import CONFIGS, QuantizedLinear, expect_torchao

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Quantize(Rewrite):
    """Quantize the weights of linear layers, and with `"int8"` their inputs too, by torchao.

    `W x ~ s_W s_x (round(W / s_W) round(x / s_x))`, with a scale for each row of the weight and of the input: products
    of eight-bit numbers. The result is off by about a hundredth, so `optimize` does this only where it is asked to. It
    pays in large layers with many rows; in small ones what torchao does in Python at each call takes longer than the
    product: measure, as `optimize(model, args, transformations=[Quantize()])` does.

    The quantized copy is made at the first call, and again when the weight has changed. The weight itself stays the
    parameter: saving, loading, copying and moving are as before, and memory is not saved but taken, a quarter of the
    weight's in float32. Training mode, recorded gradients, autocast and tracing get the plain layer. It needs the
    extra: `pip install 'regraft[torchao]'`.

    Args:
        config: `"int8"` for weights and inputs of eight bits, `"int8-weights"` for the weights alone, which saves
            reading where there are few rows; or any configuration of torchao's, `Int8WeightOnlyConfig(group_size=32)`.
        keep: Names of modules that stay as they are, with `*` and `?`: `keep=["lm_head", "encoder.layer.0.*"]`.

    Raises:
        ImportError: torchao is missing, and there is a linear layer.

    Example:
        >>> import torch, regraft as rg
        >>> net = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
        >>> gm = rg.Quantize(keep=["2"])(rg.symbolic_trace(net))
        >>> gm.get_submodule("0")
        QuantizedLinear(in_features=16, out_features=8, bias=True, config=int8)
        >>> print(rg.history(gm)[-1].refused[0].reason)
        2 stays as it is, by keep='2'
    """

    preserves_computation = False
    pattern = Calls(LINEAR)

    def __init__(self, config: Any = "int8", keep: Sequence[str] = ()) -> None:
        if isinstance(config, str) and config not in CONFIGS:
            raise ValueError(f"config={config!r}: use {' or '.join(map(repr, CONFIGS))}, as in Quantize('int8')")
        if not isinstance(config, str) and not any(k.__module__.startswith("torchao.") for k in type(config).__mro__):
            raise TypeError(f"config={config!r} is neither a name nor a configuration of torchao: Quantize('int8')")
        self.config = config
        self.keep = keeping(keep, "Quantize")

    def rewrite(self, match: Match, edit: Edit, facts: Facts) -> str:
        """See `Rewrite.rewrite`."""
        expect_torchao()
        call, module, weight = match.call, match.call.module, match.call.weight("weight")
        require(not_kept(call.where, self.keep, "stays as it is"))
        require(that(module is not None, f"{call.where} is a function call, not a module with a weight of its own"))
        require(facts.plain(call), facts.alone(call))
        assert module is not None
        assert weight is not None
        dtype = str(weight.tensor.dtype).removeprefix("torch.")
        require(
            facts.copies_last(weight),
            that(weight.tensor.dtype in _DTYPES, f"{call.where} is in {dtype}; torchao quantizes float32 and halves"),
            that(not module.training, f"{call.where} is in training mode; call .eval() on the model first"),
            that(weight.tensor.numel() > 0, f"{call.where} has an empty weight"),
        )

        layer = QuantizedLinear.of(module)
        layer.config = self.config
        edit.put_sharing(call.where, layer)
        edit.replace_with_module(call.node, call.where, call.input)
        return f"weights {'and inputs ' if self.config == 'int8' else ''}quantized"
