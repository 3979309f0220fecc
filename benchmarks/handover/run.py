"""`python -m benchmarks handover`: speed of a prompt's KV from one process to another, by each transport.

No model is needed: the blocks have Qwen3-0.6B's shape; the processes, leases, frames and copies are the server's. Each
size is transferred in two ways, alternating: after all of it is complete, and layer by layer during a prefill that
takes as long as the transfer. For comparison, one thread copies the same blocks inside one process; no transport by
shared memory can be faster.
"""

from __future__ import annotations

import contextlib
import mmap
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from tqdm import tqdm

from benchmarks.handover.link import link
from benchmarks.handover.pair import LAYER, LAYOUT, Handover, Pair, formula_bytes, num_blocks_for, pair
from twostroke.config.checks import check_choice, check_int, check_number
from twostroke.errors import InvalidParameter
from twostroke.kv_transfer.address import Address
from twostroke.kv_transfer.nixl_reads import check_nixl
from twostroke.measure.report import DEFAULT_FOLDER, BenchResult, check_folder, median, record
from twostroke.tables import plain_table, print_table


class Copying:
    """Two pools of one process, all of whose pages are mapped.

    Args:
        num_blocks: to copy each time; those of one pool end up in the other in reverse order.
    """

    def __init__(self, num_blocks: int) -> None:
        self._pairs = list(zip(_pool(num_blocks)[::-1], _pool(num_blocks), strict=True))
        self.seconds()  # the first copy has page faults

    def seconds(self) -> float:
        """Copy the blocks once; return the seconds."""
        began_s = time.perf_counter()
        for ours, theirs in self._pairs:
            ours[:] = theirs
        return time.perf_counter() - began_s


