"""From a measured run to what prices it: a Problem, a Layout with its framework's stages, and which GEMM curve applies."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from pydantic import ValidationError

from ..search_spaces.cluster import ClusterSpec, Figure
from ..search_spaces.inputs import MOST_DEVICES, load_stack
from ..search_spaces.layout import Layout, Problem
from ..search_spaces.libraries import torchao
from ..search_spaces.model import Attention, LatentAttention, ModelSpec, MoeMlp
from ..search_spaces.stack import GRAPH_MODULES, Stack
from ..search_spaces.vocabulary import V_SHAPED
from ..search_spaces.workload import Workload
from .profile import load_profile
from .run_clusters import cluster_of
from .run_models import Shape, model_of
from .run_offload import offload_of
from .run_splits import split_of
from .runs import (
    ACTIVATION_OFFLOAD,
    CORE_OR_HALF,
    HALF_OF_LAYERS,
    HYBRID,
    MC2,
    MX,
    PEAK,
    PER_TENSOR,
    ROWWISE,
    SELECTIVE,
    UNFUSED_ELEMENTWISE,
    WHOLE_STEP,
    Run,
    Unpriceable,
    meaning,
)
from .schedules import SPLIT

UNSUPPORTED = (
    (r"\blora\b", "LoRA: adapters and frozen weights are not priced"),
    (r"packed (squad|sequence)|\(packed", "packed sequences are not priced"),
    (r"freezing|frozen-weight", "frozen weights are not priced"),
)
"""What a row's id, notes or FLOP convention says that paraplan does not price."""
OFFLOADED = re.compile(
    r"(?<!no )(?<!without )(activations?[-_ ]off-?load|off-?load(ing|ed)?[-_ ](of[-_ ])?activation|cpu_offloading_num_layers)",
    re.IGNORECASE,
)

MOST_STAGES = 4096  # some frameworks leave stages empty, so layers do not limit them
FSDP_GROUP = re.compile(r"FSDP (?:sharding )?group (\d{1,6})")
DROPLESS = re.compile(r"megatron-bridge v0\.1\.[^|]*\|.*\(dropless\)", re.IGNORECASE)
OF_RECIPE = re.compile(r"dispatcher[^;]* from recipe", re.IGNORECASE)  # the column is the recipe's own, blank where that is silent
UNSHARDED = re.compile(r"no ZeRO|no distributed optimizer at the time", re.IGNORECASE)


@dataclass(frozen=True)
class Job:
    """A run that can be priced. `gemm_curve` names the curve of the accelerator's profile for the run's GEMMs.

    `memory` says which figure the source measured: allocated, reserved or taken from the whole device, on the first or the
    fullest stage. `notes` say what was assumed of a run that is not of a known stack or model; `doubt` is how far, as a spread of
    log step time, the source's table leaves open what it was; `stack_told` whether the stack is the run's own, not the nearest.
    """

    run: Run
    problem: Problem
    layout: Layout
    gemm_curve: str
    memory: str
    notes: tuple[str, ...] = ()
    doubt: float = 0.0
    stack_told: bool = True

    @property
    def accelerator(self) -> str:
        """The catalog's name of the device."""
        return self.problem.cluster.accelerator.priced_as


def job_of(run: Run, shapes: Mapping[str, Shape]) -> Job:
    """The run as a priceable job; Unpriceable, with the reason, where it is not one."""
    if run.defect:
        raise Unpriceable(run.defect)
    _refuse_unsupported(run)
    cluster = cluster_of(run)
    precision, gemm_curve = meaning("precision", run.text("precision")).split()
    if precision not in cluster.accelerator.peak_flops:
        raise Unpriceable(f"{cluster.accelerator.name} has no {precision} rate")
    seq_len, devices = run.needed("seq_len"), run.needed("num_accelerators")
    if devices > MOST_DEVICES:
        raise Unpriceable(f"more devices than {MOST_DEVICES}")
    model, of_model = model_of(run, shapes, seq_len)
    stack, of_stack = _stack_of(run, cluster, model.is_moe)
    try:
        problem = Problem(model=model, cluster=cluster, devices=devices, stack=stack, workload=_workload(run, seq_len, precision))
        layout = _layout(run, problem)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise Unpriceable(f"not a layout: {'.'.join(map(str, first['loc']))} {first['msg'].lower()}") from error
    memory, of_memory = _memory_of(run)
    notes = (*of_stack, *of_model, *_of_precision(run, cluster), *_of_layout(run, problem, layout), *of_memory)
    return Job(run, problem, layout, gemm_curve, memory, notes, float(meaning("doubt", run.family)), stack_told=not of_stack)


