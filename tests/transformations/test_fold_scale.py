"""FoldScale: numbers and per-channel weights, behind and before, and what must stay."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import regraft as rg
import regraft.testing
from helpers import Wrap, assert_matches_float64, check_applied, check_refused, randomise
from regraft.optimize.presets import resolve

X = (torch.randn(3, 5, 4),)
IMAGE = (torch.randn(2, 4, 6, 6),)


def model_of(function: Callable[[Any, Any], Any], **parts: Any) -> nn.Module:
    given = {"l": nn.Linear(4, 4), "c": nn.Conv2d(4, 6, 3, padding=1, groups=2), "v": nn.Parameter(torch.rand(4) + 0.5)}
    given |= {"w": nn.Parameter(torch.rand(6, 1, 1)), "u": nn.Parameter(torch.rand(1, 4, 1, 1))}
    given |= {"one": nn.Parameter(torch.rand(1)), "p": nn.Linear(4, 6)}
    return randomise(Wrap(function, **{**given, **parts})).eval()


LINEAR: dict[str, Callable[[Any, Any], Any]] = {
    "times a number": lambda m, x: m.l(x) * 0.3,
    "number first": lambda m, x: 0.3 * m.l(x),
    "divided": lambda m, x: m.l(x) / 7,
    "times a vector": lambda m, x: m.l(x) * m.v,
    "vector first": lambda m, x: m.v * m.l(x),
    "divided by a vector": lambda m, x: m.l(x) / m.v,
    "before": lambda m, x: m.l(x * 0.3) + 1,
    "before, a vector": lambda m, x: m.l(x * m.v),
    "before, divided": lambda m, x: m.l(x / m.v),
    "times the one number of a weight": lambda m, x: m.l(x) * m.one,
    "before, and its size is read": lambda m, x: m.p(y := x * 0.3) + y.shape[-1],
}
CONV: dict[str, Callable[[Any, Any], Any]] = {
    "times a number": lambda m, x: m.c(x) * 0.3,
    "times a vector": lambda m, x: m.c(x) * m.w,
    "before": lambda m, x: m.c(x * 3),
    "before, a vector": lambda m, x: m.c(x * m.u),
}


@pytest.mark.parametrize("form", ["fx", "trace"])
@pytest.mark.parametrize("name", LINEAR)
def test_linear(name: str, form: str) -> None:
    gm = check_applied(rg.FoldScale(), model_of(LINEAR[name]), X, form)
    assert not [n for n in gm.graph.nodes if n.name.startswith(("mul", "truediv"))]


@pytest.mark.parametrize("form", ["fx", "trace"])
@pytest.mark.parametrize("name", CONV)
def test_convolution(name: str, form: str) -> None:
    if (name, form) == ("before, a vector", "fx"):
        check_refused(rg.FoldScale(), model_of(CONV[name]), IMAGE, form, "not one number")  # the rank is not known
        return
    check_applied(rg.FoldScale(), model_of(CONV[name]), IMAGE, form)


def test_without_bias_and_in_half_precision() -> None:
    model = model_of(LINEAR["times a vector"], l=nn.Linear(4, 4, bias=False)).to(torch.bfloat16)
    check_applied(rg.FoldScale(), model, (X[0].to(torch.bfloat16),), "trace")


def _two_readers(m: Any, x: Any) -> Any:
    y = m.l(x)
    return y * 0.3 + y


def _written(m: Any, x: Any) -> Any:
    y = m.l(x)
    y.add_(1)
    return y * 0.3


REFUSED: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "two readers": (_two_readers, "also used"),
    "written": (_written, "in place"),
    "zero": (lambda m, x: m.l(x) * 0, "zero"),
    "infinite": (lambda m, x: m.l(x) / 0.0, "zero"),
    "called twice": (lambda m, x: m.l(x) * 0.3 + m.l(x + 1), "called 2 times"),
    "another axis": (lambda m, x: m.l(x) * m.rows, "not one number for each channel"),
    "more axes": (lambda m, x: m.l(x[0, 0]) * m.row, "not one number for each channel"),
    "read elsewhere": (lambda m, x: m.l(x) * m.v + m.v, "one parameter"),
    "frozen": (lambda m, x: m.l(x) * m.frozen, "frozen"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    function, word = REFUSED[name]
    model = model_of(
        function,
        rows=nn.Parameter(torch.rand(5, 1)),
        row=nn.Parameter(torch.rand(1, 4)),
        frozen=nn.Parameter(torch.rand(4), False),
    )
    check_refused(rg.FoldScale(), model, X, "fx", word)


def test_another_axis_is_refused_where_the_rank_is_known_too() -> None:
    model = model_of(REFUSED["another axis"][0], rows=nn.Parameter(torch.rand(5, 1)))
    check_refused(rg.FoldScale(), model, X, "trace", "not one number for each channel")


def test_training_mode_is_refused() -> None:
    check_refused(rg.FoldScale(), model_of(LINEAR["times a number"]).train(), X, "fx", "training mode")


@pytest.mark.parametrize("name", ["divided", "before, divided"])
def test_a_division_in_place_is_refused_and_the_reason_says_what_to_do(name: str) -> None:
    gm = torch.fx.symbolic_trace(model_of(LINEAR[name]))
    (division,) = gm.graph.find_nodes(op="call_function", target=operator.truediv)
    division.target = operator.itruediv
    gm.recompile()
    rg.testing.assert_refused(rg.FoldScale(), gm, "'truediv' works in place; use the out-of-place form")


def test_a_tied_weight_is_refused() -> None:
    model = model_of(LINEAR["times a number"], other=nn.Linear(4, 4))
    model.other.weight = model.l.weight
    check_refused(rg.FoldScale(), model, X, "trace", "tied")


FUNCTIONAL: dict[str, tuple[Callable[[Any, Any], Any], tuple[Any, ...]]] = {
    "linear, behind": (lambda m, x: F.linear(x, m.m, m.v) * 0.3, X),
    "linear, before": (lambda m, x: F.linear(x * m.v, m.m, m.b), X),
    "linear without bias": (lambda m, x: F.linear(x / m.v, m.m), X),
    "convolution, behind": (lambda m, x: F.conv2d(x, m.k, m.kb, padding=1, groups=2) * m.w, IMAGE),
    "convolution, before": (lambda m, x: F.conv2d(x * m.u, m.k, m.kb, stride=2, groups=2), IMAGE),
    "transposed, before": (lambda m, x: F.conv_transpose2d(x * m.u, m.t, m.kb, groups=2, dilation=2), IMAGE),
}


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_functional_layers(name: str) -> None:
    function, inputs = FUNCTIONAL[name]
    shapes = {"m": (4, 4), "b": (4,), "k": (6, 2, 3, 3), "kb": (6,), "t": (4, 3, 2, 2)}
    model = model_of(function, **{key: nn.Parameter(torch.rand(shape)) for key, shape in shapes.items()})
    gm = check_applied(rg.FoldScale(), model, inputs, "trace")
    rg.testing.assert_round_trip(rg.FoldScale(), model, inputs)
    assert not [n for n in gm.graph.nodes if n.name.startswith(("mul", "truediv"))]


TRANSPOSED: dict[str, Callable[[Any, Any], Any]] = {
    "behind": lambda m, x: m.t(x) * m.w,
    "behind, a number": lambda m, x: m.t(x) / 3,
    "before": lambda m, x: m.t(x * m.u),
    "before, divided": lambda m, x: m.t(x / m.u),
}


@pytest.mark.parametrize("name", TRANSPOSED)
@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolutions(name: str, groups: int) -> None:
    conv = nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=groups)
    check_applied(rg.FoldScale(), model_of(TRANSPOSED[name], t=conv), IMAGE, "trace")


NORMS: dict[str, Callable[[Any, Any], Any]] = {
    "layer norm": lambda m, x: m.l(m.n(x)),
    "queries, keys and values": lambda m, x: (lambda n: m.l(n) + m.k(n) * m.q(n))(m.n(x)),
    "RMS norm": lambda m, x: m.l(m.r(x)),
    "no shift": lambda m, x: m.l(m.s(x)),
    "layer norm, functional": lambda m, x: m.l(F.layer_norm(x, (4,), m.v, m.z, 1e-3)),
    "shift alone": lambda m, x: m.l(F.layer_norm(x, (4,), None, m.z)),
    "RMS norm, functional": lambda m, x: m.q(F.rms_norm(x, (4,), m.v, 1e-3)),
    "functional layers": lambda m, x: (lambda n: F.linear(n, m.m) + F.linear(n, m.o, m.z2))(m.n(x)),
    "functional layer, no shift": (lambda m, x: F.linear(m.r(x), m.o, m.z2)),
    "the size is read too": lambda m, x: (lambda n: m.l(n).view(n.shape[0], -1))(m.n(x)),
}


def norms_of(function: Callable[[Any, Any], Any], **parts: Any) -> nn.Module:
    given: dict[str, Any] = {"n": nn.LayerNorm(4), "s": nn.LayerNorm(4, bias=False), "r": nn.RMSNorm(4)}
    given |= {"k": nn.Linear(4, 4), "q": nn.Linear(4, 4, bias=False), "z": nn.Parameter(torch.rand(4))}
    given |= {
        "m": nn.Parameter(torch.rand(4, 4)),
        "o": nn.Parameter(torch.rand(4, 4)),
        "z2": nn.Parameter(torch.rand(4)),
    }
    return model_of(function, **{**given, **parts})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", NORMS)
def test_norms(name: str, dtype: torch.dtype) -> None:
    model, inputs = norms_of(NORMS[name]).to(dtype), (X[0].to(dtype),)
    gm = check_applied(rg.FoldScale(), model, inputs, "trace")
    norm = next(n for n in gm.graph.nodes if "norm" in str(n.target) or n.name in ("n", "r", "s"))
    module = gm.get_submodule(norm.target) if norm.op == "call_module" else None
    assert not list(module.parameters()) if module else norm.args[2:4] in ((None, None), (None, 1e-3))


SENTENCES = {
    "layer norm": "folded its scale and shift into l",
    "no shift": "folded its scale into l",
    "shift alone": "folded its shift into l",
    "queries, keys and values": "folded its scale and shift into l, k, q",
}


@pytest.mark.parametrize("name", SENTENCES)
def test_the_report_says_what_of_a_norm_went_where(name: str) -> None:
    gm = rg.FoldScale()(rg.trace(norms_of(NORMS[name]), X))
    assert [site.sentence for site in rg.history(gm)[-1].applied] == [SENTENCES[name]]


def test_a_norms_scale_of_zero_is_folded() -> None:
    model = norms_of(NORMS["layer norm"])
    with torch.no_grad():
        model.n.weight[1] = 0
    check_applied(rg.FoldScale(), model, X, "trace")


def test_a_norm_whose_weights_are_not_made_yet_is_folded() -> None:
    with torch.device("meta"):
        model = Wrap(NORMS["layer norm"], n=nn.LayerNorm(4), l=nn.Linear(4, 4)).eval()
    gm = rg.FoldScale()(rg.symbolic_trace(model))
    assert rg.history(gm)[-1].applied
    assert gm.get_submodule("l").weight.is_meta


EMPTY: dict[str, tuple[Callable[[Any, Any], Any], int]] = {
    "a number behind": (LINEAR["times a number"], 4),
    "a vector behind": (lambda m, x: m.l(x) / m.nothing, 4),
    "a number before": (LINEAR["before"], 4),
    "a vector before": (LINEAR["before, a vector"], 4),
    "a norm": (NORMS["layer norm"], 4),
    "no scale": (NORMS["shift alone"], 4),
    "no inputs": (lambda m, x: m.l(x[..., :0] * 0.3), 0),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", EMPTY)
def test_a_layer_without_elements_is_folded_too(name: str, bias: bool) -> None:
    function, inputs = EMPTY[name]
    layer = nn.utils.skip_init(nn.Linear, inputs, 4 - inputs, bias=bias)
    check_applied(rg.FoldScale(), norms_of(function, l=layer, nothing=nn.Parameter(torch.rand(0))), X, "trace")


def test_a_norm_and_its_layers_keep_their_checkpoint() -> None:
    model, other = norms_of(NORMS["queries, keys and values"]), randomise(norms_of(NORMS["layer norm"]), 1)
    gm = rg.FoldScale()(rg.trace(model, X))
    assert list(rg.original_state_dict(gm)) == list(model.state_dict())
    rg.load_original_state_dict(gm, other.state_dict())
    other.function = model.function
    assert_matches_float64(other, gm, X)
    rg.undo(gm)
    assert torch.equal(gm.get_submodule("n").weight, other.n.weight)


NORMS_REFUSED: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "residual": (lambda m, x: (lambda n: m.l(n) + n)(m.n(x)), "also read by 'add'"),
    "returned": (lambda m, x: (lambda n: (m.l(n), n))(m.n(x)), "also read by 'output'"),
    "activation": (lambda m, x: (lambda n: m.l(n) + n.relu())(m.n(x)), "also read by 'relu'"),
    "its own weight": (lambda m, x: (lambda n: F.linear(n, n[0])[..., :4] + m.l(n))(m.n(x)), "also read by"),
    "written": (lambda m, x: (lambda n: m.l(n) + m.k(n.add_(1)))(m.n(x)), "also read by 'add_'"),
    "norm called twice": (lambda m, x: m.l(m.n(x)) + m.n(x + 1), "called 2 times"),
    "layer called twice": (lambda m, x: m.l(m.n(x)) + m.l(x), "called 2 times"),
    "two axes": (lambda m, x: m.l(m.two(x)), "not the features"),
    "hooks": (lambda m, x: m.l(m.hooked(x)), "hooks"),
    "hooks of a layer": (lambda m, x: (lambda n: m.l(n) + m.watched(n))(m.n(x)), "watched has hooks"),
    "frozen": (lambda m, x: m.l(m.frozen(x)), "frozen"),
    "another dtype": (lambda m, x: m.l(F.layer_norm(x, (4,), m.wide)), "float64"),
    "a computed scale": (lambda m, x: m.l(F.rms_norm(x, (4,), 1 + m.v)), "computed by the graph"),
    "out of range": (lambda m, x: m.l(F.rms_norm(x, (4,), m.large)), "beyond what"),
}


@pytest.mark.parametrize("name", NORMS_REFUSED)
def test_norms_refused(name: str) -> None:
    function, word = NORMS_REFUSED[name]
    hooked, watched, large = nn.LayerNorm(4), nn.Linear(4, 4), nn.Parameter(torch.rand(4))
    for module in (hooked, watched):
        module.register_forward_hook(lambda module, args, result: result * 2)
    parts = {"two": nn.LayerNorm((5, 4)), "hooked": hooked, "frozen": nn.LayerNorm(4).requires_grad_(False)}
    parts["watched"] = watched
    model = norms_of(function, **parts, large=large, wide=nn.Parameter(torch.rand(4, dtype=torch.float64)))
    with torch.no_grad():
        large.fill_(torch.finfo(torch.float32).max)
        model.l.weight[0, 0] = 2
    if name == "another dtype":
        gm = rg.symbolic_trace(model)
        rg.testing.assert_refused(rg.FoldScale(), gm, word)
        return
    check_refused(rg.FoldScale(), model, X, "fx" if name == "written" else "trace", word)


def test_a_norm_before_a_layer_in_training_mode_is_refused() -> None:
    check_refused(rg.FoldScale(), norms_of(NORMS["layer norm"]).train(), X, "fx", "training mode")


def test_layer_norms_stay_where_that_is_asked_for_and_rms_norms_do_not() -> None:
    check_refused(rg.FoldScale(layer_norms=False), norms_of(NORMS["layer norm"]), X, "fx", "layer_norms=False")
    check_applied(rg.FoldScale(layer_norms=False), norms_of(NORMS["RMS norm"]), X, "fx")


def test_the_presets_leave_layer_norms_whole() -> None:
    for name in ("exact", "fast"):
        (fold,) = (t for t in resolve(name) if isinstance(t, rg.FoldScale))
        assert not fold.layer_norms
    assert resolve("FoldScale")[0].layer_norms


def one_more(x: Any, weight: Any) -> Any:
    """An RMS norm whose weight is what the scale has more than one."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + weight)


