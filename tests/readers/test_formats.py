"""Jobs in the formats of the frameworks, written by hand as their users write them."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paraplan.optimizer.checking.checker import check
from paraplan.optimizer.readers import FORMATS, Job, read_job, read_text, recognise
from paraplan.search_spaces.errors import InputError

MEGATRON = """\
#!/bin/bash
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=8
TP=4; PP=4
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 8192   # Llama
)
PARALLEL_ARGS="
    --tensor-model-parallel-size ${TP} \\
    --pipeline-model-parallel-size $PP --sequence-parallel
    --context-parallel-size 2 --cp-comm-type a2a
    --num-layers-per-virtual-pipeline-stage 2
"
srun python pretrain_gpt.py ${MODEL_ARGS[@]} $PARALLEL_ARGS --micro-batch-size 1 --global-batch-size $((16*8)) --bf16 \\
  --use-distributed-optimizer --overlap-grad-reduce --recompute-activations --lr 3e-4 --frobnicate 3
"""
MINDSPEED = """\
source /usr/local/Ascend/ascend-toolkit/set_env.sh
NPUS_PER_NODE=16
NNODES=32
WORLD_SIZE=$(($NPUS_PER_NODE*$NNODES))
torchrun --nproc_per_node $NPUS_PER_NODE --nnodes $NNODES pretrain_gpt.py --num-layers 64 --noop-layers 61,62,63 \\
  --num-experts 256 \\
  --tensor-model-parallel-size 2 --pipeline-model-parallel-size 8 --expert-model-parallel-size 32 --expert-tensor-parallel-size 1 \\
  --sequence-parallel --context-parallel-algo ulysses_cp_algo --swap-optimizer --use-distributed-optimizer --micro-batch-size 1 \\
  --global-batch-size 3840 --recompute-granularity full --recompute-method block --recompute-num-layers 8 --use-flash-attn --bf16
"""
BRIDGE = (
    "torchrun --nproc-per-node 8 --nnodes 64 run_recipe.py --recipe kimi_k2_pretrain_config model.tensor_model_parallel_size=2 "
    "model.pipeline_model_parallel_size=16 model.expert_model_parallel_size=32 model.expert_tensor_parallel_size=1 "
    "model.sequence_parallel=true train.global_batch_size=4096 train.micro_batch_size=1 model.seq_length=4096 "
    "model.recompute_granularity=selective 'model.recompute_modules=[mla_up_proj,layernorm]' ddp.overlap_param_gather=false"
)
MINDFORMERS = """\
runner_config: {batch_size: 1}
parallel: {enable_parallel_optimizer: True, pipeline_config: {pipeline_interleave: true}}
parallel_config: {data_parallel: 4, model_parallel: 8, pipeline_stage: 8, expert_parallel: 32, micro_batch_num: 32,
                  use_seq_parallel: True}
recompute_config: {recompute: true}
model:
  model_config:
    num_layers: 61
    seq_length: 4096
    pp_interleave_num: 2
    offset: [[1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, -2]]
moe_config: {expert_num: 256}
"""
TITAN = (
    "torchrun --nnodes 64 --nproc_per_node 8 -m torchtitan.train --module deepseek_v3 --config deepseek_v3_671b "
    "--parallelism.tensor_parallel_degree 8 --parallelism.pipeline_parallel_degree 8 "
    "--parallelism.pipeline_parallel_schedule Interleaved1F1B --parallelism.expert_parallel_degree 64 "
    "--training.local_batch_size 16 --training.seq_len 4096 activation-checkpoint:full"
)
TOML = """\
[model]
name = "llama3"
flavor = "70B"
[parallelism]
tensor_parallel_degree = 8
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 4
[training]
local_batch_size = 2
seq_len = 8192
[activation_checkpoint]
mode = "none"
"""
DEEPSPEED = (
    '{"train_batch_size": 4096, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "gradient_clipping": 1.0, '
    '"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "sequence_parallel_size": 4, "frob": 3}'
)
JOB = """\
task:
  name: demo
  resource: {supernode: 4, accelerator_per_node: 32}
  strategy: {tensor_parallel: 8, pipeline_parallel: 4, data_parallel: 4, expert_parallel: 8, context_parallel: 1}
  fault_tolerance: {checkpoint_interval: 30min, node_failure_policy: reschedule, state_store: [/dev/shm, "s3://bucket"]}
