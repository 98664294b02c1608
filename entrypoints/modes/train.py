"""Mode `train`: `amptrain train` with the caller's flags."""

from collections.abc import Mapping, Sequence

from entrypoints.identity import Identity
from entrypoints.mode import Launch, Mode
from entrypoints.paths import VENV


class Train(Mode):
    """Trains, and ends with the exit code of the training."""

    name = "train"
    compose = "run"
    uses_workspace = True

    def prepare(
        self, words: Sequence[str], environment: Mapping[str, str], identity: Identity
    ) -> Launch:
        # By its path, as `jupyter`: a PATH of the caller's own may lack the venv.
        return Launch([str(VENV / "bin/amptrain"), *words], attended=True)


MODE = Train()
