"""Trains the demo model: a small Llama and its byte-level BPE tokenizer, on the standard library's sources.

    python demo/train.py --minutes 35 --out /tmp/demo-model       as the model in demo/model was made
    python demo/train.py --steps 3634 --out /tmp/demo-model       as many steps on a machine of any speed

Downloads nothing: the data is the standard library of the interpreter that runs it. Writes what a checkpoint
directory needs: config.json, model.safetensors, generation_config.json and the tokenizer's files.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Ids = npt.NDArray[np.int64]

END_OF_TEXT = "<|endoftext|>"
# Untrained; they keep two ids free for whoever tunes the model on conversations.
CHAT_MARKS = ("<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = Path(__file__).parent / "model" / "chat_template.jinja"
VOCAB_SIZE = 4096
CONTEXT_LENGTH = 2048
SEQUENCE_LENGTH = 512
BATCH_SIZE = 8
PEAK_LEARNING_RATE = 3e-3
MIN_LEARNING_RATE = 1e-5
WARMUP_STEPS = 100
HELD_OUT_SHARE = 20  # one file in twenty
NUM_HELD_OUT_BATCHES = 20
LOG_EVERY = 200
# Test suites, generated tables and a grammar tool: much text that teaches little.
SKIPPED = ("site-packages", "/test", "lib2to3", "/encodings/")


@dataclass(frozen=True, slots=True)
class Limit:
    """When training ends; the learning rate falls to zero towards it."""

    minutes: float
    steps: int

    def progress(self, step: int, elapsed_s: float) -> float:
        """From 0 to 1 = done."""
        return step / self.steps if self.steps else elapsed_s / (60 * self.minutes)


def read_sources() -> list[str]:
    """The files of the standard library, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    texts = []
    for path in sorted(root.rglob("*.py")):
        if any(part in str(path) for part in SKIPPED):
            continue
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue  # a few files test other encodings
    return texts


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, *CHAT_MARKS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def split_and_encode(texts: list[str], tokenizer: Tokenizer, seed: int) -> tuple[Ids, Ids]:
    """(training, held-out) ids: whole files in random order, each behind an end-of-text mark."""
    order = list(texts)
    random.Random(seed).shuffle(order)
    mark = tokenizer.token_to_id(END_OF_TEXT)
    files = [np.array([mark, *encoding.ids], np.int64) for encoding in tokenizer.encode_batch(order)]
    num_held_out = max(1, len(files) // HELD_OUT_SHARE)
    return np.concatenate(files[num_held_out:]), np.concatenate(files[:num_held_out])


def new_model() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT_LENGTH,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def draw_batch(ids: Ids, rng: np.random.Generator) -> torch.Tensor:
    """[BATCH_SIZE, SEQUENCE_LENGTH] int64, from random places."""
    starts = rng.integers(0, len(ids) - SEQUENCE_LENGTH, BATCH_SIZE)
    return torch.from_numpy(np.stack([ids[start : start + SEQUENCE_LENGTH] for start in starts]))


def learning_rate(step: int, progress: float) -> float:
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    return PEAK_LEARNING_RATE * warm * max(0.0, 1.0 - progress) + MIN_LEARNING_RATE


def train(
    model: LlamaForCausalLM, ids: Ids, limit: Limit, rng: np.random.Generator, *, compiled: bool
) -> int:
    """Train in place until the limit; the number of steps made."""
    forward: Callable[..., object] = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.1)
    began = time.monotonic()
    step = 0
    while (progress := limit.progress(step, time.monotonic() - began)) < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, progress)
        batch = draw_batch(ids, rng)
        with torch.autocast("cpu", torch.bfloat16):
            loss: torch.Tensor = forward(input_ids=batch, labels=batch).loss  # type: ignore[attr-defined]
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % LOG_EVERY == 0:
            print(f"step {step}: {time.monotonic() - began:.0f} s, loss {loss.item():.3f}", flush=True)
    return step


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, ids: Ids, rng: np.random.Generator) -> float:
    """Mean cross entropy in nats per token."""
    model.eval()
    losses = []
    for _ in range(NUM_HELD_OUT_BATCHES):
        batch = draw_batch(ids, rng)
        losses.append(model(input_ids=batch, labels=batch).loss.item())
    return float(np.mean(losses))


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    # Greedy text of so small a model repeats itself; a little chance helps.
    model.generation_config.update(do_sample=True, temperature=0.7, top_p=0.9, max_new_tokens=1024)
    model.to(torch.bfloat16)
    model.save_pretrained(out)
    wrapper = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE.read_text(encoding="utf-8"),
    )
    wrapper.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model on the standard library's sources.")
    parser.add_argument("--minutes", type=float, default=35.0, help="time to train, without the tokenizer")
    parser.add_argument("--steps", type=int, default=0, help="train this many steps instead")
    parser.add_argument("--out", type=Path, required=True, help="directory of the new checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-compile", action="store_true", help="train without torch.compile")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)

    texts = read_sources()
    tokenizer = train_tokenizer(texts)
    training, held_out = split_and_encode(texts, tokenizer, args.seed)
    print(
        f"Python {sys.version.split()[0]}: {len(texts)} files, {sum(map(len, texts)) / 1e6:.1f} MB, "
        f"{len(training) / 1e6:.2f} M tokens to train, {len(held_out) / 1e6:.2f} M held out",
        flush=True,
    )
    model = new_model()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{num_parameters / 1e6:.2f} M parameters", flush=True)
    limit = Limit(args.minutes, args.steps)
    num_steps = train(model, training, limit, rng, compiled=not args.no_compile)
    loss = held_out_loss(model, held_out, rng)
    print(f"{num_steps} steps, held-out loss {loss:.3f} (perplexity {math.exp(loss):.1f})")
    save(model, tokenizer, args.out)


if __name__ == "__main__":
    main()
