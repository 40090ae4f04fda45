"""Policies for parts of a model, the presets, and :func:`get_policy`, which reads them all."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any, overload

import numpy as np

from jaxmp.base.arguments import printed
from jaxmp.base.dtypes import UnknownDtypeError, canonical_dtype, is_half, nearest, nearest_first
from jaxmp.policy.float8 import Float8
from jaxmp.policy.parsing import ALIASES, AMBIGUOUS, parse_fields
from jaxmp.policy.patterns import Path, Pattern, check_pattern, is_class_pattern, matches, pairs_of, pattern_text
from jaxmp.policy.policies import Policy


@dataclasses.dataclass(frozen=True)
class PolicyMap:
    """A default policy and overrides for parts of a model; the first pattern that matches wins.

    Args:
      default: the policy of every module that no pattern matches; a PolicyMap here adds its own rules after these.
      overrides: pattern to policy, in order. A string is a glob on the module path below the root: ``*`` stays within
        one level, ``**`` crosses zero or more (``"**/BatchNorm_*"``, ``"encoder/layer_0"``); ``"type:*Norm"`` is a glob
        on the name of the module's class and of its bases; a class matches its instances. A pattern covers the module
        it matches and everything below.
      strict: whether a pattern that matches nothing in the model is an error (see :meth:`check`).

    Frozen and hashable like the policies in it.

    Raises:
      TypeError: a pattern is neither a string nor a class; the overrides are no mapping.

    >>> policies = PolicyMap("mixed_float16", {"**/head": "float32"})
    >>> policies.resolve(("decoder", "head", "Dense_0"))[0] == get_policy("float32")
    True
    """

    default: Policy | PolicyMap
    overrides: tuple[tuple[Pattern, Policy], ...] = ()
    strict: bool = dataclasses.field(default=True, kw_only=True)

    def __init__(self, default: Any, overrides: Mapping[Any, Any] | None = None, *, strict: bool = True) -> None:
        default = get_policy(default)
        pairs = pairs_of(overrides)
        rules = {check_pattern(pattern): _of_override(policy, default, pattern) for pattern, policy in pairs}
        if isinstance(default, PolicyMap) and (default.strict == strict or not rules):  # one map for equal meanings
            rules = rules | {pattern: policy for pattern, policy in default.overrides if pattern not in rules}
            default, strict = default.default, default.strict
        object.__setattr__(self, "default", default)
        object.__setattr__(self, "overrides", tuple(rules.items()))
        object.__setattr__(self, "strict", strict)

    @property
    def root(self) -> Policy:
        """The policy of modules that no pattern matches; the root's output is cast to its output dtype."""
        return self.default.root if isinstance(self.default, PolicyMap) else self.default

    @property
    def param_dtype(self) -> np.dtype:
        """That of the root."""
        return self.root.param_dtype

    @property
    def compute_dtype(self) -> np.dtype:
        """That of the root."""
        return self.root.compute_dtype

    @property
    def output_dtype(self) -> np.dtype:
        """That of the root."""
        return self.root.output_dtype

    @property
    def matmul_precision(self) -> str | None:
        """That of the root."""
        return self.root.matmul_precision

    @property
    def float8(self) -> Float8 | None:
        """That of the root."""
        return self.root.float8

    @property
    def rules(self) -> list[tuple[Pattern, Policy]]:
        """The overrides of this map and of the one it adds to, in the order in which they are tried."""
        return [(pattern, policy) for _, pattern, policy in self._rules()]

    @property
    def patterns(self) -> list[Pattern]:
        """The patterns of this map and of the one it adds to, in the order in which they are tried."""
        return [pattern for _, pattern, _ in self._rules()]

    def resolve(
        self, path: Path, classes: Mapping[Path, type | tuple[type, ...]] | None = None
    ) -> tuple[Policy, Pattern | None]:
        """The policy of the module at ``path`` and the pattern that gave it (None for the default).

        Args:
          path: names of the modules from below the root down to this one; ``()`` is the root.
          classes: the classes of this module and of those above it, by path, for patterns on classes; several at a
            path where modules share a scope.
        """
        prefixes = [path[:depth] for depth in range(len(path) + 1)]
        for _, pattern, policy in self._rules():
            if any(matches(pattern, prefix, (classes or {}).get(prefix)) for prefix in prefixes):
                return policy, pattern
        return self.root, None

    def below(self, root: str) -> PolicyMap:
        """Return this map with paths from the model's root on, where they may begin with the name of the root itself.

        That is how :mod:`jaxmp.inspect` and cast plans print paths in a Linen model: ``Net/head`` is ``head``.
        """
        default = self.default.below(root) if isinstance(self.default, PolicyMap) else self.default
        overrides: dict[Pattern, Policy] = {}
        for pattern, policy in self.overrides:
            overrides.setdefault(_below(pattern, root), policy)
        return PolicyMap(default, overrides, strict=self.strict)

    def check(self, modules: Mapping[Path, type], variables: Collection[Path], complete: bool = True) -> None:
        """Raises if a pattern of a strict map matched nothing.

        Args:
          modules: the classes of the modules visited, by path.
          variables: the paths of the model's variables, of which all but the last names are modules.
          complete: whether every module that has variables was visited; if not, a pattern on classes may well match one
            that was not, and is let pass.

        Raises:
          ValueError: naming the pattern and the nearest paths or classes of the model.
        """
        paths = {path[:depth] for path in variables for depth in range(len(path))}
        for strict, pattern, _ in self._rules():
            on_class = is_class_pattern(pattern)
            matched = any(matches(pattern, path, cls) for path, cls in modules.items())
            # A class that was not visited may have been matched; a path that was not visited shows in the variables.
            unseen = not complete if on_class else any(matches(pattern, path, None) for path in paths)
            if not strict or matched or unseen:
                continue
            names = {cls.__name__ for cls in modules.values()}
            known = names if on_class else {"/".join(path) for path in paths.union(modules)}
            variable = next((path for path in variables if not on_class and matches(pattern, path, None)), None)
            if variable is not None:
                owner = "/".join(variable[:-1]) or "**"
                raise ValueError(
                    f"every pattern of a policy must match a module, but {pattern!r} matched the variable "
                    f"{'/'.join(variable)!r}, which has the policy of its module; write {owner!r}"
                )
            near = nearest(pattern_text(pattern), sorted(known - {""})) or "none, the model has no submodules"
            raise ValueError(
                f"every pattern of a policy must match a module, but {pattern_text(pattern)!r} matched none; "
                f"nearest {'classes' if on_class else 'paths'}: {near}"
            )

    def _rules(self) -> Iterator[tuple[bool, Pattern, Policy]]:
        for pattern, policy in self.overrides:
            yield self.strict, pattern, policy
        if isinstance(self.default, PolicyMap):
            yield from self.default._rules()

    def __str__(self) -> str:
        for name, preset in PRESETS.items():
            if preset == self:
                return name
        default, *after = str(self.default).split("; ")
        rules = [f"{pattern_text(pattern)} -> {policy}" for pattern, policy in self.overrides]
        return "; ".join([default, *rules, *after])


