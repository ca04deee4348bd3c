"""Two indexes that find blocks by their tokens: chained hashes, and a radix tree."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b


class HashIndex:
    """A block is filed under the hash of its tokens and of its predecessor's hash (Kwon et al. 2023, arXiv:2309.06180; vLLM)."""

    def __init__(self, size: int):
        self.size = size
        self.blocks: dict[bytes, int] = {}
        self.hashes: dict[int, bytes] = {}

    def match(self, tokens: Sequence[int]) -> list[int]:
        found = []
        for key in self._keys(tokens):
            if key not in self.blocks:
                break
            found.append(self.blocks[key])
        return found

    def insert(self, tokens: Sequence[int], blocks: Sequence[int]) -> list[int]:
        fresh = []
        for key, block in zip(self._keys(tokens), blocks, strict=True):
            if key not in self.blocks and block not in self.hashes:
                self.blocks[key], self.hashes[block] = block, key
                fresh.append(block)
        return fresh

    def forget(self, block: int) -> list[int]:
        del self.blocks[self.hashes.pop(block)]
        return [block]

    def _keys(self, tokens: Sequence[int]) -> Iterator[bytes]:
        key = b""
        for at in range(0, len(tokens) - self.size + 1, self.size):
            key = blake2b(key + array("q", tokens[at : at + self.size]).tobytes(), digest_size=16).digest()
            yield key


Run = tuple[tuple[int, ...], ...]  # the tokens of consecutive blocks


@dataclass(eq=False)
class Node:
    """An edge of the tree: a run of blocks and what continues it, by the tokens of the next block."""

    run: Run = ()
    blocks: list[int] = field(default_factory=list)
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    parent: Node | None = None


class RadixIndex:
    """A tree whose edges are runs of blocks, split where rows diverge (Zheng et al. 2023, arXiv:2312.07104, section 3)."""

    def __init__(self, size: int):
        self.size = size
        self.root = Node()
        self.nodes: dict[int, Node] = {}

    def match(self, tokens: Sequence[int]) -> list[int]:
        node, run, found = self.root, self._run(tokens), []
        while run and run[0] in node.children:
            node = node.children[run[0]]
            same = _common(node.run, run)
            found += node.blocks[:same]
            if same < len(node.run):
                break
            run = run[same:]
        return found

    def insert(self, tokens: Sequence[int], blocks: Sequence[int]) -> list[int]:
        node, run, blocks = self.root, self._run(tokens), list(blocks)
        while run and run[0] in node.children:
            node = node.children[run[0]]
            same = _common(node.run, run)
            if same < len(node.run):
                self._split(node, same)
            run, blocks = run[same:], blocks[same:]
        fresh = next((i for i, b in enumerate(blocks) if b in self.nodes), len(blocks))
        if fresh:
            self._add(node, run[:fresh], blocks[:fresh])
        return blocks[:fresh]

    def forget(self, block: int) -> list[int]:
        node = self.nodes[block]
        at = node.blocks.index(block)
        if at:
            self._split(node, at)
            node = node.children[next(iter(node.children))]
        assert node.parent is not None
        del node.parent.children[node.run[0]]
        gone = [b for n in _below(node) for b in n.blocks]
        for b in gone:
            del self.nodes[b]
        return gone

    def _add(self, parent: Node, run: Run, blocks: list[int]) -> None:
        """Continue a leaf, or grow a new edge."""
        if parent is not self.root and not parent.children:
            node = parent
            node.run, node.blocks = node.run + run, node.blocks + blocks
        else:
            node = parent.children[run[0]] = Node(run, blocks, parent=parent)
        self.nodes |= dict.fromkeys(blocks, node)

    def _split(self, node: Node, at: int) -> None:
        """Cut an edge in two: the node keeps the first ``at`` blocks, a new child has the rest and the children."""
        rest = Node(node.run[at:], node.blocks[at:], node.children, node)
        for child in rest.children.values():
            child.parent = rest
        node.run, node.blocks, node.children = node.run[:at], node.blocks[:at], {rest.run[0]: rest}
        self.nodes |= dict.fromkeys(rest.blocks, rest)

    def _run(self, tokens: Sequence[int]) -> Run:
        return tuple(tuple(tokens[at : at + self.size]) for at in range(0, len(tokens) - self.size + 1, self.size))


def _common(a: Run, b: Run) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _below(node: Node) -> Iterator[Node]:
    """The node and all that continue it."""
    waiting = [node]
    while waiting:
        waiting += (node := waiting.pop()).children.values()
        yield node
