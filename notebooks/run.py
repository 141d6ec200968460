"""Check and execute notebooks: `python notebooks/run.py [NAME …]`; with --write make the .ipynb of each from its .py.

A notebook is a pair: NAME.py (jupytext, percent format), which is edited and reviewed, and NAME.ipynb, which opens
everywhere. Both must hold the same cells, and the .ipynb no outputs. Each is executed headless, in a kernel of its own,
in an empty temporary directory; what it leaves there is an error.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError

HERE = Path(__file__).resolve().parent
SECONDS_PER_CELL = 900


def main() -> None:
    """Exit status 1 after the first notebook that fails, with what is wrong on stderr."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="notebooks without their suffix; none: all")
    parser.add_argument("--write", action="store_true", help="write the .ipynb files and execute nothing")
    asked = parser.parse_args()
    for script in scripts(asked.names):
        if asked.write:
            nbformat.write(paired(script), script.with_suffix(".ipynb"))
            continue
        begun = time.perf_counter()
        mistake = difference(script) or failure(script)
        if mistake:
            sys.exit(f"{script.name}: {mistake}")
        print(f"{script.stem}: executed in {time.perf_counter() - begun:.0f} s", flush=True)


def scripts(names: list[str]) -> list[Path]:
    """The .py half of the notebooks; of all, if none is named."""
    every = sorted(path for path in HERE.glob("*.py") if path.name != Path(__file__).name)
    unknown = set(names) - {path.stem for path in every}
    if unknown or not every:
        sys.exit(f"no notebook {', '.join(sorted(unknown))} in {HERE}; there are {', '.join(p.stem for p in every)}")
    lonely = {path.stem for path in HERE.glob("*.ipynb")} - {path.stem for path in every}
    if lonely:
        sys.exit(f"no .py for {', '.join(sorted(lonely))}: run jupytext --set-formats ipynb,py:percent NAME.ipynb")
    return [path for path in every if not names or path.stem in names]


def paired(script: Path) -> nbformat.NotebookNode:
    """The notebook that a .py file describes, with ids that do not change from one writing to the next."""
    notebook = jupytext.read(script)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number:02}"
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def difference(script: Path) -> str | None:
    """How the two halves of a notebook differ, or what else is wrong with the .ipynb."""
    path = script.with_suffix(".ipynb")
    if not path.exists():
        return f"{path.name} is missing: run python notebooks/run.py --write"
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    if notebook.metadata.get("jupytext", {}).get("formats") != "ipynb,py:percent":
        return f"{path.name} is not paired: run jupytext --set-formats ipynb,py:percent {path.name}"
    here, there = ([(cell.cell_type, cell.source) for cell in n.cells] for n in (paired(script), notebook))
    if here != there:
        first = next(i for i, (a, b) in enumerate(itertools.zip_longest(here, there)) if a != b)
        return f"cell {first} differs from {path.name}'s: run jupytext --sync {script.name}"
    if any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells):
        return f"{path.name} holds outputs: clear them, or run python notebooks/run.py --write"
    return None


def failure(script: Path) -> str | None:
    """Execute a notebook; what went wrong, if anything did."""
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as workplace:
        os.environ |= {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")])),
            "TMPDIR": workplace,
            **{name: home for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR")},
        }
        client = NotebookClient(
            paired(script),
            timeout=SECONDS_PER_CELL,
            kernel_name="python3",
            resources={"metadata": {"path": workplace}},
        )
        try:
            client.execute()
        except CellTimeoutError:
            return f"a cell ran for more than {SECONDS_PER_CELL} s"
        except CellExecutionError as error:
            return str(error)
        left = sorted(str(path.relative_to(workplace)) for path in Path(workplace).rglob("*"))
        return f"left behind: {', '.join(left)}" if left else None


if __name__ == "__main__":
    main()
