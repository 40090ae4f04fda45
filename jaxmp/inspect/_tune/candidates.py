"""The parts of a function that a search can switch to float32, and the overrides that do it.

A half policy computes in half precision (float16 or bfloat16). Overrides are exceptions to the policy: a mapping from
the path of a module, scope or operation to another policy.
"""

from __future__ import annotations

import collections
import glob
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax

from jaxmp.base import tables
from jaxmp.engine.overrides import FIXED
from jaxmp.engine.plan import PlanRow, cast_plan
from jaxmp.inspect.program.calls import named
from jaxmp.inspect.program.tracing import program_of
from jaxmp.policy.patterns import covers
from jaxmp.policy.policies import Policy
from jaxmp.program.primitives import PRODUCTS, classify
from jaxmp.program.reading import read_program
from jaxmp.program.scopes import CALL_SCOPE, path_in

T = TypeVar("T")
_HALF = {"float16", "bfloat16"}


@dataclass(frozen=True)
class Module:
    """A module or scope with half operations, or equal layers.

    Attributes:
      path: the path in the form of an override's key, such as ``"flow"``. A ``*`` stands for the numbers of equal
        layers, as in ``"blocks/*"``.
      layers: the path of each layer, or the only path.
      flops: the FLOPs of the half operations by name, without those in submodules. Operations other than products have
        none.
    """

    path: str
    layers: tuple[str, ...]
    flops: Mapping[str, int] = field(hash=False)


@dataclass(frozen=True)
class Candidate:
    """A module, or an operation of a module, that the search can switch to float32.

    Attributes:
      module: the module.
      primitive: the operation; empty for the whole module.
    """

    module: Module
    primitive: str = ""

    @property
    def path(self) -> str:
        """Return the key of an override, such as ``"flow:add"``."""
        return f"{self.module.path}:{self.primitive}" if self.primitive else self.module.path

    @property
    def flops(self) -> int:
        """Return the FLOPs of the products."""
        return self.module.flops[self.primitive] if self.primitive else sum(self.module.flops.values())

    @property
    def has_products(self) -> bool:
        """Return whether the candidate has products."""
        return not PRODUCTS.isdisjoint([self.primitive] if self.primitive else self.module.flops)


def candidates_in(modules: Sequence[Module], *, operations: bool) -> list[Candidate]:
    """Return the candidates: the operations of modules, or the modules."""
    if not operations:
        return [Candidate(module) for module in modules]
    candidates = []
    for module in modules:
        candidates += [Candidate(module, name) for name in module.flops] or [Candidate(module)]
    return candidates


@dataclass
class _Rows:
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


def modules_of(
    plain: Callable[..., Any], args: Sequence[Any], half: Policy, *, modules_only: bool = False
) -> list[Module]:
    """Return the modules and scopes with half operations, children before parents.

    Equal layers are one module. With ``modules_only``, a named scope in a module counts as a part of the module.
    Without any module, the named scopes are the modules.

    Raises:
      ValueError: no operation in a module or scope is half.
    """
    modules = _paths_of_modules(plain, args) if modules_only else set()
    in_plan: dict[str, _Rows] = {}
    for row in cast_plan(plain, half)(*named_copy(args)).rows:
        key = _key_of_module(row.path, modules) if modules else glob.escape(row.path)
        if key:
            in_plan.setdefault(key, _Rows()).add(row)
    half_modules = []
    for keys in _equal_layers(in_plan):
        if any(in_plan[key].is_half for key in keys):
            flops = collections.Counter[str]()
            for key in keys:
                flops.update(in_plan[key].flops)
            half_modules.append(Module(tables.common_path(keys), tuple(keys), flops))
    if not half_modules:
        raise ValueError(
            "tune needs half operations in modules or named scopes, got none; put jax.named_scope around the parts"
        )
    return sorted(half_modules, key=lambda module: -module.path.count("/"))


def half_code_outside(plain: Callable[..., Any], args: Sequence[Any], half: Policy) -> tuple[str, ...]:
    """Return the half operations outside of modules and named scopes, with their lines."""
    rows = [row for row in cast_plan(plain, half)(*named_copy(args)).rows if not row.path and is_half_operation(row)]
    return tuple(dict.fromkeys(f"{row.primitive} ({row.source or 'code of unknown origin'})" for row in rows))


def _equal_layers(modules: Mapping[str, _Rows]) -> Iterator[list[str]]:
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


def overrides_of(modules: Sequence[Module], chosen: Collection[Candidate], half: Policy) -> dict[str, str]:
    """Return overrides that give float32 to the chosen modules and operations.

    Submodules of a chosen module keep the half policy, unless they are chosen too. A module has one override if all its
    operations are chosen.
    """
    overrides = {}
    by_path = {path: module for module in modules for path in module.layers}
    touched = {candidate.module for candidate in chosen}
    for module in modules:  # children come before parents, and the first pattern that matches wins
        primitives = [candidate.primitive for candidate in chosen if candidate.module is module]
        if "" in primitives or (len(primitives) > 1 and set(primitives) == set(module.flops)):
            overrides[module.path] = "float32"
            continue
        overrides |= {f"{module.path}:{primitive}": "float32" for primitive in primitives}
        if _nearest_above(module.layers[0], by_path) in touched:  # equal layers have equal parents
            overrides[module.path] = str(half)
    return overrides


def module_at(modules: Sequence[Module], names: Sequence[str]) -> Module | None:
    """Return the module whose override applies to an operation in some scopes."""
    return next((module for module in modules if covers(module.path, tuple(names))), None)


def is_half_operation(row: PlanRow) -> bool:
    """Return whether an operation of a plan has a half operand or result."""
    return not _HALF.isdisjoint([*row.operands, *row.result.split(", ")])


def named_copy(args: Sequence[Any]) -> Any:
    """Return a copy of arguments in which each call of an NNX module has a scope."""
    leaves, structure = jax.tree.flatten(tuple(args))
    return named(jax.tree.unflatten(structure, leaves))