def stack_of(run: Run, cluster: ClusterSpec) -> tuple[str, str]:
    """The catalog's name of the run's stack, and what its words stand for: "default" where they name none, ~ before the nearest."""
    found = run.stack or meaning("stack", stack_words(run))
    return cluster.default_stack if found == "default" else found.removeprefix("~"), found


def with_one_stack_each(runs: Sequence[Run]) -> list[Run]:
    """Runs with one stack for all of a software that is not known by name: what most of its rows are taken for that tell at all."""
    guesses: dict[str, Counter[str]] = defaultdict(Counter)
    for run in runs:
        found = _guess(run)
        if found:
            guesses[run.text("software")][found] += 1
    one = {software: max(seen, key=lambda found: (found != "default", seen[found])) for software, seen in guesses.items()}
    return [replace(run, stack=one[run.text("software")]) if _guess(run) else run for run in runs]


def _guess(run: Run) -> str:
    """What a row's stack is guessed to be; "" where it is known, or where the row names no software."""
    found = meaning("stack", stack_words(run))
    return found if run.text("software") and (found == "default" or found.startswith("~")) else ""


def stack_words(run: Run) -> str:
    """The text that the vocabulary's stack entries are matched against."""
    names = ("software", "family", "precision", "optimizer_sharding", "comm_overlap")
    return " | ".join(run.text(name) for name in names).replace("\n", " ")


def _of_precision(run: Run, cluster: ClusterSpec) -> Iterator[str]:
    """What was assumed of the precision, and what of an FP8 recipe the price leaves out."""
    words, device = run.text("precision"), cluster.accelerator
    recipe = meaning("fp8_recipe", words)
    if not words:
        yield "precision is not told: BF16 assumed"
    if recipe == MX and "fp4" not in device.peak_flops:  # tensor cores with MX formats have those of 4 bits too
        yield f"{words}: {device.name} has no MX formats; priced as scales of larger blocks"
    if recipe == PER_TENSOR and "fp8_tensor" not in load_profile(device.priced_as).gemm:
        yield f"{words}: priced at the rate of blocks' scales; none of {device.name} with {PER_TENSOR} is known"
    if recipe == PER_TENSOR:
        yield f"{words}: delayed and current scaling are priced alike"


def _of_layout(run: Run, problem: Problem, layout: Layout) -> Iterator[str]:
    """What was made of degrees and of a dispatcher that the row does not tell as they are."""
    if _extended(run):
        yield f"experts lie over TP ranks too: ep {layout.ep}, etp {layout.etp}"
    elif run.count("dp") not in (None, layout.dp):
        yield "dp is taken to leave ep out: with it the grid is the devices"
    if problem.model.is_moe and _dispatcher(run) in ("unset", "dropless"):
        yield f"moe_dispatcher is not told: {problem.stack.moe_dispatcher} assumed, as the row's recipe has it"


def _refuse_unsupported(run: Run) -> None:
    said = " ".join(run.text(name) for name in ("id", "notes", "flops_convention"))
    for pattern, reason in UNSUPPORTED:
        if re.search(pattern, said, re.IGNORECASE):
            raise Unpriceable(reason)
    if OFFLOADED.search(said) and not run.text("offload"):
        raise Unpriceable(ACTIVATION_OFFLOAD)


