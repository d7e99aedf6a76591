"""Launch scripts as people write them: what they read in and start, where their output goes, and how many processes they start."""

from __future__ import annotations

from pathlib import Path

import pytest
from paraplan.optimizer.checking.checker import check
from paraplan.optimizer.readers import Job, read_job, read_text
from paraplan.optimizer.readers.arguments import empty_words, options
from paraplan.optimizer.readers.shell import read_script, shown
from paraplan.search_spaces.errors import InputError


def words(text: str) -> list[str]:
    """Of the last command line."""
    return read_script(text).commands[-1]


def degrees(job: Job) -> dict[str, int]:
    return {name: job.degrees[name] for name in ("tp", "pp")}


# --- words of a command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('A=(--a)\nA+=(--b)\nrun "${A[@]}"', ["run", "--a", "--b"]),
        ('A=--a\nA+=" --b"\nrun $A', ["run", "--a", "--b"]),
        ('A=(--a)\nA+=x\nrun "${A[@]}"', ["run", "--ax"]),
        ('A=()\nrun --a "${A[@]}" b', ["run", "--a", "b"]),
        ('declare -a A=(--a)\nlocal -r B=1\nrun "${A[@]}" $B', ["run", "--a", "1"]),
        ('A=(x y z)\nrun ${A[1]} ${#A[@]} "${A[@]}"', ["run", "y", "3", "x", "y", "z"]),
        ("run --a 1 > train.log 2>&1 &", ["run", "--a", "1"]),
        ("run --a 1 >> log 2>> err < input", ["run", "--a", "1"]),
        ("run --a 1 &> log", ["run", "--a", "1"]),
        ("run > >(tee log) --a 1", ["run", "--a", "1"]),
        ("run --a <path> --b 1", ["run", "--a", "<path>", "--b", "1"]),
        ("run --a 'x > y'", ["run", "--a", "x > y"]),
        ("X=1\nrun --a ${X:+2}${Y:+3} ${Y:+4}", ["run", "--a", "2"]),
        ("X=\nrun --a ${X:+2} ${X+3}", ["run", "--a"]),
        ("NAME=TP\nTP=8\nrun ${!NAME} ${!OTHER:-4}", ["run", "8", "4"]),
        ('C=8,4,1\nIFS=, read -r TP PP REST <<< "$C"\nrun $TP $PP $REST', ["run", "8", "4", "1"]),
        ('read -r A B <<< \'x y z\'\nrun "$A" "$B"', ["run", "x", "y z"]),
        ("IFS=':' read -ra P <<< 'a:b'\nrun ${P[1]} ${#P[@]}", ["run", "b", "2"]),
        ("IFS=, read -r A B <<< 'x y,z'\nread -r C D <<< 'p q'\nrun $C $D", ["run", "p", "q"]),
        ("read -r -d '' A <<'EOF' || true\nrun --a 1\nrun --b 2 --c 3\nEOF\nbash -c \"$A\"", ["run", "--b", "2", "--c", "3"]),
        ("TP=8\nbash <<EOF\nrun --a $TP \\$TP\nEOF", ["run", "--a", "8", "8"]),
        ("TP=8\ncat > run.sh <<'EOF'\nrun --a $TP\nEOF\nsbatch run.sh", ["run", "--a", "8"]),
        ("cat > model.yaml <<EOF\nrun --no\nEOF\nrun --yes", ["run", "--yes"]),
        ("run --a 1\nexit 0\nrun --b 2", ["run", "--a", "1"]),
        ("cd / || exit 1\nif [ -z $X ]; then exit 1; fi\nrun --a 1", ["run", "--a", "1"]),
    ],
)
def test_words(text: str, found: list[str]) -> None:
    commands = [command for command in read_script(text).commands if "run" in command or "--a" in command]
    assert [word for word in commands[-1] if word and not word.startswith("\x00(…)")] == found


@pytest.mark.parametrize("last", ["$@", '"$@"', "${EXTRA_ARGS}", '"${EXTRA[@]}"', "$UNKNOWN", "> log 2>&1 &", '"${X:+$X}"'])
def test_what_stands_behind_the_last_option_is_no_value_of_it(last: str) -> None:
    """What may stand for options, and holds none here, is told."""
    command = words(f"run --flag --mbs 1 {last}")
    assert [(option.name, option.values) for option in options(command)] == [("flag", ()), ("mbs", ("1",))]
    told = [shown(word) for word in empty_words(command)]
    assert told == ([last.strip('"').replace("${EXTRA_ARGS}", "$EXTRA_ARGS")] if "$" in last and "+" not in last else [])


