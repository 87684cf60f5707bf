"""ChatTemplate: renders conversations as prompts with the template beside a checkpoint.

The template belongs to the model and is trusted; its input is the user's. So an exception in it means that it
does not accept these messages or variables. Special tokens count as tokens only where the template has
written them.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
from jinja2 import Environment, TemplateError, meta
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from runtime.base.errors import InvalidRequest
from runtime.text.special_text import Shield, Shielded
from runtime.wire.transport import DECODE_ERRORS

_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)
_VARIABLES = "chat_template_kwargs"
_PARAMS = {name: name for name in ("continue_final_message", "tools")}
"""Names of the request fields for options of a rendering that are not variables of the caller."""
_TOO_DEEP = "lists and maps are nested too deeply"
# Variables that a template gets otherwise, and options of its rendering.
_ARGUMENTS = frozenset(
    {
        "messages",
        *inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters,
        *inspect.signature(render_jinja_template).parameters,
    }
)


@dataclass(frozen=True, slots=True)
class _CallForm:
    """Form of a message with tool calls that a template expects, and the parts that it shows."""

    as_text: bool
    """True if arguments are passed as JSON text, not as an object."""
    shows_calls: bool
    shows_results: bool


class ChatTemplate:
    def __init__(self, wrapper: PreTrainedTokenizerFast, shield: Shield | None = None) -> None:
        """Compile a template. shield: marks callers' special tokens; None: callers may write
        special tokens.
        """
        self._wrapper = wrapper
        self._shield = shield

    @property
    def exists(self) -> bool:
        return self._wrapper.chat_template is not None

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names of the variables that the template reads; empty if they cannot be determined."""
        template = self._wrapper.chat_template
        try:
            parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
        except (TemplateError, TypeError):
            return frozenset()
        return frozenset(meta.find_undeclared_variables(parsed))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_kwargs: Mapping[str, object],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Return the prompt of a conversation, special tokens included. Encode it with
        add_special_tokens=False. See Tokenizer.apply_chat_template.
        """
        if not self.exists:
            raise InvalidRequest(
                "messages: the model has no chat template: send a text prompt, or name a "
                "template with --chat-template at the launch",
                param="messages",
            )
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message goes on with the last message, add_generation_prompt begins a new "
                "one: set only one of them",
                param="continue_final_message",
            )
        if tools and self.variables and "tools" not in self.variables:
            raise InvalidRequest("tools: the model's chat template shows none; leave them out", param="tools")
        self._check_names(template_kwargs)
        self._check_shown(messages)
        messages = [self._with_calls(message) for message in messages]
        options: dict[str, Any] = (
            {**template_kwargs, "tools": list(tools)} if tools else dict(template_kwargs)
        )
        shielded = None if self._shield is None else self._apply(self._shield, messages, options)
        if shielded:
            messages, options = shielded.messages, dict(shielded.variables)
        if continue_final_message:
            options["continue_final_message"] = True
        try:
            prompt = self._render(messages, add_generation_prompt, options)
        except _ERRORS as error:
            param = self._param_at_fault(messages, add_generation_prompt, options)
            # The rest of the library's message quotes the whole conversation.
            reason = str(error).partition("Final message to continue:")[0]
            if isinstance(error, RecursionError):
                reason = _TOO_DEEP
            if self._shield is not None:
                reason = self._shield.restore(reason)
            raise InvalidRequest(
                f"{param}: the model's chat template refuses this: {reason}", param=param
            ) from error
        if self._shield is not None and shielded:
            return self._shield.settle(prompt, shielded)
        return prompt

    @staticmethod
    def _apply(
        shield: Shield, messages: Sequence[Mapping[str, Any]], options: Mapping[str, object]
    ) -> Shielded | None:
        try:
            return shield.apply(messages, options)
        except RecursionError as error:
            param = "messages"
            for name, value in options.items():
                try:
                    shield.apply([], {name: value})
                except RecursionError:
                    param = _PARAMS.get(name, _VARIABLES)
            raise InvalidRequest(f"{param}: {_TOO_DEEP}", param=param) from error

    def _with_calls(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message with its calls in the form that the template wants. OpenAI's clients send
        arguments as JSON; arguments that are not JSON stay text.
        """
        calls = message.get("tool_calls")
        if not isinstance(calls, list | tuple) or not calls:
            return message
        as_text = self._calls.as_text
        return {**message, "tool_calls": [_arguments_of(call, as_text=as_text) for call in calls]}

    def _check_shown(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Raise InvalidRequest for parts of messages that the template would silently leave out."""
        for number, message in enumerate(messages):
            if message.get("tool_calls") and not self._calls.shows_calls:
                param, what = f"messages[{number}].tool_calls", "tool calls"
            elif message.get("role") == "tool" and not self._calls.shows_results:
                param, what = f"messages[{number}].role", "results of tools"
            else:
                continue
            raise InvalidRequest(f"{param}: the model's chat template does not show {what}", param=param)

    @cached_property
    def _calls(self) -> _CallForm:
        """Return the first form of tool calls that the template shows, found by rendering a conversation with
        one call and its result. If it raises for all forms, it reports itself what it does not accept.
        """
        texts = "a_name_to_look_for", "a result to look for"
        tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
        form: _CallForm | None = None
        for as_text in (False, True):
            function = {"name": texts[0], "arguments": '{"x": 1}' if as_text else {"x": 1}}
            call = {"id": "aaaaaaaaa", "type": "function", "function": function}
            conversation: list[dict[str, Any]] = [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": call["id"], "name": texts[0], "content": texts[1]},
            ]
            try:
                prompt = self._render(conversation, True, {"tools": [tool]})
            except _ERRORS:
                continue
            found = _CallForm(as_text, texts[0] in prompt, texts[1] in prompt)
            if found.shows_calls:
                return found
            form = form or found
        return form or _CallForm(False, True, True)

    def _check_names(self, template_kwargs: Mapping[str, object]) -> None:
        for name in template_kwargs:
            if name in _ARGUMENTS or name in self._wrapper.special_tokens_map:
                raise InvalidRequest(
                    f"chat_template_kwargs: {name} cannot be set here", param="chat_template_kwargs"
                )

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        options: Mapping[str, Any],
    ) -> str:
        prompt = self._wrapper.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **options,
        )
        assert isinstance(prompt, str)
        return prompt

    def _param_at_fault(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        options: Mapping[str, Any],
    ) -> str:
        """Return the field that a template which raised does not accept: an optional one without which it
        works, or messages.
        """
        for param in (_VARIABLES, *_PARAMS):
            others = {
                name: value for name, value in options.items() if _PARAMS.get(name, _VARIABLES) != param
            }
            if len(others) == len(options):
                continue
            try:
                self._render(messages, add_generation_prompt, others)
            except _ERRORS:
                continue
            return param
        return "messages"


def _arguments_of(call: Any, *, as_text: bool) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "arguments" not in function:
        return call
    arguments = function["arguments"]
    if as_text and isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not as_text and isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments, type=dict[str, Any]) if arguments.strip() else {}
        except DECODE_ERRORS:
            return call
    return {**call, "function": {**function, "arguments": arguments}}
