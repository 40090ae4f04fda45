"""Run the command ``jaxmp`` as ``python -m jaxmp``."""

import sys

from jaxmp.cli import main

sys.exit(main())
