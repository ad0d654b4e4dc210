"""The page in a real browser: it opens, it is clicked, it fits a phone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import browser
import pytest

from regraft.optimize.engines import EngineResult
from regraft.report import html

pytestmark = [pytest.mark.browser, pytest.mark.skipif(browser.MISSING is not None, reason=str(browser.MISSING))]


@pytest.fixture(scope="module")
def window(result: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Browser]:
    path = html.write(result, tmp_path_factory.mktemp("page") / "page.html")
    with browser.browser() as opened:
        opened.emulate(1280, 900)
        opened.open(path)
        yield opened


def visible(window: browser.Browser, selector: str) -> int:
    script = "return [...document.querySelectorAll(arguments[0])].filter(e => e.checkVisibility()).length"
    return int(window.run(script, selector))


def test_a_site_is_opened_by_clicks(window: browser.Browser) -> None:
    assert visible(window, "svg.graph") == 0
    window.click(".step:last-of-type > summary")
    assert visible(window, ".site") == 3  # two that were merged, and the refusals
    window.click(".step:last-of-type .site > summary")
    assert visible(window, "svg.graph") == 2
    window.click(".step:last-of-type .node.added")
    assert "query_of_a_long_name_key_of_a_long_name" in window.text(".step:last-of-type .told")


def test_a_module_is_found(window: browser.Browser) -> None:
    window.type("#filter", "blocks.1")
    assert visible(window, ".step") == 2  # the division and the merge
    assert visible(window, ".site") == 2
    window.type("#filter", "nowhere")
    assert visible(window, "#none") == 1
    window.run("const f = document.getElementById('filter'); f.value = ''; f.dispatchEvent(new Event('input'))")
    assert visible(window, ".step") == 3


def test_all_open_and_close(window: browser.Browser) -> None:
    window.click("#open")
    assert visible(window, "svg.graph") == 12
    window.click("#close")
    assert visible(window, ".site") == 0


@pytest.mark.parametrize("width", [390, 768, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_the_screen(window: browser.Browser, width: int, dark: bool) -> None:
    window.emulate(width, 844, dark)
    window.click("#open")
    assert window.run("return document.documentElement.scrollWidth") <= width
    paper, ink = window.run("const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]")
    assert (paper == "rgb(255, 255, 255)") is not dark
    assert paper != ink
    names = "[...document.querySelectorAll('svg.graph .name')].filter(e => e.checkVisibility())"
    assert (
        window.run(f"return Math.min(...{names}.map(e => e.getBoundingClientRect().height))") >= 9
    )  # pixels: names can be read


def test_nothing_is_fetched(window: browser.Browser) -> None:
    assert window.run("return performance.getEntriesByType('resource').length") == 0


def test_engines_and_further_graphs_have_their_place(window: browser.Browser, result: Any, tmp_path: Path) -> None:
    first = result.graphs[0]
    said = "faster: 0.52x the time (95% 0.50–0.55, 40 pairs), an interval wholly below 1"
    engine = EngineResult("onnxruntime", {"onnxruntime": said}, {}, {"onnxruntime": first.benchmark})
    graphs = (replace(first, engine=engine), replace(first, name="decode"))
    window.open(html.write(replace(result, graphs=graphs), tmp_path / "engines.html"))
    for width in (390, 1280):
        window.emulate(width, 844)
        assert window.run("return document.documentElement.scrollWidth") <= width
        assert visible(window, ".whole") == 1
        lines = "r.selectNodeContents(document.querySelector('.whole')); return r.getClientRects().length"
        assert window.run(f"const r = document.createRange(); {lines}") == 1, "the name is not broken"
    assert [window.run(f"return document.querySelectorAll('h4.graph')[{i}].textContent") for i in (0, 1)] == [
        "forward",
        "decode",
    ]
    assert visible(window, "h4.graph ~ svg") >= 2
