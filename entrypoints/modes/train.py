"""Mode `train`: `amptrain train` with the caller's flags."""

from collections.abc import Mapping, Sequence

from entrypoints.identity import Identity
from entrypoints.mode import Launch, Mode


class Train(Mode):
    """Trains, and ends with the exit code of the training."""

    name = "train"
    compose = "run"
    uses_workspace = True

    def prepare(
        self, words: Sequence[str], environment: Mapping[str, str], identity: Identity
    ) -> Launch:
        return Launch(["amptrain", *words])


MODE = Train()
