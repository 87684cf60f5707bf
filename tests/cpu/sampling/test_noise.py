"""Philox and the Gumbel noise made of it."""

from __future__ import annotations

import pytest
import torch

from model_worker.sampling import noise
from model_worker.sampling.philox import WORD, philox_4x32, token_words
from tests.harness.models import sampling_reference as reference

VOCAB = 1003  # not a multiple of the four words of a counter


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([WORD] * 4, [WORD] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_published_vectors(counter: list[int], key: list[int], words: list[int]) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    k0, k1 = (torch.tensor([word]) for word in key)
    got = philox_4x32((c0, c1, c2, c3), (k0, k1))
    assert [int(w) for w in got] == words == reference.philox(counter, key)


def test_token_words_put_seed_position_and_id_where_a_kernel_looks_for_them() -> None:
    seed, position, token = (1 << 62) + 12345, 777, 151_000
    words = token_words(torch.tensor([[seed]]), torch.tensor([[position]]), torch.tensor([token >> 2]))
    assert [int(w) for w in words] == reference.philox(
        [token >> 2, position, 0, 0], [seed & WORD, seed >> 32]
    )


def test_noise_is_bounded_for_every_word() -> None:
    words = torch.tensor([0, 255, 256, WORD - 255, WORD])
    got = noise.gumbel(words)
    assert torch.isfinite(got).all()
    assert got.min() >= noise.LOWEST - 1e-5
    assert got.max() <= noise.HIGHEST + 1e-5


def test_noise_of_an_id_is_the_same_among_all_ids_and_among_a_few() -> None:
    seeds, positions = torch.tensor([5, 6]), torch.tensor([9, 1])
    dense = noise.perturbed(torch.zeros(2, VOCAB), seeds, positions, prune=False)
    ids = torch.tensor([[1002, 0, 17], [3, 4, 5]])
    assert torch.equal(noise.noise_at(seeds, positions, ids), dense.gather(1, ids))


def test_pruned_ids_never_win() -> None:
    logits = torch.randn(32, VOCAB, generator=torch.Generator().manual_seed(0)) * 60.0
    seeds, positions = torch.arange(32), torch.arange(32)
    full = noise.perturbed(logits, seeds, positions, prune=False)
    pruned = noise.perturbed(logits, seeds, positions, prune=True)
    assert torch.isinf(pruned).any(), "nothing was pruned, so the test says nothing"
    assert torch.equal(full.argmax(1), pruned.argmax(1))
