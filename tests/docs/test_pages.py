"""The code of every page runs, and prints what the page shows.

Each page is one test. Its blocks run in order and share their names. The blocks in tabs (`=== "NNX"`) share theirs with
the tabs of the same title. A block ```` ```text title="prints" ```` has the output of the Python block before it, in
which `...` stands for any text. A page with the comment `# needs: PACKAGE` in a block runs where that package is.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pages_stand_ins
import published_gpt2
import pytest
from places import ROOT
from sybil import Document, Example
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAM_OF_THE_READER = ("README.md", "docs/coming_from.md")
"""Pages whose blocks are parts of the reader's program. Blocks that use only another library do not run."""
MODULES = {"compile-only": "jax_cuda13_plugin"}
"""The modules of extras."""
LIKE_DOCTEST = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Page:
    """A page, and the names that its blocks have defined, by the title of their tab."""

    def __init__(self, path: Path) -> None:
        self.uses_stand_ins = any(path == ROOT / name for name in PROGRAM_OF_THE_READER)
        self.namespaces: dict[str, dict[str, Any]] = defaultdict(lambda: {"__name__": "__main__"})
        parsers = [CodeBlockParser("python", self.run), CodeBlockParser('text title="prints"', self.compare)]
        self.document = Document.parse(str(path), *parsers)
        self.printed = ""

    @property
    def needs(self) -> set[str]:
        return {MODULES.get(name, name) for name in re.findall(r"# needs: (\S+)", self.document.text)}

    def run(self, block: Example) -> None:
        """Run a block with the names and in the folder of its tab."""
        tabs = re.findall(r'^=== "(.*)"', self.document.text[: block.start], re.MULTILINE)
        is_in_tab = self.document.text[block.start] == " "
        tab = tabs[-1] if is_in_tab else "page"
        block.namespace = self.namespaces[tab]
        if self.uses_stand_ins:
            block.namespace.update(pages_stand_ins.program())
            if "jaxmp" not in block.parsed:
                return
        Path(tab).mkdir(exist_ok=True)
        with contextlib.chdir(tab), contextlib.redirect_stdout(io.StringIO()) as printed:
            PythonEvaluator()(block)
        self.printed = printed.getvalue()

    def compare(self, output: Example) -> str | None:
        """Return the difference between the output that the page shows and the printed output, if they differ."""
        if doctest.OutputChecker().check_output(output.parsed, self.printed, LIKE_DOCTEST):
            return None
        return f"the code before it prints:\n{self.printed}"

    def check(self) -> None:
        """Run all blocks, and compare their output with the page."""
        for example in self.document:
            example.evaluate()


def case(path: Path) -> Any:
    page = Page(path)
    compiles_for_a_gpu = MODULES["compile-only"] in page.needs
    marks = [pytest.mark.absent_gpu if compiles_for_a_gpu else pytest.mark.slow("runs the programs of the docs")]
    if "qwix" in page.needs:  # it uses names that Flax deprecates
        marks.append(pytest.mark.filterwarnings("ignore::DeprecationWarning"))
    return pytest.param(page, id=path.relative_to(ROOT).as_posix(), marks=marks)


@pytest.fixture
def weights_to_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Hugging Face's hub "download" random weights of a small GPT-2."""
    hub = pytest.importorskip("huggingface_hub")
    published_gpt2.write(tmp_path)
    monkeypatch.setattr(hub, "hf_hub_download", lambda repository, name: str(tmp_path / name))


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("page", [case(path) for path in PAGES if "```python" in path.read_text()])
def test_the_code_of_a_page_runs(page, request, tmp_path, monkeypatch):
    for module in page.needs:
        pytest.importorskip(module)
    if "hf_hub_download" in page.document.text:
        request.getfixturevalue("weights_to_download")
    monkeypatch.chdir(tmp_path)
    page.check()


@pytest.mark.once
def test_printed_text_that_differs_is_an_error(tmp_path):
    path = tmp_path / "page.md"
    path.write_text('```python\nprint(1)\n```\n\n```text title="prints"\n2\n```\n')
    with pytest.raises(AssertionError, match=r"line 5.*\n.*prints:\n1"):
        Page(path).check()