def test_an_option_whose_value_is_missing_keeps_it_open() -> None:
    """It is not taken for its default."""
    assert [option.values for option in options(words("run --tp $TP --flag $MORE_ARGS"))] == [("\x00TP\x00",), ()]
    for option in ("--num-layers 4 --tensor-model-parallel-size $TP", '--parallelism.tensor_parallel_degree "$TP"'):
        with pytest.raises(InputError, match=r"\$TP has no value in the file"):
            read_text(f"torchrun x.py {option}", "run.sh")
    with pytest.raises(InputError, match="--tensor-model-parallel-size has no value in the file"):
        read_text("torchrun x.py --num-layers 4 --tensor-model-parallel-size $TP_ARGS --micro-batch-size 1", "run.sh")


def test_options_in_what_holds_no_value_are_told_and_nothing_is_broken_for_want_of_them() -> None:
    text = 'torchrun --nproc_per_node 8 x.py --tensor-model-parallel-size 2 --overlap-param-gather "${MODEL_ARGS[@]}"'
    job = read_text(text, "run.sh")
    assert job.unresolved == ("${MODEL_ARGS[@]} (the file sets no MODEL_ARGS)",)
    assert not job.findings and any("--overlap-param-gather needs" in each.sentence for each in job.advice)
    given = read_text(text, "run.sh", variables={"MODEL_ARGS": "--num-layers 4 --use-distributed-optimizer"})
    assert given.sizes["layers"] == 4 and not given.unresolved
    assert read_text(text.replace('"${MODEL_ARGS[@]}"', '"$@"'), "run.sh").findings


# --- scripts that another reads in or starts ---------------------------------------------------------------------------------


