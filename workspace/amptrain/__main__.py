"""`python -m amptrain`: the same as the `amptrain` command."""

import sys

from amptrain.cli import main

sys.exit(main())
