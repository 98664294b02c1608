"""The one kind of error the host tools show: a sentence for the person who reads it."""


class HostError(Exception):
    """What was found, what is needed and what to do, in one or two sentences. The command ends with
    exit code 1."""
