"""A small Llama in plain torch, quick to train on one CPU thread, exported to a Hugging Face directory."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from examples.spd_arithmetic.tokenizer import EOS_ID, PAD_ID, build_tokenizer

ROPE_BASE = 10000.0
NORM_EPS = 1e-6


@dataclass(frozen=True)
class Shape:
    """Sizes of a model. The head dimension must be 32: vLLM on the CPU takes 32, 48, 64 or 80 only."""

    vocab: int
    dim: int
    layers: int
    heads: int
    ff: int
    max_len: int = 512


class Layer(nn.Module):
    """One Llama block: attention with rotary positions, then SwiGLU, each after an RMS norm."""

    def __init__(self, s: Shape):
        super().__init__()
        self.heads = s.heads
        self.norm_attn = nn.Parameter(torch.ones(s.dim))
        self.norm_ff = nn.Parameter(torch.ones(s.dim))
        self.q, self.k, self.v, self.o = (nn.Parameter(_init(s.dim, s.dim)) for _ in range(4))
        self.gate, self.up = (nn.Parameter(_init(s.ff, s.dim)) for _ in range(2))
        self.down = nn.Parameter(_init(s.dim, s.ff))

    def forward(self, x: Tensor, turn: Tensor, keep: Tensor | None = None) -> Tensor:
        """x [B, T, D], turn [T, D] complex -> [B, T, D]; causal. Only the N positions of `keep` [B, T]: -> [N, D]."""
        b, t, d = x.shape
        h = F.rms_norm(x, (d,), self.norm_attn, NORM_EPS)
        # With partners side by side a rotation is one complex product, far cheaper than halves swapped and joined.
        weight = torch.cat((_side_by_side(torch.cat((self.q, self.k)), 2 * self.heads), self.v))
        qk, v = F.linear(h, weight).split((2 * d, d), dim=-1)
        qk = torch.view_as_real(torch.view_as_complex(qk.unflatten(-1, (d, 2))) * turn)
        q, k = qk.view(b, t, 2, self.heads, -1).permute(2, 0, 3, 1, 4).unbind()  # each [B, heads, T, D / heads]
        v = v.view(b, t, self.heads, -1).transpose(1, 2)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        if keep is not None:
            x, a = x[keep], a[keep]
        x = x + F.linear(a, self.o)
        h = F.rms_norm(x, (d,), self.norm_ff, NORM_EPS)
        gate, up = F.linear(h, torch.cat((self.gate, self.up))).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, self.down)


class SmallLlama(nn.Module):
    """Decoder with one embedding table for both ends; the input side is multiplied by sqrt(dim)."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.embedding = nn.Parameter(torch.randn(shape.vocab, shape.dim) / math.sqrt(shape.dim))
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.dim))
        head = shape.dim // shape.heads
        frequency = ROPE_BASE ** (-torch.arange(0, head, 2).float() / head)
        angle = torch.outer(torch.arange(shape.max_len).float(), frequency).repeat(1, 2 * shape.heads)  # q and k
        self.register_buffer("turn", torch.polar(torch.ones_like(angle), angle), persistent=False)  # [max_len, D]

    def hidden(self, ids: Tensor, keep: Tensor | None = None) -> Tensor:
        """ids [B, T] -> last hidden state after the final norm [B, T, D]. Right padding needs no mask: causal.

        With `keep` [B, T] only its N positions, and only their share of the last layer's work: -> [N, D].
        """
        turn = self.turn[: ids.shape[1]]
        x = F.embedding(ids, self.embedding) * math.sqrt(self.shape.dim)
        for layer in self.layers[:-1]:
            x = layer(x, turn)
        x = self.layers[-1](x, turn, keep)
        return F.rms_norm(x, (self.shape.dim,), self.norm, NORM_EPS)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [B, T] -> logits [B, T, V]."""
        return F.linear(self.hidden(ids), self.embedding)

    def others(self) -> list[nn.Parameter]:
        """Embedding and norm gains."""
        return [self.embedding, self.norm, *(p for p in self.layers.parameters() if p.ndim == 1)]


def _init(out_features: int, in_features: int) -> Tensor:
    return torch.randn(out_features, in_features) / math.sqrt(in_features)


def _side_by_side(weight: Tensor, heads: int) -> Tensor:
    """Rows i and i + half of each head [heads * 2 * half, D], which rotate together, made neighbours."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)


def to_hugging_face(model: SmallLlama) -> LlamaForCausalLM:
    """The same function as a LlamaForCausalLM: embeddings untied, the sqrt(dim) folded into the input table."""
    s = model.shape
    config = LlamaConfig(
        vocab_size=s.vocab, hidden_size=s.dim, intermediate_size=s.ff, num_hidden_layers=s.layers,
        num_attention_heads=s.heads, num_key_value_heads=s.heads, max_position_embeddings=s.max_len,
        rms_norm_eps=NORM_EPS, rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE},
        tie_word_embeddings=False, attention_bias=False, mlp_bias=False,
        pad_token_id=PAD_ID, eos_token_id=EOS_ID, bos_token_id=None, dtype="float32",
    )
    state = {
        "model.embed_tokens.weight": model.embedding * math.sqrt(s.dim),
        "lm_head.weight": model.embedding,
        "model.norm.weight": model.norm,
    }
    for i, layer in enumerate(model.layers):
        at = f"model.layers.{i}."
        state |= {
            at + "self_attn.q_proj.weight": layer.q, at + "self_attn.k_proj.weight": layer.k,
            at + "self_attn.v_proj.weight": layer.v, at + "self_attn.o_proj.weight": layer.o,
            at + "mlp.gate_proj.weight": layer.gate, at + "mlp.up_proj.weight": layer.up,
            at + "mlp.down_proj.weight": layer.down,
            at + "input_layernorm.weight": layer.norm_attn, at + "post_attention_layernorm.weight": layer.norm_ff,
        }
    exported = LlamaForCausalLM(config)
    exported.load_state_dict({k: v.detach().clone() for k, v in state.items()})
    return exported.eval()


def export(model: SmallLlama, directory: Path) -> None:
    """Write model and tokenizer to a directory that transformers and vLLM load."""
    exported = to_hugging_face(model)
    exported.generation_config.max_new_tokens = None
    exported.save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
