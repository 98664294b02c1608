"""Import the top-level modules of every installed package, and the `testing` packages, which are
API; print them."""

import importlib
from importlib.metadata import packages_distributions

# Of other systems, or run when imported.
NOT_HERE = {"_distutils_hack", "nvidia", "this", "antigravity"}
MORE = [
    "numpy.testing",
    "torch.testing",
    "torch.distributed.elastic",
    "torch.utils.tensorboard",
    "matplotlib.pyplot",
]

failed = {}
names = sorted(
    name for name in packages_distributions() if name.isidentifier() and name not in NOT_HERE
)
for name in [*names, *MORE]:
    try:
        importlib.import_module(name)
        print(name)
    except Exception as error:
        failed[name] = repr(error)
assert not failed, failed
