"""FairOrder: tenants share the rows that come free by how long they hold them, however many requests wait.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): a request gets its start tag when it comes, behind the
cost of its tenant's others, and the lowest tag goes next; a queue kept in the order of tags is never sorted
again. The cost of a request is a step of each of its rows for each token of output that it may have. What it
leaves of that comes back to its tenant when it ends. Prompts cost next to nothing here: most of a long one
may be cached, and tokens are limited by the minute.
"""

from __future__ import annotations

from scheduler_proc.core.request import Request
from scheduler_proc.waiting.account import Account


class FairOrder:
    """Start tags of a scheduler's requests. Those of one tenant go up in the order in which they come. The
    cost of one is the steps for which it may hold its rows: one at least for its prompt, and its output.
    """

    def __init__(self) -> None:
        self.virtual_time = 0
        """The highest tag of those that have got a row."""

    def tag(self, req: Request) -> None:
        """Give it a place behind its tenant's others, and no earlier than the turn that it is: who was away
        has saved nothing up.
        """
        account, tag = req.account, self.virtual_time
        # Comparisons instead of max(): this and what follows is done for every request.
        if account.next_tag > tag:
            tag = account.next_tag
        if account.last_tag > tag:
            tag = account.last_tag
        req.start_tag = account.last_tag = tag
        account.next_tag = tag + (1 + req.max_len - req.num_prompt) * req.width

    def note_row(self, req: Request) -> None:
        """Note that a request has got its row, and its tenant this turn."""
        account, tag = req.account, req.start_tag
        if tag > self.virtual_time:
            self.virtual_time = tag
        if account.had_tag > tag:
            tag = account.had_tag
        account.had_tag = tag + (1 + req.max_len - req.num_prompt) * req.width

    def note_end(self, req: Request, num_tokens: int) -> None:
        """Note that a request ends with so many tokens that has had a row: give back those that it may have
        had and has not.
        """
        account, num_left = req.account, (req.max_len - num_tokens) * req.width
        account.next_tag -= num_left
        account.had_tag -= num_left

    def forget_waiting(self, account: Account[Request]) -> None:
        """None of the tenant's waits any more: turns that it gave up are not held against it."""
        account.next_tag = account.had_tag
        account.last_tag = 0
