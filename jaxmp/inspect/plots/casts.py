"""Draw a plan of autocast as a graph of coloured boxes.

1. Consecutive operations of one scope and one dtype form a box (`_boxes`). Paths of scopes are shortened until there
   are few boxes.
2. The boxes are drawn in program order, one below the other. A long graph continues in the next column.
3. Arrows lead to each box from the boxes whose results it reads.
"""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxmp.base import tables
from jaxmp.engine.plan import CastPlan
from jaxmp.engine.plan import PlanRow as Operation
from jaxmp.inspect.plots.drawing import BLACK, GREY, figure, percent, set_title, short_path

_MAX_BOXES = 40
_BOXES_IN_A_COLUMN = 13
_COLORS = {"bfloat16": "#F2A65A", "float16": "#F2A65A", "float32": "#8DB7E2", "float64": "#CFCFCF"}
_FLOAT8 = "#C7A6DB"
_CAST = "#B3123F"
_ARROW = "#8A8A8A"
_EDGE = "#777777"
_WIDTH, _HEIGHT, _COLUMN_WIDTH = 2.4, 0.6, 5.0
"""The size of a box and of a column, relative to the distance between boxes in a column."""


class _Box(NamedTuple):
    """Consecutive operations of one scope.

    They also have one dtype, unless ``dtype`` is empty.
    """

    path: str
    dtype: str
    rows: list[Operation]
    reads: set[int]  # the numbers of the boxes whose results this box reads


