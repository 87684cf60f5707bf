"""Feature bits: which parts of sampling a row needs. A row without any is greedy and plain."""

from __future__ import annotations

NOISE = 1 << 0
TOP_K = 1 << 1
TOP_P = 1 << 2
MIN_P = 1 << 3
PENALTY = 1 << 4
BIAS = 1 << 5
MIN_LEN = 1 << 6
LOGPROBS = 1 << 7
LOGITS = 1 << 8
ALLOWED = 1 << 9
BAD_WORDS = 1 << 10
NGRAM = 1 << 11
HISTORY = 1 << 12  # a parameter depends on the order of the row's tokens
TOP_P_DECAY = 1 << 13
TOP_N_SIGMA = 1 << 14
PROCESSED = 1 << 15  # a logits processor changes the logits
EDITS = PENALTY | BIAS
FORBIDS = MIN_LEN | BAD_WORDS | NGRAM
CHANGES = EDITS | ALLOWED | FORBIDS  # the logits, before the draw
REMEMBERS = PENALTY | HISTORY | TOP_P_DECAY
LOOKS_BACK = PENALTY | HISTORY  # at prompt and output so far
HAS_ARRAYS = BIAS | ALLOWED | MIN_LEN | BAD_WORDS | LOOKS_BACK | TOP_P_DECAY | PROCESSED  # besides numbers
TRUNCATES = TOP_N_SIGMA | TOP_K | TOP_P | MIN_P
DRAWABLE = NOISE | TRUNCATES  # a row with no other features needs only a draw
OF_DRAW = DRAWABLE | TOP_P_DECAY  # a greedy row needs none of them
FEATURE_BITS = 16
"""Number of available feature bits."""
