"""A grammar of small models: each production writes a line or two of Python, and knows the shape of what it gives.

The order of choices matters: hypothesis shrinks towards the first of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

Shape = tuple[int, ...]
Choose = Callable[[Sequence[Any]], Any]
"""Draws one of several; a failure is shrunk towards the first."""

DIVISORS = ("3", "8.0", "49.0", "0.0", "-7.0", "1", "0.1", "1e-40", "1e30", "float('inf')", "float('nan')", "True")
WRITES = ("{0}.add_(1)", "F.relu_({0})", "{0}.mul_(2)", "F.relu({0}, inplace=True)", "{0}[..., :1].zero_()")
SMOOTH = ("torch.relu({0})", "-{0}", "{0} * 0.5", "{0} + 1", "{0}.tanh()", "{0}.contiguous()", "{0}.clone()")
ROUNDED = ("torch.floor({0})", "{0}.round()", "{0}.to(torch.int64).to({0}.dtype)", "({0} > 0).to({0}.dtype)")


class Grammar:
    """Writes one model.

    Args:
        choose: How choices are made.
        shape: The shape of the first input.
    """

    def __init__(self, choose: Choose, shape: Shape) -> None:
        self.choose = choose
        self.init: list[str] = []
        self.body: list[str] = []
        self.after: list[str] = []
        self.values: list[tuple[str, Shape]] = [("x", shape)]
        self.layers: list[tuple[str, str, tuple[int, int]]] = []

    def grow(self) -> None:
        """Add one statement, or a few that belong together."""
        productions = (
            self.linear,
            self.normalised_layer,
            self.division,
            self.siblings,
            self.smooth,
            self.normalised_layer,
            self.normed_first,
            self.siblings,
            self.oddity,
            self.convolution,
            self.norm,
            self.normed_first,
            self.passing,
            self.write,
            self.reshaped,
            self.joined,
            self.sliced,
            self.rounded,
            self.sized,
            self.oddity,
        )
        self.choose(productions)()

    # Values.

    def value(self) -> tuple[str, Shape]:
        """A value that has been computed; most often the last."""
        back: int = min(self.choose((1, 1, 1, 2, 3)), len(self.values))
        return self.values[-back]

    def give(self, expression: str, shape: Shape) -> None:
        """A new value."""
        name = f"v{len(self.body)}"
        self.body.append(f"{name} = {expression}")
        self.values.append((name, shape))

    def layer(self, kind: str, expression: str, sizes: tuple[int, int] = (0, 0)) -> str:
        """A new layer."""
        name = f"{kind}{len(self.init)}"
        self.init.append(f"self.{name} = {expression}")
        self.layers.append((kind, name, sizes))
        return name

    # Layers.

    def linear(self, value: tuple[str, Shape] | None = None) -> None:
        """A linear layer: new or used again, called by position, by keyword or as a function, of odd widths."""
        x, shape = value or self.value()
        if not shape or shape[-1] > 8:
            return
        how = self.choose(("{0}({1})", "{0}({1})", "{0}(input={1})", "F.linear({1}, {0}.weight, {0}.bias)", "again"))
        again = [(name, sizes) for kind, name, sizes in self.layers if kind == "linear" and sizes[0] == shape[-1]]
        if how == "again" and again:
            name, (_, width) = self.choose(again)
            how = self.choose(("{0}({1})", "F.linear(input={1}, weight={0}.weight)"))
        else:
            width, bias = self.choose((2, 4, 1, 3)), self.choose(("", ", bias=False"))
            name = self.layer("linear", f"nn.Linear({shape[-1]}, {width}{bias})", (shape[-1], width))
            how = "{0}({1})" if how == "again" else how
        self.give(how.format(f"self.{name}", x), (*shape[:-1], width))

    def siblings(self) -> None:
        """Two or three linear layers on one value, something in between, and what reads them."""
        value = self.value()
        for _ in range(self.choose((2, 3))):
            self.linear(value)
            if self.choose((False, False, False, True)):
                self.choose((self.write, self.smooth, self.reshaped))()

    def convolution(self, value: tuple[str, Shape] | None = None) -> None:
        """A convolution: one to three axes, transposed, grouped, padded, dilated, with or without a batch."""
        x, shape = value or self.value()
        batch = self.choose((1, 1, 1, 0))
        axes, channels = len(shape) - batch - 1, shape[batch] if len(shape) > batch else 0
        if not 1 <= axes <= 3 or channels > 8:
            return
        transposed = self.choose((False, False, True))
        groups = self.choose((1, 1, math.gcd(channels, 2)))
        width = groups * self.choose((2, 1))
        kernel, stride = self.choose((1, 2, 3)), self.choose((1, 1, 2))
        padding = self.choose((0, 0, 1))
        bias = self.choose(("", ", bias=False"))
        mode = self.choose(("", "", "", ", padding_mode='replicate'")) if not transposed else ""
        sizes = tuple(
            (size - 1) * stride - 2 * padding + kernel if transposed else (size + 2 * padding - kernel) // stride + 1
            for size in shape[batch + 1 :]
        )
        if min(sizes) < 1 or math.prod(sizes) > 100:
            return
        name = f"nn.Conv{'Transpose' * transposed}{axes}d"
        options = f"{kernel}, stride={stride}, padding={padding}, groups={groups}{bias}{mode}"
        layer = f"self.{self.layer('conv', f'{name}({channels}, {width}, {options})')}"
        result = (*shape[:batch], width, *sizes)
        if not transposed and not mode and self.choose((False, False, False, True)):
            call = f"F.conv{axes}d({x}, {layer}.weight, {layer}.bias, {stride}, {padding}, groups={groups})"
            self.give(call, result)
            return
        self.give(self.choose((f"{layer}({x})", f"{layer}({x})", f"{layer}(input={x})")), result)

    def norm(self, value: tuple[str, Shape] | None = None) -> None:
        """A batch norm, with or without weights and statistics, as a layer or a function; sometimes one used before."""
        x, shape = value or self.value()
        if not 2 <= len(shape) <= 5 or shape[1] > 8:
            return
        kind = f"BatchNorm{max(len(shape) - 2, 1)}d"
        again = [name for known, name, sizes in self.layers if known == kind and sizes[0] == shape[1]]
        if again and self.choose((False, True)):
            self.give(f"self.{self.choose(again)}({x})", shape)
            return
        options = self.choose(("", "", "", ", affine=False", ", eps=0.1", ", track_running_stats=False"))
        name = self.layer(kind, f"nn.{kind}({shape[1]}{options})", (shape[1], 0))
        layer = f"self.{name}"
        if self.choose((False, False, False, True)) and options in ("", ", affine=False"):
            means = f"{layer}.running_mean, {layer}.running_var, {layer}.weight"
            self.give(f"F.batch_norm({x}, {means}, bias={layer}.bias)", shape)
            return
        self.give(self.choose((f"{layer}({x})", f"{layer}(input={x})")), shape)
        if self.choose((False,) * 7 + (True,)):
            self.after.append(f"model.{name}.train()")

    def normalised_layer(self) -> None:
        """A layer, perhaps something that changes nothing, and a norm."""
        self.choose((self.linear, self.convolution))()
        if self.choose((False, False, True)):
            self.passing(self.values[-1])
        self.norm(self.values[-1])

    def normed_first(self) -> None:
        """A norm, and a layer behind it."""
        self.norm()
        self.choose((self.linear, self.convolution))(self.values[-1])

    def passing(self, value: tuple[str, Shape] | None = None) -> None:
        """What returns its input in evaluation mode, or a reshaped one."""
        x, shape = value or self.value()
        layer = self.choose(("nn.Identity()", "nn.Dropout(0.5)", "nn.Dropout(0.5, inplace=True)", "nn.Flatten()", ""))
        if layer == "nn.Flatten()" and len(shape) > 1:
            self.give(f"self.{self.layer('flat', layer)}({x})", (shape[0], math.prod(shape[1:])))
        elif layer:
            self.give(f"self.{self.layer('same', layer.replace('nn.Flatten', 'nn.Identity'))}({x})", shape)
        else:
            self.give(f"F.dropout({x}, 0.5, training=False)", shape)

    # Functions.

    def division(self) -> None:
        """A division by a number or a constant tensor, in one of its spellings."""
        x, shape = self.value()
        divisor = self.choose(DIVISORS)
        if self.choose((False, False, True)):
            constant = f"torch.tensor({divisor}, dtype=torch.float64)"
            name = f"constant{len(self.init)}"
            self.init.append(f"self.register_buffer({name!r}, {constant})")
            divisor = f"self.{name}"
        spelling = self.choose(
            ("{0} / {1}", "torch.div({0}, {1})", "{0}.div({1})", "{0}.div_({1})", "torch.true_divide({0}, {1})",
             "torch.div({0}, {1}, rounding_mode='floor')", "torch.div(input={0}, other={1})", "{1} / {0}")
        )  # fmt: skip
        self.give(spelling.format(x, divisor), shape)

    def smooth(self) -> None:
        """An elementwise function."""
        x, shape = self.value()
        self.give(self.choose(SMOOTH).format(x), shape)

    def write(self) -> None:
        """A change in place, of a value that others may read."""
        x, _ = self.value()
        self.body.append(self.choose(WRITES).format(x))

    def rounded(self) -> None:
        """What turns a last bit into a whole number."""
        x, shape = self.value()
        self.give(self.choose(ROUNDED).format(x), shape)

    def reshaped(self) -> None:
        """Another arrangement of the same elements, which may share memory or ask for strides."""
        x, shape = self.value()
        if len(shape) < 2:
            return
        rows, last = math.prod(shape[:-1]), shape[-1]
        turned = (*shape[:-2], last, shape[-2])
        kinds = {
            f"{x}.view(-1)": (rows * last,),
            f"{x}.flatten(1)": (shape[0], math.prod(shape[1:])),
            f"{x}.transpose(-1, -2)": turned,
            f"{x}.transpose(-1, -2).contiguous().reshape{(*turned, 1)}": (*turned, 1),
            f"{x}.transpose(-1, -2).flatten().reshape{turned}": turned,
            f"{x}.reshape(-1, {last})": (rows, last),
            f"{x}.view(-1, {last})": (rows, last),
            f"{x}.view({', '.join(map(str, (*shape[:-1], 1, last)))})": (*shape[:-1], 1, last),
            f"{x}.unsqueeze(1)": (shape[0], 1, *shape[1:]),
            f"{x}.mean(-1)": shape[:-1],
        }
        expression = self.choose(tuple(kinds))
        self.give(expression, kinds[expression])

    def joined(self) -> None:
        """Two values as one."""
        x, shape = self.value()
        others = [name for name, other in self.values if other == shape]
        other = self.choose(others)
        if shape:
            spellings = {f"{x} + {other}": shape, f"torch.cat([{x}, {other}], -1)": (*shape[:-1], 2 * shape[-1])}
            spellings |= {f"{x} * {other}": shape, f"torch.stack([{x}, {other}], 1)": (shape[0], 2, *shape[1:])}
            expression = self.choose(tuple(spellings))
            self.give(expression, spellings[expression])

    def sliced(self) -> None:
        """A part of a value, which shares its memory."""
        x, shape = self.value()
        if shape and shape[-1] > 1:
            self.give(*self.choose(((f"{x}[..., :1]", (*shape[:-1], 1)), (f"{x}[..., -1]", shape[:-1]))))

    def sized(self) -> None:
        """Arithmetic on sizes."""
        x, shape = self.value()
        if shape:
            spellings = ("{0} / {0}.shape[-1]", "{0} * ({0}.size(0) / 2)", "{0}[: {0}.shape[0] // 1]")
            self.give(self.choose(spellings).format(x), shape)

    def oddity(self) -> None:
        """Something about a layer that a rewrite must respect: hooks, ties, flags, parametrizations."""
        if not self.layers:
            return
        kind, name, sizes = self.layers[-1]
        layer, twins = f"model.{name}", [n for k, n, s in self.layers[:-1] if (k, s) == (kind, sizes) and sizes[0]]
        choices = [f"{layer}.requires_grad_(False)", f"{layer}.register_forward_hook(add_one)"]
        choices += [f"{layer}.register_forward_pre_hook(negate)", f"model.alias{len(self.after)} = {layer}"]
        choices += [f"{layer}.train()", f"{layer}.double()"]
        if twins:
            choices += [f"{layer}.weight = model.{twins[0]}.weight", f"{layer}.bias = model.{twins[0]}.bias"]
        if kind in ("linear", "conv"):
            strides = f"nn.Parameter({layer}.weight.detach().transpose(0, 1).contiguous().transpose(0, 1))"
            choices += [f"{layer}.weight = {strides}", f"torch.nn.utils.parametrizations.weight_norm({layer})"]
            choices += [f"torch.nn.utils.prune.l1_unstructured({layer}, 'weight', 0.5)"]
            choices += [f"{layer}.weight.requires_grad_(False)", f"nn.init.zeros_({layer}.weight)"]
        if kind == "linear":
            choices.append(f"{layer}.__class__ = DoubledLinear")
        self.after.append(self.choose(choices))
