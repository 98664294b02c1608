"""Mode `program`: whatever else the caller runs, in a prepared container.

Slurm, Kubeflow and `docker run image python x.py` depend on it. It is healthy as long as it runs,
and Docker sees that by itself.
"""

from collections.abc import Mapping, Sequence

from entrypoints.identity import Identity
from entrypoints.mode import Launch, Mode


class Program(Mode):
    """Claims what no other mode does."""

    name = "program"

    def claims(self, words: Sequence[str]) -> bool:
        return True

    def prepare(
        self, words: Sequence[str], environment: Mapping[str, str], identity: Identity
    ) -> Launch:
        return Launch(list(words))


MODE = Program()