def casts(plan: CastPlan) -> Any:
    """Draw a plan of autocast as a coloured graph, from the top down.

    A box contains consecutive operations of one scope and one dtype. In a large program, a box contains operations of
    one scope and several dtypes, and its colours show the share of each dtype. A red arrow is a change of dtype. A red
    diamond marks casts that autocast adds, with their number and their bytes. Weights, masks and indices are not drawn.

    Args:
      plan: a result of :func:`jaxmp.cast_plan`.

    Raises:
      ModuleNotFoundError: matplotlib is not installed.

    >>> plan = jaxmp.cast_plan(lambda w, x: jax.nn.logsumexp(x @ w), "mixed_bfloat16")(jnp.ones((8, 8)), jnp.ones(8))
    >>> casts(plan).get_suptitle()
    '100% of the FLOPs of products are half; autocast adds 4 casts'
    """
    boxes = _boxes(plan.rows)
    columns = -(-len(boxes) // _BOXES_IN_A_COLUMN)
    height = -(-len(boxes) // columns)
    right = _COLUMN_WIDTH * columns - 1.2
    page = figure(max(8.0, 1.2 + 0.95 * right), 1.3 + 0.8 * height)
    axes = page.add_subplot()
    axes.axis("off")
    axes.set_xlim(-1.9, right)
    axes.set_ylim(height - 0.4, -0.7)
    for number, box in enumerate(boxes):
        _draw_arrows(axes, number, boxes, height)
        _draw_box(axes, number, box, *_position(number, height))
        _draw_casts(axes, box, *_position(number, height))
    _draw_legend(page, boxes)
    set_title(page, _summary(plan))
    return page


def _summary(plan: CastPlan) -> str:
    summary = plan.summary
    if not summary.changes:
        return "Nothing changes: no product is half"
    half = summary.half_product_flops / summary.product_flops if summary.product_flops else 0.0
    return f"{percent(half)} of the FLOPs of products are half; autocast adds {summary.casts} casts"


def _dtype_of(row: Operation) -> str:
    """Return the widest floating dtype of an operation's operands.

    For an operation that only moves data, or that has no floating operand, return the widest floating dtype of its
    results. Return ``""`` if the operation has no floating dtype.
    """
    results = row.result.split(", ")
    names = [name for name in (results if row.cls == "clear" else row.operands) if "float" in name]
    names = names or [name for name in results if "float" in name]
    return max(names, key=_width_and_name, default="")


def _width_and_name(dtype: str) -> tuple[int, str]:
    return int(re.findall(r"\d+", dtype)[0]), dtype


def _boxes(rows: Sequence[Operation]) -> list[_Box]:
    """Group consecutive operations into few boxes, so that the graph is readable.

    Operations are grouped by path and dtype, with shorter and shorter paths until there are few groups. If there are
    still too many groups, operations are grouped only by path, again with shorter and shorter paths.
    """
    numbers = _numbers_of_drawn(rows)
    deepest = max((rows[n].path.count("/") + 1 for n in numbers), default=1)
    for by_dtype in (True, False):
        for level in range(deepest, 0, -1):
            groups = _grouped(rows, numbers, level, by_dtype)
            if len(groups) <= _MAX_BOXES:
                return _boxes_of(rows, groups)
    return _boxes_of(rows, groups)


def _numbers_of_drawn(rows: Sequence[Operation]) -> list[int]:
    """Return the indices in ``rows`` of the operations to draw.

    Drawn operations have a floating dtype. Operations with bodies, such as loops, and operations that only move weights
    are left out.
    """
    drawn: list[int] = []
    for n, row in enumerate(rows):
        has_body = n + 1 < len(rows) and rows[n + 1].depth > row.depth
        moves_a_weight = row.cls == "clear" and row.primitive != "gather" and set(drawn).isdisjoint(row.reads)
        if not has_body and not moves_a_weight and _dtype_of(row):
            drawn.append(n)
    return drawn


_Group = tuple[str, str, list[int]]
"""The path, the dtype and the numbers of consecutive operations."""


def _grouped(rows: Sequence[Operation], numbers: Sequence[int], level: int, by_dtype: bool) -> list[_Group]:
    def path_and_dtype(n: int) -> tuple[str, str]:
        path = "/".join(rows[n].path.split("/")[:level])
        return path, _dtype_of(rows[n]) if by_dtype else ""

    return [(path, dtype, list(group)) for (path, dtype), group in itertools.groupby(numbers, path_and_dtype)]


def _boxes_of(rows: Sequence[Operation], groups: Sequence[_Group]) -> list[_Box]:
    box_of = {n: box for box, (_, _, numbers) in enumerate(groups) for n in numbers}
    boxes = []
    for box, (path, dtype, numbers) in enumerate(groups):
        reads = {box_of[m] for n in numbers for m in rows[n].reads if m in box_of}
        boxes.append(_Box(path, dtype, [rows[n] for n in numbers], reads - {box}))
    return boxes


def _position(number: int, height: int) -> tuple[float, int]:
    """Return the centre of a box, in a picture with ``height`` boxes in a column."""
    column, y = divmod(number, height)
    return _COLUMN_WIDTH * column, y


def _draw_arrows(axes: Any, number: int, boxes: Sequence[_Box], height: int) -> None:
    """Draw the arrows to a box.

    If the box reads results of boxes in other columns, the numbers of these boxes are written at one short arrow.
    """
    x, y = _position(number, height)
    in_other_columns = []
    for source in sorted(boxes[number].reads):
        if source // height != number // height:
            in_other_columns.append(str(source + 1))
            continue
        dtypes = boxes[source].dtype, boxes[number].dtype
        is_cast = all(dtypes) and dtypes[0] != dtypes[1]
        look: dict[str, Any] = {
            "color": _CAST if is_cast else _ARROW,
            "linewidth": 1.6 if is_cast else 0.9,
            "zorder": 1,
        }
        distance = number - source
        if distance > 1:  # the arrow goes around the boxes in between
            side = x + _WIDTH / 2
            _draw_arrow(axes, (side, y - distance), (side, y), bow=-0.35, **look)
        else:
            _draw_arrow(axes, (x, y - 1 + _HEIGHT / 2), (x, y - _HEIGHT / 2), **look)
    if in_other_columns:
        left = x - _WIDTH / 2
        _draw_arrow(axes, (left - 0.35, y), (left, y), color=_ARROW, linewidth=0.9)
        label = f"from {', '.join(in_other_columns)}"
        axes.text(left - 0.4, y, label, ha="right", va="center", fontsize=7.5, color=GREY, style="italic")


def _draw_arrow(
    axes: Any,
    start: tuple[float, float],
    end: tuple[float, float],
    *,
    color: str,
    linewidth: float,
    bow: float = 0.0,
    zorder: float | None = None,
) -> None:
    look = {"arrowstyle": "-|>", "color": color, "linewidth": linewidth, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, start, arrowprops=look | {"connectionstyle": f"arc3,rad={bow}"}, zorder=zorder)


def _shares_of_dtypes(box: _Box) -> dict[str, float]:
    counts = collections.Counter(box.dtype or _dtype_of(row) for row in box.rows)
    return {name: count / len(box.rows) for name, count in counts.most_common()}


def _draw_box(axes: Any, number: int, box: _Box, x: float, y: int) -> None:
    left = x - _WIDTH / 2
    drawn_share = 0.0
    for dtype, share in _shares_of_dtypes(box).items():
        color = _COLORS.get(dtype, _FLOAT8)
        axes.barh(y, _WIDTH * share, _HEIGHT, left + _WIDTH * drawn_share, color=color, zorder=2)
        drawn_share += share
    axes.barh(y, _WIDTH, _HEIGHT, left, color="none", edgecolor=_EDGE, linewidth=0.9, zorder=3)
    path = short_path(box.path) if box.path else "in no scope"
    path = path if len(path) <= 28 else f"…{path[-27:]}"
    center = {"ha": "center", "va": "center", "color": BLACK, "zorder": 4}
    axes.text(x, y - 0.1, f"{number + 1}  {path}", fontsize=8, fontweight="bold", **center)
    axes.text(x, y + 0.13, _contents(box), fontsize=7, **center)


def _draw_casts(axes: Any, box: _Box, x: float, y: int) -> None:
    count = sum(row.casts for row in box.rows)
    if count:
        left, top = x - _WIDTH / 2, y - _HEIGHT / 2
        label = f"{count}: {tables.byte_text(sum(row.cast_bytes for row in box.rows))}"
        axes.plot([left], [top], "D", color=_CAST, markersize=5, zorder=5, clip_on=False)
        axes.text(left + 0.1, top - 0.03, label, ha="left", va="bottom", fontsize=6.5, color=_CAST, zorder=5)


def _word(primitive: str) -> str:
    """Return a plain word for a primitive."""
    match primitive:
        case "dot_general":
            return "product"
        case "conv_general_dilated":
            return "convolution"
        case "reduce_sum":
            return "sum"
        case "reduce_max":
            return "max"
        case "convert_element_type":
            return "cast as written"
        case "select_n":
            return "select"
    return primitive


def _contents(box: _Box) -> str:
    """Name the computations of a box.

    Matrix products and convolutions come first. The other primitives follow.
    """
    counts = collections.Counter(_word(row.primitive) for row in box.rows if row.cls != "clear")
    products = [name for name in counts if name in ("product", "convolution")]
    words = [f"{counts[name]} {name}s" if counts[name] > 1 else name for name in products]
    others = [name for name, _ in counts.most_common() if name not in products]
    words += others
    if not words:
        return "moves data"
    return ", ".join(words[:3]) + (", …" if len(words) > 3 else "")


def _draw_legend(page: Any, boxes: Sequence[_Box]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    dtypes = dict.fromkeys(dtype for box in boxes for dtype in _shares_of_dtypes(box))
    handles: list[Any] = [
        Patch(facecolor=_COLORS.get(dtype, _FLOAT8), edgecolor=_EDGE, label=f"computed in {dtype}") for dtype in dtypes
    ]
    if any(row.casts for box in boxes for row in box.rows):
        handles.append(Line2D([], [], color=_CAST, marker="D", markersize=5, label="cast: how many, bytes written"))
    page.legend(handles=handles, loc="outside lower left", ncols=len(handles), frameon=False, fontsize=8.5)