def _pool(num_blocks: int) -> NDArray[np.uint8]:
    pages = mmap.mmap(-1, num_blocks * LAYOUT.bytes_per_block, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    for at in range(0, len(pages), mmap.PAGESIZE):
        pages[at] = 1
    return np.frombuffer(pages, np.uint8).reshape(num_blocks, -1)


TRANSPORTS = ("shm", "tcp")
NIXL = "nixl"
"""Transport that is an optional extra, so it is measured on request only."""
LINK = "link"
"""TCP over a link of limited rate."""
MEGABYTE = 1_000_000
_MAX_MEGABYTES = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverOptions:
    """Transfers to measure, and the result's place."""

    megabytes: tuple[int, ...] = (33, 256)
    """Size of each hand-over, in millions of bytes, rounded up to whole blocks. Can be repeated."""
    transports: tuple[str, ...] = TRANSPORTS
    """Transports: shm is memory that both processes map; tcp goes over the loopback; nixl is read by NIXL in the way
    that it finds best (UCX_TLS names others). Can be repeated."""
    netns: bool = False
    """Measure also TCP between two network namespaces with a link between them; needs root, and Linux's ip and tc."""
    link_gbit_per_s: float = 1.0
    """Rate of that link, headers included."""
    repeats: int = 9
    """Repetitions of each way, alternating; results are medians."""
    name: str = "handover"
    """Name of the written file."""
    results: Path = DEFAULT_FOLDER
    """Folder for the result."""

    def __post_init__(self) -> None:
        for transport in self.transports:
            check_choice("transports", transport, (*TRANSPORTS, NIXL))
        for megabytes in self.megabytes:
            check_int("megabytes", megabytes, 1, _MAX_MEGABYTES)
        check_number("link_gbit_per_s", self.link_gbit_per_s, 0.01, 100, "from 0.01 to 100")
        check_int("repeats", self.repeats, 1)
        if not (self.megabytes and (self.transports or self.netns)):
            raise InvalidParameter("transports", self.transports, "nothing is left to measure", "Name one, or --netns.")


def run_handover(options: HandoverOptions) -> BenchResult:
    """Measure all transfers, save and return the result.

    Raises:
        SetupError: no link between namespaces can be made here; NIXL is not installed; a hand-over failed, or changed
            the bytes.
    """
    check_folder(options.results)
    if NIXL in options.transports:
        check_nixl()
    rows: list[dict[str, Any]] = []
    for transport in (*options.transports, *((LINK,) if options.netns else ())):
        for megabytes in tqdm(options.megabytes, desc=transport, leave=False, disable=None):
            with _pair(transport, megabytes * MEGABYTE, options.link_gbit_per_s) as both:
                found = _measure(both, num_blocks_for(megabytes * MEGABYTE), options.repeats)
            rows.append({"transport": transport, "megabytes": megabytes, **found})
            if transport == LINK:
                rows[-1]["share_of_link"] = rows[-1]["gb_per_s"] * 8 / options.link_gbit_per_s
    return record(
        "python -m benchmarks handover",
        options,
        workload={
            "layers": len(LAYOUT.groups[0].layer_ids),
            "kv_heads": LAYER.num_kv_heads,
            "head_dim": LAYER.head_dim,
            "kv_format": LAYOUT.kv_format,
            "block_size": LAYOUT.block_size,
            "bytes_per_token": LAYOUT.bytes_per_token,
            "blocks": "scattered over both pools",
        },
        results={"handovers": rows},
        warmup=1,
        repeats=options.repeats,
    )


@contextlib.contextmanager
def _pair(transport: str, num_bytes: int, gbit_per_s: float) -> Generator[Pair]:
    with contextlib.ExitStack() as made:
        prefixes: tuple[Sequence[str], Sequence[str]] = ((), ())
        if transport == LINK:
            lender, borrower = made.enter_context(link(gbit_per_s))
            address, prefixes = Address(host=lender.address), (lender.prefix, borrower.prefix)
        elif transport == "shm":
            folder = made.enter_context(tempfile.TemporaryDirectory(prefix="twostroke-"))
            address = Address(path=str(Path(folder) / "kv"))
        else:
            address = Address(host="127.0.0.1", by_nixl=transport == NIXL)
        yield made.enter_context(pair(address, num_bytes, prefixes))


def _measure(both: Pair, num_blocks: int, repeats: int) -> dict[str, Any]:
    """Measure whole and layer-by-layer transfers alternately, so that noise affects both."""
    first = both.hand_over()
    wholes, layered, ratios, copies_s = list[Handover](), list[Handover](), list[float](), list[float]()
    copying = Copying(num_blocks)
    for _ in range(repeats):
        copies_s.append(copying.seconds())
        wholes.append(both.hand_over())
        layered.append(both.hand_over(wholes[-1].transfer_s))
        ratios.append(layered[-1].total_s / max(layered[-1].prefill_s, wholes[-1].transfer_s))
    transfer_s = median([whole.transfer_s for whole in wholes])
    num_bytes = {handover.num_bytes for handover in (first, *wholes, *layered)}
    return {
        "formula_bytes": formula_bytes(num_blocks),
        "bytes": max(num_bytes),
        "is_exact": num_bytes == {formula_bytes(num_blocks)},
        "first_ms": first.transfer_s * 1000,
        "ms": transfer_s * 1000,
        "ms_from": min(whole.transfer_s for whole in wholes) * 1000,
        "ms_to": max(whole.transfer_s for whole in wholes) * 1000,
        "gb_per_s": formula_bytes(num_blocks) / transfer_s / 1e9,
        "share_of_one_copy": median(
            [copy_s / whole.transfer_s for copy_s, whole in zip(copies_s, wholes, strict=True)]
        ),
        "one_copy_gb_per_s": formula_bytes(num_blocks) / median(copies_s) / 1e9,
        "layerwise": {
            "prefill_ms": median([handover.prefill_s for handover in layered]) * 1000,
            "total_ms": median([handover.total_s for handover in layered]) * 1000,
            "ratio": median(ratios),
            "ratio_from": min(ratios),
            "ratio_to": max(ratios),
        },
    }


def print_handover(found: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the measurements."""
    figures = ("bytes", "exact", "first ms", "ms", "GB/s", "of one copy", "of link", "layer-wise")
    table = plain_table(("transport",), figures)
    for row in found["handovers"]:
        share, layerwise = row.get("share_of_link"), row["layerwise"]
        table.add_row(
            row["transport"],
            f"{row['bytes']:,}",
            "yes" if row["is_exact"] else f"no: {row['formula_bytes']:,}",
            f"{row['first_ms']:.1f}",
            f"{row['ms']:.1f}",
            f"{row['gb_per_s']:.3g}",
            f"{row['share_of_one_copy']:.0%}",
            "" if share is None else f"{share:.1%}",
            f"{layerwise['ratio']:.2f}",
        )
    console = console or Console()
    print_table(table, console)
    console.print("of one copy: of the rate at which one thread copies as much inside a process", highlight=False)
    console.print("layer-wise: from the prefill's begin, over the longer of prefill and transfer", highlight=False)
