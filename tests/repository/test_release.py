"""A release has one version, dated notes, and the repository's address in one place; the page of versions is right."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from places import ROOT

pytestmark = pytest.mark.once

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
#: The files that a release reads, ready for version 1.2.0.
READY = {
    "jaxmp/__init__.py": '__version__ = "1.2.0"\n',
    "CITATION.cff": "cff-version: 1.2.0\nversion: 1.2.0\n",
    "CHANGELOG.md": "# Changelog\n\n## 1.2.0 (2027-01-31)\n\n- A name.\n\n## 1.2.0rc1 (2027-01-01)\n\n- Older.\n",
    "pyproject.toml": '[project.urls]\nRepository = "https://example.org/somebody/jaxmp"\n',
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a folder with the files of READY and the script that reads them."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/release.py", tmp_path / ".ci")
    (tmp_path / "jaxmp").mkdir()
    for name, text in READY.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_notes_of_a_release_are_its_entry_in_the_changelog(project):
    command = [sys.executable, "-S", str(project / ".ci/release.py")]
    done = subprocess.run([*command, "v1.2.0"], capture_output=True, text=True)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "- A name.\n")
    refused = subprocess.run([*command, "v1.3.0"], capture_output=True, text=True)
    assert refused.returncode == 1 and refused.stderr.startswith("error: the tag must be v1.2.0") and not refused.stdout


@pytest.mark.parametrize(
    ("file", "ready", "changed", "problem"),
    [
        ("jaxmp/__init__.py", "1.2.0", "1.2.1", "the tag must be v1.2.1"),
        ("CITATION.cff", "\nversion: 1.2.0", "\nversion: 1.1.0", "CITATION.cff has version 1.1.0"),
        ("CHANGELOG.md", "(2027-01-31)", "(unreleased)", "CHANGELOG.md needs a heading with a date"),
        ("CHANGELOG.md", "## 1.2.0 (", "## 1.2.01 (", "CHANGELOG.md needs a heading with a date"),
        ("pyproject.toml", "somebody", "OWNER", "replace OWNER by your account in pyproject.toml"),
    ],
)
def test_a_release_that_is_not_ready_is_refused(project, file, ready, changed, problem):
    problems = runpy.run_path(str(project / ".ci/release.py"))["problems"]
    assert problems("v1.2.0") == []
    (project / file).write_text(READY[file].replace(ready, changed))
    assert any(problem in error for error in problems("v1.2.0"))


def test_the_citation_and_the_changelog_have_the_version_of_the_library():
    version = re.search('__version__ = "(.+)"', (ROOT / "jaxmp/__init__.py").read_text())[1]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    newest = re.search("^## (.+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert re.match(rf"{re.escape(version)}\b", newest)


def test_only_the_project_file_has_the_address_of_the_repository():
    files = [path for path in ROOT.glob("*.*") if path.is_file()]
    for folder in ("jaxmp", "docs", ".ci", ".github"):
        files += [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".yml", ".sh")]
    owner_and_name = "/".join(PROJECT["urls"]["Repository"].split("/")[-2:])
    with_address = {path.relative_to(ROOT).as_posix() for path in files if owner_and_name in path.read_text()}
    assert with_address == {"pyproject.toml"}


def test_the_page_of_versions_states_those_of_the_project_and_of_its_pins():
    page = (ROOT / "docs" / "concepts" / "limits.md").read_text()
    minors = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert f"| Python | {', '.join(minors[:-1])} or {minors[-1]} |" in page
    assert PROJECT["requires-python"] == f">={minors[0]},<3.{int(minors[-1].partition('.')[2]) + 1}"
    required = dict(line.split(">=") for line in PROJECT["dependencies"])
    pins = (ROOT / "constraints.txt").read_text()
    for name in ("JAX", "Flax", "optax"):
        tested = re.findall(rf"^{name.lower()}==(\S+)", pins, re.MULTILINE)
        assert f"| {name} | {required[name.lower()]} or later | {' and '.join(tested)} |" in page
