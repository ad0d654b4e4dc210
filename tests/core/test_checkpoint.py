"""Checkpoints of the original model, through rewrites of every kind and chains of them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import regraft as rg
from regraft.core.weights import same_bits


class Net(nn.Module):
    """Every kind of rewrite has a site in it; `embed` and `head` are tied, `scale` is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.q, self.k, self.v = nn.Linear(4, 4), nn.Linear(4, 2, bias=False), nn.Linear(4, 2)
        self.out = nn.Linear(8, 3)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("scale", torch.tensor(3.0))
        self.register_buffer("hidden", torch.tensor(1.0), persistent=False)
        self.embed, self.head = nn.Linear(3, 3), nn.Linear(3, 3)
        self.head.weight = self.embed.weight

    def forward(self, x):
        y = self.norm(self.conv(x)).mean((2, 3))
        return self.head(self.embed(self.out(torch.cat([self.q(y), self.k(y), self.v(y)], -1) / self.scale)))


X = torch.randn(3, 2, 2, 2, generator=torch.Generator().manual_seed(1))
RULES = {
    "merge": (rg.MergeLinears,),
    "bias": (rg.FuseBiasInLinear,),
    "division": (rg.ChangeTrueDivToMulByInverse,),
    "fold": (rg.FoldBatchNorm,),
    "chain": (rg.FoldBatchNorm, rg.MergeLinears, rg.FuseBiasInLinear, rg.ChangeTrueDivToMulByInverse),
}


def randomised(seed: int) -> Net:
    model, generator = Net().eval(), torch.Generator().manual_seed(seed)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
        else:
            tensor.fill_(seed)
    return model


def all_biased(seed: int) -> Net:
    model = randomised(seed)
    model.k = nn.Linear(4, 2)
    return model


def transformed(model: nn.Module, rules: str, **options) -> torch.fx.GraphModule:
    return rg.compose(*(rule() for rule in RULES[rules]))(rg.symbolic_trace(model), **options)


def snapshot(state):
    return {name: value.clone() for name, value in state.items()}


def assert_same_state(left, right) -> None:
    assert list(left) == list(right)
    for name in left:
        assert same_bits(left[name], right[name]), name
        assert left[name].stride() == right[name].stride(), name


@pytest.mark.parametrize("rules", RULES)
def test_saves_as_the_original(rules: str) -> None:
    model = randomised(1)
    gm = transformed(model, rules)
    code = gm.code
    assert_same_state(rg.original_state_dict(gm), model.state_dict())
    assert gm.code == code
    assert len(rg.history(gm)) == len(RULES[rules])


@pytest.mark.parametrize("rules", RULES)
def test_loads_a_checkpoint_of_the_original(rules: str) -> None:
    model, other = randomised(1), randomised(2)
    before, identities = snapshot(model.state_dict()), {n: id(p) for n, p in model.named_parameters()}
    gm = transformed(model, rules)
    expected = transformed(other, rules)
    assert rg.load_original_state_dict(gm, other.state_dict()) is gm
    assert_same_state(gm.state_dict(), expected.state_dict())
    assert same_bits(gm(X), expected(X))
    assert_same_state(rg.original_state_dict(gm), other.state_dict())
    assert_same_state(model.state_dict(), before)
    assert {n: id(p) for n, p in model.named_parameters()} == identities


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda gm: pickle.loads(pickle.dumps(gm))])
def test_undo_after_loading_gives_the_loaded_values(rules: str, how) -> None:
    model, other = randomised(1), randomised(2)
    code = rg.symbolic_trace(model).code
    gm = how(rg.load_original_state_dict(transformed(model, rules), other.state_dict()))
    while rg.history(gm):
        rg.undo(gm)
    assert gm.code == code
    assert_same_state(gm.state_dict(), other.state_dict())
    assert gm.head.weight is gm.embed.weight
    assert same_bits(gm(X), other(X))


def test_a_shallow_copy_keeps_its_weights_and_its_history() -> None:
    gm = transformed(randomised(1), "chain")
    kept = copy.copy(gm)
    before = snapshot(kept.state_dict())
    rg.load_original_state_dict(gm, randomised(2).state_dict())
    assert_same_state(kept.state_dict(), before)
    assert_same_state(rg.original_state_dict(kept), randomised(1).state_dict())


