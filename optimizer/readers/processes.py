"""How many processes a launch script starts: what its launcher is told, its #SBATCH lines, or variables by their usual names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from ...search_spaces.errors import InputError
from .arguments import Option, options
from .dialects import PROCESSES
from .job import MOST
from .shell_values import Script, unresolved

PER_NODE = (
    *("nproc-per-node", "nproc_per_node", "gpus-per-node", "gpus_per_node", "npus-per-node", "num_gpus"),
    *("ntasks-per-node", "local_worker_num", "actor-num-gpus-per-node"),
)
NODES = ("nnodes", "nodes", "num-nodes", "num_nodes", "actor-num-nodes")
TOTAL = ("worker_num", "ntasks")
"""Options of msrun and srun for the processes of all servers together."""
PER_NODE_VARIABLES = ("NPROC_PER_NODE", "GPUS_PER_NODE", "NPUS_PER_NODE", "GPUS", "NPROC")
NODE_VARIABLES = ("NNODES", "NUM_NODES", "NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "NUM_HOSTS", "PET_NNODES")
GRES = re.compile(r"(?:gpu|npu)(?::[A-Za-z][\w.-]*)?:(\d{1,3})")
MPIRUN = frozenset({"mpirun", "mpiexec", "prun"})
OF_THE_WORLD = ("world-size", "world_size")
"""Options by which a process is told how many there are, rather than a launcher how many to start."""


def world(script: Script, found: Sequence[Option], where: str) -> int | None:
    """Processes of the job. `found` are the options of the command that trains; None where the script does not say.

    A count that no launcher is told of, but variables by their usual names, is told among the script's decisions.
    """
    batch = options(script.batch)
    told = script.number(PROCESSES)
    if told is not None:
        return told
    workers = _number(found, TOTAL[:1])
    if workers is not None:
        return _product(workers, 1, where)
    for lines in (found, *(options(words) for words in script.commands), batch):
        per_node, nodes = _per_node(lines), _number(lines, NODES)
        if per_node is not None and nodes is not None:
            return _product(per_node, nodes, where)
        if per_node is not None and lines is not batch:
            outer = script.number(*NODE_VARIABLES) or _number(batch, NODES)
            open_nodes = any(option.name in NODES for option in lines)
            if outer is not None or not open_nodes:
                return _product(per_node, outer or 1, where)
    started = _started_by_mpi(script.commands) or _number(found, TOTAL) or _number(batch, (*TOTAL, "gpus"))
    if started is not None:
        return _product(started, 1, where)
    total = script.number("WORLD_SIZE")
    if total is not None:
        return total
    if _started_elsewhere(script.commands, found):
        return None
    nodes = script.number(*NODE_VARIABLES) or _number(batch, NODES)
    per_node = script.number(*PER_NODE_VARIABLES) or _per_node(batch)
    if per_node is None or nodes is None:
        return None
    if script.number(*PER_NODE_VARIABLES) is not None:
        names = [name for name in (*PER_NODE_VARIABLES, *NODE_VARIABLES) if script.number(name) is not None]
        said = f"{per_node * nodes} processes: by {' and '.join(names)} of the script, as no launcher that it starts is told of any"
        script.decisions.append(f"{said}; --devices says another number")
    return _product(per_node, nodes, where)


def _started_elsewhere(commands: Sequence[Sequence[str]], found: Sequence[Option]) -> bool:
    """Whether hosts that the script does not name start its processes: mpirun without a number, around it or in it."""
    passed_on = any(option.name in OF_THE_WORLD and any(map(unresolved, option.values)) for option in found)
    return passed_on or any(words[0].rpartition("/")[2] in MPIRUN for words in commands)


def _per_node(found: Sequence[Option]) -> int | None:
    """Processes of a server: one for each accelerator, also where one task of a batch starts them all."""
    counts = [_number(found, (name,)) for name in PER_NODE]
    asked = [GRES.search(option.values[0]) for option in found if option.name == "gres" and option.values]
    given = [*(count for count in counts if count is not None), *(int(each.group(1)) for each in asked if each)]
    return max(given, default=None)


def _started_by_mpi(commands: Sequence[Sequence[str]]) -> int | None:
    """Processes that mpirun starts: -np 64, -n 64."""
    for words in commands:
        if words[0].rpartition("/")[2] in MPIRUN:
            counts = [after for word, after in pairwise(words) if word in ("-np", "-n", "--np")]
            return next((int(count) for count in counts if re.fullmatch(r"\d{1,9}", count)), None)
    return None


def _product(per_node: int, nodes: int, where: str) -> int:
    if not 0 < per_node * nodes <= MOST:
        raise InputError(f"{where}: {nodes} nodes of {per_node} processes are no job")
    return per_node * nodes


def _number(found: Sequence[Option], names: Sequence[str]) -> int | None:
    values = [re.sub(r"^gpu:|^.*:(?=\d+$)", "", option.values[0]) for option in found if option.name in names and option.values]
    plain = [value for value in values if re.fullmatch(r"\d{1,9}", value)]
    return int(plain[-1]) if plain else None