def script(folder: Path, name: str, *lines: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize(
    "named",
    [
        "conf/model.sh",
        '"${HERE}/conf/model.sh"',
        '"$(dirname "$0")/conf/model.sh"',
        "`pwd`/conf/model.sh",
        "/workspace/model.sh",
        "conf/$KIND.sh",
    ],
)
def test_a_script_that_is_read_in_is_followed(tmp_path: Path, named: str) -> None:
    """Seen from the script's own folder, wherever it would be run; of an absolute path by its name."""
    script(tmp_path, "conf/model.sh", "MODEL_ARGS=(--num-layers 8)", "TP=4", "exit 0")
    script(tmp_path, "model.sh", "MODEL_ARGS=(--num-layers 8)", "TP=4")
    main = script(
        tmp_path,
        "run.sh",
        "HERE=$(cd $(dirname $0) && pwd)",
        "KIND=model",
        f"source {named}",
        'torchrun x.py "${MODEL_ARGS[@]}" --tensor-model-parallel-size $TP --micro-batch-size 1',
    )
    job = read_job(main)
    assert job.degrees["tp"] == 4 and job.sizes["layers"] == 8
    assert not [each for each in job.assumptions if "not found" in each]


def test_one_from_the_root_of_the_repository_is_found_above(tmp_path: Path) -> None:
    script(tmp_path, "conf/all.sh", "TP=4")
    main = script(
        tmp_path, "examples/small/run.sh", ". conf/all.sh", "torchrun x.py --num-layers 8 --tensor-model-parallel-size $TP"
    )
    assert read_job(main).degrees["tp"] == 4


def test_one_that_is_not_there_is_told(tmp_path: Path) -> None:
    lines = ("source ${ENVIRONMENT}", "source /opt/none/set_env.sh", "torchrun x.py --num-layers 8 --micro-batch-size 1")
    job = read_job(script(tmp_path, "run.sh", *lines))
    told = [each for each in job.assumptions if "not found beside run.sh" in each]
    assert [each.partition(":")[0] for each in told] == ["$ENVIRONMENT", "/opt/none/set_env.sh"]


def test_scripts_that_read_each_other_in_end(tmp_path: Path) -> None:
    script(tmp_path, "a.sh", "source b.sh")
    script(tmp_path, "b.sh", "source a.sh", "source b.sh")
    main = script(tmp_path, "run.sh", "source a.sh", "torchrun x.py --num-layers 8 --micro-batch-size 1")
    assert read_job(main).sizes["layers"] == 8


def test_options_that_only_a_script_read_in_has(tmp_path: Path) -> None:
    script(tmp_path, "all.sh", 'LINE="x.py --num-layers 8 --tensor-model-parallel-size $TP --pipeline-model-parallel-size 2"')
    assert degrees(read_job(script(tmp_path, "run.sh", "TP=8", "source all.sh", "srun python $LINE"))) == {"tp": 8, "pp": 2}


def test_a_script_that_is_started_is_followed_with_what_it_is_passed(tmp_path: Path) -> None:
    """Its own defaults give way to variables set before its name, and "$@" stands for the words behind it."""
    lines = ("TP=${TP:-1}", 'torchrun x.py --tensor-model-parallel-size $TP --num-layers 16 --micro-batch-size 1 "$@"')
    script(tmp_path, "launch.sh", *lines)
    main = script(tmp_path, "run.sh", "TP=4 bash launch.sh --pipeline-model-parallel-size 2")
    assert degrees(read_job(main)) == {"tp": 4, "pp": 2}


@pytest.mark.parametrize("passed", ["--num-virtual-stages-per-pipeline-rank 2", "--pipeline-model-parallel-layout 'Et|t|t|tL'"])
def test_stages_of_a_script_that_is_not_there_are_not_judged_as_one(tmp_path: Path, passed: str) -> None:
    main = script(tmp_path, "run.sh", f"PP=4 bash launch.sh --micro-batch-size 1 {passed}")
    with pytest.raises(InputError, match=r"without --pipeline-model-parallel-size, which is in launch\.sh"):
        read_job(main)


# --- how many processes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("#SBATCH -N 4\n#SBATCH --gres=gpu:8\nsrun x.py {}", 32),
        ("#SBATCH -N4\n#SBATCH --gres=gpu:h100:8\nsrun x.py {}", 32),
        ("#SBATCH --nodes=2 # servers\n#SBATCH --gpus-per-node=h100:4\nsrun x.py {}", 8),
        ("#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=8\nsrun x.py {}", 16),
        ("#SBATCH --nodes=4\ntorchrun --nnodes $SLURM_JOB_NUM_NODES --nproc_per_node 8 x.py {}", 32),
        ("#SBATCH --nodes=4\ntorchrun --nnodes $SLURM_NNODES --nproc-per-node 8 x.py {}", 32),
        ("#SBATCH -N 2\nGPUS_PER_NODE=8\npython x.py {}", 16),
        ("mpirun -np 64 python x.py {}", 64),
        ("mpirun -n 16 python x.py {}", 16),
        ("deepspeed --num_gpus 8 --num_nodes 2 x.py {}", 16),
        ("msrun --worker_num 64 --local_worker_num 8 x.py {}", 64),
        ("python x.py {}", None),
    ],
)
def test_processes(text: str, count: int | None) -> None:
    job = read_text(text.format("--num-layers 4 --tensor-model-parallel-size 2"), "run.sh")
    assert job.devices == count and not job.unresolved


# --- overrides of Megatron-Bridge --------------------------------------------------------------------------------------------

OVERRIDES = """\
CONFIGS=("8,2" "4,1")
for CONFIG in "${CONFIGS[@]}"; do
  IFS=',' read -r TP PP <<< "$CONFIG"
  CMD="python run_recipe.py --recipe ${NAME}_pretrain_config"
  CMD="$CMD model.tensor_model_parallel_size=$TP model.pipeline_model_parallel_size=$PP train.micro_batch_size=1"
  srun bash -c "$CMD"
done
"""


def test_of_several_layouts_in_a_loop_the_first_is_judged_whole() -> None:
    job = read_text(f"NAME=llama31_8b\n{OVERRIDES}", "run.sh")
    assert job.format == "megatron-bridge" and degrees(job) == {"tp": 8, "pp": 2}
    assert job.recipe == "llama31_8b_pretrain_config" and job.model_name == "llama-3.1-8b"
    assert read_text(OVERRIDES, "run.sh").recipe is None  # its name has no value here


def test_an_argument_by_its_number() -> None:
    """Of a script whose degrees are its arguments, the first without a value is named with the way to give it."""
    text = "TP=$1\nPP=${10}\ntorchrun --num-layers 8 --tensor-model-parallel-size $TP --pipeline-model-parallel-size ${PP}"
    with pytest.raises(InputError, match=r"\$10 has no value in the file; give it, as with --set 10=8"):
        read_text(text, "run.sh", variables={"1": "4"})
    assert degrees(read_text(text, "run.sh", variables={"1": "4", "10": "2"})) == {"tp": 4, "pp": 2}


