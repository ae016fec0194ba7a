"""Whether a scenario breaks a law, and which."""

import logging
import signal

import torch

from tests.simulation.scenario import Scenario, make_scenario
from tests.simulation.world import simulate


def failure_of(scenario: Scenario) -> str | None:
    """What goes wrong in a scenario: the error's name and what it says, or None."""
    try:
        simulate(scenario)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def kind_of(failure: str | None) -> str | None:
    """A failure without its numbers: two of one kind are taken for the same fault."""
    return None if failure is None else "".join(c for c in failure.split(":")[1][:24] if not c.isdigit()).strip()


def run_seed(seed: int) -> tuple[int, str | None]:
    return seed, failure_of(make_scenario(seed))


def quiet() -> None:
    """What every process of a run does first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
