"""Cut: the part of a model dimension that a rank has. Knows sizes; knows no tensor and no checkpoint."""

from __future__ import annotations

from typing import NamedTuple

# Rows of a block, in which the vocabulary is cut: the packed CPU kernel works on blocks of this size.
VOCAB_BLOCK = 16


class Cut(NamedTuple):
    """Part of a dimension: elements start .. start + length of `total`, in memory with space for `room`
    elements.
    """

    total: int
    start: int
    length: int
    room: int

    @property
    def where(self) -> slice:
        return slice(self.start, self.start + self.length)

    def in_units_of(self, size: int) -> Cut:
        """Return the same cut, counted in blocks of `size` elements, such as heads."""
        return Cut(*(number // size for number in self))


def whole(total: int) -> Cut:
    return Cut(total, 0, total, total)


def padded(total: int) -> Cut:
    """Return all of a dimension as a cut, with room for whole blocks."""
    return Cut(total, 0, total, -(-total // VOCAB_BLOCK) * VOCAB_BLOCK)


def even(total: int, rank: int, num_ranks: int) -> Cut:
    """Return a rank's part of a dimension that is divided evenly."""
    length, rest = divmod(total, num_ranks)
    assert not rest, f"{total} cannot be cut into {num_ranks}"
    return Cut(total, rank * length, length, length)


def by_heads(num_heads: int, head_dim: int, rank: int, num_ranks: int) -> Cut:
    """Divide features among ranks by whole heads. With fewer heads than ranks, neighbouring ranks have the
    same head.
    """
    if num_heads >= num_ranks:
        return even(num_heads * head_dim, rank, num_ranks)
    assert num_ranks % num_heads == 0, f"{num_heads} heads cannot be given to {num_ranks} ranks"
    head = rank * num_heads // num_ranks
    return Cut(num_heads * head_dim, head * head_dim, head_dim, head_dim)


def by_vocabulary(vocab_size: int, rank: int, num_ranks: int) -> Cut:
    """Divide a vocabulary among ranks, with the same room on every rank, in whole blocks. The last ranks may
    have fewer rows in it, or none.
    """
    if num_ranks == 1:
        return whole(vocab_size)
    blocks = -(-vocab_size // (VOCAB_BLOCK * num_ranks))
    room = blocks * VOCAB_BLOCK
    start = min(rank * room, vocab_size)
    return Cut(vocab_size, start, min(room, vocab_size - start), room)
