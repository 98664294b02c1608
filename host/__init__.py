"""What runs on the host. Every Python 3 can read this one file, which says which is needed."""

import sys

if sys.version_info < (3, 10):  # noqa: UP036 - Debian 11 has 3.9, macOS 3.9, Ubuntu 20.04 3.8
    sys.exit(
        "error: This is Python {}.{}; host/ needs 3.10 or newer. Name another one: "
        "`make PYTHON=python3.11 jupyter`, or use `docker compose` without make.".format(
            *sys.version_info
        )
    )
