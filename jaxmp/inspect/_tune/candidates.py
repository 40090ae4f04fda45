"""The parts of a function that a search can switch to float32, and the overrides that do it.

A half policy computes in half precision (float16 or bfloat16). Overrides are exceptions to the policy: a mapping from
the path of a module, scope or operation to another policy.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from jaxmp.base import tables
from jaxmp.engine.overrides import FIXED
from jaxmp.engine.plan import PlanRow, cast_plan
from jaxmp.inspect._tune.prediction import is_half_operation, named_copy
from jaxmp.inspect.program.tracing import program_of
from jaxmp.policy.patterns import covers
from jaxmp.policy.policies import Policy
from jaxmp.program.primitives import PRODUCTS, classify
from jaxmp.program.reading import read_program
from jaxmp.program.scopes import CALL_SCOPE, path_in

T = TypeVar("T")


@dataclass(frozen=True)
class Candidate:
    """A module, scope or operation that the search can switch to float32.

    It may stand for the same part of several equal layers.

    Attributes:
      path: the path in the form of an override's key, such as ``"flow"`` or ``"flow:add"``. A ``*`` stands for the
        numbers of equal layers, as in ``"blocks/*:add"``.
      flops: the FLOPs of the candidate's products, without products in submodules.
      operations: the half operations of a module or scope, without those in submodules; empty for an operation.
      layers: the candidates of the single layers; empty if there is one layer.
    """

    path: str
    flops: int
    operations: tuple[Candidate, ...] = ()
    layers: tuple[Candidate, ...] = ()

    @property
    def is_product(self) -> bool:
        """Return whether the candidate is an operation, and a product."""
        return self.path.rpartition(":")[2] in PRODUCTS

    @property
    def operations_except_products(self) -> list[Candidate]:
        """Return the operations of a module or scope that are not products."""
        return [operation for operation in self.operations if not operation.is_product]

    @property
    def paths(self) -> list[str]:
        """Return the path of each layer, or the only path."""
        return [layer.path for layer in self.layers or [self]]

    def parts(self) -> Iterator[Candidate]:
        """Yield the candidate's operations and single layers, and the single layers of its operations."""
        for operation in self.operations:
            yield operation
            yield from operation.layers
        yield from self.layers


@dataclass
class _Module:
    """The operations of a module or scope in a plan, without those in submodules.

    Attributes:
      code: the operations of any dtype, each with the user's file and line.
      is_half: whether an operation is half.
      flops: the FLOPs of the half operations by name. Operations other than products have none.
    """

    code: set[tuple[str, str]] = field(default_factory=set)
    is_half: bool = False
    flops: dict[str, int] = field(default_factory=dict)

    def add(self, row: PlanRow) -> None:
        """Add an operation."""
        self.code.add((row.primitive, row.source))
        if not is_half_operation(row):
            return
        self.is_half = True
        if classify(row.primitive) not in (None, *FIXED):
            flops = row.flops if row.primitive in PRODUCTS else 0
            self.flops[row.primitive] = self.flops.get(row.primitive, 0) + flops


def candidates_of(
    plain: Callable[..., Any], args: Sequence[Any], half: Policy, *, modules_only: bool = False
) -> list[Candidate]:
    """Return the modules and scopes with half operations, children before parents.

    Equal layers are one candidate. With ``modules_only``, a named scope in a module counts as a part of the module.
    Without any module, the named scopes are the candidates.

    Raises:
      ValueError: no operation in a module or scope is half.
    """
    modules = _paths_of_modules(plain, args) if modules_only else set()
    in_plan: dict[str, _Module] = {}
    for row in cast_plan(plain, half)(*named_copy(args)).rows:
        key = _key_of_module(row.path, modules) if modules else glob.escape(row.path)
        if key:
            in_plan.setdefault(key, _Module()).add(row)
    candidates = []
    for keys in _equal_layers(in_plan):
        if any(in_plan[key].is_half for key in keys):
            candidates.append(_of_layers([_of_module(key, in_plan[key]) for key in keys]))
    if not candidates:
        raise ValueError(
            "tune needs half operations in modules or named scopes, got none; put jax.named_scope around the parts"
        )
    return sorted(candidates, key=lambda candidate: -candidate.path.count("/"))


def half_code_outside(plain: Callable[..., Any], args: Sequence[Any], half: Policy) -> tuple[str, ...]:
    """Return the half operations outside of modules and named scopes, with their lines."""
    rows = [row for row in cast_plan(plain, half)(*named_copy(args)).rows if not row.path and is_half_operation(row)]
    return tuple(dict.fromkeys(f"{row.primitive} ({row.source or 'code of unknown origin'})" for row in rows))


