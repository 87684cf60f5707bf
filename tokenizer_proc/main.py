"""Main program of a tokenizer process: builds the loop and runs it until told to stop."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path

from runtime.checkpoint.checkpoint_config import CheckpointConfig
from runtime.ring.adapters_file import AdaptersFile
from runtime.ring.known_tenants import KnownTenants
from runtime.ring.process import HEARTBEAT_S, ProcessContext, run_process
from runtime.ring.suspects.in_hand import TextsInHand
from runtime.ring.tcp_gate import TcpGate
from runtime.text.selection import open_tokenizer
from runtime.wire.messages import ToTokenizer
from runtime.wire.transport import JoinedInbox, Waiter, ZmqInbox
from tokenizer_proc.adapters import AdapterTable, InlineAdapters
from tokenizer_proc.admission import QueueAdmission
from tokenizer_proc.loop import TokenizerLoop
from tokenizer_proc.recovery import is_recovering
from tokenizer_proc.stamp import stamped
from tokenizer_proc.validation import QueueBound, Validator, check_template_defaults

BUSY_WAIT_S = 0.005
SWITCH_S = 0.001
"""Seconds after which the loop takes the interpreter from a thread that renders or encodes."""


def main(context: ProcessContext) -> None:
    gate = TcpGate.open(context.config, context.endpoints)
    inboxes = [context.inbox("tokenizer_in", context.endpoints.tokenizer_in(context.index))]
    tenants = KnownTenants(context.endpoints.tenants_file)
    if gate is not None:
        inboxes.append(_inbox_over_tcp(context, gate))
        tenants.on_change = gate.reload
    encoded = context.wake()
    loop = _make_loop(context, JoinedInbox(inboxes), tenants, encoded.set)
    wakes = [context.stop_wake.fd, encoded.fd]
    waiter = Waiter([*(inbox.socket for inbox in inboxes), *wakes])
    # For when reading has stopped, so that the inbox may be readable all the time.
    blocked_waiter = Waiter(wakes)
    sys.setswitchinterval(SWITCH_S)
    # Vocabularies are a million objects that never change: keep the collector from walking them.
    gc.freeze()
    context.ready()
    num_sent = 0
    while not context.stop.is_set():
        encoded.take()
        has_more = loop.turn()
        # The other tokenizers admit requests by this number, so they see a change at once.
        context.beat(
            force=loop.num_sent != num_sent,
            num_sent=loop.num_sent,
            num_received=loop.num_received,
            num_running=loop.num_encoding,
        )
        num_sent = loop.num_sent
        tenants.refresh(time.monotonic())
        if has_more:
            continue
        if loop.is_blocked:
            blocked_waiter.wait(BUSY_WAIT_S)
        else:
            waiter.wait(HEARTBEAT_S / 2)
    loop.close()
    if gate is not None:
        gate.close()


def _inbox_over_tcp(context: ProcessContext, gate: TcpGate) -> ZmqInbox:
    def stamp(message: ToTokenizer, key: str) -> ToTokenizer:
        return stamped(message, gate.tenant_of(key), context.secret)

    return gate.inbox(gate.endpoints.tokenizer_in(context.index), "tokenizer_in", context.epoch, stamp)


def _make_loop(
    context: ProcessContext, inbox: JoinedInbox, tenants: KnownTenants, on_encoded: Callable[[], None]
) -> TokenizerLoop:
    config = context.config

    def has_tenants() -> bool:
        return bool(config.curve_dir) or tenants.has_names

    others = [index for index in range(config.tokenizer_workers) if index != context.index]
    tokenizer = open_tokenizer(
        config.tokenizer,
        config.chat_template,
        context.endpoints.tokenizer_file,
        allow_special_tokens=config.allow_special_tokens,
        has_tenants=config.may_have_tenants,
    )
    if config.default_chat_template_kwargs and tokenizer.is_template_open:
        check_template_defaults(tokenizer, config.template_defaults)
    return TokenizerLoop(
        inbox=inbox,
        scheduler=context.outbox(context.endpoints.scheduler_in),
        detokenizers=[
            context.outbox(context.endpoints.detokenizer_in(index))
            for index in range(config.detokenizer_workers)
        ],
        tokenizer=tokenizer,
        validator=Validator(
            CheckpointConfig.read(Path(config.model), config.hf_overrides).vocab_size,
            config.context_length,
            takes_text=not config.skip_tokenizer_init,
            task=config.task,
            max_prompt_len=config.max_prompt_len,
        ),
        admission=QueueAdmission(
            QueueBound(config.max_waiting, config.max_waiting_of_client, config.max_running_requests),
            lambda: context.status.read("scheduler"),
            num_sent_elsewhere=lambda: sum(
                context.status.read("tokenizer", index).num_sent for index in others
            ),
            epochs_elsewhere=lambda: tuple(context.status.read("tokenizer", index).epoch for index in others),
            is_draining=lambda: context.status.read("launcher").state == "draining",
            is_recovering=lambda: is_recovering(context.status, time.monotonic_ns()),
            has_tenants=has_tenants,
        ),
        in_hand=TextsInHand.open(context.endpoints, context.index, has_tenants, context.secret),
        secret=context.secret,
        shares_prefixes=context.config.share_prefixes_across_keys,
        tenant_named=tenants.named,
        on_encoded=on_encoded,
        adapters=AdapterTable(
            AdaptersFile(context.endpoints.adapters_file, config.adapter_paths)
            if config.enable_lora
            else None,
            config.max_lora_rank,
            InlineAdapters(
                context.endpoints.inline_adapters, config.max_lora_rank, config.lora_host_cache_size
            )
            if config.enable_lora
            else None,
        ),
    )


if __name__ == "__main__":
    run_process("tokenizer", main)