@pytest.mark.parametrize("trainable", [True, False])
def test_a_weight_that_is_added_to_one_first(trainable: bool) -> None:
    model = model_of(lambda m, x: (m.l(y := one_more(x, m.v)), m.r(y)), r=nn.Linear(4, 2)).requires_grad_(trainable)
    both = rg.compose(rg.RemoveDeadWork(), rg.FuseNorm(), rg.FoldScale())
    gm = rg.trace(model, X)
    before = regraft.testing.picture(gm)
    both(gm)
    assert [node.name for node in gm.graph.nodes if node.op == "call_module"] == ["l", "r"]
    (norm,) = (node for node in gm.graph.nodes if node.op == "call_function")
    assert norm.target is F.rms_norm
    assert norm.all_input_nodes == [next(iter(gm.graph.nodes))]
    rg.verify(model, gm, X).raise_for_status()
    for name, value in model.state_dict().items():
        assert torch.equal(rg.original_state_dict(gm)[name], value)
    rg.undo(gm)
    rg.undo(gm)
    rg.undo(gm)
    regraft.testing.assert_same_picture(before, regraft.testing.picture(gm), "undo")


RESHAPED: dict[str, Callable[[Any, Any], Any]] = {
    "behind": lambda m, x: m.v.reshape(1, -1, 1, 1) * m.d(x) + x,
    "behind, in steps": lambda m, x: x + m.d(x) * m.v.unsqueeze(-1).unsqueeze(-1),
    "divided": lambda m, x: m.d(x) / m.v.view(4, 1, 1).exp(),
    "before": lambda m, x: m.d(x * (1 + m.v[None, :, None, None])),
}


