"""`python -m pufferfish`: the command, for torchrun."""

import sys

from .cli import main

sys.exit(main())
