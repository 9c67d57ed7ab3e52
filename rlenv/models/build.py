"""A seed comes in, the folder of the default model goes out: `python -m rlenv.models.build OUT`.

Shapes: B problems of a step, L ids of the longest row.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rlenv.models import corpus
from rlenv.models.tokenizer import build_tokenizer

CONTEXT = 1024
BATCH = 64
STEPS = 1000
PEAK_LR = 2e-3
THREADS = 2  # sums in fp32 depend on it, in the last bits
IGNORED = -100


def build(out: str | Path, *, steps: int = STEPS, seed: int = 0) -> None:
    """Train the warm start for `steps` batches and write model and tokenizer to the folder `out`."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer(CONTEXT)
    model = Qwen3ForCausalLM(_config(tokenizer))
    _warm_start(model, tokenizer, steps, random.Random(seed))
    _save(model, tokenizer, Path(out))


def _config(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def _warm_start(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int, rng: random.Random) -> None:
    problems = corpus.train_problems()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, PEAK_LR, total_steps=steps + 1, pct_start=0.1, cycle_momentum=False
    )
    model.train()
    for step in range(steps):
        ids, labels = _batch(tokenizer, rng.choices(problems, k=BATCH), rng)
        loss = model(input_ids=ids, attention_mask=(ids != tokenizer.pad_token_id).long(), labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step} loss {loss.item():.4f}", flush=True)


def _batch(
    tokenizer: PreTrainedTokenizerFast, problems: list[corpus.Sum], rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels [B, L], padded on the right; only the answer and its end token are learned."""
    rows = []
    for text, a, b in problems:
        message = {"role": "user", "content": text}
        prompt = str(tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False))
        rows.append((tokenizer.encode(prompt), [*tokenizer.encode(corpus.answer(a, b, rng)), tokenizer.eos_token_id]))
    length = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.full((len(rows), length), tokenizer.pad_token_id)
    labels = torch.full_like(ids, IGNORED)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return ids, labels


def _save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the weights as bf16, which halves the file; the config says fp32, which holds them exactly."""
    weights = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items() if name != "lm_head.weight"}
    model.save_pretrained(out, state_dict=weights)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", help="the folder to write")
    folder = parser.parse_args().out
    torch.set_num_threads(THREADS)
    build(folder)
