"""Table of the scheduler's request features and the order in which their hooks are called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from runtime.checkpoint.pooling import read_pooling
from runtime.settings.config import RuntimeConfig
from runtime.text.codec import Decoders
from scheduler_proc.cache.kv_cache_manager import KVCacheManager
from scheduler_proc.core.output import Output
from scheduler_proc.core.request import FeatureFactory, Request
from scheduler_proc.features.beam_search.attaching import (
    DEFAULTS,
    NO_BEAMS,
    BeamSettings,
    attach_beam_search,
)
from scheduler_proc.features.embedding import attach_embedding
from scheduler_proc.features.feature_gate import may_by_what_it_brings
from scheduler_proc.features.generation_logits import attach_generation_logits
from scheduler_proc.features.grammar_client import GrammarClient
from scheduler_proc.features.guided import attach_guide
from scheduler_proc.features.logits_processors import attach_logits_processors
from scheduler_proc.features.logprobs import attach_logprobs
from scheduler_proc.features.perf_metrics import attach_perf_metrics
from scheduler_proc.features.prompt_outputs import attach_prompt_outputs
from scheduler_proc.features.speculation.speculation import SpeculationSettings, attach_speculation
from scheduler_proc.features.speculation.step_cost import StepCost
from scheduler_proc.features.stamps import attach_stamps
from scheduler_proc.port import Clock


class Features(NamedTuple):
    """Request features of a launch."""

    factories: tuple[FeatureFactory, ...]
    step_cost: StepCost | None
    """Cost model of steps, which learns how long each step takes; None if no request uses speculation."""
    may_ask: Callable[[Request], bool] | None = None
    """Function that returns True if a request may get features. None: each request may."""


def make_features(
    config: RuntimeConfig,
    output: Output,
    kv: KVCacheManager,
    clock: Clock,
    grammar: GrammarClient | None,
    vocab_size: int,
    decoders: Decoders | None = None,
) -> Features:
    """Make the features that the settings ask for. grammar: None where no guides are served. decoders: as in
    BeamSettings. Raises ConfigError when a logits processor cannot be found.
    """
    if config.task == "embed":
        return Features(_embedding_factories(config, output, clock), None)
    speculation = speculation_of(config)
    step_cost = StepCost()
    processors = attach_logits_processors(
        config.logits_processor_paths,
        speculates=speculation.has_ngram,
        is_static=config.batching == "static",
    )
    beams = BeamSettings(
        config.max_beam_width, vocab_size, *DEFAULTS[config.beam_defaults], decoders, grammar
    )
    factories = feature_factories(output, kv, clock, speculation, step_cost, grammar, beams)
    if speculation.has_ngram:
        return Features((processors, *factories), step_cost)
    return Features((processors, *factories), None, may_by_what_it_brings)


def speculation_of(config: RuntimeConfig) -> SpeculationSettings:
    """Return the speculation settings of the launch. Drafts that come with a request need none."""
    if config.speculative_algorithm != "NGRAM":
        return SpeculationSettings()
    return SpeculationSettings(True, config.speculative_num_draft_tokens)


def feature_factories(
    output: Output,
    kv: KVCacheManager,
    clock: Clock,
    speculation: SpeculationSettings,
    step_cost: StepCost,
    grammar: GrammarClient | None = None,
    beams: BeamSettings = NO_BEAMS,
) -> tuple[FeatureFactory, ...]:
    """Return the feature factories of a text model, in the order of their hooks. The last ones report what
    the others have decided.
    """
    return (
        attach_beam_search(beams, kv, output),
        attach_guide(grammar),
        attach_speculation(speculation, step_cost, kv.rows),
        attach_prompt_outputs(output.add_prompt_logprobs, output.add_tensor),
        attach_generation_logits(output.add_tensor),
        attach_perf_metrics(kv, clock),
        attach_stamps(clock),
        attach_logprobs(output.add_logprobs),
    )


def _embedding_factories(config: RuntimeConfig, output: Output, clock: Clock) -> tuple[FeatureFactory, ...]:
    pooling = read_pooling(Path(config.model), config.pooling)
    return (attach_embedding(pooling.kind, output.add_tensor), attach_stamps(clock))
