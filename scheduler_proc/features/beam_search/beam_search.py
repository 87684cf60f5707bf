"""BeamSearch: one request's search. Its rows are a group; what wins is said when the search ends, and nothing
before.

A row's result is its most likely next tokens. With those of all rows the search chooses what goes on, so the
rows are planned when their tokens are here. A request that loses its rows begins again, to the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from runtime.base.errors import InvalidRequest
from runtime.sampling.table import PARAMETERS
from runtime.text.codec import PROMPT_TAIL_TOKENS, Decoders
from runtime.wire.handle import next_sibling, split_handle
from runtime.wire.messages import BeamScore, Closed, CloseReason, TokenLogprobs
from runtime.wire.sampling_params import SamplingParams
from scheduler_proc.cache.group_pages import keep_best, most_further_pages
from scheduler_proc.cache.kv_cache_manager import KVCacheManager
from scheduler_proc.core.request import Request, RowGroup
from scheduler_proc.core.samples import Sampled
from scheduler_proc.features.base import Cost, RequestFeature
from scheduler_proc.features.beam_search.hypotheses import (
    EarlyStopping,
    Hypotheses,
    Hypothesis,
    SearchSettings,
)
from scheduler_proc.features.beam_search.score_rules import RULE_NAMES, SLACK, NextTokens, ScoreRules
from scheduler_proc.features.beam_search.stop_texts import HypothesisText

TAKEN = frozenset(
    {
        *("max_tokens", "temperature", "seed", "stop_token_ids", "ignore_eos", "skip_special_tokens"),
        *("include_stop_str_in_output", "logprobs", "n", "best_of", "truncate_prompt_tokens"),
        *("min_tokens", "bad_words", "bad_words_ids", *RULE_NAMES),
        *("return_perf_metrics", "use_beam_search", "beam_width", "length_penalty", "early_stopping"),
        *("beam_search_diversity_rate", "beam_width_array", "stop_words_ids", "stop"),
    }
)
"""Sampling parameters that go together with a beam search."""
OTHERS = tuple((p.name, p.neutral) for p in PARAMETERS if p.name not in TAKEN)


class Said(Protocol):
    """Output of the scheduler, as far as a search says something itself."""

    def add(self, handle: bytes, tokens: list[int]) -> None: ...
    def add_logprobs(self, logprobs: TokenLogprobs) -> None: ...
    def close(self, closed: Closed) -> None: ...


class BeamSettings(NamedTuple):
    """Settings of the launch for all searches."""

    max_width: int = 1
    vocab_size: int = 0
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC
    decoders: Decoders | None = None
    """Decoders for stop strings; None: the launch has no text."""


NO_BEAMS = BeamSettings()
DEFAULTS = {"transformers": (1.0, EarlyStopping.HEURISTIC), "trtllm": (0.0, EarlyStopping.AT_ONCE)}
"""Length penalty and early stopping by the setting beam_defaults."""


class BeamSearch(RequestFeature):
    def __init__(
        self, req: Request, search: SearchSettings, num_skipped: int, kv: KVCacheManager, output: Said
    ) -> None:
        """Begin a search. `num_skipped`: tokens of its output that an earlier attempt has delivered."""
        self._req = req
        self._search = search
        self._num_skipped = num_skipped
        self._kv = kv
        self._output = output
        self._hypotheses = Hypotheses(search)
        self._num_results = req.sampling.n
        self._first_rank = split_handle(req.handle)[2]
        self._has_logprobs = req.num_logprobs >= 0
        self._is_over = False
        self._rules = ScoreRules.of(req.sampling)
        req.sampling = _device_sampling(req.sampling, search, self._rules)
        req.min_len = 0
        req.group = RowGroup(req, search.width, self._choose)

    @property
    def num_beams(self) -> int:
        """Beams that run, without those that do so for nothing."""
        return self._hypotheses.num_beams

    def cost(self) -> Cost:
        req, width = self._req, self._search.width
        return Cost(width, most_further_pages(self._kv, req.num_prompt, req.max_len, width))

    def row_opened(self, row: int) -> None:
        self._hypotheses = Hypotheses(self._search)
        req = self._req
        for held in req.held_rows:
            req.rows.plan_when_committed(held, True, self)

    def closing(self, closed: Closed) -> Closed:
        """Say what has won, of an end that is the search's own, and end its other sequences."""
        winners = self._winners() if self._is_over else ()
        each = [self._closed(number, closed, winners) for number in range(self._num_results)]
        for other in each[1:]:
            self._output.close(other)
        if winners:
            tokens = [link.token for link in winners[0].path.from_the_first()]
            assert self._req.group is not None
            keep_best(self._kv, self._req.group, np.array(tokens, np.int32))
        return each[0]

    def release(self) -> None:
        self._req.group = None  # it points back at the request: leave no cycle for the collector

    def _winners(self) -> Sequence[Hypothesis]:
        return self._hypotheses.ended[self._first_rank : self._first_rank + self._num_results]

    def _choose(self, results: list[Sampled]) -> Sequence[tuple[int, int]]:
        assert self._req.group is not None
        beams = self._hypotheses.advance(
            [
                self._next_tokens(beam, sampled)
                for beam, sampled in zip(self._req.group.beams, results, strict=True)
            ]
        )
        self._is_over = not beams
        return beams

    def _next_tokens(self, beam: Request, sampled: Sampled) -> NextTokens:
        most = self._search.num_wanted
        assert sampled.logprobs is not None, "the row was planned without logprobs"
        top_ids, top = sampled.logprobs.top_ids[0], sampled.logprobs.top[0]
        if self._rules is None:
            top_ids, top = top_ids[:most], top[:most]
            return NextTokens(top_ids, top, top, (top_ids, top))
        (logits,) = sampled.logits
        row = np.frombuffer(logits.frame, np.float32)
        return self._rules.best(beam.tokens, beam.num_prompt, row, (top_ids, top), most)

    def _closed(self, number: int, closed: Closed, winners: Sequence[Hypothesis]) -> Closed:
        handle = next_sibling(self._req.handle, number)
        if number >= len(winners):  # of an end from outside, and where rules let no more be found
            return msgspec.structs.replace(closed, handle=handle)
        won = winners[number]
        links = won.path.from_the_first()
        tokens = [link.token for link in links]
        new = links[self._num_skipped :]
        if new:
            self._output.add(handle, [link.token for link in new])
            if self._has_logprobs:
                self._output.add_logprobs(
                    TokenLogprobs(
                        handle,
                        np.array([link.logprob for link in new], np.float32).tobytes(),
                        b"".join([link.top[0].tobytes() for link in new]),
                        b"".join([link.top[1].tobytes() for link in new]),
                    )
                )
        reason: CloseReason = "stop" if won.by_stop else "length"
        stop_token = tokens[-1] if tokens[-1] in self._search.stop_ids else -1
        return msgspec.structs.replace(
            closed,
            handle=handle,
            reason=reason,
            stop_token=stop_token,
            beam=BeamScore(won.score, won.logprob),
        )


