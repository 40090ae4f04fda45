"""The plan: autocast's decision for each equation, and the reason.

A plan is made without executing the function.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmp._internals.jax.sources import is_transformed_around, names_of, source_of
from jaxmp.base import tables
from jaxmp.base.arguments import require_function
from jaxmp.base.dtypes import name_of
from jaxmp.base.inspection import Inspection
from jaxmp.engine.classifier import Classifier
from jaxmp.engine.decide import decide_program
from jaxmp.engine.emit import Emission
from jaxmp.engine.flops import flops_of
from jaxmp.engine.graph import build
from jaxmp.engine.inner_emissions import collecting_emissions, scope_in
from jaxmp.engine.marks import names_around, path_of
from jaxmp.engine.nodes import Step
from jaxmp.engine.overrides import policy_and_exceptions
from jaxmp.engine.plan_by_module import PlanByModule, rows_by_module
from jaxmp.engine.reasons import Reasons
from jaxmp.engine.states import Kind
from jaxmp.engine.trace import result_dtypes, traced
from jaxmp.policy.policies import Policy
from jaxmp.program.equations import aval_of, bodies_of, opened, primitive_of
from jaxmp.program.primitives import CAST, Class, classify
from jaxmp.program.walk import jaxprs_in

_HALF = {"float16", "bfloat16", "float8_e4m3fn"}
_HEADER = ("primitive", "operands -> result", "FLOPs", "casts", "class", "path", "why", "source")
_LINE = "{:<24} {:<36} {:>8} {:>8}  {:<12} {} | {} | {}"  # no width depends on another row


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """One equation of the plan.

    Attributes:
      path: the path of modules or name scopes, which you can use as the key of an override; empty outside of scopes.
      primitive: the name of JAX's primitive.
      cls: autocast's class of the primitive, such as ``"half"`` or ``"accumulation"``; ``"unknown"`` if there is none.
        After a row of the class ``"recurse"``, the equations of its bodies follow.
      operands: the dtypes of its operands, after casts.
      result: the dtype of its result; the dtypes of several results are joined by commas.
      why: the reason for the dtypes: a rule or a neighbour.
      source: the user's file and line, ``"package/module.py:12"`` (without a package, the file name); empty if unknown.
      flops: the floating-point operations, over all trips of the loops around it (see :mod:`jaxmp.engine.flops`).
      casts: the number of casts that are added for it. A shared cast counts only for its first reader. The last
        row of an inner autocast call also counts the casts of its results.
      cast_bytes: the bytes that these casts write, over all trips of the loops around it.
      depth: the number of equations whose bodies contain it.
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

    @property
    def is_floating(self) -> bool:
        """Return whether the equation has a floating operand."""
        return any("float" in name for name in self.operands)

    @property
    def is_half(self) -> bool:
        """Return whether all floating operands are half precision or float8."""
        return self.is_floating and all(name in _HALF for name in self.operands if "float" in name)

    def _cells(self) -> tuple[str, ...]:
        """Return the cells of a row, under ``_HEADER``."""
        dtypes = f"{tables.runs(self.operands)} -> {tables.runs(self.result.split(', '))}".strip()
        sizes = (tables.short(self.flops), tables.byte_text(self.cast_bytes) if self.casts else "-")
        return ("  " * self.depth + self.primitive, dtypes, *sizes, self.cls, self.path, self.why, self.source)


