"""Only the table of primitives lists primitives: every other set of primitives is a query of the table."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from places import ROOT

from jaxmp.program.primitives import Class, of_class

pytestmark = pytest.mark.once

TABLE = "jaxmp/program/primitives.py"
OF_XLA = {
    "jaxmp/inspect/_profile/kinds.py": "opcodes of XLA's HLO, many of which have the name of a primitive",
    "jaxmp/inspect/compiled/kernels.py": "opcodes of XLA's HLO",
    "experiments/benchmarks/measure/programs.py": "opcodes of XLA's HLO",
    "jaxmp/inspect/compiled/hlo.py": "scopes in the `op_name` of HLO instructions",
}
NAMES = of_class(*Class) - {"call"}  # also a kind of body
QUOTED_NAME = re.compile(rf"""['"](?:{"|".join(map(re.escape, NAMES))})['"]""")
SPLIT_TEXT = re.compile(r"""['"]\.split\(""")


def listed_primitives(code: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the line and the primitives of each literal collection of two or more of them.

    A collection is a set, a tuple, a list, the keys of a dict, the alternatives of a ``case``, or a text of names that
    is split.
    """
    if len(QUOTED_NAME.findall(code)) < 2 and not SPLIT_TEXT.search(code):
        return  # parsing all files would take seconds
    for node in ast.walk(ast.parse(code)):
        names = [text for text in _texts_of(node) if text in NAMES]
        if len(names) > 1:
            yield node.lineno, names


def _texts_of(node: ast.AST) -> list[str]:
    match node:
        case ast.Set(elts=elements) | ast.Tuple(elts=elements) | ast.List(elts=elements) | ast.Dict(keys=elements):
            return [element.value for element in elements if _is_text(element)]
        case ast.MatchOr(patterns=patterns):
            values = [pattern.value for pattern in patterns if isinstance(pattern, ast.MatchValue)]
            return [value.value for value in values if _is_text(value)]
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(text)), attr="split")):
            return text.split()
    return []


def _is_text(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def files() -> list[str]:
    paths = [path for folder in ("jaxmp", "experiments") for path in (ROOT / folder).rglob("*.py")]
    return sorted(path.relative_to(ROOT).as_posix() for path in paths)


def test_only_the_table_lists_primitives():
    lists = {name: list(listed_primitives((ROOT / name).read_text())) for name in files()}
    elsewhere = {name: listed for name, listed in lists.items() if listed and name != TABLE and name not in OF_XLA}
    assert elsewhere == {}, "write a query, such as with_trait(Trait.LOOKS_UP)"


def test_files_with_names_of_xla_are_exempt_for_a_reason():
    for name, reason in OF_XLA.items():
        assert list(listed_primitives((ROOT / name).read_text())), f"{name} lists no primitive: remove its exemption"
        assert reason


def test_every_way_to_list_primitives_is_found():
    for code in (
        "{'sin', 'cos'}",
        "x in ('sin', 'cos')",
        "['sin', 'cos', other]",
        "{'sin': 1, 'cos': 2, **more}",
        "'sin cos'.split()",
        "match x:\n    case 'sin' | 'cos':\n        pass",
    ):
        assert [names for _, names in listed_primitives(code)] == [["sin", "cos"]], code
    for code in ("x == 'sin'", "{'sin'}", "{'call', 'cond'}", "'sin and cos'", "f('sin', 'cos')"):
        assert list(listed_primitives(code)) == [], code


KINDS = ("scan", "while", "cond", "remat2", "jit", "closed_call", "shard_map", "custom_jvp_call", "custom_vjp_call")
QUOTED_KIND = re.compile(rf"""['"](?:{"|".join(KINDS)})['"]""")
NO_KINDS = {
    "jaxmp/_internals/jax/traces.py": "the purposes of JAX's traces",
    "jaxmp/inspect/_audit/compiled.py": "opcodes of XLA's HLO",
    "jaxmp/inspect/compiled/memory_of_hlo.py": "opcodes of XLA's HLO",
    "jaxmp/inspect/compiled/hlo.py": "scopes in the `op_name` of HLO instructions",
}


def names_kinds(code: str) -> bool:
    """Return whether code has the name of a kind of body, the beginning of one, or compares the kinds of bodies."""
    if "bodies.kind" in code or '.startswith("custom_' in code:
        return True
    if not QUOTED_KIND.search(code):
        return False
    return any(_is_text(node) and node.value in KINDS for node in ast.walk(ast.parse(code)))


def test_only_the_room_of_programs_knows_the_kinds_of_bodies():
    outside = [name for name in files() if not name.startswith("jaxmp/program/")]
    naming = {name for name in outside if names_kinds((ROOT / name).read_text())}
    assert naming == set(NO_KINDS), "ask jaxmp.program.equations.Bodies, such as bodies.is_loop"
    for code in (
        "x == 'scan'",
        "bodies.kind is other",
        'name.startswith("custom_")',
        "match x:\n    case 'cond': pass",
    ):
        assert names_kinds(code), code