def _below(pattern: Pattern, root: str) -> Pattern:
    """A pattern without the name of the root that it begins with, or that of one of the root's methods."""
    if is_class_pattern(pattern):
        return pattern
    first, _, rest = str(pattern).partition("/")
    return (rest or "**") if first == root or first.startswith(f"{root}.") else pattern


@overload
def get_policy(policy: Policy) -> Policy: ...
@overload
def get_policy(policy: PolicyMap) -> PolicyMap: ...
@overload
def get_policy(policy: object) -> Policy | PolicyMap: ...


def get_policy(policy: Any) -> Policy | PolicyMap:
    """Reads a policy from whatever names one.

    Args:
      policy: a preset (``float32`` = ``O0``, ``tensorfloat32``, ``mixed_float16`` = ``mixed_fp16`` = ``16-mixed``,
        ``mixed_bfloat16`` = ``mixed_bf16`` = ``bf16-mixed``, ``mixed_float8``, ``float16`` = ``O3``, ``bfloat16``,
        ``bfloat16_sr``, ``O2``; the last two are PolicyMaps with norms in float32, of pure bfloat16 for
        :func:`jaxmp.low_precision` and of mixed_float16); a dtype for all three; a string in jmp's long or short form
        (a missing compute dtype follows params, a missing output dtype follows compute); ``"auto"`` for what suits the
        attached device; a Policy, a PolicyMap, or any object with jmp's three attributes. Case and spaces are forgiven.
        The preset ``float32`` has ``matmul_precision="highest"``, true float32 products on a GPU too;
        ``"params=float32,compute=float32"`` has JAX's default, as ``str`` shows.

    Raises:
      ValueError: the name, the key or a dtype is unknown; the name could mean two policies, as ``"fp16"`` and
        ``"bf16"`` could; or it is ``"O1"``, which is autocast.
      TypeError: the object is none of the above.

    >>> get_policy("p=f32, c=bf16, o=f32") == get_policy("mixed_bfloat16")
    True
    """
    if isinstance(policy, (Policy, PolicyMap)):
        return policy
    if isinstance(policy, str):
        return _parse(policy)
    if all(hasattr(policy, name) for name in ("param_dtype", "compute_dtype", "output_dtype")):
        return Policy(policy.param_dtype, policy.compute_dtype, policy.output_dtype)
    dtype = None
    with contextlib.suppress(ValueError):
        dtype = canonical_dtype(policy)
    if dtype is not None:
        return PRESETS.get(dtype.name) or Policy(dtype, dtype, dtype)
    raise TypeError(
        f"a policy is a preset's name, a string such as 'params=float32,compute=float16,output=float32', a Policy or a "
        f"PolicyMap, got {printed(policy)}; presets: {', '.join(PRESETS)}"
    )


