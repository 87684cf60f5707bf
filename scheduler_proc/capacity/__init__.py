"""Capacity policies decide which requests fit and which have to give way. `CAPACITY_POLICIES` lists the
built-in ones; a user's own is named "package.module:Class".
"""

CAPACITY_POLICIES = {
    "max_utilization": "scheduler_proc.capacity.max_utilization:MaxUtilization",
    "guaranteed_no_evict": "scheduler_proc.capacity.no_evict:GuaranteedNoEvict",
    "static_batch": "scheduler_proc.capacity.no_evict:StaticBatch",
}
