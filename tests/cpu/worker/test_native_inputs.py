"""NativeInputs: the kernel lays a plan out as torch and NumPy do, and refuses what would leave its tables."""

from __future__ import annotations

import ctypes
import threading
import time

import msgspec
import numpy as np
import pytest
import torch

from model_worker.device import make_device
from model_worker.kernels.native.step_calls import ProgramCall, ProgramStep, StageCall, StepCall
from model_worker.memory.req_to_token_pool import ReqToTokenPool
from model_worker.runner.future_map import FutureMap
from model_worker.runner.input_buffers import InputBuffers
from model_worker.runner.recording.native_inputs import NativeInputs
from model_worker.sampling.columns import SampleRows
from runtime.wire.format import pack_ids, unpack_ids
from runtime.wire.plan import BatchPlan, PromptPositions
from tests.harness.models.native import native_kernels, needs_compiler

pytestmark = needs_compiler

MAX_ROWS = 9
MAX_LEN = 50
MAX_TOKENS = 64
MAX_SEQS = 20
MAX_PLACES = 70
NUM_TASKS = 16
TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Tables:
    def __init__(self, page_size: int) -> None:
        device = make_device("cpu", threaded=False)
        self.pool = ReqToTokenPool(MAX_ROWS, MAX_LEN, page_size, device)
        self.pool.page_table.copy_(torch.randint(0, 1000, self.pool.page_table.shape))
        self.future = FutureMap(MAX_ROWS, device.torch_device)
        self.future.last_token.copy_(torch.arange(MAX_ROWS + 1) + 5000)
        self.reference = InputBuffers(self.pool, device)
        self.native = NativeInputs(
            self.pool, self.future, max_tokens=MAX_TOKENS, max_seqs=MAX_SEQS, max_places=MAX_PLACES
        )

    def run(self, plan: BatchPlan) -> SampleRows:
        """Lay a plan out, as the beginning of a step without kernels."""
        self.native.describe(plan)
        nothing = ProgramStep()
        step = StepCall(stage=ctypes.addressof(self.native.call), program=ctypes.addressof(nothing))
        native_kernels().run_step(ctypes.addressof(step))
        return self.native.sampled()


def _plan(rng: np.random.Generator, num_decodes: int, num_rest: int, *, guesses: bool = False) -> BatchPlan:
    rows = rng.permutation(MAX_ROWS)[: num_decodes + num_rest]
    lens = rng.integers(1, 8, num_rest)
    samples = rng.integers(0, 2, num_rest)
    drafts = rng.integers(0, lens) * samples if guesses else np.zeros(num_rest, np.int64)
    starts = rng.integers(0, MAX_LEN - 8, len(rows))
    # A guess is known to the host.
    ids = rng.integers(0 if guesses else -1, 6, num_decodes + int(lens.sum()))
    spans = np.array([[row, rng.integers(0, 3), 1 + row % 2] for row in rng.permutation(MAX_ROWS)[:3]])
    return BatchPlan(
        step=1,
        setups=(),
        page_copies=(),
        table_spans=pack_ids(spans),
        table_pages=pack_ids(rng.integers(0, 1000, spans[:, 2].sum())),
        num_decodes=num_decodes,
        rows=pack_ids(rows),
        starts=pack_ids(starts),
        input_ids=pack_ids(ids),
        lens=pack_ids(lens),
        samples=pack_ids(samples),
        drafts=pack_ids(drafts),
    )


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_plan_is_laid_out_as_by_numpy_and_torch(page_size: int) -> None:
    tables = Tables(page_size)
    rng = np.random.default_rng(page_size)
    native = tables.native
    cases = [(0, 0), (1, 0), (9, 0), (0, 1), (3, 4), (0, 9), *[(2, 3)] * 20]
    for num_decodes, num_rest, guesses in [(*case, guesses) for case in cases for guesses in (False, True)]:
        plan = _plan(rng, num_decodes, num_rest, guesses=guesses)
        before = tables.pool.page_table.clone()
        assert native.fits(plan)
        who = tables.run(plan)
        written = tables.pool.page_table.clone()
        tables.pool.page_table.copy_(before)
        tables.pool.write(unpack_ids(plan.table_spans).reshape(-1, 3), unpack_ids(plan.table_pages))
        assert torch.equal(tables.pool.page_table, written)
        expected = tables.reference.stage(plan)
        tables.future.resolve(expected.input_ids, expected.unresolved, expected.unresolved_rows)
        slots = tables.pool.slots(expected.table_entries, expected.positions)
        num_tokens, num_seqs = len(expected.positions), len(expected.rows)
        for got, wanted in (
            (native.input_ids[:num_tokens], expected.input_ids),
            (native.positions[:num_tokens], expected.positions),
            (native.out_slots[:num_tokens], slots),
            (native.rows[:num_seqs], expected.rows),
            (native.kv_lens[:num_seqs], torch.tensor(expected.kv_lens, dtype=torch.int64)),
            (native.query_start[: num_seqs + 1], torch.tensor(expected.query_start)),
            (native.output_indices[: len(who.rows_host)], expected.output_indices),
            (who.rows, expected.sample_rows.rows),
            (who.positions, expected.sample_rows.positions),
        ):
            assert torch.equal(got, wanted)
        assert who.rows_host.tolist() == who.rows.tolist()
        assert who.positions_host.tolist() == who.positions.tolist()
        if who.guesses is None:
            assert expected.sample_rows.guesses is None
        else:
            assert who.guesses.tolist() == expected.sample_rows.guesses.tolist()  # type: ignore[union-attr]


