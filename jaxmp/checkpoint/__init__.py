"""Save and restore states with Orbax, also under another policy."""

from jaxmp.checkpoint.restoring import list_steps as list_steps
from jaxmp.checkpoint.restoring import read_metadata as read_metadata
from jaxmp.checkpoint.restoring import restore as restore
from jaxmp.checkpoint.saving import save as save
from jaxmp.checkpoint.saving import wait as wait

__all__ = ["list_steps", "read_metadata", "restore", "save", "wait"]


def __dir__() -> list[str]:
    return __all__
