"""Mode `doctor`: a report about the container and its host."""

from collections.abc import Sequence

from entrypoints.mode import Mode


class Doctor(Mode):
    """Prepares nothing: `docker exec` in a running container must change nothing there."""

    name = "doctor"

    def answer(self, words: Sequence[str]) -> int | None:
        from entrypoints.doctor import report  # late: it imports this package

        return report.main(list(words[1:]))


MODE = Doctor()
