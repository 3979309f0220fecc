"""The composition of the commands. Nothing heavy is imported before one of them runs."""

from __future__ import annotations

from cyclopts import App

from twostroke.cli.numbers import give_preset, read_numbers
from twostroke.version import __version__

app = App(
    name="twostroke",
    help="An LLM inference engine that shows what it does: prefill and decode, their memory and their schedule.",
    version=__version__,
    config=(give_preset, read_numbers),
)
app.command("twostroke.cli.generate:generate")
app.command("twostroke.cli.chat:chat")
app.command("twostroke.cli.serve:serve")
app.command("twostroke.cli.run_batch:run_batch", name="run-batch")
app.command("twostroke.cli.models:models")
app.command("twostroke.cli.quantize:quantize")
app.command("twostroke.cli.train_medusa:train_medusa", name="train-medusa")
app.command("twostroke.cli.calibrate:calibrate")
app.command("twostroke.cli.plan:plan")
app.command("twostroke.cli.explain:explain")
app.command("twostroke.cli.view:view")
app.command("twostroke.cli.replay:replay")
app.command("twostroke.cli.doctor:doctor")
app.command("twostroke.cli.bench:app", name="bench")
