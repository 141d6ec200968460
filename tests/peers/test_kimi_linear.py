"""Kimi Linear here computes what `transformers` computes, from the same files."""

import kimi_linear as peer
import numpy as np
import pytest
import safetensors.numpy
from kimi_linear import CONFIGS, Ours, tokens, torch, transformers

from experiments.convert import main as convert

# Both compute in float32; sums run in other orders.
VALUES, GRADIENTS = 1e-4, 1e-3


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory):
    """A model of theirs, and ours from its files in the layout that it computes with."""
    model = peer.make(request.param)
    directory = tmp_path_factory.mktemp("hf") / "model"
    model.save_pretrained(directory, save_original_format=False)
    return model, Ours.open(directory)


def relative(ours, theirs) -> float:
    """Distance, relative to the norm."""
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


@pytest.mark.parametrize("T", [1, 63, 64, 65, 200])
def test_logits_loss_and_gradients_are_theirs(pair, T, tmp_path, record_property):
    model, ours = pair
    ids = tokens(model, T)
    logits, loss, grads = ours.run(ids)
    there = torch.from_numpy(ids)
    result = model(there, labels=there if T > 1 else None, use_cache=False)
    expected = result.logits.detach().numpy()
    distances = {"logits": relative(logits, expected)}
    np.testing.assert_array_equal(logits.argmax(-1), expected.argmax(-1))
    if T > 1:  # one token has no next one
        distances["loss"] = relative(loss, result.loss.item())
        model.zero_grad()
        result.loss.backward()
        ours.write(tmp_path / "gradients", grads)
        found = safetensors.numpy.load_file(tmp_path / "gradients" / "model.safetensors")
        for name, parameter in model.named_parameters():
            if parameter.numel() and parameter.grad is not None and parameter.grad.norm():
                distances[name] = relative(found.pop(name), parameter.grad.numpy())
        rest = {name for name, value in found.items() if value.any()}
        assert all(name.endswith("e_score_correction_bias") for name in rest)
    for name, distance in distances.items():
        record_property(name, distance)
        assert distance < (VALUES if name in ("logits", "loss") else GRADIENTS), name
    print(f"T={T}: logits {distances['logits']:.1e}, worst {max(distances.items(), key=lambda d: d[1])}")


def test_packed_documents_are_their_documents_apart(pair):
    """Their PyTorch KDA knows no documents inside a sequence, so each runs there by itself."""
    model, ours = pair
    cuts = [0, 1, 66, 70, 130]
    ids = tokens(model, 130, cuts)
    segments = np.repeat(np.arange(len(cuts) - 1), np.diff(cuts))[None].repeat(2, 0)
    logits, _, _ = ours.run(ids, segments)
    for start, stop in zip(cuts, cuts[1:], strict=False):
        with torch.no_grad():
            expected = model(torch.from_numpy(ids[:, start:stop]), use_cache=False).logits.numpy()
        assert relative(logits[:, start:stop], expected) < VALUES, (start, stop)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("original", [True, False], ids=["released layout", "fused layout"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_round_trip_gives_back_every_bit_and_opens_without_a_warning(name, original, dtype, tmp_path, caplog):
    model = peer.make(name).to(getattr(torch, dtype))
    there, between, back = (tmp_path / part for part in ("there", "between", "back"))
    model.save_pretrained(there, save_original_format=original, max_shard_size="50KB")
    convert(["hf-to-orbax", str(there), str(between)])
    convert(["orbax-to-hf", str(between), str(back)])
    before, after = (load(directory) for directory in (there, back))
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert value.dtype == after[key].dtype and value.tobytes() == after[key].tobytes(), key
    caplog.clear()
    with peer.silent(caplog):
        again, about = transformers.KimiLinearForCausalLM.from_pretrained(back, dtype=dtype, output_loading_info=True)
    assert not any(about.values()), about
    for (key, value), other in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(value, other), key


def test_what_is_written_without_a_record_opens_there_too(pair, tmp_path, caplog):
    """A model trained here has no config.json of theirs."""
    model, ours = pair
    records = ours.form.to_records(ours.state)
    arrays = [(name, place.take(np.asarray(records[place.record]))) for name, place in ours.form.index.items()]
    peer.write_directory(tmp_path, ours.source.config, arrays)
    caplog.clear()
    with peer.silent(caplog):
        again = transformers.KimiLinearForCausalLM.from_pretrained(tmp_path)
    there = torch.from_numpy(tokens(model, 20))
    with torch.no_grad():
        assert torch.equal(again(there, use_cache=False).logits, model(there, use_cache=False).logits)


def load(directory):
    values = {}
    for file in directory.glob("*.safetensors"):
        values |= safetensors.numpy.load_file(file)
    return values
