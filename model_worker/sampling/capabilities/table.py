"""Table of a sampler's capabilities, in the order in which they see a step's logits."""

from __future__ import annotations

from model_worker.sampling.capabilities.allowed_ids import AllowedIds
from model_worker.sampling.capabilities.base import SamplingCapability
from model_worker.sampling.capabilities.grammar_masks import GrammarMasks
from model_worker.sampling.capabilities.logit_bias import LogitBias
from model_worker.sampling.capabilities.penalties import Penalties
from model_worker.sampling.capabilities.prohibitions import Prohibitions
from model_worker.sampling.capabilities.raw_logits import RawLogits
from model_worker.sampling.capabilities.token_logprobs import LogprobsCapability
from model_worker.sampling.capabilities.top_p_decay import TopPDecay
from model_worker.sampling.processors.capability import LogitsProcessors

CAPABILITIES: tuple[type[SamplingCapability], ...] = (
    # The model's own distribution is reported, so both come before anything changes it.
    RawLogits,
    LogprobsCapability,
    LogitsProcessors,
    Penalties,
    LogitBias,
    AllowedIds,
    GrammarMasks,
    # Prohibitions yield where they would leave nothing, so they come after those that do not yield.
    Prohibitions,
    TopPDecay,
)
