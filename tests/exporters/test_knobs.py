"""The table of knobs: versions read from text, and what came when."""

from __future__ import annotations

import pytest
from paraplan.optimizer.exporters.knobs import FRAMEWORKS, dialect
from paraplan.search_spaces.errors import Infeasible, InputError
from paraplan.search_spaces.inputs import catalog_names, load_stack
from paraplan.search_spaces.releases import version_text


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.16", "0.16"),
        ("core_v0.16.1", "0.16.1"),
        ("0.19.3", "0.19.3"),
        ("core_r0.13.0", "0.13.0"),
        ("main", "main"),
        (None, "0.16"),
    ],
)
def test_versions_are_read(text: str | None, version: str) -> None:
    assert version_text(dialect("megatron-lm", text).version) == version


def test_base_version_stands_for_the_usual_release() -> None:
    assert dialect("mindspeed-llm", "core_v0.12.1") == dialect("mindspeed-llm", None)


@pytest.mark.parametrize(
    ("framework", "text"),
    [
        *(("megatron-lm", text) for text in ("0.9", "new", "7", "0.20", "1.0")),
        ("megatron", "0.16"),
        *(("mindspeed-llm", text) for text in ("1.0", "27", "26.2")),
    ],
)
def test_unknown_names_and_versions_are_input_errors(framework: str, text: str) -> None:
    with pytest.raises(InputError):
        dialect(framework, text)


def test_a_knob_is_refused_before_its_version() -> None:
    with pytest.raises(Infeasible, match=r"0\.12 cannot express layout: --pipeline-model-parallel-layout came with 0\.13"):
        dialect("megatron-lm", "0.12").set("layout", "EtL")
    assert dialect("megatron-lm", "0.13").set("layout", "EtL").words == ("--pipeline-model-parallel-layout", "EtL")
    with pytest.raises(Infeasible, match=r"shared_experts; it came with 0\.14"):
        dialect("megatron-lm", "0.13").set("recompute_modules", "shared_experts")


def test_spelling_follows_the_version() -> None:
    assert dialect("megatron-lm", "0.15").has("deepep_alone") and not dialect("megatron-lm", "0.16").has("deepep_alone")
    assert dialect("megatron-lm", "0.16").set("flex_backend", "deepep").words == ("--moe-flex-dispatcher-backend", "deepep")


def test_mindspeed_inherits_megatron_012_and_no_more() -> None:
    speaks = dialect("mindspeed-llm", "26.1")
    assert speaks.set("tp", 8).words == ("--tensor-model-parallel-size", "8")
    assert speaks.set("cp_type", "a2a").words == ("--context-parallel-algo", "ulysses_cp_algo")
    assert speaks.has("layout") and not dialect("mindspeed-llm", "26.0").has("layout")
    assert not speaks.has("output_gate")


def test_every_catalog_stack_of_a_known_framework_has_a_known_version_or_is_refused_in_words() -> None:
    for name in catalog_names("stacks"):
        stack = load_stack(name)
        if stack.framework not in FRAMEWORKS:
            continue
        try:
            assert dialect(stack.framework, stack.version).framework == stack.framework
        except InputError as refusal:  # software of the papers, which nobody launches today
            assert stack.version in str(refusal)
