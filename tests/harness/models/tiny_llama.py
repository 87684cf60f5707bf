"""Folder with a small random Llama of 32,000 tokens and a tokenizer, as published examples need it."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 32_000
BOS, EOS = "<s>", "</s>"


def save_llama_32k(path: Path, *, max_len: int = 2048) -> None:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_len,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).float().save_pretrained(path)
    _tokenizer().save_pretrained(path)


def _tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token, and the others are words that no text is split into: each id has a text."""
    pieces = ["<unk>", BOS, EOS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pieces += [f"Ġw{number}" for number in range(VOCAB_SIZE - len(pieces))]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=pieces[0]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token=pieces[0], bos_token=BOS, eos_token=EOS
    )
