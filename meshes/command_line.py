"""Command lines from dataclasses, with tyro; every mistake is one line on stderr and exit status 2."""

from __future__ import annotations

import contextlib
import difflib
import io
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import tyro

Config = TypeVar("Config")


def at_least(least: int, options: Any, *fields: str) -> None:
    """For a __post_init__: ValueError naming the option of the first of these fields that is less."""
    for name in fields:
        if getattr(options, name) < least:
            raise ValueError(f"--{name.replace('_', '-')}={getattr(options, name)} must be at least {least}")


def parse(
    cls: type[Config],
    argv: Sequence[str] | None = None,
    *,
    prog: str,
    description: str | None = None,
    default: Config | None = None,
) -> Config:
    """Instance of the dataclass `cls` as the options in `argv` say (None: the command line of this process).

    A field `global_batch` is the option --global-batch, in full: no abbreviations. A bool is a switch, --flag or
    --no-flag, and takes no value. A ValueError of a __post_init__ is reported like any other mistake, so ranges are
    checked there. `default`, an instance, replaces the fields' defaults. No subcommands, no positional arguments.
    Raises SystemExit: 2 after one line "PROG: error: ..." on stderr; 0 after --help, which goes to stdout.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    given: dict[str, Any] = {} if default is None else {"default": default}

    def run_tyro(argv: list[str]) -> tuple[Config, list[str]]:
        return tyro.cli(cls, args=argv, prog=prog, description=description, return_unknown_args=True, **given)

    box = io.StringIO()  # tyro has no public form of its errors but a box on stderr
    try:
        with contextlib.redirect_stderr(box):
            config, strays = run_tyro(argv)
    except SystemExit as stop:
        if stop.code != 2:
            raise
        mistake, strays = _read(box.getvalue(), stop.__context__), []
    else:
        if not strays:
            sys.stderr.write(box.getvalue())  # warnings, if any
            return config
        mistake = _about_stray(strays[0])
    # An unknown option explains the other mistakes, if any: a required one may be missing because it was misspelt.
    options = _options(run_tyro)
    unknown = [token for token in argv if token.startswith("--") and _name(token) not in options]
    refuse(prog, _about_unknown(unknown[0], options) if unknown else mistake)


def choose(prog: str, arguments: str, purposes: Mapping[str, str], argv: Sequence[str] | None) -> tuple[str, list[str]]:
    """The command that the first argument names, and the arguments after it.

    Raises SystemExit: 0 after --help or nothing, which prints all commands with their purposes; 2 for an unknown command.
    """
    name, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("--help", "-h"):
        print(f"usage: {prog} {{{','.join(purposes)}}} {arguments}\n")
        for known, purpose in purposes.items():
            print(f"  {known:12} {purpose}")
        raise SystemExit(0)
    if name not in purposes:
        refuse(prog, f"unknown command {name!r}: choose one of {', '.join(purposes)}")
    return name, rest


@contextlib.contextmanager
def refused(prog: str) -> Iterator[None]:
    """One line and exit status 2 for what cannot work (ValueError); 1 for what cannot be read or written (OSError)."""
    with failed(prog, OSError):
        try:
            yield
        except ValueError as mistake:
            refuse(prog, mistake)


@contextlib.contextmanager
def failed(prog: str, *kinds: type[Exception]) -> Iterator[None]:
    """One line and exit status 1 for these exceptions."""
    try:
        yield
    except kinds as failure:
        print(f"{prog}: error: {' '.join(str(failure).split())}", file=sys.stderr)
        raise SystemExit(1) from None


def refuse(prog: str, mistake: object) -> NoReturn:
    """Print "PROG: error: MISTAKE", as one line, on stderr and exit with status 2."""
    print(f"{prog}: error: {' '.join(str(mistake).split())}", file=sys.stderr)
    raise SystemExit(2) from None


def _name(token: str) -> str:
    """The option that a token like --global_batch=8 means; tyro takes underscores for hyphens."""
    return token.partition("=")[0].replace("_", "-")


def _options(run_tyro: Callable[[list[str]], object]) -> list[str]:
    """All options, read from the first column of the help text."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        run_tyro(["--help"])
    columns = (line.split("  ")[0] for line in _undecorated(text.getvalue()) if line.startswith("-"))
    return [option for column in columns for option in re.findall(r"--[a-z0-9][\w.-]*", column)]


def _about_unknown(token: str, options: list[str]) -> str:
    closest = difflib.get_close_matches(_name(token), options, n=2, cutoff=0.6)
    hint = f", did you mean {' or '.join(closest)}?" if closest else ";"
    return f"unknown option {token!r}{hint} Options are {', '.join(options)}"


def _about_stray(token: str) -> str:
    if token.lower() in ("true", "false"):
        return f"unexpected value {token!r}: a switch takes none, write --name for true and --no-name for false"
    return f"unexpected argument {token!r}: write --name=value, and quote values with spaces"


def _undecorated(text: str) -> list[str]:
    """Lines without colours, frames and rules; empty ones left out."""
    plain = (re.sub(r"\x1b\[[0-9;]*m|[\u2500-\u257f]", "", line).strip() for line in text.splitlines())
    return [line for line in plain if line.strip("-")]


def _read(box: str, error: BaseException | None) -> str:
    """What the box says: its title, the message, the help of the option it is about, a pointer to --help."""
    lines = _undecorated(box)
    message = list(itertools.takewhile(lambda line: not line.startswith("For full helptext"), lines[1:]))
    if not message or not message[0].startswith("Error parsing"):
        return " ".join(message or lines)
    # The box breaks long words; the error that it reports is at hand, as the context of tyro's exit.
    while error is not None and not isinstance(error, ValueError):
        error = error.__context__
    said = str(error).partition("Got errors:")[0] if error else " ".join(message)
    if "Argument helptext:" in message:
        return f"{message[message.index('Argument helptext:') + 1]}: {said}"
    return said