def _stack_of(run: Run, cluster: ClusterSpec, moe: bool) -> tuple[Stack, tuple[str, ...]]:
    """The run's stack, and what was assumed where its software is not known by name."""
    name, found = stack_of(run, cluster)
    why = {"default": f"the default of {cluster.name}", f"~{name}": "the nearest that is known"}.get(found)
    software = run.text("software")[:40] or "no software named"
    names = ("tp", "dp_gradients", "dp_parameters", "pp_interleaved")
    off = tuple(each for each in names if meaning(f"overlap.{each}", run.text("comm_overlap")) == "off")
    told = Software(
        stack=name,
        off=off,
        dispatcher=meaning("moe_dispatcher", _dispatcher(run)),
        backend=meaning("flex_backend", run.text("moe_dispatcher")),
        graphs=meaning("cuda_graphs", run.text("cuda_graphs")),
        compiled=meaning("compiled", f"{found} | {run.text('software')} | {run.text('notes')}") == "yes",
        rowwise=meaning("scales", run.text("precision")) == ROWWISE,
        kernels=meaning("kernels", f"{run.text('software')} | {run.text('comm_overlap')}"),
        attention=meaning("attention", f"{run.text('software')} | {run.text('model')}"),
        moe=moe,
    )
    return _stack(told), (f"stack {name} assumed, {why}: {software}",) if why else ()


def _memory_of(run: Run) -> tuple[str, tuple[str, ...]]:
    """How the run's peak was read and of which stage: as it says itself, or else as its family and framework are known to."""
    known = meaning("memory", f"{run.family} | {run.text('software')}")
    told = meaning("memory_measure", run.text("memory_measure")) or meaning("memory_notes", run.text("notes"))
    how, where = known.removeprefix("~").split()
    guessed = known.startswith("~") and not told and bool(run.text(PEAK))
    word = run.text("memory_measure")
    unclear = f"memory_measure {word!r} is no way to read a peak that is known" if word else "how the peak was read is not told"
    return f"{told or how} {where}", (f"{unclear}: {how} assumed",) if guessed else ()


def _dispatcher(run: Run) -> str:
    """The dispatcher as told, or what tells it: a recipe that is known and names none, or a release's notes."""
    told = run.text("moe_dispatcher") or ("unset" if OF_RECIPE.search(run.text("notes")) else "")
    return told or ("dropless" if DROPLESS.match(f"{run.text('software')} | {run.text('notes')}") else "")


@dataclass(frozen=True)
class Software:
    """What a row says of the stack that it ran on, in words that are known."""

    stack: str
    off: tuple[str, ...]  # overlaps
    dispatcher: str
    backend: str
    graphs: str  # over modules, or the whole step
    compiled: bool  # by PyTorch, which fuses elementwise kernels
    rowwise: bool  # scales by row, for which operands are cast anew for every GEMM
    kernels: str  # those of its release
    attention: str  # its kernel, where the row names one
    moe: bool


@cache
def _stack(told: Software) -> Stack:
    """The catalog's stack as a row ran it."""
    stack = load_stack(told.stack)
    fused = stack.fused_tp / (2.0 if told.moe else 1.0)  # of a MoE layer the attention's half
    within = {"tp": fused} if told.kernels == MC2 else {}
    # NVIDIA's scripts of FP8 runs keep the weights themselves in FP8 (examples/llama/train_llama3_8b_h100_fp8.sh). They are priced
    # as gathered in BF16 all the same: their figures were fitted so, and a byte each moves steps by 0.04 % in the median.
    changes: dict[str, object] = {
        "overlap": stack.overlap.model_copy(update=dict.fromkeys(told.off, 0.0) | within),
        "footprint": stack.footprint.model_copy(update={"cached_weight_bytes": {}}),
    }
    if told.kernels == UNFUSED_ELEMENTWISE:
        changes["eager_kernels"] = ("activation", "rotary")
    if told.attention:
        changes["attention_kernel"] = told.attention
    if not told.compiled:
        changes["eager_kernels"] = ("norm", "activation", "rotary", "loss")
    if told.rowwise:
        changes |= {"fp8_cast_bytes": torchao().rowwise_cast_bytes.value, "fp8_gathers": False}
    if told.dispatcher:
        changes["moe_dispatcher"] = told.dispatcher
    if told.backend:
        changes["flex_backend"] = told.backend
    if told.graphs == WHOLE_STEP:
        none = Figure(value=0.0, source="one CUDA graph spans the step: the host launches no layer", grade="official")
        names = ("host_floor_dense_s", "host_floor_moe_s", "host_floor_per_expert_s", "host_wait_moe_s")
        changes |= {"cuda_graphs": True, "expert_gemms": "grouped", **dict.fromkeys(names, none)}
    elif told.graphs:
        changes["graph_modules"] = tuple(word for word in told.graphs.split("+") if word in GRAPH_MODULES)
    return stack.model_copy(update=changes)


