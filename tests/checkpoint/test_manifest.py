from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from rvdcomm.checkpoint import Manifest
from rvdcomm.checkpoint.manifest import ShardedTensor, StoredShard
from rvdcomm.layout import ITEM_BYTES
from tests.strategies import layouts


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    names = draw(st.lists(st.text(max_size=8), unique=True, min_size=1, max_size=4))
    found = {name: draw(tensors()) for name in names}
    files = {shard.file for tensor in found.values() for shard in tensor.shards.values()}
    return Manifest(found, {file: draw(st.text(max_size=8)) for file in sorted(files)})


@st.composite
def tensors(draw: st.DrawFn) -> ShardedTensor:
    layout = draw(layouts())
    files = st.sampled_from(["a.safetensors", "b", "ä c"])
    hexadecimal = st.text("0123456789abcdef", min_size=64, max_size=64)
    checksums = hexadecimal | hexadecimal.map("crc32c/1048576:{}".format)
    shards = {rank: StoredShard(draw(files), draw(checksums)) for rank in layout.ranks}
    return ShardedTensor(draw(st.sampled_from(sorted(ITEM_BYTES))), layout, shards)


@settings(max_examples=40)
@given(manifests())
def test_manifest_survives_a_json_round_trip(manifest: Manifest) -> None:
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert json.loads(manifest.to_text()) == manifest.to_json()
