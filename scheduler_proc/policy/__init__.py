"""In which order waiting requests are considered. `POLICIES`
names ours; a user's own is given as "package.module:Class".
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