def _workload(run: Run, seq_len: int, precision: str) -> Workload:
    balanced = meaning("routing", f"{run.family} {run.text('notes')}") == "balanced"
    given = {"expert_imbalance": 1.0} if balanced else {}
    return Workload(global_batch=run.needed("global_batch"), seq_len=seq_len, precision=precision, **given)  # type: ignore[arg-type]


def _layout(run: Run, problem: Problem) -> Layout:
    """The run's layout. dp follows from the other degrees where it is blank, and must agree with them where it is not."""
    tp, pp = run.needed("tp"), run.needed("pp")
    cp, ep, micro_batch = run.count("cp") or 1, run.count("ep") or 1, run.needed("micro_batch")
    if run.count("dp") is None and problem.devices % (tp * cp * pp):
        raise Unpriceable("the number of devices is not a multiple of tp·cp·pp")
    dp = run.count("dp") or problem.devices // (tp * cp * pp)
    if tp * cp * pp * dp * ep == problem.devices and meaning("dp", f"{run.family} | {run.text('notes')}") == "without ep":
        dp *= ep
    if tp * cp * pp * dp != problem.devices:
        raise Unpriceable("dp inconsistent: tp·cp·pp·dp is not the number of devices")
    batch = problem.workload.global_batch
    if batch % (micro_batch * dp):
        raise Unpriceable("micro-batches are not integral: global_batch is not a multiple of micro_batch·dp")
    m = batch // (micro_batch * dp)
    schedule, vpp = _schedule(run, pp, m)
    if pp * vpp > problem.model.num_layers and vpp > 1:
        raise Unpriceable("more chunks than layers")
    if pp > MOST_STAGES:
        raise Unpriceable(f"more stages than {MOST_STAGES}")
    if _extended(run):
        ep *= tp
    _refuse_uneven(problem.model, tp, ep)
    etp = _expert_tensor_parallel(run, problem, tp, cp, dp, ep)
    recompute = _recompute(run, problem, pp * vpp)
    split = split_of(problem.model, pp, vpp, meaning("split", f"{run.family} | {run.text('software')}"), run.text("notes"))
    split = replace(split, folded=schedule in V_SHAPED)
    sequence_parallel = meaning("sp", f"{run.family} | {run.text('sp')} | {'pipeline' if pp > 1 else ''}")
    layout = Layout(
        tp=tp,
        cp=cp,
        pp=pp,
        dp=dp,
        ep=ep if problem.model.is_moe else 1,
        etp=etp,
        edp=tp * cp * dp // (etp * ep) if problem.model.is_moe else tp * cp * dp,
        vpp=vpp,
        micro_batch=micro_batch,
        num_microbatches=m,
        sequence_parallel=tp > 1 and sequence_parallel == "on",
        cp_type=meaning("cp_type", run.text("cp_type")),
        schedule=schedule,
        optimizer_sharding=_sharding(run, problem, tp, cp * dp),
        recompute=recompute,
        offload="none",
        stages=split.stages(problem.model.num_layers, recompute),
    )
    offload = offload_of(meaning("offload", run.text("offload")), problem, layout)
    return layout if offload == "none" else Layout.model_validate({**layout.model_dump(), "offload": offload})


