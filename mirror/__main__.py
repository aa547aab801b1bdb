"""``python -m mirror``: the same as the command ``mirror``."""

import sys

from mirror.cli import main

sys.exit(main())
