"""Hypotheses that a search shows: after each token those that it would have found with no more."""

from __future__ import annotations

import msgspec
import torch

from runtime.checkpoint.checkpoint_config import CheckpointConfig
from runtime.settings.config import DEMO_MODEL
from runtime.wire.handle import next_sibling
from tests.cpu.beams.test_beams_against_transformers import checkpoint
from tests.harness.ring.beam_draws import draws, searched
from tests.harness.ring.serving_ring import Ring, Setting

NUM_TOKENS = 8


def test_what_is_shown_after_a_token_is_what_transformers_finds_with_no_more() -> None:
    torch.set_num_threads(1)
    model, _ = checkpoint("demo", DEMO_MODEL)
    read = CheckpointConfig.read(DEMO_MODEL)
    asked = [draw._replace(num_tokens=NUM_TOKENS) for draw in draws(21, 10, read.vocab_size, NUM_TOKENS)]
    ring = Ring(DEMO_MODEL, Setting(beams=8))
    try:
        handles = [ring.submit(draw.prompt, draw.sampling, shows=True) for draw in asked]
        generated = ring.run()
    finally:
        ring.close()
    num_changed = 0
    for draw, handle in zip(asked, handles, strict=True):
        ranks = [generated[next_sibling(handle, number)] for number in range(draw.n)]
        num_shown = len(ranks[0].shown)
        assert num_shown < NUM_TOKENS, "the end is no news of this kind"
        for at in range(num_shown):
            shorter = searched(model, draw._replace(num_tokens=at + 1), read.eos_token_ids)
            assert [rank.shown[at] for rank in ranks] == [each.tokens for each in shorter], (draw, at)
            num_changed += at > 0 and ranks[0].shown[at][:at] != ranks[0].shown[at - 1]
    assert num_changed, "no best hypothesis has ever been another one than before"


def test_nobody_is_shown_what_he_does_not_look_at() -> None:
    (draw,) = draws(22, 1, 400, NUM_TOKENS)
    ring = Ring(DEMO_MODEL, Setting(beams=8))
    try:
        ring.submit(draw.prompt, msgspec.structs.replace(draw.sampling, n=1))
        assert all(not each.shown for each in ring.run().values())
    finally:
        ring.close()
