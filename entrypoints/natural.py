"""Numbers that people write into variables and flags."""


def natural(text: str, highest: int) -> int | None:
    """The number from 1 to `highest` that the text is, or None.

    int() alone would do, but it raises for more than 4,300 digits.
    """
    if not text.isdecimal() or len(text) > 20:
        return None
    number = int(text)
    return number if 0 < number <= highest else None
