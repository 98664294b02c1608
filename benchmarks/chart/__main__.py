"""Draw docs/measurements.svg, the README's chart, from the tables of docs/measurements.md.

    python3 -m benchmarks.chart

It is drawn by the image's matplotlib, so that the same tables give the same file.
"""

import argparse

from benchmarks.chart import draw
from host.versions import ROOT


def main() -> None:
    """Write the file."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    (ROOT / "docs/measurements.svg").write_text(draw(), "utf-8")


if __name__ == "__main__":
    main()
