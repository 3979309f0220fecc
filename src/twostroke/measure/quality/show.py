"""Printed tables of `bench quality`."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from twostroke.measure.quality.run import Quality, Row
from twostroke.tables import print_table


def print_quality(quality: Quality, console: Console | None = None) -> None:
    """Print perplexity and retrieval, then the distances from float32."""
    console = console or Console()
    if quality.rows[0].found:
        console.print(
            "tokens of a passage that are the first choice: unseen, and seen so many tokens before", style="dim"
        )
    print_table(_scores(quality.rows), console)
    if any(row.distance is not None for row in quality.rows):
        console.print("\nbeside float32 arithmetic on the same weights", style="dim")
        print_table(_distances(quality), console)
    for peer in quality.peers:
        if peer.failure is not None:
            console.print(f"[bold red]{peer.name}[/]: {peer.failure}", highlight=False)


def _scores(rows: tuple[Row, ...]) -> Table:
    distances = list(rows[0].found)
    names = [f"@{distance}" if distance else "unseen" for distance in distances]
    table = _table("configuration", "perplexity", "bits/byte", "rise", "limit", *names)
    for row in rows:
        limit = "" if row.most_rise is None else f"{row.most_rise:.1%}{'' if row.holds else ' [bold red]FAILS[/]'}"
        cells = [f"{row.score.per_token:.4f}", f"{row.score.bits_per_byte:.4f}", f"{row.rise:+.2%}", limit]
        table.add_row(_named(row), *cells, *(f"{row.found[d]:.0%}" for d in distances))
    return table


def _distances(quality: Quality) -> Table:
    table = _table("configuration", "positions", "mean KL", "max KL", "same top-1", "perplexity", "float32", "rise")
    named = [(_named(row), row.distance) for row in quality.rows]
    for name, distance in [*named, *((peer.name, peer.distance) for peer in quality.peers)]:
        if distance is None:
            continue
        table.add_row(
            name,
            f"{distance.num_positions:,}",
            f"{distance.mean_kl:.5f}",
            f"{distance.max_kl:.3f}",
            f"{distance.top1_agreement:.2%}",
            f"{distance.perplexity:.4f}",
            f"{distance.float32_perplexity:.4f}",
            f"{distance.perplexity / distance.float32_perplexity - 1:+.2%}",
        )
    return table


def _named(row: Row) -> str:
    return row.configuration or "as it is"


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table
