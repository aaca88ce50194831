"""A day's load with bursts over replicas that an autoscaler adds and takes away: `python -m benchmarks.scale` prints
the table of benchmarks/results/scale.md, `--plot docs/guides/scale.png` draws the guide's picture.

What a replica does was measured (benchmarks/results/gpu.md, its lines of another day; overload.md; start and drain by
`python -m benchmarks.scale_measured`); what a cluster adds is assumed. Requests are a flow, not single ones, and
replicas have equal shares of it.
"""

from __future__ import annotations

import argparse
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STEP = 5
"""Seconds."""
DAY = 24 * 3600 // STEP
CAPACITY = 11_474.0
"""Requests a second of one GPU with ResNet-50 in fp16, 99 % of them within 60 ms."""
DEADLINE_SECONDS = 0.1
BATCHES = 2 * 64
"""Requests that run at a time; more wait."""
# Measured at 1, 64 and 256 requests in flight. Beyond its capacity a server answers as many requests as before within
# their deadline, and drops the others when their time is up.
BUSY = (0.0, 537 / CAPACITY, 7_064 / CAPACITY, 1.0, 1.1)
IN_FLIGHT = (0.0, 1.0, 64.0, 256.0, CAPACITY * DEADLINE_SECONDS)
LATENCY_MS = (1.8, 1.8, 8.1, 20.4, 1000 * DEADLINE_SECONDS)
DRAIN_SECONDS = 30
"""From SIGTERM to the end, with connected clients, by the flags of deploy/kustomize: an ending replica holds its GPU
for so long."""
STARTS = (5, 30, 300)
"""Seconds of a start: of a server whose image, model and compiled programs are there; with the time to place a pod;
with the time to add a node."""
SEEDS = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Policy:
    """The autoscaler's metric, which it divides by its target to get the number of replicas."""

    name: str
    signal: Callable[[float, int], float]
    """Takes the load of each ready replica, in capacities, and their number; returns the sum over the replicas."""
    targets: Sequence[float]
    window_seconds: int
    """The window over which the metric is averaged, as in Prometheus' rate; 0 for a current value."""
    colour: str


def sum_of(values: Sequence[float], lowered_by: float = 0.0) -> Callable[[float, int], float]:
    return lambda load, ready: ready * max(0.0, float(np.interp(load, BUSY, values)) - lowered_by)


