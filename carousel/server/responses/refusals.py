"""Fields of /v1/responses that are refused, with the values that ask for nothing, and advice. `field_table`
has those of every endpoint.
"""

from __future__ import annotations

from typing import Any

_KEPT_NOWHERE = "this server keeps no responses; send the earlier items again, in input"
RESPONSES_REFUSED: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "include_reasoning": (True,),
    "previous_response_id": (),
    "prompt": (),
    "separate_reasoning": (True,),
    "store": (False,),
}
RESPONSES_HINTS = {
    "background": "it keeps no responses; leave the connection open, or stream",
    "context_management": "it keeps no responses; truncation cuts what does not fit",
    "conversation": _KEPT_NOWHERE,
    "previous_response_id": _KEPT_NOWHERE,
    "prompt": "it keeps no prompts; send instructions and input",
    "store": "it keeps no responses; leave it out, and send the items again with the next request",
    **dict.fromkeys(("messages", "prompt_token_ids", "input_ids"), "it is called input here"),
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "it is called max_output_tokens here"),
    "logprobs": 'include has "message.output_text.logprobs"',
    "reasoning_effort": "it is reasoning.effort here",
}
ITEM_REFUSED: dict[str, tuple[Any, ...]] = {
    "caller": ({"type": "direct"},),
    "encrypted_content": ("",),
}
ITEM_HINTS = {
    "encrypted_content": "this server cannot read what another one has encrypted; leave the item out",
}
REASONING_REFUSED: dict[str, tuple[Any, ...]] = {
    "context": ("auto",),
    "generate_summary": ("auto", "concise", "detailed"),
    "mode": ("standard",),
}
REASONING_HINTS = {"generate_summary": "the reasoning itself is in the answer"}
