"""Capacity policies: who fits, and who has to give way. `CAPACITY_POLICIES` names
ours; a user's own is given as "package.module:Class".
"""

CAPACITY_POLICIES = {
    "max_utilization": "scheduler_proc.capacity.max_utilization:MaxUtilization",
    "guaranteed_no_evict": "scheduler_proc.capacity.no_evict:GuaranteedNoEvict",
    "static_batch": "scheduler_proc.capacity.no_evict:StaticBatch",
}
