"""`optimize`: capture, transform, verify, measure, and keep what pays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from regraft.core.expect import expect_number
from regraft.optimize import presets
from regraft.optimize.engines import expect_engines
from regraft.optimize.progress import Progress
from regraft.optimize.result import Optimized
from regraft.optimize.subjects import subject_of
from regraft.optimize.work import Settings, Work


def optimize(
    model: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    transformations: Any = None,
    dynamic_shapes: Any = "auto",
    verify: bool = True,
    keep: Literal["measured", "all"] = "measured",
    engine: str | Sequence[str] = "torch",
    seconds: float = 0.5,
    frozen: bool = False,
) -> Optimized:
    """Make a model faster on this machine: capture it, rewrite its graph, verify the result, and keep what pays.

    Each transformation is applied and timed against the graph without it, in alternating pairs. One whose 95 % interval
    lies wholly above 1 is taken back at once; those whose interval contains 1 are left out once more, together, when
    all others are there, and taken back unless that is slower. Where calls are slow, all that preserve the computation
    are timed together from the first, and one by one only if that makes the model slower. A model whose graph ends up
    no faster than the model itself is left as it is. The caller's model is never changed; the result shares its
    weights.

    Args:
        model: A module, a graph module or an `ExportedProgram`.
        args: Positional arguments of an example call. A transformers model needs no example.
        kwargs: Keyword arguments of it.
        transformations: A preset (`"exact"`, the default; `"fast"`, which may change the result by more than rounding;
            `"compile"`, for use before `torch.compile`), a transformation, or several of either.
        dynamic_shapes: As for `trace`: by default every axis that can vary does, but for the sides of images where a
            transformers model's config names them.
        verify: Compare the result with the model, and take back what is wrong.
        keep: `"measured"` keeps what pays on this machine, `"all"` keeps everything that is right.
        engine: What runs the rewritten graph: `"torch"`, its Python code and, where that is likely faster as measured,
            oneDNN Graph for calls of the example's sizes; `"eager"`, its Python code and nothing else; `"onednn"`,
            `"inductor"`, `"onnxruntime"`, `"openvino"`; a list of some, as `["torch", "openvino"]`, of which the
            fastest one that is right runs it; or `"auto"`, for a list of all that are installed. Calls that an engine
            does not cover run the graph itself.
        seconds: How long to measure each step. Where twelve pairs of calls take longer, steps are measured together.
        frozen: Your promise that neither the result nor `model` is changed from now on. By default each call looks
            whether a weight was written to, a layer replaced, an attribute set or a hook registered, and the original
            runs then; that costs about a microsecond for each layer and weight. With the promise only `train()`,
            `load_state_dict()`, `to()` and the like of the result itself are noticed.

    Returns:
        The result: `.model` is called as the model is, and of the same kind as what was given.

    Raises:
        CaptureError: The model cannot be captured; the message names the line of its source and the cure.
        TypeError: An argument is not what it should be; the message shows the corrected call.
        ValueError: There is no such preset, engine or way to keep, `seconds` is not positive, or weights were made in
            inference mode, where torch does not count what is written to them, and are not promised to be `frozen`.
        ImportError: An engine is not installed; the message shows how to install it.

    Example:
        >>> import torch, regraft as rg
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4)).eval()
        >>> result = rg.optimize(model, (torch.randn(2, 3, 8, 8),), transformations="FoldBatchNorm", keep="all")
        >>> [(step.transformation, step.applied) for step in result.steps]
        [('FoldBatchNorm()', 1)]
        >>> result.verification.ok, isinstance(result.model, torch.nn.Sequential)
        (True, True)
    """
    chosen = presets.resolve(transformations)
    if keep not in ("measured", "all"):
        raise ValueError(f'keep={keep!r}, but takes "measured" or "all"')
    engines = expect_engines(engine, model)
    expect_number(seconds, "seconds", "regraft.optimize(model, args, seconds=0.5)", zero=False)
    with Progress(total=len(chosen) + 3) as progress:
        subject = subject_of(model, args, kwargs, dynamic_shapes, frozen, progress.next)
        progress.total = len(subject.graphs) * (len(chosen) + 2 + (keep == "measured")) + 1
        settings = Settings(chosen, dynamic_shapes, keep == "measured", engines, seconds, frozen)
        return Work(subject, verify, settings, progress).run().result()
