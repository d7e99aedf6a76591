"""Fits the curves of profile.py to tables of measured kernels and writes them into the profile files.

    python -m paraplan.cost_models.kernel_fit MEASURED_DIR -o PROFILE_DIR

MEASURED_DIR holds gemm.csv, collectives.csv and moe_all_to_all.csv; PROFILE_DIR the YAML files whose documented sections
(attention, memory, scale-out, …) are kept. Numpy only; no random numbers, so that a run reproduces the shipped files.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from ..search_spaces.errors import InputError
from .collective_fit import collective_fits
from .kernel_tables import Device, devices, kernel_tables
from .log_fit import FloatArray, Parameter, Rows, chessboard, column, figures, fit_log, held_out
from .profile import FitError, GemmCurve, Profile, gemm_s

GEMM_DTYPES = {"bfloat16": "bf16", "fp8_block": "fp8", "fp8": "fp8_tensor", "nvfp4": "fp4"}


def fit_gemm(rows: Rows, peak_flops: float, source: str) -> tuple[GemmCurve, FitError]:
    """GEMM curve of one device and precision, and its error on the shapes held out.

    `rows` hold m, n, k and latency_us. Every second shape of the (m, n, k) grid, as on a chessboard, is held out for the
    error; the curve returned is fitted on all.
    """
    m, n, k, measured = (column(rows, name) for name in ("m", "n", "k", "latency_us"))
    measured = measured * 1e-6
    tile = Parameter(64.0, kernel_tables().half_tile.value, 1e5)
    bounds = [Parameter(0.8, 0.05, 1.0), tile, tile, tile, Parameter(3e-6, 1e-7, 1e-4)]

    def curve(x: FloatArray, low: FloatArray, high: FloatArray) -> GemmCurve:
        return GemmCurve.model_validate(figures(("e_max", "m0", "n0", "k0", "launch_s"), x, low, high, source))

    def fit(keep: NDArray[np.bool_]) -> GemmCurve:
        def predict(x: FloatArray) -> FloatArray:
            return gemm_s(curve(x, x, x), peak_flops, m[keep], n[keep], k[keep])

        estimate = fit_log(predict, measured[keep], bounds)
        return curve(estimate.value, estimate.low, estimate.high)

    fitted = chessboard(m, n, k)
    error = held_out(gemm_s(fit(fitted), peak_flops, m, n, k), measured, fitted, source)
    return fit(np.ones_like(fitted)), error


def fitted_sections(tables: Mapping[str, Rows], device: Device) -> tuple[dict[str, Any], dict[str, FitError]]:
    """What the tables say about a device: `gemm` and `collectives` sections in a profile's form, and errors by curve."""
    gemm: dict[str, Any] = {}
    errors: dict[str, FitError] = {}
    for dtype, precision in GEMM_DTYPES.items():
        rows = [r for r in tables["gemm"] if r["system"] == device.system and r["gemm_dtype"] == dtype]
        if rows and precision in device.peak_flops:
            source = f"fit: {device.system} {dtype} GEMMs, {kernel_tables().source}"
            curve, errors[f"gemm.{precision}"] = fit_gemm(rows, device.peak_flops[precision], source)
            gemm[precision] = curve.model_dump(mode="json")
    if not device.measured.same_links:
        return {"gemm": gemm}, errors
    collectives: dict[str, Any] = {"scale-up": {}, "scale-out": {}}
    for section, name, found in collective_fits(tables, device):
        collectives[section][name] = found.curve.model_dump(mode="json", exclude_none=True)
        errors[f"collectives.{section}.{name}"] = found.error
    return {"gemm": gemm, "collectives": collectives}, errors


def update_profile(path: Path, tables: Mapping[str, Rows], device: Device) -> Profile:
    """Replaces the fitted curves in a profile file, keeps its other sections, checks the whole and writes it in one piece."""
    data: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    sections, errors = fitted_sections(tables, device)
    known = data.get("gemm", {})
    data["gemm"] = {**known, **{name: {**curve, **_from_runs(known.get(name, {}))} for name, curve in sections["gemm"].items()}}
    for section, curves in sections.get("collectives", {}).items():
        data["collectives"][section] = {**data["collectives"].get(section, {}), **curves}
    data["provenance"]["errors"] = {key: error.model_dump(mode="json") for key, error in errors.items()}
    data = _rounded(data)
    profile = Profile.model_validate(data)
    _write_whole(path, _to_yaml(data, _header(path)))
    return profile


def _from_runs(curve: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of a curve that are not read off a table: what training runs with other kernels sustain stays."""
    return {name: figure for name, figure in curve.items() if not figure["source"].startswith("fit:")}


def read_tables(measured: Path) -> dict[str, Rows]:
    """The three kernel tables of a folder as rows of strings; InputError when one is missing."""
    tables: dict[str, Rows] = {}
    for name in ("gemm", "collectives", "moe_all_to_all"):
        path = measured / f"{name}.csv"
        if not path.is_file():
            raise InputError(f"{path}: not found; MEASURED_DIR must hold gemm.csv, collectives.csv and moe_all_to_all.csv.")
        with path.open(encoding="utf-8", newline="") as file:
            tables[name] = list(csv.DictReader(file))
    return tables


def main(arguments: Sequence[str] | None = None) -> int:
    """Refits every profile that the tables cover; returns the exit status (2: bad input)."""
    parser = argparse.ArgumentParser(prog="python -m paraplan.cost_models.kernel_fit", description=main.__doc__)
    parser.add_argument("measured_dir", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder with the profile files to update")
    options = parser.parse_args(arguments)
    try:
        tables = read_tables(options.measured_dir)
        for name, device in devices().items():
            path = options.output / f"{name}.yaml"
            if not path.is_file():
                raise InputError(f"{path}: not found; the documented sections of the profile must be there before fitting.")
            profile = update_profile(path, tables, device)
            for curve, error in profile.provenance.errors.items():
                print(f"{name:14s} {curve:38s} held out: median {error.held_out_median:.3f}  p90 {error.held_out_p90:.3f}")
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _rounded(value: Any) -> Any:
    """Four significant digits everywhere: rounding keeps low ≤ value ≤ high."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


class _ProfileDumper(yaml.SafeDumper):
    """Block style, but one line for each figure (a mapping with a source), in the order given; no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_mapping(dumper: yaml.SafeDumper, data: dict[str, Any]) -> yaml.nodes.MappingNode:
    return dumper.represent_mapping("tag:yaml.org,2002:map", data.items(), flow_style="source" in data or "data" in data)


_ProfileDumper.add_representer(dict, _represent_mapping)


def _to_yaml(data: dict[str, Any], header: str) -> str:
    return header + str(yaml.dump(data, Dumper=_ProfileDumper, sort_keys=False, width=10_000, allow_unicode=True))


def _header(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(line for line in lines if line.startswith("#"))


def _write_whole(path: Path, text: str) -> None:
    """Writes beside the file and renames, so that a reader never sees half of it."""
    fresh = path.with_name(f".{path.name}.tmp")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


if __name__ == "__main__":
    raise SystemExit(main())
