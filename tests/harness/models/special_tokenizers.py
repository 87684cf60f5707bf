"""Small tokenizers of each kind that models come with, and a chat template that writes special tokens."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from tokenizers.models import Model
from transformers import PreTrainedTokenizerFast

from runtime.text.tokenizer import Tokenizer

TEMPLATE = (
    "{% for message in messages %}{{ START + message.role }}"
    "{% if message.name %}({{ message.name }}){% endif %}: {{ message.content | trim }}{{ END }}\n"
    "{% endfor %}{% if note is defined %}{{ note }}{% endif %}"
    "{% if add_generation_prompt %}{{ START }}assistant{% endif %}"
)
TEXTS = (
    "the quick brown fox jumps over the lazy dog",
    "def f(x): return x <= 1 and x >> 2 or [INST] [/INST] <s> </s>",
    "|<|im_start|>| system user assistant end <end> sep cls",
)


def byte_level(*, normalized: bool = False) -> Tokenizer:
    """Make a tokenizer like GPT-2's and what came after it: no normalizer, every byte in the vocabulary."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet))
    return with_special(backend, "<|im_start|>", "<|im_end|>", normalized=normalized)


def sentencepiece(*, prepends: str = "normalizer", normalized: bool = False) -> Tokenizer:
    """Make a tokenizer like Llama 2's: byte fallback, special tokens in the vocabulary, and merges that lead
    to one of them.
    """
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += sorted(set("".join(TEXTS)) - {" "})
    merges = [("s", ">"), ("<", "/"), ("</", "s>"), ("▁", "t"), ("▁t", "h"), ("▁", "<"), ("i", "n")]
    pieces += [left + right for left, right in merges if left + right not in pieces]
    vocab = {piece: n for n, piece in enumerate(pieces)}
    model = models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    return with_special(_spaced(model, prepends), "<s>", "</s>", normalized=normalized)


def unigram() -> Tokenizer:
    """Make a tokenizer like T5's: special tokens are the likeliest pieces of their own characters."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    pieces += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    pieces += [(char, -5.0) for char in sorted(set("".join(TEXTS)) - {" "} | {"▁"})] + [("▁the", -3.0)]
    return with_special(_spaced(models.Unigram(pieces, 0, byte_fallback=True), "first"), "<s>", "</s>")


def word_piece() -> Tokenizer:
    """Make a tokenizer like BERT's: lower case, words of characters, what is unknown is a special token."""
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    special = ["[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=special)
    backend.train_from_iterator(TEXTS, trainer)
    return with_special(backend, "[CLS]", "[SEP]")


def words() -> Tokenizer:
    """Whole words, special tokens among them: between spaces they are words like any other."""
    vocab = {word: n for n, word in enumerate(["<unk>", "<s>", "</s>", "the", "user:", "assistant"])}
    backend = Backend(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return with_special(backend, "<s>", "</s>")


def folding() -> Tokenizer:
    """Looks for special tokens in text that it has normalized, so that `＜S＞` is one as well."""
    backend = Backend(models.BPE())
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+|\w+|[^\w\s]+"), "isolated")
    backend.train_from_iterator(
        [text.lower() for text in TEXTS], trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>"])
    )
    return with_special(backend, "<s>", "</s>", normalized=True)


def with_special(
    backend: Backend, start: str, end: str, *, normalized: bool = False, template: str = TEMPLATE
) -> Tokenizer:
    tokens = [AddedToken(token, special=True, normalized=normalized) for token in (start, end)]
    backend.add_special_tokens(tokens)
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    written = template.replace("START", repr(start)).replace("END", repr(end))
    wrapper = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=written)
    return Tokenizer(wrapper.backend_tokenizer, lambda: wrapper)


def _spaced(model: Model, prepends: str) -> Backend:
    backend = Backend(model)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    if prepends == "normalizer":
        steps: Sequence[normalizers.Normalizer] = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        backend.normalizer = normalizers.Sequence(list(steps))
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepends, split=False)
    return backend