def _equal_layers(modules: Mapping[str, _Module]) -> Iterator[list[str]]:
    """Yield the keys of equal layers together, and each other key alone; parents come before children.

    The keys of equal layers differ in numbers only. The layers have the same code, their parents are equal layers, and
    one pattern covers these layers and no half operation outside of them.
    """
    first_layers: dict[str, str] = {}  # for each layer, the first of its equal layers

    def kind(key: str) -> Hashable:
        return tables.without_numbers(key), frozenset(modules[key].code), _nearest_above(key, first_layers)

    half_keys = [key for key, module in modules.items() if module.is_half]
    for depth in sorted({key.count("/") for key in modules}):
        for keys in tables.grouped([key for key in modules if key.count("/") == depth], kind):
            is_stack = len(keys) > 1 and _has_own_pattern(keys, half_keys)
            for layers in [keys] if is_stack else [[key] for key in keys]:
                first_layers |= dict.fromkeys(layers, layers[0])
                yield layers


def _has_own_pattern(layers: Sequence[str], keys: Sequence[str]) -> bool:
    """Return whether the pattern of these layers covers no key outside of them."""
    pattern = tables.common_path(layers)
    covered = [key for key in keys if covers(pattern, tuple(key.split("/")))]
    return all(any(f"{key}/".startswith(f"{layer}/") for layer in layers) for key in covered)


def _nearest_above(path: str, by_path: Mapping[str, T]) -> T | None:
    """Return the value of the nearest module or scope around a path; None if there is none."""
    while path := path.rpartition("/")[0]:
        if path in by_path:
            return by_path[path]
    return None


def _of_module(key: str, module: _Module) -> Candidate:
    """Return the candidate of a module or scope."""
    operations = tuple(Candidate(f"{key}:{name}", flops) for name, flops in module.flops.items())
    return Candidate(key, sum(module.flops.values()), operations)


def _of_layers(layers: Sequence[Candidate]) -> Candidate:
    """Return the candidate of equal layers, or the only layer."""
    if len(layers) == 1:
        return layers[0]
    path = tables.common_path([layer.path for layer in layers])
    operations = [operation for layer in layers for operation in layer.operations]
    by_name = tables.grouped(operations, lambda operation: operation.path.rpartition(":")[2])
    return Candidate(path, _flops(layers), tuple(map(_of_layers, by_name)), tuple(layers))


def _flops(candidates: Sequence[Candidate]) -> int:
    return sum(candidate.flops for candidate in candidates)


def _paths_of_modules(fun: Callable[..., Any], args: Sequence[Any]) -> set[str]:
    """Return the paths of the modules that a function calls."""
    jaxpr, _, _ = program_of(fun, *named_copy(args))
    paths = set()
    for equation in read_program(jaxpr).equations.values():
        for number, name in enumerate(equation.names):
            if name.startswith(CALL_SCOPE):
                paths.add(path_in(equation.names[:number]))
    return paths


def _key_of_module(path: str, modules: Collection[str]) -> str:
    """Return an override's key for the innermost module around a path; empty if there is none.

    A method of a Linen module has a scope such as ``"Model.encode"``, which is not the path of a module. The key of a
    module that the method calls begins with ``"**"``.
    """
    while path and (path not in modules or "." in path.rpartition("/")[2]):
        path = path.rpartition("/")[0]
    names = path.split("/")
    methods = [number for number, name in enumerate(names) if "." in name]
    if not methods:
        return glob.escape(path)
    module, inside = names[methods[-1]].partition(".")[0], names[methods[-1] + 1 :]
    if inside[0] == module:  # the method calls its module's __call__
        inside = inside[1:]
    return "**/" + glob.escape("/".join(inside)) if inside else ""


def overrides_of(candidates: Sequence[Candidate], chosen: Collection[Candidate], half: Policy) -> dict[str, str]:
    """Return overrides that give float32 to the chosen candidates and parts of candidates.

    Submodules of a chosen module keep the half policy, unless they are chosen too.
    """
    overrides = {}
    by_path = {path: candidate for candidate in candidates for path in candidate.paths}
    touched = {candidate for candidate in candidates if not {candidate, *candidate.parts()}.isdisjoint(chosen)}
    for candidate in candidates:  # children come before parents, and the first pattern that matches wins
        if candidate in chosen:
            overrides[candidate.path] = "float32"
            continue
        overrides |= {part.path: "float32" for part in candidate.parts() if part in chosen}
        if _nearest_above(candidate.paths[0], by_path) in touched:  # equal layers have equal parents
            overrides[candidate.path] = str(half)
    return overrides
