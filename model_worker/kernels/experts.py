"""Mixture of experts by torch, expert by expert."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from model_worker.kernels.expert_choice import choose_experts


def mix_experts(
    hidden: Tensor,
    scores: Tensor,
    run_expert: Callable[[int, Tensor], Tensor],
    *,
    num_experts: int,
    num_per_token: int,
    renormalizes: bool,
) -> Tensor:
    """Return [T, hidden_size]: the sum of each token's experts' outputs, weighted by the router.

    hidden [T, hidden_size]; scores [T, num_experts or more]. run_expert(e, x) returns expert e's output for
    rows x [n, hidden_size]. Tokens are sorted by expert, so that each expert is one matrix product; the host
    reads how many tokens each has.
    """
    weights, ids = choose_experts(scores[:, :num_experts], num_per_token, renormalizes=renormalizes)
    by_expert = ids.flatten().argsort(stable=True)
    counts = ids.flatten().bincount(minlength=num_experts).tolist()
    tokens = by_expert // num_per_token
    outputs = hidden.new_empty(len(tokens), hidden.shape[1])
    start = 0
    for expert, count in enumerate(counts):
        if count:
            own = slice(start, start + count)
            outputs[own] = run_expert(expert, hidden[tokens[own]])
            start += count
    outputs *= weights.flatten()[by_expert].unsqueeze(1)
    # Each token's outputs, side by side again, are summed in the order of its experts, whatever the batch is.
    places = by_expert.argsort()
    return outputs[places].view(-1, num_per_token, hidden.shape[1]).sum(1)
