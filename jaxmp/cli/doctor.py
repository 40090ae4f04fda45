"""``jaxmp doctor``."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from jaxmp.cli.printing import print_json, print_pairs


def run(options: argparse.Namespace) -> int:
    """Check this machine: fast dtypes, the policy to use, training, and problems.

    The exit code is 0 if a mixed-precision training step ran on the device and gave the right numbers, otherwise 1.
    """
    from jaxmp.cli.diagnosis import diagnose

    report = diagnose()
    if options.json:
        print_json(dataclasses.asdict(report))
        return 0 if report.trains else 1
    rows = [("Device", "none: JAX does not start")]
    if report.hardware is not None:
        rows = _describe(report.hardware, report.devices)
    rows.append(("Training", report.training))
    rows.append(("Versions", ", ".join(f"{name} {version or 'missing'}" for name, version in report.versions.items())))
    for number, finding in enumerate(report.findings, 1):
        rows.append((f"To fix, {number}", f"{finding.problem}\n→ {finding.remedy}"))
    if not report.findings:
        rows.append(("To fix", "nothing"))
    print_pairs(rows)
    return 0 if report.trains else 1


def _describe(hardware: Any, devices: int) -> list[tuple[str, str]]:
    rates = [f"{dtype} {rate:g} TFLOP/s" for dtype, rate in hardware.peak_tflops.items()]
    if hardware.peak_bandwidth is not None:
        rates.append(f"memory {hardware.peak_bandwidth / 1e9:g} GB/s")
    return [
        ("Device", f"{hardware.name} on platform {hardware.platform}; {devices} in this process"),
        ("Compute capability", hardware.compute_capability or "none: not an NVIDIA GPU"),
        ("Tensor cores", ", ".join(hardware.tensor_cores) or "none that jaxmp knows of"),
        ("Peak rates", ", ".join(rates) or "not known"),
        ("Policy", f"{hardware.recommended_policy}: {hardware.reason}"),
    ]
