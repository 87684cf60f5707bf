"""In which order waiting requests are considered. `POLICIES`
names ours; a user's own is given as "package.module:Class".
"""

POLICIES = {
    "fcfs": "scheduler_proc.policy.fcfs:Fcfs",
    "longest_prefix": "scheduler_proc.policy.longest_prefix:LongestPrefix",
    "lpm": "scheduler_proc.policy.longest_prefix:LongestPrefix",
}
