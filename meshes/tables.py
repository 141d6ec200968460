"""Tables on stdout."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: Collection[str] = ()) -> None:
    """A table that fits the terminal; elsewhere plain columns. Columns named in `numbers` are aligned to the right."""
    if sys.stdout.isatty():
        from rich import box
        from rich.console import Console
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for name in header:  # fold: rich would cut long cells short
            justify = "right" if name in numbers else "left"
            table.add_column(name.replace(" ", "\n"), overflow="fold", justify=justify)
        for cells in rows:
            table.add_row(*cells)
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for cells in (header, *rows):
        aligned = (
            cell.rjust(width) if name in numbers else cell.ljust(width)
            for name, cell, width in zip(header, cells, widths, strict=True)
        )
        print("  ".join(aligned).rstrip())
