"""Numbers in sentences."""


def counted(count: int, noun: str) -> str:
    """`1 process`, `2 processes`, `2 batches`, `2 epochs`."""
    plural = "es" if noun.endswith(("s", "tch")) else "s"
    return f"{count} {noun}{'' if count == 1 else plural}"
