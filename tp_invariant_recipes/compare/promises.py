"""Which bits two runs on different machines were promised to share: equal ones under numerics=portable, else none."""

from tp_invariant_recipes.ledger.lines import Header

PORTABLE = "portable"
# Fields of a header's device that tell architectures apart.
FIELDS = ("name", "compute_capability", "machine")


def promise(a: Header, b: Header, different: bool) -> str | None:
    """One sentence about two runs on different architectures; None: they ran on the same one, as far as is recorded.

    different: whether a compared bit differs.
    """
    left, right = _architecture(a), _architecture(b)
    modes = {str(header.numerics.get("mode")) for header in (a, b)}
    if left == right:
        return None
    machines = f"The runs were made on different architectures ({left}; {right})"
    if modes != {PORTABLE}:
        named = " and ".join(f"numerics={mode}" for mode in sorted(modes))
        found = "this difference is no defect" if different else "these bits are equal all the same"
        return f"{machines}. {named}: equal bits are not promised there, and {found}; numerics=portable promises them."
    definitions = [header.device.get("attention") for header in (a, b)]
    if definitions[0] != definitions[1]:
        return f"{machines}, by two versions of numerics=portable ({definitions[0]}; {definitions[1]}): not promised."
    if different:
        return (
            f"{machines}. numerics=portable promises equal bits there: one of them does not compute its definition, or "
            f"this is a defect of tpi."
        )
    return f"{machines}, with the equal bits that numerics=portable promises."


def _architecture(header: Header) -> str:
    device = header.device
    return " ".join(str(device[name]) for name in FIELDS if device.get(name) not in (None, "0.0"))
