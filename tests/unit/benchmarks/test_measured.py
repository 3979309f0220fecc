"""The tables of README and docs/measurements.md show the figures of the results, losses included."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import table
from benchmarks.measured.render import BEGIN, END, Tables, put_into, render, render_short
from benchmarks.measured.rows import GGUF_SINCE, OPERATORS_SINCE, TableRow, at, claim, is_old, operators_of, predicted
from twostroke.errors import InvalidParameter
from twostroke.measure.report import BenchResult, load, save

ROOT = Path(__file__).parents[3]
QWEN, SMOLLM2 = "Qwen2.5-Coder-1.5B.Q4_K_M", "SmolLM2-135M-Instruct.Q4_1"
ONE, BATCH_32 = "decode, batch 1", "end to end, batch 32"


def _saved(folder: Path, name: str, results: dict[str, Any], **config: Any) -> BenchResult:
    machine = {"cpu": "Some CPU", "cores": 2}
    date, commit = "2026-01-02T03:04:05", "0123456789"
    result = BenchResult(
        bench=name,
        command="",
        config=config,
        workload={},
        results=results,
        commit=commit,
        dirty=False,
        date=date,
        hardware=machine,
    )
    save(result, folder)
    return result


def test_readme_has_the_tables_of_the_committed_results() -> None:
    """Run `make figures` after new results."""
    results = ROOT / "benchmarks/results"
    for path, tables in (("README.md", render_short(results)), ("docs/measurements.md", render(results))):
        page = (ROOT / path).read_text()
        assert put_into(page, tables, ROOT) == page


def test_the_short_table_has_a_line_for_each_comparison(tmp_path: Path) -> None:
    def figures(ratio: float) -> dict[str, Any]:
        return {"figures": {"prefill 512": {"median_tok_s": 90.0, "twostroke_to_this": ratio}}}

    _saved(
        tmp_path, "compare-x", {"engines": {"twostroke": figures(1.0), "vllm": figures(0.9), "llama.cpp": figures(2.0)}}
    )
    lines = render_short(tmp_path, (("a model", "compare-x"), ("another", "compare-y"))).splitlines()
    assert "| a model | - / 90.0 / - | - / 2.00x / - |  |  | - / **0.90x** / - | `0123456`, Some CPU† |" in lines
    assert "| another | not measured |  |  |  |  |  |" in lines


def test_a_row_shows_its_figures_and_one_without_a_result_says_so(tmp_path: Path) -> None:
    speed = {"what": "speed", "predicted": 2.0, "measured": 1.87}
    claims = [speed, {"what": "share", "predicted": None, "measured": 0.5}]
    _saved(tmp_path, "r", {"claims": claims, "deep": {"figure": 3}}, kernels="native amx")
    rows = (
        TableRow("fast", "r", (claim("speed", "{:.1f}x"), claim("share", "{:.0%}")), (predicted("speed", "{:.0f}"),)),
        TableRow("counts", "r", (at("deep", "figure", form="{}"),), is_counted=True),
        TableRow("later", "not-yet", (claim("speed"),)),
    )
    lines = render(tmp_path, Tables(rows, (), ())).splitlines()
    assert lines[2:5] == [
        "| fast | `r` | native amx | 2 | 1.9x / 50% | `0123456`, Some CPU† |",
        "| counts | `r` | (counted) |  | 3 | `0123456`, Some CPU |",
        "| later | `not-yet` |  |  | not measured |  |",
    ]
    assert lines[-3] == "- Some CPU, 2 cores: `0123456` of 2026-01-02"
    assert lines[-1].startswith("† Measured before the default operators last changed")


def test_a_figure_that_a_result_lacks_is_an_error(tmp_path: Path) -> None:
    _saved(tmp_path, "r", {"claims": [{"what": "speed", "predicted": None, "measured": 1.0}]})
    for figure, words in ((claim("sped"), "'speed'"), (at("claims", "x"), "has no claims / x")):
        with pytest.raises(InvalidParameter, match=words):
            render(tmp_path, Tables((TableRow("what", "r", (figure,)),), (), ()))


def test_a_loss_is_bold_and_a_peer_that_failed_has_no_figure(tmp_path: Path) -> None:
    def figures(tok_s: float, ratio: float) -> dict[str, Any]:
        return {"figures": {"prefill 512": {"median_tok_s": tok_s, "twostroke_to_this": ratio}}}

    about = {"about": {"startup": "model X, cpu, native avx2 kernels; 5 bytes"}}
    engines = {"twostroke": {**figures(90, 1.0), **about}, "llama.cpp": figures(45, 2.0), "vllm": figures(1000, 0.09)}
    _saved(tmp_path, "compare-x", {"engines": {**engines, "openvino": {"figures": {}}}})
    found = render(tmp_path, Tables((), (("a model", "compare-x"), ("another", "compare-y")), ()))
    assert (
        "| a model | prefill 512 | native avx2 | 90.0 | 45.0 (2.00x) |  |  | 1,000 (**0.09x**) | `0123456`, Some CPU† |"
        in found
    )
    assert "| another |  |  | not measured |  |  |  |  |  |" in found


def test_distances_of_ours_and_of_a_peer(tmp_path: Path) -> None:
    figures = {"mean_kl": 0.01, "max_kl": 1.5, "top1_agreement": 0.9, "perplexity": 8.0, "float32_perplexity": 7.9}
    worse = {"against_float32": {**figures, "mean_kl": 9.0}}
    _saved(
        tmp_path,
        "q",
        {"base": {"against_float32": figures}, "llama.cpp": {"against_float32": None}, "kv_cache_dtype=int4": worse},
    )
    _saved(tmp_path, "kv", {"kv_cache_dtype=int4": {"against_float32": {**figures, "mean_kl": 0.02}}})
    lines = render(tmp_path, Tables((), (), (("a model", ("q", "kv")),))).splitlines()
    assert "| a model | ours | 0.0100 | 1.50 | 90.0% | 8.000 | 7.900 | `0123456`, Some CPU |" in lines
    assert "|  | llama.cpp |  |  |  |  |  | `0123456`, Some CPU |" in lines
    again = [line for line in lines if "KV in int4" in line]
    assert again == ["|  | ours, KV in int4 | 0.0200 | 1.50 | 90.0% | 8.000 | 7.900 | `0123456`, Some CPU |"]


@pytest.mark.parametrize(
    ("config", "operators"),
    [
        ({"kernels": "native avx2"}, "native avx2"),
        ({"load": {"model": "x"}}, "torch"),
        ({"load": {"kernels": "auto"}}, "native"),
        ({"load": {"kernels": "reference"}}, "torch"),
        ({"model": "embedded"}, "not recorded"),
    ],
    ids=str,
)
def test_operators_are_those_that_the_result_names(tmp_path: Path, config: dict[str, Any], operators: str) -> None:
    assert operators_of(_saved(tmp_path, "r", {}, **config)) == operators


def test_the_level_of_the_kernels_is_what_the_engine_said_at_its_start(tmp_path: Path) -> None:
    said = ["model X, bfloat16, cpu, 2 threads, native avx512 kernels; 5 bytes", "kv cache"]
    assert operators_of(_saved(tmp_path, "offline", {"startup": said}, load={"kernels": "auto"})) == "native avx512"
    engines = {"twostroke": {"about": {"startup": said[0]}}, "vllm": {"about": {}}}
    assert operators_of(_saved(tmp_path, "compare", {"engines": engines}, precision="bf16")) == "native avx512"


@pytest.mark.parametrize(
    ("date", "kernels", "old"),
    [
        ("2026-11-20T22:36:53+00:00", "native avx2", True),
        ("2099-11-25T11:02:09+00:00", "native avx2", False),
        ("2099-11-25T11:02:09+00:00", "torch", True),
    ],
    ids=str,
)
def test_old_is_what_todays_operators_did_not_measure(tmp_path: Path, date: str, kernels: str, old: bool) -> None:
    assert is_old(replace(_saved(tmp_path, "r", {}, kernels=kernels), date=date)) == old


@pytest.mark.parametrize(
    ("config", "old"),
    [
        ({"model": "x.Q4_K_M.gguf"}, True),
        ({"load": {"model": "x.Q4_K_M.gguf", "kernels": "auto"}}, True),
        ({"model": "qwen3"}, False),
        ({"load": {"model": "qwen3", "kernels": "auto"}}, False),
    ],
    ids=str,
)
def test_gguf_files_have_operators_of_another_date(tmp_path: Path, config: dict[str, Any], old: bool) -> None:
    assert OPERATORS_SINCE < GGUF_SINCE
    assert is_old(replace(_saved(tmp_path, "r", {}, **config), date=OPERATORS_SINCE)) == old


@pytest.mark.parametrize(("name", "since"), [("OPERATORS_SINCE", OPERATORS_SINCE), ("GGUF_SINCE", GGUF_SINCE)])
def test_the_commit_of_each_date_changed_operators_within_a_day(name: str, since: str) -> None:
    text = (ROOT / "benchmarks/measured/rows.py").read_text()
    commit = re.search(rf"^{name} = .*?\(commit ([0-9a-f]{{8}})\)", text, re.MULTILINE | re.DOTALL)
    assert commit is not None
    command = ["git", "show", "--name-only", "--format=%cI", commit[1]]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if shown.returncode:
        pytest.skip(f"this checkout has no commit {commit[1]}")
    date, *files = shown.stdout.split()
    apart = datetime.fromisoformat(date) - datetime.fromisoformat(since)
    assert timedelta(0) <= apart < timedelta(days=1)
    assert any(file.startswith("csrc/") for file in files)


def test_a_page_without_marks_is_refused_and_the_rest_of_one_is_left() -> None:
    with pytest.raises(InvalidParameter, match=r"page='some\.md': has no lines"):
        put_into("text", "tables", Path("some.md"))
    page = put_into(f"before\n{BEGIN}\nold\n{END}\nafter\n", "new", Path("some.md"))
    assert page == f"before\n{BEGIN}\n\nnew\n{END}\nafter\n"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"write": True, "check": True}, "check=true: cannot be given beside --write"),
        ({"page": Path("README.md")}, "page='README.md': changes nothing by itself. Give --write or --check"),
        ({"results": Path("nowhere")}, "results='nowhere': is no folder of results"),
        ({"results": ROOT / "src"}, "is no folder of results"),
        ({"check": True, "page": Path("nowhere.md")}, r"page='nowhere\.md': cannot be read \(No such file"),
        ({"check": True, "page": ROOT / "CHANGELOG.md"}, r"page='.*CHANGELOG\.md': has no lines"),
    ],
    ids=str,
)
def test_a_table_that_cannot_be_made_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidParameter, match=words):
        table(**{"results": ROOT / "benchmarks/results", **given})


def test_a_page_with_other_tables_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, results = tmp_path / "page.md", ROOT / "benchmarks/results"
    page.write_text(f"{BEGIN}\nold\n{END}\n")
    with pytest.raises(SystemExit) as exited:
        table(results=results, page=page, check=True)
    assert exited.value.code == 1
    assert f"{page} has other tables; run `make figures`" in capsys.readouterr().err
    table(results=results, page=page, write=True)
    table(results=results, page=page, check=True)


@pytest.mark.parametrize("name", ["r1", "engine-time"])
def test_the_section_about_noise_names_the_commit_and_the_processor_of_a_result(name: str) -> None:
    page = (ROOT / "benchmarks/README.md").read_text()
    section = " ".join(page[page.index("## Noise") :].split("\n## ")[0].split())
    result = load(ROOT / "benchmarks/results" / f"{name}.json")
    sentence = section[section.index(f"`{name}`") :].split(". ")[0]
    assert f"commit `{result.commit[:7]}`, {result.hardware['cpu']}" in sentence


def test_the_section_about_noise_tells_the_engines_own_time() -> None:
    page = " ".join((ROOT / "benchmarks/README.md").read_text().split())
    own = load(ROOT / "benchmarks/results/engine-time.json").results["own_ms"]
    before = load(ROOT / "benchmarks/results/engine-time-before.json").results["own_ms"]
    assert f"{own['1']['p50']:.2f} ms at one request and {own['64']['p50']:.2f} ms at 64." in page
    assert f"{before['1']['p50']:.2f} and {before['64']['p50']:.2f} ms." in page


def cells_behind(heading: str) -> list[list[str]]:
    """Return the rows of the first table behind a heading of benchmarks/README.md, as plain texts."""
    page = (ROOT / "benchmarks/README.md").read_text()
    section = page[page.index(heading) :]
    table = section[section.index("\n|") :].split("\n\n")[0].strip().splitlines()
    return [[cell.strip(" *`") for cell in line.strip("|").split("|")] for line in table[2:]]


def is_rounded(told: str, figure: float) -> bool:
    """Return whether a text is a figure to as many digits as it shows."""
    number = told.replace(",", "")
    return abs(float(number) - figure) <= 0.5001 * 10.0 ** -len(number.partition(".")[2])


def test_the_table_of_the_peers_tells_their_results() -> None:
    figures = ("prefill 512", "decode, batch 1", "decode, batch 8", "decode, batch 32", "end to end, batch 32")
    engines: dict[str, Any] = {}
    num_told = 0
    for name, peer, *told in cells_behind("## Beside the peers, so far"):
        if name:
            engines = load(ROOT / "benchmarks/results" / f"{name}.json").results["engines"]
        found = engines[peer.lower() or "twostroke"]["figures"]
        for figure, text in zip(figures, told, strict=True):
            measured = found[figure]["twostroke_to_this" if peer else "median_tok_s"]
            assert is_rounded(text, measured), (name, peer, figure, text, measured)
            num_told += 1
    assert num_told == 75


def test_the_table_of_the_gate_tells_its_result() -> None:
    gate = {
        (row["method"], row["set_acceptance"], row["batch"]): row["speedup"]
        for row in load(ROOT / "benchmarks/results/spec-gate.json").results["gate"]
    }
    names = {"n-gram": "ngram", "early exit": "early_exit", "draft model": "draft_model"}
    shares = {"none stands": 0.0, "all stand": 1.0}
    rows = cells_behind("Under the gate (`auto`) against no drafts at all")
    for drafts, *told in rows:
        method, _, given = drafts.partition(", ")
        share = shares[given] if given in shares else float(given) if given else None
        for batch, text in zip((1, 4, 16, 64), told, strict=True):
            assert is_rounded(text.split(" (")[0], gate[names.get(method, method.lower()), share, batch]), (
                drafts,
                batch,
            )
    assert len(rows) == 10


def test_negative_results_quote_the_gain_of_the_prefix_cache() -> None:
    claims = load(ROOT / "benchmarks/results/r10.json").results["claims"]
    (gain,) = (c["measured"] for c in claims if c["what"].startswith("conversation: mean TTFT without / with"))
    assert f"(`r10`: {gain:.2f}x)" in (ROOT / "docs/negative-results.md").read_text()


@pytest.mark.parametrize(
    ("row", "of"),
    [
        ("| Qwen2.5-Coder, decode at batch 1: 1.25 of llama.cpp | {} |", (QWEN, "llama.cpp", ONE)),
        ("| the same: 1.1 of ik_llama.cpp | {} |", (QWEN, "ik_llama.cpp", ONE)),
        ("| prefill of 512: 2.4 of llama.cpp | {}, ", (QWEN, "llama.cpp", "prefill 512")),
        ("| batch 8 end to end: 2.8 | {} of llama.cpp, ", (QWEN, "llama.cpp", "end to end, batch 8")),
        ("| batch 32 end to end: 2.6 | {} of llama.cpp, ", (QWEN, "llama.cpp", BATCH_32)),
        ("| SmolLM2, decode: 1.8 of llama.cpp, 1.1 of ik_llama.cpp | {}, ", (SMOLLM2, "llama.cpp", ONE)),
        ("| prefill 4.5, batch 8 and 32 end to end 3.5 | {}, ", (SMOLLM2, "llama.cpp", "prefill 512")),
        ("| Gemma 3 270M: no goal | decode {} of llama.cpp, ", ("gemma-3-270m.Q4_K_M", "llama.cpp", ONE)),
        ("vLLM 1.2 | OpenVINO {} (int8), ", ("qwen3-int8", "openvino", "prefill 512")),
        ("| batch 32 end to end: 1.8 of OpenVINO, 1.25 of vLLM | {} and ", ("qwen3-int8", "openvino", BATCH_32)),
        ("(int8, int4); {} | missed; met |", ("qwen3-bf16", "vllm", BATCH_32)),
    ],
)
def test_negative_results_quote_todays_comparisons(row: str, of: tuple[str, str, str]) -> None:
    name, peer, figure = of
    engines = load(ROOT / "benchmarks/results" / f"compare-avx512-{name}.json").results["engines"]
    ratio = engines[peer]["figures"][figure]["twostroke_to_this"]
    assert row.format(f"{ratio:.2f}") in (ROOT / "docs/negative-results.md").read_text()


def test_negative_results_quote_what_serve_was_beside_llama_server() -> None:
    ratio = load(ROOT / f"benchmarks/results/servers-{SMOLLM2}.gguf.json").results["ratios"]["llama-server"]
    page = (ROOT / "docs/negative-results.md").read_text()
    assert f"| `serve`, 32 streams: 4.5 times llama-server | {ratio:.2f} | met |" in page
