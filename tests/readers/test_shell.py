"""Scripts read as text: variables, arrays, arithmetic; and nothing that could be executed is."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paraplan.optimizer.readers.arithmetic import arithmetic
from paraplan.optimizer.readers.shell import options, read_script, unresolved, without_value
from paraplan.search_spaces.errors import InputError


def words(text: str) -> list[str]:
    """Of the last command line."""
    return read_script(text).commands[-1]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("TP=8\nrun --tp $TP", ["run", "--tp", "8"]),
        ("TP=8\nrun --tp ${TP}x", ["run", "--tp", "8x"]),
        ("run --tp ${TP:-4}", ["run", "--tp", "4"]),
        ("TP=8\nrun --tp ${TP:-4}", ["run", "--tp", "8"]),
        ("A=3\nB=4\nrun --n $((A*B + 2))", ["run", "--n", "14"]),
        ("A=3\nrun --n $(( ($A + 1) / 2 % 5 ))", ["run", "--n", "2"]),
        ("N=16\nD=$((N/(2*4)))\nrun $D", ["run", "2"]),
        ("ARGS=(--a 1 # one\n  --b '2 3'\n)\nARGS+=(--c)\nrun \"${ARGS[@]}\"", ["run", "--a", "1", "--b", "2 3", "--c"]),
        ('ARGS="--a 1 \\\n --b 2"\nrun $ARGS', ["run", "--a", "1", "--b", "2"]),
        ('ARGS="\n  --a 1\n  --b 2\n"\nrun ${ARGS} --c', ["run", "--a", "1", "--b", "2", "--c"]),
        ("run \\\n  --a 1 \\\n  --b 2 # and no more", ["run", "--a", "1", "--b", "2"]),
        ("run --a 1\r\nX=1\r\nrun --b \\\r\n $X\r\n", ["run", "--b", "1"]),
        ("export TP=2 PP=3; run $TP$PP", ["run", "23"]),
        ("TP=1\nif [ $X = y ]; then\n  TP=2\nfi\nrun $TP", ["run", "1"]),
        ("cat <<EOF\nrun --no\nEOF\nrun --yes", ["run", "--yes"]),
        ("run 'a $TP b' \"c d\"", ["run", "a $TP b", "c d"]),
        ('A=(--a 1)\nsrun -N 2 bash -c "run ${A[*]} --b 2"', ["run", "--a", "1", "--b", "2"]),
        ("TP=8\nbash -c 'run --a $TP --b 2'", ["run", "--a", "8", "--b", "2"]),
        ("CMD='run --a 1 --b 2'\neval $CMD", ["run", "--a", "1", "--b", "2"]),
        ('eval "TP=2"\nrun $TP', ["run", "2"]),
        (': "${TP:=4}"\nrun $TP', ["run", "4"]),
        ('A=(x y)\nrun "${A[*]}"', ["run", "x y"]),
        ("VAR=größe\nrun $VAR 模型", ["run", "größe", "模型"]),
        ('let "A=8/2"\nlet A+=1\n((B = A * 2))\n((B++))\nrun $A $B', ["run", "5", "11"]),
        ("A=3\nrun $[A*2] `expr $A + 1` $(expr $A \\* 4)", ["run", "6", "4", "12"]),
        ("# a comment does not go on \\\nTP=8\nrun $TP", ["run", "8"]),
        ("run --a 1 \\\n  # --b 2 \\\n", ["run", "--a", "1"]),
    ],
)
def test_words(text: str, found: list[str]) -> None:
    assert words(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("X=llama-7b-tp4.yaml\nrun ${X%.yaml} ${X%%-*} ${X#*-} ${X##*-}", ["llama-7b-tp4", "llama", "7b-tp4.yaml", "tp4.yaml"]),
        ("X=a-b-a\nrun ${X/a/c} ${X//a/c} ${X/#a/c} ${X/%a/c} ${X//-}", ["c-b-a", "c-b-c", "c-b-a", "a-b-c", "aba"]),
        ("X=abcdef\nrun ${X:2} ${X:2:3} ${X: -2} ${X^^} ${X^}", ["cdef", "cde", "ef", "ABCDEF", "Abcdef"]),
        ("G=0,1,2,3\nC=${G//[^,]/}\nrun $((${#C} + 1)) ${G//,/ }", ["4", "0", "1", "2", "3"]),
        ("V=v1.22\nrun ${V//[0-9]/N} ${V//[!0-9]/-}", ["vN.NN", "-1-22"]),
        ("P=a/b/c.sh\nrun ${P##*/} ${P%/*} ${P//\\//.}", ["c.sh", "a/b", "a.b.c.sh"]),
        ('A=(one two three)\nrun ${A[@]:1} "${A[@]%e}"', ["two", "three", "on", "two", "thre"]),
        ('X=abc\nY=b\nrun ${X/$Y/z} ${X%"$Y"*}', ["azc", "a"]),
        ("X=8k\nrun ${X/k/} ${UNSET:-4}${X%k}", ["8", "48"]),
    ],
)
def test_values_cut_and_replaced(text: str, found: list[str]) -> None:
    """What bash 5.2 prints."""
    assert words(text) == ["run", *found]


def test_what_is_cut_of_no_value_has_none() -> None:
    command = words("run --tp ${X%-*} --pp ${X/a/$(cat b)} --n $((${#X} + 1))")
    assert [unresolved(word) for word in command[2::2]] == [["{X%-*}"], ["{X/a/$(catb)}"], ["((${#X}+1))"]]


DOCUMENT = "torchrun --nproc_per_node 8 --tp $TP"


@pytest.mark.parametrize(
    "fed",
    [
        *("cat <<EOF | sbatch", "cat << EOF | bash", "cat <<-EOF | envsubst | sbatch -N 2", "cat <<EOF | tee job.txt | sbatch"),
        *("sbatch <<EOF", "mkdir -p out && cat <<EOF | bash"),
    ],
)
def test_a_document_that_is_fed_to_a_shell_is_read(fed: str) -> None:
    assert words(f"TP=4\n{fed}\n#!/bin/bash\n{DOCUMENT}\nEOF") == ["torchrun", "--nproc_per_node", "8", "--tp", "4"]


def test_a_document_that_goes_elsewhere_is_not_read() -> None:
    assert words(f"run 1\ncat <<EOF | mail -s job me\n{DOCUMENT}\nEOF")[0] == "mail"


def test_arguments_of_a_document() -> None:
    assert words("cat <<'EOF' | bash -s 2 8\nrun --pp $1 --tp $2\nEOF") == ["run", "--pp", "2", "--tp", "8"]


def test_options_of_sbatch_come_before_its_lines() -> None:
    script = read_script("sbatch --nodes 8 <<'EOF'\n#SBATCH -N 4\n#SBATCH --ntasks-per-node=8\nrun --n $SLURM_NNODES\nEOF")
    assert script.commands[-1] == ["run", "--n", "8"]
    assert script.batch == ["--nodes", "4", "--ntasks-per-node=8", "--nodes", "8"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('A=1\nB="x\nrun $A', 2),
        ("run \\\n  --a 1 \\\n  --b 'x", 3),
        ("cat <<EOF\nit's\nEOF\nrun 'x\n", 4),
        ("# it's a comment \\\nX='a b'\nY=\"", 3),
    ],
)
def test_a_quote_that_is_never_closed(text: str, line: int) -> None:
    with pytest.raises(InputError, match=rf"job\.sh: line {line}: the quote . is never closed"):
        read_script(text, where="job.sh")


@pytest.mark.parametrize(
    ("test", "met"),
    [
        ("[ $N = 4 ]", True),
        ('[ "$N" == 4 ]', True),
        ("[[ $N != 4 ]]", False),
        ("[ $N -gt 3 ]", True),
        ("[[ $N -le 3 ]]", False),
        ("[ -n $N ]", True),
        ("[ -z $N ]", False),
        ('[ -z "$NOT_SET" ]', True),
        ("[[ ${NOT_SET:-0} == 1 ]]", False),
        ("[[ $NAME == llama* ]]", True),
        ("[ $NAME = llama* ]", False),
        ("! [ $N = 4 ]", False),
        ("[ ! -z $N ]", True),
        ("[[ $N == 4 && $NAME == qwen ]]", False),
        ("[[ $N == 5 || $NAME == llama-8b ]]", True),
        ("[ $N = 4 ] && [ $NAME = qwen ]", False),
        ("[ $N = 5 -o $NAME = llama-8b ]", True),
        ("[ -f /etc/passwd ]", False),  # no file is looked at: cannot be told
        ("((N > 3))", True),
        ("(( N % 4 ))", False),
        ("grep -q llama file", False),
    ],
)
def test_of_a_conditional_the_branch_that_is_met_is_read(test: str, met: bool) -> None:
    text = f"N=4\nNAME=llama-8b\nif {test}; then\n  ARGS+=(--yes)\nelse\n  ARGS+=(--no)\nfi\nrun ${{ARGS[@]}}"
    script = read_script(text)
    assert script.commands[-1] == ["run", "--yes" if met else "--no"]
    [said] = script.decisions
    assert ("read" if met else "left out") in said


def test_the_caller_switches_a_conditional() -> None:
    text = "if [[ ${FULL:-0} == 1 ]]; then A=(--full); elif [ $FULL = 2 ]; then A=(--half); else A=(--none); fi\nrun ${A[@]}"
    found = [read_script(text, {"FULL": value} if value else None).commands[-1][1] for value in ("", "1", "2", "3")]
    assert found == ["--none", "--full", "--half", "--none"]
    assert "--set FULL=…" in read_script(text).decisions[0]


def test_conditionals_nest_and_only_those_that_matter_are_told() -> None:
    inner = "if [ $X = 1 ]; then TP=8; else TP=4; fi"
    text = f"if [ $X = 1 ]; then\n {inner}\nelse\n echo none\nfi\nif [ $Y = 1 ]; then echo y; fi\nTP=${{TP:-1}}\nrun $TP"
    assert [read_script(text, given).commands[-1][1] for given in ({}, {"X": "1"}, {"X": "2"})] == ["1", "8", "1"]
    assert len(read_script(text).decisions) == 1


@pytest.mark.parametrize(("x", "tp"), [("1", "8"), ("2", "1")])
def test_a_command_behind_a_test(x: str, tp: str) -> None:
    assert words(f"X={x}\nTP=1\n[ $X = 1 ] && TP=8\nrun $TP") == ["run", tp]
    assert words(f"X={x}\nTP=8\n[[ $X == 1 ]] || TP=1\nrun $TP") == ["run", tp]


def test_what_has_no_value_is_told() -> None:
    command = words("run --tp $TP --pp $(cat pp) --cp `cat cp` --n $((X + 1)) --last ${LIST[3]}")
    assert [unresolved(word) for word in command[2::2]] == [["TP"], ["(…)"], ["(…)"], ["((X+1))"], ["{LIST[3]}"]]


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("$TP", "the file sets no TP"),
        ("$2", "$2 is an argument of the script"),
        ("$(cat tp)", "what a command prints"),
        ("${LIST[3]}", "${LIST[3]} is no plain variable"),
        ("$((TP * 2))", "TP*2 is worked out of what the file does not set"),
        ("$((1 / 0))", "1/0 divides by zero"),
    ],
)
def test_what_has_no_value_is_told_with_the_reason(value: str, why: str) -> None:
    (word,) = words(f"run {value}")[1:]
    assert why in without_value(f"--tp {word}")


def test_the_last_value_wins_and_others_are_told() -> None:
    script = read_script("TP=2\nTP=4\nPP=1\nrun $TP")
    assert script.commands[-1] == ["run", "4"]
    assert script.conflicts == {"TP": ["2", "4"]}


def test_the_caller_sets_variables() -> None:
    assert read_script("TP=$1\nrun $TP", {"TP": "8"}).commands[-1] == ["run", "8"]


def test_nothing_is_executed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("alive")
    kill = f"rm -rf {victim}"
    read_script(
        f"A=$({kill})\nB=`{kill}`\n$({kill})\nrun $((a[$({kill})])) <({kill})\neval '{kill}'\n: ${{X:=$({kill})}}\nrun $A $B"
    )
    assert victim.read_text() == "alive"


def test_variables_that_unfold_without_end() -> None:
    text = "A=xxxxxxxxxxxxxxxx\n" + "A=$A$A$A$A\n" * 60 + "run $A"
    with pytest.raises(InputError, match="unfold"):
        read_script(text)


@given(st.text(alphabet="aA=\"'`$(){}[]\\ \n;#&|<>*+-/%0:@", max_size=120))
def test_any_text_is_read(text: str) -> None:
    script = read_script(text, surely=False)
    with suppress(InputError):  # of a quote that is never closed
        assert read_script(text).commands == script.commands
    assert all(isinstance(word, str) for line in script.commands for word in line)


def test_brackets_without_end_take_no_time() -> None:
    begun = time.process_time()
    read_script("A=" + "$((" * 20_000)
    read_script("${" * 20_000)
    read_script("$(" * 20_000)
    assert time.process_time() - begun < 2.0


def test_what_starts_a_shell_is_read_beside_it() -> None:
    script = read_script('srun --nodes 2 --ntasks-per-node 8 bash -c "python x.py --a 1 --b 2"')
    outer, inner = script.commands
    assert outer == ["srun", "--nodes", "2", "--ntasks-per-node", "8", "bash", "-c"]
    assert inner == ["python", "x.py", "--a", "1", "--b", "2"]


def test_shells_that_start_each_other_without_end() -> None:
    script = read_script("A='eval $A'\nA='eval $A'\neval $A " + "eval " * 50)
    assert not script.commands


@given(st.integers(0, 10**6), st.integers(1, 1000), st.integers(0, 1000))
def test_arithmetic_is_that_of_shells(a: int, b: int, c: int) -> None:
    values = {"A": str(a), "B": str(b), "C": str(c)}
    assert arithmetic("A/B + C*2 - (A % B)", values.get) == a // b + c * 2 - a % b


@pytest.mark.parametrize(
    ("text", "value"),
    [("2**3**2", 512), ("-7/2", -3), ("-7%2", -1), ("7>3 ? 7 : 3", 7), ("1<<4|3", 19), ("!0", 1), ("~5", -6), ("1==1 && 2<1", 0)],
)
def test_operators_of_shells(text: str, value: int) -> None:
    assert arithmetic(text, {}.get) == value


NO_ARITHMETIC = ("1/0", "A", "1 +", "(1", "2 ** -1", "2 ** 99", "1 << 99", "1 ? 2", "a[0]", "1;2", "")


@pytest.mark.parametrize("text", [*NO_ARITHMETIC, "9" * 40, "(" * 3000, "1" + "+1" * 5000])
def test_what_is_no_arithmetic(text: str) -> None:
    assert arithmetic(text, {}.get) is None


def test_options() -> None:
    found = options(["python", "x.py", "--a", "1", "2", "--b=c", "--d", "-3", "--e.f", "g"])
    assert [(each.name, each.values) for each in found] == [("a", ("1", "2")), ("b", ("c",)), ("d", ("-3",)), ("e.f", ("g",))]


@pytest.mark.parametrize(("size", "tp"), [("7b", "2"), ("70b", "8"), ("405b", "8"), ("x", "1")])
def test_of_a_case_the_branch_that_matches_is_read(size: str, tp: str) -> None:
    text = "case $SIZE in\n  7b) TP=2 ;;\n  70b | 405*) if true; then TP=8; fi ;;\n  *) TP=1\nesac\nrun --tp $TP"
    script = read_script(text, {"SIZE": size})
    assert script.commands[-1] == ["run", "--tp", tp]
    assert any(said.startswith("case $SIZE: met, so its branch") for said in script.decisions) and not script.conflicts


def test_a_case_of_what_has_no_value_is_left_out() -> None:
    script = read_script("TP=4\ncase $(hostname) in a) TP=2;; *) TP=8;; esac\nrun --tp $TP")
    assert script.commands[-1] == ["run", "--tp", "4"]
    assert script.decisions == ["case $(…): cannot be told from the file, so what it guards is left out"]


@pytest.mark.parametrize(
    "loop",
    [
        "while [[ $# -gt 0 ]]; do\n  case $1 in\n    --tp) TP=$2; shift 2 ;;\n    *) shift ;;\n  esac\ndone",
        'while getopts "t:" option; do case $option in t) TP=$OPTARG ;; esac; done',
        "until [ $N = 4 ]; do TP=2; done",
    ],
)
def test_loops_over_the_script_s_own_arguments_keep_its_defaults(loop: str) -> None:
    script = read_script(f"N=4\nTP=8\n{loop}\nrun --tp $TP")
    assert script.commands == [["run", "--tp", "8"]]
    assert "left out" in script.decisions[0]


@pytest.mark.parametrize("loop", ["while true", "until run_again", "while read -r host"])
def test_a_loop_that_starts_again_is_read_once(loop: str) -> None:
    script = read_script(f"TP=2\n{loop}; do\n  run --tp $TP --rank $host\n  sleep 1\ndone < hosts")
    assert [line[:3] for line in script.commands if line[0] == "run"] == [["run", "--tp", "2"]]


def test_a_loop_over_words_is_read_for_each() -> None:
    """What it gathers is whole; of jobs that differ in the variable the first is judged, or the caller's."""
    text = 'for d in a b c; do DATA="$DATA $d"; done\nfor TP in 2 4; do run --data $DATA --tp $TP; done'
    assert [line[-1] for line in read_script(text, {"DATA": ""}).commands] == ["2", "4"]
    gathered = read_script('DATA=\nfor d in a b c; do DATA+=" $d"; done\nrun --data $DATA').commands
    assert gathered == [["run", "--data", "a", "b", "c"]]
    assert [line[-1] for line in read_script(text, {"TP": "4"}).commands] == ["4"]
    assert "--set TP=… names another" in read_script(text).decisions[-1]