@dataclasses.dataclass(frozen=True)
class Summary:
    """The totals of a plan.

    The totals count all trips of a scan, one trip of a while loop, all branches of a conditional, and one device of a
    shard_map.

    Attributes:
      changes: whether autocast may change a dtype; False if it finds no product to decide.
      flops: floating-point operations of the function.
      half_flops: the FLOPs in half precision.
      product_flops: the FLOPs of matrix products and convolutions.
      half_product_flops: the FLOPs of products in half precision.
      casts: the number of casts that autocast adds, including those of the function's results.
      cast_bytes: the bytes that these casts write.
      operations: the number of rows of each class.
      full_products: the products that stay float32, as (path or source, why); see :class:`PlanRow`.
      float8: the numbers of products in code with a float8 recipe. The key ``"float8"`` has the number of float8
        products. The other keys are reasons, such as ``"no float8: 768 < 1536"``, with the number of half products
        that are not float8 for this reason.
      unknown: the names of primitives that autocast does not know; they keep their dtypes.
      uncounted: the names of primitives with unknown FLOPs, such as kernels and solvers. The totals leave these out.
      unknown_trips: the number of while loops. Their trips are known only at run time.
      half_share: the share of the FLOPs in half precision, from 0 to 1.
    """

    changes: bool
    flops: int
    half_flops: int
    product_flops: int
    half_product_flops: int
    casts: int
    cast_bytes: int
    operations: Mapping[str, int]
    full_products: tuple[tuple[str, str], ...]
    float8: Mapping[str, int]
    unknown: tuple[str, ...]
    uncounted: tuple[str, ...]
    unknown_trips: int
    half_share: float

    def _lines(self) -> Iterator[str]:
        """Yield the totals as text."""
        yield from self._shares()
        yield f"operations by class: {tables.counts(self.operations)}"
        yield f"casts added: {self.casts}, which write {self.cast_bytes} bytes"
        if self.float8:
            not_so = [f", {why} ({count})" for why, count in self.float8.items() if why != "float8"]
            yield f"products in float8: {self.float8.get('float8', 0)} of {sum(self.float8.values())}{''.join(not_so)}"
        if not self.changes:
            yield f"no {'further ' if self.half_product_flops else ''}product in half: nothing changes"
        named = {"unknown primitives, which keep their dtypes": self.unknown, "FLOPs not counted": self.uncounted}
        yield from (f"{text}: {', '.join(names)}" for text, names in named.items() if names)
        if self.unknown_trips:
            yield f"loops of unknown trips, counted as one trip each: {self.unknown_trips}"
        yield from (f"float32 product: {place}: {why}" for place, why in self.full_products)

    def _shares(self) -> Iterator[str]:
        """Yield the shares of the FLOPs in half precision as text."""
        products = self.half_product_flops / self.product_flops if self.product_flops else 0.0
        yield f"FLOPs of products: {self.product_flops}, {100 * products:.1f} % in half precision"
        yield f"FLOPs: {self.flops}, {100 * self.half_share:.1f} % in half precision"


@dataclasses.dataclass(frozen=True)
class CastPlan(tables.Shown):
    """The decisions of autocast for one call of a function.

    ``str(plan)`` has the totals, and then one line for each equation. :attr:`by_module` is the short form, with one row
    for each module. You can keep the text under version control: if the precision of one operation changes, its line
    and the totals change. (It has no variable names, ids, absolute paths
    or columns of variable width.) :meth:`to_json` returns the plan for other programs. :meth:`table` returns the
    primitives, dtypes, paths and reasons.

    Attributes:
      policy: the policy, as text; ``"the policies of its models"`` if the plan has no policy of its own.
      overrides: the overrides.
      rows: one row for each equation. The rows of a loop's or function's body follow the row of the loop or function.
      summary: the totals.
    """

    policy: str
    overrides: Mapping[str, str]
    rows: tuple[PlanRow, ...]
    summary: Summary

    def __str__(self) -> str:
        """Return the text of the plan."""
        rows = [_LINE.format(*(cell or "-" for cell in cells)) for cells in (_HEADER, *(r._cells() for r in self.rows))]
        return "\n".join([*self._title(), "", *self.summary._lines(), "", *rows])

    @property
    def by_module(self) -> PlanByModule:
        """Return the short form of the plan, with one row for each module or scope.

        >>> plan = cast_plan(lambda x, w: jnp.sum(x @ w), "mixed_bfloat16")(jnp.ones((2, 8)), jnp.ones((8, 4)))
        >>> [(row.products, row.others, row.why) for row in plan.by_module.rows]
        [({'bfloat16': 1}, ('float32',), 'product')]
        """
        return PlanByModule("\n".join([*self._title(), *self.summary._shares()]), rows_by_module(self.rows))

    def _title(self) -> list[str]:
        return [f"autocast plan under {self.policy}", *(f"override {k!r}: {v}" for k, v in self.overrides.items())]

    def _shown(self) -> tuple[str, Sequence[str], Sequence[Sequence[str]], Sequence[str]]:
        """Return the table, which has fewer columns than the text."""
        rows = []
        for row in self.rows:
            primitive, dtypes, *_, path, why, _source = row._cells()
            rows.append((primitive, dtypes, path, why))
        columns = "primitive", "operands -> result", "path", "why"
        return "\n".join([*self._title(), "", *self.summary._lines(), ""]), columns, rows, ()


