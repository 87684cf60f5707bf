"""Planted mistakes in the limits of tenants, and in their effects on others: see
tests.harness.mutants.mutant_table.
"""

from __future__ import annotations

import random

from scheduler_proc.core.lifecycle import Lifecycle
from scheduler_proc.intake.controls import Controls
from scheduler_proc.intake.intake import Intake
from scheduler_proc.intake.tenant_limits import TenantLimiter
from scheduler_proc.intake.tombstones import Tombstones
from scheduler_proc.waiting.account import Account, TokenBucket
from scheduler_proc.waiting.tenant_accounts import Accounts
from scheduler_proc.waiting.waiting_room import Patience, WaitingRoom
from tests.harness.mutants.mutant_table import Mutant
from tests.harness.simulation.sim_tenants import tenants_with

TENANTS = {"tenants": tenants_with(random.Random(1)), "turbulence": 0.3, "max_rows": 6}
USING = TENANTS | {"num_requests": 60, "max_output": 60, "max_live": 1000}
PREEMPTING = TENANTS | {"policy": "priority", "capacity": "max_utilization", "request_scheduler": ""}
TIMED_OUT = TENANTS | {"patience": Patience(0.0, 0.255), "max_rows": 2}

TENANT_MUTANTS = [
    Mutant(
        "one more of a tenant runs than may",
        Account,
        "may_choose",
        "self.max_running - self.num_rows",
        "self.max_running + 1 - self.num_rows",
        0,
        changes=TENANTS,
    ),
    Mutant(
        "who is held back stays there",
        Lifecycle,
        "_remove",
        "self.room.note_row_free(account)",
        "pass",
        0,
        changes=TENANTS,
    ),
    Mutant(
        "an abort in the queue lets nobody in",
        WaitingRoom,
        "leave",
        "self._balance(account)",
        "pass",
        0,
        changes=TENANTS,
    ),
    Mutant(
        "a tenant's first stays behind its later ones",
        WaitingRoom,
        "_balance",
        " or (queued and held[0].place < queued[-1].place)",
        "",
        4,
        changes=TENANTS,
    ),
    Mutant(
        "a retracted request keeps its place among those that run",
        Lifecycle,
        "retract",
        "req.account.num_rows -= req.width",
        "pass",
        3,
        changes=PREEMPTING,
    ),
    Mutant(
        "who is admitted is still in its tenant's queue",
        WaitingRoom,
        "take_admitted",
        "account.queued.remove(req)",
        "pass",
        0,
        changes=TENANTS,
    ),
    Mutant(
        "being held back counts as waiting in the queue",
        WaitingRoom,
        "_enqueue_held",
        "self._count_from(req, self._serving.now())",
        "req.waits_from_s = req.came_s",
        0,
        changes=TENANTS | {"patience": Patience(0.055, 0.0)},
    ),
    Mutant(
        "no timeout for who is held back",
        WaitingRoom,
        "_take_given_up",
        "not req.num_retractions",
        "not req.num_retractions and not req.is_held",
        0,
        changes=TIMED_OUT,
    ),
    Mutant(
        "new limits hold only for what comes later",
        WaitingRoom,
        "change_tenants",
        "self._balance(account)",
        "pass",
        1,
        changes=TENANTS,
    ),
    Mutant(
        "a prompt is charged when it is made again, too",
        Accounts,
        "add",
        "if not req.is_paid:",
        "if True:",
        0,
        changes=TENANTS | {"turbulence": 1.0},
    ),
    Mutant(
        "output is charged only when somebody asks",
        Accounts,
        "discard",
        "account.num_used += num_tokens - req.num_charged",
        "pass",
        0,
        changes=TENANTS,
    ),
    Mutant(
        "charged twice",
        Accounts,
        "settle",
        "req.num_charged = num_tokens",
        "pass",
        0,
        changes=TENANTS,
    ),
    Mutant(
        "who runs uses nothing until its end",
        Accounts,
        "settle",
        "req.account.num_used += num_tokens - req.num_charged",
        "num_tokens = req.num_charged",
        32,
        changes=USING,
    ),
    Mutant(
        "prompts are charged now and then",
        TenantLimiter,
        "_settle",
        "account.close_books(self._clock())",
        "pass",
        5,
        changes=USING,
    ),
    Mutant(
        "a debt is forgiven",
        TokenBucket,
        "take",
        "min(float(self.per_minute), filled)",
        "max(0.0, min(float(self.per_minute), filled))",
        10,
        changes=USING,
    ),
    Mutant(
        "nobody is refused for tokens",
        TenantLimiter,
        "_check_tokens",
        "if not account.bucket.seconds_until_one():",
        "if True:",
        0,
        changes=USING,
    ),
    Mutant(
        "the whole queue for one tenant",
        TenantLimiter,
        "check",
        "self._share.is_used_up(account.num_live, num_live)",
        "False",
        70,
        changes=TENANTS | {"max_live": 9},
    ),
    Mutant(
        "any priority for any tenant",
        TenantLimiter,
        "priority_of",
        "message.priority <= limits.max_priority",
        "True",
        1,
        changes=TENANTS,
    ),
    Mutant(
        "an abort ends what is another tenant's",
        Intake,
        "_abort",
        "elif tenant in (OWNER, req.tenant):",
        "else:",
        7,
        changes=TENANTS,
    ),
    Mutant(
        "an early abort ends what is another tenant's",
        Tombstones,
        "add",
        "(handle, tenant)",
        "(handle, OWNER)",
        7,
        changes=TENANTS,
    ),
    Mutant(
        "a client's abort ends what is another tenant's",
        Intake,
        "_abort",
        " and tenant in (OWNER, req.tenant)",
        "",
        4,
        changes=TENANTS,
    ),
    Mutant(
        "everybody is an admin",
        Controls,
        "_check_role",
        "not tenant.may",
        "tenant is None and not tenant.may",
        0,
        changes=TENANTS,
    ),
]
