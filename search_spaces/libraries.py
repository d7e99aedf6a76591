"""What the libraries that stacks are built on do unless they are told otherwise (catalog/libraries)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TypeVar

from pydantic import PositiveInt

from .cluster import Figure, Sourced
from .documents import read_document, to_record
from .layer_kinds import Frozen

Library = TypeVar("Library", bound=Frozen)


class DeepEP(Frozen):
    """Kernels that exchange tokens between the devices of experts."""

    multiprocessors: PositiveInt
    scale_bytes: PositiveInt
    scaled_values: PositiveInt
    source: str

    @property
    def fp8_bytes(self) -> float:
        """Bytes per value of a token that is sent in FP8, its scales included."""
        return 1.0 + self.scale_bytes / self.scaled_values


class GradientBuckets(Frozen):
    """Parameters of a bucket unless told otherwise: so many at least, and so many for every replica."""

    least: PositiveInt
    each_replica: PositiveInt
    source: str


class MegatronCore(Frozen):
    """What Megatron-LM, Megatron-Bridge and MindSpeed-LLM share."""

    gradient_buckets: GradientBuckets
    experts_of_a_token: Sourced
    latent_attention: Mapping[str, PositiveInt]  # widths


class MindSpeedLLM(Frozen):
    """What MindSpeed-LLM adds."""

    indexer: Mapping[str, PositiveInt]  # of latent attention that picks the tokens it looks at
    shared_weight_bytes: Sourced


class PyTorch(Frozen):
    """The caching allocator."""

    reserved_over_allocated: Figure


class TorchAO(Frozen):
    """Quantised training."""

    rowwise_cast_bytes: Sourced


class TorchTitan(Frozen):
    """Its configuration's defaults."""

    local_batch_size: Sourced


@cache
def deep_ep() -> DeepEP:
    return _library("deepep", DeepEP)


@cache
def megatron_core() -> MegatronCore:
    return _library("megatron-core", MegatronCore)


@cache
def mindspeed_llm() -> MindSpeedLLM:
    return _library("mindspeed-llm", MindSpeedLLM)


@cache
def pytorch() -> PyTorch:
    return _library("pytorch", PyTorch)


@cache
def torchao() -> TorchAO:
    return _library("torchao", TorchAO)


@cache
def torchtitan() -> TorchTitan:
    return _library("torchtitan", TorchTitan)


def _library(name: str, kind: type[Library]) -> Library:
    path = Path(__file__).parent / "catalog" / "libraries" / f"{name}.yaml"
    return to_record(kind, read_document(path), path.name)