"""
LAYOUT = "tp=8, pp=4, ep=8\nmicro_batch=2,recompute=full  # as it runs\n"


@pytest.mark.parametrize(
    ("text", "form", "devices", "batch", "degrees", "choices"),
    [
        (MEGATRON, "megatron-lm", 128, 128, {"tp": 4, "pp": 4, "cp": 2, "vpp": 4, "ep": 1, "etp": 1, "micro_batch": 1},
         {"cp_type": "a2a", "recompute": "selective:core_attn", "optimizer_sharding": "zero1", "sequence_parallel": "true"}),
        (MINDSPEED, "mindspeed-llm", 512, 3840, {"tp": 2, "pp": 8, "ep": 32, "etp": 1, "vpp": 1},
         {"offload": "optimizer:1", "recompute": "full:block:8", "optimizer_sharding": "zero1"}),
        (BRIDGE, "megatron-bridge", 512, 4096, {"tp": 2, "pp": 16, "ep": 32, "etp": 1, "micro_batch": 1},
         {"recompute": "selective:mla_up_proj+layernorm", "optimizer_sharding": "zero1"}),
        (MINDFORMERS, "mindformers", 256, 128, {"tp": 8, "pp": 8, "dp": 4, "ep": 32, "vpp": 2},
         {"recompute": "full", "optimizer_sharding": "zero1", "sequence_parallel": "true", "schedule": "interleaved"}),
        (TITAN, "torchtitan", 512, 128, {"tp": 8, "pp": 8, "dp": 8, "ep": 64, "etp": 1, "vpp": 2, "micro_batch": 1},
         {"recompute": "full", "optimizer_sharding": "zero3", "schedule": "interleaved", "sequence_parallel": "true"}),
        (TOML, "torchtitan", 64, 16, {"tp": 8, "pp": 1, "dp": 8, "micro_batch": 2},
         {"recompute": "none", "optimizer_sharding": "hsdp:4"}),
        (DEEPSPEED, "deepspeed", 64, 4096, {"tp": 1, "cp": 4, "micro_batch": 1},
         {"cp_type": "a2a", "optimizer_sharding": "zero3", "offload": "optimizer:1"}),
        (JOB, "job", 128, None, {"tp": 8, "pp": 4, "dp": 4, "ep": 8}, {}),
        (LAYOUT, "paraplan", 64, None, {"tp": 8, "pp": 4, "ep": 8, "micro_batch": 2}, {"recompute": "full"}),
    ],
)  # fmt: skip
def test_formats(text: str, form: str, devices: int, batch: int | None, degrees: dict[str, int], choices: dict[str, str]) -> None:
    assert recognise(text, "job") == form
    given = devices if form in ("deepspeed", "paraplan") else None
    job = read_text(text, "job", devices=given)
    assert (job.format, job.devices, job.global_batch) == (form, devices, batch)
    assert {name: job.degrees[name] for name in degrees} == degrees
    same = {name: job.choices[name] for name in choices}
    modules = {name: set(value.split(":")[-1].split("+")) for name, value in same.items()}
    assert modules == {name: set(value.split(":")[-1].split("+")) for name, value in choices.items()}


def test_what_is_not_understood_is_listed() -> None:
    assert read_text(MEGATRON, "job").unknown == ("--frobnicate 3",)
    assert read_text(DEEPSPEED, "job").unknown == ("frob = 3",)
    elsewhere = read_text('{"train_batch_size": 8, "autotuning": {"enabled": true, "bf61": 1}}', "job", form="deepspeed")
    assert elsewhere.unknown == ("autotuning.enabled = True", "autotuning.bf61 = 1")  # no misspelling: a name of another section
    assert not read_text(MINDSPEED, "job").unknown


def test_what_is_assumed_is_listed() -> None:
    job = read_text("pretrain_gpt.py --tensor-model-parallel-size 4 --num-experts 8 --num-layers 4", "job")
    said = " ".join(job.assumptions)
    for expected in ("etp 4: left out", "micro_batch 1", "allgather dispatcher", "not sharded", "not overlapped", "bf16"):
        assert expected in said


@pytest.mark.parametrize(
    ("words", "backend"),
    [("", "deepep"), ("--moe-flex-dispatcher-backend hybridep", "hybridep"), ("--moe-enable-deepep", "deepep")],
)
def test_the_flex_dispatcher_runs_the_kernels_that_are_named(words: str, backend: str) -> None:
    given = f"pretrain_gpt.py --num-layers 4 --num-experts 8 --moe-token-dispatcher-type flex {words}"
    assert read_text(given, "job").stack_changes["flex_backend"] == backend


def test_noops_leave_the_real_layers() -> None:
    job = read_text(MINDSPEED, "job")
    assert job.sizes["layers"] == 61
    assert job.split.counts == (8,) * 7 + (5,)


def test_the_two_chunks_of_dualpipev_are_no_interleaving() -> None:
    job = read_text(MINDSPEED.replace("--bf16", "--bf16 --schedules-method dualpipev"), "job")
    assert (job.choices["schedule"], job.degrees["vpp"]) == ("dualpipev", 2)


def test_offsets_add_up() -> None:
    job = read_text(MINDFORMERS, "job")
    assert job.split.counts == (4,) * 15 + (1,)
    wrong = read_text(MINDFORMERS.replace("-2", "-1"), "job")
    assert [finding.rule for finding in wrong.findings] == ["C071"]


def test_layouts_as_python_lists() -> None:
    text = (
        "model.tensor_model_parallel_size=2 model.pipeline_model_parallel_size=2 "
        "'model.pipeline_model_parallel_layout=[[embedding,decoder,decoder],[decoder],[decoder,decoder],[decoder,mtp,loss]]'"
    )
    job = read_text(text, "job")
    assert job.degrees["vpp"] == 2
    assert [len(stage.chunks) for stage in job.split.layout] == [2, 2]


@pytest.mark.parametrize(
    ("changes", "total"),
    [({"train_batch_size": None, "gradient_accumulation_steps": 2}, 128), ({"train_micro_batch_size_per_gpu": None}, 4096)],
)
def test_batches_follow_from_two_of_three(changes: dict[str, Any], total: int) -> None:
    import json

    data = {**json.loads(DEEPSPEED), **changes}
    job = read_text(json.dumps({key: value for key, value in data.items() if value is not None}), "ds.json", devices=256)
    assert job.global_batch == total
    assert job.global_batch % (job.degrees["micro_batch"] * 64) == 0


@pytest.mark.parametrize(
    ("text", "form", "said"),
    [
        ("", None, "is empty"),
        ("   \n", None, "is empty"),
        ("hello world", None, "no format"),
        ("- a\n- b\n", None, "no format"),
        ('{"train_batch_size": 4', None, "not complete JSON"),
        ('{"a": 1}', None, "no format"),
        ("run --tensor-model-parallel-size 4", "torchtitan", "no option of torchtitan"),
        ("tp=8", "megatron-lm", "no option of megatron-lm"),
        ("pretrain --tensor-model-parallel-size acht", None, "'acht' is not a whole number"),
        ("pretrain --tensor-model-parallel-size -3", None, "from 1 to"),
        ("pretrain --tensor-model-parallel-size 4.0", None, "not a whole number"),
        ("pretrain --tensor-model-parallel-size " + "9" * 400, None, "from 1 to"),
        ("pretrain --tensor-model-parallel-size ４", None, "not a whole number"),
        ("pretrain --tensor-model-parallel-size $TP --num-layers 4", None, "--set TP=8"),
        (
            "pretrain --num-layers 4 --hidden-size 64 --num-attention-heads 4 --num-experts 8 --moe-layer-freq '__import__(1)'",
            None,
            "moe-layer-freq",
        ),
        (
            "pretrain --num-layers 4 --hidden-size 64 --num-attention-heads 4 --num-experts 8 --moe-layer-freq '[1]*999999999'",
            None,
            "moe-layer-freq",
        ),
        ("torchrun --nproc_per_node 0 --nnodes 4 x.py --num-layers 4", None, "are no job"),
        (f"a: &a [{'x, ' * 1000}]\nb: &b [{'*a, ' * 100}]\nc: [{'*b, ' * 99}]\ntask: {{strategy: {{}}}}", None, "unfold"),
        ("task: &t {strategy: *t}", None, "alias *t"),
        ("import os\nos.system('true')\nconfig.x = 1\n", None, "sets no field of Megatron-Bridge or torchtitan"),
        ("WORLD_SIZE = 2\nGROUPS = {}\ndef build(): pass\n", None, "judge them with --groups"),
        ("def f(:\n  c.parallelism.tensor_parallel_degree = 1\n", "torchtitan", ""),
        ('{"zero_optimization": {"stage": "auto"}}', None, "stage is auto"),
        ('{"zero_optimization": {"stage": 1}, ', None, "is not complete JSON"),
        ("task: {strategy: {tensor_parallel: eight}}", None, "strategy.tensor_parallel = 'eight'"),
        ("task: {strategy: [1, 2]}", None, "task.strategy is missing"),
        ("task: {resource: {supernode: 0}, strategy: {tensor_parallel: 8}}", None, "resource.supernode = 0"),
        ("[parallelism]\ntensor_parallel_degree = \n", None, "not TOML"),
        ("[parallelism]\ntensor_parallel_degree = 'x'\n", None, "not a whole number"),
        ("parallel_config: 3", "mindformers", "parallel_config is missing"),
        ("tp=8,tp=4", None, "given twice"),
        ("tp=0", None, "at least 1"),
        ("!!python/object/apply:os.system ['true']\nstrategy: 1", "job", ""),
    ],
)
def test_bad_input_is_one_sentence(text: str, form: str | None, said: str) -> None:
    with pytest.raises(InputError) as caught:
        read_text(text, "job.txt", form=form)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "\x00" not in str(caught.value)


def test_files_that_are_no_text(tmp_path: Path) -> None:
    for name, content, said in (
        ("a", b"\x00\x01\xff", "UTF-8"),
        ("b", b"--num-layers\x00 4", "null"),
        ("c", b"a" * 4_000_001, "bytes"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=said):
            read_job(tmp_path / name)
    for missing in ("nothing.sh", "tp:8", "x" * 5000, "nul\x00name", str(tmp_path)):
        with pytest.raises(InputError):
            read_job(missing)


def test_a_layout_in_place_of_a_file() -> None:
    assert read_job("tp=8,pp=4").degrees["tp"] == 8


def test_every_format_has_a_reader() -> None:
    for form in FORMATS:
        with pytest.raises(InputError):
            read_text("nothing of the kind", "x", form=form)
    with pytest.raises(InputError, match="--format"):
        read_job("tp=8", form="slurm")


SAMPLES = (MEGATRON, MINDSPEED, BRIDGE, MINDFORMERS, TITAN, TOML, DEEPSPEED, JOB, LAYOUT)
SLIPS = (
    "0",
    "-1",
    "61",
    "999999999",
    "1e9",
    "null",
    "true",
    "[]",
    "$X",
    "$(x)",
    "\n",
    "'",
    '"',
    "=",
    ":",
    "#",
    "é",
    "2.5",
    "",
    "(",
    "full",
)


@settings(max_examples=80)
@given(st.sampled_from(SAMPLES), st.lists(st.tuples(st.integers(0, 10_000), st.sampled_from(SLIPS)), min_size=1, max_size=3))
def test_slips_end_in_a_sentence_or_a_judgement(text: str, slips: list[tuple[int, str]]) -> None:
    for place, slip in slips:
        words = [match.span() for match in re.finditer(r"\w+", text)]
        begin, end = words[place % len(words)]
        text = text[:begin] + slip + text[end:]
    try:
        found = check(read_text(text, "job"), best=False)
    except InputError as error:
        assert "\n" not in str(error)
    else:
        assert found.ok is not bool(found.broken)


def test_stages_of_a_job_yaml() -> None:
    text = JOB.replace("context_parallel: 1", "context_parallel: 1, layers_per_stage: [7, 8, 8, 7], precision: fp8, cp_type: a2a")
    job = read_text(text, "job.yaml")
    assert job.split.counts == (7, 8, 8, 7)
    assert (job.precision, job.choices["cp_type"]) == ("fp8", "a2a")
    assert not job.unknown


def test_chunks_of_a_job_yaml() -> None:
    cut = "virtual_pipeline_parallel: 2, layers_per_chunk: [3, 4, 4, 3, 4, 4, 4, 4]"
    chunked = JOB.replace("context_parallel: 1", f"context_parallel: 1, {cut}")
    assert read_text(chunked, "job.yaml").split.counts == (3, 4, 4, 3, 4, 4, 4, 4)
    told = read_text(chunked.replace("layers_per_chunk", "layers_per_stage"), "job.yaml")
    assert told.split.free and any("layers_per_chunk" in each for each in told.assumptions)


def test_windows_line_ends_and_marks(tmp_path: Path) -> None:
    path = tmp_path / "größe 模型.sh"
    path.write_bytes(b"\xef\xbb\xbf" + MEGATRON.replace("\n", "\r\n").encode())
    job = read_job(path)
    assert isinstance(job, Job)
    assert job.degrees == read_text(MEGATRON, "job").degrees


def test_deepspeed_takes_comments_and_trailing_commas() -> None:
    text = """{ // of the run
      "train_batch_size": 64, # all
      "zero_optimization": {"stage": 2,}, /* no
      offload */ "note": "http://x/*y*/ # z, ]",
    }"""
    job = read_text(text, "ds.json", devices=8)
    assert (job.format, job.global_batch, job.choices["optimizer_sharding"]) == ("deepspeed", 64, "zero2")
    assert job.unknown == ("note = http://x/*y*/ # z, ]",)


@pytest.mark.parametrize(
    ("pp", "replicas", "policy", "sharding", "said"),
    [
        (1, 1, "never", "zero2", ""),
        (1, 1, "default", "zero3", ""),
        (2, 1, "never", "zero3", ""),  # as "default" comes to in a pipeline
        (2, 1, "always", "zero3", "priced as default"),
        (1, 2, "never", "hsdp:4", "priced as always"),
    ],
)
def test_torchtitan_s_resharding_is_read_as_it_runs(pp: int, replicas: int, policy: str, sharding: str, said: str) -> None:
    degrees = f"--parallelism.pipeline_parallel_degree {pp} --parallelism.data_parallel_replicate_degree {replicas}"
    words = f"--parallelism.data_parallel_shard_degree 4 --parallelism.fsdp_reshard_after_forward {policy} {degrees}"
    job = read_text(f"torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 --config llama3_8b {words}", "job")
    assert job.choices["optimizer_sharding"] == sharding
    told = [each for each in job.assumptions if "fsdp_reshard_after_forward" in each]
    assert len(told) == bool(said) and all(said in each for each in told)


@pytest.mark.parametrize("words", ["--module deepseek_v3 --config deepseek_v3_16b", "--module=llama3 --config=llama3_8b"])
def test_torchtitan_from_a_configuration_that_it_ships(words: str) -> None:
    """Without a further option, and what the configuration sets is said not to be known; a module of one's own is another file."""
    line = f"torchrun --nproc_per_node 8 -m torchtitan.train {words}"
    assert recognise(line, "job") == "torchtitan"
    job = read_text(line, "job")
    assert job.model is not None and job.model.name in ("deepseek-v2-lite", "llama-3.1-8b")
    assert (job.devices, job.degrees["dp"], job.seq_len) == (8, 8, None)
    assert any("beyond these is not known here" in each for each in job.assumptions)
    assert any(each.startswith("local_batch_size 8: torchtitan's default") for each in job.assumptions)
    with pytest.raises(InputError):
        read_text("torchrun -m torchtitan.train --module mine --config planned", "job")