def test_what_is_shown_is_not_what_is_run() -> None:
    """Quotes in what eval runs are undone; those of the line that shows it first are not."""
    run = "torchrun x.py --num-layers 4 --num-experts 2 --moe-layer-freq '[0]*1+[1]*3' --tensor-model-parallel-size 2"
    assert not read_text(f'CMD="{run}"\necho ${{CMD}}\neval ${{CMD}}', "run.sh").unresolved


def test_a_block_of_no_layers_redoes_nothing() -> None:
    line = "torchrun --num-layers 8 --recompute-granularity full --recompute-num-layers 0 --recompute-method"
    assert read_text(f"{line} block", "run.sh").choices["recompute"] == "none"
    assert [each.rule for each in read_text(f"{line} uniform", "run.sh").findings] == ["C100"]


SWIFT = (
    "NPROC_PER_NODE=8 NNODES=2 megatron sft --model Qwen/Qwen3-30B-A3B-Instruct-2507 --tensor_model_parallel_size 4 "
    "--expert_model_parallel_size 4 --sequence_parallel {} --max_length 8192 --attention_backend flash --num_workers 8 {}"
)


@pytest.mark.parametrize("switch", ["true", "false"])
def test_ms_swift_has_its_own_defaults(switch: str) -> None:
    """A command of Megatron-SWIFT: options with underscores, switches with a value, and the model by its name on a hub."""
    job = read_text(SWIFT.format(switch, "--train_type full"), "job")
    assert (job.format, job.model_name) == ("megatron-lm", "qwen3-30b-a3b")
    assert (job.devices, job.seq_len, job.global_batch) == (16, 8192, 16)
    assert {"tp": 4, "ep": 4, "etp": 1, "micro_batch": 1}.items() <= job.degrees.items()
    assert (job.choices["sequence_parallel"], job.choices["recompute"]) == (switch, "selective:core_attn")
    assert job.choices["optimizer_sharding"] == "zero1" and job.precision == "bf16" and not job.unknown
    assert read_text(SWIFT.format(switch, "--train_type lora"), "job").unmodelled == ("trains adapters (--train_type lora)",)
    assert read_text(SWIFT.format(switch, "--use_distributed_optimizer false"), "job").choices["optimizer_sharding"] == "none"


@pytest.mark.parametrize(("nodes", "devices"), [("", 8), ("NNODES=2 ", 16), ("NNODES=$WORLD_SIZE ", None)])
def test_ms_swift_starts_one_server_unless_told_of_more(nodes: str, devices: int | None) -> None:
    text = SWIFT.format("true", "").replace("NNODES=2 ", nodes)
    assert read_text(text, "job").devices == devices
    if not nodes:  # another command that starts fewer leaves it open
        assert read_text(f"{text}\nNPROC_PER_NODE=1 swift infer", "job").devices is None


def test_options_with_underscores_are_those_with_hyphens() -> None:
    job = read_text("torchrun --nproc_per_node 8 x.py --tensor_model_parallel_size 4 --micro_batch_size 2", "job")
    assert (job.format, job.devices, job.unknown) == ("megatron-lm", 8, ())
    assert {"tp": 4, "micro_batch": 2}.items() <= job.degrees.items()


@pytest.mark.parametrize(
    ("text", "whose"),
    [
        ("NPROC_PER_NODE=4 swift sft --model Qwen/Qwen3-8B --deepspeed zero3", "ms-swift's Transformers trainer"),
        ("model_name_or_path: Qwen/Qwen3-8B\nstage: sft\nfinetuning_type: full\ndeepspeed: ds_z3_config.json", "LLaMA-Factory"),
        ("base_model: NousResearch/Llama-3.2-1B\nsequence_len: 2048\ndeepspeed: zero3.json", "Axolotl"),
    ],
)
def test_a_trainer_that_is_not_read_is_named(text: str, whose: str) -> None:
    with pytest.raises(InputError, match=f"is {whose}'s, which is not read; give the DeepSpeed JSON"):
        read_text(text, "job")


# --- what Slurm and a launcher say -------------------------------------------------------------------------------------------


