"""Mixed precision for a whole function: each operation in the dtype that suits it, decided on its graph."""

from jaxmp.autocast.transform import autocast as autocast
