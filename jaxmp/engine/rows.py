"""The rows and the totals of a plan: the coloured program gone through as it would be emitted, and noted."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxmp._jaxpr import reading
from jaxmp._jaxpr.walk import jaxprs_in
from jaxmp.engine.classes import Class, classify
from jaxmp.engine.decide import Colour, computed_in, decide, is_shared, is_widening, operand_dtypes
from jaxmp.engine.emit import read_in
from jaxmp.engine.flops import flops_of
from jaxmp.engine.graph import Body, Node, Step, build
from jaxmp.engine.marks import path_of
from jaxmp.engine.patterns import islands_of
from jaxmp.engine.rules import Rules
from jaxmp.engine.why import Reasons, trips_of


@dataclasses.dataclass(frozen=True)
class Row:
    """One equation of the plan.

    Attributes:
      path: the module path or name scope, with ``/``, as an override names it; empty outside of any.
      primitive: the name of JAX's primitive.
      cls: the class that autocast has it in (``"half"``, ``"accumulation"``, …), ``"recurse"`` for an equation with
        bodies, whose equations are the rows after it, or ``"unknown"``.
      operands: the names of the dtypes that it is computed with, after casts.
      result: the name of the dtype of its result; of several results their names with a comma between.
      why: the rule, the neighbour or the island that decided.
      source: the user's file and line, ``"package/module.py:12"``; empty where JAX knows none. A file in no package is
        told by its name alone, so that a plan is the same wherever the project lies.
      flops: floating-point operations, over all trips of the loops around it (see :mod:`jaxmp.engine.flops`).
      casts: casts that autocast adds for it; a cast that several equations share stands at the first.
      cast_bytes: what these casts write, in bytes, over all trips of the loops around it.
      depth: the number of equations that it is a part of.
    """

    path: str
    primitive: str
    cls: str
    operands: tuple[str, ...]
    result: str
    why: str
    source: str
    flops: int
    casts: int
    cast_bytes: int
    depth: int


@dataclasses.dataclass(frozen=True)
class Summary:
    """The totals of a plan.

    A scan counts all its trips, a while loop one, a conditional all its branches, and the body of a shard_map the work
    of one device.

    Attributes:
      changes: whether anything changes; without a product that may run in half nothing does.
      flops: floating-point operations of the function.
      half_flops: those of them in half precision.
      product_flops: those of matrix products and convolutions.
      half_product_flops: those of products in half precision.
      casts: the casts that autocast adds, those of the function's results included.
      cast_bytes: what they write, in bytes.
      operations: the number of rows of each class.
      islands: the names of the islands in float32 (``"softmax"``, ``"normalisation"``, …) with how many there are.
      full_products: the products that stay float32, as (path or source, why).
      unknown: the names of primitives that autocast does not know; they keep their dtypes.
      uncounted: the names of primitives whose FLOPs are not known and not counted, such as kernels and solvers.
      unknown_trips: the number of loops whose trips are known only when they run.
    """

    changes: bool
    flops: int
    half_flops: int
    product_flops: int
    half_product_flops: int
    casts: int
    cast_bytes: int
    operations: Mapping[str, int]
    islands: Mapping[str, int]
    full_products: tuple[tuple[str, str], ...]
    unknown: tuple[str, ...]
    uncounted: tuple[str, ...]
    unknown_trips: int

    @property
    def half_share(self) -> float:
        """The share of the FLOPs in half precision, from 0 to 1."""
        return self.half_flops / self.flops if self.flops else 0.0


class Writer:
    """Goes through the program as :func:`jaxmp.engine.emit.coloured` does, and notes instead of computing."""

    def __init__(self, jaxpr: tuple[Any, list[Any]], rules: Rules, dtypes: Sequence[Any]) -> None:
        graph = build(*jaxpr, rules)
        results = list(zip(graph.body.results, graph.body.jaxpr.outvars, dtypes, strict=True))
        wanted = [node for node, _, dtype in results if node is not None and dtype is not None and dtype.itemsize == 2]
        changed = decide(graph, wanted)
        floats = [node for node in graph.nodes if node.colour in (Colour.FULL, Colour.ROUND)]
        self.islands = [i for i in islands_of(graph.nodes) if i.nodes[0] in set(floats)] if changed else []
        self.reasons = Reasons(graph, changed, wanted, self.islands)
        self.rows: list[Row] = []
        self.half_flops = self.half_product_flops = self.unknown_trips = 0
        self.uncounted: set[str] = set()
        self.narrow: dict[Any, np.dtype] = {}  # of what the author widened, the half dtype: who wants half reads that
        self.body(graph.body, 0, 1)
        self.result_casts = [
            atom.aval.size * dtype.itemsize
            for node, atom, dtype in results
            if node is not None and dtype is not None and _dtype(node, atom) != dtype and not reading.is_literal(atom)
        ]

    def body(self, body: Body, depth: int, trips: int, outer: str = "", shared: Iterable[Any] = ()) -> None:
        """Notes each equation of a body, which runs ``trips`` times.

        Args:
          outer: the source of the equation that the body is in.
          shared: the casts that the body has already, made before it.
        """
        shared = set(shared)
        for step in body.steps:
            place = source_of(step.eqn) or outer  # a function of JAX's that was traced before knows no caller
            if step.bodies is not None:
                self.structured(step, shared, place, depth, trips)
            else:
                self.leaf(step, body, shared, place, depth, trips)

    def structured(self, step: Step, shared: set[Any], place: str, depth: int, trips: int) -> None:
        """Notes an equation with bodies, then what is in them; ``shared`` as in :meth:`leaf`."""
        assert step.bodies is not None
        start = step.bodies.consts + step.bodies.body_consts if step.bodies.kind in ("scan", "while") else 0
        carried = dict(enumerate(step.joins, start)) if step.bodies.kind in ("scan", "while") else {}
        operands = list(zip(step.eqn.invars, step.operands, strict=True))
        own_trips = trips_of(step.eqn)
        inner_trips = trips * (1 if own_trips is None else own_trips)
        self.unknown_trips += own_trips is None
        casts = [_cast_bytes(atom, node, carried.get(n)) * trips for n, (atom, node) in enumerate(operands)]
        given = set()
        for n, (atom, node) in enumerate(operands if step.bodies.kind == "call" else ()):
            dtype = read_in(step.inner[0], n) if node is not None and node.is_cast_once else None
            if dtype is not None and node is not None:
                given.add((step.inner[0].jaxpr.invars[n], dtype))
                is_there = reading.is_literal(atom) or (atom, dtype) in shared or self.narrow.get(atom) == dtype
                if node.dtype != dtype and not is_there:
                    casts.append(int(atom.aval.size) * dtype.itemsize * trips)
                shared.add((atom, dtype))
        for number, body in enumerate(step.inner):
            if step.bodies.kind == "while" and number == 0:
                continue
            ends = zip(body.jaxpr.outvars, body.results, step.joins, strict=False)
            casts += [_cast_bytes(atom, node, join) * inner_trips for atom, node, join in ends]
        names = [_name(carried.get(n) or node, atom) for n, (atom, node) in enumerate(operands)]
        self.row(step, names, [size for size in casts if size], self.reasons.of_bodies(step), place, depth, 0)
        for body in step.inner:
            self.body(body, depth + 1, inner_trips, place, given)

    def leaf(self, step: Step, body: Body, shared: set[Any], place: str, depth: int, trips: int) -> None:
        """Notes an equation without bodies; ``shared`` are the casts that the body has already."""
        eqn, node = step.eqn, step.node
        host = {var for var, v in zip(body.jaxpr.constvars, body.consts, strict=True) if not isinstance(v, jax.Array)}
        names, casts = [], []
        for atom, operand, dtype in zip(eqn.invars, step.operands, operand_dtypes(step), strict=True):
            names.append(_name(operand, atom) if dtype is None else dtype.name)
            if operand is None or dtype is None or reading.is_literal(atom) or atom in host:
                continue
            if _dtype(operand, atom) != dtype and (atom, dtype) not in shared and self.narrow.get(atom) != dtype:
                casts.append(atom.aval.size * dtype.itemsize * trips)
            if is_shared(operand, operand.dtype, dtype):
                shared.add((atom, dtype))
        if eqn.primitive.name == "convert_element_type":
            names = [_name(step.operands[0], eqn.invars[0])]
            new = np.dtype(eqn.params["new_dtype"])
            # The author's cast is no added one; but JAX makes complex numbers of half ones by way of float32.
            if eqn.invars[0].aval.dtype != new and new.kind != "c":
                casts = []
        if node is not None and node.colour == Colour.ROUND:
            casts.append(eqn.outvars[0].aval.size * node.dtype.itemsize * trips)
        self.row(step, names, casts, self.reasons.of(step), place, depth, self.count(eqn, names, node, trips))
        if is_widening(step):
            self.narrow[eqn.outvars[0]] = _dtype(step.operands[0], eqn.invars[0])
        self.decided(eqn, step, place, depth, trips)

    def decided(self, eqn: Any, outer: Step, outer_place: str, depth: int, trips: int) -> None:
        """What is in an equation that autocast does not look into, or one inside has decided: it keeps its dtypes."""
        bodies = reading.bodies_of(eqn)
        depth, trips = depth + 1, trips * (trips_of(eqn) or 1)
        jaxprs = bodies.jaxprs if bodies is not None else ()
        if bodies is None and classify(eqn.primitive.name) in (Class.RECURSE, Class.LINALG):
            jaxprs = tuple(jaxprs_in(eqn))
        for jaxpr in jaxprs:
            for inner in reading.opened(jaxpr)[0].eqns:
                step = Step(inner, (*outer.names, *reading.names_of(inner)), [], [], outer.kind, outer.reason)
                names = [_name(None, atom) for atom in inner.invars]
                place = source_of(inner) or outer_place
                self.row(step, names, [], outer.reason, place, depth, self.count(inner, names, None, trips))
                self.decided(inner, step, place, depth, trips)

    def count(self, eqn: Any, operands: Sequence[str], node: Node | None, trips: int) -> int:
        """The FLOPs of an equation, noted as half if it computes in half."""
        if reading.bodies_of(eqn) is not None:
            return 0
        flops = flops_of(eqn)
        if flops is None:
            self.uncounted.add(eqn.primitive.name)
            return 0
        in_half = bool(operands) and all(name in ("float16", "bfloat16") for name in operands if "float" in name)
        if node is not None and node.colour >= Colour.HALF:
            in_half = computed_in(node).itemsize == 2
        if in_half:
            self.half_flops += flops * trips
            self.half_product_flops += flops * trips * (classify(eqn.primitive.name) is Class.HALF)
        return flops * trips

    def row(
        self, step: Step, operands: Sequence[str], casts: Sequence[int], why: str, place: str, depth: int, flops: int
    ) -> None:
        """Adds one row; ``casts`` are the bytes of each cast added."""
        eqn = step.eqn
        cls = "recurse" if step.bodies is not None else classify(eqn.primitive.name) or "unknown"
        nodes = step.nodes or [None] * len(eqn.outvars)
        result = ", ".join(_name(node, var) for node, var in zip(nodes, eqn.outvars, strict=True))
        path = "/".join(path_of(step.names))
        name = eqn.primitive.name
        self.rows.append(
            Row(path, name, str(cls), tuple(operands), result, why, place, flops, len(casts), sum(casts), depth)
        )

    def summary(self) -> Summary:
        """The totals of the rows noted."""
        products = [row for row in self.rows if row.cls == Class.HALF]
        full = [row for row in products if not {"float16", "bfloat16"} & set(row.operands)]
        return Summary(
            changes=self.reasons.changed,
            flops=sum(row.flops for row in self.rows),
            half_flops=self.half_flops,
            product_flops=sum(row.flops for row in products),
            half_product_flops=self.half_product_flops,
            casts=sum(row.casts for row in self.rows) + len(self.result_casts),
            cast_bytes=sum(row.cast_bytes for row in self.rows) + sum(self.result_casts),
            operations=dict(sorted(Counter(row.cls for row in self.rows).items())),
            islands=dict(sorted(Counter(island.name for island in self.islands).items())),
            full_products=tuple((row.path or row.source or row.primitive, row.why) for row in full),
            unknown=tuple(sorted({row.primitive for row in self.rows if row.cls == "unknown"})),
            uncounted=tuple(sorted(self.uncounted)),
            unknown_trips=self.unknown_trips,
        )


def _dtype(node: Node | None, atom: Any) -> Any:
    return node.value_dtype if node is not None else getattr(atom.aval, "dtype", None)


def _name(node: Node | None, atom: Any) -> str:
    dtype = _dtype(node, atom)
    return str(getattr(dtype, "name", None) or type(atom.aval).__name__)


def _cast_bytes(atom: Any, node: Node | None, join: Node | None) -> int:
    if node is None or join is None or node.dtype == join.dtype or reading.is_literal(atom):
        return 0
    return int(atom.aval.size) * join.dtype.itemsize


def source_of(eqn: Any) -> str:
    """Where an equation comes from, told alike on every machine: from the outermost package of its file."""
    place = reading.source_of(eqn)
    if place is None:
        return ""
    file, line = place
    return f"{_from_package(file)}:{line}"


@functools.cache
def _from_package(file: str) -> str:
    parts: list[str] = [os.path.basename(file)]
    for folder in Path(file).parents:
        if not (folder / "__init__.py").exists():
            break
        parts.insert(0, folder.name)
    return "/".join(parts)
