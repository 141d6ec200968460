"""The cheapest set of edges that separates two nodes of a graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable


def sink_side(
    edges: Iterable[tuple[Hashable, Hashable, int | float]], source: Hashable, sink: Hashable
) -> set[Hashable]:
    """The sink's side of a minimum cut, the smallest one if there are several. edges: (from, to, price ≥ 0).

    Raises ValueError if no cut has a finite price. Shortest augmenting paths (Edmonds and Karp, 1972).
    """
    left: dict[Hashable, dict[Hashable, int | float]] = defaultdict(lambda: defaultdict(float))
    for a, b, price in edges:
        left[a][b] += price
        left[b][a] += 0
    while True:
        onward, queue = {sink: sink}, [sink]
        for node in queue:
            for a in left[node]:
                if a not in onward and left[a][node] > 0:
                    onward[a] = node
                    queue.append(a)
            if source in onward:
                break
        if source not in onward:
            return set(onward)
        path = [source]
        while path[-1] != sink:
            path.append(onward[path[-1]])
        steps = list(zip(path, path[1:], strict=False))
        flow = min(left[a][b] for a, b in steps)
        if flow == float("inf"):
            raise ValueError(
                f"no cut between {source!r} and {sink!r} has a finite price: a path of infinite edges joins them"
            )
        for a, b in steps:
            left[a][b] -= flow
            left[b][a] += flow