@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("name", RESHAPED)
def test_a_scale_that_is_reshaped_first(name: str, trainable: bool) -> None:
    """As LayerScale for images: `RemoveDeadWork` leaves a copy of a trainable one."""
    model = model_of(RESHAPED[name], d=nn.Conv2d(4, 4, 3, padding=1)).requires_grad_(trainable)
    gm = rg.trace(model, IMAGE)
    before = regraft.testing.picture(gm)
    rg.compose(rg.RemoveDeadWork(), rg.FoldScale())(gm)
    names = {node.name for node in gm.graph.nodes}
    assert not any(name.startswith(("mul", "truediv", "clone", "get_attr")) or "constant" in name for name in names)
    rg.verify(model, gm, IMAGE).raise_for_status()
    for name, value in model.state_dict().items():
        assert torch.equal(rg.original_state_dict(gm)[name], value)
    rg.undo(gm)
    rg.undo(gm)
    regraft.testing.assert_same_picture(before, regraft.testing.picture(gm), "undo")


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: (m.l(x) * (copy := torch.clone(m.v)), copy),
        lambda m, x: m.l(x) * torch.clone(x[0, 0]),
        lambda m, x: m.l(x) * (copy := torch.clone(m.v)) + copy,
    ],
)
def test_a_scale_that_others_read_or_the_caller_gives_stays(function: Callable[[Any, Any], Any]) -> None:
    model = model_of(function)
    gm = rg.FoldScale()(rg.trace(model, X))
    assert [node.name for node in gm.graph.nodes if node.op == "call_module"] == ["l"]
    assert [node for node in gm.graph.nodes if node.name == "mul"]
    rg.verify(model, gm, X).raise_for_status()


