"""FairOrder: tenants share the rows that become free by how long they hold rows, however many requests wait.

This is start-time fair queueing (Goyal, Vin and Cheng, 1996). A request gets its start tag on arrival, behind
the cost of its tenant's earlier requests, and the lowest tag goes next. A queue kept in the order of tags is
never sorted again. The cost of a request is one step for each of its rows and each token of output that it
may have. When it ends, its tenant gets back what it did not use. Prompts cost next to nothing here: most of a
long one may be cached, and tokens are limited by the minute.
"""

from __future__ import annotations

from scheduler_proc.core.request import Request
from scheduler_proc.waiting.account import Account


class FairOrder:
    """Start tags of a scheduler's requests. The tags of one tenant's requests ascend in the order of arrival.
    The cost of a request is the number of steps for which it may hold its rows: one for its prompt, and one
    for each output token.
    """

    def __init__(self) -> None:
        self.virtual_time = 0
        """Highest tag of the requests that have got a row."""

    def tag(self, req: Request) -> None:
        """Give a request its tag: behind its tenant's other requests, and not below the current virtual time,
        so that a tenant that was away has saved nothing up.
        """
        account, tag = req.account, self.virtual_time
        # Comparisons instead of max(), because this runs for every request.
        if account.next_tag > tag:
            tag = account.next_tag
        if account.last_tag > tag:
            tag = account.last_tag
        req.start_tag = account.last_tag = tag
        account.next_tag = tag + (1 + req.max_len - req.num_prompt) * req.width

    def note_row(self, req: Request) -> None:
        """Record that a request has got its row."""
        account, tag = req.account, req.start_tag
        if tag > self.virtual_time:
            self.virtual_time = tag
        if account.had_tag > tag:
            tag = account.had_tag
        account.had_tag = tag + (1 + req.max_len - req.num_prompt) * req.width

    def note_end(self, req: Request, num_tokens: int) -> None:
        """Record that a request which had a row ends with num_tokens tokens: give its tenant back the tokens
        that it did not use.
        """
        account, num_left = req.account, (req.max_len - num_tokens) * req.width
        account.next_tag -= num_left
        account.had_tag -= num_left

    def forget_waiting(self, account: Account[Request]) -> None:
        """Reset the tenant's tags when none of its requests waits any more, so that requests which gave up do
        not count against it.
        """
        account.next_tag = account.had_tag
        account.last_tag = 0
