"""The page of a long run in a real browser."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import browser
import pytest

from jaxmp.inspect import write_report

pytestmark = [
    pytest.mark.once,
    pytest.mark.slow("starts a browser"),
    pytest.mark.skipif(browser.CHROMIUM is None, reason="chromium is not installed"),
]
NAME = "<script>document.title = 'injected'</script>"
VISIBLE = "[...document.querySelectorAll('#plan tbody tr')].filter((row) => !row.hidden)"


def report_of(root: Path, steps: int, operations_of_plan: int) -> Path:
    """Write the page of a run with a plan, beside a second run."""
    folders = [root / "half" / NAME.replace("/", " "), root / "float32"]
    for folder in folders:
        folder.mkdir(parents=True)
        rows = "".join(f"{n},train,{1 / (n + 1)},,{n},1024,{n % 100 == 0:d}\n" for n in range(steps))
        (folder / "metrics.csv").write_text("step,split,loss,accuracy,grad_norm,loss_scale,skipped\n" + rows)
    operations = [
        {"path": f"Net/block_{n % 24}/attention", "primitive": "dot_general", "operands": ["float16", "float16"],
         "result": "float16", "flops": (n * 7919) % 5_000 * 10**6, "why": "product", "source": f"model.py:{n}"}
        for n in range(operations_of_plan - 1)
    ]  # fmt: skip
    operations.append({**operations[0], "path": NAME, "why": NAME})
    (folders[0] / "plan.json").write_text(json.dumps({"rows": operations}))
    sizes = {"params": 3 * 2**20, "activations": 9 * 2**20, "batch": 0}
    (folders[0] / "memory.json").write_text(json.dumps({"device": "cpu", "peak": 12 * 2**20, "by_kind": sizes}))
    return write_report(folders[0], folders[1:])


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report_of(tmp_path_factory.mktemp("large"), 10_000, 5_000)


@pytest.fixture(scope="module")
def small_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report_of(tmp_path_factory.mktemp("small"), 100, 50)


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    opened = browser.Browser(tmp_path_factory.mktemp("profile"))
    try:
        yield opened
    finally:
        opened.close()


def test_the_page_is_small_opens_fast_and_asks_no_network(tab, page: Path) -> None:
    assert page.stat().st_size < 2e6
    milliseconds = []
    for _ in range(3):  # a busy machine may delay a load
        tab.open(page)
        milliseconds.append(tab.value("performance.getEntriesByType('navigation')[0].loadEventEnd"))
    assert min(milliseconds) < 1000
    schemes = {event["request"]["url"].split(":")[0] for event in tab.events["Network.requestWillBeSent"]}
    assert schemes <= {"file", "data"} and len(tab.events["Network.requestWillBeSent"]) <= 2
    assert not {"Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"} & tab.events.keys()


def test_html_in_names_is_text(tab, small_page: Path) -> None:
    tab.open(small_page)
    assert tab.value("document.scripts.length") == 1 and "jaxmp report" in tab.value("document.title")
    assert tab.value("document.querySelector('#plan tbody tr:last-child td').textContent") == NAME
    assert tab.value("document.querySelector('h1').textContent").startswith("<script>")


def test_the_table_sorts_by_number_and_by_text_and_searches(tab, page: Path) -> None:
    tab.open(page)
    flops = "[...document.querySelectorAll('#plan tbody tr')].map((row) => Number(row.cells[3].dataset.value))"
    tab.value("document.querySelectorAll('#plan th button')[3].click()")
    largest = tab.value(flops)
    assert largest == sorted(largest, reverse=True) and largest[0] == 4_999 * 10**6
    assert tab.value("document.querySelectorAll('#plan th')[3].ariaSort") == "descending"
    tab.value("document.querySelectorAll('#plan th button')[3].click()")
    assert tab.value(flops) == largest[::-1]
    tab.value("document.querySelectorAll('#plan th button')[0].click()")
    paths = tab.value("[...document.querySelectorAll('#plan tbody tr')].map((row) => row.cells[0].textContent)")
    assert paths[0] == NAME and paths[1].startswith("Net/block_0/") and paths[-1].startswith("Net/block_23/")

    tab.value(
        "const field = document.getElementById('search'); field.value = 'BLOCK_7/'; "
        "field.dispatchEvent(new Event('input'))"
    )
    assert tab.value(f"{VISIBLE}.length") == len([n for n in range(4_999) if n % 24 == 7])
    assert tab.value(f"{VISIBLE}.every((row) => row.textContent.includes('block_7/'))")


def test_both_themes_are_readable_and_a_narrow_page_does_not_scroll_sideways(tab, small_page: Path) -> None:
    brightness = """['color', 'backgroundColor'].map((name) => getComputedStyle(document.body)[name]
      .match(/\\d+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0) / 765)"""
    for theme in ("light", "dark"):
        for width in (1100, 360):
            tab.open(small_page, width, theme)
            ink, paper = tab.value(brightness)
            assert abs(ink - paper) > 0.7 and (paper > ink) == (theme == "light")
            assert tab.value("document.documentElement.scrollWidth") <= width
            assert tab.value("getComputedStyle(document.querySelector('svg text')).fill") == tab.value(
                "getComputedStyle(document.body).color"
            )


def test_print_shows_the_whole_table_in_dark_ink(tab, small_page: Path) -> None:
    tab.open(small_page, theme="dark")
    tab.media("print", "light")
    assert tab.value("getComputedStyle(document.getElementById('search')).display") == "none"
    assert tab.value("[...document.querySelectorAll('.scroll')].every((box) => box.scrollHeight <= box.clientHeight)")
    pdf = base64.b64decode(tab.call("Page.printToPDF", pageRanges="1-2")["data"])
    assert pdf.startswith(b"%PDF") and len(pdf) > 10_000
