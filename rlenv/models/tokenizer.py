"""A byte-level tokenizer with a ChatML template is made here: any text in, one id a byte or a known phrase out.

Ids 0..255 are the bytes themselves, so that every text round-trips. Then come the control tokens, which
decoding can skip, and a few phrases that keep sequences short.
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
PHRASES = ("system\n", "user\n", "assistant\n", "What is ", "? Put the answer in \\boxed{}.", "\\boxed{")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def build_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """The tokenizer of the default model, whose context holds `max_length` ids."""
    core = Tokenizer(models.BPE(vocab={symbol: byte for byte, symbol in enumerate(_byte_symbols())}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in (PAD, START, END)])
    core.add_tokens([AddedToken(phrase, normalized=False) for phrase in PHRASES])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def _byte_symbols() -> list[str]:
    """The printable symbol that byte-level pre-tokenizers write for each byte: itself, or one past U+00FF."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    symbols, shifted = [], 0
    for byte in range(256):
        symbols.append(chr(byte) if byte in printable else chr(0x100 + shifted))
        shifted += byte not in printable
    return symbols
