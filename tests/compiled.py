"""Reading compiled programs."""

import re


def loop_copies(hlo: str) -> list[tuple[int, ...]]:
    """Shapes of the copies in bodies of while loops, and in what those call: branches, inner loops."""
    called, copies, inside, computation = set(re.findall(r"body=%?([\w.\-]+)", hlo)), {}, {}, ""
    for line in hlo.splitlines():
        if opened := re.match(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            computation = opened.group(1)
        if copied := re.search(r"= \w+\[([\d,]*)\]\S* copy\(", line):
            shape = tuple(int(n) for n in copied.group(1).split(",") if n)
            copies.setdefault(computation, []).append(shape)
        for names in re.findall(
            r"(?:branch_computations|true_computation|false_computation|to_apply)=\{?([^,}]*(?:, %[^,}]*)*)", line
        ):
            inside.setdefault(computation, set()).update(re.findall(r"%?([\w.\-]+)", names))
    while new := set().union(*(inside.get(name, set()) for name in called)) - called:
        called |= new
    return [shape for name in called for shape in copies.get(name, [])]
