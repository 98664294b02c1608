"""Numbers in sentences."""


def counted(count: int, noun: str) -> str:
    """`1 process`, `2 processes`."""
    plural = "es" if noun.endswith(("s", "ch")) else "s"
    return f"{count} {noun}{'' if count == 1 else plural}"
