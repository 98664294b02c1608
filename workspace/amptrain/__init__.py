"""Mixed-precision training done right.

Reads in this order: cli, config, train, step, precision, optim; then data/, checkpoint/, report/.
"""

__version__ = "0.2.0"
