"""`python -m pufferfish`: the `pufferfish` command, for use with torchrun."""

import sys

from .cli import main

sys.exit(main())
