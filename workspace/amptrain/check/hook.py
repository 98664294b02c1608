#!/usr/bin/env python3
"""`amptrain check` for pre-commit, from a clone and without an installation: it needs the standard
library only."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from amptrain.check.command import main  # not amptrain.cli, which needs more than Python's own

    sys.exit(main(sys.argv[1:]))
