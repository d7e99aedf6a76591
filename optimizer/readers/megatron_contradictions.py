"""Values of Megatron's options that contradict each other, which it refuses while it reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from ...search_spaces.libraries import megatron_core
from ...search_spaces.rulebook.terms import ARGUMENTS
from ...search_spaces.rulebook.terms import CONFIG as TRANSFORMER
from ..exporters.megatron_rotary import LLAMA3_FACTOR
from .job import Finding
from .megatron_combinations import given_options
from .megatron_model import pattern_length, positions
from .megatron_rotary import figure
from .options import Knobs

SPECS = "Megatron-LM megatron/core/models/gpt/gpt_layer_specs.py"
ATTENTION = "Megatron-LM megatron/core/transformer/attention.py"
PAIRED_DISPATCHERS = ("alltoall", "flex")
"""Dispatchers whose exchanges Megatron-Core pairs with another micro-batch's compute."""
PADDED, CAPACITY = "--moe-pad-expert-input-to-capacity", "--moe-expert-capacity-factor"
OFF = ("", "fp32")
"""Types of an optimizer's moments that every optimizer has."""


def contradictions(knobs: Knobs, degrees: Mapping[str, int], experts: int, framework: str) -> Iterator[Finding]:
    """What the framework refuses of values beside values; of Megatron-Core's own checks those that its newer versions have too."""
    yield from _pattern(knobs, experts)
    if not knobs.parsed:
        return
    yield from _positions(knobs)
    yield from _heads(knobs)
    yield from _routing(knobs, experts)
    yield from _saved_in_parts(knobs, degrees)
    if framework != "mindspeed-llm":  # which has softmax with a bias, and leaves MC2 off unless its code is changed
        yield from _biased(knobs)
        yield from _overlapped_tp(knobs, degrees["tp"])
    if framework == "megatron-lm":
        yield from _cp_levels(knobs, degrees["cp"])
        yield from _cp_kinds(knobs, degrees["cp"])
        yield from _exchanges(knobs)
        yield from _paired_passes(knobs, degrees)
        yield from _offloaded_and_redone(knobs)
        yield from _torch_fsdp(knobs, degrees)
        yield from _chunks_in_step(knobs, degrees)
        yield from _predicted(knobs)
        _stretched(knobs)


def undefaulted(knobs: Knobs, framework: str) -> Iterator[Finding]:
    """Values that need an option beside them which is not there."""
    if framework != "megatron-lm" or not knobs.parsed:
        return
    kinds = (knobs.text("cp_type") or "").split()
    if "a2a+p2p" in kinds and not knobs.has("cp_hierarchy"):
        needed = "--hierarchical-context-parallel-sizes beside it, whose product is CP's size"
        sentence = f"{knobs.names['cp_type']} a2a+p2p needs {needed}."
        yield Finding("C045", sentence, "it says how wide the all-to-all and the ring are", ARGUMENTS)
    moments = [knob for knob in ("first_moment", "second_moment") if (knobs.text(knob) or "") not in OFF]
    if moments and not knobs.has("precise_optimizer"):
        sentence = f"{' and '.join(knobs.names[knob] for knob in moments)} need --use-precision-aware-optimizer beside them"
        yield Finding("C123", f"{sentence}.", "other optimizers keep FP32 moments", "Megatron-LM megatron/core/optimizer")
    selective = knobs.has("recompute_activations") or knobs.text("recompute") == "selective"
    if selective and "moe_act" in (knobs.text("recompute_modules") or "").split() and not knobs.has("grouped_gemm"):
        sentence = f"{knobs.names['recompute_modules']} moe_act needs --moe-grouped-gemm beside it."
        yield Finding("C101", sentence, "only grouped experts redo their activation alone", TRANSFORMER)
    options = given_options(knobs)
    if PADDED in options and CAPACITY not in options:
        yield Finding("C083", f"{PADDED} needs {CAPACITY} beside it.", "it says how far experts are filled up", TRANSFORMER)
    if knobs.has("fsdp") and (knobs.text("checkpoint_format") or "") != "fsdp_dtensor":
        sentence = f"{knobs.names['fsdp']} needs --ckpt-format fsdp_dtensor beside it."
        yield Finding("C108", sentence, "its shards are saved in that format alone", ARGUMENTS)


