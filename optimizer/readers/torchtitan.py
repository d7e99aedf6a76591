"""torchtitan: dotted command-line options (0.3), a configuration function in Python, or the TOML of earlier versions."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from ...search_spaces.errors import InputError
from ...search_spaces.inputs import load_model
from ...search_spaces.libraries import torchtitan
from ...search_spaces.model import ModelSpec
from .arguments import empty_words
from .dialects import knobs_of
from .job import Finding, Job, SplitWish
from .option_words import misspelt_fields
from .processes import world
from .python_source import Made, Source, flat, is_python, objects, richest
from .shell import UNSET, Option, Script, options, read_script, unresolved, without_value
from .structured import Document

FRAMEWORK = "torchtitan"
SINGLE = {"gpipe": "gpipe", "1f1b": "1f1b"}
SEVERAL = {"interleaved1f1b": "interleaved", "zbvzerobubble": "zb-v", "dualpipev": "dualpipev"}
MODELS = {
    ("llama3", "8b"): "llama-3.1-8b",
    ("llama3", "70b"): "llama-3.1-70b",
    ("llama3", "405b"): "llama-3.1-405b",
    ("llama4", "17bx128e"): "llama-4-maverick",
    ("deepseek_v3", "16b"): "deepseek-v2-lite",
    ("deepseek_v3", "671b"): "deepseek-v3",
    ("qwen3", "0.6b"): "qwen3-0.6b",
    ("qwen3", "1.7b"): "qwen3-1.7b",
    ("qwen3", "8b"): "qwen3-8b",
    ("qwen3", "32b"): "qwen3-32b",
    ("qwen3", "30b-a3b"): "qwen3-30b-a3b",
    ("qwen3", "235b-a22b"): "qwen3-235b-a22b",
    ("gpt_oss", "20b"): "gpt-oss-20b",
    ("gpt_oss", "120b"): "gpt-oss-120b",
}
"""torchtitan's model and flavour → the catalog's name."""
POSITIONS = {"llama3": 131072, "deepseek_v3": 16384, "qwen3": 40960, "gpt_oss": 131072}
"""Of each module of torchtitan 0.3.0's registry, rope's max_seq_len, beyond which training does not start."""
PLAIN = (
    "training.disable_cuda_graphs",
    *("job.", "profiling.", "metrics.", "optimizer.", "lr_scheduler.", "checkpoint.", "comm.", "memory_estimation.", "validation."),
    *("debug.", "fault_tolerance.", "training.dataset", "training.steps", "training.max_norm", "experimental.", "dump_folder"),
    *("model.tokenizer", "model.hf_assets", "hf_assets_path", "tokenizer", "training.deterministic", "training.seed"),
    *("dataloader.", "training.gc_freq", "module", "config", "nproc", "nnodes", "rdzv", "local-ranks", "role", "tee", "profiler."),
)
NAMED = {"tp": "tensor", "cp": "context", "pp": "pipeline", "ep": "expert", "etp": "expert_tensor"}
SECTIONS = ("parallelism", "training")
FIELDS = frozenset(name for name in knobs_of(FRAMEWORK) if name.startswith(SECTIONS))
STARTED, MTP = "program.config", "program.num_mtp_layers"
"""Where `_from_program` puts the function that a program starts from, and the MTP layers of its model."""
APART = ("model_spec", "loss", "activation_checkpoint")
"""What a program makes of classes, and is read by itself."""
CHECKPOINTING = re.compile(r"activation[-_]checkpoint")
DIMENSIONS = "torchtitan torchtitan/distributed/parallel_dims.py"
PIPELINE = "torchtitan torchtitan/distributed/pipeline_parallel.py"
TRAINER = "torchtitan torchtitan/trainer.py"
CHECKPOINTS = "activation_checkpoint.mode"
MICRO_TOKENS, STEP_TOKENS = "training.num_tokens_per_microbatch_per_dp_rank", "training.num_tokens_per_train_step"


def read(text: str, where: str, devices: int | None = None, variables: Mapping[str, str] | None = None) -> Job:
    """The job of a command line or a TOML file. InputError where it has no parallelism or training section."""
    data, checkpointing, launched = _data(text, where, variables)
    doc = Document(data, where)
    started = doc.text(STARTED)
    devices = devices or launched
    degrees = {column: doc.whole(f"parallelism.{name}_parallel_degree") or 1 for column, name in NAMED.items()}
    findings: list[Finding] = []
    script = Script() if is_python(text) or is_toml(text) else read_script(text, variables, where)
    said = list(script.decisions)
    said += [f"what {started} sets beyond these is not known here"] if started else []
    replicate, shard = _replicas(doc, degrees, devices, findings, said)
    if shard is not None:
        degrees["dp"] = replicate * shard
        grid = degrees["tp"] * degrees["cp"] * degrees["pp"] * degrees["dp"]
        if devices is None:
            devices, said = grid, [*said, f"{grid} devices: the product of its degrees"]
    model = _model(doc)
    schedule, several = _schedule(doc, where, degrees["pp"])
    degrees["vpp"], split = _stages(doc, degrees["pp"], schedule, several, model, findings)
    seq_len = doc.whole("training.seq_len", "training.max_context_length")
    if "max_seq_len" not in text:  # nor does a program give the model other positions
        findings += _beyond_positions(doc, seq_len)
    tokens = doc.whole(MICRO_TOKENS)
    sizes = _in_tokens(doc, degrees, tokens, seq_len, findings, said) if tokens else _in_sequences(doc, degrees, findings, said)
    micro, global_batch = sizes
    degrees |= {"micro_batch": micro} if micro else {}
    rest = _memory(doc, degrees, replicate, shard, checkpointing, said)
    precision = "fp8" if "float8" in str(doc.get("model.converters") or "").lower() else "bf16"
    off = doc.flag("parallelism.disable_sequence_parallel") or doc.flag("parallelism.enable_sequence_parallel") is False
    apart = _eager(doc, said)
    findings += misspelt_fields([*doc.values.items(), (CHECKPOINTS, checkpointing or "")], FRAMEWORK)
    doc.skip(*PLAIN)
    return Job(
        format=FRAMEWORK,
        framework=FRAMEWORK,
        degrees=degrees,
        choices={
            "sequence_parallel": "false" if off or degrees["tp"] == 1 else "true",
            "cp_type": _cp_type(doc),
            "schedule": schedule,
            **rest,
        },
        devices=devices,
        global_batch=global_batch,
        seq_len=seq_len,
        precision=precision,
        model=_without_mtp(model, doc.whole(MTP, least=0) or 0) if model is not None else None,
        split=split,
        stack_changes={"eager_kernels": apart},
        written={
            **doc.written,
            **({"activation_checkpoint": checkpointing} if CHECKPOINTING.search(text) and checkpointing else {}),
        },
        notation=_notation(text),
        findings=tuple(findings),
        assumptions=tuple(said),
        unmodelled=doc.unmodelled(FRAMEWORK),
        unknown=doc.unknown,
        unresolved=tuple(_unresolved(doc, script)),
    )


def _beyond_positions(doc: Document, seq_len: int | None) -> Iterator[Finding]:
    """Sequences longer than the rotary tables of the registry's model."""
    module = str(doc.get("module", "model.name") or "").lower()
    most = POSITIONS.get(module)
    if most is not None and seq_len is not None and seq_len > most:
        sentence = f"training.seq_len {seq_len} is more than the {most} positions of {module}'s models; {most} would do."
        yield Finding("C043", sentence, "every token has a position", "torchtitan torchtitan/models/common/decoder.py")


