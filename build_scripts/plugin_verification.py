"""Writes the verification table of docs/plugin.md from the last run of tests/trt.

``pytest tests/trt`` leaves the outcome of each test in build/trt-results.json; this script turns
them into one row for each claim. ``--check`` only says whether the page is up to date.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs/plugin.md"
RESULTS = REPOSITORY / "build/trt-results.json"
BEGIN, END = "<!-- verification: begin -->", "<!-- verification: end -->"


@dataclass(frozen=True)
class Claim:
    """What is claimed, on what, and the tests (patterns of their names) that show it."""

    text: str
    ran_on: str
    tests: tuple[str, ...]


def in_registry(version: str) -> tuple[Claim, ...]:
    ran_on = f"TensorRT dispatch {version}, CPU"
    sanitized = f"test_sanitized_plugin_over_host_memory[[]{version}-"
    kernels = f"test_plugin_with_its_kernels[[]{version}-"

    def both(*scenarios: str) -> tuple[str, ...]:
        return tuple(f"{start}{one}]" for start in (sanitized, kernels) for one in scenarios)

    return (
        Claim("Loads, lists its creator and its fields", ran_on, both("listed")),
        Claim(
            "Takes good fields; refuses bad ones with value, rule and remedy",
            ran_on,
            both("good_fields", "bad_fields"),
        ),
        Claim(
            "Every virtual function: aliases, tactics, shapes, types, formats, workspace",
            ran_on,
            both(
                "interfaces", "aliases", "tactics", "outputs", "formats", "shape_rules", "workspace"
            ),
        ),
        Claim("Clone and serialize round trips", ran_on, both("round_trips")),
        Claim(
            "`enqueue` over CPU kernels against a dictionary of positions, 40 steps with rollback; "
            "trees; refusals (AddressSanitizer, UBSan)",
            ran_on,
            tuple(
                f"{sanitized}{one}]"
                for one in (
                    "steps_agree_with_oracle",
                    "tree_rows_see_ancestors_only",
                    "enqueue_refusals",
                )
            ),
        ),
    )


RTX = "TensorRT-RTX 1.7.1.116, ahead of time for SM120, CPU"
CLAIMS = (
    Claim(
        "Binary interface of the declarations equals the checked-in table",
        "compiler",
        ("test_declarations_have_tensorrts_binary_interface",),
    ),
    Claim(
        "Two exported symbols; nothing of TensorRT imported; system libraries only",
        "compiler",
        (
            "test_library_exports_two_symbols",
            "test_library_asks_nothing_of_tensorrt",
            "test_library_links_the_system_and_nothing_else",
        ),
    ),
    *in_registry("10.16.1.11"),
    *in_registry("11.4.0.106"),
    Claim(
        "A graph with the plugin builds: bf16, fp16, fp32, fp8 ring; dynamic and static shapes; "
        "trees; no inserted copy",
        RTX,
        ("test_graph_builds_with_*", "test_ring_that_is_updated_twice_*"),
    ),
    Claim(
        "Three draft steps in one engine share a ring, without a copy",
        RTX,
        ("test_three_steps_share_one_ring_without_a_copy",),
    ),
    Claim(
        "Call counts and scratch memory",
        RTX,
        ("test_builder_asks_everything_it_should", "test_scratch_memory_is_the_plans"),
    ),
    Claim(
        "Named errors: types, preview flag, alias, fields, ring shape",
        RTX,
        (
            "test_unsupported_types_are_named*",
            "test_missing_preview_flag_is_named",
            "test_wrong_alias_is_named",
            "test_bad_fields_stop_the_parser*",
            "test_ring_of_another_capacity_is_refused",
        ),
    ),
    Claim(
        "An engine built and deserialized by TensorRT: `enqueue` and CUDA-graph replay against the "
        "CPU kernels",
        "TensorRT SDK, GPU",
        ("test_engine_agrees_with_cpu_kernels",),
    ),
)


def outcome(claim: Claim, results: dict[str, str]) -> str:
    """``verified`` needs every test of the claim to have run and passed."""
    found: list[str] = []
    for pattern in claim.tests:
        matching = [result for name, result in results.items() if fnmatch(name, pattern)]
        found += matching or ["not run"]
    if all(result == "passed" for result in found):
        return f"verified ({len(found)} test{'s' if len(found) > 1 else ''})"
    worst = sorted({result for result in found if result != "passed"})
    return "not verified here" if worst == ["skipped"] else ", ".join(worst)


def table(results: dict[str, str]) -> str:
    rows = [f"| {one.text} | {one.ran_on} | {outcome(one, results)} |" for one in CLAIMS]
    return "\n".join(["| claim | on | result |", "|---|---|---|", *rows])


def page_with(table_text: str, page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"{PAGE} has no {BEGIN} ... {END}: put the two marks back")
    return f"{before}{BEGIN}\n{table_text}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when stale")
    only_check = parser.parse_args().check
    if not RESULTS.exists():
        print(f"{RESULTS} is missing: run pytest tests/trt first", file=sys.stderr)
        return 1
    page = PAGE.read_text()
    written = page_with(table(json.loads(RESULTS.read_text())), page)
    if only_check and written != page:
        print(f"{PAGE} is stale: run {Path(__file__).name}", file=sys.stderr)
        return 1
    if not only_check:
        PAGE.write_text(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
