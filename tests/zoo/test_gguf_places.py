"""Where the tensors of a GGUF file lie and which blocks they are in is checked before anything of it is believed."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

import zoo
from tests.zoo.oracle import llama_checkpoint
from zoo.checkpoint import CheckpointError
from zoo.gguf_file import Block, decodable, read_header

Q, K = "blk.0.attn_q.weight", "blk.0.attn_k.weight"
Blocks = dict[str, Block]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    llama_checkpoint(folder / "model", num_hidden_layers=1)
    zoo.save(zoo.load(folder / "model"), folder / "model.gguf", format="gguf", blocks="f32")
    return folder / "model.gguf"


def patched(source: Path, out: Path, name: str, *, kind: int | None = None, offset: int | None = None) -> Path:
    """The file with another block type or offset (from the end of the header) of a tensor."""
    data = bytearray(source.read_bytes())
    at = data.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
    at += 4 + 8 * struct.unpack_from("<I", data, at)[0]  # the shape
    if kind is not None:
        struct.pack_into("<I", data, at, kind)
    if offset is not None:
        struct.pack_into("<Q", data, at + 4, offset)
    out.write_bytes(data)
    return out


def start(blocks: Blocks) -> int:
    return min(block.offset for block in blocks.values())


PLACES: list[tuple[Callable[[Blocks], int], str]] = [
    (lambda blocks: blocks[K].offset - start(blocks), r"begins at byte \d+, inside tensor blk\.0\.attn_[qk]\.weight, which ends at"),
    (lambda blocks: blocks[K].offset - start(blocks) + 32, r"begins at byte \d+, inside tensor blk\.0\.attn_"),
    (lambda blocks: blocks[Q].offset - start(blocks) + 4, rf"{Q} begins at byte \d+, \d+ after the header, .* general\.alignment 32"),
    (lambda blocks: 1 << 40, rf"cut short: tensor {Q} ends at \d+ of \d+"),
    (lambda blocks: (1 << 64) - 32, rf"cut short: tensor {Q} ends at"),
]


@pytest.mark.parametrize(("offset", "reason"), PLACES, ids=["same", "overlap", "unaligned", "far", "overflow"])
def test_a_tensor_in_a_wrong_place_is_named(source: Path, tmp_path: Path, offset: Callable[[Blocks], int], reason: str) -> None:
    broken = patched(source, tmp_path / "broken.gguf", Q, offset=offset(read_header(source)[1]))
    with pytest.raises(CheckpointError, match=rf"broken\.gguf: .*({reason})"):
        zoo.load(broken)


def test_what_lies_apart_or_in_another_order_is_read(source: Path, tmp_path: Path) -> None:
    """Only overlaps are wrong: a tensor that was moved behind the others is the same."""
    blocks = read_header(source)[1]
    data = source.read_bytes()
    behind = -(-(len(data) - start(blocks)) // 32) * 32 + 64
    moved = patched(source, tmp_path / "moved.gguf", Q, offset=behind)
    old = data[blocks[Q].offset : blocks[Q].offset + blocks[Q].bytes]
    moved.write_bytes(moved.read_bytes().ljust(start(blocks) + behind, b"\0") + old)
    ours, plain = zoo.load(moved), zoo.load(source)
    assert all(bool((ours.get_parameter(n) == p).all()) for n, p in plain.named_parameters())


@pytest.mark.parametrize("kind", [Kind.I8, Kind.I32, Kind.F64, Kind.Q8_1], ids=lambda kind: kind.name)
def test_blocks_that_cannot_be_decoded_are_named_with_those_that_can(source: Path, tmp_path: Path, kind: Kind) -> None:
    broken = patched(patched(source, tmp_path / "once.gguf", Q, kind=kind), tmp_path / "broken.gguf", K, kind=kind)
    named = rf"({Q}|{K}) \({kind.name}\), ({Q}|{K}) \({kind.name}\): blocks that cannot be decoded to weights; known: F32, F16, .*Q4_K"
    with pytest.raises(CheckpointError, match=rf"broken\.gguf: {named}"):
        zoo.load(broken)


def test_every_kind_that_is_accepted_is_decoded() -> None:
    kinds = {kind for kind in Kind if decodable(kind)}
    assert kinds >= {Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_K, Kind.Q6_K, Kind.MXFP4}
    assert not kinds & {Kind.I8, Kind.I16, Kind.I32, Kind.I64, Kind.F64, Kind.Q8_1, Kind.Q8_K}