def _unresolved(doc: Document, script: Script) -> Iterator[str]:
    yield from (without_value(f"{path} {value}") for path, value in doc.values.items() if unresolved(str(value)))
    yield from map(without_value, empty_words(_command(script)))


def is_started(text: str) -> bool:
    """Whether a command line has options of torchtitan's sections, or starts it from a configuration that it ships."""
    known = "|".join(sorted({module for module, _ in MODELS}))
    shipped = re.search(rf"--module[= ]+(?:{known})\b", text) and re.search(r"--config[= ]", text)
    return bool(shipped or re.search(r"--(parallelism|training)\.\w", text))


def is_toml(text: str) -> bool:
    """Whether a text is a torchtitan TOML."""
    return bool(re.search(r"^\[(parallelism|training|experimental)\b", text, re.MULTILINE))


def program(text: str, where: str) -> Made | None:
    """The configuration of a Python program: of all that it makes, what has most of torchtitan's fields."""
    return richest(objects(text, where), FIELDS)


def _from_program(made: Made) -> tuple[dict[str, Any], str | None, int | None]:
    """As `_data`: fields as they are, the model and what it is started from by name, chunks as numbers of layers."""
    values: dict[str, Any] = {STARTED: made.name, "config": made.name}
    values["module"] = next((module for module, _ in MODELS if made.name.startswith(f"{module}_")), "")
    for name, value in flat(made):
        if isinstance(value, Made) and not value.fields and value.text and name.split(".")[0] in SECTIONS:
            values[name] = f"{UNSET}{value.text}{UNSET}"
        elif not isinstance(value, Made):
            values[name] = f"{UNSET}{value}{UNSET}" if isinstance(value, Source) else value
    spec = made.fields.get("model_spec")
    if isinstance(spec, Made) and spec.arguments and isinstance(spec.arguments[0], str):
        values |= {"config": spec.arguments[0], MTP: spec.fields.get("num_mtp_layers", 0)}
        values["model.converters"] = str(spec.fields.get("converters", ""))
    parts = made.fields.get("parallelism")
    listed = parts.fields.get("module_fqns_per_model_part") if isinstance(parts, Made) else None
    if isinstance(listed, list):
        values["parallelism.module_fqns_per_model_part"] = [_layers_of(part) for part in listed]
    saved = made.fields.get("activation_checkpoint")
    mode = "none" if saved is None and "activation_checkpoint" in made.fields else _mode(saved)
    return {name: value for name, value in values.items() if not name.startswith(APART)}, mode, None


