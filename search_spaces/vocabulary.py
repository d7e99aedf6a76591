"""The words that text columns may hold; a table stores each as its position here."""

from __future__ import annotations

from itertools import permutations

CP_TYPES = ("p2p", "allgather", "a2a", "a2a+p2p")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe", "dualpipev")
V_SHAPED = ("zb-v", "dualpipev")
"""Schedules whose second chunk runs back up the pipeline, so that stage 0 holds the first and the last chunk."""
SHARDINGS = ("none", "zero1", "zero2", "zero3", "hsdp")
RANK_ORDERS = tuple("-".join(names) for names in permutations(("tp", "cp", "ep", "dp", "pp")))
"""Every order that Megatron-Core's initialize_model_parallel takes."""
FLAG_RANK_ORDERS = RANK_ORDERS[:2]
"""Those that flags of frameworks can say: tp-cp-ep-dp-pp, and with --use-tp-pp-dp-mapping tp-cp-ep-pp-dp."""
RECOMPUTE_MODULES = ("core_attn", "layernorm", "moe_act", "mla_up_proj", "mlp", "shared_experts", "moe")
MAIN = "main"
NEWEST_WORDS = frozenset({MAIN, "master", "dev"})
"""What the newest version of a framework, the head of its repository, is called in place of a number."""
