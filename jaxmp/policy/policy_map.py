"""Policies for the parts of a model, the presets, and :func:`get_policy`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, NamedTuple, overload

import numpy as np

from jaxmp.base import hardware
from jaxmp.base.arguments import printed
from jaxmp.base.dtypes import UnknownDtypeError, canonical_dtype, closest_names, is_half, nearest_first
from jaxmp.policy.float8 import Float8
from jaxmp.policy.parsing import ALIASES, AMBIGUOUS, parse_fields
from jaxmp.policy.patterns import (
    Path,
    Pattern,
    UnmatchedOverrideError,
    better_patterns,
    check_pattern,
    checked_overrides,
    covers,
    is_class_pattern,
    matches,
    pattern_text,
    unmatched,
)
from jaxmp.policy.policies import Policy


class Override(NamedTuple):
    """An override of a :class:`PolicyMap`.

    Attributes:
      pattern: the pattern of the modules that the override covers.
      policy: the policy of these modules.
      strict: whether it is an error if the pattern matches nothing in the model.
      all_half: whether the level is ``"half"``: every operation is half, and no rule of autocast decides.
    """

    pattern: Pattern
    policy: Policy
    strict: bool
    all_half: bool = False

    @property
    def level(self) -> str | Policy:
        """Return ``"half"``, or the policy under which the rules of autocast decide."""
        return "half" if self.all_half else self.policy


@dataclasses.dataclass(frozen=True)
class PolicyMap:
    """A default policy with overrides for parts of a model; the first match wins.

    A PolicyMap is frozen and hashable, as its policies are.

    Args:
      default: the policy of modules that no pattern matches. If ``default`` is a PolicyMap, its overrides are tried
        after ``overrides``.
      overrides: a mapping from pattern to policy. Patterns are tried in order. A pattern covers the modules that it
        matches and everything below them. A string such as ``"encoder/layer_0"`` or ``"**/BatchNorm_*"`` is a glob on
        the module path below the root. In it, ``*`` matches inside of one name, and ``**`` matches zero or more names.
        ``"type:*Norm"`` is a glob on the names of the module's class and its base classes. A class as a pattern
        matches its instances.
      strict: whether a pattern that matches nothing in the model is an error (see :meth:`check`).

    Raises:
      TypeError: a pattern is neither a string nor a class; an override is a PolicyMap; or ``overrides`` is not a
        mapping.

    >>> policies = PolicyMap("mixed_float16", {"**/head": "float32"})
    >>> policies.resolve(("decoder", "head", "Dense_0"))[0] == get_policy("float32")
    True
    """

    root: Policy  # the policy of the root module, and of modules that no pattern matches
    overrides: tuple[Override, ...]  # in matching order

    def __init__(self, default: Any, overrides: Mapping[Any, Any] | None = None, *, strict: bool = True) -> None:
        root: Any = get_policy(default)
        overrides_of_default: tuple[Override, ...] = ()
        if isinstance(root, PolicyMap):
            root, overrides_of_default = root.root, root.overrides
        override_of: dict[Pattern, Override] = {}
        for pattern, policy in checked_overrides(overrides).items():
            override_of[check_pattern(pattern)] = Override(
                pattern, _of_override(policy, root, pattern), strict, _is_level(policy, "half")
            )
        for override in overrides_of_default:
            override_of.setdefault(override.pattern, override)
        object.__setattr__(self, "root", root)
        object.__setattr__(self, "overrides", tuple(override_of.values()))

    @property
    def param_dtype(self) -> np.dtype:
        """Return the param dtype of the root module's policy."""
        return self.root.param_dtype

    @property
    def compute_dtype(self) -> np.dtype:
        """Return the compute dtype of the root module's policy."""
        return self.root.compute_dtype

    @property
    def output_dtype(self) -> np.dtype:
        """Return the output dtype of the root module's policy."""
        return self.root.output_dtype

    @property
    def matmul_precision(self) -> str | None:
        """Return the ``matmul_precision`` of the root module's policy."""
        return self.root.matmul_precision

    @property
    def float8(self) -> Float8 | None:
        """Return the float8 settings of the root module's policy."""
        return self.root.float8

    @property
    def patterns(self) -> list[Pattern]:
        """Return all patterns in matching order."""
        return [override.pattern for override in self.overrides]

    def resolve(
        self, path: Path, classes: Mapping[Path, type | tuple[type, ...]] | None = None
    ) -> tuple[Policy, Pattern | None]:
        """Return the policy of the module at ``path``, and the pattern that matched.

        The pattern is None if no pattern matched.

        Args:
          path: the names of the modules from the root's child down to this module; ``()`` is the root.
          classes: the classes of this module and of the modules above it, by path. Modules that share a scope have one
            path with several classes.
        """
        for override in self.overrides:
            if covers(override.pattern, path, classes):
                return override.policy, override.pattern
        return self.root, None

    def below(self, root: str) -> PolicyMap:
        """Return a copy without the name ``root`` at the front of its patterns.

        ``root`` is the name of the model. :mod:`jaxmp.inspect` and cast plans print it in front of Linen paths, so a
        pattern ``Net/head`` means ``head``.
        """
        below = PolicyMap(self.root)
        overrides = tuple(override._replace(pattern=_below(override.pattern, root)) for override in self.overrides)
        object.__setattr__(below, "overrides", overrides)
        return below

    def check(
        self, modules: Mapping[Path, type | tuple[type, ...]], variables: Collection[Path], complete: bool = True
    ) -> None:
        """Raise an error if a pattern matches nothing in a model.

        Args:
          modules: the classes of the known modules, by path.
          variables: the paths of the model's variables. The last name of a path is the variable; the names before it
            are modules.
          complete: whether every module with variables is in ``modules``. If not, class patterns are not checked,
            because they may match another module of the model.

        Raises:
          UnmatchedOverrideError: a pattern matched nothing; the error names the nearest paths or classes of the model.
        """
        paths = {path[:depth] for path in variables for depth in range(len(path))}
        for override in self.overrides:
            pattern = override.pattern
            if not override.strict or any(matches(pattern, path, cls) for path, cls in modules.items()):
                continue
            if is_class_pattern(pattern):
                may_match_unknown = not complete
            else:
                may_match_unknown = any(matches(pattern, path, None) for path in paths)
            if not may_match_unknown:
                raise _unmatched(pattern, paths.union(modules), modules)

    def __str__(self) -> str:
        default, overrides = str(self.root), self.overrides
        for name, preset in PRESETS.items():
            if isinstance(preset, PolicyMap) and preset.root == self.root:
                count = len(overrides) - len(preset.overrides)
                if overrides[count:] == preset.overrides:
                    default, overrides = name, overrides[:count]
        texts = [f"{pattern_text(override.pattern)} -> {override.level}" for override in overrides]
        return "; ".join([default, *texts])