def _mode(saved: Any) -> str | None:
    """Activation checkpointing by the class that configures it."""
    return "full" if isinstance(saved, Made) and saved.name.startswith("FullAC") else "selective" if saved is not None else None


def _layers_of(part: Any) -> int:
    """Decoder layers of a list of modules: those that are named, and ranges that the program's own function names."""
    count = 0
    for each in part if isinstance(part, list) else ():
        ranged = isinstance(each, Made) and len(each.arguments) == 2 and all(type(end) is int for end in each.arguments)
        count += each.arguments[1] - each.arguments[0] if ranged else str(each).startswith("layers.")
    return count


def _data(text: str, where: str, variables: Mapping[str, str] | None) -> tuple[dict[str, Any], str | None, int | None]:
    """The sections, the activation checkpointing and the processes that the launcher starts."""
    if is_python(text):
        made = program(text, where)
        if made is None:
            raise InputError(f"{where}: sets no field of {FRAMEWORK}, such as parallelism.tensor_parallel_degree")
        return _from_program(made)
    if is_toml(text):
        try:
            data = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise InputError(f"{where}: is not TOML: {error}") from error
        mode = data.get("activation_checkpoint", {})
        data.pop("activation_checkpoint", None)
        return data, str(mode.get("mode", "selective")) if isinstance(mode, dict) else "selective", None
    script = read_script(text, variables, where)
    words = _command(script)
    found = options(words)
    data = dict(map(_named, found))
    named = data.get("module") in {module for module, _ in MODELS} and "config" in data
    if not named and not any("." in option.name for option in found):
        raise InputError(f"{where}: holds no option of {FRAMEWORK}, such as --parallelism.tensor_parallel_degree")
    data |= {STARTED: data["config"]} if named else {}
    mode = next((word.partition(":")[2] for word in words if word.startswith("activation-checkpoint:")), None)
    old = data.pop("activation_checkpoint.mode", None)
    return data, mode or (str(old) if old else "selective"), world(script, found, where)


def _notation(text: str) -> str:
    """How a text writes fields; command lines say activation checkpointing as a word of its own, or as an option of its section."""
    if is_python(text) or is_toml(text):
        return "python" if is_python(text) else "toml"
    return "options by section" if re.search(r"--activation[_-]checkpoint\.mode\b", text) else "options"


def _command(script: Script) -> list[str]:
    """The command line with most options of sections, or of those that name a model's configuration."""

    def own(words: list[str]) -> tuple[int, int]:
        names = [option.name for option in options(words)]
        return sum("." in name for name in names), sum(name in ("module", "config") for name in names)

    return max(script.commands, key=own, default=[])


def _named(option: Option) -> tuple[str, Any]:
    """A field and its value; --section.no-field turns a switch off, and hyphens are underscores."""
    section, dot, name = option.name.rpartition(".")
    field = name.replace("-", "_") if section else name
    values = [value for value in option.values if not value.startswith("activation-checkpoint:")]  # a word of its own
    if section and field.startswith("no_") and not values:
        return f"{section}.{field.removeprefix('no_')}", "false"
    return f"{section}{dot}{field}", " ".join(values) or "true"


