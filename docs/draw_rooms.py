"""Draws the folders of the library and their imports: python docs/draw_rooms.py writes docs/rooms.png.

A folder is as wide as the square root of its lines, or as its name. An arrow goes to a folder that it imports.
"""

from __future__ import annotations

import ast
import math
import sys
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (
    "base",
    "_internals",
    "program",
    "policy",
    "engine",
    "optim",
    "sharding",
    "training",
    "linen",
    "nnx",
    "checkpoint",
    "inspect",
    "cli",
)
"""The folders of the library. Each imports only those before it; ``tests/repository/test_imports.py`` checks this."""
GAP, HEIGHT = 0.25, 0.5


def imported_by(folder: str) -> set[str]:
    """The other folders that the files of one import."""
    imports = set()
    for file in (ROOT / "jaxmp" / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxmp."):
                imports.add(node.module.split(".")[1])
    return imports.intersection(FOLDERS) - {folder}


def lines_of(folder: str) -> int:
    """The lines of code of a folder."""
    return sum(len(file.read_text().splitlines()) for file in (ROOT / "jaxmp" / folder).rglob("*.py"))


def draw(path: Path) -> None:
    """Writes the picture."""
    figure = Figure(figsize=(11, 4.2))
    axes = figure.add_axes((0, 0, 1, 1))
    centres, left = {}, 0.0
    for folder in FOLDERS:
        lines = lines_of(folder)
        width = max(math.sqrt(lines) / 60, 0.1 * len(folder))
        box = FancyBboxPatch((left, 0), width, HEIGHT, boxstyle="round,pad=0.03", facecolor="#e8eef7", edgecolor="#345")
        axes.add_patch(box)
        centres[folder] = left + width / 2
        axes.text(centres[folder], HEIGHT * 0.6, folder, ha="center", va="center", fontsize=9)
        axes.text(centres[folder], HEIGHT * 0.25, f"{lines:,}", ha="center", va="center", fontsize=8, color="#667")
        left += width + GAP
    for folder in FOLDERS:
        for used in imported_by(folder):
            is_above = FOLDERS.index(used) < FOLDERS.index(folder)
            height = HEIGHT + 0.05 if is_above else -0.05
            arrow = FancyArrowPatch(
                (centres[folder], height), (centres[used], height), arrowstyle="-|>", mutation_scale=8,
                connectionstyle="arc3,rad=0.4", color="#89a" if is_above else "#c44", linewidth=0.8,
            )  # fmt: skip
            axes.add_patch(arrow)
    axes.text(
        0, -0.75, "lines of code below each name; an arrow goes to a folder that is imported", fontsize=9, color="#667"
    )
    axes.set_xlim(-0.2, left)
    axes.set_ylim(-1.0, 3.4)
    axes.set_aspect("equal")
    axes.axis("off")
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(__doc__)
        sys.exit()
    draw(ROOT / "docs" / "rooms.png")
