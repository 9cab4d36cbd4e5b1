"""A small decoder whose tokens depend on all previous keys and values, for engines with a paged cache."""

import torch
from torch.nn import functional


class Decoder:
    """Layers of causal attention with random weights; ``heads`` of keys and values, twice as many of queries;
    ``windows``: of each layer the number of tokens that a token sees, itself included, or 0 for all."""

    def __init__(self, windows, heads, dim, vocabulary, longest, width=64):
        self.heads, self.dim, self.windows = heads, dim, windows
        self.tokens, self.places = torch.randn(vocabulary, width), torch.randn(longest, width)
        self.layers = [
            (
                4 * torch.randn(width, 2 * heads * dim) / width**0.5,  # attention concentrates on a few tokens
                torch.randn(width, 2 * heads * dim) / width**0.5,
                torch.randn(2 * heads * dim, width) / (2 * heads * dim) ** 0.5,
            )
            for _ in windows
        ]
        self.out = torch.randn(width, vocabulary)

    def seen(self, layer, begin):
        """The tokens before ``begin`` that tokens from there on see."""
        return slice(max(0, begin - self.windows[layer] + 1) if self.windows[layer] else 0, begin)

    def __call__(self, tokens, begin, past):
        """Continue after ``begin`` tokens.

        Args:
            tokens: the ones to compute.
            begin: how many are before them.
            past: of each layer [heads, :meth:`seen`, 2 dim], keys and values of those.

        Returns:
            The logits behind the last token, and keys and values of the computed ones.
        """
        n, made = len(tokens), []
        x = self.tokens[tokens] + self.places[begin : begin + n]
        for (to_queries, to_cache, back), before, window in zip(self.layers, past, self.windows, strict=True):
            have = before.shape[1]
            seen = torch.ones(n, have + n, dtype=torch.bool).tril(have).triu(have - window + 1 if window else -n)
            inner = functional.layer_norm(x, x.shape[-1:])
            queries = (inner @ to_queries).view(n, 2 * self.heads, self.dim).transpose(0, 1)
            made.append((inner @ to_cache).view(n, self.heads, 2 * self.dim).transpose(0, 1))
            keys, values = torch.cat([before, made[-1]], 1).repeat_interleave(2, 0).split(self.dim, -1)
            found = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=seen)
            x = x / 2 + found.transpose(0, 1).reshape(n, -1) @ back
        return functional.layer_norm(x, x.shape[-1:])[-1] @ self.out, made