def _replicas(
    doc: Document, degrees: dict[str, int], devices: int | None, findings: list[Finding], said: list[str]
) -> tuple[int, int | None]:
    """(replicas, ranks that shard one); the latter fills up what devices leave unless it is given."""
    replicate = doc.whole("parallelism.data_parallel_replicate_degree") or 1
    given = doc.get("parallelism.data_parallel_shard_degree")
    if given is not None and str(given) != "-1":
        return replicate, doc.whole("parallelism.data_parallel_shard_degree")
    if devices is None:
        return replicate, None
    each = degrees["tp"] * degrees["cp"] * degrees["pp"] * replicate
    if devices % each or devices < each:
        findings.append(
            Finding(
                "C008",
                f"tp·cp·pp·dp_replicate = {each} does not divide the {devices} devices.",
                "the rest shards the weights",
                DIMENSIONS,
            )
        )
        return replicate, None
    said.append(f"data_parallel_shard_degree {devices // each}: −1 fills up the devices")
    return replicate, devices // each


def _in_sequences(doc: Document, degrees: Mapping[str, int], findings: list[Finding], said: list[str]) -> tuple[int, int | None]:
    """(micro-batch, global batch) as 0.3 has them."""
    given = doc.whole("training.local_batch_size", "training.batch_size")
    local = given or int(torchtitan().local_batch_size.value)
    said += [] if given else [f"local_batch_size {local}: {FRAMEWORK}'s default, as none is given"]
    micro = (doc.whole("parallelism.pipeline_parallel_microbatch_size") or 1) if degrees["pp"] > 1 else local
    if local % micro:
        sentence = f"pipeline_parallel_microbatch_size {micro} does not divide local_batch_size {local}."
        findings.append(Finding("C029", sentence, "", PIPELINE))
    batch = doc.get("training.global_batch_size")
    if batch not in (None, -1, "-1"):
        return micro, doc.whole("training.global_batch_size")
    if "dp" not in degrees:
        return micro, None
    said.append(f"global batch {local * degrees['dp']}: local_batch_size · data-parallel ranks, as none is given")
    return micro, local * degrees["dp"]


