"""Ctrl-C at any moment: the best so far with its gap, or status 130 before there is any; none is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from paraplan.optimizer import interrupts
from paraplan.optimizer.deadline import NEVER, Deadline
from paraplan.optimizer.interrupts import OutOfTime, came, check, hold, noted, raised, stoppable
from paraplan.optimizer.result import Plan
from paraplan.optimizer.solving import deterministic_solver

FIX = ["--fix", "micro_batch=1,cp=1,tp=1|2,pp=2|4,recompute=none|full"]
JOB = ["llama-3.1-8b", "--cluster", "hgx-h100", "--devices", "8", "--global-batch", "32", "--seq-len", "4096", *FIX]
WARM, COLD = 20, 3
AT_THE_END_S = 0.2
"""How soon a process that was interrupted without a word is gone for its end to have come first."""
SERVER = """
import gc, os, signal, sys, time
from paraplan.optimizer.cli import command, main
words, folder, count = sys.argv[3:], sys.argv[1], int(sys.argv[2])
out = os.open(os.devnull, os.O_WRONLY)
kept = os.dup(1)
os.dup2(out, 1)
main(words)
begun = time.monotonic()
main(words)
whole_s = time.monotonic() - begun
gc.freeze()
for place in range(count):
    child = os.fork()
    if not child:
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{folder}/{place}.{name}", os.O_WRONLY | os.O_CREAT), stream)
        sys.argv[1:] = words
        try:
            command()
        except SystemExit as end:  # without taking down what the parent holds too
            sys.stdout.flush()
            os._exit(end.code)
    time.sleep(whole_s * (place + 1 + place * 0.618 % 1.0) / count)
    ended, status = os.waitpid(child, os.WNOHANG)
    if not ended:
        os.kill(child, signal.SIGINT)
        sent = time.monotonic()
        _, status = os.waitpid(child, 0)
        os.write(kept, f"{place} {os.waitstatus_to_exitcode(status)} {time.monotonic() - sent}\\n".encode())
"""
COMMAND = """
import sys
from paraplan.optimizer.cli import command, take_over
take_over()
print("begun", file=sys.stderr, flush=True)
command()
"""


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def taken() -> Iterator[None]:
    with noted():
        yield


@pytest.mark.usefixtures("taken")
def test_it_raises_until_an_answer_is_held_and_waits_from_then_on() -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    with stoppable() as ended:  # what was raised stands, as nobody has caught it here
        check()
    assert ended.stopped
    hold()
    deadline = Deadline()
    interrupt()
    assert came() == 2 and deadline.passed and deadline.interrupted and deadline.left_s == 0.0
    assert not NEVER.passed and not Deadline().passed
    with pytest.raises(KeyboardInterrupt):  # who interrupts twice wants to be rid of it
        interrupt()


@pytest.mark.usefixtures("taken")
def test_it_ends_what_an_answer_can_do_without() -> None:
    hold()
    done = []
    with stoppable() as ended:
        done.append(1)
        interrupt()
        done.append(2)
    check()  # it has ended something: nothing waits
    assert done == [1] and type(ended.by) is KeyboardInterrupt
    interrupt()
    with pytest.raises(KeyboardInterrupt), raised():
        done.append(3)
    assert done == [1]


@pytest.mark.usefixtures("taken")
def test_one_that_is_swallowed_is_raised_at_the_next_look() -> None:
    def swallow() -> None:
        try:
            interrupt()
        except BaseException:  # as extension modules do
            return

    swallow()
    with pytest.raises(KeyboardInterrupt):
        check()
    with stoppable() as ended:
        swallow()
    assert ended.stopped
    check()


def test_without_a_handler_the_exception_alone_tells_deadlines() -> None:
    before = Deadline()
    with stoppable() as ended:
        raise KeyboardInterrupt
    assert ended.stopped and before.interrupted and not Deadline().passed
    late = Deadline()
    with stoppable() as ended:
        raise OutOfTime
    assert ended.stopped and not late.interrupted
    with pytest.raises(ValueError, match="no interrupt"), stoppable():
        raise ValueError("no interrupt")
    assert interrupts._state.blocks == 0


def test_one_that_ended_a_command_is_nothing_to_what_comes_after() -> None:
    with pytest.raises(KeyboardInterrupt), noted():
        interrupt()
    check()
    assert came() == 0 and not Deadline().interrupted


@pytest.mark.usefixtures("taken")
def test_a_solve_ends_at_once() -> None:
    """The shortest ruler of 12 marks takes CP-SAT minutes to prove."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    marks = [model.new_int_var(0, 200, "") for _ in range(12)]
    for low, high in pairwise(marks):
        model.add(low < high)
    model.add_all_different([high - low for place, high in enumerate(marks) for low in marks[:place]])
    model.minimize(marks[-1] - marks[0])
    running = threading.active_count()
    threading.Timer(0.3, interrupt).start()
    begun = time.process_time()
    with pytest.raises(KeyboardInterrupt):
        deterministic_solver(600.0).solve(model)
    assert time.process_time() - begun < 10.0
    begun, begun_cpu = time.monotonic(), time.process_time()
    time.sleep(0.5)
    assert threading.active_count() <= running and time.process_time() - begun_cpu < 0.8 * (time.monotonic() - begun), "it goes on"


def test_no_moment_of_a_plan_loses_it(tmp_path: Path) -> None:
    """Forks of one warm process, each interrupted a little later than the last, and cold processes while they load."""
    words = ["plan", *JOB, "--json"]
    done = subprocess.run(
        [sys.executable, "-c", SERVER, str(tmp_path), str(WARM), *words], capture_output=True, text=True, check=True, timeout=120
    )
    ends = []
    for line in done.stdout.splitlines():
        place, status, seconds = line.split()
        out, err = ((tmp_path / f"{place}.{name}").read_text(encoding="utf-8") for name in ("out", "err"))
        if not err and float(seconds) < AT_THE_END_S:  # it had ended already, whole
            Plan.model_validate(json.loads(out))
            continue
        ends.append(judged(int(status), out, err))
    assert len(ends) >= WARM / 2, "others had ended before: the machine had become faster"
    assert {"before", "after"} <= set(ends), ends
    for place in range(COLD):
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
        )
        assert process.stderr is not None and process.stderr.readline() == "begun\n"  # before, the interpreter itself is starting
        time.sleep(0.02 + 0.15 * place)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        judged(process.returncode, out, err)


def judged(status: int, out: str, err: str) -> str:
    """Whether an interrupt came before or after there was a plan; it is told either way, and never in a traceback."""
    assert err.splitlines()[-1].startswith("paraplan: interrupted"), err
    assert "Traceback" not in err
    if status == 130:
        assert json.loads(out)["error"] == "interrupted"
        return "before"
    assert status == 0
    found = Plan.model_validate(json.loads(out))
    assert found.certificate.gap >= 0.0 and (found.certificate.status == "optimal") == (found.certificate.gap < 1e-8)
    return "after"
