"""``python -m jaxmp``, the command ``jaxmp``."""

import sys

from jaxmp.cli import main

sys.exit(main())