@pytest.mark.parametrize(
    ("zero", "broken"),
    [
        ({"stage": 3, "stage3_foo": 1}, ["zero_optimization.stage3_foo is no field"]),
        ({"stage": 2, "reduce_everything": True}, ["zero_optimization.reduce_everything is no field"]),
        ({"stage": 2, "overlap_com": "auto"}, ["did you mean 'overlap_comm'"]),
        ({"stage": 3, "offload_param": {"device": "cpu", "pinned": True}}, ["offload_param.pinned is no field"]),
        ({"stage": 3, "zero_hpz_partition_size": 5}, ["zero_hpz_partition_size 5 does not divide the 32 devices"]),
        ({"stage": 3, "zero_hpz_partition_size": 8, "stage3_prefetch_bucket_size": 1, "prefetch_bucket_size": 1}, []),
        ({"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "leaf_module": {"names": ["moe"]}}, []),
    ],
)
def test_zero_takes_its_own_fields_only(zero: dict[str, Any], broken: list[str]) -> None:
    """DeepSpeed refuses an unknown key in this section, and ranks that do not divide into groups; as its own class does."""
    config = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero}
    job = read_text(json.dumps(config), "ds.json", devices=32)
    assert [each.rule for each in job.findings] == ["C111"] * len(broken)
    assert all(said in each.sentence for said, each in zip(broken, job.findings, strict=True))
    assert not job.unknown


def test_older_words_of_zero() -> None:
    """True is stage 1, and cpu_offload the optimizer's."""

    def read(zero: object) -> Job:
        return read_text(json.dumps({"train_batch_size": 64, "zero_optimization": zero}), "ds.json", devices=32)

    assert read(True).choices["optimizer_sharding"] == "zero1"
    assert read({"stage": 2, "cpu_offload": True}).choices["offload"] == "optimizer:1"
    assert "zero_quantized_weights is not priced" in read({"stage": 3, "zero_quantized_weights": True}).assumptions


def test_yaml_anchors_are_followed() -> None:
    text = "common: &c {data_parallel: 4, model_parallel: 8}\nparallel_config: {<<: *c, pipeline_stage: 8, micro_batch_num: 32}\n"
    job = read_text(text + "train_dataset: &d {seq_length: 4096}\ntrain_dataset_task: {dataset_config: *d}\n", "mf.yaml")
    assert {name: job.degrees[name] for name in ("tp", "pp", "dp")} == {"tp": 8, "pp": 8, "dp": 4}


PROGRAM = """
import recipes
TP = 4

def configure():
    cfg = recipes.kimi_k2_pretrain_config()
    cfg.model.tensor_model_parallel_size = TP * 2
    cfg.model.pipeline_model_parallel_layout = [["embedding"] + ["decoder"] * 4, ["decoder", "loss"]]
    if True:
        cfg.model.pipeline_model_parallel_size = 2
    cfg.train.micro_batch_size, cfg.train.global_batch_size = 1, 64
    cfg.train.global_batch_size = 128
    cfg.train.train_iters = int(os.environ["STEPS"])
    __import__("os").system("touch {victim}")
    return cfg
"""


def test_a_program_is_read_and_not_run(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    job = read_text(PROGRAM.replace("{victim}", str(victim)), "configure.py", devices=64, form="megatron-bridge")
    assert not victim.exists()
    assert {name: job.degrees[name] for name in ("tp", "pp")} == {"tp": 8, "pp": 2}
    assert job.global_batch == 128


def test_a_script_leads_to_the_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"train_batch_size": 64, "zero_optimization": {"stage": 2}}')
    script = tmp_path / "run.sh"
    launch = "torchrun --nnodes 2 --nproc-per-node 8 train.py --deepspeed_config"
    script.write_text(f'HERE=$(dirname "$0")\n{launch} "$HERE/ds.json"\n')
    job = read_job(script)
    assert (job.format, job.devices, job.choices["optimizer_sharding"]) == ("deepspeed", 16, "zero2")
    script.write_text(f"{launch} /etc/hosts.json\n")
    with pytest.raises(InputError, match="no format that is known"):
        read_job(script)


def test_shared_experts_are_as_wide_as_routed_ones() -> None:
    moe = "--bf16 --num-experts 8 --moe-ffn-hidden-size 512"
    one, two = (read_text(MINDSPEED.replace("--bf16", f"{moe} --n-shared-experts {n}"), "job") for n in (1, 2))
    assert (one.sizes["shared_width"], two.sizes["shared_width"]) == (512, 1024)


def test_an_option_that_may_change_the_model_stands_apart() -> None:
    text = MINDSPEED.replace("--bf16", "--bf16 --moe-new-thing 3 --frobnicate --seq-aux --mtp-loss-scaling-factor 0.3")
    found = check(read_text(text, "job"), best=False)
    assert (found.may_change_model, found.unknown) == (("--moe-new-thing 3",), ("--frobnicate",))


FLAT_JOB = "supernode: 4\naccelerator_per_node: 32\ntensor_parallel: 4\npipeline_parallel: 4\ndata_parallel: 8\n"


@pytest.mark.parametrize(
    "text",
    [
        FLAT_JOB,
        "\n".join(reversed(FLAT_JOB.split("\n"))),
        f"task:\n{textwrap.indent(FLAT_JOB, '  ')}",
        "supernode: 4\naccelerator_per_node: 32\nstrategy: {tensor_parallel: 4, pipeline_parallel: 4, data_parallel: 8}",
        "resource: {supernode: 4, accelerator_per_node: 32}\nstrategy: {tp: 4, pp: 4, dp: 8}",
        '{"supernode": 4, "accelerator_per_node": 32, "tensor_parallel": 4, "pipeline_parallel": 4, "data_parallel": 8}',
    ],
)
def test_a_flat_job_is_read_as_the_nested_one(text: str) -> None:
    job = read_text(text, "job.yaml")
    assert job.format == "job" and not job.unknown
    assert (job.devices, job.supernode_size) == (128, 32)
    assert [job.degrees[name] for name in ("tp", "pp", "dp")] == [4, 4, 8]


def test_ways_to_cut_stages_that_exclude_each_other() -> None:
    """A layout string beside no-ops, beside another number of layers, and beside dualpipev."""

    def broken(options: str) -> set[str]:
        head = "--hidden-size 1024 --num-attention-heads 16 --micro-batch-size 1 --global-batch-size 16 --seq-length 1024 --bf16"
        text = f"torchrun --nproc_per_node 8 pretrain_gpt.py {head} --pipeline-model-parallel-size 2 {options}"
        found = check(read_text(text, "job", form="mindspeed-llm"), best=False)
        return {each.rule for each in found.broken}

    string = "--pipeline-model-parallel-layout 'Et*3|t*4L'"
    assert not broken(f"--num-layers 7 {string}")
    assert broken(f"--num-layers 8 {string}") == {"C063a"}
    assert broken(f"--num-layers 8 --noop-layers 7 {string}") == {"C063", "C072"}
    assert broken("--num-layers 8 --noop-layers 7 --num-layer-list 3,4") == {"C072"}
    assert "C074" in broken(f"--num-layers 7 {string} --schedules-method dualpipev")


OWN_MODEL = """\
parallel_config: {{data_parallel: 4, model_parallel: 2, pipeline_stage: 2, micro_batch_num: 8}}
runner_config: {{batch_size: 1}}
model: {{model_config: {{{fields}}}}}
"""
SHAPE = {"num_layers": 24, "num_heads": 16, "n_kv_heads": 8, "hidden_size": 2048, "intermediate_size": 5632, "vocab_size": 32000}


def test_mindformers_describes_a_model_of_its_own() -> None:
    """A model that no catalog has is judged for memory and time: 24·(2048² · 3 + 3·2048·5632 + 2·2048) + 2·32000·2048 + 2048."""
    fields = ", ".join(f"{name}: {value}" for name, value in {**SHAPE, "seq_length": 4096, "type": "LlamaConfig"}.items())
    job = read_text(OWN_MODEL.format(fields=fields), "own.yaml")
    assert job.model is not None
    assert job.model.parameters() == 24 * (3 * 2048**2 + 3 * 2048 * 5632 + 2 * 2048) + 2 * 32000 * 2048 + 2048
    found = check(job, cluster="atlas-800t-a2", best=False)
    assert found.fit is not None and found.fit.verdict == "fits"


@pytest.mark.parametrize("name", ["param_init_type", "params_dtype"])
def test_mindformers_weights_of_16_bits_have_no_other_copy(name: str) -> None:
    """As Llama 2's files have it: 2 bytes of accumulated gradient in place of 4, two FP32 moments in place of three states."""
    fields = ", ".join(f"{field}: {value}" for field, value in {**SHAPE, "seq_length": 4096, "type": "LlamaConfig"}.items())
    peaks = []
    for kept, changed in (("float32", {}), ("float16", {"gradient_bytes": 2, "optimizer_bytes": 8.0})):
        job = read_text(OWN_MODEL.format(fields=f"{fields}, {name}: {kept}"), "own.yaml")
        assert job.stack_changes == changed
        fit = check(job, cluster="atlas-800t-a2", best=False).fit
        assert fit is not None
        peaks.append(fit.peak_gib)
    layer = 3 * 2048**2 + 3 * 2048 * 5632 + 2 * 2048
    first = (12 * layer + 32000 * 2048) / 2  # of two stages, over two TP ranks
    assert peaks[0] - peaks[1] == pytest.approx(first * (2 + 4) / 2**30, rel=0.01)  # enable_parallel_optimizer is off


def test_mindformers_has_experts_in_a_section_of_their_own() -> None:
    """Models by class: every layer's feed-forward part eight times over, with a router of 8 · 2048."""
    fields = ", ".join(f"{name}: {value}" for name, value in {**SHAPE, "seq_length": 4096, "type": "LlamaConfig"}.items())
    text = OWN_MODEL.format(fields=fields)
    dense, moe = (read_text(text + more, "own.yaml").model for more in ("", "moe_config: {expert_num: 8, num_experts_chosen: 2}\n"))
    assert dense is not None and moe is not None
    assert moe.parameters() - dense.parameters() == 24 * (7 * 3 * 2048 * 5632 + 8 * 2048)
    for more, across in (("", False), (", use_allgather_dispatcher: True", True), (", expert_model_parallel: 1", True)):
        own = read_text(f"{text}moe_config: {{expert_num: 8, num_experts_chosen: 2{more}}}\n", "own.yaml")
        assert own.stack_changes.get("experts_across_tp", True) is across
        assert own.degrees["etp"] == (1 if across else 2)  # weights by class are cut over (ep, mp, 1)
    shared = read_text(text + "moe_config: {expert_num: 8, shared_expert_num: 1}\n", "own.yaml")
    assert shared.model is None and any("shared experts" in said for said in shared.assumptions)


def test_a_mindformers_width_follows_from_its_multiplier() -> None:
    """As Llama 3.1 70B has it: 4 · 8192 · 1.31 · 2 / 3, rounded up to a multiple of 256."""
    given = {**SHAPE, "hidden_size": 8192, "seq_length": 4096, "type": "LlamaConfig", "ffn_dim_multiplier": 1.3, "multiple_of": 256}
    fields = ", ".join(f"{name}: {value}" for name, value in given.items() if name != "intermediate_size")
    job = read_text(OWN_MODEL.format(fields=fields), "own.yaml")
    assert job.model is not None and job.sizes["mlp_width"] == 28672


def test_slices_of_sequences_in_a_pipeline_have_no_price() -> None:
    fields = ", ".join(f"{name}: {value}" for name, value in {**SHAPE, "seq_length": 4096, "type": "LlamaConfig"}.items())
    text = OWN_MODEL.format(fields=fields) + "parallel: {pipeline_config: {pipeline_scheduler: seqpipe}}\n"
    found = check(read_text(text, "own.yaml"), cluster="atlas-800t-a2", best=False)
    assert found.legal and found.priced is None and "slices of sequences" in found.unpriced[0]


def test_a_pipeline_scheduler_that_mindformers_lacks_is_named() -> None:
    """AutoParallel.pipeline of MindSpore refuses every name but six."""
    text = "parallel_config: {pipeline_stage: 2}\nparallel: {pipeline_config: {pipeline_scheduler: %s}}"
    (found,) = read_text(text % "zero_buble", "job.yaml", form="mindformers").findings
    assert found.rule == "C078" and found.sentence.endswith("seqsmartvpp (did you mean zero_bubble_v?).")
    assert not read_text(text % "zero_bubble_v", "job.yaml", form="mindformers").findings


def test_mindformers_models_by_class_take_sequence_parallelism_without_tp() -> None:
    fields = ", ".join(f"{name}: {value}" for name, value in {**SHAPE, "seq_length": 4096, "type": "LlamaConfig"}.items())
    text = OWN_MODEL.format(fields=fields).replace("model_parallel: 2", "model_parallel: 1, use_seq_parallel: True")
    by_class, by_type = (
        check(read_text(text, "a"), best=False),
        check(read_text(text.replace("type: LlamaConfig", "model_type: llama"), "b"), best=False),
    )
    assert not by_class.broken and [each.rule for each in by_type.broken] == ["C040"]


def test_a_yaml_that_does_not_train_is_refused() -> None:
    with pytest.raises(InputError, match="run_mode = predict is no training job"):
        read_text(MINDFORMERS + "run_mode: predict\n", "own.yaml")


@pytest.mark.parametrize(("left_out", "said"), [("type", "has no model_type"), ("vocab_size", "vocab_size is missing")])
def test_what_keeps_a_mindformers_model_from_being_read_is_told(left_out: str, said: str) -> None:
    given = {**SHAPE, "seq_length": 4096, "type": "LlamaConfig"}
    fields = ", ".join(f"{name}: {value}" for name, value in given.items() if name != left_out)
    job = read_text(OWN_MODEL.format(fields=fields), "own.yaml")
    assert job.model is None and any(said in each for each in job.assumptions)


def test_fields_of_a_mindformers_model_that_nothing_reads_are_listed() -> None:
    """Experts under another model's name are missing, which is told where the price is; what is over stands as not understood."""
    experts = {"num_experts_per_tok": 8, "moe_intermediate_size": 768, "num_experts": 128, "rope_theta": 1000000, "frob": 3}
    given = {**SHAPE, "seq_length": 4096, "model_type": "qwen3_moe", "head_dim": 128, **experts}

    def read(fields: dict[str, Any]) -> Job:
        return read_text(OWN_MODEL.format(fields=", ".join(f"{name}: {value}" for name, value in fields.items())), "own.yaml")

    job = read(given)
    assert job.model is not None and job.unknown == ("model.model_config.frob = 3",)
    other = read({("n_routed_experts" if name == "num_experts" else name): value for name, value in given.items()})
    assert other.model is None and not other.unknown
    assert any("num_experts is missing" in said for said in check(other, cluster="atlas-800t-a2", best=False).unpriced)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mbs=1,tp=2", "^layout: 'mbs' is not a column; did you mean 'micro_batch'"),
        ("tp=8,,pp=2", "^layout: item 2 of .* is empty"),
    ],
)
def test_a_layout_with_a_mistake_is_known_for_one(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_job(text)


def test_lines_of_a_layout_may_end_in_commas() -> None:
    assert read_text("tp=8,\npp=2,  # stages\n\nvpp=2\n", "job").degrees["vpp"] == 2


def test_a_switch_before_a_word_of_its_own_is_off() -> None:
    """Of torchtitan's command line, whose activation checkpointing is named by a word."""
    text = "torchrun --parallelism.tensor_parallel_degree 2 --parallelism.no-enable-sequence-parallel activation-checkpoint:none"
    assert read_text(text, "job").choices["sequence_parallel"] == "false"


def test_a_recipe_s_name_says_its_model_and_precision() -> None:
    """A model is known by the beginning of its name where no other begins so."""
    line = "python run_recipe.py --recipe {} model.tensor_model_parallel_size=2 model.seq_length=4096"
    nano = read_text(line.format("nemotron_3_nano_pretrain_mxfp8_config"), "job")
    assert (nano.model_name, nano.precision) == ("nemotron-3-nano-30b-a3b", "fp8")
    several = read_text(line.format("qwen3_pretrain_config"), "job")
    assert (several.model_name, several.precision) == (None, "bf16")
    asked = read_text(line.format("llama31_8b_pretrain_bf16_config") + " mixed_precision=bf16_with_mxfp8_mixed", "job")
    assert (asked.model_name, asked.precision) == ("llama-3.1-8b", "fp8")


@pytest.mark.parametrize(
    ("more", "apart"),
    [
        ("--config llama3_8b", ("norm", "activation", "rotary", "loss")),
        ("--config llama3_8b --compile.enable", ()),
        ("--config llama3_8b --compile.enable --compile.components loss", ("norm", "activation", "rotary")),
        ("--config llama3_8b --compile.no-enable", ("norm", "activation", "rotary", "loss")),
    ],
)
def test_torchtitan_compiles_what_it_is_told_to(more: str, apart: tuple[str, ...]) -> None:
    """It is off by default, and on it is the model and the loss; the deepseek_v3 configurations compile their loss alone."""
    line = "torchrun --nproc_per_node 8 -m torchtitan.train --module {} {} --training.seq_len 4096"
    job = read_text(line.format("llama3", more), "job")
    assert job.stack_changes["eager_kernels"] == apart and not job.unknown
    own = read_text(line.format("deepseek_v3", "--config deepseek_v3_16b"), "job")
    assert own.stack_changes["eager_kernels"] == ("norm", "activation", "rotary")


def test_torchtitan_starts_within_the_positions_of_its_models() -> None:
    line = "torchrun --nproc_per_node 8 -m torchtitan.train --module qwen3 --config qwen3_8b --training.seq_len"
    assert [each.rule for each in read_text(f"{line} 65536", "job").findings] == ["C043"]
    assert not read_text(f"{line} 40960", "job").findings


def test_torchtitan_s_offload_of_everything_is_not_priced() -> None:
    line = "torchrun --nproc_per_node 8 -m torchtitan.train --module qwen3 --config qwen3_8b --training.enable_cpu_offload"
    job = read_text(line, "job")
    assert "offload" not in job.choices and any("enable_cpu_offload is priced as if" in each for each in job.assumptions)