def _in_tokens(
    doc: Document, degrees: Mapping[str, int], tokens: int, seq_len: int | None, findings: list[Finding], said: list[str]
) -> tuple[int | None, int | None]:
    """(micro-batch, global batch) in sequences, as far as the sequence length is known; versions after 0.3 count tokens."""
    step, pipelined = doc.get(STEP_TOKENS), doc.whole("parallelism.num_pp_microbatches")
    flow = 1 if degrees["pp"] == 1 else pipelined
    if seq_len is None:
        said.append("batches are counted in tokens, and training.max_context_length, which makes sequences of them, is not given")
        return None, None
    whole = tokens * flow * degrees["dp"] if flow and "dp" in degrees else None
    filled = step is None or str(step).startswith("-")
    given = whole if filled else doc.whole(STEP_TOKENS)
    if filled and given:
        said.append(f"{STEP_TOKENS} {given}: one pass of micro-batches through every replica, as none is given")
    if whole and given and given % whole:
        sentence = f"num_tokens_per_train_step {given} is not a multiple of the {whole} tokens that all replicas take at a time."
        findings.append(Finding("C029", sentence, "gradients are accumulated over whole rounds", TRAINER))
    for name, value in ((MICRO_TOKENS, tokens), (STEP_TOKENS, given)):
        if value and value % seq_len:
            said.append(f"{name} {value} is priced as whole sequences: {max(1, value // seq_len)} of {seq_len}")
    return max(1, tokens // seq_len), max(1, given // seq_len) if given else None


def _model(doc: Document) -> str | None:
    module, config = doc.text("module", "model.name"), doc.text("config", "model.flavor")
    if module is None or config is None:
        return None
    flavor = config.lower().removeprefix(f"{module}_").replace("_", "-")
    return MODELS.get((module, flavor))


EAGER = ("norm", "activation", "rotary", "loss")
"""Kernels that run as chains where nothing compiles them."""
OWN_COMPONENTS = {"deepseek_v3": ("loss",)}
"""Module → what its configurations have compiled unless they are told otherwise (its config_registry.py); the others nothing."""


def _eager(doc: Document, said: list[str]) -> tuple[str, ...]:
    """Which kernels torch.compile leaves apart: it is off by default, and then compiles model and loss."""
    own = OWN_COMPONENTS.get(doc.text("module") or "") if doc.get("compile.enable") is None else None
    on = own is not None or doc.flag("compile.enable") or False
    listed = doc.get("compile.components")
    components = own or (str(listed) if listed is not None else "model loss")
    doc.skip("compile.")
    if on and "model" in components:
        return ()
    said.append("compile.components without model: its kernels run apart" if on else "compile.enable is off: kernels run apart")
    return tuple(kernel for kernel in EAGER if not (on and kernel == "loss" and "loss" in components))


def _without_mtp(name: str, layers: int) -> ModelSpec:
    """The catalog's model; MTP layers are trained only where the configuration says so."""
    model = load_model(name)
    return model.model_copy(update={"mtp": model.mtp if layers else None, "name": name})


def _schedule(doc: Document, where: str, pp: int) -> tuple[str, bool]:
    """(schedule, whether it puts several stages on a rank)."""
    text = doc.text("parallelism.pipeline_parallel_schedule") or "1F1B"
    key = text.lower()
    if pp == 1:
        return "1f1b", False
    if key not in SINGLE | SEVERAL:
        known = "1F1B, GPipe, Interleaved1F1B, ZBVZeroBubble and DualPipeV"
        raise InputError(f"{where}: pipeline_parallel_schedule = {text[:40]!r} is not known here; known are {known}")
    return (SINGLE | SEVERAL)[key], key in SEVERAL


def _stages(
    doc: Document, pp: int, schedule: str, several: bool, model: str | None, findings: list[Finding]
) -> tuple[int, SplitWish]:
    """Stages per rank, two by default where the schedule wants several, and how much less the first and the last of them hold."""
    first, last = (doc.whole(f"parallelism.pipeline_parallel_{end}_stage_less_layers", least=0) for end in ("first", "last"))
    less = (1 if first is None else first, 1 if last is None else last)
    depth = doc.whole("parallelism.pipeline_parallel_layers_per_stage")
    named, points = (doc.get(f"parallelism.{name}") for name in ("module_fqns_per_model_part", "pipeline_parallel_split_points"))
    if pp == 1:
        return 1, SplitWish()
    vpp = 2 if several else 1
    if parts := _listed(named):
        if len(parts) % pp:
            sentence = f"{len(parts)} parts of the model on pp = {pp} ranks: every rank holds as many."
            findings.append(Finding("C070", sentence, "every rank holds as many stages as the schedule runs", PIPELINE))
            return vpp, SplitWish(free=True)
        return len(parts) // pp, SplitWish(counts=parts)
    if depth is not None and model is not None:
        stages = -(-(load_model(model).num_layers + sum(less)) // depth)
        if stages % pp or (stages > pp) != several:
            wanted = "2 or more" if several else "1"
            sentence = f"{depth} layers per stage make {stages} stages; on pp = {pp} ranks the schedule wants {wanted} on each."
            findings.append(Finding("C070", sentence, "every rank holds as many stages as the schedule runs", PIPELINE))
            return vpp, SplitWish(free=True)
        vpp = stages // pp
    return vpp, SplitWish(free=True) if named or points else SplitWish(less=less)


def _listed(parts: Any) -> tuple[int, ...]:
    """Decoder layers of every part of the model, as numbers, lists of modules, or words that join these by commas."""
    listed = parts.split() if isinstance(parts, str) else parts if isinstance(parts, list) else []
    counts = [part if type(part) is int else _layers_of(part.split(",") if isinstance(part, str) else part) for part in listed]
    return tuple(counts) if sum(counts) else ()


def _cp_type(doc: Document) -> str:
    method = doc.text("parallelism.context_parallel_rotate_method") or "allgather"
    doc.get("parallelism.context_parallel_load_balancer")
    return "p2p" if method == "alltoall" else "allgather"


def _memory(
    doc: Document, degrees: dict[str, int], replicate: int, shard: int | None, mode: str | None, said: list[str]
) -> dict[str, str]:
    """Sharding and recompute."""
    policy = doc.text("parallelism.fsdp_reshard_after_forward") or "default"
    pipelined = degrees["pp"] > 1  # "default" is then "never", as the stack says of its stages: one program
    kept = policy == "never" and not pipelined
    group = (shard or 1) * degrees["cp"]
    stage = "zero2" if kept else "zero3"
    sharding = stage if shard is None or group > 1 else "zero3"
    if replicate > 1 and shard is not None and group > 1:
        sharding = f"hsdp:{group}"
        said += ["fsdp_reshard_after_forward never with replicas is priced as always: weights gathered twice"] if kept else []
    if pipelined and policy == "always":
        said.append("fsdp_reshard_after_forward always in a pipeline is priced as default: weights gathered once a step")
    if mode == "selective":
        said.append("selective activation checkpointing, by operators, is priced as no recompute")
    if doc.flag("training.enable_cpu_offload"):
        said.append("training.enable_cpu_offload is priced as if it were not given: all stays on the device")
    return {
        "optimizer_sharding": sharding,
        "recompute": "full" if mode == "full" else "none",
    }