def cast_plan(
    fun: Callable[..., Any], policy: Any = None, overrides: Mapping[str, str] | None = None
) -> Inspection[CastPlan]:
    """Return a function that lists :func:`jaxmp.autocast`'s decisions for a call.

    The function takes ``fun``'s arguments and returns a :class:`CastPlan`. Nothing is executed: ``fun`` is only traced,
    and any argument may be a :class:`jax.ShapeDtypeStruct`. To see the backward pass too, plan the gradient:
    ``cast_plan(jax.grad(loss), policy)``. In a call of a function with custom derivative rules, the plan shows only the
    computation of the value. Autocast decides on the rules when they run.

    Args:
      fun: any function that JAX can trace.
      policy: as for :func:`jaxmp.autocast`, but ``"float32"`` needs overrides. None to plan only the models under a
        policy, and the functions under autocast, that ``fun`` calls.
      overrides: as for :func:`jaxmp.autocast`.

    Raises:
      ValueError: as for :func:`jaxmp.autocast`, including overrides that match nothing. Or the policy is None, and
        ``fun`` calls no model under a policy and no function under autocast.
      TypeError: as for :func:`jaxmp.autocast`; or an override makes an operation half, but JAX has this operation only
        in float32.

    >>> def loss(w, x):
    ...     return jax.nn.logsumexp(x @ w)
    >>> w = jax.ShapeDtypeStruct((16, 8), "float32")
    >>> x = jax.ShapeDtypeStruct((4, 16), "float32")
    >>> plan = cast_plan(loss, "mixed_bfloat16")(w, x)
    >>> row = plan.rows[0]
    >>> row.primitive, row.operands, row.result, row.why, row.flops
    ('dot_general', ('bfloat16', 'bfloat16'), 'bfloat16', 'product', 1024)
    >>> plan.summary.operations["half"]
    1
    """
    require_function(fun, rule="jaxmp.cast_plan takes a function of arrays", remedy="pass e.g. a loss function")
    if policy is None and not overrides:
        return _plan_of(fun, Classifier(None), None)
    one_policy, exceptions = policy_and_exceptions(policy, overrides)
    if one_policy.compute_dtype == np.float32 and not exceptions:
        raise ValueError(
            "cast_plan needs a policy with a half compute dtype, got float32 without overrides; use 'mixed_bfloat16'"
        )
    return _plan_of(fun, Classifier(one_policy.compute_dtype, exceptions, one_policy.float8), one_policy)


def _plan_of(fun: Callable[..., Any], classifier: Classifier, policy: Policy | None) -> Inspection[CastPlan]:
    """Return a function that plans a call of ``fun`` with a classifier.

    If ``policy`` is None, ``fun`` must call models under a policy or functions under autocast.
    """

    @functools.wraps(fun)
    def planned(*args: Any, **kwargs: Any) -> CastPlan:
        with collecting_emissions() as inner_emissions:
            program, operands = traced(fun, args, kwargs, classifier)
        if policy is None and not inner_emissions:
            raise ValueError(
                "cast_plan needs a policy, because the function calls no model under a policy and nothing under "
                "autocast; write cast_plan(fun, 'mixed_bfloat16')"
            )
        if not all(isinstance(size, int) for operand in operands for size in operand.shape):
            raise ValueError("a plan needs all sizes to count FLOPs and bytes, but the shapes have a symbolic size")
        dtypes = result_dtypes(program, policy)
        graph = build(program.open_jaxpr, operands, dtypes, classifier, names_around())
        classifier.matcher.check()
        # With `programs=None`, each equation is emitted, which records its casts and dtypes.
        emission = Emission(decide_program(graph), classifier, programs=None)
        jax.eval_shape(lambda *args: emission.results(program.open_jaxpr, args, dtypes), *operands)
        writer = _PlanWriter(inner_emissions)
        rows = tuple(writer.rows_of_program(emission))
        title = "the policies of its models" if policy is None else str(policy)
        overrides = {key: str(level) for key, level in classifier.overrides.items()}
        return CastPlan(title, overrides, rows, _totals(rows, writer, emission.cast_bytes[graph.body]))

    return Inspection("cast_plan", fun, planned)