def test_a_copy_that_is_read_elsewhere_too_stays() -> None:
    def forward(m: Any, x: Any) -> Any:
        weight = torch.clone(m.v)
        return m.l(F.rms_norm(x, (4,), weight)), weight

    check_refused(rg.FoldScale(), model_of(forward), X, "trace", "is computed by the graph")


def test_a_copy_of_what_the_caller_gives_stays() -> None:
    model = model_of(lambda m, x: m.l(F.rms_norm(x, (4,), torch.clone(x[0, 0]))))
    check_refused(rg.FoldScale(), model, X, "trace", "is computed by the graph")


@pytest.mark.parametrize("kind", [torch.int64, torch.bool, torch.float16])
def test_a_scale_that_also_casts_for_its_layer_is_refused(kind: torch.dtype) -> None:
    model = model_of(lambda m, x: m.l(x * m.v))
    check_refused(rg.FoldScale(), model, ((X[0] * 3).to(kind),), "trace", "not float32")


def test_a_norm_that_also_casts_for_its_layer_is_refused() -> None:
    model = model_of(lambda m, x: m.l(F.rms_norm(x, (4,), m.v)))
    check_refused(rg.FoldScale(), model, (X[0].half(),), "trace", "float16, not float32")


def one_channel(tiny: float) -> nn.Parameter:
    scale = torch.rand(256) + 0.5
    scale[7] = tiny
    return nn.Parameter(scale)


