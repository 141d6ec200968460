"""The text of activation policies: which are policies, which rule decides, what is refused and how it says so."""

import itertools

import pytest

from k3jax.activations.policy import ALWAYS_KEPT, KEEP, POLICIES, ActivationPolicy, Policy

NAMES = {"attn.q", "moe.dispatch_in"} | ALWAYS_KEPT
pytestmark = pytest.mark.quick


def parse(text):
    return ActivationPolicy.parse(text)


def test_policies_are_their_text():
    assert len(set(map(str, POLICIES))) == len(set(POLICIES)) == 7
    for policy in POLICIES:
        assert Policy.parse(str(policy)) == policy
        for atoms in itertools.permutations(str(policy).split("+")):
            assert Policy.parse(" + ".join(atoms)) == policy
    assert Policy.parse("quantize") == Policy.parse("quantize+keep") == Policy("keep", quantized=True)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "drop",
        "quantize+recompute",
        "keep+recompute",
        "keep+keep",
        "quantize+quantize",
        "quantize+",
        "keep+local-offload",
    ]
    + ["quantize+local-offload+remote-offload", "Keep", "quantized"],
)
def test_what_is_no_policy_is_refused_with_those_there_are(text):
    choices = (
        "keep, recompute, local-offload, remote-offload, quantize, quantize+local-offload, quantize+remote-offload"
    )
    with pytest.raises(ValueError) as error:
        Policy.parse(text)
    assert str(error.value) == f"{text!r} is not a policy: choose one of {choices}"
    with pytest.raises(ValueError) as error:
        parse(f"a=keep, b={text}")
    assert str(error.value) == f"activations: {f'b={text}'!r} is not PATTERN=POLICY with a policy of {choices}"


def test_nothing_can_be_recomputed_and_quantized():
    with pytest.raises(ValueError, match="'quantize\\+recompute' is not a policy"):
        Policy("recompute", quantized=True)


def test_the_first_match_decides_and_the_rest_is_kept():
    policy = parse("attn.*=recompute, moe.dispatch_in = quantize+local-offload")
    assert policy.of("attn.q") == Policy("recompute") and policy.of("other") == KEEP
    assert policy.of("moe.dispatch_in") == Policy("local-offload", quantized=True)
    assert policy.stored(["attn.q", "other", "moe.dispatch_in"]) == ["other", "moe.dispatch_in"]
    assert str(policy) == "attn.*=recompute,moe.dispatch_in=quantize+local-offload,*=keep"
    assert parse(str(policy)) == policy


@pytest.mark.parametrize("name", sorted(ALWAYS_KEPT))
def test_routing_and_what_recomputation_starts_from_stay_exact(name):
    for text, expected in {
        "*=recompute": "keep",
        "*=quantize": "keep",
        "*=local-offload": "local-offload",
        "*=quantize+remote-offload": "remote-offload",
        f"{name}=keep,*=local-offload": "keep",
    }.items():
        assert str(parse(text).of(name)) == expected
        parse(text).check(NAMES)


@pytest.mark.parametrize(
    "text",
    ["atn.*=keep", "*=keep,attn.q=recompute", "attn.*=keep,attn.q=keep", "attn.q=keep,attn.q=recompute"]
    + ["*=keep,*=recompute", "moe.experts=recompute", "group.in=quantize"],
)
def test_rules_that_decide_nothing_are_refused(text):
    with pytest.raises(
        ValueError, match="matches no name that is left to it; names are attn.q, backward.held, chunk.in, group.in"
    ):
        parse(text).check(NAMES)


@pytest.mark.parametrize("text", ["attn", "attn=drop", "=keep", "a=keep,,b=keep", ""])
def test_what_is_no_rule_is_refused(text):
    with pytest.raises(ValueError, match="PATTERN=POLICY"):
        parse(text)