def _of_override(policy: Any, default: Policy | PolicyMap, pattern: Pattern) -> Policy:
    """The policy that an override names, with ``"half"`` for that of the model: another half dtype is never meant."""
    if isinstance(policy, str) and policy.strip().lower() == "half":
        root = default.root if isinstance(default, PolicyMap) else default
        if not is_half(root.compute_dtype):
            raise ValueError(
                f"'half' in overrides is the compute dtype of the policy, but {default} computes in "
                f"{root.compute_dtype.name}; for {pattern_text(pattern)!r} name a policy such as 'mixed_bfloat16'"
            )
        return root
    result = get_policy(policy)
    if isinstance(result, PolicyMap):
        raise TypeError(
            f"an override names one policy for what its pattern covers, got the PolicyMap {result}; "
            "write its rules as patterns"
        )
    return result


def _parse(text: str) -> Policy | PolicyMap:
    default, *rules = text.split(";")
    if rules:
        return PolicyMap(_parse(default), dict(_parse_rules(rules)))
    name = "".join(text.split())
    presets = {preset.lower(): value for preset, value in PRESETS.items()}
    name = ALIASES.get(name.lower(), name)
    if name.lower() in presets:
        return presets[name.lower()]
    if name.lower() == "auto":
        from jaxmp.base import hardware

        return _parse(hardware.recommended_policy())
    if name.lower() == "o1":
        raise ValueError(
            "O1 decides operation by operation, so it is no policy but autocast; write jaxmp.linen.autocast(model, "
            "'mixed_float16'), or the same of jaxmp.nnx, or jaxmp.autocast(fun, 'mixed_float16')"
        )
    if name.lower() in AMBIGUOUS:
        half = canonical_dtype(name).name
        raise ValueError(
            f"{text!r} could mean two policies; write 'mixed_{half}' for float32 params with {half} compute, or "
            f"{half!r} for params in {half} too"
        )
    if "=" in name:
        return parse_fields(name)
    try:
        dtype = canonical_dtype(name)
    except UnknownDtypeError:
        raise ValueError(
            f"unknown policy {text!r}; known policies, nearest first: {', '.join(_nearest_presets(name))}, …"
        ) from None
    return presets.get(dtype.name, Policy(dtype, dtype, dtype))


def _nearest_presets(name: str) -> list[str]:
    """Ten presets, the nearest to ``name`` first, by their aliases too; without an 8 nobody means float8."""
    presets = {preset: preset for preset in (*PRESETS, "auto")}
    spellings = dict(presets)
    for alias, preset in ALIASES.items():
        if preset in presets and (preset != "mixed_float8" or "8" in name):
            spellings[alias] = preset
    near = dict.fromkeys(spellings[spelling] for spelling in nearest_first(name, spellings))
    return [repr(preset) for preset in near][:10]


def _parse_rules(rules: list[str]) -> Iterator[tuple[str, str]]:
    seen = set()
    for rule in filter(str.strip, rules):
        pattern, arrow, policy = (part.strip() for part in rule.partition("->"))
        if not arrow or pattern in seen:
            raise ValueError(
                f"after the first ';' a policy has rules 'pattern -> policy', each pattern once, got {rule.strip()!r}; "
                "write e.g. 'mixed_float16; **/BatchNorm_* -> float32'"
            )
        seen.add(pattern)
        yield pattern, policy


_FLOAT32 = Policy("float32", "float32", "float32", matmul_precision="highest")
_MIXED_FLOAT16 = Policy("float32", "float16", "float32")
_FLOAT16 = Policy("float16", "float16", "float16")
# Norms by the names of their classes, so that the preset needs neither Linen nor NNX; a model without norms is fine.
_NORMS = tuple(f"type:*{kind}Norm" for kind in ("Batch", "Layer", "RMS", "Group", "Instance"))
PRESETS: Mapping[str, Policy | PolicyMap] = {
    "float32": _FLOAT32,
    "tensorfloat32": dataclasses.replace(_FLOAT32, matmul_precision="tensorfloat32"),
    "mixed_float16": _MIXED_FLOAT16,
    "mixed_bfloat16": Policy("float32", "bfloat16", "float32"),
    "mixed_float8": Policy("float32", "bfloat16", "float32", float8=Float8()),
    "float16": _FLOAT16,
    "bfloat16": Policy("bfloat16", "bfloat16", "bfloat16"),
    "bfloat16_sr": PolicyMap(  # for jaxmp.low_precision; the scale of a norm, near 1, has no bits to lose
        Policy("bfloat16", "bfloat16", "float32"), {norm: _FLOAT32 for norm in _NORMS}, strict=False
    ),
    "O0": _FLOAT32,
    "O2": PolicyMap(_MIXED_FLOAT16, {norm: _FLOAT32 for norm in _NORMS}, strict=False),
    "O3": _FLOAT16,
}