def _positions(knobs: Knobs) -> Iterator[Finding]:
    most, length = knobs.whole("max_positions"), knobs.whole("seq_len")
    if most is not None and length is not None and most < length:
        said = f"{knobs.names['max_positions']} {most} is less than {knobs.names['seq_len']} {length}"
        yield Finding("C043", f"{said}; {length} would do.", "every token has a position", ARGUMENTS)


def _heads(knobs: Knobs) -> Iterator[Finding]:
    """Widths of heads, and heads that share keys and values."""
    hidden, heads, groups = (knobs.whole(knob) for knob in ("hidden_size", "heads", "kv_heads"))
    if heads and hidden and hidden % heads and not knobs.has("head_dim"):
        said = f"{knobs.names['heads']} {heads} does not divide {knobs.names['hidden_size']} {hidden}"
        yield Finding("C024", f"{said}; give --kv-channels, or other heads.", "heads are as wide as their share", ARGUMENTS)
    if heads and groups and heads % groups and knobs.has("grouped_query") and not knobs.has("mla"):
        said = f"{knobs.names['kv_heads']} {groups} does not divide {knobs.names['heads']} {heads}"
        yield Finding("C021", f"{said}.", "every group has as many heads", ATTENTION)
    if groups and heads and groups != heads and not knobs.has("grouped_query") and not knobs.has("mla"):
        said = f"{knobs.names['kv_heads']} {groups} does nothing without --group-query-attention"
        knobs.told.append(Finding("C021", f"{said}: each of the {heads} heads has KV of its own."))


def _pattern(knobs: Knobs, experts: int) -> Iterator[Finding]:
    """Which layers are MoE, listed for as many as there are."""
    layers = knobs.whole("layers")
    if (other := pattern_length(knobs, layers, experts)) is not None:
        sentence = f"{knobs.names['moe_pattern']} is a list of {other} layers, {knobs.names['layers']} is {layers}."
        yield Finding("C086", sentence, "it says of every layer whether it is MoE", SPECS)


def _routing(knobs: Knobs, experts: int) -> Iterator[Finding]:
    """Tokens that go to more experts, or more groups of them, than there are."""
    if not experts:
        return
    chosen = knobs.whole("top_k") or int(megatron_core().experts_of_a_token.value)
    if chosen > experts:
        said = f"{knobs.names['top_k']} {chosen}" if knobs.has("top_k") else f"{chosen} experts a token, Megatron's default,"
        sentence = f"{said} is more than the {experts} experts that there are."
        yield Finding("C082", sentence, "a token goes to an expert once", "Megatron-LM megatron/core/transformer/moe/moe_utils.py")
    groups, picked = knobs.whole("routing_groups"), knobs.whole("routing_groups_topk")
    if groups and picked and experts % groups:
        sentence = f"{knobs.names['routing_groups']} {groups} does not divide the {experts} experts."
        yield Finding("C082", sentence, "groups have as many experts each", TRANSFORMER)
    if groups and picked and picked > groups:
        sentence = f"{knobs.names['routing_groups_topk']} {picked} is more than {knobs.names['routing_groups']} {groups}."
        yield Finding("C082", sentence, "a token's groups are some of all", TRANSFORMER)


def _biased(knobs: Knobs) -> Iterator[Finding]:
    """Scores to which experts' biases are added, of which softmax has none that stand alone."""
    if knobs.has("experts") and knobs.has("expert_bias") and (knobs.text("score_function") or "softmax") == "softmax":
        sentence = f"{knobs.names['expert_bias']} needs --moe-router-score-function sigmoid, not softmax."
        yield Finding("C083", sentence, "the bias is added to scores that stand alone", TRANSFORMER)


def _cp_levels(knobs: Knobs, cp: int) -> Iterator[Finding]:
    """Sizes of CP's levels, which multiply to it."""
    words = (knobs.text("cp_hierarchy") or "").split()
    if not words or not all(word.isdigit() and len(word) < 7 for word in words):
        return
    if (product := prod(map(int, words))) != cp:
        said = f"{knobs.names['cp_hierarchy']} {' '.join(words)} multiply to {product}, CP's size is {cp}"
        yield Finding("C045", f"{said}.", "the levels make up CP's group", ARGUMENTS)