def test_keys_and_shapes_are_named_all_together_and_nothing_is_loaded() -> None:
    gm = transformed(randomised(1), "chain")
    before, parameters = snapshot(gm.state_dict()), [id(p) for p in gm.parameters()]
    state = dict(randomised(2).state_dict())
    del state["q.bias"], state["norm.running_mean"]
    state["out.weight"], state["more"] = torch.zeros(1, 1), torch.zeros(1)
    with pytest.raises(RuntimeError) as caught:
        rg.load_original_state_dict(gm, state)
    for name in ("q.bias", "norm.running_mean", "out.weight", "more"):
        assert name in str(caught.value)
    assert_same_state(gm.state_dict(), before)
    assert [id(p) for p in gm.parameters()] == parameters
    assert_same_state(rg.original_state_dict(gm), randomised(1).state_dict())


def test_a_checkpoint_of_the_rewritten_module_is_none_of_the_original() -> None:
    gm = transformed(randomised(1), "merge")
    with pytest.raises(RuntimeError, match="q_k_v"):
        rg.load_original_state_dict(gm, gm.state_dict())


def test_two_values_for_a_tied_weight() -> None:
    gm = transformed(randomised(1), "chain")
    state = dict(randomised(2).state_dict())
    state["head.weight"] = state["head.weight"] + 1
    before = snapshot(gm.state_dict())
    with pytest.raises(RuntimeError, match=r"embed\.weight and head\.weight are one tensor"):
        rg.load_original_state_dict(gm, state)
    assert_same_state(gm.state_dict(), before)


@pytest.mark.parametrize("rules", ["merge", "bias"])
def test_trained_rearrangements_are_saved_and_loaded_over(rules: str) -> None:
    gm = transformed(all_biased(1), rules)
    for _ in range(2):
        optimizer = torch.optim.SGD(gm.parameters(), 0.1)
        gm(X).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        trained = rg.original_state_dict(gm)
        plain = all_biased(3)
        plain.load_state_dict(trained)
        torch.testing.assert_close(gm(X), plain(X))
        gm = rg.load_original_state_dict(gm, trained)
        assert_same_state(rg.original_state_dict(gm), trained)


def test_a_bias_that_was_missing_and_has_been_trained_has_nowhere_to_go() -> None:
    gm = transformed(randomised(1), "merge")
    with torch.no_grad():
        gm.q_k_v.bias += 1
    with pytest.raises(rg.ReversalConflict, match=r"q_k_v\.bias .* has changed"):
        rg.original_state_dict(gm)


def test_a_trained_fold_is_not_saved_but_can_be_loaded_over() -> None:
    gm = transformed(randomised(1), "fold")
    with torch.no_grad():
        gm.conv.weight += 1
    with pytest.raises(rg.ReversalConflict, match=r"conv\.weight .* has changed"):
        rg.original_state_dict(gm)
    rg.load_original_state_dict(gm, randomised(2).state_dict())
    assert_same_state(rg.original_state_dict(gm), randomised(2).state_dict())


def test_originals_that_were_let_go() -> None:
    gm = transformed(randomised(1), "merge", consume=True)
    assert_same_state(rg.original_state_dict(gm), randomised(1).state_dict())
    rg.load_original_state_dict(gm, randomised(2).state_dict())
    assert same_bits(gm(X), transformed(randomised(2), "merge")(X))
    rg.undo(gm)
    assert_same_state(gm.state_dict(), randomised(2).state_dict())

    gm = transformed(randomised(1), "chain", consume=True)
    with pytest.raises(rg.ReversalConflict, match="consume=True"):
        rg.original_state_dict(gm)
    rg.load_original_state_dict(gm, randomised(2).state_dict())
    assert same_bits(gm(X), transformed(randomised(2), "chain")(X))


def test_half_a_chain_undone_in_between() -> None:
    gm = transformed(randomised(1), "chain")
    rg.undo(gm, "FuseBiasInLinear", site="out")
    rg.load_original_state_dict(gm, randomised(2).state_dict())
    assert_same_state(rg.original_state_dict(gm), randomised(2).state_dict())
    rg.undo(gm, "ChangeTrueDivToMulByInverse")
    torch.testing.assert_close(gm(X), randomised(2)(X))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rules", RULES)
def test_loads_into_another_dtype(rules: str, dtype: torch.dtype) -> None:
    gm = transformed(randomised(1), rules).to(dtype)
    rg.load_original_state_dict(gm, randomised(2).state_dict())
    expected = transformed(randomised(2).to(dtype), rules)
    assert_same_state(gm.state_dict(), expected.state_dict())
    assert_same_state(rg.original_state_dict(gm), randomised(2).to(dtype).state_dict())
    while rg.history(gm):
        rg.undo(gm)
    assert_same_state(gm.state_dict(), randomised(2).to(dtype).state_dict())


