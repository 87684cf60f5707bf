"""Table of planted mistakes: each is one function with one phrase changed. tests.harness.mutants.mutants
applies them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.wire.outbox import KeepingOutbox
from runtime.wire.plan import RowSetup
from scheduler_proc.batching.prefill_adder import PrefillAdder
from scheduler_proc.cache.kv_cache_manager import KVCacheManager
from scheduler_proc.cache.pages.page_tables import PageTables
from scheduler_proc.cache.radix.radix_cache import RadixCache
from scheduler_proc.committer import Committer
from scheduler_proc.core.batch import ScheduleBatch
from scheduler_proc.core.lifecycle import Lifecycle
from scheduler_proc.core.output import DetokenizerOutput, OutputRouter
from scheduler_proc.core.request import Request
from scheduler_proc.core.results import LooseResults
from scheduler_proc.core.rows import Rows
from scheduler_proc.features.generation_logits import GenerationLogits
from scheduler_proc.features.logprobs import LogprobsFeature
from scheduler_proc.features.prompt_outputs import PromptOutputs
from scheduler_proc.intake.intake import Intake
from scheduler_proc.intake.limits import Limits
from scheduler_proc.intake.request_maker import RequestMaker
from scheduler_proc.intake.tombstones import Tombstones
from scheduler_proc.scheduler import Scheduler
from scheduler_proc.waiting.deadlines import Deadlines
from tests.harness.simulation.fakes import FakeExecutor


@dataclass(slots=True, frozen=True)
class Mutant:
    name: str
    owner: type
    attribute: str
    old: str
    """A phrase of the function's source, which `new` stands in for."""
    new: str
    seed: int
    """A run that catches it soon; `python -m tests.harness.mutants.mutants` finds another when the traffic
    has changed.
    """
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the setting that the seed draws, for mistakes that show in few of them."""


STEP_MUTANTS = [
    Mutant(
        "duplicates freed, row still reads them", KVCacheManager, "_repoint", "mine[:] = pages", "pass", 0
    ),
    Mutant(
        "repointing not told to the device",
        KVCacheManager,
        "_repoint",
        "self.tables.changed(row, at)",
        "pass",
        0,
    ),
    Mutant("duplicates never freed", KVCacheManager, "_repoint", "self.pages.free(mine)", "pass", 0),
    Mutant(
        "tables written when launched, not on the stream",
        FakeExecutor,
        "launch",
        "handle = FakeHandle(self._compute_up_to)",
        "handle = FakeHandle(self._compute_up_to); self.apply_tables(plan)",
        2,
    ),
    Mutant(
        "overrun of a finished request kept",
        Rows,
        "still_held",
        "self.stay[rows] == stays",
        "rows >= 0",
        2,
    ),
    Mutant(
        "a result given to the row's next tenant",
        Rows,
        "still_held",
        "self.stay[rows] == stays",
        "self.stay[rows] > 0",
        2,
    ),
    Mutant("scheduled before its token is there", Rows, "ready", "ready &= in_flight == 0", "pass", 0),
    Mutant("decodes past the length limit", Rows, "ready", " & (predicted < self.max_len[rows])", "", 3),
    Mutant("features ignored by plain decodes", Rows, "plain_decodes", " & ~self.needs_python[rows]", "", 0),
    Mutant(
        "features let go before they agree",
        Rows,
        "settle",
        "all(feature.is_settled for feature in req.features)",
        "True",
        0,
    ),
    Mutant("a token in flight taken for a known one", Rows, "next_ids", "= unknown", "= 1", 3),
    Mutant(
        "only the first stop id tested",
        Rows,
        "append_one",
        "self.stop_ids[1 : self.num_stop_columns]",
        "self.stop_ids[1:1]",
        3,
    ),
    Mutant("length limit not tested", Rows, "append_one", "at >= self.max_len[rows]", "at < 0", 6),
    Mutant(
        "a row's setup not told to the device", Rows, "take_setups", "tuple(self._setups.values())", "()", 0
    ),
    Mutant(
        "retraction forgets the output",
        Rows,
        "release",
        "self.packed(row, 0, self.num_tokens_of[row]).tobytes()",
        "self.packed(row, 0, req.num_prompt).tobytes()",
        2,
    ),
    Mutant(
        "penalties forget the output",
        Request,
        "row_setup",
        "tokens=self.parked",
        "tokens=self.parked[: 4 * self.num_prompt]",
        2,
    ),
    Mutant(
        "min_tokens not told to the device",
        Request,
        "row_setup",
        "min_len=self.min_len",
        "min_len=0",
        0,
    ),
    Mutant("guesses kept past the end", Request, "cut", "return tokens[: i + 1]", "return tokens", 0),
    Mutant("page boundary off by one", KVCacheManager, "try_reserve_next", ">= have", "> have", 0),
    Mutant(
        "growth not told to the device",
        PageTables,
        "append_one",
        "np.minimum(self._dirty_from[rows], have)",
        "self._dirty_from[rows]",
        0,
    ),
    Mutant("a hit on the whole prompt", KVCacheManager, "match", "num_tokens - 1", "num_tokens", 5),
    Mutant("namespaces share pages", KVCacheManager, "match", "req.namespace", "b''", 0),
    Mutant(
        "tokens in flight published",
        KVCacheManager,
        "publish",
        "min(rows.kv_len_of[row], rows.num_tokens_of[row])",
        "rows.kv_len_of[row]",
        5,
    ),
    Mutant("private pages leaked at the end", KVCacheManager, "release", "self.pages.free(", "len(", 0),
    Mutant("lease kept at the end", KVCacheManager, "release", "self.cache.unlock(req.lease)", "pass", 0),
    Mutant(
        "waiters outlive the row they wait for",
        KVCacheManager,
        "release",
        "self._withdraw(req, req.computes)",
        "pass",
        3,
    ),
    Mutant(
        "fork without the copy of its last page",
        PageTables,
        "take_page_copies",
        "return copies",
        "return ()",
        7,
    ),
    Mutant(
        "a cached prefix used without a lease",
        PrefillAdder,
        "try_admit",
        "kv.cache.lock(prefix.node)",
        "pass",
        0,
    ),
    Mutant(
        "a page without successors never evicted",
        RadixCache,
        "_take_from",
        "self._nothing_needs(parent)",
        "pass",
        0,
    ),
    Mutant("a split loses the lease", RadixCache, "_split", "top.lock = node.lock", "pass", 1),
    Mutant(
        "an empty namespace kept for ever",
        RadixCache,
        "_nothing_needs",
        "self._roots.pop(node.namespace, None)",
        "None",
        0,
    ),
    Mutant(
        "prompts published only at the end",
        ScheduleBatch,
        "publish_prefills",
        "kv.publish_prefill(scheduled.req)",
        "pass",
        0,
    ),
    Mutant(
        "rejected guesses kept in the KV length",
        Committer,
        "_commit_row",
        "len(ids) - 1",
        "len(scheduled.guesses)",
        1,
    ),
    Mutant(
        "masks made before their tokens are known",
        Scheduler,
        "_commit_for_masks",
        "batch.waits_for_tokens()",
        "False",
        4,
    ),
    Mutant(
        "logprobs of dropped rows not skipped",
        LooseResults,
        "take_next",
        "self._logprob_at += count",
        "self._logprob_at += count if scheduled.req.row >= 0 else 0",
        4,
    ),
    Mutant(
        "logprobs not cut with their tokens",
        LogprobsFeature,
        "accept",
        "len(sampled.ids)",
        "len(sampled.logprobs.chosen)",
        7,
    ),
    Mutant("a retracted request never queued again", Lifecycle, "retract", "self.room.enter(req)", "pass", 2),
    Mutant(
        "a replaced attempt gets a terminal",
        Lifecycle,
        "replace",
        "self.num_replaced += 1",
        "self.num_replaced += 1; self.output.close(Closed(req.handle, 'abort'))",
        1,
    ),
    Mutant("adapter slots leak", Lifecycle, "_give_back_row", "self.slots.give_back(req.slots)", "pass", 2),
    Mutant(
        "a stale attempt replaces its successor",
        Intake,
        "_receive_request",
        "attempt_of(earlier.handle) >= attempt_of(handle)",
        "False",
        1,
    ),
    Mutant(
        "resumed output taken for prompt",
        Limits,
        "check",
        "num_prompt = len(message.input_ids) // TOKEN_BYTES",
        "num_prompt = len(message.input_ids + message.output_ids) // TOKEN_BYTES",
        2,
    ),
    Mutant("an abort ends the next attempt too", Intake, "_live", " and req.handle == handle", "", 2),
    Mutant("early aborts forgotten", Tombstones, "try_take", "return ", "return False and ", 9),
    Mutant("refused output lost", KeepingOutbox, "flush", "return False", "pass", 0),
    Mutant(
        "a deadline ends only who waits",
        Lifecycle,
        "tick",
        'self.finish(req, "timeout")',
        'self.finish(req, "timeout") if req.row < 0 else None',
        3,
    ),
    Mutant(
        "the deadline of an attempt ends its successor",
        Deadlines,
        "_find",
        " and req.handle == handle and self._time_of(req) == at",
        "",
        2,
    ),
    Mutant("one sequence more than may live", RequestMaker, "_check_room", ">= max_live", "> max_live", 3),
    Mutant(
        "a position that is looked at taken from the cache",
        KVCacheManager,
        "match",
        "else req.wanted_from",
        "else num_tokens - 1",
        0,
    ),
    Mutant(
        "positions of the prompt forgotten where a chunk samples nothing",
        Committer,
        "_commit_loose",
        "if not is_held:",
        "if not is_held or not scheduled.samples:",
        4,
    ),
    Mutant(
        "positions of the prompt looked at again after a retraction",
        PromptOutputs,
        "plan_chunk",
        "max(row.start, req.wanted_from)",
        "row.start",
        6,
    ),
    Mutant(
        "what a chunk gave of the prompt not remembered",
        PromptOutputs,
        "accept_prompt",
        "self._done_upto(result.start + result.num_positions)",
        "pass",
        4,
    ),
    Mutant(
        "a resumed prompt told again",
        PromptOutputs,
        "_deliver",
        "max(0, self._first - start)",
        "0",
        35,
    ),
    Mutant(
        "a logprob of the prompt's end",
        PromptOutputs,
        "_deliver",
        "req.num_prompt - 1 - start",
        "req.num_prompt - start",
        0,
    ),
    Mutant(
        "logprobs of each position's own token",
        PromptOutputs,
        "plan_chunk",
        "req.tokens[first + 1 : min(end + 1, req.num_prompt)]",
        "req.tokens[first : min(end, req.num_prompt - 1)]",
        1,
    ),
    Mutant(
        "raw logits of dropped tokens kept",
        GenerationLogits,
        "accept",
        "logits.upto(end)",
        "logits",
        0,
    ),
    Mutant(
        "raw logits after the end",
        DetokenizerOutput,
        "flush",
        "if self._entries:",
        "if self._entries and not self._closed:",
        0,
    ),
    Mutant(
        "top_p decays anew after a retraction",
        RowSetup,
        "of",
        "else RowSetup.top_p_age(tokens, num_prompt, s)",
        "else 0",
        6,
    ),
    Mutant(
        "a reset of top_p counted as the first step of its decay",
        RowSetup,
        "top_p_age",
        "resets.item(-1) + 1",
        "resets.item(-1)",
        35,
    ),
    Mutant(
        "phrases without what came before",
        RowSetup,
        "of",
        "features & (LOOKS_BACK | PROCESSED)",
        "features & (LOOKS_BACK | PROCESSED) & ~BAD_WORDS",
        6,
    ),
    Mutant(
        "the allowed ids not told to the device",
        RowSetup,
        "of",
        "pack_ids(s.allowed_token_ids) if s.allowed_token_ids",
        'b"" if s.allowed_token_ids',
        0,
    ),
    Mutant(
        "everything goes to the first detokenizer",
        OutputRouter,
        "_output_of",
        "client_of(handle) % len(self._outputs)",
        "0",
        2,
    ),
    Mutant(
        "tokens dealt to the wrong detokenizer", OutputRouter, "add_each", "tokens[mine]", "tokens[~mine]", 3
    ),
]