def _cp_kinds(knobs: Knobs, cp: int) -> Iterator[Finding]:
    """Kinds of CP, one for all layers or one for each."""
    kinds, layers = (knobs.text("cp_type") or "").split(), knobs.whole("layers")
    if cp > 1 and layers and len(kinds) > 1 and len(kinds) != layers:
        said = f"{knobs.names['cp_type']} has {len(kinds)} values for {layers} layers; give one, or {layers}"
        yield Finding("C046", f"{said}.", "a kind is every layer's, or that of one", TRANSFORMER)


def queues(knobs: Knobs, connections: str | None) -> Iterator[Finding]:
    """FSDP under a script's CUDA_DEVICE_MAX_CONNECTIONS."""
    option = next((knobs.names[knob] for knob in ("fsdp", "torch_fsdp") if knobs.has(knob)), None)
    if option is not None and knobs.parsed and connections == "1":
        sentence = f"{option} does not go with CUDA_DEVICE_MAX_CONNECTIONS=1; unset it, or give it more than 1."
        yield Finding("C108", sentence, "what FSDP gathers needs a queue beside the compute's", ARGUMENTS)


def _saved_in_parts(knobs: Knobs, degrees: Mapping[str, int]) -> Iterator[Finding]:
    """Layers' inputs that TP ranks keep a part of each."""
    if not knobs.has("saved_in_parts"):
        return
    option = knobs.names["saved_in_parts"]
    selective = knobs.has("recompute_activations") or knobs.text("recompute") == "selective"
    if degrees["tp"] == 1:
        yield Finding("C102", f"{option} needs tp > 1.", "TP ranks share what is kept", ARGUMENTS)
    if selective or not knobs.has("recompute"):
        yield Finding("C102", f"{option} needs --recompute-granularity full.", "inputs of whole layers are shared", ARGUMENTS)
    if degrees["tp"] > 1 and knobs.has("sequence_parallel"):
        sentence = f"{option} does not go with {knobs.names['sequence_parallel']}; leave one of them out."
        yield Finding("C102", sentence, "SP has cut the inputs already", TRANSFORMER)


def _overlapped_tp(knobs: Knobs, tp: int) -> Iterator[Finding]:
    """TP's exchanges beside its GEMMs need SP, which is turned off without a TP group, given or not."""
    if knobs.has("overlap_tp") and knobs.has("sequence_parallel") and tp == 1:
        sentence = f"{knobs.names['overlap_tp']} needs tp > 1: {knobs.names['sequence_parallel']} is turned off at tp = 1."
        yield Finding("C130", sentence, "there is nothing to exchange", ARGUMENTS)


def _exchanges(knobs: Knobs) -> Iterator[Finding]:
    """Dispatchers that have no part which other options ask for."""
    dispatcher = knobs.text("dispatcher") or "allgather"
    shared = "--moe-shared-expert-overlap"
    if knobs.whole("shared_width", 0) == 0:
        sentence = f"{knobs.names['shared_width']} 0 is no width: leave the option out where no expert is shared."
        yield Finding("C022", sentence, "a shared expert is as wide as is said", TRANSFORMER)
    if knobs.has("experts") and shared in given_options(knobs) and dispatcher not in PAIRED_DISPATCHERS:
        sentence = f"{shared} needs --moe-token-dispatcher-type alltoall or flex, not {dispatcher}."
        yield Finding("C083", sentence, "shared experts run beside the exchange of tokens", TRANSFORMER)
    if shared in given_options(knobs) and "shared_experts" in (knobs.text("recompute_modules") or "").split():
        sentence = f"{shared} does not go with recompute of shared_experts; leave one of them out."
        yield Finding("C101", sentence, "what runs beside the exchange is kept", TRANSFORMER)
    if knobs.has("deepep_alone") and dispatcher != "flex":
        sentence = f"{knobs.names['deepep_alone']} needs --moe-token-dispatcher-type flex, not {dispatcher}."
        yield Finding("C083", sentence, "DeepEP is one of that dispatcher's backends", TRANSFORMER)