class _Emitted(NamedTuple):
    """A program that was emitted, and the reasons for its dtypes."""

    emission: Emission
    reasons: Reasons


class _PlanWriter:
    """Write the rows of a plan, and collect what the totals need.

    Attributes:
      inner_emissions: the emissions of autocast calls in the planned function, and of models under a policy.
      reasons: the reasons of all programs.
      uncounted: the names of primitives with unknown FLOPs.
      unknown_trips: the number of loops whose number of iterations is unknown.
    """

    def __init__(self, inner_emissions: Mapping[str, Emission]) -> None:
        self.inner_emissions = inner_emissions
        self.reasons: list[Reasons] = []
        self.uncounted: set[str] = set()
        self.unknown_trips = 0
        self._transformed: set[str] = set()

    def rows_of_program(self, emission: Emission) -> Iterator[PlanRow]:
        """Yield the rows of a program that was emitted."""
        graph, reasons = emission.decisions.graph, Reasons(emission.decisions)
        self.reasons.append(reasons)
        # A derivative or a `jax.vmap` changes the operations that an inner call emitted, so they keep their own rows.
        for step in graph.steps:
            scope = scope_in(step.names)
            if scope and is_transformed_around(step.eqn, scope):
                self._transformed.add(scope)
        yield from self._rows(graph.body.steps, _Emitted(emission, reasons))

    def _rows(self, steps: Iterable[Step], program: _Emitted) -> Iterator[PlanRow]:
        """Yield a row for each equation, before the rows of its bodies.

        In place of the operations that an inner autocast call emitted, yield the rows of its program.
        """
        planned = set[str]()  # local, because two calls of one jitted function have the same scopes in their bodies
        for step in steps:
            scope = scope_in(step.names)
            if scope not in self.inner_emissions or scope in self._transformed:
                yield from self._rows_of_step(step, program)
                continue
            if scope not in planned:
                planned.add(scope)
                yield from self._rows_of_inner_program(self.inner_emissions[scope])

    def _rows_of_inner_program(self, emission: Emission) -> Iterator[PlanRow]:
        """Yield the rows of an inner program. Its last row also counts the casts of the program's results."""
        rows, added = list(self.rows_of_program(emission)), emission.cast_bytes[emission.decisions.graph.body]
        yield from rows[:-1]
        for last in rows[-1:]:
            yield dataclasses.replace(last, casts=last.casts + len(added), cast_bytes=last.cast_bytes + sum(added))

    def _rows_of_step(self, step: Step, program: _Emitted) -> Iterator[PlanRow]:
        eqn, name = step.eqn, primitive_of(step.eqn)
        emission, reasons = program
        bodies = bodies_of(eqn)
        iterations = 1 if bodies is None else bodies.iterations
        cast_bytes = _bytes_of_added_casts(step, emission)
        for body in step.inner:
            cast_bytes += [iterations * size for size in emission.cast_bytes.get(body, ())]
        self.unknown_trips += bodies is not None and bodies.is_loop and bodies.length is None
        flops = 0 if bodies is not None else flops_of(eqn)
        operand_types = emission.operand_types.get(step) or [atom.aval for atom in eqn.invars]
        self.uncounted |= {name} if flops is None else set()
        row = PlanRow(
            path="/".join(path_of(step.names)),
            primitive=name,
            cls=str(classify(name) or "unknown"),
            operands=tuple(map(name_of, operand_types)),
            result=", ".join(_dtypes_of_results(step, emission)),
            why=reasons.of(step) + _why_float8(step, emission),
            source=source_of(eqn),
            flops=flops or 0,
            casts=len(cast_bytes),
            cast_bytes=sum(cast_bytes),
            depth=0,
        )
        yield row
        for inner in self._rows(_inside(step), program):
            yield dataclasses.replace(
                inner,
                source=inner.source or row.source,  # a JAX function from JAX's trace cache has no source line
                flops=iterations * inner.flops,
                cast_bytes=iterations * inner.cast_bytes,
                depth=inner.depth + 1,
            )


