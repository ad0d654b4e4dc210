"""Capture on many transformers architectures, with weights that are random everywhere."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
import torch
from torch.export import Dim

pytest.importorskip("transformers")

from capture.zoo import BY_NAME, FAMILIES, Family, assert_same, make_inputs, randomised
from regraft import CaptureError
from regraft.capture import symbolic_trace, trace
from regraft.capture.cache_names import FORMER, name_in
from regraft.capture.module_tree import is_leaf

#: the sizes at which each family is compared: batch and length
SIZES = ((3, 11), (2, 7), (1, 5), (4, 1), (1, 1))
#: what a family's own code does not take, or takes another way than the graph, which says so
REFUSED = {
    "mamba": {size for size in SIZES if size[1] != 11},  # its scan is a Python loop over the tokens
    "mistral": {(1, 5), (4, 1), (1, 1)},  # its cache is cut to the window, which the branch for shorter texts is not
}


@cache
def captured(name: str) -> tuple[Family, Any, Any]:
    """A family, its model, which is as it was, and its graph."""
    family = BY_NAME[name]
    model = family.build()
    before, values = attributes(model), {path: tensor.clone() for path, tensor in model.state_dict().items()}
    config, random_state = copy.deepcopy(vars(model.config)), torch.get_rng_state()
    gm = symbolic_trace(model, family.inputs)
    assert torch.equal(random_state, torch.get_rng_state())
    assert str(vars(model.config)) == str(config)
    assert attributes(model) == before
    assert all(torch.equal(values[path], tensor) for path, tensor in model.state_dict().items())
    return family, model, gm


def attributes(model: torch.nn.Module) -> dict[str, Any]:
    """What each module holds, the contents of its tables included; tensors are equal where they are the same one."""
    return {
        path: (id(module), {key: dict(held) if isinstance(held, dict) else held for key, held in vars(module).items()})
        for path, module in model.named_modules()
    }


def check_gives_the_models_bits_at_every_size(name: str) -> None:
    family, model, gm = captured(name)
    for batch, length in SIZES:
        inputs = make_inputs(family, batch, length)
        with torch.no_grad():
            if (batch, length) in REFUSED.get(name, ()):
                with pytest.raises(TypeError, match=family.inputs[0]):
                    gm(**inputs)
                continue
            expected = model(**copy.deepcopy(inputs))
            assert_same(expected, gm(**dict(reversed(inputs.items()))))


def check_takes_arguments_by_position(name: str) -> None:
    family, model, gm = captured(name)
    inputs = make_inputs(family, 3, 11)
    parameters = list(inspect.signature(model.forward).parameters)
    last = max(parameters.index(given) for given in inputs)
    values = [inputs.get(parameter) for parameter in parameters[: last + 1]]
    with torch.no_grad():
        assert_same(model(**inputs), gm(*values))


def check_every_layer_is_called_under_its_name(name: str) -> None:
    family, model, gm = captured(name)
    names = {id(module): path for path, module in model.named_modules()}
    called: set[str] = set()
    handles = [
        module.register_forward_hook(lambda module, args, output: called.add(names[id(module)]))
        for module in model.modules()
        if is_leaf(module) and not isinstance(module, (torch.nn.Dropout, torch.nn.Dropout2d, torch.nn.Identity))
    ]
    with torch.no_grad():
        model(**make_inputs(family, 3, 11))
    for handle in handles:
        handle.remove()
    in_graph = {str(node.target) for node in gm.graph.nodes if node.op == "call_module"}
    assert {path for path in called if "parametrizations" not in path} <= in_graph
    assert all(gm.get_submodule(path) is model.get_submodule(path) for path in in_graph)


def check_holds_the_models_own_weights(name: str) -> None:
    _, model, gm = captured(name)
    assert list(gm.state_dict()) == list(model.state_dict())
    for own, other in ((gm.named_parameters, model.named_parameters), (gm.named_buffers, model.named_buffers)):
        mine = dict(own(remove_duplicate=False))
        for path, tensor in other(remove_duplicate=False):
            assert mine[path] is tensor, path
    assert [path for path, _ in gm.named_parameters()] == [path for path, _ in model.named_parameters()]
    assert gm.training is model.training


def check_survives_copy_and_pickle(name: str) -> None:
    family, _, gm = captured(name)
    inputs = make_inputs(family, 3, 11)
    with torch.no_grad():
        expected = gm(**inputs)
        for other in (copy.deepcopy(gm), pickle.loads(pickle.dumps(gm))):
            assert other.code == gm.code
            assert [node.name for node in other.graph.nodes] == [node.name for node in gm.graph.nodes]
            for old, new in zip(gm.graph.nodes, other.graph.nodes):
                assert old.meta.keys() == new.meta.keys()
                assert str(old.meta.get("val")) == str(new.meta.get("val"))
            assert list(other.state_dict()) == list(gm.state_dict())
            assert_same(expected, other(**inputs))


def check_every_node_says_what_it_gives(name: str) -> None:
    _, _, gm = captured(name)
    for node in gm.graph.nodes:
        if node.op != "output":
            assert "val" in node.meta, node
        if node.op == "call_module":
            assert node.meta["nn_module_stack"]
            assert "stack_trace" in node.meta


def check_a_wrong_call_names_the_argument(name: str) -> None:
    family, _, gm = captured(name)
    inputs = make_inputs(family, 3, 11)
    first = family.inputs[0]
    with pytest.raises(TypeError, match=first):
        gm(**{key: value for key, value in inputs.items() if key != first})
    with pytest.raises(TypeError, match="no_such_argument"):
        gm(**inputs, no_such_argument=1)
    with pytest.raises(TypeError, match=first):
        gm(**{**inputs, first: inputs[first][0]})


#: in one test for each family, so that each is captured once, whichever worker takes it
CHECKS = (
    check_gives_the_models_bits_at_every_size,
    check_takes_arguments_by_position,
    check_every_layer_is_called_under_its_name,
    check_holds_the_models_own_weights,
    check_survives_copy_and_pickle,
    check_every_node_says_what_it_gives,
    check_a_wrong_call_names_the_argument,
)


@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_family(name: str) -> None:
    for check in CHECKS:
        check(name)


def test_groupvit_takes_different_numbers_of_images_and_texts() -> None:
    family, model, gm = captured("groupvit")
    inputs = {**make_inputs(family, 2, 6), "pixel_values": make_inputs(family, 1, 6)["pixel_values"]}
    with torch.no_grad():
        assert_same(model(**inputs), gm(**inputs))


def test_a_decoder_goes_on_from_its_cache() -> None:
    family, model, _ = captured("llama")
    name = name_in(inspect.signature(model.forward).parameters)
    gm = symbolic_trace(model, ["input_ids", "attention_mask", name])
    other = next(former for former in FORMER if former not in inspect.signature(model.forward).parameters)
    with pytest.raises(CaptureError, match=rf"takes no {other}; did you mean {name}\?"):
        symbolic_trace(model, ["input_ids", other])
    ids = make_inputs(family, 2, 8)["input_ids"]
    with torch.no_grad():
        expected, given = (model(ids[:, :4]).past_key_values for _ in range(2))
        for step in range(4, 8):
            mask = torch.ones(2, step + 1, dtype=torch.long)
            left = model(ids[:, step : step + 1], attention_mask=mask, **{name: expected})
            right = gm(input_ids=ids[:, step : step + 1], attention_mask=mask, **{name: given})
            assert_same(left, right)
            expected, given = left.past_key_values, right.past_key_values
    assert_same(pickle.loads(pickle.dumps(gm)).code, gm.code)


@pytest.mark.parametrize(
    ("model_class", "config", "names"),
    [
        ("LlamaForCausalLM", "llama", ["input_ids", "attention_mask", "labels"]),
        ("T5ForConditionalGeneration", "t5", ["input_ids", "attention_mask", "labels"]),
        ("BertForSequenceClassification", "bert", ["input_ids", "token_type_ids", "labels"]),
        ("BertForTokenClassification", "bert", ["input_ids", "labels"]),
        ("BertForQuestionAnswering", "bert", ["input_ids", "start_positions", "end_positions"]),
        ("BertForMultipleChoice", "bert", ["input_ids", "attention_mask", "labels"]),
        ("BertModel", "bert", ["inputs_embeds", "position_ids"]),
        ("ViTForImageClassification", "vit", ["pixel_values", "labels"]),
        ("BartModel", "bart", ["input_ids", "decoder_input_ids", "decoder_attention_mask"]),
    ],
)
def test_makes_the_inputs_of_tasks(model_class: str, config: str, names: list[str]) -> None:
    import transformers

    model = randomised(getattr(transformers, model_class)(BY_NAME[config].build().config).eval())
    gm = symbolic_trace(model, names)
    assert [node.target for node in gm.graph.nodes if node.op == "placeholder"] == [
        name for name in inspect.signature(model.forward).parameters if name in names
    ]


def test_what_cannot_be_made_says_how_to_pass_it() -> None:
    from regraft.core.errors import CaptureError

    _, model, _ = captured("bert")
    with pytest.raises(CaptureError, match=r'rg\.trace\(model, kwargs=\{"encoder_hidden_states": \.\.\.'):
        symbolic_trace(model, ["encoder_hidden_states"])
    with pytest.raises(CaptureError, match="did you mean input_ids"):
        symbolic_trace(model, ["input_id"])


def test_a_mask_of_another_type_is_taken() -> None:
    family, model, gm = captured("bert")
    inputs = make_inputs(family, 3, 11)
    inputs["attention_mask"] = inputs["attention_mask"].float()
    with torch.no_grad():
        assert_same(model(**inputs), gm(**inputs))


def test_outputs_on_demand_leave_no_hooks_behind() -> None:
    family, _, _ = captured("bert")
    model = family.build()
    inputs = make_inputs(family, 3, 11)
    gm = trace(model, (), {**inputs, "output_hidden_states": True}, dynamic_shapes="auto")
    assert not any(module._forward_hooks for module in model.modules())
    with torch.no_grad():
        assert_same(model(**inputs, output_hidden_states=True), gm(**inputs, output_hidden_states=True))


def test_an_empty_cache_that_is_given_is_filled() -> None:
    family, model, _ = captured("llama")
    inputs, more = ({"input_ids": make_inputs(family, 2, length)["input_ids"]} for length in (6, 9))
    transformers = pytest.importorskip("transformers")
    caches = [transformers.DynamicCache(config=model.config) for _ in range(4)]
    gm = trace(model, (), {**inputs, "past_key_values": caches[0]}, dynamic_shapes="auto")
    assert caches[0].get_seq_length() == 0
    with torch.no_grad():
        for given, mine, theirs in ((inputs, *caches[:2]), (more, *caches[2:])):
            found, expected = gm(**given, past_key_values=mine), model(**given, past_key_values=theirs)
            assert_same(expected.logits, found.logits)
            assert_same(expected.past_key_values, found.past_key_values)


@pytest.mark.parametrize("batch", [1, 2])
def test_one_new_token_does_not_repeat_keys_and_values_that_heads_share(batch: int) -> None:
    """Where a mask is given, as for padded texts, transformers does so for export, and not when it runs."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=64)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.5, 0.5)

    def call(batch: int, length: int) -> dict[str, Any]:
        mask = torch.ones(batch, length + 1, dtype=torch.long)
        mask[0, 0] = 0
        with torch.no_grad():
            cache = model(torch.randint(3, 64, (batch, length)), attention_mask=mask[:, 1:]).past_key_values
        return {"input_ids": torch.randint(3, 64, (batch, 1)), "attention_mask": mask, "past_key_values": cache}

    example = call(batch, 6)
    varying = {"input_ids": {0: Dim.AUTO}, "attention_mask": {0: Dim.AUTO, 1: Dim.AUTO}}
    varying["past_key_values"] = [{0: Dim.AUTO, 2: Dim.AUTO}] * 2
    gm = trace(model, (), copy.deepcopy(example), dynamic_shapes=varying)
    (attention,) = [node for node in gm.graph.nodes if "scaled_dot_product_attention" in str(node.target)]
    assert attention.args[1].meta["val"].shape[1] == 2
    with torch.no_grad():
        for inputs in (example, call(1, 9), call(3, 5)):
            assert_same(model(**copy.deepcopy(inputs)).logits, gm(**copy.deepcopy(inputs)).logits)


