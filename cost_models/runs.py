"""Published measured runs: a CSV's rows, and the one table that turns its vocabulary into ours.

Columns are those of the measured-runs format (id, family, model, accelerator, num_accelerators, tp, pp, …, measured_*, status,
notes); a blank cell means that the source does not say. Nothing here prices anything.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from ..search_spaces.vocabulary import RECOMPUTE_MODULES

if TYPE_CHECKING:
    from ..search_spaces.cluster import ClusterSpec

MEASURED = ("measured_step_time_s", "measured_tokens_per_s_per_device", "measured_tflops_per_device", "measured_mfu")
"""Columns that say how fast a run was, the ones that are believed first in front."""
PEAK = "measured_peak_mem_gib"
LARGEST = 10**9
"""No degree, batch or length of a real run comes near it."""
MEASURABLE = 1e12
"""No measured figure is larger, or smaller than one over it."""
DASHES = frozenset({"-", "–", "—", "?", "na", "n/a", "null"})
"""What stands for a blank wherever it is."""
BLANKS = DASHES | {"none", "unknown"}
"""What stands for a blank where a number is wanted."""
DECORATION = re.compile(r"^[~≈] ?|(?<=\d),(?=\d{3}\b)| ?%$")
"""What numbers are written with: about, thousands apart, and a per cent sign."""


class Unpriceable(ValueError):  # noqa: N818
    """A row that cannot be priced; the message is the reason that it is counted under."""


@dataclass(frozen=True)
class Run:
    """One row; `text` gives a cell, `count` and `number` read it (None where blank).

    `defect` is the reason why the row cannot be read at all, `notes` what was made of a row that was put down carelessly, `cluster`
    the one that it is said to have run on, `stack` what it is taken to have run with, as the vocabulary has it, where that does
    not follow from its own words alone.
    """

    cells: Mapping[str, str] = field(repr=False)
    id: str
    defect: str = ""
    notes: tuple[str, ...] = ()
    cluster: ClusterSpec | None = field(default=None, repr=False)
    stack: str = ""

    def text(self, column: str) -> str:
        return self.cells.get(column, "")

    def count(self, column: str) -> int | None:
        """A whole number from 1 to LARGEST; Unpriceable where the cell holds something else."""
        value = self.number(column)
        if value is None:
            return None
        if not 1 <= value <= LARGEST or value != int(value):
            raise Unpriceable(f"{column} is not a whole number from 1 to {LARGEST}")
        return int(value)

    def number(self, column: str) -> float | None:
        """A finite number; Unpriceable where the cell holds something else."""
        text = self.text(column)
        if not text or text.lower() in BLANKS:
            return None
        try:
            value = float(DECORATION.sub("", text))
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise Unpriceable(f"{column} is not a number")
        return value

    def measure(self, column: str) -> float | None:
        """A measured figure, which is above 0 (None where blank); Unpriceable where the cell holds something else."""
        value = self.number(column)
        if value is not None and value <= 0:
            raise Unpriceable(f"{column} is not above 0")
        if value is not None and not 1 / MEASURABLE <= value <= MEASURABLE:
            raise Unpriceable(f"{column} is beyond anything measured")
        return value

    def needed(self, column: str) -> int:
        """The same as `count` for a cell that must not be blank."""
        value = self.count(column)
        if value is None:
            raise Unpriceable(f"missing field: {column}")
        return value

    @property
    def family(self) -> str:
        return self.text("family") or "unnamed"

    @property
    def accelerator(self) -> str:
        return self.text("accelerator") or "unnamed"

    @property
    def split(self) -> str:
        return self.text("split").lower() or "test"

    @property
    def status(self) -> str:
        """ok, oom or fail; where the cell is blank ok if anything was measured, else unknown."""
        word = meaning("status", self.text("status"))
        if word != UNTOLD:
            return word
        return "ok" if any(self.text(column) for column in (*MEASURED, PEAK)) else "unknown"


@dataclass(frozen=True)
class Word:
    """One entry of the vocabulary: cells of `column` that match `pattern` mean `meaning` ("\\1" is the pattern's first group).

    A meaning that starts with "!" is a reason why the row cannot be priced, one that starts with "~" the nearest that is known.
    """

    column: str
    pattern: str
    meaning: str
    note: str = ""


HALF_OF_LAYERS = "half of the layers"
SELECTIVE = "selective"
CORE_OR_HALF = "core attention, or half of the layers"
WHOLE_STEP = "whole step"
ROWWISE = "a scale for each row"
MC2 = "TP within its products"
UNFUSED_ELEMENTWISE = "activation and rotary embedding apart"
HYBRID = "a supernode's shards"
MODELLINK = r"[^|]*modellink[^|]*"
UNTOLD = "as was measured"
MX, BLOCKS, PER_TENSOR = "MXFP8", "a scale for each block", "a scale for each tensor"
MODULE = f"(?:{'|'.join(RECOMPUTE_MODULES)})"
ACTIVATION_OFFLOAD = "activation offload in words that do not tell how much leaves the device"
SHARE = r"(0?\.\d{1,6}|[01](\.0)?)"
OF_MODULES = "the share of what layers save that these modules do, see run_offload"
GRADE = "grade not printed: ±15 %"

MEGATRON_DEEPSPEED = r".*(megatron(-lm)?( \+ |.?)deepspeed|zero-3 via megatron).*"
DEEPSPEED_OF_2022 = rf"(?=.*(bigscience|\b202[12]\b|\| sc21 \|))({MEGATRON_DEEPSPEED}|.*bigscience.*)"
FLASH = r"(?:flash[-_ ]?att(?:ention|n)?(?:[-_ ]?v?[1-4](?:\.\d+)*)?|\bfa-?[1-4])(?![a-z])"
"""FlashAttention as people put it: flash_attn, FlashAttention-2, FA3."""
WITHOUT = r"(?:\b(?:no|non|not|without|w/o|disabled?|instead of|lacks)\b[- ]*(?:using |with |enabled? )?|\bun-?)"
SWITCHED_OFF = (
    r"[ :=(_-]*(?:is |was )?(?:(?:turned |switched )?off|no|none|false|disabled?|not (?:used|enabled|available)|unavailable|0)\b"
)
PLAIN = (
    r"(?:\b(?:unfused|non-?fused|eager|naive|vanilla|math)[-_ ](?:sdpa|att(?:ention|n))"
    r"|\battention[-_ ]backend[ =:]*(?:unfused|local)\b)"
)
"""Attention product by product, as people put it."""
FLASH_OFF = rf"[^|]*(?:{WITHOUT}{FLASH}|{FLASH}{SWITCHED_OFF}|{PLAIN})[^|]*\|.*"
FLASH_ON = rf"[^|]*{FLASH}[^|]*\|.*"
MCORE = r"(?:megatron-(?:core|lm)|mcore)[ (@]*(?:core[-_ ]?)?[rv]?0\."
"""A release of Megatron-Core up to its second number: Megatron-Core r0.8, Megatron-LM core_r0.12, mcore v0.14."""
SHARDED = r"(zero-?[23](?!\d)|hsdp|fsdp|full|hybrid_?shard|shard_?grad_?op|ddp|no_?shard)"
DIES = r"(ascend-?)?910(c|-93)(-.*)?|cloudmatrix-?384.*|atlas-[89]00t?-a3.*"
FSDP_BUILT = r".*(torchtune|lit-?gpt|lightning|olmo|veomni|fairscale|axolotl|accelerate|hugging|transformers|pytorch).*"
EAGER_BUILT = r"[^|]*(pytorch|torchtune|lightning|fairscale|axolotl|accelerate|hugging|transformers).*"
UNCOMPILED = r".*(torch\.compile ?= ?(false|off|no)|\bfsdp eager|\b(not |un)compiled|\b(no|without) torch\.compile)\b.*"

VOCABULARY: tuple[Word, ...] = (
    # Accelerator → cluster; the domain_size column sets the size of the supernode. The text matched is
    # without the vendor, with "-" for blanks.
    Word("accelerator", r"", "!missing field: accelerator"),
    Word("accelerator", r".*\b(pcie|nvl)\b.*", "!accelerator on PCIe cards: no cluster of the catalog has them"),
    Word("accelerator", r"a100-40gb.*|a100-sxm\d?-40gb.*", "hgx-a100-40gb"),
    Word("accelerator", r"a100(-(80gb|sxm).*)?", "hgx-a100"),
    Word("accelerator", r"h100-(sxm\d?-)?9[46]gb.*", "hgx-h100-96gb", "HBM2e, 500 W"),
    Word("accelerator", r"h100(-(80gb|sxm|hbm3).*)?", "hgx-h100"),
    Word("accelerator", r"h200.*", "hgx-h200"),
    Word("accelerator", r"h800.*", "hgx-h800"),
    Word("accelerator", r"h20(-(96gb|sxm).*)?", "hgx-h20"),
    Word("accelerator", r"a800(-(80gb|sxm).*)?", "hgx-a800", "an A100 with fewer NVLinks"),
    Word("accelerator", r"(b200|b300)(-.*)?", r"hgx-\1"),
    Word("accelerator", r"(gb200|gb300)(-.*)?", r"\1-nvl72"),
    Word("accelerator", r"(mi300x|mi355x).*", r"\1"),
    Word("accelerator", r"(ascend-?)?910b[1-4]?(-.*)?|ascend(-undisclosed)?|atlas-[89]00t?-a2.*", "atlas-800t-a2", GRADE),
    Word("accelerator", DIES, "cloudmatrix-384", "a device is a die"),
    Word("accelerator", r"ascend-950dt", "atlas-950-superpod", "announced figures"),
    Word("accelerator", r"v100.*", "!accelerator without BF16 tensor cores: its attention has no curve"),
    Word("accelerator", r"tpu.*", "!accelerator not in the catalog: TPU"),
    Word("accelerator", r"(.{1,40}).*", r"!accelerator not in the catalog: \1"),
    # Family | accelerator → the site's own cluster, or the links of its servers, where its network is known to be another.
    Word("site", r"bigscience \| a100.*", "jean-zay-a100", "four 100 Gb/s links per server of eight"),
    Word("site", r"internevo \| a100.*", "4 x 100 Gb/s per server", "InternEvo's own performance document"),
    Word("site", r".*fms.?fsdp.* \| a100.*", "400 Gb/s per server", "its README"),
    Word("site", r".*fms.?fsdp.* \| h100.*", "800 Gb/s per server", "its README"),
    Word("site", r".*", ""),
    # Cluster | devices of its supernode → how they are joined, where a board of that size is built in another way.
    Word(
        "board", r"hgx-(a100|h100|h200)\b.* \| 4", "full_mesh", "NVIDIA's boards of four have no switch: a pair has its own links"
    ),
    Word("board", r".*", ""),
    # Software and more → stack. The text matched is "software | family | precision | optimizer_sharding | comm_overlap".
    Word("stack", r".*kernel=flash_attention2 \+ rms kernel.*", "aleph-alpha-flash2-rms"),
    Word("stack", r".*kernel=flash_attention2.*", "aleph-alpha-flash2"),
    Word("stack", r".*kernel=flash_attention.*", "aleph-alpha-flash1"),
    Word("stack", r".*kernel=torch.*", "aleph-alpha-torch"),
    Word("stack", r".*kernel=fused.*", "aleph-alpha-fused"),
    Word("stack", r".*(aa-scaling|aleph.alpha).*", "aleph-alpha-flash2-rms"),
    Word("stack", r".*nanotron.*", "nanotron"),
    Word("stack", r".*(llm-foundry|composer).*", "llm-foundry"),
    Word("stack", r".*kempner.*", "kempnerforge"),
    Word("stack", r".*torchtitan[^|]*\b2024\b.*", "torchtitan-2024"),
    Word("stack", r".*torchtitan.*", "torchtitan"),
    Word("stack", r".*automodel.*", "nemo-automodel"),
    Word("stack", r"megatron-deepspeed[^|]*\|.*vtrain.*", "megatron-deepspeed-2024"),
    Word("stack", r".*internevo.*", "internevo"),
    Word("stack", rf"{DEEPSPEED_OF_2022}\| bf16 \|.*", "megatron-deepspeed-bf16"),
    Word("stack", DEEPSPEED_OF_2022, "megatron-deepspeed"),
    Word("stack", rf"{MEGATRON_DEEPSPEED}\| bf16 \|.*", "~megatron-deepspeed-bf16", "that of 2022: no later one is known"),
    Word("stack", MEGATRON_DEEPSPEED, "~megatron-deepspeed", "that of 2021 and 2022: no later one is known"),
    Word("stack", r".*(mindspeed|modellink).*", "mindspeed-llm"),
    Word("stack", r".*(mindformers|mindspore).*", "mindformers"),
    Word("stack", r".*\| simumax \|.*", "megatron-simumax"),
    Word("stack", r".*(megatron(?!.?deepspeed)|nemo(?!tron)|mcore|primus).*\| (zero-?3|hsdp|fsdp)[^|]*\|.*", "megatron-fsdp"),
    Word("stack", r".*(megatron-bridge|mcore|megatron-core v0\.1[6-9]).*moe-ep-a2a.*", "megatron-bridge-ep-overlap"),
    Word("stack", r"megatron-bridge v0\.[12]\..*", "megatron-bridge-2025"),
    Word("stack", r".*megatron-bridge.*", "megatron-bridge"),
    Word("stack", r".*nemo 24.*", "nemo-24"),
    Word("stack", r".*nemo(?!tron).*|.*mlperf.*", "nemo-25"),
    Word("stack", r".*(megatron-lm (ptd-p )?202[012]|deepspeed zero-3).*", "megatron-lm-2022"),
    Word("stack", rf".*({MCORE}([1-9]|1[0-2])\b|megatron-lm @|megascale).*", "megatron-lm-0.12"),
    Word("stack", r".*deepspeed.*", "deepspeed"),
    Word("stack", r".*fsdp.*", "~torchtitan", "PyTorch FSDP"),
    Word("stack", r".*(megatron|mcore).*", "megatron-lm"),
    # What is not known by name: the stack of the framework that it is built on, then of how it shards, then the cluster's own.
    Word("stack", r".*(neox|bmtrain).*", "~megatron-deepspeed", "built on Megatron and DeepSpeed"),
    Word("stack", r".*colossal.*\| zero-?[23] \|.*", "~deepspeed", "ZeRO without a pipeline, in DeepSpeed's manner"),
    Word("stack", r".*(flagscale|primus|colossal|pai-|\bverl\b).*", "~megatron-lm", "built on Megatron-Core, or in its manner"),
    Word("stack", r".*(xtuner|internlm|accelerate|hugging|transformers).*\| zero[123] \|.*", "~deepspeed", "ZeRO of DeepSpeed"),
    Word("stack", FSDP_BUILT, "~torchtitan", "PyTorch FSDP"),
    Word("stack", r".*(pangu|cann\b|ascendspeed).*", "~mindspeed-llm", "Megatron for Ascend"),
    Word(
        "stack",
        rf"[^|]*[^| ][^|]*\|[^|]*\|[^|]*\| {SHARDED}[^|]*\|.*",
        "~torchtitan",
        "sharded, or kept whole, in the words of PyTorch's FSDP and DDP",
    ),
    Word("stack", r".*", "default", "the cluster's own default"),
    # Kernels that a release's scripts switch on, where the stack's own are others. The text matched is "software |
    # comm_overlap", for attention "software | model".
    Word("kernels", rf"{MODELLINK}\(2024-(0[1-3]-|04-([01]\d|2[0-5])).*", UNFUSED_ELEMENTWISE, "scripts before 2024-04-26"),
    Word("kernels", rf"{MODELLINK}\(2024-.*|.*\bmc2\b.*", MC2, "scripts of 2024-04-26 to v1.0.0 set --use-mc2"),
    Word("kernels", r".*", ""),
    Word("attention", rf"{MODELLINK}\(2024-0[1-3]-.*\| (bloom-|baichuan2?-13b).*", "unfused", "ALiBi in scripts before April 2024"),
    Word("attention", FLASH_OFF, "unfused", "named as such, or FlashAttention as what it ran without"),
    Word("attention", FLASH_ON, "flash"),
    Word("attention", r".*", "", "the stack's own"),
    # Precision → GEMM precision / curve of the profile.
    Word("precision", r"bf16 ?[+/] ?fp8.*", "fp8 fp8_tensor", "GEMMs in FP8"),
    Word("precision", r"(mixed[ _-])?bf16.*|amp_bf16|bfloat16.*", "bf16 bf16"),
    Word("precision", r"fp16.*|amp_fp16|float16|half", "fp16 bf16"),
    Word("precision", r"mxfp8.*|fp8[ _-](.*\b)?(block.*|mx|sub.*)", "fp8 fp8", "scaled per block"),
    Word("precision", r"(amp_)?fp8.*|float8.*", "fp8 fp8_tensor", "scaled per tensor or row: current, delayed, dynamic"),
    Word("precision", r"(nv|mx)?fp4.*", "fp4 fp4"),
    Word("precision", r"", "bf16 bf16", "what tables that leave it out were trained in"),
    # What of an FP8 recipe has no price of its own: of what a row is said so. Casts that producing kernels do are in their stack's
    # figures, fitted to the recipe that its rows had; an amax pass before the cast and the bytes of blocks' scales are not apart.
    Word("fp8_recipe", r".*\brow-?wise.*", ""),
    Word("fp8_recipe", r".*(mx|sub).*", MX),
    Word("fp8_recipe", r".*(fp8|float8).*block.*", BLOCKS),
    Word("fp8_recipe", r".*(fp8|float8).*", PER_TENSOR),
    Word("fp8_recipe", r".*", ""),
    Word("precision", r"(tf32|fp32|float32).*", r"!precision that is not priced: \1"),
    # Sharding. A blank means ZeRO-1 on Megatron stacks (the distributed optimizer), ZeRO-3 on FSDP stacks.
    Word("optimizer_sharding", r"none|no|off|false|no_?shard|ddp", "none"),
    Word("optimizer_sharding", r"hsdp[:( ]+(\d+)\)?", r"hsdp:\1"),
    Word("optimizer_sharding", r"hsdp|hybrid_?shard", HYBRID, "PyTorch's own: copies of each supernode's shards"),
    Word("optimizer_sharding", r"(?:zero)?[ -]?(?:stage)?[ -]?([0-3])(\.0)?([^.\d].*)?", r"zero\1"),
    Word("optimizer_sharding", r"zero\+\+|(megatron-)?fsdp.*|full(y)?_?shard(ed)?|optim_grads_params", "zero3"),
    Word("optimizer_sharding", r"shard_?grad_?op|optim_grads", "zero2"),
    Word("optimizer_sharding", r"zall|dist.*opt.*|optim|(enable_)?parallel[_ ]optimizer|optimizer[_ ]parallel.*", "zero1"),
    Word("optimizer_sharding", r"", "blank"),
    # Recompute.
    Word("recompute", r"|none|no|off|false|0", "none", "blank: no source that leaves it out is known to recompute"),
    Word("recompute", r"full\+select.*", "full"),
    Word("recompute", r"(?:full[ (/:_]*)?(block|uniform)[ ,:/]+(\d{1,6})\b.*", r"full:\1:\2"),
    Word("recompute", r"full\[(\d{1,6}(?:, ?\d{1,6})*)\]", r"layers per stage:\1", "the mean of the list, in every chunk"),
    Word(
        "recompute",
        r"(ac )?full([ _-](recompute|ac|checkpointing)| \(every layer\))?|(activation[ _-])?checkpointing|yes|true",
        "full",
    ),
    Word("recompute", r"selective: ?rmsnorm \+ mla.up.projections", "selective:layernorm+mla_up_proj"),
    Word(
        "recompute",
        r"selective \(?(ac \()?(layer|op)\)?|(per-op )?sac",
        HALF_OF_LAYERS,
        "torchtitan: every second layer or product",
    ),
    Word("recompute", rf"(?:selective)?[ :(]*({MODULE}(?:[ ,+]+{MODULE})*)\)?", r"selective:\1", "Megatron's module names"),
    Word("recompute", r"(?:selective)?[ :(]*(?:core[ -])?attention\)?", "selective:core_attn"),
    Word("recompute", r"selective([ _-](recompute|ac|checkpointing))?", SELECTIVE, "what the stack takes it for"),
    Word("recompute", r"(.{1,40}).*", r"!recompute in words that are not priced: \1"),
    # Selective recompute without a list, by stack.
    Word("selective", r"mindformers", "none", "select_recompute: beside fused attention the feed-forward activation alone"),
    Word("selective", r".*", CORE_OR_HALF, "core attention where the stack names modules, otherwise per operator"),
    # Whether a dp with which the grid is short by a factor of ep leaves ep out. The text matched is "family | notes".
    Word("dp", r".*(kempner \||ep is its own mesh dim).*", "whole", "data is spread over dp alone"),
    Word("dp", r".*", "without ep", "experts lie across ranks that have data of their own"),
    # Expert tensor parallelism where it is blank, by stack.
    Word("etp", r"megatron-bridge.*|nemo-automodel", "1", "what its MoE recipes set"),
    Word("etp", r".*", "tp", "Megatron's default, where the grid allows it; MindSpeed's too, which cuts experts over TP"),
    # Whether experts lie over the ranks of TP too, ep·tp of them. The text matched is "software | comm_overlap | notes".
    Word("extended", r".*\btp[- ]extends?[- ]ep\b.*", "yes", "MindSpeed's --moe-tp-extend-ep: etp is 1"),
    Word("extended", r".*", "no"),
    # Sequence parallelism. The text matched is "family | sp | pipeline" where there is one: blank follows TP.
    Word("sp", r".*\| (0|0\.0|false|no|off) \|.*", "off"),
    Word("sp", r"kempner \|.*\| pipeline", "off", "its pipeline stages take plain tensor parallelism"),
    Word("sp", r".*", "on"),
    # Context parallelism.
    Word("cp_type", r"a2a.*p2p.*|hybrid|hierarchical|usp", "!cp_type that is not priced: a2a+p2p"),
    Word("cp_type", r"|none|.*\bring\b.*|p2p.*|zig-?zag", "p2p"),
    Word("cp_type", r"a2a.*|all-?to-?all|(deepspeed[ -])?ulysses.*", "a2a"),
    Word("cp_type", r"all[-_ ]?gather.*", "allgather"),
    Word("cp_type", r"(.{1,40}).*", r"!cp_type in words that are not priced: \1"),
    # Offload.
    Word("offload", r"|none|no|off|false|0", "none"),
    Word("offload", rf"optimizer:{SHARE}(\+activations:{SHARE})?|activations:{SHARE}", r"\g<0>"),
    Word("offload", r".*cpu_offloading_num_layers ?= ?(\d{1,6}).*", r"activations of \1 layers", "of a stage's layers, as a share"),
    Word("offload", r"fine-grained activations: ?([a-z_0-9]+(?:\+[a-z_0-9]+)*)", r"activations of modules \1", OF_MODULES),
    Word("offload", r"swap[-_ ]attention", "activations of modules attention", OF_MODULES),
    Word("offload", r"(all )?activations?", "activations:1"),
    Word("offload", r"swap[-_ ]optimizer|zero-?offload|cpu(: ?|[-_ ])optimizer|offload[-_ ]optimizer.*", "optimizer:1"),
    Word("offload", r".*(activation|swap).*", f"!{ACTIVATION_OFFLOAD}"),
    Word("offload", r"optimizer.*", "optimizer:1"),
    Word("offload", r".+", "!offload of single modules or parameters"),
    # Schedule.
    Word("pp_schedule", r"|none|(non-interleaved[ -]?)?1f1b( \(?non-interleaved\)?)?|non-interleaved", "1f1b"),
    Word("pp_schedule", r"interleaved[ _-]?zero[ _-]?bubble", "!schedule that is not priced: \\g<0>"),
    Word("pp_schedule", r"(interleaved).*|1f1b[ _-]interleaved|vpp|virtual[ _-]pipeline|looped.*", "interleaved"),
    Word("pp_schedule", r"gpipe|afab", "gpipe"),
    Word("pp_schedule", r"zb-?h1|zero[ _-]?bubble", "zb-h1"),
    Word("pp_schedule", r"zb-?v(zero-?bubble)?", "zb-v"),
    Word("pp_schedule", r"dualpipe-?v", "dualpipev"),
    Word("pp_schedule", r"dualpipe", "dualpipe"),
    Word("pp_schedule", r".+", "!schedule that is not priced: \\g<0>"),
    # What a row says of overlap switches off what it does not name; blank leaves the stack's own.
    Word("overlap.tp", r"none.*", "off"),
    Word("overlap.tp", r".*(\btp\b|asynctp|mc2|tp_linear_async).*|(?!.*grad-reduce).*", "on"),
    Word("overlap.tp", r".*", "off"),
    Word("overlap.dp_gradients", r"none.*", "off"),
    Word("overlap.dp_gradients", r".*", "on"),
    Word("overlap.dp_parameters", r"none.*|(?=.*grad-reduce)(?!.*param-gather).*", "off"),
    Word("overlap.dp_parameters", r".*", "on"),
    Word("overlap.pp_interleaved", r"none.*", "off"),
    Word("overlap.pp_interleaved", r".*", "on"),
    Word("moe_dispatcher", r"flex.*|.*deepep.*|.*hybridep.*", "flex"),
    Word("moe_dispatcher", r"(alltoall|allgather)", r"\1"),
    Word("moe_dispatcher", r"dropless", "flex", "Megatron-Bridge 0.1: DeepEP where its DeepSeek recipe drops no tokens"),
    Word("moe_dispatcher", r"unset", "alltoall", "what Megatron-Bridge's recipes leave: the row's is known and names none"),
    Word("moe_dispatcher", r".*", ""),
    Word("flex_backend", r".*(deepep|hybridep).*", r"\1"),
    Word("flex_backend", r".*", "", "what most stacks run on the accelerator"),
    Word("cuda_graphs", r".*full_iteration.*", WHOLE_STEP, "the host launches one graph: no floor per layer"),
    Word("cuda_graphs", r"transformer_engine:([a-z_+]+)", r"\1", "modules of a layer that are replayed"),
    Word("cuda_graphs", r".*", ""),
    Word("scales", r".*row-?wise.*", ROWWISE, "operands are cast anew for every GEMM, and gathered in BF16"),
    Word("scales", r".*", ""),
    # Whether a PyTorch model is compiled, otherwise elementwise work is chains of kernels. The text matched is "stack | software |
    # notes", the stack with its "~".
    Word("compiled", UNCOMPILED, "no"),
    Word("compiled", r".*compil.*", "yes"),
    Word("compiled", r"~torchtitan \|" + EAGER_BUILT, "no", "modules run as they are, unless told otherwise"),
    Word("compiled", r".*", "yes"),
    Word("routing", r".*(balanc|capacity 1|megatron-bridge|bridge-studies|mcore-moe).*", "balanced", "forced, or capped"),
    Word("routing", r"dgxc .*", "balanced", "NeMo's performance recipes fill every expert up to a capacity factor of 1"),
    Word("routing", r".*", "free"),
    # What a family's memory figure is: how it was read, and of which stage. The allocator knows no communicator buffers. The text
    # matched here and for splits is "family | software": a framework has its ways in other families' hands too.
    Word("memory", r".*(nanotron|kempner).*", "allocated first", "rank 0 writes the log"),
    Word("memory", r".*torchtitan.*|stas \|.*", "reserved fullest", "max_memory_reserved: the allocator's cache is in"),
    Word("memory", r"bigscience \|.*", "device fullest", "nvidia-smi: context, communicators and the allocator's cache are in"),
    Word("memory", r".*", "~allocated fullest", "peak allocated on the fullest rank; assumed (the row says so)"),
    # What a row itself says of it, in its column memory_measure or else in its notes.
    Word("memory_measure", r".*reserved.*", "reserved"),
    Word("memory_measure", r".*alloc.*", "allocated"),
    Word("memory_measure", r"(whole )?device.*|.*(nvidia|npu|rocm|amd)[-_ ]?smi.*|.*nvml.*", "device"),
    Word("memory_measure", r".*", ""),
    Word("memory_notes", r".*\b(nvidia|npu|rocm|amd)-smi\b.*", "device"),
    Word("memory_notes", r".*(memory_reserved|reserved memory|(memory|peak) reserved).*", "reserved"),
    Word("memory_notes", r".*(memory_allocated|allocated memory|(memory|peak) allocated).*", "allocated"),
    Word("memory_notes", r".*", ""),
    # What a family's table leaves open of its rows, as a spread of log step time.
    Word("doubt", r"mindspeed-llm|mindformers", "0.15", "grade not printed, layout joined from a script: ±15 %"),
    Word("doubt", r".*", "0"),
    # How a family's framework cuts stages.
    Word("split", r".*nanotron.*", "by compute", "blocks dealt out by matrix products, the head's in"),
    Word("split", r".*(aleph.alpha|aa-scaling).*", "by parameters", "the largest stage's, ends included, as few as can be"),
    Word("split", r".*", "even", "equal chunks; what is left over is taken from the ends (see run_splits)"),
    # FLOPs behind MFU and TFLOP/s: causal attention halved or whole, model or hardware (recompute in). The text matched is the
    # convention, or where it says nothing "family | software".
    Word("flops", r".*hardware.*no attention term.*", "!FLOP formula without attention"),
    Word("flops", r".*hardware.*", "whole hardware"),
    Word("flops", r".*(not halved|non-causal|full attention|12\*?l).*", "whole"),
    Word("flops", r".*halved.*", "halved"),
    Word("flops", r".*(mindspeed|mindformers|nemo-docs|sc21|korthikanti|megascale|llm-foundry|nanotron|aleph|kempner).*", "whole"),
    Word("flops", r".*(megatron-bridge|bridge-studies|mcore-moe).*", "halved", "since core_r0.12"),
    Word("flops", rf".*(megatron-lm (ptd-p )?202[0-3]|{MCORE}(\d|1[01])\b|nemo 24).*", "whole", "before core_r0.12"),
    Word("flops", r".*", "~halved", "model FLOPs without recompute"),
    # Columns of a model's shape that say yes or no.
    Word("flag", r"1|1\.0|true|yes|y", "yes"),
    Word("flag", r"0|0\.0|false|no|n", "no"),
    # How a run ended. Blank: it ran if anything was measured.
    Word("status", r"", UNTOLD),
    Word("status", r"ok|okay|success.*|succeeded|done|completed?|finished|ran|pass(ed)?", "ok"),
    Word("status", r".*\boom.*|.*out.?of.?(device.?)?memory.*", "oom"),
    Word("status", r".+", "fail"),
)
"""The whole mapping from a CSV's words to a Stack and a Layout: the first entry of a column that matches the whole cell counts."""


def meaning(column: str, cell: str) -> str:
    """What a cell stands for; Unpriceable where its word has no price, or no entry at all."""
    word = cell.strip().lower()
    found = _meaning(column, "" if word in DASHES else word)
    if found.startswith("!"):
        raise Unpriceable(found[1:])
    return found


@cache
def _meaning(column: str, cell: str) -> str:
    for word in VOCABULARY:
        if word.column == column and (match := re.fullmatch(word.pattern, cell, re.IGNORECASE | re.DOTALL)):
            return match.expand(word.meaning)
    return f"!{column} in words that are not known: {cell[:40]}"