def _unmatched(
    pattern: Pattern, paths: Collection[Path], modules: Mapping[Path, type | tuple[type, ...]]
) -> UnmatchedOverrideError:
    """Return the error for a pattern that matched no module.

    Args:
      pattern: the pattern.
      paths: the paths of the model's modules.
      modules: the classes of the known modules, by path.
    """
    classes = [*itertools.chain(*(cls if isinstance(cls, tuple) else (cls,) for cls in modules.values()))]
    if is_class_pattern(pattern):
        kind, known = "classes", {cls.__name__ for cls in classes}
    else:
        kind, known = "paths", {"/".join(path) for path in paths}
    near = closest_names(pattern_text(pattern), sorted(known - {""})) or "none, the model has no submodules"
    return unmatched(pattern, "a module", f"{kind}: {near}{better_patterns(pattern, paths, classes)}")


def _below(pattern: Pattern, root: str) -> Pattern:
    """Return a pattern without the name of the model at its front.

    The name may be followed by the name of a method, as in ``Net.encode/head``. A pattern ``Net.head`` stays as it is
    and matches nothing: it is probably a module's path in the spelling of torch.
    """
    if is_class_pattern(pattern):
        return pattern
    first, _, path = str(pattern).partition("/")
    if first == root:
        return path or "**"
    return path if path and first.startswith(f"{root}.") else pattern


PolicyName = Literal[
    "float32",
    "tensorfloat32",
    "mixed_float16",
    "mixed_bfloat16",
    "mixed_float8",
    "float16",
    "bfloat16",
    "O0",
    "O3",
]
"""The names of the presets that are a single :class:`Policy`, not a :class:`PolicyMap`."""


@overload
def get_policy(policy: Policy) -> Policy: ...
@overload
def get_policy(policy: PolicyMap) -> PolicyMap: ...
@overload
def get_policy(policy: PolicyName) -> Policy: ...
@overload
def get_policy(policy: object) -> Policy | PolicyMap: ...


