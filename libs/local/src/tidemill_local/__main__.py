"""`python -m tidemill_local` is the `tidemill` command."""

import sys

from tidemill_local.cli import main

sys.exit(main())