def _refuse_uneven(model: ModelSpec, tp: int, ep: int) -> None:
    """Unpriceable where heads or experts do not come out even over the ranks: no framework runs that."""
    mixers = [kind.mixer for kind in model.kinds.values()]
    if any(isinstance(mixer, (Attention, LatentAttention)) and mixer.heads % tp for mixer in mixers):
        raise Unpriceable("tp does not divide the attention heads")
    if any(isinstance(kind.mlp, MoeMlp) and kind.mlp.experts % ep for kind in model.kinds.values()):
        raise Unpriceable("ep does not divide the experts")


def _schedule(run: Run, pp: int, micro_batches: int) -> tuple[str, int]:
    """Schedule and vpp: interleaved wherever there is more than one chunk per stage, but for the two ends of a V."""
    schedule, vpp = meaning("pp_schedule", run.text("pp_schedule")), run.count("vpp")
    if pp == 1:
        return "1f1b", 1
    if schedule in SPLIT:
        return schedule, 2 if schedule in V_SHAPED else 1
    if schedule == "interleaved" and vpp is None:
        raise Unpriceable("missing field: vpp")
    vpp = vpp or 1
    if vpp > 1 and micro_batches % pp:
        raise Unpriceable("interleaving needs micro-batches in multiples of pp")
    return ("interleaved", vpp) if vpp > 1 else ("1f1b" if schedule == "interleaved" else schedule, 1)


def _extended(run: Run) -> bool:
    """Whether experts lie over the ranks of TP too, rather than being cut by it: EP is then tp times the ep that is told."""
    return meaning("extended", " | ".join(run.text(name) for name in ("software", "comm_overlap", "notes"))) == "yes"


def _expert_tensor_parallel(run: Run, problem: Problem, tp: int, cp: int, dp: int, ep: int) -> int:
    """etp as given, or the stack's default where it is blank and the grid allows it, else 1. A MoE run must state its ep."""
    if not problem.model.is_moe:
        return 1
    run.needed("ep")
    cut = meaning("etp", problem.stack.name) == "tp" and cp * dp % ep == 0 and not _extended(run)
    default = tp if cut else 1
    etp = run.count("etp") or default
    if tp * cp * dp % (etp * ep):
        raise Unpriceable("etp·ep does not divide tp·cp·dp")
    return etp


def _recompute(run: Run, problem: Problem, chunks: int) -> str:
    words, layers = meaning("recompute", run.text("recompute")), problem.model.num_layers
    half = f"full:block:{max(1, math.ceil(layers / chunks / 2))}"
    if words == SELECTIVE:
        words = meaning("selective", problem.stack.name)
    if words == HALF_OF_LAYERS:
        return half
    if words == CORE_OR_HALF:
        return "selective:core_attn" if "core_attn" in problem.stack.recompute_modules else half
    if words.startswith("layers per stage:"):
        counts = [int(count) for count in re.findall(r"\d+", words)]
        return f"full:block:{max(1, round(sum(counts) / len(counts)))}"
    return re.sub(r"[ ,+]+", "+", words)


def _sharding(run: Run, problem: Problem, tp: int, ranks: int) -> str:
    """Sharding in our words, over `ranks`. A blank is what the stack always does: ZeRO-3 under FSDP, else ZeRO-1, unless notes say
    none.
    """
    stack, cluster = problem.stack, problem.cluster
    found = meaning("optimizer_sharding", run.text("optimizer_sharding")).replace("-", "").replace("zero0", "none")
    if found == "blank":
        if UNSHARDED.search(run.text("notes")):
            return "none"
        found = "zero3" if "zero1" not in stack.optimizer_shardings and "zero3" in stack.optimizer_shardings else "zero1"
    group = FSDP_GROUP.search(run.text("notes"))
    near = math.gcd(problem.allocated_sizes[cluster.supernode_place] // tp, ranks)
    size = int(group[1]) if group else near if found == HYBRID else ranks
    if found in ("zero3", HYBRID):
        return f"hsdp:{size}" if 1 < size < ranks else "zero3"
    return found
