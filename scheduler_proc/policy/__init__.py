"""Schedule policies decide in which order waiting requests are considered. `POLICIES` lists the built-in
ones; a user's own is named "package.module:Class".
"""

POLICIES = {
    "fcfs": "scheduler_proc.policy.fcfs:Fcfs",
    "priority": "scheduler_proc.policy.priority:PriorityPolicy",
    "lpm": "scheduler_proc.policy.longest_prefix:LongestPrefix",
    "longest_prefix": "scheduler_proc.policy.longest_prefix:LongestPrefix",
    "dfs-weight": "scheduler_proc.policy.dfs_weight:DfsWeight",
    "shortest-first": "scheduler_proc.policy.by_length:ShortestFirst",
    "lof": "scheduler_proc.policy.by_length:LongestOutputFirst",
    "random": "scheduler_proc.policy.random_order:RandomOrder",
}
