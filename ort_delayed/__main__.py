"""``python -m ort_delayed``: the command line."""

import sys

from ort_delayed.cli import main

sys.exit(main())
