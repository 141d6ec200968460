"""What can run while messages travel, read from a scheduled program: what stands between a message's start and its end."""

from __future__ import annotations

import collections
import re
from typing import NamedTuple

from k3jax.plan.hlo import COLLECTIVES, Operation, operations

NO_WORK = ("bitcast", "constant", "get-tuple-element", "parameter", "partition-id", "tuple")


class Message(NamedTuple):
    name: str
    """Kind of collective and what arrives."""
    sender: str
    """The part of the program that made what is sent, …"""
    reader: str
    """… and the one that reads it: XLA forgets what a ragged all-to-all itself was called."""
    asynchronous: bool
    """False where it has no end of its own: nothing runs until it has arrived."""
    beside: dict[str, int]
    """Between its start and its end: parts of the program whose matrix products stand there, "other" operations; how many."""


def part(operation: Operation) -> str:
    """The part of the program it comes from, by the innermost scope that is named "moe.…"."""
    scopes = re.findall(r"moe\.([\w.]+)", operation.path)
    backward = " backward" if "transpose(" in operation.path else ""
    return scopes[-1] + backward if scopes else operation.path.rpartition("/")[2]


def multiplies(operation: Operation) -> bool:
    """Whether it is a matrix product."""
    kernel = re.search("gemm|mosaic", operation.attribute("custom_call_target"))
    return operation.kind in ("dot", "ragged-dot") or bool(kernel)


def messages(text: str) -> list[Message]:
    """All collectives of a scheduled program and what stands beside each; those of loops come first."""
    of = operations(text)
    begun = [operation for inside in of.values() for operation in inside if operation.kind.endswith("-start")]
    bodies = {name for operation in begun for name in operation.called}
    return [message for name, inside in of.items() if name not in bodies for message in _messages(of, inside)]


def _messages(of: dict[str, list[Operation]], inside: list[Operation]) -> list[Message]:
    """Of one computation."""
    found: list[Message] = []
    open_: dict[str, tuple[int, collections.Counter]] = {}
    for operation in inside:
        begun = operation.operands[0] if operation.operands else ""
        if what := _collective(of, operation):
            asynchronous = operation.kind.endswith("-start")
            if asynchronous:
                open_[operation.name] = len(found), collections.Counter()
            shape = re.findall(r"\w+\[[\d,]*\]", operation.type)[-1]
            found.append(Message(f"{what} {shape}", *_ends(inside, operation), asynchronous, {}))
        elif operation.kind.endswith("-done") and begun in open_:
            at, beside = open_.pop(begun)
            found[at] = found[at]._replace(beside=dict(beside))
        elif operation.kind not in NO_WORK:
            for _, beside in open_.values():
                beside[part(operation) if _products(of, operation) else "other"] += 1
    return found


def _collective(of: dict[str, list[Operation]], operation: Operation) -> str | None:
    """The kind that it is or starts; `async-start` calls it."""
    kind = operation.kind.removesuffix("-start")
    if kind in COLLECTIVES:
        return kind
    called = operation.called if operation.kind in ("async-start", "call-start") else ()
    kinds = (_collective(of, each) for name in called for each in of.get(name, ()))
    return next(filter(None, kinds), None)


def _products(of: dict[str, list[Operation]], operation: Operation) -> bool:
    """Whether it multiplies matrices, in what it calls or itself."""
    return multiplies(operation) or any(_products(of, each) for name in operation.called for each in of.get(name, ()))


def _ends(inside: list[Operation], message: Operation) -> tuple[str, str]:
    """Parts of the program that made what this message sends, and that read what arrives."""
    by_name = {operation.name: operation for operation in inside}
    maker = by_name.get(message.operands[0])
    while maker and not part(maker) and maker.operands:
        maker = by_name.get(maker.operands[0])
    same, reader = {message.name}, ""
    for operation in inside[inside.index(message) + 1 :]:
        if not reader and same & set(operation.operands):
            if operation.kind in (*NO_WORK, "copy") or operation.kind.endswith(("-done", "-start")):
                same.add(operation.name)
            else:
                reader = part(operation)
    return part(maker) if maker else "", reader
