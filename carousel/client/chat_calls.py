"""ChatCalls: conversations in OpenAI's form, for the two ways to wait. Each is a prompt of `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack, overload

from carousel.client.control_calls import AsyncControlCalls, ControlCalls
from carousel.client.core.request.submission import RequestOptions
from carousel.client.core.result import Completion, respelling
from carousel.conversation import CHAT_NAMES, Conversation, conversation_of, conversations_of
from runtime.wire.sampling_params import SamplingParams


class ChatCalls(ControlCalls):
    """Calls about conversations, in the caller's thread."""

    def generate(self, *args: Any, **options: Any) -> Any:
        """Generate as Client does."""
        raise NotImplementedError

    @overload
    def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion: ...

    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Completion]: ...

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion | list[Completion]:
        """Generate the next turn of one conversation (a Completion) or of several (a list in their order), as
        the model's chat template asks for it.

        Messages are those of /v1/chat/completions, as mappings: `role` and `content`, a text or text parts;
        of earlier turns also `name`, `tool_calls`, `tool_call_id` and `reasoning_content`. The answer is the
        text that the model writes, with calls of `tools` and reasoning in it. All else is as for `generate`.
        """
        prompts = conversations_of(messages)
        with respelling(CHAT_NAMES):
            answers: Completion | list[Completion] = self.generate(
                prompts, sampling_params, timeout=timeout, **options
            )
        return answers


class AsyncChatCalls(AsyncControlCalls):
    """Calls about conversations, in an event loop."""

    async def generate(self, *args: Any, **options: Any) -> Any:
        """Generate as AsyncClient does."""
        raise NotImplementedError

    async def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion:
        """Generate the next turn of a conversation, as the model's chat template asks for it. Messages are
        those of Client.chat; all else is as for `generate`.
        """
        prompt = conversation_of(messages)
        with respelling(CHAT_NAMES):
            answer: Completion = await self.generate(prompt, sampling_params, timeout=timeout, **options)
        return answer
