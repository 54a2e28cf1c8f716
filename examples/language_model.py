"""A small GPT on text: gradient accumulation, clipping and a learning rate with warm-up.

    echelon run --workers 4 examples/language_model.py --text shakespeare.txt --steps 2000

Without `--text` it reads the topics of Python's own manual. One optimizer step sees `--batch` windows of
all workers together, in `--pieces` backward passes, for batches that do not fit into memory.
"""

import argparse
import itertools
import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import echelon

CONTEXT = 64


def read(path: Path | None) -> tuple[torch.Tensor, list[str]]:
    """The text as numbers, and the character of each number."""
    if path is None:
        from pydoc_data import topics

        text = "\n".join(topics.topics.values())
    else:
        text = path.read_text()
    characters = sorted(set(text))
    number = {character: index for index, character in enumerate(characters)}
    return torch.tensor([number[character] for character in text]), characters


class Block(nn.Module):
    """Causal self-attention, then a wider layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.heads = heads
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add attention to the input, then the wider layer."""
        batch, length, width = x.shape
        parts = self.queries_keys_values(self.before(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.wide(self.between(x))


class Gpt(nn.Module):
    """Predicts each next character; input and output share their embedding."""

    def __init__(self, characters: int, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(characters, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of every next character."""
        embedded = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        return self.head(self.last(self.blocks(embedded)))


def main() -> None:
    """The whole script."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--text", type=Path)
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--batch", type=int, default=32, help="windows per optimizer step, of all workers")
    options.add_argument("--pieces", type=int, default=2, help="backward passes per optimizer step")
    options.add_argument("--lr", type=float, default=3e-3)
    given = options.parse_args()

    session = echelon.join()
    torch.manual_seed(0)
    numbers, characters = read(given.text)
    windows = numbers[: len(numbers) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    model = Gpt(len(characters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr, weight_decay=0.1)
    warm_up = max(1, given.steps // 10)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warm_up, 0.5 * (1 + math.cos(math.pi * step / given.steps)) + 0.01),
    )
    loader = DataLoader(
        TensorDataset(windows), batch_size=given.batch // given.pieces, shuffle=True, drop_last=True
    )
    model, optimizer, scheduler, loader = session.prepare(model, optimizer, scheduler, loader)
    session.expect_steps(given.steps)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))  # epoch after epoch
    for step in range(given.steps):
        optimizer.zero_grad()
        for piece in range(given.pieces):
            (window,) = next(batches)
            with session.accumulate(piece + 1 < given.pieces):  # only the last pass is reduced
                logits = model(window[:, :-1])
                loss = functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
                (loss / given.pieces).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the same on all workers
        optimizer.step()
        scheduler.step()
        session.log(loss=loss, grad_norm=norm)
        if step % 20 == 0 or step + 1 == given.steps:
            total = session.all_reduce(loss.detach().clone(), "mean")
            if session.is_leader:
                print(f"step {step}: loss {total.item():.3f}, gradient norm {norm.item():.2f}", flush=True)


if __name__ == "__main__":
    main()