def _dtypes_of_results(step: Step, emission: Emission) -> Iterator[str]:
    """Yield the name of each result's dtype.

    A result without a node keeps its original dtype.
    """
    decision_of = emission.decisions.decision_of
    for node, var in itertools.zip_longest(step.nodes, step.eqn.outvars):
        yield name_of(var.aval) if node is None else decision_of[node].stored_dtype.name


def _bytes_of_added_casts(step: Step, emission: Emission) -> list[int]:
    """Return the bytes of each cast that autocast adds for an equation."""
    cast_bytes = list(emission.cast_bytes.get(step, ()))
    is_cast = step.eqn.primitive.name == CAST and step.node is not None and step.node.kind is not Kind.KEPT
    if is_cast and aval_of(step.eqn.invars[0]).dtype != aval_of(step.eqn.outvars[0]).dtype:
        return cast_bytes[:-1]  # the author wrote one of them
    return cast_bytes


def _why_float8(step: Step, emission: Emission) -> str:
    if step in emission.decisions.float8:
        return "; float8"
    refusal = emission.decisions.float8_refusals.get(step)
    return f"; no float8: {refusal}" if refusal else ""


def _inside(step: Step) -> Iterator[Step]:
    """Yield the equations in the bodies of an equation, decided or not."""
    if step.bodies is not None:
        yield from (inner for body in step.inner for inner in body.steps)
    elif classify(primitive_of(step.eqn)) in (Class.RECURSE, Class.LINALG, None):
        for eqn in (eqn for jaxpr in jaxprs_in(step.eqn) for eqn in opened(jaxpr)[0].eqns):
            yield Step(eqn, (*step.names, *names_of(eqn)), step.operands, [], Kind.KEPT, step.reason)


def _totals(rows: Sequence[PlanRow], writer: _PlanWriter, of_results: Sequence[int]) -> Summary:
    """Return the totals of a plan.

    ``of_results`` are the bytes of the casts of the function's results.
    """
    half = [row for row in rows if row.is_half]
    full = [row for row in rows if row.cls == Class.HALF and "float32" in row.operands]
    counts = Counter(row.why.rpartition("; ")[2] for row in rows if row.cls == Class.HALF)
    flops, half_flops = (sum(row.flops for row in some) for some in (rows, half))
    return Summary(
        changes=any(reasons.changes for reasons in writer.reasons),
        flops=flops,
        half_flops=half_flops,
        product_flops=sum(row.flops for row in rows if row.cls == Class.HALF),
        half_product_flops=sum(row.flops for row in half if row.cls == Class.HALF),
        casts=sum(row.casts for row in rows) + len(of_results),
        cast_bytes=sum(row.cast_bytes for row in rows) + sum(of_results),
        operations=dict(sorted(Counter(row.cls for row in rows).items())),
        full_products=tuple((row.path or row.source or row.primitive, row.why) for row in full),
        float8={why: counts[why] for why in sorted(counts) if why == "float8" or why.startswith("no float8: ")},
        unknown=tuple(sorted({row.primitive for row in rows if row.cls == "unknown"})),
        uncounted=tuple(sorted(writer.uncounted)),
        unknown_trips=writer.unknown_trips,
        half_share=half_flops / flops if flops else 0.0,
    )
