"""Two profiles in simulated time: one for people who wait, one for work that has all night."""

from __future__ import annotations

from factories import make_arrival, make_kv
from twostroke.config.engine import EngineConfig
from twostroke.config.presets import Preset
from twostroke.cost.step_cost import Layers
from twostroke.cost.step_model import Curve, StepTimeModel
from twostroke.measure.report import percentiles
from twostroke.scheduler.scheduler import Scheduler
from twostroke.served_run import Run
from twostroke.simulation.requests import SimulatedRequest
from twostroke.simulation.simulate import Simulation

MACHINE = StepTimeModel(
    layers=Curve((1, 256, 2048), (0.020, 0.036, 0.280)), head=Curve((1, 256), (0.001, 0.004)), pair_s=0.0, seen_s=0.0
)
"""One that waits for its weights: 256 tokens take hardly longer than one."""
LAYERS = Layers([None] * 4)


def served(preset: Preset) -> Run:
    """Return a run of 400 requests at once, one in eight with a long prompt."""
    config = EngineConfig.from_keywords(preset=preset).scheduler
    kv = make_kv(20_000, block_size=16, max_model_len=2048, enable_prefix_caching=False)
    scheduler = Scheduler(config, kv, max_model_len=2048, step_times=MACHINE, layers=LAYERS)
    requests = [SimulatedRequest(make_arrival(f"{i}", 1500 if i % 8 == 0 else 30, 80), 80) for i in range(400)]
    return Simulation(scheduler, LAYERS, MACHINE, block_size=16, hashes_blocks=False).run(requests)


def test_the_presets_are_two_points_of_the_same_machine() -> None:
    """The one keeps its time between tokens, the other makes a quarter more of them in the same time."""
    interactive, batch = served("interactive"), served("batch")
    gaps = {
        name: percentiles([gap for request in run.requests for gap in request.times.itl_s])["p99"]
        for name, run in (("interactive", interactive), ("batch", batch))
    }
    assert gaps["interactive"] <= 0.1
    assert gaps["batch"] > 2 * gaps["interactive"]
    rates = [run.num_output_tokens / run.duration_s for run in (interactive, batch)]
    assert rates[1] > 1.25 * rates[0]