POLICIES = (
    Policy("requests offered", lambda load, ready: ready * load, (0.4, 0.5, 0.6, 0.7, 0.8, 0.9), 60, "#9b2226"),
    Policy("requests in flight", sum_of(IN_FLIGHT), (32, 48, 64, 96, 128, 192, 256), 60, "#2a6f97"),
    Policy("utilisation", lambda load, ready: ready * min(load, 1.0), (0.4, 0.5, 0.6, 0.7, 0.8, 0.9), 60, "#d17a22"),
    Policy("requests that wait", sum_of(IN_FLIGHT, BATCHES), (4, 8, 16, 32, 64, 128), STEP, "#6a994e"),
    Policy("median latency", sum_of(LATENCY_MS), (4, 6, 8, 10, 12, 16), 60, "#8d5a97"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    late_share: float
    """Share of all requests."""
    over_ideal: float
    """GPU hours, divided by those of exactly as many GPUs as the load needs at each moment."""
    replicas: np.ndarray
    """Ready replicas."""


def load_of_a_day(seed: int, peak: float) -> np.ndarray:
    """Requests a second: a quiet night, a busy day, noise, and one burst an hour of 1.3 to 2 times the load, which
    begins suddenly and fades within five minutes."""
    random = np.random.default_rng(seed)
    hours = np.arange(DAY) * STEP / 3600
    level = 0.25 + 0.75 * np.sin(np.pi * hours / 24) ** 4
    noise, bursts = np.zeros(DAY), np.ones(DAY)
    for step in range(1, DAY):
        noise[step] = 0.92 * noise[step - 1] + random.normal(0, 0.02)
        bursts[step] = 1 + (bursts[step - 1] - 1) * math.exp(-STEP / 300)
        if random.random() < STEP / 3600:
            bursts[step] += random.uniform(0.3, 1.0)
    return peak * level * np.exp(noise) * bursts


def simulate(load: np.ndarray, policy: Policy, target: float, start_seconds: int) -> Outcome:
    """Simulate Kubernetes' rule every 15 s: the number of replicas is the metric's sum divided by the target, unless
    that is within a tenth of the current number; at most twice as many within the time of a start, a fifth less a
    minute after ten minutes of lower demand."""
    ready = math.ceil(load[0] / CAPACITY) + 1
    starting: deque[tuple[int, int]] = deque()  # when, how many
    leaving: deque[int] = deque([0] * (DRAIN_SECONDS // STEP), DRAIN_SECONDS // STEP)  # how many a step
    window: deque[float] = deque(maxlen=max(1, policy.window_seconds // STEP))
    wishes: deque[int] = deque(maxlen=600 // 15)
    grown, shrunk = (0, ready), (0, ready)
    late = hours = 0.0
    history = np.zeros(DAY)
    for step, offered in enumerate(load):
        while starting and starting[0][0] <= step:
            ready += starting.popleft()[1]
        late += max(0.0, offered - ready * CAPACITY)
        history[step] = ready
        wanted = ready + sum(count for _, count in starting)
        hours += wanted + sum(leaving)
        leaving.append(0)
        window.append(policy.signal(offered / CAPACITY / ready, ready))
        if step % (15 // STEP):
            continue
        demand = sum(window) / len(window) / target
        wish = max(2, math.ceil(demand)) if abs(demand / wanted - 1) > 0.1 else wanted
        wishes.append(wish)
        if step - grown[0] >= start_seconds // STEP:
            grown = (step, wanted)
        if step - shrunk[0] >= 60 // STEP:
            shrunk = (step, wanted)
        if wish > wanted:
            more = min(wish, 2 * grown[1]) - wanted
            if more > 0:
                starting.append((step + start_seconds // STEP, more))
        elif max(wishes) < wanted:
            # Replicas that start are not removed before they serve.
            kept = max(2, min(ready, max(*wishes, math.ceil(0.8 * shrunk[1]))))
            leaving[-1], ready = ready - kept, kept
    ideal = np.ceil(load / CAPACITY).sum()
    return Outcome(float(late / load.sum()), float(hours / ideal), history)


def mean_outcome(policy: Policy, target: float, gpus: int, start_seconds: int) -> tuple[float, float]:
    """Share late, GPU hours by the ideal's."""
    outcomes = [simulate(load_of_a_day(seed, gpus * CAPACITY), policy, target, start_seconds) for seed in SEEDS]
    return float(np.mean([one.late_share for one in outcomes])), float(np.mean([one.over_ideal for one in outcomes]))


def fixed(gpus: int, peak_gpus: int) -> tuple[float, float]:
    """The same for a fixed number of GPUs."""
    loads = [load_of_a_day(seed, peak_gpus * CAPACITY) for seed in SEEDS]
    late = [np.maximum(0, load - gpus * CAPACITY).sum() / load.sum() for load in loads]
    return float(np.mean(late)), float(np.mean([gpus * DAY / np.ceil(load / CAPACITY).sum() for load in loads]))


def draw(file: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplot_mosaic([["day", "day"], ["30", "300"]])
    above = axes["day"]
    load = load_of_a_day(SEEDS[0], 1000 * CAPACITY)
    hours = np.arange(DAY) * STEP / 3600
    above.plot(hours, load / CAPACITY, color="black", linewidth=0.8, label="needed")
    for policy, target in ((POLICIES[1], 64), (POLICIES[0], 0.6)):
        replicas = simulate(load, policy, target, 30).replicas
        above.plot(hours, replicas, color=policy.colour, label=f"ready, by {policy.name}, target {target:g}")
    above.set(xlabel="hour of the day", ylabel="GPUs", xlim=(0, 24), title="A day of 1,000 GPUs, starts of 30 s")
    above.legend(frameon=False)
    for start in (30, 300):
        draw_policies(axes[str(start)], start)
    axes["30"].legend(frameon=False)
    figure.savefig(file, dpi=110)


def draw_policies(axes: Axes, start_seconds: int) -> None:
    for policy in POLICIES:
        points = [mean_outcome(policy, target, 1000, start_seconds) for target in policy.targets]
        axes.plot([x for _, x in points], [100 * y for y, _ in points], "o-", color=policy.colour, label=policy.name)
    points = [fixed(gpus, 1000) for gpus in range(500, 2001, 100)]
    axes.plot([x for _, x in points], [100 * y for y, _ in points], ":", color="grey", label="a fixed number")
    axes.set(xlabel="GPU hours / ideal", ylabel="% of requests late", yscale="log", xlim=(1, 4), ylim=(0.001, 30))
    axes.set_title(f"Targets of each policy, starts of {start_seconds} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, help="a PNG file")
    arguments = parser.parse_args()
    starts = " | ".join(f"starts of {start} s" for start in STARTS)
    print(f"Late, GPUs / ideal:\n\n| peak | scaled by | target | {starts} |\n|---|---|---|---|---|---|")
    for gpus in (8, 1000):
        for policy in POLICIES:
            for target in policy.targets:
                cells = [mean_outcome(policy, target, gpus, start) for start in STARTS]
                row = " | ".join(f"{100 * late:.2f} %, {over:.2f}" for late, over in cells)
                print(f"| {gpus} | {policy.name} | {target:g} | {row} |")
        for share in (1.0, 1.5, 2.0):
            late, over = fixed(round(share * gpus), gpus)
            print(f"| {gpus} | fixed | {round(share * gpus)} | {100 * late:.2f} %, {over:.2f} | | |")
    if arguments.plot:
        draw(arguments.plot)


if __name__ == "__main__":
    main()
