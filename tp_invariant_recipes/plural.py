"""A number and its noun, for people."""


def counted(count: int, noun: str, form: str = "") -> str:
    """Such as "1 step" and "2 steps". form: of the number, such as "," for "10,000 steps"."""
    return f"{count:{form}} {noun}" + ("" if count == 1 else "s")