def test_variables_that_slurm_sets_from_its_options_have_their_values() -> None:
    asked = "#SBATCH --nodes=32\n#SBATCH --ntasks-per-node=4 --gpus-per-node=4\n#SBATCH --cpus-per-task=72\n"
    degrees = "--tensor-model-parallel-size $SLURM_GPUS_PER_NODE --num-layers $SLURM_CPUS_PER_TASK"
    job = read_text(f"{asked}export WORLD_SIZE=$SLURM_NPROCS\nsrun python x.py {degrees}", "run.sh")
    assert (job.degrees["tp"], job.sizes["layers"], job.devices) == (4, 72, 128)
    assert not job.unresolved
    whole = "#SBATCH --ntasks=64 --gpus=64\n"
    assert read_text(f"{whole}srun python x.py --num-layers 8 --world-size $SLURM_GPUS", "run.sh").devices == 64
    assert read_script(f"{whole}run $SLURM_NTASKS").commands[-1] == ["run", "64"]


def test_options_of_what_starts_the_program_are_none_of_its_own() -> None:
    ahead = "numactl --membind 0-3 --localalloc python3 /opt/pretrain_gpt.py"
    job = read_text(f"{ahead} --num-layers 8 --membind x --micro-batch-size 1", "run.sh")
    assert job.unknown == ("--membind x",)
    own = "torchrun --nproc_per_node 8 --role r x.py --tensor-model-parallel-size 2"
    assert not read_text(own, "run.sh").unknown


RANKED = """\
WORLD_SIZE=$OMPI_COMM_WORLD_SIZE
NNODES=${NNODES:-1}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
python -u pretrain_gpt.py --num-layers 8 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 \\
    --world-size $WORLD_SIZE --rank $RANK
"""


def test_processes_that_something_else_starts_are_not_guessed() -> None:
    """A script that mpirun starts once for each rank holds a count of servers that only another launcher would use."""
    job = read_text(RANKED, "run.sh")
    assert job.devices is None
    assert any("--world-size $OMPI_COMM_WORLD_SIZE" in each for each in job.unresolved) and not job.unknown
    assert read_text(RANKED, "run.sh", variables={"OMPI_COMM_WORLD_SIZE": "256"}).devices == 256
    listed = "GPUS_PER_NODE=8\nNNODES=1\nmpirun --hostfile hosts python x.py --num-layers 8 --micro-batch-size 1"
    assert read_text(listed, "run.sh").devices is None


def test_processes_that_are_guessed_from_variables_are_told() -> None:
    job = read_text("NNODES=4\nGPUS_PER_NODE=8\npython x.py --num-layers 8 --micro-batch-size 1", "run.sh")
    assert job.devices == 32
    assert any(each.startswith("32 processes: by GPUS_PER_NODE and NNODES of the script") for each in job.assumptions)


def test_ms_swift_on_ascend_stands_on_a_later_megatron_core() -> None:
    """It pins Megatron-LM 0.16 there, which shares KV heads between TP ranks, and Megatron's parser never sees its options."""
    text = "export ASCEND_RT_VISIBLE_DEVICES=0,1,2,3\nNPROC_PER_NODE=4 megatron sft --num_layers 8 --hidden_size 2048 --bf16 true "
    text += "--num_attention_heads 16 --group_query_attention true --num_query_groups 2 --tensor_model_parallel_size 4 "
    text += "--sequence_parallel true --optimizer_cpu_offload true"
    found = check(read_text(text, "sft.sh"), cluster="atlas-800t-a2", best=False)
    assert found.format == "megatron-lm" and found.legal, found.broken
    experts = f"{text} --num_experts 512 --moe_router_topk 8 --moe_ffn_hidden_size 512"
    assert {each.rule for each in check(read_text(experts, "a"), cluster="atlas-800t-a2", best=False).broken} == {"P004"}
    own = read_text(text.replace("megatron sft", "torchrun x.py").replace("_", "-"), "sft.sh", form="mindspeed-llm")
    assert {each.rule for each in check(own, best=False).broken} >= {"C021d"}


def test_what_is_rolled_out_has_no_length_of_its_own() -> None:
    """8191 tokens do not divide by TP; Megatron's RL pads what it generates."""
    line = "torchrun --nproc_per_node 8 train_rl.py --num-layers 8 --hidden-size 1024 --num-attention-heads 8 --bf16 "
    line += "--seq-length 8191 --tensor-model-parallel-size 8 --sequence-parallel --micro-batch-size 1 --global-batch-size 8"
    assert {each.rule for each in check(read_text(line, "rl.sh"), best=False).broken} == {"C041"}
    assert check(read_text(f"{line} --perform-rl-step", "rl.sh"), best=False).legal
