"""``bench.gpu`` where there is no GPU: what it compares does the same, and its records say what they should."""

import json
import sys

import pytest
import torch

from bench.gpu import __main__ as gpu
from bench.gpu import copies
from compiled_fsdp.buckets.kernels import layout

CPU = torch.device("cpu")


def flat(what: str, name: str, bucket: copies.Bucket, result) -> torch.Tensor:
    """A system's result as one tensor, without the gaps that our kernels leave."""
    if name == copies.OURS and what.startswith("pack"):
        rows = result.view(-1, layout.places(bucket.shards)[-1])
        places = zip(layout.places(bucket.shards), bucket.shards, strict=False)
        return torch.cat([rows[:, p : p + n] for p, n in places], 1).flatten()
    if name == copies.OURS:
        numels = bucket.numels if what == "unpack parameters" else bucket.shards
        return torch.cat([result[p : p + n] for p, n in zip(layout.places(numels), numels, strict=False)])
    if what == "pack shards" and isinstance(result, tuple):
        return result[0]  # FSDP2's: the input of its gather
    return torch.cat([t.flatten() for t in result]) if isinstance(result, list) else result.flatten()


@pytest.mark.parametrize("what", copies.SYSTEMS)
def test_every_system_copies_the_same(what):
    """In the same layout and dtype, but for Inductor's, which is our plain implementation compiled."""
    bucket = copies.Bucket("some", (16 * 3, 8, 8 * 21))
    buffers = copies.Buffers(bucket, CPU)
    systems = {name: make for name, make in copies.SYSTEMS[what].items() if name != "Inductor"}
    results = {name: flat(what, name, bucket, make(buffers)()) for name, make in systems.items()}
    expected = results[copies.OURS]
    assert len(results) == 3
    for name, result in results.items():
        assert result.dtype == expected.dtype, name
        assert torch.equal(result, expected), name


def test_columns_are_copied_as_collectives_do_it():
    """Our kernels' operations on a parameter that is sharded on its second dimension, there and back."""
    bucket = copies.by_columns(0.25)
    assert len(set(bucket.numels)) == 1
    assert bucket.inner is not None
    width = copies.WORLD * bucket.inner
    buffers = copies.Buffers(bucket, CPU)
    packed = copies.our_pack_grads(buffers)().view(copies.WORLD, -1)
    first = buffers.grads[0].float().view(width, copies.WORLD, bucket.inner).transpose(0, 1)
    assert torch.equal(packed[:, : width * bucket.inner], first.reshape(copies.WORLD, -1))
    buffers.gathered = packed.reshape(-1).bfloat16()
    full = copies.our_unpack_fulls(buffers)()[: width * width]
    assert torch.equal(full, buffers.grads[0])


def test_a_comparator_that_fails_ends_nothing(monkeypatch):
    def fails(buffers):
        raise RuntimeError("no such op")

    monkeypatch.setitem(copies.SYSTEMS, "pack shards", {copies.OURS: copies.our_pack_shards, "theirs": fails})
    for what in [what for what in copies.SYSTEMS if what != "pack shards"]:
        monkeypatch.delitem(copies.SYSTEMS, what)
    records = list(copies.measure(CPU, quick=True))
    assert {record.system for record in records} == {"copy", copies.OURS, "not measured"}
    assert any("theirs, layer of 0.25 MB: no such op" in record.more.get("why", "") for record in records)
    monkeypatch.setitem(copies.SYSTEMS, "pack shards", {copies.OURS: fails})
    with pytest.raises(RuntimeError, match="no such op"):
        list(copies.measure(CPU, quick=True))


@pytest.mark.parametrize(
    ("bucket", "tensors", "megabytes"), [(copies.layer_of(16), 9, 16), (copies.many(64, 32), 64, 2)]
)
def test_buckets_have_their_size(bucket, tensors, megabytes):
    assert len(bucket.numels) == tensors
    assert all(numel % copies.WORLD == 0 for numel in bucket.numels)
    assert 0.9 * megabytes <= 2 * sum(bucket.numels) / 2**20 <= 1.01 * megabytes


@pytest.mark.more
def test_records(tmp_path, monkeypatch, capsys):
    """The dry run: a list of records with the fields that others read, and what was not measured."""
    systems = {
        what: {name: make for name, make in systems.items() if name != "Inductor"}
        for what, systems in copies.SYSTEMS.items()
    }
    monkeypatch.setattr(copies, "SYSTEMS", systems)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = tmp_path / "records.json"
    monkeypatch.setattr(
        sys,
        "argv",
        ["bench.gpu", "--quick", "--only", "copies", "codecs", "host", "--codegen", "aot_eager", "--json", str(file)],
    )
    gpu.main()
    records = json.loads(file.read_text())
    assert {"bench", "system", "bytes", "tensors", "seconds", "gbps", "ratio_to_copy"} <= records[0].keys()
    assert records[0]["bench"] == "machine"
    assert records[0]["torch"] == torch.__version__
    assert [r["why"] for r in records if r["system"] == "not measured"]
    buckets = [r for r in records if r["bench"].startswith("bucket: ")]
    copied = [r for r in buckets if r["system"] != "not measured"]
    assert len(copied) == 4 * (4 + 4 + 2)  # others have no operation for columns
    assert len(buckets) - len(copied) == 4 * 2
    assert all(r["ratio_to_copy"] == 1 for r in copied if r["system"] == "copy")
    assert all(r["gbps"] == pytest.approx(r["bytes"] / r["seconds"] / 1e9) for r in copied)
    steps = [r for r in records if r["bench"] == "host time of a step"]
    assert len(steps) == 9
    assert all(r["seconds"] > 0 for r in steps)
    assert capsys.readouterr().out.count("\n") == len(records)
