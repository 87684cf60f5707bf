"""ModelRunner: turns a BatchPlan into device work. Owns the device tables; knows rows and pages, no request.

All of it on the forward stream, in this order:

    plan ─► row parameters, page copies, page table ─► ForwardBatch ─► model ─► head ─► Sampler ─► FutureMap
                                                                             └► head, by blocks of prompt
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from model_worker.attention.forward_batch import ForwardBatch
from model_worker.device.base import Device
from model_worker.distributed.group import SOLO, RankGroup
from model_worker.memory.kv_pool import MHATokenToKVPool
from model_worker.memory.prompt_tables import PromptTables
from model_worker.memory.req_to_token_pool import ReqToTokenPool
from model_worker.models.base import Model
from model_worker.ops.adapters import RowAdapters
from model_worker.ops.base import Ops
from model_worker.runner import warm_up
from model_worker.runner.future_map import FutureMap
from model_worker.runner.input_buffers import InputBuffers
from model_worker.runner.prompt_positions import score_prompt_positions
from model_worker.runner.recording.base import Recording, StepParts
from model_worker.runner.recording.selection import record_steps
from model_worker.runner.step_output import ForwardOutput, StepOutput
from model_worker.runner.taps import Taps
from model_worker.sampling.columns import SampleRows
from model_worker.sampling.guesses import rows_that_end
from model_worker.sampling.processors.runner import ProcessorRunner
from model_worker.sampling.rank_samplers import make_sampler
from model_worker.sampling.sampler import Sampler
from runtime.base.errors import ConfigError
from runtime.wire.format import unpack_ids
from runtime.wire.plan import BatchPlan

NO_MASKS: Mapping[int, bytes] = MappingProxyType({})
# The host's memory belongs to other programs too. Arbitrary.
MAX_CPU_KV_BYTES = 8 << 30
CPU_KV_SHARE = 8
"""One part in so many of the host's memory is the KV cache's, at most, where nobody says more."""


class ModelRunner:
    """Its methods must run on the forward stream, plans in the order of their launch."""

    def __init__(
        self,
        model: Model,
        kv_pool: MHATokenToKVPool,
        ops: Ops,
        device: Device,
        *,
        max_rows: int,
        max_len: int,
        vocab_size: int,
        attention_window: int = 0,
        group: RankGroup = SOLO,
        graph_sizes: Sequence[int] = (),
        max_guesses: int = 0,
        max_tokens: int = 0,
        records_steps: bool = True,
        row_adapters: RowAdapters | None = None,
        prompt_tables: PromptTables | None = None,
        processors: ProcessorRunner | None = None,
        output_width: int = 0,
        has_logits: bool = True,
    ) -> None:
        """max_len: tokens of the longest sequence, prompt and output. attention_window: as KVLayout's. group:
        the ranks of the model. graph_sizes: batch sizes of decodes that `warm_up` records as graphs, where
        model and backend can. max_guesses: of a row in such a step. max_tokens: of the largest step that
        it computes; 0: of a short prompt. records_steps: those are, and on a CPU steps of kernels alone.
        row_adapters, prompt_tables: those of a model that takes adapters. processors: logits processors that
        this rank calls. output_width: numbers in a row of an additional output; 0: rows want none.
        has_logits: as make_sampler's.
        """
        self.vocab_size = vocab_size
        self.max_rows = max_rows
        self.max_len = max_len
        self.attention_window = attention_window
        self.kv_pool = kv_pool
        self.model = model
        self._ops = ops
        self._backend = ops.attention
        self._device = device
        self._table = ReqToTokenPool(max_rows, max_len, kv_pool.page_size, device)
        self._future = FutureMap(max_rows, device.torch_device)
        self._inputs = InputBuffers(self._table, device)
        self._sampler = make_sampler(
            group,
            device,
            max_rows=max_rows,
            max_len=max_len,
            vocab_size=vocab_size,
            kernels=ops.sampling_kernels,
            processors=processors,
            has_logits=has_logits,
        )
        self._processors = processors
        self._recording: Recording | None = None
        self._graph_sizes = graph_sizes
        self._max_guesses = max_guesses
        self._records_steps = records_steps
        self._max_tokens = max_tokens
        self._group = group
        self._row_adapters = row_adapters
        self._tables = prompt_tables
        self.output_width = output_width
        self._taps = Taps(device) if output_width else None

    @torch.inference_mode()
    def apply(self, plan: BatchPlan) -> tuple[ForwardBatch, SampleRows]:
        """Change the tables as the plan says, and lay out its tokens."""
        self._change_tables(plan)
        adapters = self._row_adapters
        has_adapters = adapters is not None and adapters.have_any(unpack_ids(plan.rows).astype(np.int64))
        inputs = self._inputs.stage(plan, with_token_rows=has_adapters)
        if len(inputs.unresolved):
            self._future.resolve(inputs.input_ids, inputs.unresolved, inputs.unresolved_rows)
        batch = ForwardBatch(
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            out_slots=self._table.slots(inputs.table_entries, inputs.positions),
            query_start=inputs.query_start,
            kv_lens=inputs.kv_lens,
            rows=inputs.rows,
            page_table=self._table.page_table,
            page_size=self._table.page_size,
            num_decodes=plan.num_decodes,
            output_indices=inputs.output_indices,
            adapter_rows=inputs.token_rows,
        )
        if self._tables is not None and self._tables.are_in(plan):
            batch.virtual = self._tables.take(plan, batch.input_ids)
        return batch, inputs.who

    def _change_tables(self, plan: BatchPlan) -> None:
        """Change the tables as the plan says, in the order of its fields."""
        self._open_rows_and_copy_pages(plan)
        if plan.table_spans:
            self._table.write(unpack_ids(plan.table_spans).reshape(-1, 3), unpack_ids(plan.table_pages))

    @torch.inference_mode()
    def _open_rows_and_copy_pages(self, plan: BatchPlan) -> None:
        if plan.setups:
            self._sampler.open_rows(plan.setups)
            if self._row_adapters is not None:
                for setup in plan.setups:
                    self._row_adapters.set_row(setup.row, setup.adapter_slot)
            if self._tables is not None:
                self._tables.open_rows(plan.setups)
        if plan.page_copies:
            src, dst = np.array(plan.page_copies, np.int64).T
            self.kv_pool.copy_pages(self._device.tensor(src), self._device.tensor(dst))

    def forward(self, plan: BatchPlan) -> ForwardOutput | StepOutput:
        """Apply the plan and compute its tokens. A StepOutput where nothing is to be sampled."""
        taps = self._taps
        if taps is not None:
            taps.open_rows(plan.setups)
        if (
            self._recording is None
            or not self._recording.fits(plan)
            or (taps is not None and taps.of_rows(plan))
            or (self._tables is not None and self._tables.are_in(plan))
        ):
            return self._compute(plan)
        if plan.setups or plan.page_copies:
            self._open_rows_and_copy_pages(plan)
        return self._recording.run(plan)

    @torch.inference_mode()
    def _compute(self, plan: BatchPlan) -> ForwardOutput:
        batch, who = self.apply(plan)
        tapped = None
        if self._taps is not None and self._group.rank == 0:
            batch.taps, tapped = self._taps.of_step(plan, batch.output_indices)
        self._backend.prepare(batch)
        hidden = self.model(batch, self.kv_pool, self._backend)
        if not plan.prompt_positions:
            return ForwardOutput(self.model.compute_logits(hidden), who, tapped=tapped)
        num_sampled = len(who.rows_host)
        prompt = score_prompt_positions(
            plan.prompt_positions,
            hidden[num_sampled:],
            self.model.compute_logits,
            self._sampler.logprobs_of,
            self.vocab_size,
            self._device,
        )
        logits = self.model.compute_logits(hidden[:num_sampled])
        return ForwardOutput(logits, who, prompt, tapped=tapped)

    def sample(
        self,
        forward: ForwardOutput | StepOutput,
        masks: Mapping[int, bytes],
        processed: Sequence[tuple[int, bytes]] = (),
    ) -> StepOutput:
        """Sample the step's tokens, and remember them for plans that say -1. processed: see SampleMasks."""
        if processed and self._processors is not None:
            self._processors.expect(processed)
        if isinstance(forward, StepOutput):
            return forward
        if forward.tokens is not None:
            assert not masks, "masks for a step whose sampling was not deferred"
            return StepOutput(forward.tokens)
        return self._sample(forward, masks)

    @torch.inference_mode()
    def _sample(self, forward: ForwardOutput, masks: Mapping[int, bytes]) -> StepOutput:
        tokens = None if forward.draw is None or masks else forward.draw()
        if tokens is not None:
            tokens = self._group.broadcast(tokens)
            if forward.who.guesses is not None:
                self._remember(forward.who, tokens)
            return StepOutput(tokens.int())
        sampled = self._sampler.sample(forward.logits, forward.who, masks)
        self._remember(forward.who, sampled.tokens)
        return StepOutput(
            sampled.tokens.int(),
            sampled.logprobs,
            sampled.logprobs_of,
            sampled.logits,
            sampled.logits_of,
            forward.prompt,
            errors=sampled.errors,
            tapped=forward.tapped,
        )

    def _remember(self, who: SampleRows, tokens: Tensor) -> None:
        """Keep the last token of each row for plans that say -1. Row `max_rows` is nobody's."""
        rows = who.rows
        if who.guesses is not None:
            rows = rows_that_end(who.guesses, rows, tokens, self.max_rows, self._device)
        self._future.store(rows, tokens)

    @torch.inference_mode()
    def warm_up(self, on_progress: Callable[[], None] = lambda: None) -> None:
        """Compute a prompt and a decode through the real path, so that the first request finds all loaded;
        record what can be recorded. Where a device compiles what is launched, compute steps of all sizes,
        too: so what they launch is compiled, and its allocator keeps the memory of the largest. on_progress
        is called now and then. Raises ConfigError.
        """
        prompt = warm_up.first_prompt(self.max_len, self.kv_pool.num_pages, self.kv_pool.page_size)
        decode = warm_up.decode_after(unpack_ids(prompt.lens).item())
        try:
            for plan in (prompt, decode):
                self._compute_and_sample(plan)
            self._record(decode, on_progress)
            if self._device.compiles_when_launched:
                for plan in warm_up.ever_smaller_chunks(self._max_tokens, self.max_rows, self.max_len):
                    self._compute_and_sample(plan)
                    on_progress()
        except self._device.launch_errors as error:
            raise ConfigError(
                f"device: a kernel of this model does not fit this GPU ({error}): use --dtype bfloat16, "
                "another --attention-backend, or --device cpu"
            ) from error
        self._table.page_table.zero_()
        self._future.last_token.zero_()

    def log_kernels(self) -> None:
        """Say by which kernels steps are computed; on rank 0, after `warm_up`."""
        if not isinstance(self._sampler, Sampler):
            return
        table = self._ops.table
        table.note("sampling", type(self._sampler.ops).__name__)
        recording = self._recorded_by()
        table.note("step", "Python" if recording is None else type(recording).__name__)
        table.log()

    def _recorded_by(self) -> object | None:
        return self._recording

    def _compute_and_sample(self, plan: BatchPlan, masks: Mapping[int, bytes] = NO_MASKS) -> None:
        self.sample(self.forward(plan), masks)

    def _record(self, decode: BatchPlan, on_progress: Callable[[], None]) -> None:
        """Record what can be; decode: a plan that may be run again."""
        if self._device.compiles_when_launched:
            self._launch_what_is_not_recorded(decode)
            on_progress()
        if self._records_steps:
            self._recording = record_steps(self._parts(decode), on_progress)

    def _parts(self, example: BatchPlan) -> StepParts:
        return StepParts(
            model=self.model,
            ops=self._ops,
            device=self._device,
            kv_pool=self.kv_pool,
            table=self._table,
            future=self._future,
            sampler=self._sampler if isinstance(self._sampler, Sampler) else None,
            num_ranks=self._group.size,
            sizes=self._graph_sizes,
            max_guesses=self._max_guesses,
            max_len=self.max_len,
            vocab_size=self.vocab_size,
            example=example,
            lay_out=lambda plan: self.apply(plan)[0],
            row_adapters=self._row_adapters,
        )

    def _launch_what_is_not_recorded(self, decode: BatchPlan) -> None:
        """The first launch of a kernel compiles it. A decode of the longest context splits its keys, if any
        does.
        """
        position = unpack_ids(decode.starts).item()
        for plan, masks in warm_up.edited_decodes(position, self.vocab_size):
            self._compute_and_sample(plan, masks)
        self._compute_and_sample(warm_up.longest_decode(self.max_len, self.kv_pool.page_size))


