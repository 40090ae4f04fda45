"""Policies in TOML files: ``jaxmp.get_policy("policy.toml")``.

A file has three keys:

- ``policy``: a text that ``get_policy`` reads.
- ``loss_scale`` (optional): the loss scale to use, as a note for you. jaxmp does not read this key.
- ``overrides`` (optional): a table from pattern to policy. The first pattern that matches wins.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_KEYS = ("policy", "loss_scale", "overrides")


def write_policy(file: str | Path, policy: Any, *, loss_scale: float | None, comments: Sequence[str]) -> None:
    """Write a PolicyMap, and a loss scale if there is one, to a TOML file.

    Raises:
      ValueError: the name of the file does not end in ``.toml``.
    """
    if Path(file).suffix != ".toml":
        raise ValueError(f"the name of a policy file must end in .toml, got {str(file)!r}")
    lines = [f"# {comment}" for comment in comments]
    lines += [f"policy = {_quoted(str(policy.root))}"]
    if loss_scale is not None:
        lines += [f"loss_scale = {loss_scale!r}"]
    lines += ["", "[overrides]"]
    lines += [f"{_quoted(override.pattern)} = {_quoted(str(override.level))}" for override in policy.overrides]
    Path(file).write_text("\n".join([*lines, ""]), encoding="utf-8")


def read_policy(file: str | Path) -> tuple[str, dict[str, str]]:
    """Return the policy and the overrides of a TOML file.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is not TOML, has an unknown key, or has no policy.
    """
    if not Path(file).is_file():
        raise FileNotFoundError(f"there is no policy file {str(file)!r}; Tuned.save writes one")
    text = Path(file).read_text(encoding="utf-8")
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{file} is not a policy file: {error}") from None
    for key in content:
        if key not in _KEYS:
            raise ValueError(f"the keys of a policy file are {', '.join(_KEYS)}, got {key!r} in {file}")
    if not isinstance(content.get("policy"), str):
        raise ValueError(f'a policy file must have a policy, such as policy = "mixed_bfloat16", got none in {file}')
    return content["policy"], content.get("overrides", {})


def _quoted(text: str) -> str:
    return json.dumps(text)