def get_policy(policy: Any) -> Policy | PolicyMap:
    """Return the policy that a text, a dtype or an object describes.

    The presets are:

    - ``float32`` (= ``O0``) and ``tensorfloat32`` (= ``tf32``)
    - ``mixed_float16`` (= ``mixed_fp16`` = ``16-mixed``)
    - ``mixed_bfloat16`` (= ``mixed_bf16`` = ``bf16-mixed``)
    - ``mixed_float8``
    - ``float16`` (= ``O3``) and ``bfloat16``
    - ``bfloat16_sr``: bfloat16 for :func:`jaxmp.low_precision`, with norms in float32
    - ``O2``: mixed_float16 with norms in float32

    The preset ``float32`` sets ``matmul_precision="highest"``, so its products are true float32 on a GPU too. The text
    ``"params=float32,compute=float32"`` keeps JAX's default precision.

    Args:
      policy: one of the following; case and spaces are ignored:

        - the name of a preset, or ``"auto"`` for the attached device;
        - a dtype that is not half precision, such as ``jnp.float32``, for params, compute and output;
        - a text in jmp's long or short form, such as ``"p=f32,c=bf16"``. A missing compute dtype is that of the params,
          and a missing output dtype is the compute dtype;
        - a text with overrides, as :func:`jaxmp.inspect.tune` saves it, such as ``"mixed_bfloat16; head -> float32"``;
        - a Policy, a PolicyMap, or any object with jmp's three attributes.

    Raises:
      ValueError: the name, a key or a dtype is unknown; the name is ambiguous, such as ``"fp16"``, ``"bf16"`` and
        ``jnp.bfloat16``; or the name is ``"O1"``, Apex's name for autocast (use :func:`jaxmp.autocast`).
      TypeError: the object is none of the above.

    >>> get_policy("p=f32, c=bf16, o=f32") == get_policy("mixed_bfloat16")
    True
    """
    if isinstance(policy, (Policy, PolicyMap)):
        return policy
    if isinstance(policy, str):
        return _parse_policy(policy)
    if all(hasattr(policy, name) for name in ("param_dtype", "compute_dtype", "output_dtype")):
        return Policy(policy.param_dtype, policy.compute_dtype, policy.output_dtype)
    if isinstance(policy, Mapping):
        raise TypeError(
            f"a policy comes before its overrides, got the overrides {printed(policy)} as the policy; write e.g. "
            "('mixed_float16', {'**/head': 'float32'})"
        )
    try:
        dtype = canonical_dtype(policy)
    except ValueError:
        raise TypeError(
            "a policy must be the name of a preset, a text such as 'params=float32,compute=float16,output=float32', a "
            f"Policy or a PolicyMap, got {printed(policy)}; presets: {', '.join(PRESETS)}"
        ) from None
    if is_half(dtype):  # torch.autocast takes a dtype, and means the compute dtype
        raise _ambiguous(f"the dtype {dtype.name}", dtype.name)
    return _of_dtype(dtype)


def _of_dtype(dtype: np.dtype) -> Policy | PolicyMap:
    """Return the policy of one dtype for params, compute and output."""
    return PRESETS.get(dtype.name) or Policy(dtype, dtype, dtype)


def _of_override(policy: Any, root: Policy, pattern: Pattern) -> Policy:
    """Return the policy that an override describes.

    ``"half"`` has the dtypes of ``root``, and ``"written"`` means ``root`` for code that runs as it is written.
    """
    if _is_level(policy, "written"):
        return dataclasses.replace(root, float8=None, written=True)
    if _is_level(policy, "float32_result"):
        raise ValueError(
            f"'float32_result' is a level of products, got it for the module {pattern_text(pattern)!r}; write "
            f"'{pattern_text(pattern)}:dot_general'"
        )
    if _is_level(policy, "half"):
        if not is_half(root.compute_dtype):
            raise ValueError(
                f"'half' in overrides means the policy's compute dtype, but {root} computes in "
                f"{root.compute_dtype.name}; for {pattern_text(pattern)!r} write a policy such as 'mixed_bfloat16'"
            )
        return root
    try:
        result = get_policy(policy)
    except (TypeError, ValueError) as error:
        text = f"the override {pattern_text(pattern)!r}: {error}; an override may also be 'half' or 'written'"
        raise type(error)(text) from None
    if isinstance(result, PolicyMap):
        raise TypeError(
            f"an override must be a single policy, got the PolicyMap {result}; write its overrides one by one"
        )
    return result


def _is_level(policy: Any, level: str) -> bool:
    """Return whether the value of an override is this level."""
    return isinstance(policy, str) and policy.strip().lower() == level