def size_kv_pool(
    *,
    free_bytes: int,
    fraction: float,
    bytes_per_token: int,
    page_size: int,
    max_total_tokens: int,
    host_bytes: int | None = None,
    num_sharing: int = 1,
) -> int:
    """Pages of the KV pool, the dummy page not counted: of what `fraction` of the free memory and
    `max_total_tokens` allow, the smaller. num_sharing: pools that divide that memory.

    max_total_tokens is rounded up to pages, so that a sequence of so many tokens fits. 0 sets no cap, but on
    a CPU, which has `host_bytes` of memory, MAX_CPU_KV_BYTES and the share of CPU_KV_SHARE are then caps.
    Raises: ConfigError when not even a prompt of one token and its answer fit.
    """
    budget = int(free_bytes * fraction)
    if host_bytes is not None and not max_total_tokens:
        budget = min(budget, MAX_CPU_KV_BYTES, host_bytes // CPU_KV_SHARE)
    budget //= num_sharing
    num_pages = budget // (bytes_per_token * page_size) - 1
    if max_total_tokens:
        num_pages = min(num_pages, -(-max_total_tokens // page_size))
    if num_pages * page_size < 2:
        raise ConfigError(
            f"no room for a KV cache: mem_fraction_static {fraction:g} of {free_bytes >> 20} MiB free, "
            f"max_total_tokens {max_total_tokens or 'not set'}, page_size {page_size}, "
            f"{bytes_per_token} bytes a token: raise --mem-fraction-static or --max-total-tokens, lower "
            "--chunked-prefill-size, --max-running-requests or --cuda-graph-max-bs, take a narrower --dtype, "
            "or end what else uses the device"
        )
    return num_pages
