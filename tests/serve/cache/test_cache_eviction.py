"""What goes when room is needed: interiors before leaves, a state with the KV it stands on, what saves least per byte."""

from cache_engine import Engine, hit, toy

from k3jax.serve.cache import (
    Checkpoint,
    Lineage,
    Lru,
    Standing,
)

R = range


def sessions(policy):
    """Four sessions of 10 states, each hit at its leaf in turn, in a pool with room for 16 states."""
    sizes = toy(kda_layers=1, head_bytes=16)  # a state is a page
    engine = Engine(pages=100, geometry=sizes, policy=policy)
    engine.care = 10
    talks = [[1000 * s + t for t in R(20)] for s in R(4)]
    for s, talk in enumerate(talks):
        for turn in R(2, 21, 2):
            engine.run(f"{s}", talk[:turn])
    assert len(engine.cache.index.checkpoints) == 40
    for _ in R(2):
        for s, talk in enumerate(talks):
            assert engine.begin(f"{s}", [*talk, 7]).start == 20
            engine.do_copies()
            engine.end(f"{s}", "abort")
    assert len(engine.cache.index.nodes) == 4 * 5  # partly filled pages went when fuller ones came
    engine.cache.evict(100 - 1 - 4 * 5 - 16)
    engine.cache.check()
    left = engine.cache.index.checkpoints.values()
    return sum(hit(engine, talk) == (20, 20) for talk in talks), sum(c.boundary < 20 for c in left), len(left)


def test_interiors_go_first_and_every_session_keeps_its_leaf():
    assert sessions(Lineage()) == (4, 12, 16)
    assert sessions(Lru())[0] < 4  # a hit that refreshes the whole path keeps interiors as fresh as leaves


def test_a_state_goes_with_the_kv_it_stands_on_in_the_same_call():
    engine, tokens = Engine(), list(R(16))
    engine.begin("R", tokens, turns=(4, 8))
    engine.prefill("R")
    engine.end("R")
    held = engine.cache.pool.pages - 1 - engine.cache.pool.free
    assert [c.boundary for c in engine.cache.index.checkpoints.values()] == [4, 8, 16] and held == 4 + 9
    (second,) = [n for n in engine.cache.index.nodes.values() if n.start == 4]
    engine.lose([second.page])
    engine.cache.check()
    assert [c.boundary for c in engine.cache.index.checkpoints.values()] == [4]
    assert hit(engine, tokens) == (4, 4) and len(engine.cache.index.nodes) == 1


def test_one_groups_loss_takes_its_siblings_at_once():
    engine, tokens = Engine(), list(R(8))
    engine.run("R", tokens)
    (state,) = engine.cache.index.checkpoints.values()
    free = engine.cache.pool.free
    engine.lose([state.pages[1]])
    engine.cache.check()
    assert engine.cache.pool.free == free + 3 and hit(engine, tokens) == (8, 0)


def test_of_two_equally_recent_states_the_one_that_saves_less_per_byte_goes():
    # 64 KiB that save 2 units of prefill, and 1 MiB that saves 3.
    dense = Standing(Checkpoint(b"a", 2, (1,)), saved=2, bytes=64 * 1024, children=0)
    heavy = Standing(Checkpoint(b"b", 3, (2,)), saved=3, bytes=1024 * 1024, children=0)
    rank = lambda standing: Lineage().rank(standing, 5)
    assert min(dense, heavy, key=rank) is heavy
    often = Standing(Checkpoint(b"c", 3, (3,), hits=20), saved=3, bytes=1024 * 1024, children=0)
    assert min(dense, often, key=rank) is dense  # unless its expected reuse makes up for it
    inside = Standing(Checkpoint(b"d", 9, (4,), hits=99), saved=9, bytes=1024, children=1)
    assert min(dense, heavy, often, inside, key=rank) is inside