def test_what_would_leave_the_tables_is_refused() -> None:
    tables = Tables(16)
    good = msgspec.structs.replace(_plan(np.random.default_rng(0), 2, 2), samples=pack_ids([1, 1]))
    end = tables.pool.max_pages * 16
    for field, value in (
        ("rows", pack_ids([0, 1, 2, MAX_ROWS])),
        ("rows", pack_ids([0, -1, 2, 3])),
        ("starts", pack_ids([0, 0, -1, 0])),
        ("starts", pack_ids([end, 0, 0, 0])),
        ("lens", pack_ids([1, 60])),
        ("lens", pack_ids([1, -3])),
        ("lens", pack_ids([1])),
        ("samples", b""),
        ("starts", pack_ids([0])),
        ("input_ids", good.input_ids + pack_ids([1])),
        ("num_decodes", 5),
        ("drafts", pack_ids([1])),
        ("drafts", pack_ids([0, 7])),
        ("drafts", pack_ids([0, -1])),
        ("table_spans", pack_ids([MAX_ROWS, 0, len(good.table_pages) // 4])),
        ("table_spans", pack_ids([0, -1, len(good.table_pages) // 4])),
        ("table_spans", pack_ids([0, tables.pool.max_pages, len(good.table_pages) // 4])),
        ("table_spans", pack_ids([0, 0, -1])),
        ("table_spans", b""),
        ("table_pages", good.table_pages[:-4]),
    ):
        with pytest.raises(AssertionError):
            tables.run(msgspec.structs.replace(good, **{field: value}))


def test_only_plans_within_limits_and_without_prompt_positions_fit() -> None:
    native = Tables(16).native
    plan = _plan(np.random.default_rng(0), 0, 1)

    def sized(num_tokens: int, num_rows: int) -> BatchPlan:
        return msgspec.structs.replace(plan, input_ids=bytes(4 * num_tokens), rows=bytes(4 * num_rows))

    assert native.fits(sized(MAX_TOKENS, MAX_SEQS))
    assert not native.fits(sized(MAX_TOKENS, MAX_SEQS + 1))
    assert not native.fits(sized(MAX_TOKENS + 1, 1))
    wanted = (PromptPositions(0, 0, bytes(4), num_logprobs=0),)
    assert not native.fits(msgspec.structs.replace(plan, prompt_positions=wanted))
    assert native.fits(msgspec.structs.replace(plan, drafts=pack_ids([MAX_PLACES - 1])))
    for drafts in (MAX_PLACES, -MAX_PLACES):
        assert not native.fits(msgspec.structs.replace(plan, drafts=pack_ids([drafts])))


@pytest.mark.parametrize("num_limited", [0, 1, 5])
def test_the_first_calls_of_a_step_are_computed_by_no_more_threads_than_they_may_have(
    num_limited: int,
) -> None:
    """Two kernels that ask for two threads: where they may have one, their caller runs all tasks."""
    kernels = native_kernels()
    ran: list[list[int]] = []

    own, came = threading.get_native_id(), threading.Event()

    def task(body: int, number: int, following: int) -> None:
        ran[-1].append(threading.get_native_id())
        if threading.get_native_id() != own:
            came.set()
        elif len(ran) > num_limited:
            assert came.wait(30), "nobody helps"
        else:
            time.sleep(0.01)

    function = TASK(task)
    run_tasks = kernels._library["carousel_run_tasks"]

    def compute(call: int) -> None:
        ran.append([])
        came.clear()
        run_tasks(2, NUM_TASKS, function, None)

    kernel = KERNEL(compute)
    address = ctypes.cast(kernel, ctypes.c_void_p).value
    calls = (ProgramCall * 2)(ProgramCall(run=address), ProgramCall(run=address))
    program = ProgramStep(calls=ctypes.addressof(calls), num_calls=2)
    query_start = (ctypes.c_int64 * 1)()
    stage = StageCall(query_start=ctypes.addressof(query_start))
    step = StepCall(
        stage=ctypes.addressof(stage),
        program=ctypes.addressof(program),
        max_threads=1,
        num_limited=num_limited,
    )
    kernels.run_step(ctypes.addressof(step))
    assert [len(each) for each in ran] == [NUM_TASKS] * 2
    assert [set(each) == {own} for each in ran] == [num_limited > 0, num_limited > 1]
