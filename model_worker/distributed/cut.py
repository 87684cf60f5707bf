"""Cut: which part of a dimension of the model a rank has. Knows sizes; knows no tensor and no checkpoint."""

from __future__ import annotations

from typing import NamedTuple

# Rows of the vocabulary are cut in blocks of this many, which is what the packed CPU kernel works on.
VOCAB_BLOCK = 16


class Cut(NamedTuple):
    """Part of a dimension: the elements start .. start + length of `total`, in memory for `room` of them."""

    total: int
    start: int
    length: int
    room: int

    @property
    def where(self) -> slice:
        return slice(self.start, self.start + self.length)

    def in_units_of(self, size: int) -> Cut:
        """Return the same cut, counted in blocks of `size` elements such as heads."""
        return Cut(*(number // size for number in self))


def whole(total: int) -> Cut:
    return Cut(total, 0, total, total)


def padded(total: int) -> Cut:
    """Return all of a dimension as a cut, in memory for whole blocks."""
    return Cut(total, 0, total, -(-total // VOCAB_BLOCK) * VOCAB_BLOCK)


def even(total: int, rank: int, num_ranks: int) -> Cut:
    """Return a rank's part of a dimension of which all ranks have as much."""
    length, rest = divmod(total, num_ranks)
    assert not rest, f"{total} cannot be cut into {num_ranks}"
    return Cut(total, rank * length, length, length)


def by_heads(num_heads: int, head_dim: int, rank: int, num_ranks: int) -> Cut:
    """Cut features into whole heads for the ranks; of fewer heads than ranks, neighbours have the same."""
    if num_heads >= num_ranks:
        return even(num_heads * head_dim, rank, num_ranks)
    assert num_ranks % num_heads == 0, f"{num_heads} heads cannot be given to {num_ranks} ranks"
    head = rank * num_heads // num_ranks
    return Cut(num_heads * head_dim, head * head_dim, head_dim, head_dim)


def by_vocabulary(vocab_size: int, rank: int, num_ranks: int) -> Cut:
    """Cut a vocabulary into as much room on every rank, in whole blocks; the last ones may have fewer rows in
    it, or none.
    """
    if num_ranks == 1:
        return whole(vocab_size)
    blocks = -(-vocab_size // (VOCAB_BLOCK * num_ranks))
    room = blocks * VOCAB_BLOCK
    start = min(rank * room, vocab_size)
    return Cut(vocab_size, start, min(room, vocab_size - start), room)