def test_frozen_stays_frozen_and_layouts_stay() -> None:
    model = randomised(1)
    model.out.weight = nn.Parameter(model.out.weight.detach().t().contiguous().t(), requires_grad=False)
    model.out.bias.requires_grad_(False)
    gm = transformed(model, "bias")
    rg.load_original_state_dict(gm, randomised(2).state_dict())
    assert not gm.out.weight.requires_grad
    rg.undo(gm)
    assert not gm.out.weight.requires_grad
    assert gm.embed.weight.requires_grad
    gm = rg.load_original_state_dict(rg.symbolic_trace(model), randomised(2).state_dict())
    assert gm.out.weight.stride() == (1, 3)


class Halved(rg.Transformation):
    """A user's own, that makes a weight without saying how."""

    def transform(self, graph_module):
        graph_module.out = nn.Linear(8, 3)
        return graph_module


def test_weights_of_unknown_making_are_refused() -> None:
    gm = Halved()(transformed(randomised(1), "fold"))
    before = snapshot(gm.state_dict())
    assert_same_state(rg.original_state_dict(gm), randomised(1).state_dict())
    with pytest.raises(rg.ReversalConflict, match=r"out\.weight was made by step \d+: Halved"):
        rg.load_original_state_dict(gm, randomised(2).state_dict())
    assert_same_state(gm.state_dict(), before)
    rg.undo(gm)
    rg.load_original_state_dict(gm, randomised(2).state_dict())


class Stacked(rg.Transformation):
    """A user's own, that puts a container of layers in the place of a layer, and a parameter into another."""

    def transform(self, graph_module):
        graph_module.out = nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3))
        graph_module.extra = nn.Parameter(torch.zeros(2))
        return graph_module


CHANGES = {
    "trained": lambda gm: gm.out[0].weight.data.add_(1),
    "loaded": lambda gm: gm.out[0].load_state_dict(nn.Linear(8, 3).state_dict()),
    "statistics": lambda gm: gm.out[1].num_batches_tracked.add_(1),
    "a parameter": lambda gm: gm.extra.data.fill_(-0.0),
}


@pytest.mark.parametrize("move", [lambda gm: gm, lambda gm: gm.double(), copy.deepcopy], ids=["", "double", "copied"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_users_step_put_in_and_was_trained_is_not_lost(change: str, move) -> None:
    gm = move(Stacked()(transformed(randomised(1), "bias")))
    expected = randomised(1).to(next(gm.parameters()).dtype).state_dict()
    assert_same_state(rg.original_state_dict(gm), expected)
    CHANGES[change](gm)
    before = snapshot(gm.state_dict())
    with pytest.raises(rg.ReversalConflict, match="has changed since it was put in, and its new values would be lost"):
        rg.original_state_dict(gm)
    with pytest.raises(rg.ReversalConflict, match="has changed since it was put in"):
        rg.undo(gm)
    assert_same_state(gm.state_dict(), before)
    assert len(rg.history(gm)) == 2


def test_what_a_users_step_put_in_and_nobody_trained_goes_again() -> None:
    gm = rg.symbolic_trace(randomised(1))
    code = gm.code
    gm = Stacked()(gm).double()
    rg.undo(gm)
    assert gm.code == code
    assert not hasattr(gm, "extra")
    assert_same_state(gm.state_dict(), randomised(1).double().state_dict())


def test_something_else_in_the_way_is_named() -> None:
    gm = transformed(randomised(1), "bias")
    gm.out = nn.Linear(9, 3)
    with pytest.raises(rg.ReversalConflict, match="'out' has been replaced since"):
        rg.original_state_dict(gm)
    with pytest.raises(rg.ReversalConflict, match="'out' has been replaced since"):
        rg.load_original_state_dict(gm, randomised(2).state_dict())


def test_a_graph_that_others_have_changed_saves_all_the_same() -> None:
    gm = transformed(randomised(1), "chain")
    for node in gm.graph.nodes:
        if node.op == "output":
            node.args = (node.args[0].all_input_nodes[0],)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    assert_same_state(rg.original_state_dict(gm), randomised(1).state_dict())


def test_recurrent_layers_run_with_what_was_loaded() -> None:
    class Recurrent(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.rnn, self.q = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x):
            return self.q(self.rnn(x)[0])

    model, other, x = Recurrent(1), Recurrent(2), torch.randn(2, 5, 3)
    before = snapshot(model.state_dict())
    gm = rg.FuseBiasInLinear()(rg.symbolic_trace(model))
    rg.load_original_state_dict(gm, other.state_dict())
    torch.testing.assert_close(gm(x), other(x))
    assert_same_state(model.state_dict(), before)
    assert same_bits(model(x), Recurrent(1)(x))
