"""The page, the plots and the tables, without a browser."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import regraft as rg
from regraft.core.results import DrawnNode
from regraft.report import charts, drawing, html, plot, text
from regraft.verify import Comparison, Depth

VOID = {"meta", "link", "input", "br", "i", "b"}


class Balance(HTMLParser):
    """Every element that opens closes, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "action", "data")]
        if tag not in ("meta", "link", "input", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def page(result: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = html.write(result, tmp_path_factory.mktemp("page") / "page.html")
    return path.read_text(encoding="utf-8")


def test_the_page_is_whole_and_needs_no_network(page: str) -> None:
    parser = Balance()
    parser.feed(page)
    assert parser.open == []
    assert parser.addresses == ["data:,"]
    assert not re.search(r"https?://|@import|url\(", page)
    assert "prefers-color-scheme: dark" in page


def test_the_page_says_what_was_done_and_what_not(page: str) -> None:
    for said in ("FoldBatchNorm", "MergeLinears", "blocks.1", "refused", "verified", "error against float64 along"):
        assert said in page
    assert "output[&#39;&lt;right&gt; &amp; more&#39;]" in page
    assert page.count('class="graph"') == 2 * 6  # two norms, divisions and attentions, before and after


def test_nothing_verified_and_nothing_measured_is_said(result: Any) -> None:
    from dataclasses import replace

    bare = replace(result, verification=None, graphs=(replace(result.graphs[0], benchmark=None),))
    data = html.page(bare)
    assert data["verification"] == []
    assert [tile["name"] for tile in data["summary"]] == ["sites rewritten"]


def test_a_failed_verification_is_shown(result: Any) -> None:
    from dataclasses import replace

    case = result.verification.cases[0]
    wrong = replace(case.leaves[0], ok=False, problem="is off by a mile")
    failed = replace(result.verification, cases=(replace(case, leaves=(wrong,)),))
    data = html.page(replace(result, verification=failed))
    assert data["summary"][1]["value"] == "NOT verified"
    assert data["verification"][0]["leaves"][0]["problem"] == "is off by a mile"


def test_every_graph_of_a_decoder_is_on_the_page(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 40}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2)).eval()
    inputs = {"input_ids": torch.randint(3, 40, (2, 5))}
    found = rg.optimize(model, kwargs=inputs, transformations="MergeLinears", keep="all", seconds=0.01, verify=False)
    depths = html.page(found)["depths"]
    assert [depth["name"] for depth in depths] == [graph.name for graph in found.graphs]
    assert all("<svg" in depth["chart"] for depth in depths), [depth["why"] for depth in depths]
    names = {file.name for file in plot.write(found, tmp_path)}
    assert {"depth.png", "depth-decode.png", "latency.png", "latency-padded-decode.png"} <= names


def test_pages_bear_so_many_pictures_and_no_more(result: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html, "_MOST_DRAWINGS", 1)
    assert html.page(result)["left_out"] == 5


def test_plots_are_written(result: Any, tmp_path: Path) -> None:
    files = plot.write(result, tmp_path / "plots")
    assert [file.name for file in files] == ["errors.png", "depth.png", "latency.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


@pytest.mark.parametrize(("name", "write"), [("jinja2", html.write), ("matplotlib.figure", plot.write)])
def test_a_package_that_is_missing_is_named(
    result: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, write: Any
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install 'regraft\[report\]'"):
        write(result, tmp_path / "out")


def node(name: str, *inputs: str, touch: Any = "around") -> DrawnNode:
    return DrawnNode(name, "Linear", "detail", "float32 2 x 3", touch, inputs)


def test_boxes_do_not_overlap_and_lie_below_what_they_read() -> None:
    nodes = [node("x"), node("a" * 60, "x"), node("b", "x"), node("late"), node("c", "a" * 60, "b", "late")]
    svg = drawing.graph(nodes, "a <title>")
    boxes = [tuple(map(float, box)) for box in re.findall(r'<rect x="([\d.-]+)" y="([\d.]+)" width="([\d.]+)"', svg)]
    assert len(boxes) == 5
    for i, (x, y, width) in enumerate(boxes):
        for other_x, other_y, other_width in boxes[i + 1 :]:
            assert y != other_y or x + width <= other_x or other_x + other_width <= x
    heights = dict(zip([n.name for n in nodes], [box[1] for box in boxes], strict=True))
    assert heights["x"] < heights["b"] == heights["late"] < heights["c"]
    assert "a &lt;title&gt;" in svg


def test_nothing_to_draw_is_no_error() -> None:
    assert drawing.graph([], "nothing").startswith("<svg")
    assert charts.depth([]) == ""
    assert charts.times(Comparison(1, 1, 1, 1, 1, (1.0,) * 10, 1)) == ""


@pytest.mark.parametrize("error", [0.0, 1e-300, 1.0, float("inf"), float("nan")])
def test_charts_take_any_error(error: float) -> None:
    svg = charts.depth([Depth("a", "a", 0.0, 1e-7, error), Depth("b", "b", 1.0, 1e-6, 1e-6)])
    assert not re.search(r'"[^"]*\b(nan|inf)\b[^"]*"', re.sub("<title>.*?</title>", "", svg))


def test_equal_times_make_a_chart() -> None:
    same = Comparison(1.0, 1.0, 1.0, 1.0, 1.0, (1.0,) * 10, 1, ((1.0, 1.0),) * 10)
    assert "<svg" in charts.times(same)
    assert "<svg" in charts.interval(same)


def test_tables_are_drawn_by_rich_on_a_terminal_only(result: Any, capsys: pytest.CaptureFixture[str]) -> None:
    table = text.optimized(result)
    text.show(table)
    plain = capsys.readouterr().out
    assert "MergeLinears" in plain
    assert "\x1b[" not in plain
    assert plain == f"{table}\n"


def test_rich_draws_the_same_words(result: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Terminal()
    text.show(text.verification(result.verification), terminal)
    assert "\x1b[" in terminal.getvalue()
    assert "verified on" in terminal.getvalue()
    monkeypatch.setitem(sys.modules, "rich.console", None)
    bare = Terminal()
    text.show("words", bare)
    assert bare.getvalue() == "words\n"
