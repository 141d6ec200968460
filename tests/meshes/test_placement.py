"""Which groups stay inside a host, as the numbering of ranks has it, and what the command says of it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshes import AXES, MeshSpec, membership
from meshes.__main__ import main
from meshes.placement import placement

SIZES = st.builds(MeshSpec, *[st.integers(1, 3)] * 4)


@pytest.mark.quick
@given(SIZES, st.sets(st.sampled_from(AXES)), st.integers(1, 9))
@settings(max_examples=40)
def test_it_counts_the_hosts_of_every_ranks_group(spec, axes, per_host):
    def group(rank):
        mine = membership(spec, rank).coordinates
        same = lambda other: all(a == b for axis, a, b in zip(AXES, mine, other, strict=True) if axis not in axes)
        return [r for r in range(spec.num_devices) if same(membership(spec, r).coordinates)]

    groups = {rank: group(rank) for rank in range(spec.num_devices)}
    found = placement(spec, axes, per_host)
    assert {len(g) for g in groups.values()} == {found.ranks}
    assert max(len({r // per_host for r in g}) for g in groups.values()) == found.hosts
    peers = [r // per_host == rank // per_host for rank, g in groups.items() for r in g if r != rank]
    assert found.inside == pytest.approx(np.mean(peers) if peers else 1)
    following = {rank: g[(g.index(rank) + 1) % len(g)] for rank, g in groups.items()}
    assert found.steps_inside == pytest.approx(np.mean([a // per_host == b // per_host for a, b in following.items()]))


def test_the_command_shows_where_groups_lie_and_warns_when_rows_leave_the_host(capsys):
    main(["--mesh=data=2,expert=8", "--hosts=2"])
    out, err = capsys.readouterr()
    assert "2 hosts of 8 devices" in out and not err
    expert = next(line for line in out.splitlines() if line.startswith("expert"))
    assert expert.split()[-4:] == ["8", "1", "100%", "100%"]
    main(["--mesh=data=8,pipe=8,expert=32", "--hosts=256"])
    out, err = capsys.readouterr()
    assert err.startswith("warning: rows for experts leave their host: a group of 32 ranks is spread over 4 hosts")
    assert "23% of its peers" in err and "expert=8 would stay inside" in err


@pytest.mark.parametrize("hosts", ["0", "3", "-1"])
def test_hosts_must_divide_the_devices(hosts, capsys):
    with pytest.raises(SystemExit) as end:
        main(["--mesh=data=8", f"--hosts={hosts}"])
    assert end.value.code == 2 and "divide the mesh's 8 devices" in capsys.readouterr().err
