"""``python -m jaxmp.cli``."""

import sys

from jaxmp.cli import main

sys.exit(main())
