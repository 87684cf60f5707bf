"""Creation of BeamSearch features, and the checks of what a beam search cannot be combined with."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from runtime.base.errors import InvalidRequest
from runtime.sampling.table import PARAMETERS
from runtime.text.codec import PROMPT_TAIL_TOKENS, Decoders
from runtime.wire.handle import split_handle
from scheduler_proc.cache.group_pages import most_further_pages
from scheduler_proc.cache.kv_cache_manager import KVCacheManager
from scheduler_proc.core.request import Request
from scheduler_proc.features.base import RequestFeature
from scheduler_proc.features.beam_search.beam_search import BeamSearch, Said
from scheduler_proc.features.beam_search.hypotheses import EarlyStopping, SearchSettings
from scheduler_proc.features.beam_search.rule_batch import RuleBatch
from scheduler_proc.features.beam_search.score_rules import RULE_NAMES
from scheduler_proc.features.beam_search.search_guide import guide_of
from scheduler_proc.features.beam_search.stop_texts import HypothesisText
from scheduler_proc.features.grammar_client import GrammarClient

TAKEN = frozenset(
    {
        *("max_tokens", "temperature", "seed", "stop_token_ids", "ignore_eos", "skip_special_tokens"),
        *("include_stop_str_in_output", "logprobs", "n", "best_of", "truncate_prompt_tokens"),
        *("min_tokens", "bad_words", "bad_words_ids", *RULE_NAMES),
        *("return_perf_metrics", "use_beam_search", "beam_width", "length_penalty", "early_stopping"),
        *("beam_search_diversity_rate", "beam_width_array", "stop_words_ids", "stop"),
    }
)
"""Sampling parameters that a beam search supports."""
OTHERS = tuple((p.name, (p.neutral, *p.also_neutral)) for p in PARAMETERS if p.name not in TAKEN)
"""Other parameters and the values of each that a beam search accepts, since they ask for nothing."""


class BeamSettings(NamedTuple):
    """Settings of the launch for all beam searches."""

    max_width: int = 1
    vocab_size: int = 0
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC
    decoders: Decoders | None = None
    """Decoders for stop strings; None if the launch has no tokenizer."""
    grammar: GrammarClient | None = None
    """Client of the grammar process; None if no guides are served."""


NO_BEAMS = BeamSettings()
DEFAULTS = {"transformers": (1.0, EarlyStopping.HEURISTIC), "trtllm": (0.0, EarlyStopping.AT_ONCE)}
"""Length penalty and early stopping for each value of the setting beam_defaults."""


def attach_beam_search(
    settings: BeamSettings, kv: KVCacheManager, output: Said
) -> Callable[[Request], RequestFeature | None]:
    """Return a feature factory that makes a BeamSearch for each request that asks for one. It must be the
    first factory, so that the others see a request with a group.
    """

    batch = RuleBatch()

    def attach(req: Request) -> RequestFeature | None:
        sampling = req.sampling
        if not sampling.use_beam_search:  # the usual case
            return None
        width = sampling.num_beams
        if width == 1:
            return None
        _check_width(req, width)
        _check_alone(req)
        penalty, stopping = sampling.length_penalty, sampling.early_stopping
        search = SearchSettings(
            width,
            req.stops.ids,
            req.max_len - req.num_prompt,
            settings.length_penalty if penalty is None else penalty,
            settings.early_stopping if stopping is None else EarlyStopping(stopping),
            max(0, req.num_logprobs),
            sampling.min_tokens,
            req.guide is not None,
            sampling.bad_words_ids,
            _prompt_end(req),
            sampling.beam_search_diversity_rate,
            sampling.beam_width_array,
            sampling.stop_words_ids,
            _text_for_stops(req, settings.decoders),
        )
        if search.num_wanted > settings.vocab_size:
            raise InvalidRequest(
                f"beam_width: {width} beams, {len(search.stop_ids)} stop ids and "
                f"{len(search.bad_words)} bad words need {search.num_wanted} candidates, the vocabulary has "
                f"{settings.vocab_size} ids",
                param="beam_width",
            )
        _check_pages(req, width)
        guide = guide_of(req, settings.grammar)
        return BeamSearch(req, search, req.num_delivered, kv, output, batch, guide)

    def _check_width(req: Request, width: int) -> None:
        if width > settings.max_width:
            raise InvalidRequest(
                f"beam_width is {width}; the server was started with --max-beam-width {settings.max_width}",
                param="beam_width",
            )
        max_rows = kv.rows.max_rows
        if width > max_rows:
            raise InvalidRequest(
                f"beam_width is {width}, more than the {max_rows} rows that the server has "
                "(--max-running-requests)",
                param="beam_width",
            )
        rank = split_handle(req.handle)[2]
        if rank + req.sampling.n > width:
            raise InvalidRequest(
                f"n: {width} beams have no hypothesis of rank {rank + req.sampling.n - 1}", param="n"
            )

    def _check_pages(req: Request, width: int) -> None:
        num_pages = kv.num_pages_for(req.max_len) + most_further_pages(kv, req.num_prompt, req.max_len, width)
        if num_pages > kv.pages.num_pages:
            raise InvalidRequest(
                f"beam_width: {width} beams of {req.max_len - req.num_prompt} tokens may need {num_pages} "
                f"pages of {kv.page_size} tokens, the KV cache has {kv.pages.num_pages}; ask for fewer "
                "max_tokens or beams",
                param="beam_width",
                code="request_too_large",
            )

    return attach


def _text_for_stops(req: Request, decoders: Decoders | None) -> HypothesisText | None:
    sampling = req.sampling
    if not sampling.stop:
        return None
    if decoders is None:
        raise InvalidRequest("stop: this server has no tokenizer; give stop_words_ids", param="stop")
    ids = req.tokens[: req.num_prompt]
    words = ids[ids < req.first_virtual] if req.prompt_table is not None else ids
    return HypothesisText.begin(
        sampling.stop,
        words[-PROMPT_TAIL_TOKENS:].tolist(),
        decoders,
        skip_special_tokens=sampling.skip_special_tokens,
    )


def _prompt_end(req: Request) -> tuple[int, ...]:
    most = max(map(len, req.sampling.bad_words_ids), default=1) - 1
    return tuple(req.tokens[-most:].tolist()) if most else ()


def _check_alone(req: Request) -> None:
    """Raise InvalidRequest for parameters that cannot be combined with a beam search."""
    given = [name for name, neutral in OTHERS if getattr(req.sampling, name) not in neutral]
    given += [
        name
        for name, value in (
            ("draft_token_ids", req.draft_ids),
            ("prediction", req.prediction_ids),
        )
        if value
    ]
    if given:
        raise InvalidRequest(
            f"{given[0]}: not together with use_beam_search; leave one of them out", param=given[0]
        )
