"""What a cluster's devices and links can do, from a TOML file that users copy and edit: `meshes/targets/*.toml`."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent / "targets"
NAMES = tuple(sorted(file.stem for file in FOLDER.glob("*.toml")))


class Range(NamedTuple):
    """From a bad day to a good one."""

    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Products:
    """Floating-point operations of matrix products a second."""

    bfloat16: float
    float32: float


@dataclasses.dataclass(frozen=True)
class Memory:
    bytes: int
    """Of a device, for programs."""
    bandwidth: float
    """Bytes a second."""


@dataclasses.dataclass(frozen=True)
class Host:
    devices: int
    link: float
    """Bytes a second that a device receives from others in the host."""
    memory_link: float
    """Bytes a second between a device and the host's memory, each way."""
    memory: float
    """Bytes of the host's memory for each device."""


@dataclasses.dataclass(frozen=True)
class Network:
    link: float
    """Bytes a second that a device receives from other hosts."""


@dataclasses.dataclass(frozen=True)
class Latency:
    """Seconds until the first byte of a message is there."""

    host: float
    network: float


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """Shares of the rates that programs reach."""

    products: Range
    memory: Range
    links: Range


@dataclasses.dataclass(frozen=True)
class Target:
    """A device, its host and its network."""

    name: str
    products: Products
    memory: Memory
    host: Host
    network: Network
    latency: Latency
    efficiency: Efficiency

    @classmethod
    def load(cls, name: str) -> Target:
        """The target of this name, or in this .toml file; ValueError, one line, if there is none or it is not right."""
        path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
        if not path.is_file():
            raise ValueError(
                f"target {name!r} is not known: choose {', '.join(NAMES)}, or a .toml file like {FOLDER}'s"
            )
        try:
            told = tomllib.loads(path.read_text())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as wrong:
            raise ValueError(f"target {name}: {wrong}") from None
        sections: dict[str, Any] = {
            "products": Products,
            "memory": Memory,
            "host": Host,
            "network": Network,
            "latency": Latency,
            "efficiency": Efficiency,
        }
        _same(name, "", set(told), set(sections))
        return cls(
            path.stem, **{section: _section(name, section, of, told[section]) for section, of in sections.items()}
        )


def _section(target: str, section: str, of: Any, told: Any) -> Any:
    """A section's dataclass from its table."""
    if not isinstance(told, dict):
        raise ValueError(f"target {target}: [{section}] must be a table of numbers")
    fields = {field.name: str(field.type) for field in dataclasses.fields(of)}
    _same(target, f"{section}.", set(told), set(fields))
    return of(**{key: _value(f"target {target}: {section}.{key}", fields[key], value) for key, value in told.items()})


def _value(what: str, kind: str, value: Any) -> Any:
    if kind == "Range":
        if (
            not isinstance(value, list)
            or len(value) != 2
            or not _number(what, value[0]) <= _number(what, value[1]) <= 1
        ):
            raise ValueError(f"{what} = {value!r} must be two shares of at most 1, the lower one first")
        return Range(*map(float, value))
    number = _number(what, value)
    if kind == "int" and number != int(number):
        raise ValueError(f"{what} = {value!r} must be whole")
    return int(number) if kind == "int" else number


def _number(what: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ValueError(f"{what} = {value!r} must be positive and finite")
    return float(value)


def _same(target: str, where: str, told: set[str], needed: set[str]) -> None:
    for said, names in (("is missing", needed - told), ("is not known", told - needed)):
        if names:
            raise ValueError(f"target {target}: {where}{min(names)} {said}; there are {', '.join(sorted(needed))}")