def _parse_policy(text: str) -> Policy | PolicyMap:
    default, *texts = text.split(";")
    if texts:
        return PolicyMap(_parse_policy(default), dict(_parse_overrides(texts)))
    text_without_spaces = "".join(text.split())
    if "=" in text_without_spaces:
        return parse_fields(text_without_spaces)
    name = ALIASES.get(text_without_spaces.lower(), text_without_spaces).lower()
    presets = {preset.lower(): value for preset, value in PRESETS.items()}
    if name in presets:
        return presets[name]
    if name == "auto":
        return _parse_policy(hardware.recommended_policy())
    _require_clear_name(name, text)
    try:
        return _of_dtype(canonical_dtype(name))
    except UnknownDtypeError:
        if text.endswith((".toml", ".txt")):
            raise ValueError(f"a policy is a text, got the file {text!r}; pass Path({text!r}).read_text()") from None
        raise ValueError(
            f"unknown policy {text!r}; known policies, nearest first: {', '.join(_nearest_presets(name))}, …"
        ) from None


def _require_clear_name(name: str, text: str) -> None:
    """Raise a ValueError for ``"o1"``, and for a name that could mean two policies."""
    if name == "o1":
        raise ValueError(
            "O1 is autocast, not a policy; write jaxmp.linen.autocast(model, 'mixed_float16'), "
            "jaxmp.nnx.autocast(model, 'mixed_float16') or jaxmp.autocast(fun, 'mixed_float16')"
        )
    if name in AMBIGUOUS:
        raise _ambiguous(repr(text), canonical_dtype(name).name)


def _ambiguous(text: str, half: str) -> ValueError:
    """Return the error for a name or a dtype that could mean two policies."""
    return ValueError(
        f"{text} could mean two policies; write 'mixed_{half}' for float32 params with {half} compute, or {half!r} for "
        f"params in {half} too"
    )


def _nearest_presets(name: str) -> list[str]:
    """Return ten presets, the nearest to ``name`` first.

    A preset is also near if one of its aliases is near. Aliases of float8 count only if ``name`` has an 8.
    """
    presets = {preset: preset for preset in (*PRESETS, "auto")}
    spellings = dict(presets)
    for alias, preset in ALIASES.items():
        if preset in presets and (preset != "mixed_float8" or "8" in name):
            spellings[alias] = preset
    near = dict.fromkeys(spellings[spelling] for spelling in nearest_first(name, spellings))
    return [repr(preset) for preset in near][:10]


def _parse_overrides(texts: list[str]) -> Iterator[tuple[str, str]]:
    patterns = set()
    for text in filter(str.strip, texts):
        pattern, arrow, policy = (part.strip() for part in text.partition("->"))
        if not arrow or pattern in patterns:
            raise ValueError(
                f"after the first ';' a policy has overrides 'pattern -> policy', each pattern once, got "
                f"{text.strip()!r}; write e.g. 'mixed_float16; **/BatchNorm_* -> float32'"
            )
        patterns.add(pattern)
        yield pattern, policy


_FLOAT32 = Policy("float32", "float32", "float32", matmul_precision="highest")
_MIXED_FLOAT16 = Policy("float32", "float16", "float32")
_FLOAT16 = Policy("float16", "float16", "float16")
# Norms are matched by class name, because jaxmp.policy imports neither Linen nor NNX. The presets with these patterns
# are not strict, because a model may have no norms.
_NORMS = tuple(f"type:*{kind}Norm" for kind in ("Batch", "Layer", "RMS", "Group", "Instance"))
PRESETS: Mapping[str, Policy | PolicyMap] = {
    "float32": _FLOAT32,
    "tensorfloat32": dataclasses.replace(_FLOAT32, matmul_precision="tensorfloat32"),
    "mixed_float16": _MIXED_FLOAT16,
    "mixed_bfloat16": Policy("float32", "bfloat16", "float32"),
    "mixed_float8": Policy("float32", "bfloat16", "float32", float8=Float8()),
    "float16": _FLOAT16,
    "bfloat16": Policy("bfloat16", "bfloat16", "bfloat16"),
    "bfloat16_sr": PolicyMap(  # for jaxmp.low_precision; the scale of a norm is near 1 and needs float32
        Policy("bfloat16", "bfloat16", "float32"), {norm: _FLOAT32 for norm in _NORMS}, strict=False
    ),
    "O0": _FLOAT32,
    "O2": PolicyMap(_MIXED_FLOAT16, {norm: _FLOAT32 for norm in _NORMS}, strict=False),
    "O3": _FLOAT16,
}