def attach_beam_search(
    settings: BeamSettings, kv: KVCacheManager, output: Said
) -> Callable[[Request], RequestFeature | None]:
    """A factory for the intake: gives BeamSearch to each request that asked. It comes before all others, so
    that they see a request with a group.
    """

    def attach(req: Request) -> RequestFeature | None:
        sampling = req.sampling
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
            sampling.bad_words_ids,
            _prompt_end(req),
            sampling.beam_search_diversity_rate,
            sampling.beam_width_array,
            sampling.stop_words_ids,
            _text_for_stops(req),
        )
        if search.num_wanted > settings.vocab_size:
            raise InvalidRequest(
                f"beam_width: {width} beams, {len(search.stop_ids)} stop ids and "
                f"{len(search.bad_words)} bad words need {search.num_wanted} candidates, the vocabulary has "
                f"{settings.vocab_size} ids",
                param="beam_width",
            )
        _check_pages(req, width)
        return BeamSearch(req, search, req.num_delivered, kv, output)

    def _text_for_stops(req: Request) -> HypothesisText | None:
        sampling = req.sampling
        if not sampling.stop:
            return None
        if settings.decoders is None:
            raise InvalidRequest("stop: this server has no tokenizer; give stop_words_ids", param="stop")
        ids = req.tokens[: req.num_prompt]
        words = ids[ids < req.first_virtual] if req.prompt_table is not None else ids
        return HypothesisText.begin(
            sampling.stop,
            words[-PROMPT_TAIL_TOKENS:].tolist(),
            settings.decoders,
            skip_special_tokens=sampling.skip_special_tokens,
        )

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


def _device_sampling(
    sampling: SamplingParams, search: SearchSettings, rules: ScoreRules | None
) -> SamplingParams:
    """Return what the device is asked for: to report, as it draws nothing that anybody looks at."""
    neutral = {p.name: p.neutral for p in PARAMETERS if p.example is not None}
    changes: dict[str, Any] = {"temperature": 0.0, "seed": sampling.seed, "logprobs": search.num_wanted}
    if rules is not None:
        changes |= {"logprobs": search.num_wanted + SLACK, "return_generation_logits": True}
    return msgspec.structs.replace(sampling, **(neutral | changes))


def _prompt_end(req: Request) -> tuple[int, ...]:
    most = max(map(len, req.sampling.bad_words_ids), default=1) - 1
    return tuple(req.tokens[-most:].tolist()) if most else ()


def _check_alone(req: Request) -> None:
    """Raises InvalidRequest for what is not built together with a beam search."""
    given = [name for name, neutral in OTHERS if getattr(req.sampling, name) != neutral]
    given += [
        name
        for name, value in (
            ("structured_outputs", req.guide),
            ("logits_processors", req.processing),
            ("draft_token_ids", req.draft_ids),
            ("prediction", req.prediction_ids),
        )
        if value
    ]
    if given:
        raise InvalidRequest(
            f"{given[0]}: not together with use_beam_search; leave one of them out", param=given[0]
        )
