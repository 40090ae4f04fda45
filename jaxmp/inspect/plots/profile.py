"""Draw where the time of several calls went, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxmp.base import tables
from jaxmp.inspect._profile import kinds
from jaxmp.inspect._profile.profile import Profile
from jaxmp.inspect.plots.drawing import (
    BLACK,
    BLUE,
    BROWN,
    GREEN,
    GREY,
    LIGHT,
    ORANGE,
    PINK,
    RED,
    SKY,
    figure,
    ink,
    set_title,
    style,
)

_COLORS = {
    kinds.HALF: ORANGE,
    kinds.FLOAT32: BLUE,
    kinds.ATTENTION: RED,
    kinds.CONVOLUTION: SKY,
    kinds.REDUCTION: GREEN,
    kinds.ELEMENTWISE: PINK,
    kinds.CAST: BLACK,
    kinds.MOVE: BROWN,
    kinds.COLLECTIVE: "#4B0082",
    kinds.CALLBACK: "#7F3C8D",
    kinds.UPDATE: "#B8B200",
    kinds.OTHER: GREY,
    kinds.UNKNOWN: "#A9A9A9",
    kinds.WAITING: LIGHT,
}
_LABELLED = 0.05
"""The share of the longest bar from which a part of a bar is labelled."""


def profile(profiles: Mapping[str, Profile]) -> Any:
    """Draw the time of several calls by kind of work, one bar for each call.

    Args:
      profiles: a mapping from name to a result of :func:`jaxmp.inspect.profile`. The other profiles are compared with
        the first one.

    Raises:
      ModuleNotFoundError: matplotlib is not installed.

    >>> measured = jaxmp.inspect.profile(jax.jit(lambda x: x @ x))(jnp.ones((256, 256)))
    >>> profile({"float32": measured}).axes[0].get_xlabel()
    'ms a call'
    """
    longest = max(measured.milliseconds for measured in profiles.values())
    page = figure(9.5, 2.2 + 0.62 * len(profiles))
    axes = page.subplots()
    style(axes, "", x="ms a call", grid="x")
    for y, measured in enumerate(profiles.values()):
        start = 0.0
        for kind, width in measured.groups.items():
            axes.barh(y, width, left=start, height=0.66, color=_COLORS[kind], linewidth=0)
            if width > _LABELLED * longest:
                middle = start + width / 2
                axes.text(middle, y, f"{width:.3g}", ha="center", va="center", fontsize=7.5, color=ink(_COLORS[kind]))
            start += width
        axes.text(start, y, f" {tables.time_text(measured.milliseconds)}", va="center", fontsize=8.5, color=BLACK)
    axes.set_yticks(range(len(profiles)), list(profiles))
    axes.tick_params(axis="y", length=0, labelcolor=BLACK, labelsize=9)
    axes.set_ylim(len(profiles) - 0.5, -0.5)
    axes.set_xlim(0, 1.12 * longest)
    _add_legend(axes, profiles, longest)
    set_title(page, *(f"{name}: {measured.headline}" for name, measured in profiles.items()))
    return page


def _add_legend(axes: Any, profiles: Mapping[str, Profile], longest: float) -> None:
    """Name the kinds that are visible in the picture."""
    from matplotlib.patches import Patch

    visible = []
    for kind, color in _COLORS.items():
        if max(measured.groups[kind] for measured in profiles.values()) > 0.003 * longest:
            visible.append(Patch(color=color, label=kind))
    axes.legend(handles=visible, frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1))