def test_a_loop_over_what_has_no_value_leaves_it_open() -> None:
    (command,) = read_script("for n in $(seq 1 8); do run --nodes $n; done").commands
    assert unresolved(command[-1]) == ["n"]


@pytest.mark.parametrize("head", ["train() {", "train ()\n{", "function train {", "function train() {"])
def test_a_function_is_read_where_it_is_called(head: str) -> None:
    text = f'TP=1\n{head}\n  local TP=$1; shift\n  run --tp $TP "$@" --n $#\n}}\nunused() {{ run --no; }}\ntrain 8 --pp 2\n'
    assert read_script(text).commands == [["run", "--tp", "8", "--pp", "2", "--n", "2"]]


def test_functions_that_nothing_calls_are_read_if_there_is_nothing_else() -> None:
    script = read_script("TP=2\ntrain() { run --tp $TP --rank $1; }\n")
    assert script.commands[0][:3] == ["run", "--tp", "2"] and "function train: nothing in the file calls it" in script.decisions[0]


def test_functions_and_loops_without_end() -> None:
    for text in ("f() { f; f; }\nf", "for a in x; do " * 99 + "y", "f() { g; }\ng() { f; }\nf"):
        read_script(text)
    begun = time.process_time()
    words_of_a_loop = " ".join(map(str, range(60)))
    loops = "".join(f"for {name} in {words_of_a_loop}; do " for name in "abcdef")
    for text in (f"{loops} run; {'done; ' * 6}", "if x; then " * 200):
        with pytest.raises(InputError):
            read_script(text)
    assert time.process_time() - begun < 4.0