def _paired_passes(knobs: Knobs, degrees: Mapping[str, int]) -> Iterator[Finding]:
    """What Megatron-Core asks of passes that hide each other's exchange of tokens."""
    if not knobs.has("overlap_ep"):
        return
    dispatcher = knobs.text("dispatcher") or "allgather"
    depth = knobs.whole("recompute_layers", 0)
    chunks = any(map(knobs.has, ("vpp", "vpp_layers", "layout")))
    wrong = {
        "needs ep > 1": degrees["ep"] == 1,
        "needs chunks of stages (--num-virtual-stages-per-pipeline-rank) on pp > 1": degrees["pp"] > 1 and not chunks,
        f"needs --moe-token-dispatcher-type alltoall or flex, not {dispatcher}": dispatcher not in PAIRED_DISPATCHERS,
        "does not go with full recompute": knobs.text("recompute") == "full" or knobs.has("recompute_method") or depth is not None,
        "does not go with recompute of moe": "moe" in (knobs.text("recompute_modules") or "").split(),
        "does not go with more than one MTP layer": (knobs.whole("mtp", 0) or 0) > 1,
        "does not go with --moe-shared-expert-overlap": "--moe-shared-expert-overlap" in given_options(knobs),
    }
    for asked in (each for each, broken in wrong.items() if broken):
        yield Finding("C084", f"{knobs.names['overlap_ep']} {asked}.", "two micro-batches' passes run side by side", TRANSFORMER)


def _offloaded_and_redone(knobs: Knobs) -> Iterator[Finding]:
    redone = next((knobs.names[each] for each in ("recompute_activations", "recompute") if knobs.has(each)), None)
    if knobs.whole("activation_offload_layers", 0) and redone is not None:
        sentence = f"{knobs.names['activation_offload_layers']} does not go with {redone}; leave one of them out."
        yield Finding("C103", sentence, "what is computed anew is not kept to be offloaded", TRANSFORMER)


def _torch_fsdp(knobs: Knobs, degrees: Mapping[str, int]) -> Iterator[Finding]:
    """PyTorch's own FSDP shards without a pipeline and without experts spread."""
    for name in (each for each in ("pp", "ep") if knobs.has("torch_fsdp") and degrees[each] > 1):
        said = f"{knobs.names['torch_fsdp']} needs {name} = 1, it is {degrees[name]}"
        yield Finding("C107", f"{said}; give --use-megatron-fsdp for both.", "PyTorch's FSDP has no such groups", ARGUMENTS)


def _chunks_in_step(knobs: Knobs, degrees: Mapping[str, int]) -> Iterator[Finding]:
    """Chunks whose sends are not overlapped meet between the same two stages where there are only two."""
    if knobs.has("no_pp_overlap") and degrees["vpp"] > 1 and degrees["pp"] == 2:
        sentence = f"{knobs.names['no_pp_overlap']} with vpp = {degrees['vpp']} needs pp > 2, it is 2; leave the option out."
        yield Finding("C064", sentence, "the same two ranks would send several times at once", ARGUMENTS)


def _stretched(knobs: Knobs) -> None:
    """A factor of rotary positions that GPTModel is not built with (Megatron-LM gpt_builders.py)."""
    if (factor := figure(knobs, "rope_factor")) not in (None, LLAMA3_FACTOR):
        said = f"{knobs.names['rope_factor']} {factor:g} does nothing: Megatron-LM builds its model with {LLAMA3_FACTOR:g}"
        knobs.told.append(Finding("option", f"{said}."))


def _predicted(knobs: Knobs) -> Iterator[Finding]:
    """MTP layers, which embed tokens anew and add no learned positions to them; the model may say which, where no option does."""
    kind = positions(knobs)
    if knobs.whole("mtp", 0) and knobs.has("positions") and kind not in ("rope", "none"):
        sentence = f"{knobs.names['mtp']} needs --position-embedding-type rope or none, not {kind}."
        yield Finding("C068", sentence, "MTP layers embed tokens without positions", ARGUMENTS)
