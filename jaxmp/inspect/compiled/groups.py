"""The groups of devices that a collective connects."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import numpy as np

_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}")
_RESHAPED = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_OF_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=([\d,T()\[\]]*))? ?\{([^}]*)\}")
_TRANSPOSED_IDS = re.compile(r"\(\[([\d,]+)\]T\(([\d,]+)\)\)")
_MESH_AXIS = re.compile(r"'(\w+)'(?::\((\d+)\)(\d+))?")
_WRITTEN = re.compile(r"(?:replica_groups|source_target_pairs)=(?!\{\})[^ ]*[^ ,]")

Groups = list[list[int]]
"""Groups of devices, by their numbers in the program."""


def groups_of(text: str) -> Groups:
    """Return the groups of devices that exchange data in an instruction.

    The list is empty if all devices are one group.

    Args:
      text: the instruction, as XLA prints it.

    Raises:
      ValueError: the groups are written in an unknown notation.
    """
    if match := _LISTED.search(text):
        return [_numbers(group) for group in re.findall(r"\{([\d, ]*)\}", match[1])]
    if match := _RESHAPED.search(text):
        return _groups_of_reshaped(_numbers(match[1]), _numbers(match[2]), _numbers(match[3] or ""))
    if match := _OF_MESH.search(text):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", match[1])}
        return _groups_of_mesh(sizes, _device_ids(match[2] or ""), match[3])
    if match := _WRITTEN.search(text):
        raise ValueError(
            "groups of devices must be in one of XLA's notations {{0,1},…}, [2,4]<=[8] or mesh['x'=8], got "
            f"{match[0]}; use a JAX version that the README lists"
        )
    return []


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _device_ids(text: str) -> list[int]:
    """Return the numbers in a text such as ``[0,2,1,3]``, or ``([2,2]T(1,0))`` for the same numbers."""
    if match := _TRANSPOSED_IDS.fullmatch(text):
        sizes = _numbers(match[1])
        ids: list[int] = np.arange(math.prod(sizes)).reshape(sizes).transpose(_numbers(match[2])).ravel().tolist()
        return ids
    return _numbers(text.strip("[]"))


def _groups_of_reshaped(shape: list[int], order: list[int], transposed: list[int]) -> Groups:
    """Return the groups of a text such as ``[2,4]<=[4,2]T(1,0)``.

    For this text, the device numbers 0 to 7 are reshaped to (4, 2), transposed, and reshaped to (2, 4). Each row is a
    group.
    """
    devices = np.arange(math.prod(order)).reshape(order)
    if transposed:
        devices = devices.transpose(transposed)
    groups: Groups = devices.reshape(shape).tolist()
    return groups


def _groups_of_mesh(sizes: dict[str, int], device_ids: list[int], axes: str) -> Groups:
    """Return the groups of a text such as ``mesh['x'=8,'y'=2] {'x':(2)4}``.

    Each axis of the mesh is reshaped into three axes, and the devices of a group lie along the middle axes. In this
    example, ``x`` becomes (2, 4, 1). A mesh axis without communication, such as ``y``, gets a middle axis of size 1.
    """
    devices = np.array(device_ids) if device_ids else np.arange(math.prod(sizes.values()))
    parts = {}
    for name, before, size in _MESH_AXIS.findall(axes):
        parts[name] = int(before or 1), int(size or sizes[name])
    shape: list[int] = []
    for name, size in sizes.items():
        before, part = parts.get(name, (size, 1))
        shape += [before, part, size // (before * part)]
    inside = list(range(1, len(shape), 3))
    outside = [n for n in range(len(shape)) if n not in inside]
    group_size = math.prod(part for _, part in parts.values())
    groups: Groups = devices.reshape(shape).transpose([*outside, *inside]).reshape(-1, group_size).tolist()
    return groups


def axis_of(groups: Groups, mesh: Any) -> str:
    """Return the smallest set of mesh axes along which all groups lie.

    The names of the axes are joined by ``+``. If there is no such set, return the number of devices in a group, such as
    ``"8 devices"``.
    """
    shape = dict(mesh.shape) if mesh is not None else {}
    devices = np.arange(math.prod(shape.values())).reshape(tuple(shape.values()))
    for count in range(1, len(shape) + 1):
        for names in itertools.combinations(shape, count):
            along = [list(shape).index(name) for name in names]
            across = [n for n in range(len(shape)) if n not in along]
            lines = devices.transpose([*across, *along]).reshape(-1, math.prod(shape[name] for name in names))
            line_of = {int(device): n for n, line in enumerate(lines) for device in line}
            if all(len({line_of.get(device) for device in group}) == 1 for group in groups):
                return "+".join(names)
    return f"{len(groups[0])} devices"