WIDE: dict[str, Callable[[Any, Any], Any]] = {
    "a number": lambda m, x: m.l(x) * 1e-4,
    "divided": lambda m, x: m.l(x) / 1e4,
    "before": lambda m, x: m.l(x * 1e-4),
    "of one output": lambda m, x: m.l(x) * m.v,
    "of one input": lambda m, x: m.l(x * m.v),
    "of one input of a group": lambda m, x: m.c(x[..., None] * m.rows),
    "of one output of a transposed convolution": lambda m, x: m.t(x[..., None]) * m.rows,
    "a norm": lambda m, x: m.l(F.rms_norm(x, (256,), m.v)),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", WIDE)
def test_a_weight_that_would_lose_precision_below_the_normal_numbers_stays(name: str, dtype: torch.dtype) -> None:
    parts = {"l": nn.Linear(256, 256), "c": nn.Conv1d(256, 256, 1, groups=4), "v": one_channel(1e-4)}
    parts["rows"] = nn.Parameter(one_channel(1e-4).detach()[:, None])
    model = model_of(WIDE[name], **parts, t=nn.ConvTranspose1d(256, 256, 1, groups=4)).to(dtype)
    with torch.no_grad():
        for layer in (model.l, model.c, model.t):
            layer.weight.mul_(0.05)
        model.v[:], model.rows[:, 0] = one_channel(1e-4), one_channel(1e-4)  # which model_of has filled
    x = (torch.randn(16, 256).to(dtype),)
    if dtype is torch.float16:
        check_refused(rg.FoldScale(), model, x, "trace", "below the normal numbers of float16")
    else:
        check_applied(rg.FoldScale(), model, x, "trace")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_scale_near_the_smallest_numbers_of_any_dtype_is_refused(dtype: torch.dtype) -> None:
    model = model_of(lambda m, x: m.p(x) * (2 * torch.finfo(dtype).tiny), p=nn.Linear(4, 6, bias=False)).to(dtype)
    with torch.no_grad():
        model.p.weight.mul_(1e-3)
    check_refused(rg.FoldScale(), model, (X[0].to(dtype),), "trace", "below the normal numbers")


def test_the_scale_of_attention_is_folded_in_half_precision_and_pruned_weights_too() -> None:
    model = model_of(lambda m, x: m.l(x) / 8, l=nn.Linear(256, 256)).half()
    with torch.no_grad():
        model.l.weight.mul_(0.05)
        model.l.weight[3], model.l.weight[:, 5] = 0, 0
    check_applied(rg.FoldScale(), model, (torch.randn(16, 256).half(),), "trace")


@pytest.mark.parametrize("given", ["a", "flase", 0, None])
def test_what_is_neither_true_nor_false(given: Any) -> None:
    with pytest.raises(TypeError, match=r"layer_norms=.*takes True or False: FoldScale\(layer_norms=False\)"):
        rg.FoldScale(layer_norms=given)
