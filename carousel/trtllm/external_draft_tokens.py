"""ExternalDraftTokensConfig: guesses at the output that come with a request, in TensorRT-LLM's words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from runtime.base.errors import InvalidRequest
from runtime.sampling.table import MAX_DRAFT_TOKENS

NAME = "external_draft_tokens_config"


class ExternalDraftTokensConfig:
    """Guesses at the beginning of the output; all that are right come out of one step. They change no token,
    logprob or text.
    """

    def __init__(
        self,
        tokens: Sequence[int] | np.ndarray[Any, Any],
        draft_logits: Any = None,
        acceptance_threshold: float | None = None,
        fast_logits: bool | None = None,
    ) -> None:
        """Copy the tokens. Raises InvalidRequest for none, for too many, and for what would have a guess
        accepted that is not what is sampled.
        """
        for name, value in (("draft_logits", draft_logits), ("acceptance_threshold", acceptance_threshold)):
            if value is not None:
                raise InvalidRequest(
                    f"{NAME}.{name} is not supported: a guess counts where it is the token that is sampled,"
                    " so that the output is the same as without it",
                    param=f"{NAME}.{name}",
                )
        if fast_logits:
            raise InvalidRequest(
                f"{NAME}.fast_logits is not supported: logits of a draft model are not taken",
                param=f"{NAME}.fast_logits",
            )
        if hasattr(tokens, "tolist"):
            tokens = tokens.tolist()
        if not isinstance(tokens, Sequence) or isinstance(tokens, str | bytes) or not tokens:
            raise InvalidRequest(f"{NAME}.tokens must be token ids, and not empty", param=f"{NAME}.tokens")
        if len(tokens) > MAX_DRAFT_TOKENS:
            raise InvalidRequest(
                f"{NAME}.tokens: {len(tokens)} tokens; at most {MAX_DRAFT_TOKENS} are verified",
                param=f"{NAME}.tokens",
            )
        self.tokens = list(tokens)
