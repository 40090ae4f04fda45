"""Draw the pictures of docs/autocast.md from the graph that jaxmp.autocast decides on.

python docs/draw_autocast.py

The model is GPT-2's block in plain Flax, between the product that came before it and the one that comes after.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # started as a file: the folder above this one has the packages
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from jaxmp.engine.classifier import Classifier
from jaxmp.engine.decide import decide_program
from jaxmp.engine.graph import build
from jaxmp.engine.nodes import Node, Step, StepBody
from jaxmp.engine.operation_patterns import find_patterns
from jaxmp.engine.states import Kind, Rule, State
from jaxmp.engine.value_decision import Decision
from jaxmp.program.equations import opened

FOLDER = Path(__file__).parent
HALF, FULL, OPEN, CAST = "#F2A65A", "#8DB7E2", "#FFFFFF", "#B3123F"
TEXT, LINE = "#222222", "#777777"
SECTIONS = ("bqhd,bkhd", "ln_2")  # where attention and the perceptron begin, in the scopes of the block
Labels = dict[Node, str]
SPREADS = {Rule.FEEDS: "feeds float32", Rule.FOLLOWS: "follows float32"}
LABELS = {
    "dot_general": "matrix product", "reduce_sum": "sum", "reduce_max": "max over keys", "integer_pow": "x³",
    "select_n": "causal mask", "square": "x²", "mul": "×", "add": "+", "sub": "−", "div": "÷", "max": "max",
}  # fmt: skip


class Block(nn.Module):
    """GPT-2's block, float32 throughout."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, batch: int) -> jax.Array:
        """Return activations of the shape of ``x``, the (tokens, width) of ``batch`` texts."""
        width = x.shape[-1]
        qkv = nn.Dense(3 * width, name="qkv")(nn.LayerNorm(name="ln_1")(x))
        q, k, v = jnp.split(qkv.reshape(batch, -1, 3 * self.heads, width // self.heads), 3, axis=2)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        causal = np.tril(np.ones(scores.shape[-2:], bool))
        weights = nn.softmax(jnp.where(causal, scores, jnp.finfo(jnp.float32).min))
        attended = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
        x = x + nn.Dense(width, name="out")(attended)
        return x + nn.Dense(width, name="down")(nn.gelu(nn.Dense(4 * width, name="up")(nn.LayerNorm(name="ln_2")(x))))


@dataclasses.dataclass(eq=False)
class Box:
    """An operation of the picture."""

    node: Node
    path: tuple[str, ...]
    decision_of: Mapping[Node, Decision]
    x: float = 0.0
    y: float = 0.0

    @property
    def decision(self) -> Decision:
        """Return the decision on the operation."""
        return self.decision_of[self.node]

    @property
    def moves(self) -> bool:
        """Return whether an operation moves data and computes nothing."""
        return self.node.kind is Kind.CLEAR


def decided_block() -> tuple[list[Box], Labels]:
    """Return the operations of a block in order, decided, and the names of the patterns in float32."""
    block, half = Block(heads=4), np.dtype(jnp.bfloat16)
    x, w = jax.ShapeDtypeStruct((2 * 128, 256), jnp.float32), jax.ShapeDtypeStruct((256, 256), jnp.float32)
    params = jax.eval_shape(lambda x: block.init(jax.random.key(0), x, 2), x)
    closed = jax.make_jaxpr(lambda params, x, w: block.apply(params, x @ w, 2) @ w)(params, x, w)
    graph = build(opened(closed), jax.tree.leaves((params, x, w)), [None], Classifier(half, {}))
    decisions = decide_program(graph)
    boxes = [Box(step.node, step.names, decisions.decision_of) for step in _steps(graph.body) if step.node is not None]
    patterns = find_patterns(graph, decisions.decision_of)
    return boxes, {pattern.nodes[0]: pattern.name for pattern in patterns}


def _steps(body: StepBody) -> Iterable[Step]:
    for step in body.steps:
        yield from [inner for body in step.inner for inner in _steps(body)] or [step]


def lay_out(boxes: Sequence[Box]) -> None:
    """Place operations below their operands, and params beside their readers."""
    known = {box.node: box for box in boxes}
    params = [box for box in boxes if _is_param(box)]
    operations = [box for box in boxes if not _is_param(box)]
    for box in operations:
        above = [known[node] for node in box.node.inputs if node in known and not _is_param(known[node])]
        box.y = max((upper.y + 1.0 for upper in above), default=0.0)
        box.x = sum(upper.x for upper in above) / len(above) if above else 0.0
    rows = collections.defaultdict(list)
    for box in operations:
        rows[round(box.y, 2)].append(box)
    for y in sorted(rows):
        row = sorted(rows[y], key=lambda box: (box.x, box.node.name != "square"))
        middle = sum(box.x for box in row) / len(row)
        for place, box in enumerate(row):
            box.x = middle + 1.2 * (place - (len(row) - 1) / 2)
    for box in params:
        reader = known[box.node.users[0]]
        box.x, box.y = reader.x + 1.0, reader.y - 0.45


def _is_param(box: Box) -> bool:
    """Return whether an operation only brings a param or a constant into shape."""
    return box.moves and all(node.kind is Kind.SOURCE for node in box.node.inputs)


def fill_of_kind(box: Box) -> str:
    """Return the colour of the kind of an operation."""
    return {Kind.HALF: HALF, Kind.FULL: FULL, Kind.STRICT: FULL}.get(box.node.kind, OPEN)


def fill_of_state(box: Box) -> str:
    """Return the colour of an operation once the rules have raised all that they raise."""
    return FULL if box.decision.state >= State.FLOAT32 else fill_of_kind(box)


def final_fill(box: Box) -> str:
    """Return the colour of an operation in the end."""
    return HALF if box.decision.stored_dtype.itemsize == 2 else FULL


def draw(axes: Any, boxes: Sequence[Box], fills: dict[Box, str], casts: bool, title: str, origins: Labels) -> None:
    """Draw a panel: boxes, arrows, where values come from and, with ``casts``, where they are cast."""
    known = {box.node: box for box in boxes}
    for box in boxes:
        outside = [node for node in dict.fromkeys(box.node.inputs) if node not in known and node in origins]
        for node in dict.fromkeys(box.node.inputs):
            if (above := known.get(node)) is not None:
                _arrow(axes, (above.x, above.y + (0.1 if above.moves else 0.22)), box, casts and _is_cast(node, box))
        for place, node in enumerate(outside):
            x, y = box.x + 1.3 * (place - (len(outside) - 1) / 2) - (1.1 if box.y else 0), box.y - 0.75
            _arrow(axes, (x, y), box, casts and _is_cast(node, box))
            axes.text(x, y - 0.05, origins[node], ha="center", va="bottom", fontsize=8, color=LINE, style="italic")
    for box in boxes:
        _box(axes, box, fills[box], casts and box.decision.compute_dtype not in (None, box.decision.stored_dtype))
    low, high = min(box.x for box in boxes), max(box.x for box in boxes)
    middle, reach = (low + high) / 2, max(2.1, (high - low) / 2 + 0.8)
    axes.set_xlim(middle - reach, middle + reach)
    axes.set_ylim(max(box.y for box in boxes) + 0.6, -1.2)
    axes.set_title(title, fontsize=11, fontweight="bold", color=TEXT)
    axes.axis("off")


def _is_cast(above: Node, box: Box) -> bool:
    """Return whether a value changes its dtype on the way into an operation."""
    dtype = box.decision_of[above].stored_dtype
    compute = box.decision.compute_dtype or (dtype if box.moves else np.dtype(np.float32))
    return bool(dtype != compute)


def _arrow(axes: Any, start: tuple[float, float], box: Box, cast: bool) -> None:
    end = box.x, box.y - (0.1 if box.moves else 0.22)
    far = end[1] - start[1] > 1.0  # past other boxes, in a bow
    bow = 0.0 if not far else (-0.28 if start[0] >= end[0] - 0.05 else 0.18)
    look = {"arrowstyle": "-|>", "color": CAST if cast else LINE, "linewidth": 1.7 if cast else 0.9}
    look |= {"shrinkA": 0, "shrinkB": 0, "connectionstyle": f"arc3,rad={bow}"}
    axes.annotate("", end, start, arrowprops=look, zorder=5 if cast else 1)
    if cast:
        axes.plot(*end, "D", color=CAST, markersize=5.5, zorder=6)


def _box(axes: Any, box: Box, fill: str, rounds: bool) -> None:
    if box.moves:
        axes.plot([box.x], [box.y], "o", markersize=9, markerfacecolor=fill, markeredgecolor=LINE, zorder=3)
        if _is_param(box):
            name = {"mul": "scale", "add": "bias", "select_n": "float32's lowest"}.get(box.node.users[0].name, "param")
            axes.text(box.x + 0.15, box.y, name, ha="left", va="center", fontsize=8, color=LINE, style="italic")
        return
    name = LABELS.get(box.node.name, box.node.name)
    width = max(0.5, 0.105 * len(name) + 0.1)
    look = {"boxstyle": "round,pad=0.02,rounding_size=0.08", "facecolor": fill, "edgecolor": LINE, "zorder": 3}
    axes.add_patch(FancyBboxPatch((box.x - width / 2, box.y - 0.22), width, 0.44, **look))
    axes.text(box.x, box.y, name, ha="center", va="center", fontsize=8.5, color=TEXT, zorder=4)
    if rounds:  # computed in float32
        lower = {**look, "facecolor": FULL, "linewidth": 0, "zorder": 3.5}
        axes.add_patch(FancyBboxPatch((box.x - width / 2, box.y - 0.21), width, 0.2, **lower))
        axes.plot([box.x], [box.y + 0.24], "D", color=CAST, markersize=5.5, zorder=6)


def label(axes: Any, boxes: Sequence[Box], labels: Labels) -> None:
    """Write labels to the left of operations, or to the right where another operation is on the left."""
    for box in boxes:
        if box.node not in labels or box.moves:
            continue
        is_free = not any(0 < box.x - other.x < 1.5 and other.y == box.y for other in boxes)
        x, side = (box.x - 0.36, "right") if is_free else (box.x + 0.36, "left")
        look = {"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8}
        axes.text(x, box.y, labels[box.node], ha=side, va="center", fontsize=8, color=CAST, style="italic", bbox=look)


def legend(figure: Figure, kinds: Sequence[tuple[str, str, str]]) -> None:
    """Explain colours and marks: label, colour and marker."""
    axes = figure.add_axes((0, 0, 1, 0.05))
    axes.axis("off")
    handles = [
        axes.plot([], [], mark, markersize=9, markerfacecolor=fill, markeredgecolor=LINE)[0] for _, fill, mark in kinds
    ]
    axes.legend(handles, [label for label, _, _ in kinds], ncols=len(kinds), loc="center", frameon=False, fontsize=10)


def draw_block(boxes: Sequence[Box], patterns: Labels, path: Path) -> None:
    """Draw the whole block: every operation, every cast, and the names of patterns."""
    starts = [next(i for i, box in enumerate(boxes) if any(name in part for part in box.path)) for name in SECTIONS]
    parts = [boxes[: starts[0]], boxes[starts[0] : starts[1]], boxes[starts[1] :]]
    titles = ("1  layer norm; queries, keys, values", "2  attention; residual sum", "3  layer norm; perceptron; sum")
    figure = Figure(figsize=(14, 15))
    for i, (part, title) in enumerate(zip(parts, titles, strict=True)):
        lay_out(part)
        origins = {box.node: f"from {n}" for n, other in enumerate(parts[:i], 1) for box in other}
        axes = figure.add_axes((0.01 + 0.33 * i, 0.05, 0.32, 0.92))
        draw(axes, part, {box: final_fill(box) for box in part}, True, title, origins)
        label(axes, part, patterns)
    legend(
        figure,
        (("bfloat16", HALF, "s"), ("float32", FULL, "s"), ("only moved: its neighbours' dtype", OPEN, "o"),
         ("cast", CAST, "D")),
    )  # fmt: skip
    figure.savefig(path, dpi=90)


def draw_passes(boxes: Sequence[Box], path: Path) -> None:
    """Draw three stages of the layer norm and its neighbours: own kinds, float32 spread, final dtypes."""
    chosen = boxes[: _first_move(boxes)]
    lay_out(chosen)
    rules = {box.node: SPREADS[box.decision.rule] for box in chosen if box.decision.rule in SPREADS}
    panels = (
        ("rules 2 and 3: each operation by itself", fill_of_kind, False, {}),
        ("rules 5 and 6: float32 spreads", fill_of_state, False, rules),
        ("rule 8: the rest; casts", final_fill, True, {}),
    )
    figure = Figure(figsize=(13, 9))
    for i, (title, fill, casts, labels) in enumerate(panels):
        axes = figure.add_axes((0.01 + 0.33 * i, 0.06, 0.32, 0.89))
        draw(axes, chosen, {box: fill(box) for box in chosen}, casts, title, {})
        label(axes, chosen, labels)
    legend(
        figure,
        (("bfloat16", HALF, "s"), ("float32", FULL, "s"), ("not decided yet", OPEN, "s"), ("only moved", OPEN, "o"),
         ("cast", CAST, "D")),
    )  # fmt: skip
    figure.savefig(path, dpi=100)


def _first_move(boxes: Sequence[Box]) -> int:
    """Return the index of the move after the bias of queries, keys and values."""
    return next(i for i, box in enumerate(boxes) if box.moves and box.path[-1:] == ("Block",))


def main(folder: Path = FOLDER) -> None:
    """Write both pictures to a folder."""
    boxes, patterns = decided_block()
    draw_passes(boxes, folder / "autocast_passes.png")
    draw_block(boxes, patterns, folder / "autocast_block.png")


if __name__ == "__main__":
    main()