def test_a_mask_in_which_the_pieces_of_an_image_see_each_other() -> None:
    """Gemma 3 makes it number by number, for which transformers uses `torch.vmap`."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.Gemma3Config(
        text_config={**sizes, "head_dim": 8, "vocab_size": 64},
        vision_config={**vision, "image_size": 16, "patch_size": 8},
        mm_tokens_per_image=4,
        image_token_index=60,
    )
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.5, 0.5)

    def call(batch: int, length: int, start: int) -> dict[str, Any]:
        tokens = torch.randint(3, 60, (batch, length))
        tokens[:, start : start + 4] = 60
        inputs = {"input_ids": tokens, "token_type_ids": (tokens == 60).long()}
        return inputs | {"pixel_values": torch.randn(batch, 3, 16, 16), "attention_mask": torch.ones_like(tokens)}

    gm = trace(model, (), call(2, 11, 2), dynamic_shapes="auto")
    blind = {"token_type_ids": torch.zeros(3, 14, dtype=torch.long)}
    with torch.no_grad():
        for inputs in (call(2, 11, 2), call(3, 14, 7), call(3, 14, 7) | blind):
            assert_same(model(**inputs).logits, gm(**inputs).logits)
        inputs = call(3, 14, 7)
        apart = [model(**given).logits[:, 7] for given in (inputs, inputs | blind)]
        assert not torch.allclose(*apart, atol=1e-3), "the first piece of an image sees those after it"


def test_a_saved_decoder_is_loaded_by_a_process_that_never_saw_its_model(tmp_path: Any) -> None:
    family, _, gm = captured("llama")
    torch.save((gm, make_inputs(family, 2, 6)), tmp_path / "gm.pt")
    source = (
        f"import torch; gm, inputs = torch.load({str(tmp_path / 'gm.pt')!r}, weights_only=False); "
        "print(type(gm(**inputs).past_key_values).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=environment())
    assert done.stdout.strip() == "DynamicCache", done.stderr


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
