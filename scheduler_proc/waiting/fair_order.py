"""FairOrder: tenants share the rows that become free by how long they hold rows, however many requests wait.

This is start-time fair queueing (Goyal, Vin and Cheng, 1996). A request gets its start tag on arrival, behind
the cost of its tenant's earlier requests, and the lowest tag goes next. A queue kept in the order of tags is
never sorted again. The cost of a request is one step for each of its rows and each token of output that it
may have, and one for each PROMPT_TOKENS of its prompt that are not cached when it arrives. Without the latter
a tenant with long prompts and short outputs would have many turns for each of another's, and in each of them
takes whole steps. When a request gets its row, its tenant is charged for what has to be computed; when it
ends, the tenant gets back the output that it did not have.
"""

from __future__ import annotations

from scheduler_proc.core.request import Request
from scheduler_proc.waiting.account import Account

PROMPT_TOKENS = 8
"""Number of tokens of a prompt that cost as much as one token of output. A round number: they are computed
together, where a row's output takes a step for each token.
"""


def prompt_cost(num_tokens: int) -> int:
    """Return the cost of num_tokens tokens that have to be computed before there is output."""
    return num_tokens // PROMPT_TOKENS


class FairOrder:
    """Start tags of a scheduler's requests. The tags of one tenant's requests ascend in the order of arrival.
    The cost of a request is the number of steps for which it may hold its rows, one for its prompt and one
    for each output token, and its prompt_cost.
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
        account.next_tag = tag + (1 + req.max_len - req.num_prompt) * req.width + req.prompt_cost

    def weigh(self, req: Request) -> None:
        """Set the cost of a prompt to what has to be computed of it, now that the request has its row."""
        cost = prompt_cost(req.num_tokens - req.kv_len)
        req.account.next_tag += cost - req.prompt_cost
        req.prompt_cost = cost

    def note_row(self, req: Request) -> None:
        """Record that a request has got its row."""
        account, tag = req.account, req.start_tag
        if tag > self.virtual_time:
            self.virtual_time = tag
        if account.had_tag > tag:
            tag = account.had_tag
        account.had_tag = tag + (1 + req.max_len - req.num_prompt) * req.width + req.prompt_cost

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
