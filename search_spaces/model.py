"""ModelSpec: an architecture as kinds of layers, and the one list of its weights.

A model is an embedding, an ordered sequence of decoder layers, a final norm, an LM head and optional multi-token-prediction
(MTP) layers. The kinds are defined in layer_kinds, the weights of each in tensors; this module is where the rest finds both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from itertools import chain
from typing import Any, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from . import tensors
from .layer_kinds import (
    Attention,
    CompressedAttention,
    Count,
    DenseMlp,
    Frozen,
    LatentAttention,
    LayerKind,
    LinearAttention,
    Mamba2,
    Mixer,
    Mlp,
    MoeMlp,
    Mtp,
    RopeScaling,
)
from .layer_pattern import NAME, expand
from .tensors import Sharding, Tensor, weight

__all__ = [
    "Attention",
    "CompressedAttention",
    "DenseMlp",
    "Frozen",
    "LatentAttention",
    "LayerKind",
    "LinearAttention",
    "Mamba2",
    "Mixer",
    "Mlp",
    "ModelSpec",
    "MoeMlp",
    "Mtp",
    "RopeScaling",
    "Sharding",
    "Tensor",
]


class ModelSpec(Frozen):
    """A language model's architecture.

    `layers` lists the decoder layers in order by kind name; an item may repeat a kind ("58*moe") or a sequence in
    parentheses ("8*(linear linear linear full)").
    """

    name: str
    hidden_size: Count
    vocab_size: Count
    max_position_embeddings: Count
    kinds: dict[str, LayerKind] = Field(min_length=1)
    layers: tuple[str, ...] = Field(min_length=1)
    tied_embeddings: bool = False
    learned_positions: bool = False
    norm: Literal["rms", "layer"] = "rms"  # a layer norm has a bias beside its weight
    residual_streams: Count = 1  # hyper-connections (DeepSeek-V4): hidden states of hidden_size carried between layers per token
    mtp: Mtp | None = None
    final_norm: bool = True
    norm_epsilon: PositiveFloat | None = None  # this and the next two cost nothing: exports carry them
    rope_theta: PositiveFloat | None = None
    rope_scaling: RopeScaling | None = None
    source: str = ""

    @model_validator(mode="after")
    def _check_kinds(self) -> Self:
        known = ", ".join(self.kinds)
        for name in self.kinds:
            if not NAME.fullmatch(name):
                raise ValueError(f"kind name {name!r} must start with a letter and hold only letters, digits, '_', '-' and '.'")
        for name in expand(self.layers):
            if name not in self.kinds:
                raise ValueError(f"layers names the kind {name!r}, which is not defined; use one of {known} or add it to kinds")
        if self.mtp is not None and self.mtp.kind not in self.kinds:
            raise ValueError(f"mtp.kind is {self.mtp.kind!r}, which is not defined; use one of {known} or add it to kinds")
        return self

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A changed copy, checked anew. pydantic's own would keep the cached tensors of the old fields."""
        return type(self)(**{name: getattr(self, name) for name in type(self).model_fields} | dict(update or {}))

    def with_vocab(self, vocab_size: int) -> Self:
        """The same model with a vocabulary padded or cut to `vocab_size`."""
        return self.model_copy(update={"vocab_size": vocab_size})

    @cached_property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of every decoder layer in order; MTP layers are not among them."""
        return expand(self.layers)

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)

    @cached_property
    def moe_kinds(self) -> tuple[str, ...]:
        """Names of the kinds with a mixture of experts that some layer, MTP included, is of."""
        used = {*self.layer_kinds, *([self.mtp.kind] if self.mtp else [])}
        return tuple(name for name, kind in self.kinds.items() if name in used and isinstance(kind.mlp, MoeMlp))

    @property
    def is_moe(self) -> bool:
        return bool(self.moe_kinds)

    def layer_tensors(self, kind: str) -> tuple[Tensor, ...]:
        """One layer's weights: mixer, feed-forward part, norms, extras."""
        return self._tensors_of[kind]

    @cached_property
    def _tensors_of(self) -> dict[str, tuple[Tensor, ...]]:
        return {
            name: tuple(tensors.layer_tensors(kind, self.hidden_size, self.norm, self.residual_streams))
            for name, kind in self.kinds.items()
        }

    def embedding_tensors(self) -> tuple[Tensor, ...]:
        """The word embedding and, where positions are learned, theirs. A tied LM head is this word embedding."""
        word = weight("embedding.word", self.vocab_size * self.hidden_size)
        if not self.learned_positions:
            return (word,)
        return (word, weight("embedding.position", self.max_position_embeddings * self.hidden_size, "replicated"))

    def head_tensors(self) -> tuple[Tensor, ...]:
        """Final norm, the merge of residual streams, and the LM head when it is not the embedding."""
        head = () if self.tied_embeddings else (weight("lm_head", self.vocab_size * self.hidden_size),)
        norm = tensors.norm("final_norm", int(self.final_norm), self.hidden_size, self.norm)
        return (*norm, *tensors.hyper_connection_head(self.residual_streams, self.hidden_size), *head)

    def mtp_tensors(self) -> tuple[Tensor, ...]:
        """One MTP layer: the 2h × h projection, its norms and a decoder layer of its kind; the shared embedding and head not."""
        if self.mtp is None:
            return ()
        h = self.hidden_size
        norms = tensors.norm("mtp.norm", self.mtp.norms, h, self.norm)
        merge = tensors.hyper_connection_head(self.residual_streams, h)
        return (weight("mtp.projection", 2 * h * h), *norms, *merge, *self.layer_tensors(self.mtp.kind))

    def parameters(self, mtp: bool = False) -> int:
        """All weights, each once; those of the MTP layers only on request, as most publishers leave them out."""
        total = sum(tensor.numel for tensor in chain(self._decoder_tensors(), self.embedding_tensors(), self.head_tensors()))
        if mtp and self.mtp is not None:
            total += self.mtp.layers * sum(tensor.numel for tensor in self.mtp_tensors())
        return total

    def active_parameters(self, embedding: bool = True, head: bool = True) -> int:
        """Weights one token uses: all but the experts it is not sent to; MTP layers left out.

        Publishers differ on counting the input embedding and the LM head. A tied matrix is both and counts, once, for either;
        learned positions always count.
        """
        word = self.vocab_size * self.hidden_size
        total = sum(tensor.active_numel for tensor in chain(self._decoder_tensors(), self.embedding_tensors(), self.head_tensors()))
        if self.tied_embeddings:
            return total if embedding or head else total - word
        return total - word * ((not embedding) + (not head))

    def _decoder_tensors(self) -> chain[Tensor]:
        layers = Counter(self.layer_kinds)
        return chain.from_iterable(self.layer_tensors(kind) * count for kind, count in layers.items())
