"""Datasets by name, and the source of prompts for the served model."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bench_serving.arguments import DEFAULT_NUM_PROMPTS, BenchConfig
from bench_serving.datasets.base import LoadConversation, PromptSource
from bench_serving.datasets.conversation_file import conversation_file
from bench_serving.datasets.random_prompts import random_ids, random_text
from bench_serving.datasets.shared_prefix import SharedPrefixShape, generated_shared_prefix


def make_conversations(config: BenchConfig, source: PromptSource, seed: int) -> list[LoadConversation]:
    """Return the load of one run. Raises ConfigError for a file that cannot be used."""
    rng = np.random.default_rng(seed)
    num = config.num_prompts or DEFAULT_NUM_PROMPTS
    lengths = {
        "input_len": config.random_input_len,
        "output_len": config.random_output_len,
    }
    match config.dataset_name:
        case "random-ids":
            return random_ids(source, rng, num, **lengths, range_ratio=config.random_range_ratio)
        case "random":
            return random_text(source, rng, num, **lengths, range_ratio=config.random_range_ratio)
        case "multi-turn":
            return random_text(
                source,
                rng,
                num,
                **lengths,
                range_ratio=config.random_range_ratio,
                num_turns=config.num_turns,
            )
        case "generated-shared-prefix":
            made = generated_shared_prefix(source, rng, _shared_prefix_shape(config))
            return made[: config.num_prompts or len(made)]
    return conversation_file(
        source,
        rng,
        config.num_prompts or None,
        path=Path(config.dataset_path),
        output_len=config.sharegpt_output_len or None,
        context_len=config.sharegpt_context_len or None,
    )


def _shared_prefix_shape(config: BenchConfig) -> SharedPrefixShape:
    return SharedPrefixShape(
        num_groups=config.gsp_num_groups,
        prompts_per_group=config.gsp_prompts_per_group,
        system_prompt_len=config.gsp_system_prompt_len,
        question_len=config.gsp_question_len,
        output_len=config.gsp_output_len,
        range_ratio=config.gsp_range_ratio,
        num_turns=config.gsp_num_turns,
        in_order=config.gsp_ordered,
    )
